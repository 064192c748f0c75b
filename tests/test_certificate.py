"""The measured nullity is the predicted dimension, and the certificate notices when it is not."""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import coset.certificate
from coset.architecture import (
    MLP,
    Alibi,
    Architecture,
    Attention,
    Classifier,
    Experts,
    LanguageModel,
    Layer,
    LearnedPositions,
    Norm,
    Patches,
    RelativeBias,
    Rotary,
    Sinusoidal,
    StreamOutput,
    Tokens,
    uniform,
)
from coset.certificate import MINIMAL_GAP, certify, nullity, plot_spectrum, tiny
from coset.parameters import count
from coset.symmetries import symmetry

AXES: dict[str, dict[str, dict[str, Any]]] = {
    "pe": {
        "none": {"pe": "none"},
        "sinusoidal": {"pe": "sinusoidal", "positions": 9},
        "learned": {"pe": "learned", "positions": 7},
        "rope": {"pe": "rope", "frequencies": [1.0, 0.4]},
        "partial": {"pe": "rope", "frequencies": [1.0]},
        "repeated": {"pe": "rope", "frequencies": [1.0, 1.0]},
        "alibi": {"pe": "alibi"},
        "t5": {"pe": "t5"},
    },
    "norm": {name: {"norm": name} for name in ("none", "rms", "layer")},
    "bias": {name: {"bias": name} for name in ("none", "all", "qkv")},
    "kv": {
        "all": {"heads": 2, "kv_heads": 2},
        "fewer": {"heads": 4, "kv_heads": 2},
        "one": {"heads": 3, "kv_heads": 1},
    },
    "qk": {"plain": {}, "qk-norm": {"qk_norm": True}},
    "mlp": {name: {"mlp": name} for name in ("gelu", "relu", "swiglu")},
    "tied": {"untied": {}, "tied": {"tied": True}},
    "outputs": {name: {"outputs": name} for name in ("logits", "probabilities")},
}


def _covering() -> Iterator[tuple[str, ...]]:
    """Combinations in which every pair of values of every two axes occurs (greedy)."""
    everything = list(itertools.product(*AXES.values()))

    def pairs(values: tuple[str, ...]) -> set[tuple[int, str, int, str]]:
        return {(i, values[i], j, values[j]) for i, j in itertools.combinations(range(len(values)), 2)}

    missing = set().union(*map(pairs, everything))
    while missing:
        best = max(everything, key=lambda values: len(pairs(values) & missing))
        missing -= pairs(best)
        yield best


def _agrees(architecture: Architecture, seed: int = 0) -> None:
    certificate = certify(architecture, seed=seed, context=None)
    for m in (*certificate.attention, certificate.model):
        assert m.measured == m.predicted, (m.scope, m.predicted, m.measured, m.gap, dict(m.null_shares))
        assert m.gap >= MINIMAL_GAP
    assert certificate.agrees


@pytest.mark.parametrize("values", list(_covering()), ids="-".join)
def test_every_pair_of_parts_agrees(values: tuple[str, ...]) -> None:
    flags: dict[str, Any] = {"layers": 1, "width": 6, "head_dim": 4, "mlp_width": 7, "vocab": 11}
    for axis, value in zip(AXES.values(), values, strict=True):
        flags |= axis[value]
    _agrees(uniform(**flags))


_PATCHES = {"layers": 1, "width": 6, "heads": 2, "head_dim": 4, "mlp_width": 5, "inputs": Patches(7, (7,), class_token=True)}


@pytest.mark.parametrize(
    "flags",
    [
        {**_PATCHES, "pe": "learned", "norm": "layer", "bias": "all", "classes": 5, "positions": 8},
        {**_PATCHES, "pe": "learned", "norm": "none", "bias": "qkv", "classes": 5, "positions": 8, "outputs": "probabilities"},
        {**_PATCHES, "pe": "rope", "frequencies": [1.0, 0.4], "norm": "rms", "bias": "all", "classes": 3},
        {**_PATCHES, "pe": "sinusoidal", "norm": "layer", "bias": "none", "classes": 7, "positions": 8},
        {**_PATCHES, "pe": "rope", "frequencies": [(1.0, 0.0), (0.0, 1.0)], "classes": 7, "inputs": Patches(7, (3, 3))},
        {**_PATCHES, "pe": "none", "norm": "none", "bias": "all", "classes": 4, "mlp_width": 7},
        {**_PATCHES, "pe": "t5", "norm": "rms", "classes": 7},
    ],
)
def test_patch_classifiers_agree(flags: dict[str, Any]) -> None:
    _agrees(uniform(**flags))


def test_two_layers_of_large_sizes_agree_on_their_tiny_instance() -> None:
    _agrees(uniform(pe="rope", layers=12, width=768, heads=12, kv_heads=4, mlp="swiglu", norm="rms", tied=True, bias="qkv", positions=512))


