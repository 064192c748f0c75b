"""Dimensions and groups of the account, against numbers derived by hand."""

import dataclasses
import json
import math

import pytest
import torch

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
    Rotary,
    StreamOutput,
    Tokens,
    uniform,
)
from coset.equivalence import compare
from coset.groups import GeneralLinear, Mirrored, Monomial, Orthogonal, Wreath
from coset.symmetries import Symmetry, head_group, headline, qk_group, stream_group, symmetry
from coset.transform import act, random_transform
from coset.transformer import forward, initialise

SIZES = {"layers": 1, "width": 6, "heads": 2, "head_dim": 4, "mlp_width": 5, "vocab": 13}


@pytest.mark.parametrize(
    ("total", "flags"),
    [
        (98, {"pe": "none"}),
        (74, {"pe": "rope"}),
        (79, {"pe": "rope", "mlp": "swiglu"}),
        (96, {"pe": "rope", "mlp": "swiglu", "layers": 2, "kv_heads": 1}),
        (53, {"pe": "rope", "tied": True}),
        (103, {"pe": "none", "mlp": "relu"}),
        (100, {"pe": "t5"}),
        (104, {"pe": "learned", "positions": 7}),
        (77, {"pe": "rope", "mlp": "swiglu", "qk_norm": True}),
        (184, {"pe": "none", "norm": "layer", "bias": "all"}),
        (152, {"pe": "rope", "norm": "layer", "bias": "all"}),
        (100, {"pe": "none", "norm": "none"}),
        (76, {"pe": "rope", "norm": "none"}),
    ],
)
def test_totals_of_small_models(total: int, flags: dict) -> None:
    assert symmetry(uniform(**{**SIZES, **flags})).total_dimension == total


def _attention(**changes) -> Attention:
    return Attention(**{"heads": 6, "kv_heads": 3, "head_dim": 10, "value_dim": 10, **changes})


@pytest.mark.parametrize(
    ("dimension", "positions"),
    [
        (100, None),
        (10, Rotary.standard(10)),
        (6 + 16, Rotary.standard(6)),
        (8 + 2 * 2 + 2 * 1, Rotary(((1.0,), (1.0,), (0.5,), (0.25,), (0.125,)))),
        (18 + 4, Rotary(((1.0,), (1.0,), (1.0,), (0.5,), (0.25,)))),
        (8 + 4, Rotary(((1.0,), (0.5,), (0.25,), (0.125,), (0.0,)))),
        (8, Rotary.axial(8)),
        (100, Alibi.standard(6)),
    ],
)
def test_the_commutant_of_the_rotations(dimension: int, positions: object) -> None:
    lanes = 8 if isinstance(positions, Rotary) and positions.axes == 2 else 10
    assert qk_group(_attention(head_dim=lanes, positions=positions)).dimension == dimension


def test_coinciding_angles_on_different_axes_are_different_planes() -> None:
    apart = Rotary(((0.5, 0.0), (0.0, 0.5)))
    together = Rotary(((0.5, 0.0), (0.5, 0.0)))
    assert qk_group(_attention(head_dim=4, positions=apart)).dimension == 4
    assert qk_group(_attention(head_dim=4, positions=together)).dimension == 8


def test_orders_of_the_head_permutations() -> None:
    def order(**changes) -> int:
        a = uniform(pe="alibi" if changes.pop("alibi", False) else "none", layers=1, width=60, head_dim=10, **changes)
        return symmetry(a).layers[0].order

    assert order(heads=6) == math.factorial(6)
    assert order(heads=6, kv_heads=3) == math.factorial(2) ** 3 * math.factorial(3)
    assert order(heads=6, kv_heads=1) == math.factorial(6)
    assert order(heads=6, alibi=True) == 1


def test_equal_alibi_slopes_leave_their_heads_exchangeable() -> None:
    group = head_group(_attention(kv_heads=6, positions=Alibi((0.5, 0.5, 0.5, 0.25, 0.25, 0.125))))
    assert isinstance(group, Wreath)
    a = uniform(pe="none", layers=1, width=60, heads=6, head_dim=10)
    layer = dataclasses.replace(a.layers[0], attention=_attention(kv_heads=6, positions=Alibi((0.5, 0.5, 0.5, 0.25, 0.25, 0.125))))
    assert symmetry(dataclasses.replace(a, layers=(layer,))).layers[0].order == 12


