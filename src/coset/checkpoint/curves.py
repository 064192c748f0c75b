"""The barrier between two checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from coset.checkpoint.compatible import require_comparable
from coset.checkpoint.data import read_data
from coset.checkpoint.model import load
from coset.connect import Barrier, Panel, barrier, draw
from coset.connect import save as save_figure
from coset.errors import CosetError

FIGURES = (".png", ".svg", ".pdf")


def barrier_between(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    data: str | os.PathLike[str],
    *,
    points: int = 25,
    length: int | None = None,
    samples: int | None = None,
    batch: int = 8,
    device: str = "cpu",
    plot: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    legacy: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Barrier:
    """Loss and accuracy barrier of the straight line between two checkpoints as they are, in float32.

    Parameters
    ----------
    first, second
        Folders of the two ends. Both models are held in memory.
    data, length, samples
        See :func:`coset.checkpoint.data.read_data`.
    points, batch, device, progress
        See :func:`coset.connect.evaluate`.
    plot, overwrite
        Figure to write, and whether it may replace a file.
    legacy
        Accept pytorch_model.bin.

    Raises
    ------
    CosetError
        If the two cannot be compared, a head is invariant (its loss is not computed here), the data does not fit, or the device does not
        exist.
    """
    figure = None if plot is None else Path(plot)
    if figure is not None and figure.suffix not in FIGURES:
        raise CosetError(f"{figure}: unknown kind of figure; expected one of {', '.join(FIGURES)}")
    if figure is not None and figure.exists() and not overwrite:
        raise CosetError(f"{figure}: the figure already exists; give another name, or --overwrite")
    if figure is not None and not figure.parent.is_dir():
        raise CosetError(f"{figure}: the folder {figure.parent} does not exist; create it first")
    try:
        where = torch.device(device)
        torch.empty(1, device=where)
    except (RuntimeError, AssertionError):
        raise CosetError(f"device: {device!r} is not available here; try cpu") from None
    models = [load(path, legacy) for path in (first, second)]
    require_comparable(*models)
    inputs, targets = read_data(data, models[0], length=length, samples=samples)
    a, b = (m.parameters(torch.float32) for m in models)
    found = barrier(models[0].architecture, a, b, inputs, targets, points=points, batch=batch, device=where, progress=progress)
    if figure is not None:
        names = [m.path.name for m in models]
        save_figure(draw([Panel(names[0], names[1], {"segment": [found.curve]})]), figure)
    return found
