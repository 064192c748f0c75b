"""The barrier between two checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from coset.alignment.matchers import Matching
from coset.alignment.pair import Progress, Step
from coset.checkpoint.compatible import require_comparable, tied_beside_untied
from coset.checkpoint.data import read_data, require_loss
from coset.checkpoint.matching import check_state, find, heldout, read_matching_data, record
from coset.checkpoint.model import load, untie
from coset.checkpoint.operations import Blocks, choose_spaces, for_alignment
from coset.checkpoint.outputs import check_file
from coset.connect import SUFFIXES, Barrier, Panel, barrier, draw
from coset.connect import save as save_figure
from coset.errors import CosetError
from coset.objective import check_data


@dataclass(frozen=True)
class CheckpointBarrier(Barrier):
    """A barrier between checkpoints, and how the second was aligned before it was measured; all empty if they were taken as they are."""

    matching: Mapping[str, str] = field(default_factory=dict)
    history: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """The record that ``coset barrier --json`` prints."""
        return super().to_json() | {
            "matcher": self.matching.get("matcher"),
            "matching": dict(self.matching),
            "history": [{"step": step.name, "objective": step.objective} for step in self.history],
            "notes": list(self.notes),
        }


def barrier_between(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    data: str | os.PathLike[str],
    *,
    how: Matching | None = None,
    spaces: Sequence[str] | None = None,
    match_data: str | os.PathLike[str] | None = None,
    state: str | os.PathLike[str] | None = None,
    points: int = 25,
    length: int | None = None,
    samples: int | None = None,
    batch: int = 8,
    device: str = "cpu",
    plot: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    legacy: bool = False,
    matching: Progress | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CheckpointBarrier:
    """Loss and accuracy barrier of the straight line between two checkpoints, as they are or aligned first, in float32.

    Parameters
    ----------
    first, second
        Folders of the two ends. Both models are held in memory.
    data, length, samples
        See :func:`coset.checkpoint.data.read_data`.
    how, spaces, state, matching
        Align the second model to the first in memory before measuring, as :func:`coset.checkpoint.operations.align` does; None: take both
        as they are.
    match_data
        File of inputs to match on, for ``activations`` and what builds on it. Without it ``activations`` takes `data`, and a note says that
        the barrier is measured on the inputs that were matched on; ``search`` and ``learned`` make inputs of their own.
    points, batch, device, progress
        See :func:`coset.connect.evaluate`.
    plot, overwrite
        Figure to write, and whether it may replace a file.
    legacy
        Accept pytorch_model.bin.

    Raises
    ------
    CosetError
        If the two cannot be compared, a head is invariant (its loss is not computed here), the data does not fit, the device does not
        exist, or the figure could not be written.
    """
    figure = None if plot is None else check_file(plot, "figure", suffixes=SUFFIXES, overwrite=overwrite)
    try:
        where = torch.device(device)
        torch.empty(1, device=where)
        if where.type == "meta":
            raise RuntimeError
    except (RuntimeError, AssertionError):
        raise CosetError(f"device: {device!r} is not available here; try cpu") from None
    models = [load(path, legacy) for path in (first, second)]
    # A matcher would have to write its result back, tied or not; without one nothing is written.
    apart = tied_beside_untied(models) if how is None else [False] * len(models)
    seen = [untie(m) if alone else m for m, alone in zip(models, apart, strict=True)]
    require_comparable(*seen)
    if how is None and (match_data is not None or state is not None or spaces is not None):
        raise CosetError("barrier: spaces, state and data to match on serve a matcher, and there is none; name one, or leave them out")
    kept = None if how is None else check_state(state, how, [m.path for m in models], plot)
    require_loss(models[0])
    inputs, targets = read_data(data, models[0], length=length, samples=samples)
    architecture = seen[0].architecture
    check_data(architecture, inputs, targets, str(data))
    sides = [Blocks(m, untied=alone) for m, alone in zip(models, apart, strict=True)]
    matched: Mapping[str, str] = {}
    history: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()
    a = {name: x.to(torch.float32) for name, x in sides[0].items()}
    if how is None:
        b = {name: x.to(torch.float32) for name, x in sides[1].items()}
    else:
        chosen, notes = choose_spaces(models[0], for_alignment(spaces))
        if match_data is None and "activations" in (how.matcher, how.source):
            match_data, notes = data, (*notes, f"{data}: the models are matched on the inputs that the barrier is measured on")
        own = read_matching_data(match_data, models[0], how)
        found = find(how, models, sides, spaces=chosen, data=own, state=kept, progress=matching)
        b = sides[1].moved(found.transform, torch.float32)
        matched, history, notes = record(how, architecture, own, heldout(how, [found])), found.history, (*notes, *found.notes)
    line = barrier(architecture, a, b, inputs, targets, points=points, batch=batch, device=where, progress=progress)
    if figure is not None:
        names = [m.path.name for m in models]
        save_figure(draw([Panel(names[0], names[1], {"segment": [line.curve]})]), figure)
    return CheckpointBarrier(line.curve, line.loss, line.accuracy, line.definition, matched, history, notes)
