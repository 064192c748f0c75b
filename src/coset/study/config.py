"""A study's configuration: a TOML file, checked key by key and expanded to its settings.

Every table ``[[setting]]`` describes a product: a key whose value is a list stands for all of its values in turn.
"""

from __future__ import annotations

import difflib
import itertools
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from coset.errors import CosetError
from coset.study.matchers import MATCHERS
from coset.study.protocol import Scope
from coset.study.tasks import OPTIONS, TASKS

Pe = Literal["sinusoidal", "learned", "rope", "none", "alibi"]
ModelName = Literal["vit", "gpt2", "llama", "bert"]
TaskName = Literal["digits", "fashion-mnist", "images", "text", "stdlib", "kjv", "tokens", "classify", "wordnet"]

Positive = Annotated[int, Field(ge=1, le=10_000_000)]
Seed = Annotated[int, Field(ge=0)]


def _counted(value: object) -> object:
    """A number of seeds stands for 1, 2, ..."""
    return list(range(1, value + 1)) if isinstance(value, int) and not isinstance(value, bool) else value


Seeds = Annotated[list[Seed], BeforeValidator(_counted)]
Matchers = Annotated[list[str], Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Training(_Strict):
    """How long and how models train. At the top level: the defaults of all settings."""

    epochs: Positive | None = None
    steps: Positive | None = None
    retrain: Annotated[float, Field(gt=0)] = 1.0
    """Length of a training after part of a model was drawn afresh, as a fraction of the first one."""
    learning_rate: Annotated[float, Field(gt=0)] = 3e-3
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    batch: Positive = 64
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    clip: Annotated[float, Field(gt=0)] = 1.0


class Model(_Strict):
    """Everything that decides the architecture, but for what the data prescribes."""

    model: ModelName
    pe: Pe
    layers: Positive = 2
    width: Positive = 64
    heads: Positive = 4
    kv_heads: Positive | None = None
    mlp_width: Positive | None = None
    rope_base: Annotated[float, Field(gt=0)] | None = None
    norm: Literal["layer", "rms"] | None = None
    post_norm: bool = False


class Data(_Strict):
    """Everything that decides the data. Which keys a task takes is written in `coset.study.tasks`."""

    task: TaskName
    path: str | None = None
    tokenizer: str | None = None
    train_size: Positive | None = None
    test_size: Positive | None = None
    context: Annotated[int, Field(ge=2)] | None = None
    patch: Positive | None = None
    vocabulary: Annotated[int, Field(ge=3)] | None = None
    label_column: int | str | None = None
    text_column: int | str | None = None


class Setting(Data, Model, Training):
    """One cell of the study: data, model, scope and training, with all keys filled in."""

    scope: Scope
    freeze: bool = False
    learning_steps: Positive = 600
    """Of the matchers that learn."""
    ablations: bool = False
    seeds: Seeds
    matchers: Matchers

    def part(self, kind: type[BaseModel]) -> dict[str, Any]:
        """The keys of one of the three parts, `Data`, `Model` or `Training`."""
        return self.model_dump(include=set(kind.model_fields))


class Study(_Strict):
    """A whole study. `folder` is where relative paths start, `document` the configuration as it was written."""

    name: str
    points: Annotated[int, Field(ge=2)] = 25
    base_seed: Seed = 0
    data_seed: Seed = 0
    settings: tuple[Setting, ...]
    folder: Path
    document: Mapping[str, Any]


_LISTS = ("seeds", "matchers")
"""Keys that are lists by nature and multiply nothing."""
_SHARED = (*_LISTS, "learning_steps", *Training.model_fields)
_TOP = ("name", "points", "base_seed", "data_seed", *_SHARED, "setting")


def load(path: Path) -> Study:
    """Read, check and expand a configuration.

    Raises
    ------
    CosetError
        If the file cannot be read, or with one line for every key that is unknown, missing or has a value that cannot be.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CosetError(f"{path}: there is no such file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CosetError(f"{path}: is not TOML: {error}") from error
    return parse(document, owner=str(path), folder=path.absolute().parent)


def parse(document: Mapping[str, Any], *, owner: str = "study", folder: Path | None = None) -> Study:
    """Check and expand a configuration that has been read; see :func:`load`."""
    faults = [_unknown(key, key, _TOP) for key in document if key not in _TOP]
    tables = document.get("setting", [])
    if not isinstance(tables, list) or not tables or not all(isinstance(table, Mapping) for table in tables):
        faults.append("setting: expected at least one table [[setting]]")
        tables = []
    defaults = {"seeds": 3, "matchers": ["naive", "two_stage"], **{key: document[key] for key in _SHARED if key in document}}
    settings: list[Setting] = []
    for number, table in enumerate(tables, start=1):
        found, wrong = _expand(table, defaults, f"setting {number}")
        for setting in found:
            if setting not in settings:
                settings.append(setting)
        faults += wrong
    top = {key: document[key] for key in ("name", "points", "base_seed", "data_seed") if key in document}
    try:
        study = Study(**top, settings=tuple(settings), folder=folder or Path.cwd(), document=document)
    except ValidationError as error:
        faults = [*_lines(error, ""), *faults]
    if faults:
        raise CosetError(f"{owner}: the configuration cannot be used\n" + "\n".join(dict.fromkeys(faults)))
    return study


def _expand(table: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> tuple[list[Setting], list[str]]:
    known = tuple(Setting.model_fields)
    faults = [_unknown(f"{where}: {key}", key, known) for key in table if key not in known]
    table = {key: value for key, value in table.items() if key in known}
    if "epochs" in table and "steps" in table:
        faults.append(f"{where}: epochs, steps: give one of them")
    # A table's own length replaces the study's, whichever way either is given.
    inherited = {key: value for key, value in defaults.items() if not (key in ("epochs", "steps") and {"epochs", "steps"} & set(table))}
    merged = {**inherited, **table}
    if "epochs" not in merged and "steps" not in merged:
        faults.append(f"{where}: epochs: missing; give epochs or steps, here or at the top")
    lists = {key: value for key, value in merged.items() if isinstance(value, list) and key not in _LISTS}
    faults += [f"{where}: {key}: expected at least one value, got an empty list" for key, value in lists.items() if not value]
    settings = []
    for values in itertools.product(*lists.values()):
        try:
            setting = Setting(**{**merged, **dict(zip(lists, values, strict=True))})
        except ValidationError as error:
            faults += _lines(error, f"{where}: ")
            continue
        faults += _contradictions(setting, where)
        settings.append(_normal(setting))
    faults += _useless(settings, table, where)
    return settings, faults


def _normal(setting: Setting) -> Setting:
    """The same setting without values that change nothing, so that a product does not hold it twice."""
    change: dict[str, Any] = {}
    if setting.pe != "rope":
        change["rope_base"] = None
    if setting.scope == "whole":
        change |= {"freeze": False, "retrain": 1.0}
    if not setting.scope.endswith("-attention"):
        change["ablations"] = False
    if setting.kv_heads is None:
        change["kv_heads"] = setting.heads
    return setting.model_copy(update=change)


def _contradictions(setting: Setting, where: str) -> list[str]:
    faults = []
    for name in setting.matchers:
        if name not in MATCHERS:
            faults.append(f"{where}: matchers: expected some of {', '.join(MATCHERS)}, got {name!r}{_nearest(name, tuple(MATCHERS))}")
    if len(setting.seeds) < 2:
        faults.append(f"{where}: seeds: a pair needs at least 2, got {setting.seeds}")
    for key in _LISTS:
        values = getattr(setting, key)
        if len(set(values)) != len(values):
            faults.append(f"{where}: {key}: {values} holds a value twice")
    if setting.width % setting.heads:
        faults.append(f"{where}: width: {setting.width} is not a multiple of {setting.heads} heads")
    if setting.kv_heads is not None and setting.heads % setting.kv_heads:
        faults.append(f"{where}: kv_heads: {setting.heads} heads are not a multiple of {setting.kv_heads}")
    return faults


def _useless(settings: Sequence[Setting], given: Mapping[str, Any], where: str) -> list[str]:
    """Keys of a table that no member of its product makes use of: a mistake, or a wish that cannot come true."""
    if not settings:
        return []
    tasks = {setting.task for setting in settings}
    taken = {key for task in tasks for key in TASKS[task].keys}
    faults = [f"{where}: {key}: no task among {', '.join(sorted(tasks))} takes it" for key in given if key in OPTIONS and key not in taken]
    scopes = sorted({setting.scope for setting in settings})
    if given.get("ablations") and not any(setting.ablations for setting in settings):
        faults.append(f"{where}: ablations: they need an attention scope, such as first-attention; got {', '.join(scopes)}")
    for key in ("freeze", "retrain"):
        if given.get(key) and scopes == ["whole"]:
            faults.append(f"{where}: {key}: the scope whole leaves nothing to freeze or to start from")
    if "rope_base" in given and not any(setting.pe == "rope" for setting in settings):
        faults.append(f"{where}: rope_base: only pe rope has one, got {', '.join(sorted({setting.pe for setting in settings}))}")
    return faults


def _unknown(path: str, key: str, known: Sequence[str]) -> str:
    return f"{path}: unknown key{_nearest(key, known)}"


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"


def _lines(error: ValidationError, where: str) -> list[str]:
    """One line for every fault that pydantic found."""
    lines: dict[str, str] = {}
    for fault in error.errors():
        key = str(fault["loc"][0])
        if fault["type"] == "missing":
            lines[key] = f"{where}{key}: missing"
        elif fault["type"] == "literal_error":
            choices = get_args(Setting.model_fields[key].annotation)
            options = [x for choice in choices for x in (get_args(choice) or (choice,)) if isinstance(x, str)]
            lines[key] = f"{where}{key}: expected one of {', '.join(options)}, got {fault['input']!r}"
        else:
            message = fault["msg"][0].lower() + fault["msg"][1:]
            lines.setdefault(key, f"{where}{key}: {message}, got {fault['input']!r}")
    return list(lines.values())
