"""The layout algebra on its own: known small tensors, and errors in tables."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coset.architecture import uniform
from coset.checkpoint.layout import Entry, Part, Table, fused_linear, interleaved_linear, linear, one
from coset.parameters import Axis, TensorSpec, tensors

KV, GROUP, LANES, WIDTH = 3, 2, 5, 7


def _spec(name, **axes):
    return TensorSpec(name, tuple(Axis(space, size) for space, size in axes.items()), 0)


SPECS = {
    s.name: s
    for s in [
        _spec("q", stream=WIDTH, kv=KV, query=GROUP, qk=LANES),
        _spec("k", stream=WIDTH, kv=KV, qk=LANES),
        _spec("v", stream=WIDTH, kv=KV, vo=4),
    ]
}
BLOCKS = {"q": "(kv query qk)", "k": "(kv qk)", "v": "(kv vo)"}
HEADS = {"q": "(query qk)", "k": "qk", "v": "vo"}


def _read(entries, stored):
    table = Table.resolve(entries, "", SPECS, 1, 0)
    return table, table.canonical(0, lambda name: stored, torch.float64, "test")


def test_fused_blocks():
    rows = KV * GROUP * LANES + KV * LANES + KV * 4
    stored = torch.arange(rows * WIDTH, dtype=torch.float64).reshape(rows, WIDTH)
    _, found = _read(fused_linear("qkv", BLOCKS, "stream"), stored)
    for s, kv, g, lane in [(0, 0, 0, 0), (6, 2, 1, 4), (3, 1, 0, 2)]:
        assert found["q"][s, kv, g, lane] == stored[(kv * GROUP + g) * LANES + lane, s]
        assert found["k"][s, kv, lane] == stored[KV * GROUP * LANES + kv * LANES + lane, s]
    assert found["v"][5, 2, 3] == stored[-1, 5]


def test_head_major_interleaving():
    each = GROUP * LANES + LANES + 4
    stored = torch.arange(KV * each * WIDTH, dtype=torch.float64).reshape(KV * each, WIDTH)
    _, found = _read(interleaved_linear("qkv", HEADS, "kv", "stream"), stored)
    for s, kv, g, lane in [(0, 0, 0, 0), (6, 2, 1, 4), (3, 1, 0, 2)]:
        assert found["q"][s, kv, g, lane] == stored[kv * each + g * LANES + lane, s]
        assert found["k"][s, kv, lane] == stored[kv * each + GROUP * LANES + lane, s]
    assert found["v"][5, 1, 3] == stored[2 * each - 1, 5]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_both_directions_are_inverse(kv, group, lanes, width, interleaved):
    specs = {
        s.name: s
        for s in [
            _spec("q", stream=width, kv=kv, query=group, qk=lanes),
            _spec("k", stream=width, kv=kv, qk=lanes),
            _spec("v", stream=width, kv=kv, vo=3),
        ]
    }
    entries = interleaved_linear("qkv", HEADS, "kv", "stream") if interleaved else fused_linear("qkv", BLOCKS, "stream")
    table = Table.resolve(entries, "", specs, 1, 0)
    stored = torch.randn(table.places[0].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    canonical = table.canonical(0, lambda name: stored, torch.float64, "test")
    assert {name: tuple(t.shape) for name, t in canonical.items()} == {name: spec.shape for name, spec in specs.items()}
    ((name, again),) = table.stored(0, canonical)
    assert name == "qkv.weight"
    assert torch.equal(again, stored)


def test_experts_and_convolution():
    specs = {s.name: s for s in [_spec("up", expert=3, stream=WIDTH, neuron=5), _spec("patches", patch=12, stream=WIDTH)]}
    entries = (one("experts.{e}.up", "up", "neuron stream"), Entry("conv", (Part("patches", "stream patch"),), shape=(3, 2, 2)))
    table = Table.resolve(entries, "", specs, 1, 3)
    generator = torch.Generator().manual_seed(0)
    stored = {p.stored: torch.randn(p.shape, generator=generator) for p in table.places}
    assert stored["conv"].shape == (WIDTH, 3, 2, 2)
    canonical = table.canonical(0, stored.__getitem__, torch.float64, "test")
    assert torch.equal(canonical["up"][2].float(), stored["experts.2.up"].T)
    assert torch.equal(canonical["patches"][:, 4].float(), stored["conv"][4].flatten())
    assert all(torch.equal(t.float(), stored[name]) for name, t in table.stored(0, canonical))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (linear("q", "q", "(kv query qk)", "stream"), "does not store exactly once: k, v"),
        ((one("q", "q", "(kv qk) stream"),), "does not name the axes"),
        ((one("a", "q", "(kv query qk) stream"), one("b", "q", "(kv query qk) stream")), "does not store exactly once"),
        ((Entry("qz", (Part("q", "(kv query qk) stream"), Part("z", "stream"))),), "only some of its parts"),
        ((Entry("qk", (Part("q", "(kv query qk) stream"), Part("k", "stream (kv qk)"))),), "do not join"),
    ],
)
def test_wrong_tables(entries, message):
    with pytest.raises(ValueError, match=message):
        Table.resolve(entries, "", SPECS, 1, 0)


def test_layers_are_read_one_at_a_time():
    architecture = uniform(layers=3, width=12, heads=3, kv_heads=3, head_dim=4, vocab=5)
    specs = {name: spec for name, spec in tensors(architecture).items() if name.endswith("attention.o")}
    table = Table.resolve((one("{body}h.{i}.o", "layers.{i}.attention.o", "stream (kv query vo)"),), "m.", specs, 3, 0)
    read = []

    def reader(name):
        read.append(name)
        return torch.zeros(12, 12)

    assert list(table.canonical(1, reader, torch.float32, "test")) == ["layers.1.attention.o"]
    assert read == ["m.h.1.o"]
