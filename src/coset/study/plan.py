"""From a configuration to the units of work: which models are trained, which pairs compared, and what each depends on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coset.architecture import Architecture
from coset.errors import CosetError
from coset.study.config import Data, Model, Setting, Study, Training
from coset.study.matchers import LEARNED
from coset.study.models import architecture, check_fit
from coset.study.store import Unit
from coset.study.tasks import TASKS, Request, Shape, hashed, request

Pair = tuple[int, int]
"""Seeds of the reference and of the model that is brought to it."""


@dataclass(frozen=True)
class Cell:
    """A setting and its units.

    Attributes
    ----------
    id
        Short, readable, unique in the study.
    base, models
        The model whose scope is drawn afresh, and the models trained from there, by seed.
    pairs
        For every pair of seeds one unit a matcher.
    ablations
        For every pair of seeds, where the setting asks for them.
    """

    id: str
    setting: Setting
    shape: Shape
    architecture: Architecture
    data: Unit
    base: Unit
    models: Mapping[int, Unit]
    pairs: Mapping[Pair, Mapping[str, Unit]]
    ablations: Mapping[Pair, Unit]

    def units(self) -> Iterator[Unit]:
        """All units, inputs first."""
        yield from (self.data, self.base, *self.models.values())
        for pair, by_matcher in self.pairs.items():
            yield from by_matcher.values()
            if pair in self.ablations:
                yield self.ablations[pair]


@dataclass(frozen=True)
class Plan:
    """Everything that a study does.

    Attributes
    ----------
    cells
        Settings whose models are known.
    units
        Without repetition, inputs first.
    faults
        What stands in the way, one line each.
    """

    study: Study
    cells: tuple[Cell, ...]
    units: tuple[Unit, ...]
    faults: tuple[str, ...]


def make(study: Study, *, device: str = "cpu") -> Plan:
    """Check every setting against its data, and list all units.

    A setting whose data is missing is planned with a typical size, so that its cost can be estimated.
    """
    faults: dict[str, None] = {}
    requests: dict[str, _Source] = {}
    names = identifiers(study.settings)
    cells = []
    for name, setting in zip(names, study.settings, strict=True):
        options = setting.part(Data)
        source = requests.setdefault(repr(options), _Source(request(options, study.folder, study.data_seed)))
        if source.fault is not None:
            faults[source.fault] = None
        try:
            check_fit(setting.model, setting.task, TASKS[setting.task].kind)
            if source.shape is None:
                continue
            arch = architecture(setting.part(Model), source.shape.model_part())
        except CosetError as error:
            faults |= dict.fromkeys(f"setting {name}: {line}" for line in str(error).splitlines())
            continue
        cells.append(_cell(name, setting, source.shape, arch, source.unit, study, device))
    units = dict.fromkeys(unit for cell in cells for unit in cell.units())
    return Plan(study, tuple(cells), tuple(units), tuple(faults))


class _Source:
    """One data set: its fault if it cannot be used, its shape (a typical one if it is missing), its unit."""

    def __init__(self, wanted: Request):
        task = TASKS[wanted.task]
        self.fault: str | None = None
        self.shape: Shape | None = None
        config: dict[str, Any] = dict(wanted.options)
        try:
            task.check(wanted)
            self.shape = task.shape(wanted, present=True)
            config = hashed(wanted)
        except (CosetError, OSError) as error:
            self.fault = str(error)
            try:
                self.shape = task.shape(wanted, present=False)
            except CosetError:
                self.shape = None
        self.unit = Unit("data", config, {}, f"data {wanted.task}", {"options": dict(wanted.options)})


def _cell(name: str, setting: Setting, shape: Shape, arch: Architecture, data: Unit, study: Study, device: str) -> Cell:
    model = {"model": setting.part(Model), "shape": shape.model_part(), "device": device}
    recipe = {
        key: getattr(setting, key)
        for key in ("epochs", "steps", "learning_rate", "weight_decay", "batch", "warmup", "label_smoothing", "clip")
    }
    scratch = {**model, "recipe": recipe, "fraction": 1.0}
    base = Unit("train", {**scratch, "seed": study.base_seed}, {"data": data}, f"base of {name}")

    def trained(seed: int) -> Unit:
        label = f"model {name}, seed {seed}"
        if setting.scope == "whole":
            return Unit("train", {**scratch, "seed": seed}, {"data": data}, label)
        config = {**scratch, "fraction": setting.retrain, "seed": seed, "scope": setting.scope, "freeze": setting.freeze}
        return Unit("train", config, {"data": data, "base": base}, label)

    models = {seed: trained(seed) for seed in setting.seeds}
    pairs, ablations = {}, {}
    for a, b in itertools.combinations(setting.seeds, 2):
        inputs = {"data": data, "reference": models[a], "other": models[b]}
        config = {**model, "scope": setting.scope, "points": study.points}
        learning = {"learning_steps": setting.learning_steps}
        pairs[a, b] = {
            matcher: Unit(
                "pair",
                {**config, "matcher": matcher, **(learning if matcher in LEARNED else {})},
                inputs,
                f"pair {name}, seeds {a} and {b}, {matcher}",
            )
            for matcher in setting.matchers
        }
        if setting.ablations:
            ablations[a, b] = Unit("ablation", config, inputs, f"ablation {name}, seeds {a} and {b}")
    return Cell(name, setting, shape, arch, data, base, models, pairs, ablations)


# --- names ------------------------------------------------------------------------------------------------------------


def identifiers(settings: Sequence[Setting]) -> list[str]:
    """Names such as ``digits-vit-rope-whole``, with further keys that tell settings apart which share these four: ``...-l4-base100``."""
    groups: dict[str, list[Setting]] = {}
    for setting in settings:
        groups.setdefault(_stem(setting), []).append(setting)
    telling = {stem: _telling(group) for stem, group in groups.items()}
    names: list[str] = []
    for setting in settings:
        stem = _stem(setting)
        name = "-".join((stem, *filter(None, (_shown(key, getattr(setting, key)) for key in telling[stem]))))
        # What is left differs in seeds or matchers only.
        same = sum(other.partition("~")[0] == name for other in names)
        names.append(f"{name}~{same + 1}" if same else name)
    return names


def _telling(group: Sequence[Setting]) -> list[str]:
    """A smallest choice of keys that still tells all settings of a group apart, sizes before options of the training."""
    keys = list(_FURTHER)

    def distinct(chosen: Sequence[str]) -> int:
        return len({tuple(repr(getattr(setting, key)) for key in chosen) for setting in group})

    for key in reversed(_FURTHER):
        rest = [other for other in keys if other != key]
        if distinct(rest) == distinct(keys):
            keys = rest
    return keys


_NAMED = ("task", "model", "pe", "scope", "seeds", "matchers", "ablations")
_FURTHER = (
    "path",
    *(key for key in Model.model_fields if key not in _NAMED),
    "freeze",
    *(key for key in Data.model_fields if key not in (*_NAMED, "path")),
    *Training.model_fields,
    "learning_steps",
)
_SHORT = {
    "layers": "l",
    "width": "d",
    "heads": "h",
    "kv_heads": "kv",
    "rope_base": "base",
    "mlp_width": "m",
    "context": "c",
    "learning_steps": "learn",
}


def _stem(setting: Setting) -> str:
    return f"{setting.task}-{setting.model}-{setting.pe}-{setting.scope}"


def _shown(key: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    word = _SHORT.get(key, key.replace("_", ""))
    if value is True:
        return word
    if key in ("path", "tokenizer"):
        return Path(value).stem
    return f"{word}{value:g}" if isinstance(value, float) else f"{word}{value}"


__all__ = ["Cell", "Pair", "Plan", "identifiers", "make"]
