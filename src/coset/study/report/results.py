"""What a finished study left in ``results.json``, read and checked: everything after this module works on these records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from coset.errors import CosetError

FILE = "results.json"
CELL = ("task", "model", "pe", "scope")
"""Fields that name a cell of the study's matrix; a setting's other fields tell apart the settings of one cell."""

Scalar = str | int | float | bool | None
STAGE_TWO = ("none", "orthogonal", "full")
_NOT_FIELDS = ("id", "parameters")


@dataclass(frozen=True)
class Estimate:
    """Mean over pairs and its standard error (None for one pair); mean None is a ratio to a barrier of 0."""

    mean: float | None
    error: float | None


@dataclass(frozen=True)
class Pair:
    """One segment between the models of two seeds."""

    seeds: tuple[int, int]
    loss_barrier: float
    accuracy_barrier: float
    loss_area: float
    distance: float
    points: tuple[float, ...]
    loss: tuple[float, ...]
    accuracy: tuple[float, ...]


@dataclass(frozen=True)
class Matching:
    """All pairs of a setting under one matcher."""

    loss_barrier: Estimate
    accuracy_barrier: Estimate
    percent: Estimate
    loss_area: Estimate
    distance: Estimate
    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class Model:
    """One trained model: its test scores and its training loss at the recorded steps."""

    seed: int
    loss: float
    accuracy: float
    steps: tuple[float, ...]
    training: tuple[float, ...]


@dataclass(frozen=True)
class Symmetry:
    """Dimensions of the symmetry group of a setting's architecture, totals over all layers."""

    attention: int
    total: int
    stream_group: str
    stream_dimension: int


@dataclass(frozen=True)
class Stage:
    """Stage 2 stopped early or not: the barrier that is left."""

    loss_barrier: Estimate
    percent: Estimate


@dataclass(frozen=True)
class Ablations:
    """Stage 1: rank of the chosen permutation among all `of` and L-hat (0 is the best of all, 100 as bad as no permutation). Stage 2 by name.

    Where there are too many permutations to try, or none is better than another, there is no rank or no L-hat.
    """

    rank: Estimate
    of: int | None
    l_hat: Estimate
    stage_two: Mapping[str, Stage]


@dataclass(frozen=True)
class Setting:
    """One setting; `fields` holds every scalar that describes it, the four of `CELL` first; `data` what is known of its data."""

    id: str
    fields: Mapping[str, Scalar]
    data: Mapping[str, Any]
    parameters: int
    symmetry: Symmetry | None
    base: tuple[float, float] | None
    models: tuple[Model, ...]
    matchers: Mapping[str, Matching]
    ablations: Ablations | None

    @property
    def cell(self) -> tuple[str, ...]:
        """Task, model, positional encoding and scope."""
        return tuple(str(self.fields[name]) for name in CELL)


@dataclass(frozen=True)
class Failure:
    """A unit that did not finish."""

    unit: str
    setting: str
    error: str


@dataclass(frozen=True)
class Study:
    """A whole study; `seconds` is None where the run did not record its time."""

    name: str
    version: str
    definition: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    settings: tuple[Setting, ...]
    failures: tuple[Failure, ...]
    seconds: float | None

    @property
    def matchers(self) -> tuple[str, ...]:
        """Names of the matchers of all settings: naive first, then in order of appearance."""
        names = dict.fromkeys(name for setting in self.settings for name in setting.matchers)
        return tuple(sorted(names, key=lambda name: name != "naive"))


def read(directory: Path) -> Study:
    """Read and check ``directory/results.json``.

    Raises
    ------
    CosetError
        If the file is missing, is no JSON, lacks something, or holds no setting. The message names the place.
    """
    path = directory / FILE
    try:
        # Opened as bytes: a file that is not UTF-8 is corrupt like any other.
        document = json.loads(path.read_bytes(), parse_constant=_refuse)
    except OSError as error:
        raise CosetError(f"{path}: cannot be read ({error.strerror}); `coset study run CONFIG.toml -o {directory}` writes it") from error
    except (ValueError, RecursionError) as error:
        raise CosetError(f"{path}: not the JSON that `coset study run` writes ({error}); run the study again to write it anew") from error
    return _study(_Node(document, "", path))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


@dataclass(frozen=True)
class _Node:
    """A value of the document with its place in it, for messages."""

    value: Any
    place: str
    path: Path

    def fail(self, expected: str) -> NoReturn:
        got = json.dumps(self.value)
        got = got if len(got) <= 60 else got[:57] + "..."
        raise CosetError(
            f"{self.path}: {self.place or 'top level'}: expected {expected}, got {got}; run `coset study run` again to mend it"
        )

    def __getitem__(self, key: str) -> _Node:
        table = self.table()
        if key not in table:
            raise CosetError(f"{self.path}: {self.place or 'top level'}: has no {key!r}; run `coset study run` again to mend it")
        return _Node(table[key], f"{self.place}.{key}" if self.place else key, self.path)

    def table(self) -> Mapping[str, Any]:
        return self.value if isinstance(self.value, dict) else self.fail("a table")

    def items(self) -> Iterator[tuple[str, _Node]]:
        return ((key, self[key]) for key in self.table())

    def list(self) -> list[_Node]:
        values = self.value if isinstance(self.value, list) else self.fail("a list")
        return [_Node(value, f"{self.place}[{i}]", self.path) for i, value in enumerate(values)]

    def text(self) -> str:
        return self.value if isinstance(self.value, str) else self.fail("a text")

    def number(self) -> float:
        return self.value if isinstance(self.value, int | float) and not isinstance(self.value, bool) else self.fail("a number")

    def maybe(self) -> float | None:
        return None if self.value is None else self.number()

    def whole(self) -> int:
        return self.value if isinstance(self.value, int) and not isinstance(self.value, bool) else self.fail("a whole number")

    def numbers(self) -> tuple[float, ...]:
        return tuple(node.number() for node in self.list())


