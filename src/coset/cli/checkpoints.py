"""The verbs that read and write checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.box import SIMPLE_HEAD
from rich.table import Table

from coset.cli.options import DEFAULTS, Common, MatchingFlags, OutputFlags
from coset.cli.output import complain, show, show_json
from coset.cli.symmetry import spaces as space_table
from coset.cli.symmetry import totals
from coset.errors import CosetError

if TYPE_CHECKING:
    from coset.alignment import Step
    from coset.checkpoint.operations import Written

BY_WEIGHTS = MatchingFlags()


def _spaces(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


@contextmanager
def _progress(common: Common, label: str) -> Iterator[tuple[Callable[[str, int, int], None], Callable[[int, int], None]]]:
    """Two callbacks, for matching and for writing, that draw one bar each on standard error; matching says in the first what it is at."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=common.quiet or not console.is_terminal, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def update(bar: str, words: str, done: int, total: int) -> None:
            if bar not in tasks:
                tasks[bar] = bars.add_task(words, total=total)
            bars.update(tasks[bar], description=words, completed=done, total=total)

        yield (
            (lambda what, done, total: update("matching", f"matching, {what}", done, total)),
            (lambda done, total: update("writing", label, done, total)),
        )


@contextmanager
def _resumable(flags: MatchingFlags) -> Iterator[None]:
    """Say after an interruption how to go on, if there is a state to go on from."""
    try:
        yield
    except KeyboardInterrupt:
        if flags.state is not None and flags.state.exists():
            complain("note", f"{flags.state} holds the state of learning: give the same command again to continue from there")
        raise


def _warn(notes: Sequence[str], common: Common) -> None:
    for note in () if common.quiet else notes:
        complain("warning", note)


def _report(written: Written, common: Common, **more: Any) -> None:
    _warn(written.notes, common)
    if common.json:
        show_json(
            {
                "output": str(written.path),
                "rounding": written.rounding,
                "notes": list(written.notes),
                **more,
                "distances": [{"layer": d.layer, "before": d.before, "after": d.after} for d in written.distances],
                **({"matching": dict(written.matching), "history": _history(written.history)} if written.matching else {}),
            }
        )
        return
    if written.distances:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in ("block", "distance before", "after"):
            table.add_column(name, justify="left" if name == "block" else "right")
        for d in written.distances:
            table.add_row("ends" if d.layer is None else f"layer {d.layer}", f"{d.before:.4g}", f"{d.after:.4g}")
        show(table)
    if written.history:
        first, best = written.history[0], min(written.history, key=lambda step: step.objective)
        show(
            f"Matched by {written.matching['matcher']}: objective {first.objective:.4g} ({first.name}) -> "
            f"{best.objective:.4g} ({best.name})."
        )
    if written.refit is not None:
        quality = written.refit
        show(
            f"Refitted: disagreement with the ends on held-out inputs {quality.before:.4g} before, {quality.after:.4g} after"
            f"{': WORSE than the plain mean.' if quality.worse else '.'} "
            "The output is not on the line between the models."
        )
    show(f"Written to {written.path}; relative rounding error {written.rounding:.2g}.")


def _history(steps: Sequence[Step]) -> list[dict[str, Any]]:
    return [{"step": step.name, "objective": step.objective} for step in steps]


def inspect(checkpoint: Path, /, *, legacy: bool = False, common: Common = DEFAULTS) -> None:
    """Architecture, positional encoding, symmetry account and file facts of a checkpoint. Reads headers only.

    Parameters
    ----------
    checkpoint
        Folder with config.json and safetensors.
    legacy
        Accept pytorch_model.bin.
    """
    from coset.checkpoint.inspection import facts
    from coset.checkpoint.model import load
    from coset.symmetries import headline, symmetry

    model = load(checkpoint, legacy)
    account = symmetry(model.architecture)
    described = facts(model)
    if common.json:
        show_json({**described, "symmetry": account.to_json(), "headline": headline(model.architecture)})
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for part in ("architecture", "files"):
        for key, value in described[part].items():
            table.add_row(key.replace("_", " "), ", ".join(map(str, value)) if isinstance(value, list) else str(value))
    show(table, space_table(account), totals(account), headline(model.architecture))


