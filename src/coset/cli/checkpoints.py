"""The verbs that read and write checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from rich.box import SIMPLE_HEAD
from rich.table import Table

from coset.cli.options import DEFAULTS, Common
from coset.cli.output import complain, show, show_json
from coset.cli.symmetry import spaces as space_table
from coset.cli.symmetry import totals
from coset.errors import CosetError

if TYPE_CHECKING:
    from coset.checkpoint.operations import Written

Out = Annotated[Path, Parameter(name=["--output", "-o"])]
Spaces = Annotated[str | None, Parameter(name="--spaces")]


def _spaces(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


@contextmanager
def _progress(common: Common, label: str) -> Iterator[tuple[Callable[[str, int, int], None], Callable[[int, int], None]]]:
    """Two callbacks, for matching and for writing, that draw one bar each on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=common.quiet or not console.is_terminal, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def update(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, total=total)

        yield (lambda what, done, total: update(f"matching, {what}", done, total)), (lambda done, total: update(label, done, total))


def _report(written: Written, common: Common, **more: Any) -> None:
    if common.json:
        show_json(
            {
                "output": str(written.path),
                "rounding": written.rounding,
                "notes": list(written.notes),
                **more,
                "distances": [{"layer": d.layer, "before": d.before, "after": d.after} for d in written.distances],
            }
        )
        return
    for note in () if common.quiet else written.notes:
        complain("warning", note)
    if written.distances:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in ("block", "distance before", "after"):
            table.add_column(name, justify="left" if name == "block" else "right")
        for d in written.distances:
            table.add_row("ends" if d.layer is None else f"layer {d.layer}", f"{d.before:.4g}", f"{d.after:.4g}")
        show(table)
    show(f"Written to {written.path}; relative rounding error {written.rounding:.2g}.")


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
    output: Out,
    spaces: Spaces = None,
    seed: int = 0,
    transform: Path | None = None,
    overwrite: bool = False,
    legacy: bool = False,
    common: Common = DEFAULTS,
) -> None:
    """Write a random checkpoint that computes the same function.

    Parameters
    ----------
    checkpoint
        Folder of the checkpoint.
    output
        Folder to write.
    spaces
        What to move, comma separated: heads, qk, vo, neurons, experts, gains, shifts, stream. Default: all there is.
    seed
        Same seed, same bytes.
    transform
        File (.safetensors) to save the group element in.
    overwrite
        Replace an existing output.
    legacy
        Accept pytorch_model.bin.
    """
    from coset.checkpoint import operations

    with _progress(common, "writing") as (_, writing):
        written = operations.scramble(
            checkpoint, output, spaces=_spaces(spaces), seed=seed, transform=transform, overwrite=overwrite, legacy=legacy, progress=writing
        )
    _report(written, common, seed=seed, transform=None if transform is None else str(transform))


def apply(
    transform: Path,
    checkpoint: Path,
    /,
    *,
    output: Out,
    inverse: bool = False,
    overwrite: bool = False,
    legacy: bool = False,
    common: Common = DEFAULTS,
) -> None:
    """Apply a saved group element to a checkpoint, in the direction in which it was written.

    Parameters
    ----------
    transform
        File that scramble, align or compare wrote.
    checkpoint
        Folder of the checkpoint.
    output
        Folder to write.
    inverse
        The other direction.
    overwrite
        Replace an existing output.
    legacy
        Accept pytorch_model.bin.
    """
    from coset.checkpoint import operations

    with _progress(common, "writing") as (_, writing):
        written = operations.apply(transform, checkpoint, output, inverse=inverse, overwrite=overwrite, legacy=legacy, progress=writing)
    _report(written, common)


