"""Many models in one gauge: round trips cancel, the order plays no part, and scrambled copies average to the model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from architecture_zoo import difference, distance, flags, function, model, special
from coset.alignment import Match, Solvers, align_many, match
from coset.architecture import Architecture
from coset.errors import CosetError
from coset.transform import random_transform

ARCHITECTURES: dict[str, Architecture] = {
    "rope, grouped": flags("rope", "rms", "none", 3, None, "swiglu", False),
    "stored table": flags("stored", "layer", "all", 6, None, "gelu", False),
    "fixed table, grouped": flags("sinusoidal", "rms", "qkv", 3, None, "relu", False),
    "learned, tied": flags("learned", "rms", "none", 3, None, "tanh", True),
    "qk-norm": flags("rope", "rms", "none", 3, "head", "geglu", False),
    "no norm": flags("none", "none", "qkv", 6, None, "gelu", False),
    "experts": special()["experts, gated"],
    "no head": special()["no head"],
}
NOISE = (0.0, 0.05)


def scrambled(architecture: Architecture, noise: float, count: int = 3, seed: int = 0) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """A model, and itself with `count` copies that were moved at random after noise of a share of each tensor's size."""
    p = model(architecture, seed=seed)
    models = [p]
    for s in range(1, count + 1):
        draw = torch.Generator().manual_seed(100 * seed + s)
        near = {n: x + noise * x.std(correction=0) * torch.randn(x.shape, generator=draw, dtype=x.dtype) for n, x in p.items()}
        models.append(random_transform(architecture, near, seed=100 * seed + s)(near))
    return p, models


def same(x: Mapping[str, Tensor], y: Mapping[str, Tensor]) -> bool:
    return x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x)


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_round_trips_cancel(name: str, noise: float) -> None:
    architecture = ARCHITECTURES[name]
    _, models = scrambled(architecture, noise)
    found = align_many(architecture, models, cycles=3, rounds=1)
    for i, j, k in itertools.permutations(range(4), 3):
        steps = found.between(i, j), found.between(j, k), found.between(k, i)
        moved = models[i]
        for step in steps:
            moved = step(moved)
        assert distance(moved, models[i]) < 1e-9
    first, second, third = found.between(1, 2), found.between(2, 3), found.between(3, 1)
    assert distance(first.then(second).then(third)(models[1]), models[1]) < 1e-9
    assert distance(found.between(2, 2)(models[2]), models[2]) < 1e-9
    assert all(t.belongs() for t in (first, second, third))


def test_pairwise_alignments_do_not_cancel() -> None:
    architecture = ARCHITECTURES["rope, grouped"]
    _, models = scrambled(architecture, 0.05)
    moved: Mapping[str, Tensor] = models[1]
    for i, j in ((1, 2), (2, 3), (3, 1)):
        moved = match(architecture, models[j], models[i], cycles=3).transform(moved)
    assert distance(moved, models[1]) > 1e-4


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_function_of_every_model_is_kept_and_the_reference_untouched(name: str) -> None:
    architecture = ARCHITECTURES[name]
    _, models = scrambled(architecture, 0.05)
    found = align_many(architecture, models, cycles=3, rounds=1)
    aligned = found.aligned(models)
    assert same(aligned[0], models[0])
    for before, after in zip(models, aligned, strict=True):
        assert difference(function(architecture, after), function(architecture, before)) < 1e-9
    for i, j in itertools.product(range(4), repeat=2):
        assert difference(function(architecture, found.between(i, j)(models[i])), function(architecture, models[i])) < 1e-9


@pytest.mark.parametrize("name", ["rope, grouped", "stored table", "fixed table, grouped"])
def test_the_order_of_the_others_changes_no_bit(name: str) -> None:
    architecture = ARCHITECTURES[name]
    _, models = scrambled(architecture, 0.05)
    found = align_many(architecture, models, cycles=1, rounds=1)
    aligned, mean = found.aligned(models), found.mean(models)
    for order in itertools.permutations((1, 2, 3)):
        listed = [models[0], *(models[i] for i in order)]
        other = align_many(architecture, listed, cycles=1, rounds=1)
        assert other.history == found.history
        assert same(other.mean(listed), mean)
        for at, i in enumerate(order, 1):
            assert same(other.aligned(listed)[at], aligned[i])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scrambled_copies_average_to_the_model(name: str) -> None:
    architecture = ARCHITECTURES[name]
    p, models = scrambled(architecture, 0.0)
    mean = align_many(architecture, models).mean(models)
    assert distance(mean, p) < 1e-8
    naive = {n: torch.stack([m[n] for m in models]).mean(0) for n in p}
    assert distance(naive, p) > 0.1
    assert difference(function(architecture, mean), function(architecture, p)) < 1e-7
    assert difference(function(architecture, naive), function(architecture, p)) > 0.1


