"""Static figures for documents, as PNG and as SVG; the same study gives the same bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from coset.connect import render
from coset.study.report.analysis import Sweep, encodings, sweeps
from coset.study.report.names import Look, details, looks, slugs, title
from coset.study.report.results import Estimate, Setting, Study
from coset.study.report.tables import in_order

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "legend.frameon": False,
    # Names come from a configuration: a dollar sign in one starts no formula.
    "text.parse_math": False,
}
_MARKERS = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D", "down": "v"}
_COLUMNS = 3


def figures(study: Study) -> dict[str, bytes]:
    """Every figure by file name, as PNG and as SVG."""
    with matplotlib.rc_context(_STYLE):
        found = {}
        for name, figure in _figures(study):
            for suffix in (".svg", ".png"):
                found[f"{name}{suffix}"] = render(figure, suffix)
    return found


def _figures(study: Study) -> Iterator[tuple[str, Figure]]:
    look, told = looks(study.matchers), details(study.settings)
    groups: dict[str, list[Setting]] = {}
    for setting in study.settings:
        groups.setdefault(" · ".join(title(value) for value in setting.cell[:2]), []).append(setting)
    yield "barriers", _barriers(groups, encodings(study), look, told)
    files = slugs(list(groups))
    for name, group in groups.items():
        for quantity in ("loss", "accuracy"):
            yield f"curves-{files[name]}-{quantity}", _curves(name, in_order(group), quantity, look, told)
    if any(_left(setting) for setting in study.settings):
        yield "distance", _distance(study, look)
    fields: dict[str, list[Sweep]] = {}
    for sweep in sweeps(study):
        fields.setdefault(sweep.field, []).append(sweep)
    named = slugs(list(fields))
    for field, found in fields.items():
        yield f"sweep-{named[field]}", _sweeps(found, look)


def _new(rows: int, columns: int, entries: int, *, width: float = 3.0, height: float = 1.9, gap: float = 0.6) -> tuple[Figure, Any]:
    """A grid of hidden axes of this size in inches; margins are set by hand, which is far quicker than to solve for them."""
    left, right, top, aside = 0.75, 0.15, 0.6, 0.55
    across = left + right + columns * width + (columns - 1) * aside
    bottom = gap + 0.1 + 0.2 * math.ceil(entries / _abreast(across))
    down = top + bottom + rows * height + (rows - 1) * gap
    figure = Figure(figsize=(across, down), dpi=100)
    FigureCanvasAgg(figure)
    edges = {"left": left / across, "right": 1 - right / across, "top": 1 - top / down, "bottom": bottom / down}
    spaces = {"wspace": aside / width, "hspace": gap / height}
    grid = figure.subplots(rows, columns, squeeze=False, gridspec_kw=edges | spaces)
    for axes in grid.flat:
        axes.set_visible(False)
    return figure, grid


def _abreast(width: float) -> int:
    """How many entries of a legend fit side by side."""
    return max(1, int(width / 1.6))


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _legend(figure: Figure, look: Mapping[str, Look], used: Sequence[str]) -> None:
    handles = [
        matplotlib.lines.Line2D([], [], label=title(name), color=look[name].light, linestyle=_dashes(look[name]), marker=_mark(look[name]))
        for name in look
        if name in used
    ]
    figure.legend(handles=handles, loc="lower center", ncols=min(len(handles), _abreast(figure.get_figwidth())))


def _dashes(look: Look) -> Any:
    return (0, look.dashes) if look.dashes else "-"


def _mark(look: Look) -> str:
    return _MARKERS[look.marker]


def _dots(axes: Axes, x: Sequence[float], values: Sequence[Estimate], look: Look, line: Any) -> None:
    kept = [(place, v.mean, v.error or 0.0) for place, v in zip(x, values, strict=True) if v.mean is not None]
    if kept:
        places, means, errors = zip(*kept, strict=True)
        style = {"color": look.light, "marker": _mark(look), "linestyle": line, "markersize": 4.5, "capsize": 2, "elinewidth": 1}
        axes.errorbar(places, means, yerr=errors, **style)


def _barriers(groups: Mapping[str, Sequence[Setting]], pes: Sequence[str], look: Mapping[str, Look], told: Mapping[str, str]) -> Figure:
    crowded = any(sum(setting.fields["pe"] == pe for setting in group) > 4 for group in groups.values() for pe in pes)
    figure, grid = _new(len(groups), len(pes), len(look), gap=1.5 if crowded else 0.75)
    names = [name for name in look if name != "naive"]
    for i, (group_name, group) in enumerate(groups.items()):
        lefts = [matching.percent for setting in group for name, matching in setting.matchers.items() if name != "naive"]
        top = max([100.0, *((left.mean or 0.0) + (left.error or 0.0) for left in lefts)])
        for j, pe in enumerate(pes):
            chosen = [setting for setting in in_order(group) if setting.fields["pe"] == pe]
            if not chosen:
                continue
            axes = grid[i, j]
            axes.set_visible(True)
            axes.set_title(title(pe))
            axes.axhline(100, color="#999999", linewidth=0.8)
            for k, matcher in enumerate(names):
                shift = 0.6 * ((k + 0.5) / len(names) - 0.5)
                places = [x + shift for x, setting in enumerate(chosen) if matcher in setting.matchers]
                _dots(axes, places, [s.matchers[matcher].percent for s in chosen if matcher in s.matchers], look[matcher], "none")
            labels = [" ".join([title(setting.fields["scope"]), told[setting.id]]).strip() for setting in chosen]
            if crowded:
                axes.set_xticks(range(len(chosen)), [_short(text, 24) for text in labels], rotation=90, fontsize=7)
            else:
                axes.set_xticks(range(len(chosen)), [text.replace("-", "\n").replace(" ", "\n", 1) for text in labels], fontsize=8)
            axes.set_xlim(-0.5, len(chosen) - 0.5)
            axes.set_ylim(0, 1.05 * top)
            axes.set_ylabel(f"{_short(group_name, 30)}\nbarrier left (% of naive)" if j == 0 else "")
    _legend(figure, look, names)
    return figure


def _curves(name: str, group: Sequence[Setting], quantity: str, look: Mapping[str, Look], told: Mapping[str, str]) -> Figure:
    def row_of(setting: Setting) -> str:
        return " · ".join([title(setting.fields["scope"]), *([told[setting.id]] if told[setting.id] else [])])

    rows = list(dict.fromkeys(row_of(setting) for setting in group))
    pes = list(dict.fromkeys(str(setting.fields["pe"]) for setting in group))
    figure, grid = _new(len(rows), len(pes), len(look))
    figure.suptitle(f"{_short(name, 40)}: mean over pairs ± standard error", fontsize=9, y=1 - 0.08 / figure.get_figheight())
    unit = "test loss (nats)" if quantity == "loss" else "test accuracy"
    for setting in group:
        i, j = rows.index(row_of(setting)), pes.index(str(setting.fields["pe"]))
        axes = grid[i, j]
        axes.set_visible(True)
        axes.set_title(f"{rows[i]} · {title(pes[j])}")
        for matcher, matching in setting.matchers.items():
            points = np.asarray(matching.pairs[0].points)
            values = np.asarray([getattr(pair, quantity) for pair in matching.pairs])
            mean, drawn = values.mean(axis=0), look[matcher]
            if len(values) > 1:
                error = values.std(axis=0, ddof=1) / math.sqrt(len(values))
                axes.fill_between(points, mean - error, mean + error, color=drawn.light, alpha=0.18, linewidth=0)
            axes.plot(points, mean, color=drawn.light, linestyle=_dashes(drawn), linewidth=1.7)
        axes.set_xlim(0, 1)
        axes.set_xlabel("place on the segment, t" if i == len(rows) - 1 else "")
        axes.set_ylabel(unit if j == 0 else "")
    _legend(figure, look, [matcher for setting in group for matcher in setting.matchers])
    return figure


def _left(setting: Setting) -> list[tuple[str, float, float]]:
    """For each matcher but naive and each pair: distance and barrier, both in % of the same pair's naive ones."""
    naive = setting.matchers.get("naive")
    base = {} if naive is None else {pair.seeds: pair for pair in naive.pairs}
    return [
        (name, 100 * pair.distance / base[pair.seeds].distance, 100 * pair.loss_barrier / base[pair.seeds].loss_barrier)
        for name, matching in setting.matchers.items()
        for pair in matching.pairs
        if name != "naive" and pair.seeds in base and base[pair.seeds].distance > 0 and base[pair.seeds].loss_barrier > 0
    ]