def test_groups_of_the_stream() -> None:
    small = {"layers": 1, "width": 10, "heads": 5}
    assert isinstance(stream_group(uniform(norm="none", **small)), GeneralLinear)
    rms = stream_group(uniform(norm="rms", **small))
    assert isinstance(rms, Orthogonal)
    assert rms.dimension == 45
    layer = stream_group(uniform(norm="layer", **small))
    assert layer is not None
    assert layer.dimension == 36
    assert isinstance(stream_group(uniform(norm="rms", tied=True, **small)), Monomial)
    assert stream_group(uniform(pe="sinusoidal", **small)) is None
    headless = dataclasses.replace(uniform(**small), outputs=StreamOutput())
    assert stream_group(headless) is None


def _total(**flags) -> int:
    return symmetry(uniform(**{**SIZES, "mlp_width": 7, **flags})).total_dimension


def test_without_norms_a_shift_of_the_stream_moves_through_every_bias() -> None:
    # Before attention and before the MLP the stream may be shifted by any vector: 2 x 6; tied, the input cannot move: 6.
    # The rest: 6^2 of the stream, 2 x 2 x 4^2, 4 x 2 key biases, 4 x 2 value biases.
    assert _total(pe="none", norm="none", bias="all") == 36 + 64 + 8 + 8 + 12
    assert _total(pe="none", norm="none", bias="all", tied=True) == 15 + 64 + 8 + 8 + 6


def test_a_tied_table_moves_along_the_blind_direction_of_its_unembedding() -> None:
    logits = {"pe": "learned", "norm": "layer", "tied": True, "positions": 7}
    names = [s.space for s in symmetry(uniform(**{**SIZES, **logits})).shifts]
    assert names.count("tied table") == 1
    assert "tied table" not in [s.space for s in symmetry(uniform(**{**SIZES, **logits, "pe": "none"})).shifts]
    assert "tied table" not in [s.space for s in symmetry(uniform(**{**SIZES, **logits, "bias": "all"})).shifts]


def test_a_short_fixed_table_pins_only_the_differences_of_its_rows() -> None:
    # Four rows in ten dimensions differ in three directions: O(7), of which O(6) fixes the rows themselves.
    account = symmetry(uniform(pe="sinusoidal", positions=4, layers=1, width=10, heads=2))
    assert account.stream.dimension == 15
    assert [s.dimension for s in account.shifts if s.space == "position table"] == [6]


def test_a_gate_of_relu_has_a_scale_of_its_own() -> None:
    a = uniform(layers=1, width=10, heads=5, mlp="swiglu", mlp_width=7)
    layer = dataclasses.replace(a.layers[0], mlp=MLP(7, "relu", gated=True))
    assert symmetry(a).layers[0].neurons.dimension == 7
    assert symmetry(dataclasses.replace(a, layers=(layer,))).layers[0].neurons.dimension == 14


def test_qk_norm_leaves_scales_only() -> None:
    account = symmetry(uniform(layers=1, width=60, heads=6, kv_heads=3, head_dim=10, qk_norm=True))
    assert account.layers[0].qk.dimension == 10 // 2 + 6 + 3


def test_probabilities_forget_one_unembedding_column() -> None:
    assert _total(outputs="probabilities") == _total() + 6
    assert _total(outputs="probabilities", norm="layer") == _total(norm="layer") + 5


def test_positions_that_no_input_reaches_are_free() -> None:
    a = uniform(pe="learned", layers=1, width=10, heads=2, positions=7)
    offset = dataclasses.replace(a, positions=LearnedPositions(9, offset=2))
    assert symmetry(offset).total_dimension == symmetry(a).total_dimension + 2 * 10


def test_json_has_the_keys_that_scripts_rely_on() -> None:
    account = symmetry(uniform(layers=2, width=60, heads=6, kv_heads=3, head_dim=10))
    plain = json.loads(json.dumps(account.to_json()))
    assert set(plain) >= {"layers", "stream", "shifts", "attention_dimension", "total_dimension", "parameters"}
    assert len(plain["layers"]) == 2
    assert set(plain["layers"][0]) >= {"heads", "qk", "vo", "shifts", "neurons", "gains"}
    assert plain["layers"][0]["qk"] == {**plain["layers"][0]["qk"], "copies": 3, "dimension": 30}
    assert plain["layers"][0]["vo"]["dimension"] == 3 * 100
    assert plain["attention_dimension"] == 2 * (30 + 300)
    parts = sum(layer[part]["dimension"] for layer in plain["layers"] for part in ("qk", "vo", "shifts", "neurons", "gains")) + sum(
        plain[part]["dimension"] for part in ("stream", "gains", "shifts")
    )
    assert parts == plain["total_dimension"]