def scramble(
    checkpoint: Path,
    /,
    *,
    to: OutputFlags,
    spaces: str | None = None,
    seed: int = 0,
    transform: Path | None = None,
    common: Common = DEFAULTS,
) -> None:
    """Write a random checkpoint that computes the same function.

    Parameters
    ----------
    checkpoint
        Folder of the checkpoint.
    spaces
        What to move, comma separated: heads, qk, vo, neurons, experts, gains, shifts, stream. Default: all there is.
    seed
        Same seed, same bytes.
    transform
        File (.safetensors) to save the group element in.
    """
    from coset.checkpoint import operations

    with _progress(common, "writing") as (_, writing):
        written = operations.scramble(
            checkpoint,
            to.output,
            spaces=_spaces(spaces),
            seed=seed,
            transform=transform,
            overwrite=to.overwrite,
            legacy=to.legacy,
            progress=writing,
        )
    _report(written, common, seed=seed, transform=None if transform is None else str(transform))


def apply(
    transform: Path,
    checkpoint: Path,
    /,
    *,
    to: OutputFlags,
    inverse: bool = False,
    common: Common = DEFAULTS,
) -> None:
    """Apply a saved group element to a checkpoint, in the direction in which it was written.

    Parameters
    ----------
    transform
        File that scramble, align or compare wrote.
    checkpoint
        Folder of the checkpoint.
    inverse
        The other direction.
    """
    from coset.checkpoint import operations

    with _progress(common, "writing") as (_, writing):
        written = operations.apply(
            transform, checkpoint, to.output, inverse=inverse, overwrite=to.overwrite, legacy=to.legacy, progress=writing
        )
    _report(written, common)


def align(
    reference: Path,
    other: Path,
    /,
    *,
    to: OutputFlags,
    by: MatchingFlags = BY_WEIGHTS,
    data: Path | None = None,
    untie: bool = False,
    transform: Path | None = None,
    common: Common = DEFAULTS,
) -> None:
    """Write OTHER, function unchanged, as close to REFERENCE as the symmetries allow.

    Parameters
    ----------
    reference
        Folder of the checkpoint that stays as it is.
    other
        Folder of the checkpoint to bring to it.
    data
        Inputs to match on: text (.txt, read with the checkpoint's tokenizer), or .safetensors with input_ids [n, length]. For image models
        .safetensors with inputs [n, patches, features], floating point: patches row by row without the class token, the features of each in
        the order of the patch projection (channel, row, column). Targets may stand beside them; see barrier.
    untie
        Give a tied model an unembedding of its own, so that its stream can turn.
    transform
        File (.safetensors) to save the group element in.
    """
    from coset.checkpoint import operations

    how = by.matching()
    with _resumable(by), _progress(common, "writing") as (matching, writing):
        written = operations.align(
            reference,
            other,
            to.output,
            spaces=_spaces(by.spaces),
            untied=untie,
            how=how,
            data=data,
            state=by.state,
            transform=transform,
            overwrite=to.overwrite,
            legacy=to.legacy,
            matching=matching,
            progress=writing,
        )
    _report(written, common, matcher=how.matcher, transform=None if transform is None else str(transform))