def _parallel(shared: bool, **attention: Any) -> Architecture:
    norm = Norm("layer", bias=True)
    a = Attention(**{"heads": 2, "kv_heads": 2, "head_dim": 4, "value_dim": 4, **attention})
    layer = Layer(a, MLP(7, "gelu", up_bias=True, down_bias=True), norm, None if shared else norm, parallel=True)
    return Architecture(6, (layer,), Tokens(11), LanguageModel(bias=True), final_norm=norm)


@pytest.mark.parametrize(
    "architecture",
    [
        _parallel(True, positions=Rotary(((1.0,),), "interleaved")),
        _parallel(False, positions=Rotary(((1.0,),)), query_bias=True, key_bias=True, value_bias=True, output_bias=True),
        dataclasses.replace(_parallel(True), inputs=Tokens(11, types=2), positions=LearnedPositions(9, offset=2)),
        dataclasses.replace(_parallel(True), outputs=StreamOutput()),
        dataclasses.replace(_parallel(True), embedding_norm=Norm("layer", bias=True), outputs=LanguageModel(tied=True)),
        dataclasses.replace(_parallel(True), embedding_norm=Norm("layer"), positions=LearnedPositions(7)),
        dataclasses.replace(_parallel(True), positions=Sinusoidal(5)),
        dataclasses.replace(_parallel(True), causal=False, positions=Sinusoidal(9, stored=True)),
    ],
    ids=["gptj", "neox", "types and offset", "headless", "bloom", "embedding norm", "short table", "stored table"],
)
def test_other_arrangements_agree(architecture: Architecture) -> None:
    _agrees(architecture)


@pytest.mark.parametrize(
    ("total", "changes"),
    [
        (133, {"layers": 1, "norm": "layer", "bias": "all"}),
        (None, {"layers": 2, "norm": "layer", "bias": "all", "pe": "rope", "frequencies": [1.0, 0.4]}),
        (None, {"layers": 1, "norm": "layer", "bias": "qkv"}),
        (None, {"layers": 1, "norm": "rms", "bias": "none", "pe": "learned", "positions": 7, "tied": True}),
        (None, {"layers": 1, "norm": "layer", "bias": "all", "pe": "sinusoidal", "positions": 9}),
    ],
)
def test_post_norm_agrees(total: int | None, changes: dict[str, Any]) -> None:
    flags: dict[str, Any] = {"pe": "none", "width": 6, "heads": 2, "head_dim": 4, "mlp_width": 5, "vocab": 13, "post_norm": True}
    architecture = uniform(**{**flags, **changes})
    assert total in (None, symmetry(architecture).total_dimension)
    _agrees(architecture)


def test_an_encoder_with_an_embedding_norm_agrees() -> None:
    a = uniform(
        pe="learned", positions=9, layers=2, width=6, heads=2, head_dim=4, mlp_width=5, vocab=13, norm="layer", post_norm=True, bias="all"
    )
    norm = Norm("layer", bias=True)
    _agrees(dataclasses.replace(a, embedding_norm=norm, inputs=Tokens(13, types=2), outputs=StreamOutput(), causal=False))


def _rms_layer(mlp: MLP | Experts, arrangement: Literal["pre", "output"] = "pre", **attention: Any) -> Architecture:
    norm = Norm("rms")
    changes = {"heads": 2, "kv_heads": 2, "head_dim": 4, "value_dim": 4, "positions": Rotary(((1.0,), (0.4,)))}
    layer = Layer(Attention(**{**changes, **attention}), mlp, norm, norm, arrangement)
    return Architecture(6, (layer,), Tokens(11), LanguageModel(), final_norm=norm)


@pytest.mark.parametrize(
    "architecture",
    [
        _rms_layer(MLP(7, "silu", gated=True), "output", qk_norm="all", heads=4),
        _rms_layer(Experts(3, 1, MLP(4, "relu"))),
        _rms_layer(MLP(7, "relu", gated=True), window=5),
        dataclasses.replace(_rms_layer(MLP(7), positions=RelativeBias()), causal=False),
    ],
    ids=["olmo2", "experts", "relu gate", "bidirectional t5"],
)
def test_blocks_of_other_families_agree(architecture: Architecture) -> None:
    _agrees(architecture)


def test_totals_do_not_depend_on_the_seed() -> None:
    a = uniform(pe="rope", layers=1, width=6, heads=2, head_dim=4, mlp="relu", mlp_width=5, vocab=13)
    assert [certify(a, seed=s, context=None).model.measured for s in range(3)] == [79] * 3


def test_a_wrong_account_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rotary = uniform(pe="rope", layers=1, width=6, heads=2, head_dim=4, mlp_width=5, vocab=13)
    plain = uniform(pe="none", layers=1, width=6, heads=2, head_dim=4, mlp_width=5, vocab=13)
    monkeypatch.setattr(coset.certificate, "symmetry", lambda _: symmetry(rotary))
    certificate = certify(plain, context=None)
    assert not certificate.agrees
    assert (certificate.attention[0].predicted, certificate.attention[0].measured) == (40, 64)
    assert (certificate.model.predicted, certificate.model.measured) == (74, 98)
    unexplained = certificate.to_json()["unexplained"]
    assert [u["dimension"] for u in unexplained] == [24, 24]
    assert sum(unexplained[0]["tensors"].values()) == pytest.approx(1, abs=0.05)


