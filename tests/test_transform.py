"""Acting, and transforms: the function stays, for elements of the group and for no others; every file is checked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from architecture_zoo import RMS, attention, difference, distance, flags, function, grid, model, of_layers, special
from coset.architecture import MLP, Architecture, Layer, Rotary
from coset.errors import CosetError
from coset.groups import WreathElement
from coset.normal_form import fold
from coset.parameters import blocks, check
from coset.symmetries import group
from coset.transform import SPACES, Transform, gauge_names, move, random_transform

SPECIAL = special()
ZOO = SPECIAL | grid(126)
FEW = {
    name: SPECIAL[name]
    for name in ("experts, gated", "parallel, one norm, biased", "unlike layers", "qk-norm all, offset", "types, embedding norm")
}
FEW |= {"rope": flags("rope", "layer", "all", 3, None, "swiglu", False), "t5": flags("t5", "rms", "qkv", 3, None, "relu", True)}


def each(zoo: dict[str, Architecture]) -> Callable[..., object]:
    return pytest.mark.parametrize("architecture", zoo.values(), ids=zoo.keys())


# --- the function stays ---------------------------------------------------------------------------------------------


@each(ZOO)
def test_random_elements_keep_the_function_and_are_undone(architecture: Architecture) -> None:
    p = model(architecture)
    before = {n: x.clone() for n, x in p.items()}
    expected = function(architecture, p)
    transform = random_transform(architecture, p, seed=3)
    assert transform.belongs()
    assert transform.element.keys() == group(transform.folded).factors.keys()
    moved = transform(p)
    check(architecture, moved)
    assert list(moved) == list(p)
    assert distance(moved, p) > 0.3
    assert difference(function(architecture, moved), expected) <= 1e-10
    assert distance(transform.inverse()(moved), p) <= 1e-11
    assert all(torch.equal(p[n], before[n]) for n in p)


@each(FEW)
def test_then_is_one_after_the_other(architecture: Architecture) -> None:
    p = model(architecture)
    first = random_transform(architecture, p, seed=1)
    q = first(p)
    second = random_transform(architecture, q, seed=2)
    both = first.then(second)
    assert both.belongs()
    r = second(q)
    assert distance(both(p), r) <= 1e-12
    assert distance(both.inverse()(r), p) <= 1e-11
    assert distance(second.then(second.inverse())(q), q) <= 1e-12
    third = random_transform(architecture, r, seed=3)
    assert distance(first.then(second.then(third))(p), both.then(third)(p)) <= 1e-12


def test_then_needs_the_same_coordinates() -> None:
    architecture = FEW["rope"]
    p = model(architecture)
    with pytest.raises(CosetError, match="fold the same coordinates"):
        random_transform(architecture, p).then(random_transform(architecture, p, spaces=("heads",)))
    with pytest.raises(CosetError, match="same coordinates"):
        Transform(architecture, {}, {}, {"final_norm.gain": torch.ones(10)})


def test_then_fills_in_spaces_that_one_of_the_two_leaves_alone() -> None:
    architecture = flags("rope", "rms", "none", 3, None, "gelu", False)
    p = model(architecture)
    heads = random_transform(architecture, p, spaces=("heads", "qk", "vo"))
    neurons = random_transform(architecture, p, spaces=("neurons",))
    assert not heads.element.keys() & neurons.element.keys()
    assert distance(heads.then(neurons)(p), neurons(heads(p))) <= 1e-13


@pytest.mark.parametrize("name", ["rope", "experts, gated", "types, embedding norm"])
def test_blocks_can_be_streamed(name: str) -> None:
    architecture = FEW[name]
    p = model(architecture)
    transform = random_transform(architecture, p)
    whole, parts = transform(p), {}
    for block in blocks(architecture):
        parts |= transform({n: p[n] for n in block})
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[n], whole[n]) for n in whole)


def test_precision_is_that_asked_for() -> None:
    architecture = FEW["rope"]
    p = {n: x.to(torch.float32) for n, x in model(architecture).items()}
    transform = random_transform(architecture, p)
    assert {x.dtype for x in transform(p).values()} == {torch.float64}
    single = transform(p, torch.float32)
    assert {x.dtype for x in single.values()} == {torch.float32}
    assert distance({n: x.double() for n, x in single.items()}, transform(p)) <= 1e-5


# --- spaces ---------------------------------------------------------------------------------------------------------

ATTENTION = r"layers\.\d+\.attention\."
ALLOWED = {
    "heads": ATTENTION + r"(q|k|v|o|q_bias|k_bias|v_bias|q_gain|k_gain|position_bias)",
    "qk": ATTENTION + r"(q|k|q_bias|k_bias)",
    "vo": ATTENTION + r"(v|o|v_bias)",
    "neurons": r"layers\.\d+\.mlp\.(up|down|gate|up_bias|gate_bias)",
    "experts": r"layers\.\d+\.mlp\.(up|down|gate|up_bias|gate_bias|down_bias|router)",
    "gains": r".*norm\.(gain|bias)|.*_gain|head|" + ATTENTION + r"[qkv]|layers\.\d+\.mlp\.(up|gate|router)",
    "shifts": r".*norm\.bias|.*_bias|head|embed\..*|" + ATTENTION + r"[qkvo]|layers\.\d+\.mlp\.(up|gate|router|down)",
    "stream": r".*norm\.(gain|bias)|head|embed\..*|" + ATTENTION + r"([qkvo]|o_bias)|layers\.\d+\.mlp\.(up|gate|down|router|down_bias)",
}


@pytest.mark.parametrize("space", SPACES)
@each(FEW)
def test_each_space_alone_moves_only_its_tensors(architecture: Architecture, space: str) -> None:
    p = model(architecture)
    transform = random_transform(architecture, p, spaces=(space,), seed=1)
    moved = transform(p)
    changed = [n for n in p if not torch.allclose(moved[n], p[n], rtol=1e-9, atol=1e-9)]
    assert [n for n in changed if not re.fullmatch(ALLOWED[space], n)] == []
    there = {"experts": any("router" in n for n in p), "shifts": bool(gauge_names(architecture, ("shifts",)))}
    assert bool(changed) == there.get(space, True)
    assert difference(function(architecture, moved), function(architecture, p)) <= 1e-10


def test_a_space_left_out_stays_exactly() -> None:
    architecture = flags("rope", "rms", "none", 3, None, "gelu", False)
    p = model(architecture)
    moved = random_transform(architecture, p, spaces=("heads",))(p)
    assert all(torch.equal(moved[n], p[n]) for n in p if "attention" not in n)
    # Whole heads move: every head of the result is one of the input, bit for bit.
    q = {tuple(x.tolist()) for x in p["layers.0.attention.q"].permute(1, 2, 0, 3).reshape(6, -1)}
    assert {tuple(x.tolist()) for x in moved["layers.0.attention.q"].permute(1, 2, 0, 3).reshape(6, -1)} == q


def test_pinned_tensors_stay() -> None:
    architecture = SPECIAL["types, embedding norm"]
    p = model(architecture)
    spaces = ("heads", "qk", "vo", "neurons", "gains", "shifts")
    assert not torch.allclose(random_transform(architecture, p, spaces=spaces)(p)["embed.tokens"], p["embed.tokens"])
    moved = random_transform(architecture, p, spaces=spaces, pinned=("embed.tokens",))(p)
    assert torch.equal(moved["embed.tokens"], p["embed.tokens"])
    assert difference(function(architecture, moved), function(architecture, p)) <= 1e-10


def test_shifts_that_need_gains_wait_for_them() -> None:
    architecture = FEW["rope"]
    assert not any(n.endswith("q along 1") for n in gauge_names(architecture, ("shifts",)))
    assert any(n.endswith("q along 1") for n in gauge_names(architecture, ("shifts", "gains")))


@pytest.mark.parametrize("spaces", [(), ("head",), ("heads", "everything")])
def test_unknown_spaces_are_refused(spaces: tuple[str, ...]) -> None:
    architecture = FEW["rope"]
    with pytest.raises(CosetError, match="choose from heads, qk, vo"):
        random_transform(architecture, model(architecture), spaces=spaces)


# --- negative controls ----------------------------------------------------------------------------------------------


def heads_element(architecture: Architecture, qk: Tensor) -> dict[str, WreathElement]:
    """The element of layer 0 that changes only the basis of queries and keys."""
    identity = group(architecture).factors["layers.0.heads"].identity()
    return {"layers.0.heads": WreathElement(identity.order, {**identity.inner, "qk": qk})}


def orthogonal(kv: int, n: int) -> Tensor:
    return torch.linalg.qr(torch.randn(kv, n, n, generator=torch.Generator().manual_seed(2), dtype=torch.float64))[0].contiguous()


@pytest.mark.parametrize(
    ("pe", "free"), [("none", True), ("sinusoidal", True), ("learned", True), ("alibi", True), ("t5", True), ("rope", False)]
)
def test_a_general_orthogonal_map_of_queries_and_keys(pe: str, free: bool) -> None:
    architecture = flags(pe, "rms", "qkv", 3, None, "gelu", False, layers=1)
    bare, p, _ = fold(architecture, model(architecture))
    element = heads_element(bare, orthogonal(3, 4))
    changed = difference(function(bare, move(bare, element, p)), function(bare, p))
    assert changed <= 1e-12 if free else changed > 0.01
    assert group(bare).factors["layers.0.heads"].belongs(element["layers.0.heads"]) == free


def test_an_orthogonal_map_under_qk_norm_is_seen() -> None:
    architecture = flags("none", "rms", "none", 3, "head", "gelu", False, layers=1)
    p = model(architecture)
    turned = {
        n: torch.einsum(e, p[n], orthogonal(3, 4))
        for n, e in {"layers.0.attention.q": "dkqm,kmn->dkqn", "layers.0.attention.k": "dkm,kmn->dkn"}.items()
    }
    assert difference(function(architecture, p | turned), function(architecture, p)) > 0.01


def test_query_heads_cannot_leave_their_kv_head() -> None:
    architecture = flags("rope", "rms", "none", 3, None, "gelu", False, layers=1)
    p, q, o = model(architecture), "layers.0.attention.q", "layers.0.attention.o"

    def reordered(order: list[int]) -> dict[str, Tensor]:
        index = torch.tensor(order)
        return {**p, q: p[q].flatten(1, 2)[:, index].reshape(p[q].shape), o: p[o].flatten(0, 1)[index].reshape(p[o].shape)}

    expected = function(architecture, p)
    assert difference(function(architecture, reordered([1, 0, 2, 3, 5, 4])), expected) <= 1e-12
    assert difference(function(architecture, reordered([2, 1, 0, 3, 4, 5])), expected) > 0.01


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_a_plane_scale_needs_its_conjugate(pairing: str) -> None:
    rotary = Rotary(((1.0,), (0.3,)), pairing)  # type: ignore[arg-type]
    architecture = of_layers(Layer(attention(rotary, kv=6, lanes=5), MLP(7), RMS, RMS))
    p, q, k = model(architecture), "layers.0.attention.q", "layers.0.attention.k"
    real, imaginary = (torch.tensor(lanes) for lanes in zip(*rotary.planes, strict=True))
    z = torch.polar(torch.tensor([1.4, 0.8], dtype=torch.float64), torch.tensor([0.7, -2.1], dtype=torch.float64))

    def times(x: Tensor, factor: Tensor) -> Tensor:
        moved, out = torch.complex(x[..., real], x[..., imaginary]) * factor, x.clone()
        out[..., real], out[..., imaginary] = moved.real, moved.imag
        return out

    expected = function(architecture, p)
    right = {**p, q: times(p[q], z), k: times(p[k], 1 / z.conj())}
    assert difference(function(architecture, right), expected) <= 1e-12
    forgotten = {**p, q: times(p[q], z), k: times(p[k], 1 / z)}
    assert difference(function(architecture, forgotten), expected) > 0.01
    unscaled = {**p, q: times(p[q], z), k: times(p[k], z / z.abs())}
    assert difference(function(architecture, unscaled), expected) > 0.01


def test_a_head_takes_its_output_map_along() -> None:
    architecture = flags("none", "rms", "none", 6, None, "gelu", False, layers=1)
    p, order = model(architecture), torch.tensor([2, 0, 1, 5, 4, 3])
    some = {n: p[n][:, order] for n in ("layers.0.attention.q", "layers.0.attention.k", "layers.0.attention.v")}
    o = {"layers.0.attention.o": p["layers.0.attention.o"][order]}
    assert difference(function(architecture, p | some | o), function(architecture, p)) <= 1e-12
    assert difference(function(architecture, p | some), function(architecture, p)) > 0.01


def test_a_gated_neuron_scales_up_and_down_and_never_the_gate() -> None:
    architecture = flags("none", "rms", "none", 6, None, "swiglu", False, layers=1)
    p, c = model(architecture), torch.linspace(-2.0, 2.0, 7, dtype=torch.float64) + 0.1
    up, gate, down = (f"layers.0.mlp.{x}" for x in ("up", "gate", "down"))
    expected = function(architecture, p)
    assert difference(function(architecture, {**p, up: p[up] * c, down: p[down] / c[:, None]}), expected) <= 1e-12
    assert difference(function(architecture, {**p, up: p[up] * c, down: p[down] * c[:, None]}), expected) > 0.01
    assert difference(function(architecture, {**p, gate: p[gate] * c, down: p[down] / c[:, None]}), expected) > 0.01


def test_a_rotated_stream_needs_folded_gains() -> None:
    architecture = flags("rope", "rms", "none", 3, None, "gelu", False, layers=1)
    bare, _, _ = fold(architecture, model(architecture))
    turn = group(bare).factors["stream"].random(torch.Generator().manual_seed(0))
    with pytest.raises(CosetError, match="fold the gains first"):
        move(replace(bare, layers=architecture.layers), {"stream": turn}, model(replace(bare, layers=architecture.layers)))


def test_unknown_spaces_of_an_element_are_refused() -> None:
    architecture = flags("sinusoidal", "rms", "none", 3, None, "gelu", False, layers=1)
    with pytest.raises(CosetError, match="no space stream; it has layers"):
        move(architecture, {"stream": torch.eye(10)}, model(architecture))


def test_act_returns_what_it_does_not_touch() -> None:
    architecture = flags("rope", "rms", "none", 3, None, "gelu", False)
    bare, p, _ = fold(architecture, model(architecture))
    out = move(
        bare, {"layers.1.neurons": torch.randperm(7)}, {n: p[n] for n in ("layers.0.mlp.up", "layers.1.mlp.up", "layers.1.attention.q")}
    )
    assert list(out) == ["layers.0.mlp.up", "layers.1.attention.q", "layers.1.mlp.up"]
    assert out["layers.0.mlp.up"] is p["layers.0.mlp.up"]


# --- membership -----------------------------------------------------------------------------------------------------


def test_belongs_rejects_outsiders() -> None:
    architecture = flags("rope", "rms", "none", 3, None, "gelu", False, layers=1)
    p = model(architecture)
    transform = random_transform(architecture, p)
    assert transform.belongs()
    heads = transform.element["layers.0.heads"]
    outsiders = [
        {"layers.0.heads": WreathElement(heads.order, {**heads.inner, "qk": orthogonal(3, 4)})},
        {"layers.0.heads": WreathElement(torch.tensor([0, 0, 1]), heads.inner)},
        {"layers.7.heads": heads},
        {"stream": 2 * transform.element["stream"]},
        {"layers.0.neurons": torch.arange(6)},
    ]
    for outsider in outsiders:
        assert not replace(transform, element=dict(transform.element) | outsider).belongs()
    wide = dict(transform.target) | {"final_norm.gain": torch.ones(11, dtype=torch.float64)}
    assert not replace(transform, target=wide).belongs()
    endless = dict(transform.target) | {"final_norm.gain": torch.full((10,), torch.inf, dtype=torch.float64)}
    assert not replace(transform, target=endless).belongs()


# --- files ----------------------------------------------------------------------------------------------------------


@each(FEW)
def test_files_hold_everything(architecture: Architecture, tmp_path: Path) -> None:
    p = model(architecture)
    transform = random_transform(architecture, p, seed=4)
    transform.save(tmp_path / "g.safetensors", {"note": "x"})
    loaded = Transform.load(tmp_path / "g.safetensors", architecture)
    assert [f.name for f in tmp_path.iterdir()] == ["g.safetensors"]
    with safe_open(str(tmp_path / "g.safetensors"), "pt") as file:
        assert file.metadata()["note"] == "x"
    for key, factor in group(transform.folded).factors.items():
        before, after = factor.leaves(transform.element[key]), factor.leaves(loaded.element[key])
        assert before.keys() == after.keys()
        assert all(torch.equal(before[n], after[n]) and before[n].dtype == after[n].dtype for n in before)
    for own, read in ((transform.source, loaded.source), (transform.target, loaded.target)):
        assert own.keys() == read.keys()
        assert all(torch.equal(own[n], read[n]) for n in own)
    assert distance(loaded(p), transform(p)) <= 1e-14


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    architecture = FEW["rope"]
    p = model(architecture)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        random_transform(architecture, p, seed=seed).save(tmp_path / name)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b
    assert a != c


def saved(tmp_path: Path, architecture: Architecture) -> Path:
    path = tmp_path / "g.safetensors"
    random_transform(architecture, model(architecture)).save(path)
    return path


def tampered(path: Path, change: Callable[[dict[str, Tensor]], None], **metadata: str) -> None:
    """Rewrite a transform file with other tensors or metadata."""
    with safe_open(str(path), "pt") as file:
        tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118 - not a dict
        described = dict(file.metadata())
    change(tensors)
    save_file(tensors, str(path), {k: v for k, v in (described | metadata).items() if v})


ROPE = flags("rope", "rms", "qkv", 3, None, "gelu", False, layers=1)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (flags("rope", "rms", "qkv", 3, None, "gelu", False, layers=2), "layers: the checkpoint has 2, the transform 1"),
        (flags("rope", "rms", "qkv", 6, None, "gelu", False, layers=1), "layer 0, KV heads: the checkpoint has 6, the transform 3"),
        (
            flags("rope", "layer", "all", 3, None, "gelu", False, layers=1),
            "tensor final_norm.bias: the checkpoint has [10], the transform no such tensor",
        ),
        (
            flags("none", "rms", "qkv", 3, None, "gelu", False, layers=1),
            "layer 0, rotary planes: the checkpoint has 0 planes, the transform 2 planes",
        ),
        (
            flags("rope", "rms", "qkv", 3, None, "gelu", True, layers=1),
            "tensor head: the checkpoint has no such tensor, the transform [10, 13]",
        ),
        (
            replace(
                ROPE, layers=(replace(ROPE.layers[0], attention=replace(ROPE.layers[0].attention, positions=Rotary(((1.0,), (0.02,))))),)
            ),
            "layer 0, rotary frequencies: the checkpoint has 2 planes, the transform other ones",
        ),
        (
            replace(
                ROPE,
                layers=(
                    replace(
                        ROPE.layers[0], attention=replace(ROPE.layers[0].attention, positions=Rotary.standard(4, pairing="interleaved"))
                    ),
                ),
            ),
            "layer 0, rotary planes: the checkpoint has 2 planes, the transform other ones",
        ),
    ],
    ids=["layers", "kv heads", "norm", "vanilla", "tied", "frequencies", "pairing"],
)
def test_a_file_for_another_architecture_is_refused_by_its_difference(other: Architecture, difference: str, tmp_path: Path) -> None:
    path = saved(tmp_path, ROPE)
    with pytest.raises(CosetError, match="written for another architecture") as caught:
        Transform.load(path, other)
    assert difference in str(caught.value).splitlines()[1:]


def test_a_scaled_neuron_is_refused_where_the_activation_allows_none(tmp_path: Path) -> None:
    path = saved(tmp_path, flags("rope", "rms", "none", 3, None, "relu", False, layers=1))
    with pytest.raises(CosetError, match="lacks or misnames"):
        Transform.load(path, flags("rope", "rms", "none", 3, None, "gelu", False, layers=1))


def set_to(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        assert name in tensors
        tensors[name] = value

    return change


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_to("element/layers.0.heads/inner.qk", orthogonal(3, 4)),
        set_to("element/layers.0.heads/inner.qk", torch.zeros(3, 4, 4, dtype=torch.float64)),
        set_to("element/layers.0.heads/inner.vo", torch.zeros(3, 4, 4, dtype=torch.float64)),
        set_to("element/layers.0.heads/inner.vo", torch.full((3, 4, 4), torch.nan, dtype=torch.float64)),
        set_to("element/layers.0.heads/inner.vo", torch.eye(4, dtype=torch.float64)),
        set_to("element/layers.0.heads/order", torch.tensor([0, 1, 1])),
        set_to("element/layers.0.heads/order", torch.tensor([0.0, 1.0, 2.0])),
        set_to("element/layers.0.neurons/", torch.arange(8)),
        set_to("element/stream/", torch.ones(10, 10, dtype=torch.float64)),
        set_to("target/final_norm.gain", torch.full((10,), torch.nan, dtype=torch.float64)),
        set_to("source/final_norm.gain", torch.ones(3, dtype=torch.float64)),
    ],
)
def test_an_element_outside_the_group_is_refused(change: Callable[[dict[str, Tensor]], None], tmp_path: Path) -> None:
    path = saved(tmp_path, ROPE)
    tampered(path, change)
    with pytest.raises(CosetError, match=r"g\.safetensors: holds an element that does not belong to the symmetry group"):
        Transform.load(path, ROPE)


def test_files_that_are_no_transforms_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, ROPE)
    whole = path.read_bytes()

    def refused(message: str) -> None:
        with pytest.raises(CosetError, match=message):
            Transform.load(path, ROPE)

    path.write_bytes(whole[: len(whole) // 2])
    refused("not a readable safetensors file")
    path.write_bytes(b"")
    refused("not a readable safetensors file")
    path.write_bytes(whole)
    tampered(path, lambda t: None, coset="")
    refused("not a transform written by coset")
    path.write_bytes(whole)
    tampered(path, lambda t: None, signature="")
    refused("another architecture")
    path.write_bytes(whole)
    tampered(path, lambda t: None, signature="not json")
    refused("another architecture")
    path.write_bytes(whole)
    tampered(path, lambda t: None, signature=json.dumps({"summary": "?"}))
    refused("another architecture")
    path.write_bytes(whole)
    tampered(path, lambda t: t.update(loose=torch.ones(1)))
    refused("tensor loose does not belong")
    path.write_bytes(whole)
    tampered(path, lambda t: t.update({"element/loose": torch.ones(1)}))
    refused("lacks or misnames")
    path.write_bytes(whole)
    tampered(path, without("element/layers.0.heads/order"))
    refused("lacks or misnames")
    path.write_bytes(whole)
    tampered(path, without("source/final_norm.gain"))
    refused("same coordinates")
    path.unlink()
    refused("no such transform file")
    path.mkdir()
    refused(r"g\.safetensors: not a readable")


def test_an_unwritable_place_is_an_error(tmp_path: Path) -> None:
    transform = random_transform(ROPE, model(ROPE))
    with pytest.raises(CosetError, match="cannot write the transform"):
        transform.save(tmp_path / "missing" / "g.safetensors")
