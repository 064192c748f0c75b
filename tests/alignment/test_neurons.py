"""Neurons: the scale of a pair against dense grids, the assignment against every permutation."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from architecture_zoo import RMS, attention, difference, distance, flags, function, model, of_layers
from coset.alignment import align
from coset.alignment.features import NeuronFeatures
from coset.alignment.neurons import match_neurons, rescale, solve_scales
from coset.architecture import MLP, Experts, Layer
from coset.groups import Monomial, Permutation, Wreath
from coset.transform import random_transform

F64 = torch.float64


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def scale_value(c: Tensor, alpha: Tensor, beta: Tensor, p: Tensor, q: Tensor) -> Tensor:
    return c**2 * p + q / c**2 - 2 * (alpha * c + beta / c)


@pytest.mark.parametrize("positive", [True, False])
@given(seed=st.integers(0, 10**6), size=st.floats(-6, 6), lean=st.floats(-4, 4))
def test_scales_reach_the_global_minimum(positive: bool, seed: int, size: float, lean: float) -> None:
    e = torch.tensor([size, lean], dtype=F64).exp()
    x, y = normal(seed, 2, 3, 50), normal(seed + 1, 2, 3, 50)
    (up_b, down_b), (up_a, down_a) = (x[0] * e[1], x[1] / e[1]), (y[0] * e[0], y[1] * e[0])
    args = (up_b * up_a).sum(0), (down_b * down_a).sum(0), up_b.square().sum(0), down_b.square().sum(0)
    c = solve_scales(*args, positive=positive)
    assert not positive or bool((c > 0).all())
    found = scale_value(c, *args)
    radii = torch.linspace(-14, 14, 20001, dtype=F64).exp()[:, None]
    tolerance = 1e-9 * (args[2] * args[3]).sqrt() + 1e-9 * (up_a.square().sum(0) + down_a.square().sum(0))
    for sign in (1,) if positive else (1, -1):
        assert bool((found <= scale_value(sign * radii, *args).amin(0) + tolerance).all())


def test_dead_neurons_keep_their_scale() -> None:
    zero, one = torch.zeros(1, dtype=F64), torch.ones(1, dtype=F64)
    for p, q in ((zero, one), (one, zero), (zero, zero)):
        assert float(solve_scales(zero, zero, p, q, positive=True)) == 1.0
        assert float(solve_scales(-one * p, -one * q, p, q, positive=True)) == 1.0
        assert abs(float(solve_scales(-one * p, -one * q, p, q, positive=False))) == 1.0
    assert float(solve_scales(-one, zero, one, zero, positive=False)) == -1.0


def features(seed: int, n: int, plain: bool) -> NeuronFeatures:
    return NeuronFeatures(normal(seed, 4, n), normal(seed + 1, 3, n), normal(seed + 2, 4, n) if plain else None, None)


def total(a: NeuronFeatures, b: NeuronFeatures) -> float:
    pairs = [(a.covariant, b.covariant), (a.dual, b.dual)] + ([] if a.plain is None or b.plain is None else [(a.plain, b.plain)])
    return sum(float((x - y).square().sum()) for x, y in pairs)


def moved(f: NeuronFeatures, order: Tensor, scale: Tensor) -> NeuronFeatures:
    return NeuronFeatures(f.covariant[:, order] * scale, f.dual[:, order] / scale, None if f.plain is None else f.plain[:, order], None)


@pytest.mark.parametrize("plain", [False, True])
def test_plain_neurons_get_the_best_of_all_permutations(plain: bool) -> None:
    for seed in range(10):
        a, b = features(seed, 5, plain), features(seed + 100, 5, plain)
        order = match_neurons(Permutation(5), a, b, ("neurons",))
        ones = torch.ones(5, dtype=F64)
        best = min(total(a, moved(b, torch.tensor(o), ones)) for o in itertools.permutations(range(5)))
        assert total(a, moved(b, order, ones)) == pytest.approx(best)


@pytest.mark.parametrize("plain", [False, True])
def test_signed_neurons_get_the_best_of_all_signed_permutations(plain: bool) -> None:
    for seed in range(10):
        a, b = features(seed, 4, plain), features(seed + 100, 4, plain)
        g = match_neurons(Monomial(4, "sign"), a, b, ("neurons",))
        signs = [torch.tensor(s, dtype=F64) for s in itertools.product((1.0, -1.0), repeat=4)]
        best = min(total(a, moved(b, torch.tensor(o), s)) for o in itertools.permutations(range(4)) for s in signs)
        assert total(a, moved(b, g.order, g.scale)) == pytest.approx(best)


@pytest.mark.parametrize("scales", ["positive", "nonzero"])
def test_scaled_neurons_are_recovered_and_rescaled(scales: str) -> None:
    group = Monomial(6, scales)  # type: ignore[arg-type]
    b = features(3, 6, scales == "nonzero")
    g = group.random(torch.Generator().manual_seed(0))
    a = moved(b, g.order, g.scale)
    found = match_neurons(group, a, b, ("neurons",))
    assert torch.equal(found.order, g.order)
    assert float((found.scale - g.scale).abs().max()) <= 1e-9
    in_order = rescale(group, moved(b, torch.arange(6), g.scale), b)
    assert torch.equal(in_order.order, torch.arange(6))
    assert float((in_order.scale - g.scale).abs().max()) <= 1e-9


def test_signs_in_place() -> None:
    b, signs = features(3, 6, False), torch.tensor([1.0, -1, -1, 1, 1, -1], dtype=F64)
    assert torch.equal(rescale(Monomial(6, "sign"), moved(b, torch.arange(6), signs), b).scale, signs)


def test_experts_are_recovered_whole() -> None:
    mlp = MLP(7, "silu", gated=True)
    architecture = of_layers(Layer(attention(), Experts(5, 2, mlp), RMS, RMS))
    p = model(architecture)
    q = random_transform(architecture, p, spaces=("experts", "neurons"), seed=2)(p)
    only_neurons = align(architecture, p, q, spaces=("neurons",))
    assert distance(only_neurons.parameters, p) > 0.1
    assert difference(function(architecture, only_neurons.parameters), function(architecture, p)) <= 1e-10
    assert torch.equal(only_neurons.transform.element["layers.0.neurons"].order, torch.arange(5))
    both = align(architecture, p, q, spaces=("experts", "neurons"))
    assert distance(both.parameters, p) <= 1e-10
    q = random_transform(architecture, p, spaces=("experts",), seed=2)(p)
    only_experts = align(architecture, p, q, spaces=("experts",))
    assert distance(only_experts.parameters, p) <= 1e-10
    identity = Wreath(Monomial(7, "nonzero"), 5).identity()
    assert torch.equal(only_experts.transform.element["layers.0.neurons"].inner.order, identity.inner.order)


@pytest.mark.parametrize("mlp", ["gelu", "relu", "tanh", "swiglu"])
def test_a_dead_neuron_stays_harmless(mlp: str) -> None:
    architecture = flags("rope", "rms", "all", 3, None, mlp, False, layers=1)
    p = model(architecture)
    for n in ("up", "gate"):
        if f"layers.0.mlp.{n}" in p:
            p[f"layers.0.mlp.{n}"][:, 2] = 0
            p[f"layers.0.mlp.{n}_bias"][2] = 0
    p["layers.0.mlp.down"][2] = 0
    p["layers.0.mlp.down"][4] = 0
    q = random_transform(architecture, p)(p)
    found = align(architecture, p, q)
    assert all(bool(torch.isfinite(x).all()) for x in found.parameters.values())
    assert difference(function(architecture, found.parameters), function(architecture, p)) <= 1e-10
    assert difference(found.parameters["layers.0.attention.q"], p["layers.0.attention.q"]) <= 1e-8


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_neurons_of_a_layer_get_the_least_distance_of_all_orders(mlp: str) -> None:
    gated = mlp == "swiglu"
    architecture = of_layers(Layer(attention(), MLP(5, "silu" if gated else "gelu", gated, up_bias=True), RMS, RMS))
    names = [f"layers.0.mlp.{n}" for n in ("up", "up_bias", "gate", "gate_bias")]
    down = "layers.0.mlp.down"
    for seed in range(4):
        a, b = model(architecture, seed), model(architecture, 50 + seed)

        def reordered(order: tuple[int, ...], b: dict[str, Tensor] = b) -> dict[str, Tensor]:
            index = torch.tensor(order)
            return b | {n: b[n][..., index] for n in names if n in b} | {down: b[down][index]}

        best = min(distance(reordered(o), a) for o in itertools.permutations(range(5)))
        found = distance(align(architecture, a, b, spaces=("neurons",)).parameters, a)
        assert found < best if gated else found == pytest.approx(best)
