"""Matching checkpoints: by weights a layer at a time from disk, by everything else with whole models in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from coset.alignment.many import align_many
from coset.alignment.matchers import Matching, describe, find_match, made_sizes, make_inputs
from coset.alignment.pair import Match, Progress, Step
from coset.architecture import Architecture
from coset.checkpoint.data import read_data, require_loss
from coset.checkpoint.model import Model, untie
from coset.checkpoint.outputs import check_file
from coset.connect.refitting import refit
from coset.errors import CosetError
from coset.objective import Agreement
from coset.parameters import Parameters, count
from coset.transform import Transform

ROUNDS_LIMIT = 1 << 27
"""Parameters of all models together up to which several models are brought into one gauge in memory (some 6 GB)."""

_HELD_OUT = 0.1
"""Fraction of the inputs of a refit on which it is judged."""


@dataclass(frozen=True)
class Data:
    """The user's inputs (targets may be None), and the file they came from."""

    path: Path
    inputs: Tensor
    targets: Tensor | None


def read_matching_data(path: str | os.PathLike[str] | None, model: Model, how: Matching, *, refitted: bool = False) -> Data | None:
    """Read the user's data, if they are used: by the matcher, or for a refit.

    Raises
    ------
    CosetError
        If there are data that nothing would read, none where the matcher needs them, or they do not fit the model; if the inputs that the
        matcher makes instead would not; or if they are too few to hold any out, for ``learned`` or a refit.
    """
    source = how.resolved_source(model.architecture, path is not None)
    if how.task and how.matcher == "learned":
        require_loss(model)
    if path is None:
        if source in ("probes", "self"):
            _check_held_out(made_sizes(model.architecture, how)[0], how, refitted)  # which refuses what does not fit, before any work
        if refitted:
            _check_held_out(made_sizes(model.architecture, _closed(how))[0], how, refitted)
        if how.task and how.matcher == "learned":
            raise CosetError("task: the task's loss is measured on your data, and there are none; give some, or leave the task out")
        return None
    if source != "activations" and not refitted:
        raise CosetError(f"{path}: matcher {how.matcher}{_from(how)} reads no data; leave them out, or match by activations")
    inputs, targets = read_data(path, model, length=how.length, samples=how.samples)
    _check_held_out(len(inputs), how, refitted)
    return Data(Path(path), inputs, targets)


def _check_held_out(samples: int, how: Matching, refitted: bool) -> None:
    """Refuse before any work a single input where one is held out to judge by."""
    if samples < 2 and (refitted or how.matcher == "learned"):
        raise CosetError(
            f"{'refit' if refitted else 'learning'}: expected at least two inputs, one of them to hold out, got {samples}; "
            "ask for more samples, or give more data"
        )


def _closed(how: Matching) -> Matching:
    """How a refit makes inputs: with a default for every architecture, and fewer than learning needs."""
    return replace(how, matcher="search")


def _from(how: Matching) -> str:
    return "" if how.source is None else f" with source {how.source}"


def check_state(
    state: str | os.PathLike[str] | None,
    how: Matching,
    folders: Sequence[str | os.PathLike[str]],
    apart: str | os.PathLike[str] | None = None,
) -> Path | None:
    """The file that an interrupted ``learned`` continues from, `apart` from another output; raise before any work if there can be none."""
    if state is None:
        return None
    path = Path(state)
    if how.matcher != "learned":
        raise CosetError(f"{path}: only the matcher learned keeps a state, {how.matcher} has none; leave the state out")
    # It may be there: that is what it is for.
    return check_file(path, "state", outside=[Path(folder) for folder in folders], apart=[apart], overwrite=True)


def whole(model: Model, *, untied: bool = False) -> dict[str, Tensor]:
    """Every canonical tensor in float32, or in float64 where the checkpoint stores any; with `untied` a ``head`` of its own."""
    double = any(stored.dtype == "F64" for stored in model.checkpoint.tensors.values())
    found = model.parameters(torch.float64 if double else torch.float32)
    return found | {"head": found["embed.tokens"].mT} if untied else found


def find(
    how: Matching,
    models: Sequence[Model],
    sides: Sequence[Parameters],
    *,
    spaces: tuple[str, ...],
    untied: bool = False,
    data: Data | None = None,
    state: Path | None = None,
    progress: Progress | None = None,
) -> Match:
    """Find the transform of the second of two models to the first.

    `sides` are their tensors as they are read from disk, which ``weights`` works on; the other matchers read both models whole.
    """
    target = untie(models[1]) if untied else models[1]
    a, b = sides if how.matcher == "weights" else [whole(m, untied=untied) for m in models]
    return find_match(
        target.architecture,
        a,
        b,
        how,
        inputs=None if data is None else data.inputs,
        targets=None if data is None else data.targets,
        spaces=spaces,
        pinned=target.pinned,
        state=state,
        progress=progress,
    )


@dataclass(frozen=True)
class Found:
    """Several models in one gauge: a transform for each but the first, what the matching went through, notes, and held-out losses of
    ``learned`` (start, best) for each."""

    transforms: tuple[Transform, ...]
    history: tuple[Step, ...]
    notes: tuple[str, ...]
    heldout: tuple[tuple[float, float], ...]