def test_every_entry_says_why() -> None:
    experts = Experts(5, 2, MLP(7, "silu", gated=True))
    norm = Norm("layer", bias=True)
    layer = Layer(_attention(value_bias=True, output_bias=True), experts, norm, norm)
    models = [
        Architecture(30, (layer,), Tokens(41, types=2), LanguageModel(), LearnedPositions(9, 2), Norm("layer"), norm, probabilities=True),
        Architecture(30, (layer,), Patches(31, (3, 3), True), Classifier(7), final_norm=norm),
    ]
    for account in map(symmetry, models):
        assert isinstance(account, Symmetry)
        entries = [account.stream, account.gains, *account.shifts]
        for one in account.layers:
            entries += [one.heads, one.qk, one.vo, one.neurons, one.gains, *one.shifts]
        assert all(e.why and e.dimension >= 0 for e in entries)


def test_a_router_that_picks_one_forgets_its_scale() -> None:
    def router(active: int) -> int:
        layer = Layer(_attention(), Experts(5, active, MLP(7)), Norm("rms"), Norm("rms"))
        account = symmetry(Architecture(30, (layer,), Tokens(41), LanguageModel()))
        return next(s.dimension for s in account.shifts if "router" in s.space)

    assert router(2) == 30
    assert router(1) == 31


def test_headlines_tell_encodings_apart() -> None:
    flags = {"layers": 1, "width": 40, "heads": 4}
    said = {pe: headline(uniform(pe=pe, **flags)) for pe in ("none", "sinusoidal", "learned", "rope", "alibi", "t5")}
    assert len(set(said.values())) == 6
    assert "d_h² = 100 to 10 dimensions" in said["rope"]


# --- the sign of 1 ----------------------------------------------------------------------------------------------------


def test_layer_norm_lets_the_ones_change_sign_together() -> None:
    architecture = uniform(pe="none", layers=2, width=10, heads=2, mlp_width=7, vocab=13, norm="layer", bias="all")
    p, x = initialise(architecture, seed=1, generic=True, dtype=torch.float64), torch.arange(12).reshape(2, 6)
    group = stream_group(architecture)
    assert isinstance(group, Mirrored)
    g = group.random(torch.Generator().manual_seed(2))
    one = torch.full((10,), 0.1**0.5, dtype=torch.float64)
    opposite = g - 2 * torch.outer(one, one)
    assert torch.allclose(one @ opposite, -one)
    for element in (g, opposite):
        assert group.belongs(element)
        moved = act({"stream": element}, p, architecture)
        torch.testing.assert_close(forward(architecture, moved, x), forward(architecture, p, x), rtol=1e-10, atol=1e-10)
        # Procrustes finds either from what it did; a sign that the products do not see stays.
        torch.testing.assert_close(group.best(element), element)
        blind = element - torch.outer(one, one) * (one @ element @ one)
        torch.testing.assert_close(group.best(blind), g)
    turned = torch.eye(10, dtype=torch.float64).roll(1, 0) * torch.tensor([1.0] * 9 + [-1.0])
    assert not group.belongs(turned)
    # The unembedding has no bias: what it reads along 1 meets the norm's bias, so the two elements give different weights.
    apart = [act({"stream": e}, p, architecture)["head"] for e in (g, opposite)]
    assert float((apart[0] - apart[1]).norm()) > 0.1
    # A fixed table pins the sign.
    table = uniform(pe="sinusoidal", positions=3, layers=1, width=10, heads=2, norm="layer")
    assert type(stream_group(table)) is Orthogonal


def test_copies_that_differ_by_the_sign_of_the_ones_are_equivalent() -> None:
    architecture = uniform(pe="none", layers=1, width=10, heads=2, mlp_width=7, vocab=13, norm="layer", bias="all")
    p = initialise(architecture, seed=1, generic=True, dtype=torch.float64)
    opposite = torch.eye(10, dtype=torch.float64) - 0.2
    q = act({"stream": opposite}, p, architecture)
    q = random_transform(architecture, q, seed=4)(q)
    a, b = ({name: x.float() for name, x in model.items()} for model in (p, q))
    assert compare(architecture, a, b).verdict == "equivalent"
    b["head"][3, 4] += 0.01
    assert compare(architecture, a, b).verdict == "different"
