"""Gauge coordinates: each keeps the function, whatever its value, and each is undone; a move that is wrong in one sign is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from architecture_zoo import LAYER, RMS, attention, difference, distance, flags, function, grid, model, of_layers, special
from coset.architecture import MLP, Architecture, Layer, Norm, Rotary
from coset.errors import CosetError
from coset.normal_form import compatible_gauge, coordinates, fold, folded_architecture, random_gauge, read_gauge, unfold
from coset.parameters import blocks, check, tensors

ZOO = special() | grid(42)
SINGLE = {name: ZOO[name] for name in special()} | {
    f"{pe}-{norm}-all": flags(pe, norm, "all", 3, None, "swiglu", False, layers=1)
    for pe in ("none", "learned", "rope", "t5", "stored")
    for norm in ("rms", "layer")
}


def each(zoo: dict[str, Architecture]) -> Callable[..., object]:
    return pytest.mark.parametrize("architecture", zoo.values(), ids=zoo.keys())


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@each(ZOO)
def test_normal_form_and_every_gauge_keep_the_function(architecture: Architecture) -> None:
    p = model(architecture)
    expected = function(architecture, p)
    folded, normal, own = fold(architecture, p)
    check(folded, normal)
    assert own.keys() == coordinates(architecture).keys()
    assert {n: tuple(v.shape) for n, v in own.items()} == {n: c.shape for n, c in coordinates(architecture).items()}
    assert difference(function(folded, normal), expected) <= 1e-10
    assert distance(unfold(architecture, normal, own), p) <= 1e-13
    moved = unfold(architecture, normal, random_gauge(architecture, own, generator()))
    check(architecture, moved)
    assert difference(function(architecture, moved), expected) <= 1e-10
    if own:
        assert distance(moved, p) > 1e-2
    # Folding what was written in another gauge gives the same normal form: it is one.
    again = fold(architecture, moved)[1]
    assert distance(again, normal) <= 1e-12


@each(SINGLE)
def test_every_coordinate_moves_and_no_sign_is_arbitrary(architecture: Architecture) -> None:
    p = model(architecture)
    expected = function(architecture, p)
    for name, c in coordinates(architecture).items():
        _, normal, own = fold(architecture, p, {name, *c.needs})
        value = random_gauge(architecture, {name: own[name]}, generator())
        moved = unfold(architecture, normal, {**own, **value})
        changed = [n for n in p if not torch.allclose(moved[n], p[n], rtol=1e-9, atol=1e-9)]
        assert changed, name
        assert difference(function(architecture, moved), expected) <= 1e-10, name
        assert set(c.changes) == {n for n in changed if tensors(architecture)[n].layer is None}, name
        for n in changed:
            layer = tensors(architecture)[n].layer
            if n.endswith("k_bias") and layer is not None and (n == name or not architecture.layers[layer].attention.planes):
                continue  # free on every lane that stands still; see the test below
            # One tensor goes the opposite way; where it can (alone, or along 1) every number goes at random there or back.
            gap = moved[n] - p[n]
            signs = (
                -1.0
                if len(changed) > 1 and not name.endswith(" along 1")
                else torch.randint(0, 2, gap.shape, generator=generator(7)) * 2.0 - 1
            )
            wrong = {**moved, n: p[n] + signs * gap}
            assert difference(function(architecture, wrong), expected) > 1e-5, (name, n)


def test_key_bias_is_free_on_lanes_that_stand_still_only() -> None:
    partial = of_layers(Layer(attention(Rotary.standard(4), lanes=7, bias=True), MLP(7), RMS, RMS))
    p, name = model(partial), "layers.0.attention.k_bias"
    still = torch.tensor(partial.layers[0].attention.still_lanes)
    assert still.tolist() == [4, 5, 6]
    assert coordinates(partial)[name].shape == (3, 3)
    moved = p[name].clone()
    moved[:, still] += 1.0
    assert difference(function(partial, {**p, name: moved}), function(partial, p)) <= 1e-12
    moved = p[name].clone()
    moved[:, 0] += 1.0
    assert difference(function(partial, {**p, name: moved}), function(partial, p)) > 1e-3
    everywhere = of_layers(Layer(attention(Rotary.standard(4), bias=True), MLP(7), RMS, RMS))
    assert name not in coordinates(everywhere)


@pytest.mark.parametrize(
    "name", ["rope-layer-all", "t5-rms-all", "experts, relu", "parallel, one norm", "patches, class token", "types, tied"]
)
def test_blocks_can_be_streamed(name: str) -> None:
    architecture = SINGLE[name]
    p = model(architecture)
    folded, normal, own = fold(architecture, p)
    value = random_gauge(architecture, own, generator())
    whole = unfold(architecture, normal, value)
    parts: dict[str, Tensor] = {}
    gauges: dict[str, Tensor] = {}
    for block in blocks(architecture):
        part_architecture, part, gauge = fold(architecture, {n: p[n] for n in block})
        assert part_architecture == folded
        gauges |= gauge
        parts |= unfold(architecture, part, value)
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[n], whole[n]) for n in whole)
    assert gauges.keys() == own.keys()
    assert all(torch.equal(gauges[n], own[n]) for n in own)
    read = read_gauge(architecture, {n: x.to(torch.float32) for n, x in p.items()}, list(own))
    assert all(v.dtype == torch.float64 and torch.allclose(v, own[n], rtol=1e-4, atol=1e-5) for n, v in read.items())


def test_coordinates_that_need_others_are_refused_alone() -> None:
    architecture = SINGLE["rope-layer-all"]
    p, name = model(architecture), "layers.0.attention.q along 1"
    assert coordinates(architecture)[name].needs == ("layers.0.attention_norm.gain", "layers.0.attention_norm.bias")
    with pytest.raises(CosetError, match=r"q along 1 is free only where layers\.0\.attention_norm\.gain is folded too"):
        fold(architecture, p, [name])
    # The reason: with the gain in place, that direction is visible.
    lifted = {**p, "layers.0.attention.q": p["layers.0.attention.q"] + 1.0}
    assert difference(function(architecture, lifted), function(architecture, p)) > 1e-3


def test_unknown_coordinates_are_refused() -> None:
    architecture = SINGLE["rope-rms-all"]
    p = model(architecture)
    with pytest.raises(CosetError, match="no coordinate layers"):
        fold(architecture, p, ["layers.0.attention.k_bias"])
    with pytest.raises(CosetError, match="no coordinate embed"):
        unfold(architecture, p, {"embed.norm.gain": torch.ones(10)})


def test_fold_leaves_its_input_alone() -> None:
    architecture = SINGLE["learned-layer-all"]
    p = model(architecture)
    before = {n: x.clone() for n, x in p.items()}
    _, normal, own = fold(architecture, p)
    unfold(architecture, normal, random_gauge(architecture, own, generator()))
    assert all(torch.equal(p[n], before[n]) for n in before)


def test_architecture_of_the_normal_form_lacks_what_was_folded() -> None:
    architecture = SINGLE["rope-layer-all"]
    folded = folded_architecture(architecture, ["layers.0.mlp_norm.gain", "final_norm.gain"])
    assert folded.layers[0].attention_norm == architecture.layers[0].attention_norm
    assert folded.layers[0].mlp_norm == replace(LAYER, gain=False)
    assert folded.final_norm == replace(LAYER, gain=False)


# --- zeros ----------------------------------------------------------------------------------------------------------


def test_a_dead_gain_folds_but_cannot_be_written() -> None:
    architecture = SINGLE["rope-rms-all"]
    p, name = model(architecture), "layers.0.mlp_norm.gain"
    p[name][3] = 0.0
    folded, normal, own = fold(architecture, p)
    expected = function(architecture, p)
    assert difference(function(folded, normal), expected) <= 1e-12
    with pytest.raises(CosetError, match=rf"{name} holds a zero"):
        unfold(architecture, normal, own)
    # Any other value does: the readers' rows there are zero.
    alive = random_gauge(architecture, own, generator())
    assert difference(function(architecture, unfold(architecture, normal, alive)), expected) <= 1e-12
    target, notes = compatible_gauge(own, own)
    assert notes == [note for note in notes if note.startswith(f"{name}: the reference's gain is nearly zero on 1 lanes")]
    assert len(notes) == 1
    assert difference(function(architecture, unfold(architecture, normal, target)), expected) <= 1e-12
    kept = torch.arange(10) != 3
    assert torch.equal(target[name][kept], own[name][kept])


def test_a_dead_gain_of_the_one_plus_gamma_convention_is_minus_one() -> None:
    architecture = of_layers(Layer(attention(), MLP(7), Norm("rms", offset=1.0), RMS))
    p, name = model(architecture), "layers.0.attention_norm.gain"
    assert float(fold(architecture, p)[2][name].min()) > 0.4
    p[name][2] = -1.0
    own = fold(architecture, p)[2]
    assert own[name][2] == 0.0
    with pytest.raises(CosetError, match="holds a zero"):
        unfold(architecture, fold(architecture, p)[1], own)


def test_a_dead_gain_under_a_bias_is_folded_only_together_with_it() -> None:
    architecture = SINGLE["rope-layer-all"]
    p, name = model(architecture), "layers.0.attention_norm"
    p[f"{name}.gain"][3] = 0.0
    folded, normal, _ = fold(architecture, p)
    assert difference(function(folded, normal), function(architecture, p)) <= 1e-12
    with pytest.raises(CosetError, match=rf"tensor {name}\.gain is zero on a lane where {name}\.bias is not"):
        fold(architecture, p, [f"{name}.gain"])
    p[f"{name}.bias"][3] = 0.0
    folded, normal, _ = fold(architecture, p)
    assert difference(function(folded, normal), function(architecture, p)) <= 1e-12


def test_a_gain_of_zero_everywhere_keeps_the_own_size() -> None:
    zero, own = {"a.gain": torch.zeros(4, dtype=torch.float64)}, {"a.gain": torch.full((4,), 3.0, dtype=torch.float64)}
    target, notes = compatible_gauge(zero, own)
    assert torch.equal(target["a.gain"], own["a.gain"])
    assert "4 lanes" in notes[0]
    target, _ = compatible_gauge(zero, zero)
    assert torch.equal(target["a.gain"], torch.ones(4, dtype=torch.float64))


def test_a_dead_plane_of_query_gains_is_refused() -> None:
    architecture = ZOO["1+gamma"]
    p, name = model(architecture), "layers.0.attention.q_gain"
    p[name][torch.tensor(architecture.layers[0].attention.planes[1])] = -1.0
    with pytest.raises(CosetError, match=rf"{name}.*a plane has gain zero"):
        fold(architecture, p)
    rest = [n for n in coordinates(architecture) if not n.startswith(name)]
    folded, normal, _ = fold(architecture, p, rest)
    assert difference(function(folded, normal), function(architecture, p)) <= 1e-12


def test_rows_that_no_position_reads_say_nothing() -> None:
    architecture = ZOO["learned positions, offset"]
    p = model(architecture)
    other = p | {"embed.positions": p["embed.positions"].clone()}
    other["embed.positions"][:2] += 7.0
    normal = [fold(architecture, x)[1] for x in (p, other)]
    assert torch.equal(normal[0]["embed.tokens"], normal[1]["embed.tokens"])
    assert torch.equal(normal[0]["embed.positions"][2:], normal[1]["embed.positions"][2:])
