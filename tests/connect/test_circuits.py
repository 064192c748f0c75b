"""The path on which circuits are straight: exact at the ends, blind to bases inside heads, and what a dense computation gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from architecture_zoo import RMS, attention, difference, function, model, of_layers, special
from coset import transformer
from coset.architecture import MLP, Alibi, Architecture, Layer, RelativeBias, Rotary
from coset.connect import barrier, evaluate, interpolate, interpolate_circuits
from coset.errors import CosetError
from coset.transform import random_transform
from coset.transformer import forward, random_inputs

BASES = ("qk", "vo")


def one(positions: object = None, **more: object) -> Architecture:
    return of_layers(*[Layer(attention(positions, **more), MLP(7), RMS, RMS)] * 2)


ARCHITECTURES = {
    "vanilla": one(kv=6),
    "vanilla, grouped, biased": one(bias=True, lanes=5, values=3),
    "one KV head": one(heads=5, kv=1, lanes=3),
    "rope, half": one(Rotary.standard(6), lanes=6, bias=True),
    "rope, interleaved": one(Rotary.standard(6, pairing="interleaved"), lanes=6, kv=6),
    "partial rope, half": one(Rotary.standard(4), lanes=7, bias=True),
    "partial rope, interleaved": one(Rotary.standard(4, pairing="interleaved"), lanes=7),
    "zero frequencies": one(Rotary(((0.9,), (0.0,), (0.31,))), lanes=9, bias=True),
    "magnitude, scale": one(replace(Rotary.standard(4), magnitude=1.3), lanes=5, scale=0.4),
    "alibi": one(Alibi.standard(6)),
    "relative bias": one(RelativeBias(8, 20), kv=6),
    "window": one(Rotary.standard(4), window=3),
    "axial rope": special()["patches, class token"],
    "post-norm": special()["post-norm layer"],
    "parallel": special()["parallel, one norm, biased"],
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ends_are_the_models_and_the_path_leads_there(name: str) -> None:
    architecture = ARCHITECTURES[name]
    a, b = model(architecture, seed=1), model(architecture, seed=2)
    for t, end in ((0.0, a), (1.0, b)):
        place, parameters = interpolate_circuits(architecture, a, b, t)
        assert place == architecture
        assert all(torch.equal(parameters[n], end[n]) for n in end)
        wider, near = interpolate_circuits(architecture, a, b, abs(t - 1e-12))
        assert wider.layers[0].attention.head_dim == 2 * architecture.layers[0].attention.head_dim
        assert difference(function(wider, near), function(architecture, end)) < 1e-9


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_basis_inside_the_heads_changes_the_factor_path_only(name: str) -> None:
    architecture = ARCHITECTURES[name]
    a, b = model(architecture, seed=1), model(architecture, seed=2)
    turned = random_transform(architecture, b, spaces=BASES, seed=3)(b)
    before, after = (function(*interpolate_circuits(architecture, a, other, 0.4)) for other in (b, turned))
    assert difference(after, before) < 1e-9
    before, after = (function(architecture, interpolate(a, other, 0.4)) for other in (b, turned))
    assert difference(after, before) > 1e-3


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_between_a_model_and_itself_in_another_basis_nothing_changes(name: str) -> None:
    architecture = ARCHITECTURES[name]
    a = model(architecture, seed=1)
    turned = random_transform(architecture, a, spaces=BASES, seed=3)(a)
    for t in (0.25, 0.5):
        assert difference(function(*interpolate_circuits(architecture, a, turned, t)), function(architecture, a)) < 1e-9
    assert difference(function(architecture, interpolate(a, turned, 0.5)), function(architecture, a)) > 1e-3


def test_order_of_the_heads_matters() -> None:
    architecture = ARCHITECTURES["vanilla"]
    a, b = model(architecture, seed=1), model(architecture, seed=2)
    swapped = random_transform(architecture, b, spaces=("heads",), seed=3)(b)
    before, after = (function(*interpolate_circuits(architecture, a, other, 0.4)) for other in (b, swapped))
    assert difference(after, before) > 1e-3


def test_attention_is_that_of_the_interpolated_circuits() -> None:
    t, width, kv, group, lanes = 0.3, 10, 3, 2, 5
    architecture = of_layers(Layer(attention(lanes=lanes, kv=kv, heads=kv * group), MLP(7), RMS, RMS))
    a, b = model(architecture, seed=1), model(architecture, seed=2)
    x = torch.randn(4, 9, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = "layers.0.attention"
    # Circuits [kv, query, width, width], never split into factors again.
    m, n = (
        sum(weight * torch.einsum(formula, end[f"{p}.{first}"], end[f"{p}.{second}"]) for weight, end in ((1 - t, a), (t, b)))
        for formula, first, second in (("xkqm,ykm->kqxy", "q", "k"), ("xkm,kqmy->kqxy", "v", "o"))
    )
    logits = torch.einsum("bix,kqxy,bjy->bkqij", x, m, x) / lanes**0.5
    hidden = torch.triu(torch.ones(9, 9, dtype=torch.bool), 1)
    pattern = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    expected = torch.einsum("bkqij,bjx,kqxy->biy", pattern, x, n)
    wider, parameters = interpolate_circuits(architecture, a, b, t)
    assert difference(transformer.attention(wider, 0, parameters, x), expected) < 1e-9
    assert difference(transformer.attention(architecture, 0, interpolate(a, b, t), x), expected) > 1e-2


def test_everything_outside_the_heads_is_interpolated() -> None:
    architecture = ARCHITECTURES["partial rope, half"]
    a, b = model(architecture, seed=1), model(architecture, seed=2)
    _, parameters = interpolate_circuits(architecture, a, b, 0.25)
    straight = interpolate(a, b, 0.25)
    heads = [f"layers.{i}.attention.{n}" for i in range(2) for n in ("q", "k", "v", "o", "q_bias", "k_bias", "v_bias")]
    assert parameters.keys() == straight.keys()
    assert all(torch.equal(parameters[n], straight[n]) == (n not in heads) for n in straight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    architecture = ARCHITECTURES["partial rope, half"]
    a, b = ({n: x.to(dtype) for n, x in model(architecture, seed=s).items()} for s in (1, 2))
    _, parameters = interpolate_circuits(architecture, a, b, 0.5)
    assert {x.dtype for x in parameters.values()} == {dtype}


@pytest.mark.parametrize("qk_norm", ["head", "all"])
def test_normalised_queries_are_refused(qk_norm: str) -> None:
    architecture = one(Rotary.standard(4), qk_norm=qk_norm)
    a = model(architecture)
    with pytest.raises(CosetError, match="layer 0 normalises queries and keys"):
        interpolate_circuits(architecture, a, a, 0.0)


def test_places_and_models_are_checked() -> None:
    architecture = ARCHITECTURES["vanilla"]
    a = model(architecture)
    with pytest.raises(CosetError, match=r"\[0, 1\]"):
        interpolate_circuits(architecture, a, a, 1.5)
    with pytest.raises(CosetError, match="tensor head has shape"):
        interpolate_circuits(architecture, a, a | {"head": torch.ones(3)}, 0.5)


def test_barrier_on_the_path_of_circuits() -> None:
    architecture = ARCHITECTURES["partial rope, half"]
    a, b = model(architecture, seed=1), model(architecture, seed=2)
    turned = random_transform(architecture, b, spaces=BASES, seed=3)(b)
    data = random_inputs(architecture, 5, length=9)
    curve = evaluate(architecture, a, b, data, path=interpolate_circuits, points=5)
    again = evaluate(architecture, a, turned, data, path=interpolate_circuits, points=5)
    straight = evaluate(architecture, a, b, data, points=5)
    torch.testing.assert_close(torch.tensor(again.loss), torch.tensor(curve.loss), rtol=1e-6, atol=0)
    assert (curve.loss[0], curve.loss[-1]) == (straight.loss[0], straight.loss[-1])
    assert abs(curve.loss[2] - straight.loss[2]) > 1e-3
    # The same model in another basis: no barrier at all, where the segment has one.
    moved = random_transform(architecture, a, spaces=BASES, seed=3)(a)
    labels = forward(architecture, a, data).argmax(-1)
    assert barrier(architecture, a, moved, data, labels, path=interpolate_circuits, points=5).loss < 1e-6
    assert barrier(architecture, a, moved, data, labels, points=5).loss > 1e-2
