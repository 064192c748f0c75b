"""Refitting: every map is where its objective is least, given the maps before it; and a spoilt model is mended."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from architecture_zoo import LENGTH, difference, distance, flags, function, model, special
from coset.architecture import Architecture, Patches, Tokens, uniform
from coset.connect import interpolate, refit, refitting, score
from coset.errors import CosetError
from coset.parameters import tensors
from coset.study.data import digits
from coset.study.training import Recipe, train
from coset.transform import random_transform
from coset.transformer import forward, initialise, random_inputs

SPECIAL = special()
ARCHITECTURES: dict[str, Architecture] = {
    "rope, swiglu, grouped": flags("rope", "rms", "none", 3, None, "swiglu", False),
    "biases everywhere": flags("learned", "layer", "all", 3, None, "geglu", False),
    "tied": flags("sinusoidal", "rms", "qkv", 6, None, "relu", True),
    "qk-norm": flags("rope", "rms", "none", 3, "head", "gelu", False),
    **{name: SPECIAL[name] for name in ("post-norm layer", "output arrangement", "parallel, one norm, biased", "patches, class token")},
    **{name: SPECIAL[name] for name in ("experts, gated", "no head", "wide values", "output bias, tied")},
}


def samples(architecture: Architecture, count: int = 60, seed: int = 5) -> Tensor:
    return random_inputs(
        architecture, count, length=LENGTH if isinstance(architecture.inputs, Tokens) else None, seed=seed, dtype=torch.float64
    )


def site_of(name: str) -> str | None:
    """The tap that gives the input of a map."""
    prefix, _, last = name.rpartition(".")
    if last in ("q", "k", "v"):
        return f"{prefix}.input"
    return {
        "o": f"{prefix}.heads",
        "up": f"{prefix}.input",
        "gate": f"{prefix}.input",
        "down": f"{prefix}.hidden",
        "head": "final.input",
    }.get(last)


def read(architecture: Architecture, p: Mapping[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    forward(architecture, p, x, tap=lambda site, value: seen.update({site: value}))
    return {site: value.flatten(-3) if site.endswith(".heads") else value for site, value in seen.items()}


def apply(p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ p[name].reshape(x.shape[-1], -1)
    return y + p[f"{name}_bias"].flatten() if f"{name}_bias" in p else y


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_map_minimises_its_objective(name: str) -> None:
    """The input of a map depends on the maps before it alone, so in the result it is what it was when the map was solved."""
    architecture, ridge = ARCHITECTURES[name], 0.03
    ends = [model(architecture, seed=s) for s in (1, 2, 3)]
    merged = {n: sum(end[n] for end in ends) / 3 for n in ends[0]}
    x = samples(architecture)
    found = refit(architecture, merged, ends, x, ridge=ridge, batch=17).parameters
    inputs, theirs = read(architecture, found, x), [read(architecture, end, x) for end in ends]
    maps = [n for n in merged if site_of(n) is not None and not torch.equal(found[n], merged[n])]
    assert maps
    for n in maps:
        own = [k for k in (n, f"{n}_bias") if k in merged]
        y = inputs[site_of(n)]
        aim = sum(apply(end, n, taps[site_of(n)]) for end, taps in zip(ends, theirs, strict=True)) / 3

        def objective(p: Mapping[str, Tensor], n: str = n, own: list[str] = own, y: Tensor = y, aim: Tensor = aim) -> Tensor:
            fit = (apply(p, n, y) - aim).square().sum(-1).mean()
            return fit + ridge * y.square().mean() * sum((p[k] - merged[k]).square().sum() for k in own)

        free = found | {k: found[k].clone().requires_grad_() for k in own}
        start = {k: merged[k].clone().requires_grad_() for k in own}
        slope = torch.autograd.grad(objective(free), [free[k] for k in own])
        before = torch.autograd.grad(objective(found | start), [start[k] for k in own])
        assert sum(float(g.norm()) for g in slope) < 1e-9 * sum(float(g.norm()) for g in before), n


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_refitted(name: str) -> None:
    architecture = ARCHITECTURES[name]
    ends = [model(architecture, seed=s) for s in (1, 2)]
    merged = interpolate(*ends, 0.5)
    found = refit(architecture, merged, ends, samples(architecture))
    changed = {n for n in merged if not torch.equal(found.parameters[n], merged[n])}
    expected = {n for n in merged if site_of(n) is not None}
    if name in ("tied", "output bias, tied"):
        assert any("token embedding" in note for note in found.notes)
    if name in ("qk-norm", "output arrangement"):
        expected -= {n for n in expected if n.endswith((".q", ".k"))}
        assert any("queries and keys" in note for note in found.notes)
    if name == "experts, gated":
        expected -= {n for n in expected if ".mlp." in n}
        assert any("experts" in note for note in found.notes)
    expected |= {f"{n}_bias" for n in expected} & merged.keys()
    assert changed == expected
    assert list(found.parameters) == list(tensors(architecture))


@pytest.mark.parametrize(
    "name", [n for n in ARCHITECTURES if n not in ("experts, gated", "qk-norm", "output arrangement", "tied", "output bias, tied")]
)
def test_a_spoilt_model_is_mended(name: str) -> None:
    architecture = ARCHITECTURES[name]
    p = model(architecture)
    draw = torch.Generator().manual_seed(7)
    maps = [n for n in p if site_of(n) is not None]
    maps += [f"{n}_bias" for n in maps if f"{n}_bias" in p]
    spoilt = p | {n: p[n] + 0.3 * torch.randn(p[n].shape, generator=draw, dtype=torch.float64) for n in maps}
    found = refit(architecture, spoilt, [p], samples(architecture, 200), ridge=1e-13).parameters
    assert difference(function(architecture, spoilt), function(architecture, p)) > 0.1
    assert difference(function(architecture, found), function(architecture, p)) < 1e-5


def test_equal_ends_change_nothing() -> None:
    architecture = ARCHITECTURES["biases everywhere"]
    p = model(architecture)
    found = refit(architecture, p, [p, p], samples(architecture)).parameters
    assert distance(found, p) < 1e-12


def test_batches_and_the_order_of_samples_do_not_matter() -> None:
    architecture = ARCHITECTURES["rope, swiglu, grouped"]
    ends = [model(architecture, seed=s) for s in (1, 2)]
    merged, x = interpolate(*ends, 0.5), samples(architecture, 23)
    whole = refit(architecture, merged, ends, x, batch=100).parameters
    assert distance(refit(architecture, merged, ends, x.flip(0), batch=5).parameters, whole) < 1e-9
    assert distance(refit(architecture, merged, ends, samples(architecture, 23, seed=6)).parameters, whole) > 1e-3


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_activations_that_are_too_many_to_hold_are_made_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = ARCHITECTURES[name]
    ends = [model(architecture, seed=s) for s in (1, 2)]
    merged, x = interpolate(*ends, 0.5), samples(architecture, 23)
    held = refit(architecture, merged, ends, x, batch=7).parameters
    monkeypatch.setattr(refitting, "_HELD", 0)
    assert distance(refit(architecture, merged, ends, x, batch=7).parameters, held) < 1e-9


def test_a_strong_ridge_holds_on_to_the_merged_model() -> None:
    architecture = ARCHITECTURES["rope, swiglu, grouped"]
    ends = [model(architecture, seed=s) for s in (1, 2)]
    merged, x = interpolate(*ends, 0.5), samples(architecture)
    gaps = [distance(refit(architecture, merged, ends, x, ridge=r).parameters, merged) for r in (1e-2, 1.0, 1e9)]
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-8


def test_a_dtype_for_every_purpose() -> None:
    architecture = ARCHITECTURES["rope, swiglu, grouped"]
    ends = [model(architecture, seed=s) for s in (1, 2)]
    x = samples(architecture)
    fine = refit(architecture, interpolate(*ends, 0.5), ends, x).parameters
    for dtype, close in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        merged = {n: y.to(dtype) for n, y in interpolate(*ends, 0.5).items()}
        found = refit(architecture, merged, ends, x).parameters
        assert {y.dtype for y in found.values()} == {dtype}
        assert distance(found, fine) < close


def test_the_loss_halfway_between_trained_models_falls() -> None:
    """Two seeds of one recipe: most of the barrier halfway goes, on data, and some of it on noise."""
    data = digits()
    architecture = uniform(pe="sinusoidal", layers=1, width=16, heads=2, mlp_width=24, inputs=Patches(4, (4, 4)), classes=10, positions=16)
    recipe = Recipe(epochs=12, learning_rate=1e-2)
    a, b = (train(architecture, initialise(architecture, seed=s), data, recipe, seed=s) for s in (1, 2))
    x = data.train_inputs[:400]

    def loss(p: Mapping[str, Tensor]) -> float:
        return score(architecture, p, data.test_inputs, data.test_targets).loss

    ends = [loss(a), loss(b)]
    middle = interpolate(a, b, 0.5)
    found = refit(architecture, middle, [a, b], x).parameters
    assert loss(middle) > 1.5 * max(ends)
    assert loss(found) - max(ends) < 0.5 * (loss(middle) - max(ends))
    noise = torch.randn(400, 16, 4, generator=torch.Generator().manual_seed(0))
    assert loss(refit(architecture, middle, [a, b], noise).parameters) < loss(middle)


def test_progress_names_sites() -> None:
    architecture = ARCHITECTURES["rope, swiglu, grouped"]
    p = model(architecture)
    calls: list[tuple[str, int, int]] = []
    refit(architecture, p, [p], samples(architecture, 3), progress=lambda *call: calls.append(call))
    assert [done for _, done, _ in calls] == list(range(9))
    assert {whole for _, _, whole in calls} == {9}
    assert [site for site, _, _ in calls][:2] == ["layers.0.attention.input", "layers.0.attention.heads"]


def test_bad_input() -> None:
    architecture = ARCHITECTURES["rope, swiglu, grouped"]
    p, x = model(architecture), samples(architecture)
    for arguments, words in (
        ({"ends": []}, "at least one end"),
        ({"ridge": 0.0}, "ridge must be positive, got 0.0"),
        ({"ridge": float("nan")}, "ridge must be positive"),
        ({"batch": 0}, "batch must be positive"),
        ({"inputs": x[:0]}, "inputs are empty"),
        ({"inputs": x.double()}, "token ids"),
        ({"inputs": x + 1000}, "token ids"),
        ({"ends": [p, {n: y for n, y in p.items() if n != "head"}]}, "end 1: tensor head is missing"),
        ({"merged": p | {"head": p["head"].T}}, "merged model: tensor head"),
    ):
        with pytest.raises(CosetError, match=words):
            refit(architecture, **({"merged": p, "ends": [p], "inputs": x} | arguments))  # type: ignore[arg-type]
    patches = SPECIAL["patches, class token"]
    broken = samples(patches)
    broken[3, 1, 2] = torch.inf
    with pytest.raises(CosetError, match="refit: inputs hold NaN or infinity"):
        refit(patches, model(patches), [model(patches)], broken)
    huge = p | {"layers.0.attention.v": p["layers.0.attention.v"] * 1e308}
    with pytest.raises(CosetError, match=r"activations at layers.0.attention.heads hold NaN"):
        refit(architecture, huge, [p], x)


def test_a_site_without_signal_is_left_as_it_is() -> None:
    architecture = ARCHITECTURES["rope, swiglu, grouped"]
    ends = [model(architecture, seed=s) for s in (1, 2)]
    merged = interpolate(*ends, 0.5)
    merged["layers.0.mlp.up"] = torch.zeros_like(merged["layers.0.mlp.up"])
    dead = [end | {"layers.0.mlp.up": torch.zeros_like(end["layers.0.mlp.up"])} for end in ends]
    found = refit(architecture, merged, dead, samples(architecture)).parameters
    assert torch.equal(found["layers.0.mlp.down"], merged["layers.0.mlp.down"])


def test_the_ends_may_stand_in_any_common_gauge() -> None:
    """Moving everything by one isometry moves the refitted model with it; moving one end alone does not."""
    architecture = flags("none", "none", "none", 6, None, "gelu", False)
    ends = [model(architecture, seed=s) for s in (1, 2)]
    x = samples(architecture)
    move = random_transform(architecture, ends[0], spaces=("heads", "neurons"), seed=3)
    plain = refit(architecture, interpolate(*ends, 0.5), ends, x).parameters
    moved = refit(architecture, move(interpolate(*ends, 0.5)), [move(end) for end in ends], x).parameters
    assert distance(moved, move(plain)) < 1e-8
    apart = refit(architecture, interpolate(ends[0], move(ends[1]), 0.5), [ends[0], move(ends[1])], x).parameters
    assert difference(function(architecture, apart), function(architecture, plain)) > 1e-2