def merge(
    reference: Path,
    others: Annotated[tuple[Path, ...], Parameter(consume_multiple=True)],
    /,
    *,
    to: OutputFlags,
    weight: float | None = None,
    no_align: bool = False,
    by: MatchingFlags = BY_WEIGHTS,
    data: Path | None = None,
    refit: bool = False,
    common: Common = DEFAULTS,
) -> None:
    """Write the weighted mean of checkpoints, brought into the gauge of the first. The output loads as it is.

    Parameters
    ----------
    reference
        Folder of the checkpoint whose files and gauge the output has.
    others
        Folders of one or more others.
    weight
        Total weight of the others, from 0 to 1. Default: every model counts the same.
    no_align
        Average the weights as they are.
    data
        Inputs to match on, or to refit on; see align.
    refit
        Solve for every linear map, so that it gives the mean of what the models' maps give, on --data or on inputs that need none. The output is
        then not on the line between the models.
    """
    if no_align and (by.given() or data is not None):
        flags = ", ".join((*by.given(), *(() if data is None else ("--data",))))
        raise CosetError(f"{flags}: it says how to align, and --no-align leaves alignment out; give one of them")
    from coset.checkpoint import operations

    how = by.matching(refit=refit)
    with _resumable(by), _progress(common, "writing") as (matching, writing):
        written = operations.merge(
            reference,
            others,
            to.output,
            weight=weight,
            aligned=not no_align,
            spaces=_spaces(by.spaces),
            how=how,
            data=data,
            state=by.state,
            refit=refit,
            overwrite=to.overwrite,
            legacy=to.legacy,
            matching=matching,
            progress=writing,
        )
    more: dict[str, Any] = {"weights": list(operations.weights(len(others), weight)), "aligned": not no_align}
    more["matcher"] = None if no_align else how.matcher
    more["on_the_line"] = written.refit is None
    if written.refit is not None:
        quality = written.refit
        more["refit"] = {
            "heldout_disagreement_before": quality.before,
            "heldout_disagreement_after": quality.after,
            "worse": quality.worse,
        }
    _report(written, common, **more)


def barrier(
    first: Path,
    second: Path,
    /,
    *,
    data: Path,
    by: MatchingFlags = BY_WEIGHTS,
    match_data: Path | None = None,
    points: int = 25,
    length: int | None = None,
    samples: int | None = None,
    batch: int = 8,
    device: str = "cpu",
    plot: Path | None = None,
    overwrite: bool = False,
    legacy: bool = False,
    common: Common = DEFAULTS,
) -> None:
    """Loss and accuracy along the straight line between two checkpoints, and the barrier on it.

    Without --matcher the checkpoints are taken as they are; with one, SECOND is aligned to FIRST in memory first.

    Parameters
    ----------
    first
        Folder of one checkpoint.
    second
        Folder of the other.
    data
        Text (.txt, read with the checkpoint's tokenizer), or .safetensors with input_ids [n, length], the next token being the target unless
        there are targets [n, length] (-100: not counted). For image models .safetensors with inputs [n, patches, features], floating point
        (patches row by row without the class token, features of each by channel, row and column), and targets [n], the classes.
    match_data
        Inputs to match on. Default: what --data holds for --matcher activations, and inputs that need no data for the others.
    points
        Points of the line, both ends included.
    length
        Tokens in a window of text. Default: 256, or all of the position table if it has fewer. A model without one (RoPE, ALiBi) takes any
        length.
    samples
        Use only the first so many inputs.
    batch
        Inputs in a forward pass.
    device
        Where to compute.
    plot
        Figure to write (.png, .svg or .pdf).
    overwrite
        Replace an existing figure.
    legacy
        Accept pytorch_model.bin.
    """
    if by.matcher is None and (by.given() or match_data is not None):
        flags = ", ".join((*by.given(), *(() if match_data is None else ("--match-data",))))
        raise CosetError(f"{flags}: it says how to align, and the checkpoints are taken as they are; add --matcher, or leave it out")
    from coset.checkpoint.curves import barrier_between

    how = None if by.matcher is None else by.matching()
    with _resumable(by), _progress(common, "points") as (matching, measuring):
        found = barrier_between(
            first,
            second,
            data,
            how=how,
            spaces=_spaces(by.spaces),
            match_data=match_data,
            state=by.state,
            points=points,
            length=length,
            samples=samples,
            batch=batch,
            device=device,
            plot=plot,
            overwrite=overwrite,
            legacy=legacy,
            matching=matching,
            progress=measuring,
        )
    _warn(found.notes, common)
    if common.json:
        show_json(found.to_json())
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("t", "loss", "accuracy"):
        table.add_column(name, justify="right")
    for t, loss, accuracy in zip(found.curve.points, found.curve.loss, found.curve.accuracy, strict=True):
        table.add_row(f"{t:.3f}", f"{loss:.4f}", f"{accuracy:.4f}")
    aligned = f" The second was aligned by {how.matcher}." if how is not None else ""
    show(table, f"Loss barrier {found.loss:.4g}, accuracy barrier {found.accuracy:.4g}: {found.definition}.{aligned}")
