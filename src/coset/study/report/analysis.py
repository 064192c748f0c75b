"""What the numbers of a study say: best matchers, what is connected, effect of the encoding, sweeps, and the answer in words."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median, stdev

from coset.study.report.names import details, estimate, number, ordered, title
from coset.study.report.results import CELL, Estimate, Scalar, Setting, Study

CONNECTED = 0.01
"""Two models count as linearly connected where the mean accuracy barrier is at most this (one percentage point)."""

_DEPENDENT = {"pe": ("rope_base",), "heads": ("kv_heads",)}
# What may change along with a swept field: a RoPE base exists under RoPE alone, and KV heads follow the heads.


def best(setting: Setting) -> str | None:
    """The matcher with the lowest mean loss barrier, naive included; None if nothing was measured, or naive has no barrier to lower."""
    found = {name: matching.loss_barrier.mean or 0.0 for name, matching in setting.matchers.items()}
    return min(found, key=lambda name: found[name]) if found and found.get("naive") != 0 else None


def uncertain(setting: Setting) -> bool:
    """Whether the naive barrier lies within two standard errors of 0, so that ratios to it say little."""
    naive = setting.matchers.get("naive")
    return naive is not None and (naive.loss_barrier.mean or 0.0) <= 2 * (naive.loss_barrier.error or 0.0)


@dataclass(frozen=True)
class Summary:
    """One matcher over the settings of one encoding and scope (None: all of them).

    Attributes
    ----------
    settings, connected
        How many settings there are, and in how many of them the accuracy barrier is at most `CONNECTED`.
    median, lowest, highest
        Of the barrier left in % of naive, over the settings where that ratio exists; None where there is none.
    """

    pe: str | None
    scope: str | None
    matcher: str
    settings: int
    connected: int
    median: float | None
    lowest: float | None
    highest: float | None


def summarise(study: Study, matcher: str, pe: str | None = None, scope: str | None = None) -> Summary:
    """The `matcher` over all settings with this encoding and scope."""
    chosen = [
        setting.matchers[matcher]
        for setting in study.settings
        if matcher in setting.matchers and pe in (None, setting.fields["pe"]) and scope in (None, setting.fields["scope"])
    ]
    left = [matching.percent.mean for matching in chosen if matching.percent.mean is not None]
    return Summary(
        pe,
        scope,
        matcher,
        len(chosen),
        sum((matching.accuracy_barrier.mean or 0.0) <= CONNECTED for matching in chosen),
        *((median(left), min(left), max(left)) if left else (None, None, None)),
    )


def encodings(study: Study) -> list[str]:
    """Positional encodings of the study."""
    return ordered((str(setting.fields["pe"]) for setting in study.settings), "pe")


def scopes(study: Study) -> list[str]:
    """Scopes of the study, from small to whole."""
    return ordered((str(setting.fields["scope"]) for setting in study.settings), "scope")


def summaries(study: Study) -> list[Summary]:
    """Every matcher over everything, over each encoding, each scope, and each of both together; empty groups are left out."""
    groups = [(pe, scope) for pe in (None, *encodings(study)) for scope in (None, *scopes(study))]
    found = [summarise(study, matcher, pe, scope) for pe, scope in groups for matcher in study.matchers]
    return [summary for summary in found if summary.settings]


@dataclass(frozen=True)
class Contrast:
    """RoPE against another encoding in settings that are otherwise equal: difference of the barriers left, in percentage points of naive."""

    other: str
    matcher: str
    settings: int
    difference: Estimate


def contrasts(study: Study) -> list[Contrast]:
    """For each other encoding and each matcher but naive; those without matched settings are left out."""
    found = []
    for other in (pe for pe in encodings(study) if pe != "rope"):
        for matcher in (name for name in study.matchers if name != "naive"):
            left = [
                (row[0].matchers[matcher].percent.mean, row[1].matchers[matcher].percent.mean)
                for row in _matched(study, other)
                if all(matcher in setting.matchers for setting in row)
            ]
            differences = [a - b for a, b in left if a is not None and b is not None]
            if differences:
                error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None
                found.append(Contrast(other, matcher, len(differences), Estimate(fmean(differences), error)))
    return found


def _matched(study: Study, other: str) -> list[tuple[Setting, Setting]]:
    rotary = [setting for setting in study.settings if setting.fields["pe"] == "rope"]
    plain = [setting for setting in study.settings if setting.fields["pe"] == other]
    return [(a, b) for a in rotary for b in plain if _without(a, "pe") == _without(b, "pe")]


def _without(setting: Setting, field: str) -> tuple[tuple[str, Scalar], ...]:
    # With as many KV heads as heads, KV heads are no choice of their own.
    plain = setting.fields.get("kv_heads") == setting.fields.get("heads")
    dependent = tuple(name for name in _DEPENDENT.get(field, ()) if name != "kv_heads" or plain)
    return tuple((key, value) for key, value in setting.fields.items() if key != field and key not in dependent)


@dataclass(frozen=True)
class Sweep:
    """Settings that differ in one field alone, in its order."""

    field: str
    fixed: str
    settings: tuple[Setting, ...]

    @property
    def values(self) -> tuple[Scalar, ...]:
        """The values of the field."""
        return tuple(setting.fields[self.field] for setting in self.settings)

    @property
    def numeric(self) -> bool:
        """Whether the field is a number, to be drawn along an axis."""
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values)


def sweeps(study: Study) -> list[Sweep]:
    """Every field but the four of the matrix that takes several values while all else is equal."""
    told = details(study.settings)
    found = []
    for field in dict.fromkeys(key for setting in study.settings for key in setting.fields if key not in CELL):
        groups: dict[object, list[Setting]] = {}
        for setting in study.settings:
            if setting.fields.get(field) is not None:
                groups.setdefault(_without(setting, field), []).append(setting)
        for group in groups.values():
            if len({setting.fields[field] for setting in group}) < 2:
                continue
            ready = sorted(group, key=lambda setting: _key(setting.fields[field]))
            # What else tells this group apart in its cells, so that two sweeps never share a name.
            skip = (title(field), title("kv_heads")) if field == "heads" else (title(field),)
            rest = [part for part in told[ready[0].id].split(", ") if part and not part.startswith(skip)]
            found.append(Sweep(field, " · ".join([*(title(value) for value in ready[0].cell), *rest]), tuple(ready)))
    return found


def _key(value: Scalar) -> tuple[bool, float, str]:
    return (True, 0.0, value) if isinstance(value, str) else (False, float(value or 0), "")


def answer(study: Study) -> list[str]:
    """The findings in sentences, most important first; every number in them is a row of ``answer.csv`` or ``encodings.csv``."""
    parts: list[Callable[[Study], str | None]] = [_closest, _others, _connected, _rotary]
    return [text for part in parts if (text := part(study)) is not None]


def leader(study: Study) -> str | None:
    """The matcher with the lowest median of barriers left, among those measured in most settings; None without ratios."""
    found = [summarise(study, name) for name in study.matchers if name != "naive"]
    most = max((summary.settings for summary in found), default=0)
    known = [summary for summary in found if summary.median is not None and 2 * summary.settings > most]
    return min(known, key=lambda summary: summary.median or 0.0).matcher if known else None


def _closest(study: Study) -> str:
    count = f"{len(study.settings)} setting{'s' if len(study.settings) > 1 else ''}"
    first = leader(study)
    if first is None:
        return f"No barrier left can be given in % of naive: in none of {count} was there a naive barrier and a matcher to compare with it."
    left = _span(summarise(study, first))
    return f"Of the loss barrier that naive interpolation meets, {title(first)} matching leaves {left}: median over {count} [lowest to highest]."


def _others(study: Study) -> str | None:
    found = [summarise(study, name) for name in study.matchers if name not in ("naive", leader(study))]
    told = [f"{title(summary.matcher)} {_span(summary)}" for summary in found if summary.median is not None]
    return f"Left by the other matchers: {'; '.join(told)}." if told else None


def _span(summary: Summary) -> str:
    if summary.lowest == summary.highest:
        return f"{number(summary.median)} %"
    return f"{number(summary.median)} % [{number(summary.lowest)} to {number(summary.highest)} %]"


def _connected(study: Study) -> str:
    told = []
    for scope in scopes(study):
        chosen = [setting for setting in study.settings if setting.fields["scope"] == scope and setting.matchers]
        near = [min(matching.accuracy_barrier.mean or 0.0 for matching in setting.matchers.values()) <= CONNECTED for setting in chosen]
        alone = summarise(study, "naive", scope=scope).connected
        if near:
            told.append(f"{title(scope)} {sum(near)} of {len(near)} ({alone} without matching)")
    return f"Linearly connected, with an accuracy barrier of at most 1 percentage point under some matcher: {', '.join(told)}."


def _rotary(study: Study) -> str | None:
    found = contrasts(study)
    others = [name for name in study.matchers if name != "naive"]
    # The first matcher listed is the study's reference; the leader is the one that a reader would use.
    told = []
    for matcher in dict.fromkeys([*others[:1], *([first] if (first := leader(study)) else [])]):
        rows = [row for row in found if row.matcher == matcher]
        parts = [
            f"{_points(row.difference)} {_named(row.other)} ({row.settings} matched setting{'s' * (row.settings > 1)})" for row in rows
        ]
        if parts:
            told.append(f"under {title(matcher)} matching RoPE leaves {' and '.join(parts)}")
    return f"With all else equal, {'; '.join(told)}." if told else None


def _named(pe: str) -> str:
    return "no encoding" if pe == "none" else f"{title(pe)} encoding"


def _points(difference: Estimate) -> str:
    mean = difference.mean or 0.0
    size = estimate(Estimate(abs(mean), difference.error))
    return f"{size} percentage points {'more than' if mean > 0 else 'less than'}"