def _study(top: _Node) -> Study:
    settings = tuple(_setting(node) for node in top["settings"].list())
    if not settings:
        raise CosetError(f"{top.path}: settings: expected at least one setting, got none; nothing of the study has finished")
    known = [setting.id for setting in settings]
    if len(set(known)) != len(known):
        twice = next(name for name in known if known.count(name) > 1)
        raise CosetError(f"{top.path}: settings: expected different ids, got {twice!r} twice; run `coset study run` again to mend it")
    timing = top.table().get("timing")
    return Study(
        name=top["name"].text(),
        version=top["coset_version"].text(),
        definition=top["definition"].text(),
        config=top["config"].table(),
        environment=top["environment"].table(),
        settings=settings,
        failures=tuple(Failure(*(node[key].text() for key in ("unit", "setting", "error"))) for node in top["failures"].list()),
        seconds=_Node(timing, "timing", top.path)["total_seconds"].number() if timing else None,
    )


def _setting(node: _Node) -> Setting:
    scalars = {key: value for key, value in node.table().items() if value is None or isinstance(value, str | int | float | bool)}
    results = ("symmetry", "base", "ablations")  # null where a unit failed or was not asked for
    fields: dict[str, Scalar] = {key: node[key].text() for key in CELL}
    fields |= {key: value for key, value in scalars.items() if key not in (*CELL, *_NOT_FIELDS, *results)}
    symmetry, base, ablations = (node[key] for key in results)
    return Setting(
        id=node["id"].text(),
        fields=fields,
        data=node.table().get("data", {}),
        parameters=node["parameters"].whole(),
        symmetry=None if symmetry.value is None else _symmetry(symmetry),
        base=None if base.value is None else (base["loss"].number(), base["accuracy"].number()),
        models=tuple(_model(model) for model in node["models"].list()),
        matchers={name: _matching(entry) for name, entry in node["matchers"].items()},
        ablations=None if ablations.value is None else _ablations(ablations),
    )


def _symmetry(node: _Node) -> Symmetry:
    stream = node["stream"]
    return Symmetry(
        node["attention_dimension"].whole(), node["total_dimension"].whole(), stream["group"].text(), stream["dimension"].whole()
    )


def _model(node: _Node) -> Model:
    steps, loss = node["training"]["steps"].numbers(), node["training"]["loss"]
    if len(loss.numbers()) != len(steps):
        loss.fail(f"{len(steps)} numbers")
    return Model(node["seed"].whole(), node["loss"].number(), node["accuracy"].number(), steps, loss.numbers())


def _estimate(node: _Node) -> Estimate:
    return Estimate(node["mean"].number(), node["standard_error"].maybe())


def _matching(node: _Node) -> Matching:
    pairs = tuple(_pair(pair) for pair in node["pairs"].list())
    if not pairs or any(pair.points != pairs[0].points for pair in pairs):
        node["pairs"].fail("at least one pair, all measured at the same points")
    return Matching(
        **{key: _estimate(node[key]) for key in ("loss_barrier", "accuracy_barrier", "loss_area", "distance")},
        percent=Estimate(node["percent_of_naive"].maybe(), node["percent_standard_error"].maybe()),
        pairs=pairs,
    )


def _pair(node: _Node) -> Pair:
    seeds = node["seeds"].list()
    if len(seeds) != 2:
        node["seeds"].fail("two seeds")
    points = node["points"].numbers()
    for key in ("loss", "accuracy"):
        if len(node[key].numbers()) != len(points) or len(points) < 2:
            node[key].fail(f"one number at each of at least 2 points, of which there are {len(points)}")
    return Pair(
        seeds=(seeds[0].whole(), seeds[1].whole()),
        **{key: node[key].number() for key in ("loss_barrier", "accuracy_barrier", "loss_area", "distance")},
        points=points,
        loss=node["loss"].numbers(),
        accuracy=node["accuracy"].numbers(),
    )


def _ablations(node: _Node) -> Ablations:
    rank, l_hat, stages = (node[key] for key in ("permutation_rank", "l_hat", "stage_two"))
    nothing = Estimate(None, None)
    return Ablations(
        rank=nothing if rank.value is None else _estimate(rank),
        of=None if rank.value is None else rank["of"].whole(),
        l_hat=nothing if l_hat.value is None else _estimate(l_hat),
        stage_two={name: _stage(stages[name]) for name in STAGE_TWO},
    )


def _stage(node: _Node) -> Stage:
    return Stage(_estimate(node["loss_barrier"]), Estimate(node["percent_of_naive"].maybe(), node["percent_standard_error"].maybe()))
