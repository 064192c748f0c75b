"""What things are called and how they look, the same in tables, figures and on the page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coset.study.report.results import CELL, Estimate, Scalar, Setting

_SCOPES = ("first-attention", "all-attention", "first-layer", "last-attention", "last-layer", "whole")
_ENCODINGS = ("none", "sinusoidal", "learned", "alibi", "rope")
_TITLES: Mapping[str, str] = {
    "rope": "RoPE",
    "alibi": "ALiBi",
    "vit": "ViT",
    "gpt": "GPT",
    "gpt2": "GPT-2",
    "llama": "Llama",
    "bert": "BERT",
    "kv_heads": "KV heads",
    "rope_base": "RoPE base",
    "pe": "encoding",
    "two_stage": "two-stage",
    "two_stage_metric": "two-stage, metric",
}


@dataclass(frozen=True)
class Look:
    """How a matcher is drawn: a colour on light and one on dark ground (3:1 at least), dashes (SVG, in widths of the line), a marker.

    Colours follow Okabe and Ito, which any colour vision tells apart; dashes and markers tell them apart in grey.
    """

    light: str
    dark: str
    dashes: tuple[float, ...]
    marker: str


_LOOKS = (
    Look("#4D4D4D", "#BDBDBD", (), "circle"),
    Look("#BF8000", "#E69F00", (5, 1.5), "square"),
    Look("#0072B2", "#3D9BE0", (), "triangle"),
    Look("#008F68", "#1FB58A", (3, 1, 1, 1), "diamond"),
    Look("#C2609A", "#CC79A7", (1, 1), "down"),
    Look("#D55E00", "#E8762B", (6, 1.5, 1, 1.5), "circle"),
    Look("#2B96D6", "#7CC8F5", (7, 2), "square"),
    Look("#7A5C3E", "#C7A582", (2, 1), "triangle"),
    Look("#7A3FB5", "#B58CE6", (4, 1, 4, 2), "diamond"),
    Look("#6B7300", "#C9D13C", (1, 2), "down"),
)


def looks(matchers: Sequence[str]) -> dict[str, Look]:
    """One look for each matcher, by its place in the study."""
    return {name: _LOOKS[i % len(_LOOKS)] for i, name in enumerate(matchers)}


def title(name: Scalar) -> str:
    """What a reader sees for a name or value of a configuration."""
    if isinstance(name, bool):
        return "yes" if name else "no"
    if name is None:
        return "–"
    text = f"{name:g}" if isinstance(name, float) else str(name)
    return _TITLES.get(text, text.replace("_", " "))


def ordered(names: Iterable[str], kind: str) -> list[str]:
    """Scopes from small to whole, encodings with RoPE last; all else in order of appearance."""
    known = {"scope": _SCOPES, "pe": _ENCODINGS}.get(kind, ())
    return sorted(dict.fromkeys(names), key=lambda name: known.index(name) if name in known else len(known))


def details(settings: Sequence[Setting]) -> dict[str, str]:
    """For each setting's id what tells it apart from the other settings of its cell: empty where it is the only one.

    A value that more than half of the cell shares goes without saying, so a sweep's settings are named by what they change.
    """
    found = {}
    for setting in settings:
        cell = [other for other in settings if other.cell == setting.cell]
        told = []
        for key, value in setting.fields.items():
            shared = sum(other.fields.get(key) == value for other in cell)
            follows = key == "kv_heads" and all(other.fields.get(key) == other.fields.get("heads") for other in cell)
            if key not in CELL and not follows and 2 * shared <= len(cell):
                told.append(f"{title(key)} {title(value)}")
        found[setting.id] = ", ".join(told)
    # Settings may differ in something that the results do not list: then only their names tell them apart.
    alike = Counter((setting.cell, found[setting.id]) for setting in settings)
    return {setting.id: found[setting.id] if alike[setting.cell, found[setting.id]] == 1 else setting.id for setting in settings}


def label(setting: Setting, detail: str) -> str:
    """A setting in one line."""
    return " · ".join([*(title(value) for value in setting.cell), *([detail] if detail else [])])


def slugs(names: Sequence[str]) -> dict[str, str]:
    """A file name for each name: letters, digits and hyphens, all different."""
    found: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60] or "x"
        slug, i = plain, 2
        while slug in found.values():
            slug, i = f"{plain}-{i}", i + 1
        found[name] = slug
    return found


def number(value: float | None, digits: int = 3) -> str:
    """Rounded to significant digits, without an exponent where a reader does not need one."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}" if abs(value) < 1e6 else f"{value:.{digits - 1}e}"
    return f"{value:#.{digits}g}" if abs(value) >= 1e-3 else f"{value:.{digits - 1}e}"


def estimate(value: Estimate, unit: str = "") -> str:
    """Mean ± standard error, rounded where the error begins (two digits of it)."""
    if value.mean is None:
        return "–"
    if value.error is None or value.error == 0:
        return number(value.mean) + unit
    decimals = 0
    while value.error * 10**decimals < 9.5 and decimals < 5:
        decimals += 1
    if decimals == 5:
        return f"{number(value.mean)} ± {number(value.error, 2)}{unit}"
    return f"{value.mean:.{decimals}f} ± {value.error:.{decimals}f}{unit}"
