"""Figures of loss along segments, without pyplot: no global state, and the same curves give the same bytes."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from coset.connect.barriers import Curve
from coset.errors import CosetError

_Dashes = str | tuple[int, tuple[float, ...]]
# Okabe and Ito's colours, told apart with any colour vision; dashes tell the lines apart in grey.
_LINES: tuple[tuple[str, _Dashes], ...] = (
    ("#4D4D4D", "-"),
    ("#E69F00", (0, (5, 1.5))),
    ("#0072B2", "-"),
    ("#009E73", (0, (3, 1, 1, 1))),
    ("#CC79A7", (0, (1, 1))),
    ("#D55E00", "-."),
    ("#56B4E9", (0, (7, 2))),
)

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
}

_NAMELESS: Mapping[str, Mapping[str, None]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
SUFFIXES = tuple(_NAMELESS)
"""Kinds of files that figures are written as."""


@dataclass(frozen=True)
class Panel:
    """One set of axes: for each variant (naive, two-stage, ...) the curves of all pairs, over the same points.

    `row` and `column` are the labels of its place in the grid of panels.
    """

    row: str
    column: str
    curves: Mapping[str, Sequence[Curve]]


def draw(panels: Sequence[Panel], *, quantity: str = "loss", labels: Mapping[str, str] | None = None) -> Figure:
    """Mean over pairs of the `quantity` (``loss`` or ``accuracy``) along the segment, with a band from the lowest to the highest pair.

    Parameters
    ----------
    panels
        Placed in a grid by their rows and columns, in order of appearance. A variant has the same colour in every panel.
    quantity
        What to draw.
    labels
        What the legend calls a variant; by default its name.

    Raises
    ------
    CosetError
        If there is nothing to draw, two panels share a place, a variant has no curves, or curves of a variant differ in their points.
    """
    if quantity not in ("loss", "accuracy"):
        raise CosetError(f"figure: quantity must be loss or accuracy, got {quantity!r}")
    _check(panels)
    rows, columns = list(dict.fromkeys(p.row for p in panels)), list(dict.fromkeys(p.column for p in panels))
    variants = list(dict.fromkeys(name for p in panels for name in p.curves))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(1.0 + 4.2 * len(columns), 1.1 + 2.9 * len(rows)), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(rows), len(columns), squeeze=False)
        for axes in grid.flat:
            axes.set_visible(False)
        handles = {}
        for panel in panels:
            i, j = rows.index(panel.row), columns.index(panel.column)
            axes = grid[i, j]
            axes.set_visible(True)
            axes.set_title(f"{panel.row} · {panel.column}", loc="left", fontweight="bold")
            axes.set_xlim(0.0, 1.0)
            axes.set_xticks([0.0, 0.25, 0.5, 0.75, 1.0], ["A", "¼", "½", "¾", "B"])
            if i == len(rows) - 1:
                axes.set_xlabel("place on the segment")
            if j == 0:
                axes.set_ylabel(f"test {quantity}")
            for name, curves in panel.curves.items():
                handles[name] = _band(axes, curves, quantity, *_LINES[variants.index(name) % len(_LINES)])
            if quantity == "loss":
                axes.set_ylim(bottom=0.0)
        titles = {name: (labels or {}).get(name, name) for name in variants}
        figure.legend([handles[v] for v in variants], [titles[v] for v in variants], loc="outside lower center", ncols=len(variants))
    return figure


def _band(axes: Axes, curves: Sequence[Curve], quantity: str, colour: str, dashes: _Dashes) -> Line2D:
    points = np.asarray(curves[0].points)
    values = np.asarray([getattr(curve, quantity) for curve in curves])
    axes.fill_between(points, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0)
    (line,) = axes.plot(points, values.mean(axis=0), color=colour, linestyle=dashes, linewidth=2.0)
    return line


def _check(panels: Sequence[Panel]) -> None:
    if not panels:
        raise CosetError("figure: expected at least one panel, got none")
    places = [(p.row, p.column) for p in panels]
    if len(set(places)) != len(places):
        raise CosetError(f"figure: two panels share a place among {places}")
    for panel in panels:
        for name, curves in panel.curves.items():
            if not curves:
                raise CosetError(f"figure: panel {panel.row} · {panel.column} has no curves of {name}")
            if any(c.points != curves[0].points for c in curves):
                raise CosetError(f"figure: curves of {name} in panel {panel.row} · {panel.column} were measured at different points")


def render(figure: Figure, suffix: str) -> bytes:
    """The figure as the bytes of a file with a suffix of :data:`SUFFIXES`; they hold no date and no version."""
    buffer = io.BytesIO()
    # Element ids of an SVG are hashed with a random salt unless one is given.
    with matplotlib.rc_context({"svg.hashsalt": "coset"}):
        figure.savefig(buffer, format=suffix.removeprefix("."), metadata=_NAMELESS[suffix])
    return buffer.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Write `figure` as what the suffix of `path` says; the file appears whole or not at all, and holds no date or version.

    Raises
    ------
    CosetError
        If the suffix is none of :data:`SUFFIXES`, or the file cannot be written; nothing is then left behind.
    """
    if path.suffix not in SUFFIXES:
        raise CosetError(f"{path}: unknown kind of figure; expected one of {', '.join(SUFFIXES)}")
    content = render(figure, path.suffix)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        raise CosetError(f"{path}: cannot write the figure: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)