def align(
    reference: Path,
    other: Path,
    /,
    *,
    output: Out,
    spaces: Spaces = None,
    matcher: Literal["weights"] = "weights",
    untie: bool = False,
    transform: Path | None = None,
    overwrite: bool = False,
    legacy: bool = False,
    common: Common = DEFAULTS,
) -> None:
    """Write OTHER, function unchanged, as close to REFERENCE as the symmetries allow.

    Parameters
    ----------
    reference
        Folder of the checkpoint that stays as it is.
    other
        Folder of the checkpoint to bring to it.
    output
        Folder to write.
    spaces
        What may move, comma separated: heads (with qk and vo), neurons, experts, gains, shifts, stream. Default: all there is.
    matcher
        Where inner products come from.
    untie
        Give a tied model an unembedding of its own, so that its stream can turn.
    transform
        File (.safetensors) to save the group element in.
    overwrite
        Replace an existing output.
    legacy
        Accept pytorch_model.bin.
    """
    from coset.checkpoint import operations

    with _progress(common, "writing") as (matching, writing):
        written = operations.align(
            reference,
            other,
            output,
            spaces=_spaces(spaces),
            untied=untie,
            transform=transform,
            overwrite=overwrite,
            legacy=legacy,
            matching=matching,
            progress=writing,
        )
    _report(written, common, matcher=matcher, transform=None if transform is None else str(transform))


def merge(
    reference: Path,
    others: Annotated[tuple[Path, ...], Parameter(consume_multiple=True)],
    /,
    *,
    output: Out,
    weight: float | None = None,
    no_align: bool = False,
    spaces: Spaces = None,
    overwrite: bool = False,
    legacy: bool = False,
    common: Common = DEFAULTS,
) -> None:
    """Write the weighted mean of checkpoints, each aligned to the first. The output loads as it is.

    Parameters
    ----------
    reference
        Folder of the checkpoint whose files and gauge the output has.
    others
        Folders of one or more others.
    output
        Folder to write.
    weight
        Total weight of the others, from 0 to 1. Default: every model counts the same.
    no_align
        Average the weights as they are.
    spaces
        What alignment may move. Default: all there is.
    overwrite
        Replace an existing output.
    legacy
        Accept pytorch_model.bin.
    """
    if no_align and spaces is not None:
        raise CosetError("--spaces: it says what alignment may move, and --no-align leaves alignment out; give one of them")
    from coset.checkpoint import operations

    with _progress(common, "writing") as (matching, writing):
        written = operations.merge(
            reference,
            others,
            output,
            weight=weight,
            aligned=not no_align,
            spaces=_spaces(spaces),
            overwrite=overwrite,
            legacy=legacy,
            matching=matching,
            progress=writing,
        )
    _report(written, common, weights=list(operations.weights(len(others), weight)), aligned=not no_align)


def barrier(
    first: Path,
    second: Path,
    /,
    *,
    data: Path,
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
    """Loss and accuracy along the straight line between two checkpoints as they are, and the barrier on it.

    Parameters
    ----------
    first, second
        Folders of the checkpoints; align them first to measure the barrier that alignment leaves.
    data
        Text (.txt, read with the checkpoint's tokenizer), or .safetensors with input_ids, or with inputs and targets.
    points
        Points of the line, both ends included.
    length
        Tokens in a window of text. Default: 256, or the model's context.
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
    from coset.checkpoint.curves import barrier_between

    with _progress(common, "points") as (_, measuring):
        found = barrier_between(
            first,
            second,
            data,
            points=points,
            length=length,
            samples=samples,
            batch=batch,
            device=device,
            plot=plot,
            overwrite=overwrite,
            legacy=legacy,
            progress=measuring,
        )
    if common.json:
        show_json(found.to_json())
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("t", "loss", "accuracy"):
        table.add_column(name, justify="right")
    for t, loss, accuracy in zip(found.curve.points, found.curve.loss, found.curve.accuracy, strict=True):
        table.add_row(f"{t:.3f}", f"{loss:.4f}", f"{accuracy:.4f}")
    show(table, f"Loss barrier {found.loss:.4g}, accuracy barrier {found.accuracy:.4g}: {found.definition}.")