def _distance(study: Study, look: Mapping[str, Look]) -> Figure:
    figure, grid = _new(1, 1, len(look), width=5.5, height=3.5)
    axes = grid[0, 0]
    axes.set_visible(True)
    found = [point for setting in study.settings for point in _left(setting)]
    for name, drawn in look.items():
        chosen = [(x, y) for matcher, x, y in found if matcher == name]
        if chosen:
            axes.scatter(*zip(*chosen, strict=True), s=14, color=drawn.light, marker=_mark(drawn), alpha=0.7, linewidth=0)
    axes.axhline(100, color="#999999", linewidth=0.8)
    axes.axvline(100, color="#999999", linewidth=0.8)
    axes.set_ylim(bottom=0)
    axes.set_title("Distance against barrier, one mark a pair")
    axes.set_xlabel("distance in weights left (% of naive)")
    axes.set_ylabel("loss barrier left (% of naive)")
    _legend(figure, look, [name for name, _, _ in found])
    return figure


def _sweeps(found: Sequence[Sweep], look: Mapping[str, Look]) -> Figure:
    columns = min(_COLUMNS, len(found))
    figure, grid = _new(math.ceil(len(found) / columns), columns, len(look))
    for k, sweep in enumerate(found):
        axes = grid[k // columns, k % columns]
        axes.set_visible(True)
        axes.set_title(_short(sweep.fixed, 44), fontsize=8)
        places = (
            [float(v) if isinstance(v, int | float) else 0.0 for v in sweep.values] if sweep.numeric else list(range(len(sweep.values)))
        )
        for name, drawn in look.items():
            chosen = [
                (x, s.matchers[name].percent) for x, s in zip(places, sweep.settings, strict=True) if name != "naive" and name in s.matchers
            ]
            if chosen:
                _dots(axes, [x for x, _ in chosen], [y for _, y in chosen], drawn, _dashes(drawn))
        if sweep.numeric and min(places) > 0 and max(places) / min(places) >= 4:
            axes.set_xscale("log")
            axes.minorticks_off()
        axes.set_xticks(places, [title(value) for value in sweep.values])
        axes.axhline(100, color="#999999", linewidth=0.8)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(title(sweep.field))
        axes.set_ylabel("barrier left (% of naive)" if k % columns == 0 else "")
    _legend(figure, look, [name for sweep in found for setting in sweep.settings for name in setting.matchers if name != "naive"])
    return figure