def find_all(
    how: Matching,
    models: Sequence[Model],
    sides: Sequence[Parameters],
    *,
    spaces: tuple[str, ...],
    data: Data | None = None,
    state: Path | None = None,
    progress: Progress | None = None,
) -> Found:
    """Find the transforms of all models into the gauge of the first; see :func:`coset.alignment.align_many`.

    Two models are matched as by :func:`find`. By ``weights`` that is also done, one after the other, with models that are too large to
    hold together (:data:`ROUNDS_LIMIT`); a note says so.
    """
    names = [m.path.name for m in models]
    architecture = models[0].architecture
    if len(models) > 2 and state is not None:
        raise CosetError(
            f"{state}: one state serves one pair, and there are {len(models)} models; align each first, and merge without aligning"
        )

    def pairs() -> list[Match]:
        return [
            find(how, (models[0], m), (sides[0], side), spaces=spaces, data=data, state=state, progress=progress)
            for m, side in zip(models[1:], sides[1:], strict=True)
        ]

    size = count(architecture) * len(models)
    if len(models) == 2 or (how.matcher == "weights" and size > ROUNDS_LIMIT):
        found = [
            find(how, (models[0], m), (sides[0], side), spaces=spaces, data=data, state=state, progress=progress)
            for m, side in zip(models[1:], sides[1:], strict=True)
        ]
        history = tuple(found[0].history) if len(models) == 2 else ()
        few = f"{size:,} parameters are too many to hold at once, so every model was aligned to {names[0]} alone, without rounds"
        notes = (*([] if len(models) == 2 else [few]), *(f"{name}: {n}" for name, m in zip(names[1:], found, strict=True) for n in m.notes))
        return Found(tuple(m.transform for m in found), history, notes, heldout(how, found))
    found = []

    def matcher(a: Parameters, b: Parameters) -> Match:
        found.append(
            find_match(architecture, a, b, how, inputs=inputs, targets=targets, spaces=spaces, pinned=models[0].pinned, progress=progress)
        )
        return found[-1]

    inputs, targets = (None, None) if data is None else (data.inputs, data.targets)
    consensus = align_many(
        architecture,
        [whole(m) for m in models],
        matcher=None if how.matcher == "weights" else matcher,
        spaces=spaces,
        solvers=how.solvers,
        cycles=how.cycles,
        tolerance=how.tolerance,
        pinned=models[0].pinned,
        progress=progress,
    )
    return Found(consensus.transforms[1:], consensus.history, consensus.notes, heldout(how, found))


def heldout(how: Matching, found: Sequence[Match]) -> tuple[tuple[float, float], ...]:
    """Held-out losses of ``learned`` at the start and of the state that was kept, for every match; nothing for other matchers."""
    if how.matcher != "learned":
        return ()
    return tuple((m.history[0].objective, min(step.objective for step in m.history)) for m in found)


def record(how: Matching, architecture: Architecture, data: Data | None, heldout: Sequence[tuple[float, float]] = ()) -> dict[str, str]:
    """How the models were matched, in words, for the metadata and the card of an output."""
    out = dict(describe(how, architecture, data is not None))
    if data is not None:
        out |= {"data": data.path.name, "samples": str(len(data.inputs)), "length": str(data.inputs.shape[1])}
    if heldout:
        for at, name in enumerate(("start", "end")):
            out[f"heldout_loss_{name}"] = ", ".join(f"{losses[at]:.6g}" for losses in heldout)
    return out


# --- refit ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Disagreement:
    """Disagreement of a model with the ends on held-out inputs, before and after a refit."""

    before: float
    after: float

    @property
    def worse(self) -> bool:
        """Whether the refit made the model worse, or what it is now cannot be compared (NaN)."""
        return not self.after <= self.before


@dataclass(frozen=True)
class Refitted:
    """A refitted model, how far it is from the ends, where the inputs came from, and notes."""

    parameters: Mapping[str, Tensor]
    disagreement: Disagreement
    source: str
    samples: int
    notes: tuple[str, ...]


def refit_merged(
    how: Matching,
    architecture: Architecture,
    merged: Parameters,
    ends: Sequence[Parameters],
    data: Data | None,
    progress: Progress | None = None,
) -> Refitted:
    """Refit a mean of aligned models on the user's data, else on the matcher's inputs, else on text of their own or probes.

    A tenth of the inputs is held out; on it the disagreement is measured: cross-entropy to the mean of the ends' probabilities (of a
    model without a head: relative squared distance from the mean of their outputs).
    """
    if data is not None:
        source, inputs = "activations", data.inputs
    else:
        closed = _closed(how)
        found = (closed if how.matcher == "weights" else how).resolved_source(architecture, False)
        assert found is not None
        source = found
        inputs = make_inputs(architecture, ends, closed, found, progress)
    if inputs.is_floating_point():
        inputs = inputs.to(next(iter(merged.values())).dtype)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(how.seed))
    held = max(1, round(_HELD_OUT * len(inputs)))
    goal = Agreement(architecture, ends, inputs[order[:held]])

    def loss(parameters: Parameters) -> float:
        with torch.no_grad():
            return sum(float(goal.loss(parameters, rows)) * len(rows) for rows in torch.split(torch.arange(held), 32)) / held

    fitted = refit(architecture, merged, ends, inputs[order[held:]], progress=progress)
    found_out = Disagreement(loss(merged), loss(fitted.parameters))
    notes = [f"refit, {note}" for note in fitted.notes]
    if found_out.worse:
        figures = f"{found_out.before:.6g} before, {found_out.after:.6g} after"
        notes.insert(0, f"refit: it made things WORSE: held-out disagreement {figures}; give more inputs, or leave it out")
    return Refitted(fitted.parameters, found_out, source, len(order) - held, tuple(notes))
