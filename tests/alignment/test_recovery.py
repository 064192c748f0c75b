"""Planted elements are recovered: 200 random trials of every encoding, and every special architecture; and the history tells the truth."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from architecture_zoo import RMS, attention, difference, distance, flags, function, grid, model, of_layers, special
from coset.alignment import Alignment, Matching, align, match
from coset.architecture import MLP, Architecture, Layer, Rotary, Sinusoidal, uniform
from coset.parameters import tensors
from coset.transform import SPACES, random_transform

TRIALS, BATCH = 200, 10
TWO_STAGE = ("heads", "qk", "vo")
SPECIAL = {name: a for name, a in special().items() if name != "head wider than the stream"}


def trials() -> Iterator[Architecture]:
    """Random sizes, odd and coprime, for every encoding, KV grouping and bias in turn."""
    draw = random.Random(0)
    encodings = ("none", "sinusoidal", "learned", "rope", "alibi", "t5", "partial", "repeated", "axial", "zero")
    for trial in range(TRIALS):
        pe = encodings[trial % len(encodings)]
        kv, group = draw.choice([(1, 1), (3, 1), (5, 1), (2, 3), (3, 2), (1, 4)])
        lanes = draw.choice([3, 5, 7]) if pe in ("none", "sinusoidal", "learned", "alibi", "t5") else draw.choice([6, 8, 10])
        sizes = {
            "layers": draw.choice([1, 1, 2]),
            "width": draw.choice([12, 14, 16]),
            "heads": kv * group,
            "kv_heads": kv,
            "head_dim": lanes,
        }
        sizes |= {"vocab": 13, "positions": 11, "mlp_width": draw.choice([5, 9, 11])}
        norm, bias, mlp = (
            draw.choice(["none", "rms", "layer"]),
            draw.choice(["none", "qkv", "all"]),
            draw.choice(["gelu", "relu", "silu", "tanh", "swiglu", "geglu"]),
        )
        rotary = None
        if pe == "partial":
            rotary = Rotary.standard(4, pairing=draw.choice(["half", "interleaved"]))
        elif pe == "repeated":
            rotary = Rotary(((0.7,), (0.2,), (0.7,)))
        elif pe == "axial":
            rotary = Rotary(((0.7, 0.0), (0.0, 0.7), (0.7, 0.7)))
        elif pe == "zero":
            rotary = Rotary(((0.7,), (0.0,), (0.1,)), "interleaved")
        a = uniform(pe="rope" if rotary else pe, norm=norm, bias=bias, mlp=mlp, tied=draw.random() < 0.3, **sizes)  # type: ignore[arg-type]
        if rotary is None:
            yield a
            continue
        layers = tuple(replace(x, attention=replace(x.attention, positions=rotary)) for x in a.layers)
        if rotary.axes == 1:
            yield replace(a, layers=layers)
        else:
            patches = special()["patches, mean"]
            yield replace(a, layers=layers, inputs=replace(patches.inputs, grid=(2, 3)), outputs=patches.outputs, causal=False)


ARCHITECTURES = list(trials())


@pytest.mark.parametrize("batch", range(TRIALS // BATCH))
def test_planted_elements_are_recovered(batch: int) -> None:
    for trial in range(batch, TRIALS, TRIALS // BATCH):
        architecture = ARCHITECTURES[trial]
        p = model(architecture, seed=trial)
        q = random_transform(architecture, p, seed=1000 + trial)(p)
        assert distance(q, p) > 0.2
        found = align(architecture, p, q)
        assert distance(found.parameters, p) <= 1e-8, (trial, architecture)
        assert max(difference(found.parameters[n], p[n]) for n in p) <= 1e-7, (trial, architecture)


@pytest.mark.parametrize("architecture", SPECIAL.values(), ids=SPECIAL.keys())
def test_planted_elements_of_special_architectures_are_recovered(architecture: Architecture) -> None:
    p = model(architecture, seed=1)
    q = random_transform(architecture, p, seed=2)(p)
    found = align(architecture, p, q)
    assert distance(found.parameters, p) <= 1e-8
    assert difference(function(architecture, found.parameters), function(architecture, p)) <= 1e-10
    assert found.transform.belongs()
    assert list(found.parameters) == list(tensors(architecture))


SUBSETS = [
    ("heads",),
    TWO_STAGE,
    ("qk",),
    ("vo", "neurons"),
    ("neurons",),
    ("stream",),
    ("gains", "shifts"),
    ("shifts",),
    ("stream", "neurons"),
    tuple(s for s in SPACES if s != "stream"),
]


@pytest.mark.parametrize("spaces", SUBSETS, ids="-".join)
@pytest.mark.parametrize("name", ["rope", "t5", "qk-norm"])
def test_subsets_of_spaces_are_recovered_and_nothing_else_moves(name: str, spaces: tuple[str, ...]) -> None:
    architecture = {
        "rope": flags("rope", "layer", "all", 3, None, "swiglu", False),
        "t5": flags("t5", "rms", "qkv", 3, None, "relu", True),
        "qk-norm": flags("none", "rms", "none", 3, "all", "gelu", False),
    }[name]
    p = model(architecture)
    if spaces in (("gains", "shifts"), ("shifts",)) and name == "qk-norm":
        spaces = ("gains",)
    planted = random_transform(architecture, p, spaces=spaces, seed=4)
    q = planted(p)
    found = align(architecture, p, q, spaces=spaces)
    assert distance(found.parameters, p) <= 1e-8
    assert found.transform.element.keys() == planted.element.keys()
    still = [n for n in p if torch.equal(q[n], p[n])]
    assert max((difference(found.parameters[n], p[n]) for n in still), default=0.0) <= 1e-10


def test_layers_that_are_not_asked_for_stay() -> None:
    architecture = flags("rope", "none", "none", 3, None, "swiglu", False)
    p = model(architecture)
    spaces = (*TWO_STAGE, "neurons")
    q = random_transform(architecture, p, spaces=spaces)(p)
    found = align(architecture, p, q, spaces=spaces, layers=(1,)).parameters
    for n in p:
        if n.startswith("layers.1."):
            assert difference(found[n], p[n]) <= 1e-9
        else:
            assert difference(found[n], q[n]) <= 1e-12
    assert difference(function(architecture, found), function(architecture, p)) <= 1e-10


@pytest.mark.parametrize("name", ["rope", "learned"])
def test_single_precision_in_gives_single_precision_error(name: str) -> None:
    architecture = flags(name, "layer", "all", 3, None, "swiglu", False)
    p = model(architecture)
    q = random_transform(architecture, p)(p)
    narrow = [{n: x.to(torch.float32) for n, x in m.items()} for m in (p, q)]
    found = align(architecture, *narrow)
    assert {x.dtype for x in found.parameters.values()} == {torch.float64}
    assert distance(found.parameters, p) <= 1e-4


def test_other_seeds_of_one_pair() -> None:
    # The stream's order must be found from any scramble, tied or not, whatever lies in the way.
    for name, architecture in grid(12, seed=9).items():
        p = model(architecture)
        for seed in (21, 22):
            q = random_transform(architecture, p, seed=seed)(p)
            assert distance(align(architecture, p, q).parameters, p) <= 1e-8, (name, seed)


# --- independent models ---------------------------------------------------------------------------------------------


def never_rises(found: Alignment) -> bool:
    values = [s.objective for s in found.history]
    return all(after <= before for before, after in itertools.pairwise(values))


INDEPENDENT = {
    "rope": flags("rope", "none", "qkv", 3, None, "swiglu", False),
    "learned": flags("learned", "none", "all", 3, None, "relu", True),
    "sinusoidal": flags("sinusoidal", "none", "none", 6, None, "gelu", False),
    "t5": flags("t5", "none", "none", 3, None, "tanh", True),
    "experts": special()["experts, gelu"],
    "no gains": replace(flags("rope", "none", "none", 6, None, "geglu", False), final_norm=replace(RMS, gain=False)),
}
"""Without gains, so that the gauge of the matching is that of the weights and the objective a plain squared distance."""


@pytest.mark.parametrize("architecture", INDEPENDENT.values(), ids=INDEPENDENT.keys())
@pytest.mark.parametrize(
    "spaces", [TWO_STAGE, (*TWO_STAGE, "neurons", "experts"), (*TWO_STAGE, "neurons", "stream")], ids=["heads", "layer", "stream"]
)
def test_independent_models(architecture: Architecture, spaces: tuple[str, ...]) -> None:
    a, b = model(architecture, 1), model(architecture, 2)
    before = {n: x.clone() for n, x in a.items()}
    found = align(architecture, a, b, how=Matching(cycles=12), spaces=spaces)
    assert never_rises(found)
    squared = [sum(float((a[n] - m[n]).square().sum()) for n in a) for m in (b, found.parameters)]
    assert found.history[0].objective == pytest.approx(squared[0], rel=1e-9)
    assert found.history[-1].objective == pytest.approx(squared[1], rel=1e-9)
    assert squared[1] < squared[0]
    assert difference(function(architecture, found.parameters), function(architecture, b)) <= 1e-10
    assert all(torch.equal(a[n], before[n]) for n in a)
    assert found.transform.belongs()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["rope", "t5", "types", "output", "qk-norm", "parallel"])
def test_independent_models_in_all_spaces(name: str, seed: int) -> None:
    architecture = {
        "rope": flags("rope", "layer", "all", 3, None, "swiglu", False),
        "t5": flags("t5", "rms", "qkv", 3, None, "relu", True),
        "types": SPECIAL["types, embedding norm"],
        "output": SPECIAL["output arrangement"],
        "qk-norm": flags("rope", "rms", "none", 3, "all", "tanh", False),
        "parallel": SPECIAL["parallel, one norm, biased"],
    }[name]
    a, b = model(architecture, 10 + seed), model(architecture, 20 + seed)
    found = align(architecture, a, b, how=Matching(cycles=8))
    assert never_rises(found)
    assert found.history[-1].objective < found.history[0].objective
    assert difference(function(architecture, found.parameters), function(architecture, b)) <= 1e-10
    for n in a:  # in the reference's gauge
        if n.endswith("norm.gain") and n.removesuffix("norm.gain") + "norm.gain" in found.transform.target:
            assert torch.allclose(found.parameters[n], a[n])


def test_a_model_is_its_own_alignment() -> None:
    for name in ("rope", "learned"):
        architecture = flags(name, "layer", "all", 3, None, "gelu", False)
        p = model(architecture)
        found = align(architecture, p, p)
        assert distance(found.parameters, p) <= 1e-10
        assert found.history[0].objective <= 1e-20


def test_a_second_alignment_finds_nothing_more() -> None:
    architecture = INDEPENDENT["rope"]
    a, b = model(architecture, 1), model(architecture, 2)
    once = align(architecture, a, b, spaces=TWO_STAGE)
    twice = align(architecture, a, once.parameters, spaces=TWO_STAGE)
    assert twice.history[0].objective == pytest.approx(once.history[-1].objective)
    assert twice.history[-1].objective == pytest.approx(once.history[-1].objective, rel=1e-5)


def test_a_stream_pinned_by_a_table_stays() -> None:
    architecture = of_layers(Layer(attention(), MLP(7), RMS, RMS), positions=Sinusoidal(16))
    p = model(architecture)
    q = random_transform(architecture, p)(p)
    found = align(architecture, p, q)
    assert "stream" not in found.transform.element
    assert distance(found.parameters, p) <= 1e-8


def test_progress_is_reported() -> None:
    architecture = flags("rope", "rms", "none", 3, None, "gelu", False)
    p = model(architecture)
    seen: list[tuple[str, int, int]] = []
    align(architecture, p, p, spaces=TWO_STAGE, progress=lambda *x: seen.append(x))
    assert [x[1:] for x in seen] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("size", [0.0, 1e-7, 1e-4])
def test_models_that_are_near_as_they_are_given_need_one_start(size: float) -> None:
    a = flags("rope", "rms", "none", 3, None, "swiglu", False)
    p = model(a)
    generator = torch.Generator().manual_seed(1)
    q = {n: x * (1 + size * torch.randn(x.shape, generator=generator, dtype=torch.float64)) for n, x in p.items()}
    calls: list[tuple[str, int, int]] = []
    found = match(a, p, q, cycles=1, progress=lambda *done: calls.append(done))
    assert [done for what, done, _ in calls if what == "cycle 1"] == [0, 1, 2]
    assert found.history[-1].objective <= found.history[0].objective
    calls.clear()
    match(a, p, model(a, 7), cycles=1, progress=lambda *done: calls.append(done))
    assert len(calls) == 9, "unrelated models get every start"
