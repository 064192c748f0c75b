"""Same function or not: scrambled, rounded and degenerate copies, and everything that is almost one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from architecture_zoo import flags, grid, model, of_layers, special
from coset.architecture import Architecture, Classifier, LanguageModel, Patches, uniform
from coset.equivalence import Comparison, Outputs, Residual, assert_equivalent, compare, invariance_error
from coset.errors import CosetError
from coset.invariants import fingerprint
from coset.transform import SPACES, random_transform
from coset.transformer import initialise
from near_misses import KINDS

Model = dict[str, Tensor]

LLAMA = flags("rope", "rms", "none", 3, None, "swiglu", False)
GPT = flags("learned", "layer", "all", 6, None, "gelu", True)
ZOO = special() | grid(12)


def short(a: Architecture) -> int | None:
    return 60 if a.length is None else None


def cast(p: Model, dtype: torch.dtype) -> Model:
    return {name: x.to(dtype) for name, x in p.items()}


def decide(a: Architecture, x: Model, y: Model, **more: object) -> Comparison:
    return compare(a, x, y, length=short(a), **more)  # type: ignore[arg-type]


# --- the same function ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ZOO)
def test_scrambled_copies_are_equivalent_and_the_element_is_found(name: str) -> None:
    a = ZOO[name]
    p = model(a, 3)
    q = random_transform(a, p, seed=4)(p)
    found = decide(a, p, q)
    assert found.verdict == "equivalent"
    assert found.residual is not None
    assert found.residual.relative <= 1e-9
    assert found.transform is not None
    moved = found.transform(p)
    assert all(torch.allclose(moved[n], q[n], atol=1e-8) for n in q)
    assert found.outputs is not None
    assert found.outputs.difference <= 1e-9
    assert all(1 <= value < 1e4 for value in found.condition.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", list(ZOO)[::4])
def test_rounded_copies_in_either_order(name: str, dtype: torch.dtype) -> None:
    a = ZOO[name]
    p = model(a, 5)
    q = cast(random_transform(a, p, seed=6)(p), dtype)
    wanted = "equivalent" if dtype == torch.float32 else "equivalent up to rounding"
    assert [decide(a, *pair).verdict for pair in ((p, q), (q, p))] == [wanted, wanted]


@pytest.mark.parametrize("space", SPACES)
def test_every_space_by_itself(space: str) -> None:
    a = special()["experts, relu"]
    p = cast(model(a, 1), torch.float32)
    q = cast(random_transform(a, p, spaces=(space,), seed=2)(p), torch.float32)
    assert decide(a, p, q).verdict == "equivalent"


def test_bit_for_bit() -> None:
    p = model(LLAMA)
    found = decide(LLAMA, p, dict(p))
    assert (found.verdict, found.transform, found.to_json()["residual"]["max"]) == ("identical", None, 0.0)
    negative = {**p, "head": torch.where(p["head"] == p["head"], p["head"], -p["head"])}
    assert decide(LLAMA, p, negative).verdict == "identical"
    assert decide(LLAMA, p, {**p, "head": p["head"].to(torch.float32).to(torch.float64)}).verdict == "different"


# --- not the same function --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_near_misses_are_different(kind: str) -> None:
    seen = 0
    for seed, a in enumerate([LLAMA, GPT, *list(ZOO.values())[seed_of(kind) :: 9]]):
        draw = random.Random(seed)
        p = cast(model(a, seed), torch.float32 if seed % 2 else torch.float64)
        wrong = KINDS[kind](a, p, draw)
        if wrong is None:
            continue
        seen += 1
        dtype = next(iter(p.values())).dtype
        q = cast(random_transform(a, wrong, seed=seed)(wrong), dtype)
        found = decide(a, p, q)
        assert found.verdict == "different", (seed, found.summary())
        assert found.transform is None
    assert seen > 1


def seed_of(kind: str) -> int:
    return list(KINDS).index(kind)


def test_the_first_difference_is_named() -> None:
    """Also behind a stream that turns, where a fit of everything at once would smear it over all layers."""
    for a, first in ((LLAMA, None), (flags("rope", "rms", "none", 3, None, "swiglu", False, layers=4), 2)):
        p = model(a)
        wrong = {n: x.clone() for n, x in p.items()}
        name = "head" if first is None else f"layers.{first}.mlp.down"
        wrong[name] = torch.randn(wrong[name].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / 3
        if first is not None:
            wrong["layers.3.attention.v"] = wrong["layers.3.attention.v"] * 1.5
        found = decide(a, p, random_transform(a, wrong, seed=3)(wrong))
        assert (found.verdict, found.first_difference) == ("different", (first, name))


def test_the_size_of_rounding_decides() -> None:
    """A change as large as the rounding of bf16 is seen in float32, not in bf16, and bf16 says so by its verdict and limit."""
    p = cast(model(LLAMA), torch.bfloat16)
    q = {n: x.clone() for n, x in p.items()}
    noise = torch.randn(q["layers.1.mlp.up"].shape, generator=torch.Generator().manual_seed(0))
    q["layers.1.mlp.up"] = (q["layers.1.mlp.up"].float() * (1 + 2e-3 * noise)).to(torch.bfloat16)
    assert not torch.equal(p["layers.1.mlp.up"], q["layers.1.mlp.up"])
    coarse = decide(LLAMA, p, q)
    assert coarse.verdict == "equivalent up to rounding"
    assert 1e-3 < coarse.detection_limit["tensor"] < coarse.detection_limit["weight"] < 0.3
    fine = decide(LLAMA, cast(p, torch.float32), cast(q, torch.float32))
    assert (fine.verdict, fine.first_difference) == ("different", (1, "layers.1.mlp.up"))
    assert fine.detection_limit["weight"] < 1e-5


@pytest.mark.parametrize("scrambled", [False, True])
@pytest.mark.parametrize("name", ["layers.2.mlp.down", "layers.1.attention.q"])
def test_a_difference_in_one_layer_that_outputs_are_too_coarse_to_show_is_found_in_one_pass(name: str, scrambled: bool) -> None:
    a = flags("rope", "rms", "none", 3, None, "swiglu", False, layers=4)
    p = cast(model(a), torch.float32)
    q = {n: x.clone() for n, x in p.items()}
    q[name].view(-1)[q[name].abs().argmax()] *= 1 + 1e-5
    q = cast(random_transform(a, q, seed=1)(q), torch.float32) if scrambled else q
    done = []
    found = decide(a, p, q, progress=lambda what, *_: done.append(what))
    assert found.outputs is not None
    assert not found.outputs.significant
    assert (found.verdict, found.first_difference) == ("different", (int(name[7]), name)), found.summary()
    assert "cycle 2" not in done


@pytest.mark.parametrize("size", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1.0])
def test_one_layer_in_another_basis_is_no_difference(size: float) -> None:
    """All else is equal bit for bit, and the basis may lie as near as rounding lets one see."""
    a = flags("rope", "rms", "none", 3, None, "swiglu", False, layers=4)
    p = cast(model(a), torch.float32)
    q = {n: x.to(torch.float64) for n, x in p.items()}
    q["layers.2.attention.q"] *= 1 + size
    q["layers.2.attention.k"] /= 1 + size
    basis = torch.eye(q["layers.2.attention.v"].shape[-1], dtype=torch.float64)
    basis[0, 1] = size
    q["layers.2.attention.v"] = q["layers.2.attention.v"] @ basis
    q["layers.2.attention.o"] = torch.linalg.solve(basis, q["layers.2.attention.o"])
    assert decide(a, p, cast(q, torch.float32)).verdict == "equivalent"


def test_a_shift_of_the_logits_is_invisible_to_probabilities() -> None:
    a = of_layers(LLAMA.layers[0], outputs=LanguageModel(bias=True))
    p = model(a)
    q = {**p, "head_bias": p["head_bias"] + 0.7}
    assert decide(a, p, q).verdict == "different"
    assert decide(a, p, q, outputs="probabilities").verdict == "equivalent"
    assert invariance_error(a, p, q) > 0.01
    assert invariance_error(a, p, q, outputs="probabilities") < 1e-12


def test_what_no_input_reads_does_not_count() -> None:
    a = special()["learned positions, offset"]
    p = model(a)
    q = {**p, "embed.positions": p["embed.positions"].clone()}
    q["embed.positions"][1] += 1.0
    assert decide(a, p, q).verdict == "equivalent"
    q["embed.positions"][2] += 1e-3
    assert decide(a, p, q).verdict == "different"


def rare(pe: str) -> Architecture:
    """Tables with many more rows than the inputs read."""
    return uniform(pe=pe, layers=2, width=9, heads=3, head_dim=4, mlp_width=7, vocab=3001, positions=1009, tied=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("scrambled", [False, True])
@pytest.mark.parametrize(("pe", "table", "row"), [("rope", "embed.tokens", 1234), ("learned", "embed.positions", 801)])
def test_rows_that_the_inputs_do_not_happen_to_read(pe: str, table: str, row: int, scrambled: bool) -> None:
    a = rare(pe)
    p = cast(initialise(a, seed=1, generic=True), torch.float32)
    for change in (1e-3, 0.5):
        q = {n: x.clone() for n, x in p.items()}
        q[table][row, 4] += change * q[table].abs().mean()
        q = cast(random_transform(a, q, seed=2)(q), torch.float32) if scrambled else q
        for pair in ((p, q), (q, p)):
            found = compare(a, *pair)
            assert (found.verdict, found.first_difference) == ("different", (None, table)), found.summary()


# --- degenerate -------------------------------------------------------------------------------------------------------


def heads(p: Model, change: Callable[[Tensor], None], *names: str) -> None:
    for name, axis in (("q", 1), ("k", 1), ("v", 1), ("o", 0), ("q_bias", 0), ("k_bias", 0), ("v_bias", 0)):
        full = f"layers.0.attention.{name}"
        if full in p and name[0] in names:
            change(p[full].movedim(axis, 0))


def zero_second(x: Tensor) -> None:
    x[1] = 0


def repeat_third(x: Tensor) -> None:
    x[1] = x[2]


def zero_head(p: Model) -> None:
    heads(p, zero_second, "q", "k", "v", "o")


def zero_values(p: Model) -> None:
    heads(p, zero_second, "v")


def zero_keys(p: Model) -> None:
    heads(p, zero_second, "k")


def equal_heads(p: Model) -> None:
    heads(p, repeat_third, "q", "k", "v", "o")


def equal_neurons(p: Model) -> None:
    for name in ("up", "gate", "up_bias", "gate_bias"):
        if f"layers.0.mlp.{name}" in p:
            x = p[f"layers.0.mlp.{name}"]
            x[..., 1] = x[..., 2]
    p["layers.0.mlp.down"][1] = p["layers.0.mlp.down"][2]


def dead_neuron(p: Model) -> None:
    p["layers.0.mlp.down"][1] = 0


def zero_gain(p: Model) -> None:
    for name in p:
        if name.endswith("norm.gain"):
            p[name][3] = 0


def rank_deficient_values(p: Model) -> None:
    for name in ("v", "v_bias"):
        if f"layers.0.attention.{name}" in p:
            x = p[f"layers.0.attention.{name}"]
            x[..., 1] = x[..., 0]


DEGENERATE = [zero_head, zero_values, zero_keys, equal_heads, equal_neurons, dead_neuron, zero_gain, rank_deficient_values]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("spoil", DEGENERATE)
@pytest.mark.parametrize("a", [LLAMA, GPT], ids=["llama", "gpt"])
def test_degenerate_models_are_still_recognised(a: Architecture, spoil: Callable[[Model], None], dtype: torch.dtype) -> None:
    p = model(a, 2)
    spoil(p)
    p = cast(p, dtype)
    q = random_transform(a, p, seed=3)(p)
    found = decide(a, p, cast(q, dtype))
    assert found.verdict == ("equivalent up to rounding" if dtype == torch.bfloat16 else "equivalent"), found.summary()
    assert found.reasons == ()


@pytest.mark.parametrize("spoil", DEGENERATE)
def test_degenerate_models_that_differ(spoil: Callable[[Model], None]) -> None:
    p = cast(model(LLAMA, 2), torch.float32)
    spoil(p)
    q = {n: x.clone() for n, x in p.items()}
    q["layers.1.attention.v"] *= 1.01
    q = cast(random_transform(LLAMA, q, seed=3)(q), torch.float32)
    assert decide(LLAMA, p, q).verdict == "different"


def test_the_same_function_outside_the_group_is_undecided_and_says_why() -> None:
    """Two neurons that compute the same can share out what they write in any way: no symmetry of generic models does that."""
    p = model(LLAMA, 2)
    equal_neurons(p)
    q = {n: x.clone() for n, x in p.items()}
    q["layers.0.mlp.down"][1] *= 1.5
    q["layers.0.mlp.down"][2] *= 0.5
    q = random_transform(LLAMA, q, seed=3)(q)
    found = decide(LLAMA, p, q)
    assert found.verdict == "undecided"
    assert found.transform is None
    assert any("layer 0: neurons compute the same" in reason for reason in found.reasons)


def test_a_change_of_what_a_dead_head_reads_is_undecided() -> None:
    p = model(LLAMA, 2)
    zero_values(p)
    q = {n: x.clone() for n, x in p.items()}
    q["layers.0.attention.q"][:, 1] *= 1.1
    found = decide(LLAMA, p, q)
    assert found.verdict in ("undecided", "equivalent")
    q["layers.0.attention.q"][0, 1] += 0.3
    found = decide(LLAMA, p, q)
    assert found.verdict == "undecided"
    assert any("layer 0: values of KV head 1 are zero" in reason for reason in found.reasons)


# --- for other people's tests -----------------------------------------------------------------------------------------


def test_assert_equivalent() -> None:
    p = model(LLAMA)
    q = random_transform(LLAMA, p, seed=1)(p)
    assert assert_equivalent(LLAMA, p, q, length=60).equivalent
    wrong = KINDS["rotary pairing"](LLAMA, q, random.Random(0))
    assert wrong is not None
    with pytest.raises(AssertionError, match=r"different\n(.*\n)*first difference: layer [01], layers\.[01]\.attention\.[qk]"):
        assert_equivalent(LLAMA, p, wrong, length=60)


def test_invariance_error_sees_what_it_should() -> None:
    p = model(GPT)
    q = random_transform(GPT, p, seed=1)(p)
    assert invariance_error(GPT, p, q) < 1e-12
    assert invariance_error(GPT, p, q, length=7, samples=3, seed=5) < 1e-12
    wrong = KINDS["one weight"](GPT, q, random.Random(0))
    assert wrong is not None
    assert invariance_error(GPT, p, wrong) > 1e-9
    with pytest.raises(CosetError, match="b: tensor head does not belong"):
        invariance_error(GPT, p, {**p, "head": p["embed.tokens"]})


def test_bad_input() -> None:
    p = model(LLAMA)
    with pytest.raises(CosetError, match="b: tensor head is missing"):
        compare(LLAMA, p, {n: x for n, x in p.items() if n != "head"})
    with pytest.raises(CosetError, match="a: tensor head holds NaN"):
        compare(LLAMA, {**p, "head": p["head"] * torch.nan}, p)


def test_results_as_plain_data() -> None:
    residual = Residual("head", None, 1e-8, 3.0, 1.0, 1e-8, 9)
    outputs = Outputs(1e-7, 1e-8, 1e-7, 1e-8, 60)
    found = Comparison("different", (residual,), outputs, (1, "head"), ("because",)).to_json("G")
    assert found["residual"]["max"] == 1e-8
    assert found["first_difference"] == {"layer": 1, "tensor": "head"}
    assert found["outputs"]["positions"] == 60
    assert (found["transform"], found["reasons"]) == ("G", ["because"])


# --- fingerprints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in ZOO if "none-none" not in n][::2])
def test_fingerprints_of_copies_agree(name: str) -> None:
    a = ZOO[name]
    p = cast(model(a, 3), torch.float32)
    try:
        own = fingerprint(a, p)
    except CosetError as error:
        assert "neither the input tables nor the unembedding span it" in str(error)  # noqa: PT017 - some architectures have no basis to fix
        return
    for seed in range(3):
        exact = random_transform(a, p, seed=seed)(p)
        assert fingerprint(a, cast(exact, torch.float32)).hash == own.hash
        assert fingerprint(a, exact).hash == own.hash
        assert own.distance(fingerprint(a, exact)) < 1e-10
        assert own.alternate == fingerprint(a, exact).alternate != own.hash
    for kind in ("other seed", "fine-tuned"):
        wrong = KINDS[kind](a, p, random.Random(1))
        assert wrong is not None
        other = fingerprint(a, wrong)
        assert other.hash != own.hash
        assert own.distance(other) > 1e-6


def test_fingerprint_of_a_stream_that_only_the_unembedding_spans() -> None:
    """Without norms something must fix the basis: here the inputs cannot, since few patch features and no positions reach the stream."""
    a = replace(
        flags("none", "none", "none", 3, None, "gelu", False),
        inputs=Patches(3, (5,), bias=False, class_token=False),
        outputs=Classifier(17, "first"),
        causal=False,
    )
    p = model(a, 3)
    own = fingerprint(a, p)
    for seed in range(3):
        assert own.distance(fingerprint(a, random_transform(a, p, seed=seed)(p))) < 1e-9
    assert own.distance(fingerprint(a, model(a, 4))) > 1e-3


def test_coarse_weights_that_agree_to_rounding_are_never_called_different() -> None:
    """Whatever the outputs say: a model can amplify the rounding of its weights beyond what one random rounding shows."""
    for seed in range(6):
        p = cast(model(LLAMA, seed), torch.bfloat16)
        p = {n: x * 6 if n.endswith(("attention.q", "attention.k")) else x for n, x in p.items()}  # sharp attention
        q = cast(random_transform(LLAMA, p, seed=seed + 1)(p), torch.bfloat16)
        found = decide(LLAMA, p, q)
        assert found.verdict in ("equivalent up to rounding", "undecided"), found.summary()
        assert found.verdict == "equivalent up to rounding" or "amplifies the rounding" in found.reasons[0]


def test_amplified_rounding_is_undecided_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    p = cast(model(LLAMA, 1), torch.bfloat16)
    q = cast(random_transform(LLAMA, p, seed=2)(p), torch.bfloat16)
    monkeypatch.setattr(Outputs, "significant", True)
    found = decide(LLAMA, p, q)
    assert found.verdict == "undecided"
    assert "amplifies the rounding of its stored weights" in found.reasons[0]
    monkeypatch.undo()
    q["layers.1.attention.v"] = q["layers.1.attention.v"] * 1.5
    assert decide(LLAMA, p, q).verdict == "different"


def test_fingerprints_of_half_precision() -> None:
    p = cast(model(LLAMA, 3), torch.bfloat16)
    own = fingerprint(LLAMA, p)
    other = fingerprint(LLAMA, cast(random_transform(LLAMA, p, seed=1)(p), torch.bfloat16))
    assert own.precision.startswith("bfloat16")
    assert own.distance(other) < 0.005
    assert own.distance(fingerprint(LLAMA, cast(model(LLAMA, 4), torch.bfloat16))) > 0.02
    assert own.distance(fingerprint(GPT, model(GPT))) == float("inf")