@pytest.mark.parametrize("name", ["rope, grouped", "fixed table, grouped"])
def test_noise_averages_out_and_rounds_only_help(name: str) -> None:
    architecture = ARCHITECTURES[name]
    p, models = scrambled(architecture, 0.05, count=5)
    # The reference has no noise: what is left is what 5 of 6 models have, averaged over 6.
    found = align_many(architecture, models, cycles=10, rounds=2)
    falling = [step.objective for step in found.history]
    assert len(falling) > 1
    assert all(after < before for before, after in itertools.pairwise(falling))
    single = distance(found.aligned(models)[3], p)
    assert distance(found.mean(models), p) < 0.55 * single


@pytest.mark.parametrize("spaces", [("heads", "qk", "vo"), ("neurons", "gains", "stream"), ("heads", "gains", "shifts")])
def test_some_spaces(spaces: tuple[str, ...]) -> None:
    architecture = ARCHITECTURES["stored table"]
    p = model(architecture)
    models = [p, *(random_transform(architecture, p, spaces=spaces, seed=s)(p) for s in (1, 2))]
    found = align_many(architecture, models, spaces=spaces)
    assert distance(found.mean(models), p) < 1e-8


def test_another_matcher_goes_through_the_reference() -> None:
    architecture = ARCHITECTURES["rope, grouped"]
    _, models = scrambled(architecture, 0.05)
    asked = []

    def matcher(reference: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Match:
        asked.append((reference, other))
        return match(architecture, reference, other, spaces=("heads", "qk", "vo"))

    found = align_many(architecture, models, matcher=matcher)
    assert [(a is models[0], b is models[i]) for i, (a, b) in enumerate(asked, 1)] == [(True, True)] * 3
    assert found.history == ()
    assert same(found.aligned(models)[2], match(architecture, models[0], models[2], spaces=("heads", "qk", "vo")).transform(models[2]))
    assert distance(found.between(2, 3).then(found.between(3, 1)).then(found.between(1, 2))(models[2]), models[2]) < 1e-9


def test_solvers_are_those_that_were_asked_for() -> None:
    architecture = ARCHITECTURES["rope, grouped"]
    _, models = scrambled(architecture, 0.05)
    asked = {"solvers": Solvers(linear="orthogonal"), "spaces": ("heads", "qk", "vo")}
    found = align_many(architecture, models, rounds=0, **asked)  # type: ignore[arg-type]
    for i in (1, 2, 3):
        own = match(architecture, models[0], models[i], **asked).transform(models[i])  # type: ignore[arg-type]
        assert same(found.aligned(models)[i], own)
        assert not same(match(architecture, models[0], models[i], spaces=("heads", "qk", "vo")).transform(models[i]), own)


def test_two_models_and_models_that_are_equal() -> None:
    architecture = ARCHITECTURES["rope, grouped"]
    p, models = scrambled(architecture, 0.05)
    pair = align_many(architecture, models[:2], cycles=3)
    assert same(pair.aligned(models[:2])[1], match(architecture, models[0], models[1], cycles=3).transform(models[1]))
    assert [step.name for step in pair.history] == ["start", "alignment to the reference"]
    equal = align_many(architecture, [p, p, p])
    assert distance(equal.mean([p, p, p]), p) < 1e-12


def test_pinned_tensors_stay() -> None:
    architecture = ARCHITECTURES["rope, grouped"]
    _, models = scrambled(architecture, 0.0)
    pinned = ("head", "final_norm.gain")
    spaces = ("heads", "qk", "vo", "neurons", "gains")
    found = align_many(architecture, models, spaces=spaces, pinned=pinned)
    for before, after in zip(models, found.aligned(models), strict=True):
        assert all(difference(after[n], before[n]) < 1e-15 for n in pinned)


def test_progress_counts_models() -> None:
    architecture = ARCHITECTURES["rope, grouped"]
    _, models = scrambled(architecture, 0.05)
    calls: list[tuple[str, int, int]] = []
    align_many(architecture, models, cycles=2, rounds=1, progress=lambda *call: calls.append(call))
    assert calls[:3] == [("alignment to the reference", i, 3) for i in range(3)]
    assert {what for what, _, _ in calls[3:]} == {"round 1"}


def test_bad_input() -> None:
    architecture = ARCHITECTURES["rope, grouped"]
    p, models = scrambled(architecture, 0.0)
    with pytest.raises(CosetError, match="at least one other, got 1"):
        align_many(architecture, [p])
    with pytest.raises(CosetError, match="model 2: tensor head is missing"):
        align_many(architecture, [p, models[1], {n: x for n, x in p.items() if n != "head"}])
    spaces = iter((("heads",), ("gains",), ("heads",)))
    with pytest.raises(CosetError, match="do not fold the same coordinates"):
        align_many(architecture, models, matcher=lambda a, b: match(architecture, a, b, spaces=next(spaces)))
    found = align_many(architecture, models)
    with pytest.raises(CosetError, match="there is no model 4"):
        found.between(0, 4)
    with pytest.raises(CosetError, match="holds 4 models, got 3"):
        found.mean(models[:3])