def test_slow_rotations_and_slow_sinusoids_are_approximate_symmetries() -> None:
    slow = certify(uniform(pe="rope", layers=1, width=64, heads=4, rope_base=1e6, vocab=300), context=12)
    assert slow.agrees
    [attention] = [a for a in slow.approximate if a.scope == "layers.0.attention"]
    # The slowest plane of each head commutes with GL(2) up to its angle: two directions beyond C^x.
    assert len(attention.singular_values) == 2 * slow.architecture.layers[0].attention.kv_heads
    assert attention.shares["layers.0.attention.q"] + attention.shares["layers.0.attention.k"] > 0.99
    table = certify(uniform(pe="sinusoidal", layers=1, width=64, heads=4), context=12)
    assert [a.scope for a in table.approximate] == ["model"]
    assert max(table.approximate[0].shares, key=lambda n: table.approximate[0].shares[n]) == "embed.tokens"
    fast = certify(uniform(pe="rope", layers=1, width=6, heads=2, head_dim=4, frequencies=[2.0, 0.7]), context=12)
    assert fast.approximate == ()


def test_nullity_is_where_the_gap_is_widest() -> None:
    assert nullity(torch.tensor([1.0, 1e-3, 1e-15, 1e-16], dtype=torch.float64))[0] == 2
    assert nullity(torch.tensor([1.0, 1e-3, 1e-4], dtype=torch.float64))[0] == 0
    # An exact zero opens no gap below rounding.
    found, gap = nullity(torch.tensor([1.0, 1e-2, 1e-15, 0.0], dtype=torch.float64))
    assert found == 2
    assert gap == pytest.approx(1e13)


def test_tiny_keeps_small_models_and_what_decides_the_group() -> None:
    small = uniform(pe="none", layers=2, width=6, heads=2, head_dim=4, mlp_width=5, vocab=13, eps=0.0)
    assert tiny(small) == small
    large = uniform(pe="rope", layers=30, width=960, heads=15, kv_heads=5, frequencies=[1.0, 1.0, 0.5, 0.01], qk_norm=True)
    shrunk = tiny(large)
    attention = shrunk.layers[0].attention
    assert (attention.heads, attention.kv_heads) == (4, 2)
    frequencies = attention.plane_frequencies
    assert sorted(map(frequencies.count, frequencies)) == [1, 2, 2]
    assert len(attention.still_lanes) == 2
    assert attention.qk_norm == "head"
    assert len(shrunk.layers) == 2
    assert count(shrunk) < 3000
    heads = uniform(pe="alibi", layers=1, width=96, heads=12)
    slopes = dataclasses.replace(heads.layers[0].attention, positions=Alibi((0.5,) * 12))
    equal = dataclasses.replace(heads, layers=(dataclasses.replace(heads.layers[0], attention=slopes),))
    assert len(set(tiny(heads).layers[0].attention.positions.slopes)) == 2  # type: ignore[union-attr]
    assert len(set(tiny(equal).layers[0].attention.positions.slopes)) == 1  # type: ignore[union-attr]


def test_tiny_keeps_experts_windows_and_grids() -> None:
    norm = Norm("rms")
    a = Attention(12, 4, 64, 64, Rotary.axial(64), window=100)
    layer = Layer(a, Experts(8, 2, MLP(900, "silu", gated=True)), norm, norm)
    shrunk = tiny(Architecture(768, (layer,) * 9, Patches(768, (14, 14)), Classifier(1000), final_norm=norm, causal=False))
    assert shrunk.layers[0].attention.window == 3
    rotary = shrunk.layers[0].attention.positions
    assert isinstance(rotary, Rotary)
    assert rotary.axes == 2
    assert {tuple(x != 0 for x in f) for f in rotary.frequencies} == {(True, False), (False, True)}
    assert isinstance(shrunk.layers[0].mlp, Experts)
    assert (shrunk.layers[0].mlp.count, shrunk.layers[0].mlp.active) == (3, 2)
    assert isinstance(shrunk.outputs, Classifier)
    assert shrunk.outputs.classes > shrunk.width


def test_json_and_figure(tmp_path: Path) -> None:
    certificate = certify(uniform(pe="t5", layers=2, width=6, heads=3, head_dim=2, mlp_width=5, vocab=7), context=None)
    plain = json.loads(json.dumps(certificate.to_json()))
    assert set(plain) >= {"attention", "model", "agrees", "unexplained", "approximate"}
    for part in ("attention", "model"):
        assert set(plain[part]) >= {"predicted", "measured", "gap"}
    assert plain["agrees"] is True
    assert plain["unexplained"] == []
    assert plain["attention"]["predicted"] == sum(layer["predicted"] for layer in plain["attention"]["layers"])
    assert len(plain["model"]["spectrum"]) == plain["model"]["parameters"]
    figure = plot_spectrum(certificate)
    assert len(figure.axes) == 3
    figure.savefig(tmp_path / "spectrum.png")
    assert (tmp_path / "spectrum.png").stat().st_size > 1000
