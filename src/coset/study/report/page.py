"""The page: a template filled with the study; what moves on it is drawn in the browser from the same numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import tomli_w
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from coset.study.report.analysis import CONNECTED, answer, best, encodings, scopes, sweeps, uncertain
from coset.study.report.names import details, estimate, label, looks, number, title
from coset.study.report.results import CELL, STAGE_TWO, Estimate, Scalar, Setting, Study
from coset.study.report.tables import architectures, in_order, tables

_DIGITS = 6  # of numbers that are drawn; the tables beside the page hold all of them


def page(study: Study) -> str:
    """The report as one HTML document that asks the network for nothing."""
    environment = Environment(
        loader=PackageLoader("coset.study.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"title": title, "number": number, "estimate": estimate, "exact": _exact}
    told, look = details(study.settings), looks(study.matchers)
    settings = in_order(study.settings)
    rows = tables(study)["settings"]
    # What all settings share is said once. An id is never shared, unless there is one setting.
    shared = {key: value for key, value in rows[0].items() if key != "setting" and all(row[key] == value for row in rows)}
    settings.sort(key=lambda setting: [other.cell[:2] for other in study.settings].index(setting.cell[:2]))
    return environment.get_template("report.html.j2").render(
        study=study,
        settings=settings,
        details=told,
        label=lambda setting: label(setting, told[setting.id]),
        best=best,
        uncertain=uncertain,
        doubtful=any(uncertain(setting) for setting in settings),
        looks=look,
        answer=[text.replace(" %", "\u00a0%").replace(" ± ", "\u00a0±\u00a0") for text in answer(study)],
        scopes=scopes(study),
        encodings=encodings(study),
        sweeps=sweeps(study),
        architectures=architectures(study),
        ablated=[setting for setting in settings if setting.ablations is not None],
        stages=STAGE_TWO,
        most=max((s.symmetry.total for s in settings if s.symmetry is not None), default=1),
        connected=100 * CONNECTED,
        pairs=sum(len(setting.matchers[name].pairs) for setting in settings for name in list(setting.matchers)[:1]),
        models=sum(len(setting.models) for setting in settings),
        hours=None if study.seconds is None else _duration(study.seconds),
        config=_toml(study.config),
        shared=shared,
        exact=[{key: value for key, value in row.items() if key not in shared} for row in rows],
        data=Markup(_script(_data(study, settings, told))),
        css=Markup(_text("report.css")),
        js=Markup(_text("report.js")),
    )


def _text(name: str) -> str:
    return files("coset.study.report").joinpath("templates", name).read_text(encoding="utf-8")


def _script(document: Mapping[str, Any]) -> str:
    # Inside a script element only "<" could end it; U+2028 and U+2029 are escaped by ASCII output.
    return json.dumps(document, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _toml(config: Mapping[str, Any]) -> str:
    return tomli_w.dumps(_given(config))


def _given(value: Any) -> Any:
    """The value without its nulls: TOML has none, a key that is not set is left out."""
    if isinstance(value, dict):
        return {key: _given(item) for key, item in value.items() if item is not None}
    return [_given(item) for item in value] if isinstance(value, list) else value


def _exact(value: Scalar) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _round(value: float | None) -> float | None:
    if value is None or value == 0:
        return value
    return round(value, _DIGITS - 1 - math.floor(math.log10(abs(value))))


def _pair(value: Estimate) -> list[float | None]:
    return [_round(value.mean), _round(value.error)]


def _data(study: Study, settings: list[Setting], told: Mapping[str, str]) -> dict[str, Any]:
    return {
        "matchers": [{"name": name, "title": title(name), **_look(study, name)} for name in study.matchers],
        "settings": [
            {
                "id": setting.id,
                "label": label(setting, told[setting.id]),
                "cell": [title(value) for value in setting.cell],
                "detail": told[setting.id],
                "dimension": None if setting.symmetry is None else setting.symmetry.attention,
                "best": best(setting),
                "base": None if setting.base is None else [_round(x) for x in setting.base],
                "models": [
                    {
                        "seed": model.seed,
                        "loss": _round(model.loss),
                        "accuracy": _round(model.accuracy),
                        "steps": model.steps,
                        "training": [_round(x) for x in model.training],
                    }
                    for model in setting.models
                ],
                "matchers": {
                    name: {
                        "percent": _pair(matching.percent),
                        "loss_barrier": _pair(matching.loss_barrier),
                        "accuracy_barrier": _pair(matching.accuracy_barrier),
                        "loss_area": _pair(matching.loss_area),
                        "distance": _pair(matching.distance),
                        "points": [_round(t) for t in matching.pairs[0].points],
                        "pairs": [
                            {
                                "seeds": pair.seeds,
                                "barrier": _round(pair.loss_barrier),
                                "distance": _round(pair.distance),
                                "loss": [_round(x) for x in pair.loss],
                                "accuracy": [_round(x) for x in pair.accuracy],
                            }
                            for pair in matching.pairs
                        ],
                    }
                    for name, matching in setting.matchers.items()
                },
            }
            for setting in settings
        ],
        "cell": [title(name) for name in CELL],
        "sweeps": [
            {
                "field": title(sweep.field),
                "fixed": sweep.fixed,
                "numeric": sweep.numeric,
                "values": [value if sweep.numeric else title(value) for value in sweep.values],
                "ids": [setting.id for setting in sweep.settings],
            }
            for sweep in sweeps(study)
        ],
    }


def _look(study: Study, name: str) -> dict[str, Any]:
    look = looks(study.matchers)[name]
    return {"dashes": look.dashes, "marker": look.marker}
