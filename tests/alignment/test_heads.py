"""Stage 1: the cost of a pair of heads against circuits written out, and the assignment against every permutation."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from architecture_zoo import RMS, attention, difference, distance, flags, function, model, of_layers
from coset.alignment import Matching, Solvers, align
from coset.alignment.features import head_features
from coset.alignment.heads import assign_heads, head_cost
from coset.architecture import MLP, Alibi, Architecture, Attention, Layer, RelativeBias, Rotary
from coset.groups import GeneralLinear, Wreath, WreathElement, heads
from coset.symmetries import group
from coset.transform import move, random_transform


def one_layer(a: Attention) -> Architecture:
    return of_layers(Layer(a, MLP(7), RMS, RMS))


def explicit_cost(a: Attention, p: dict[str, Tensor], q: dict[str, Tensor]) -> Tensor:
    """Squared distances of circuits [head of A, head of B], every d×d (complex) matrix formed. Biases: none."""

    def circuits(x: dict[str, Tensor]) -> list[list[Tensor]]:
        w = {t: x[f"layers.0.attention.{t}"] for t in "qkvo"}
        out = []
        for kv, g in itertools.product(range(a.kv_heads), range(a.group)):
            query, key = w["q"][:, kv, g], w["k"][:, kv]
            parts = [w["v"][:, kv] @ w["o"][kv, g]]
            frequencies = a.plane_frequencies
            for frequency in dict.fromkeys(frequencies):
                planes = torch.tensor([p for p, f in zip(a.planes, frequencies, strict=True) if f == frequency])
                complex_q, complex_k = (torch.complex(t[:, planes[:, 0]], t[:, planes[:, 1]]) for t in (query, key))
                parts.append(complex_q @ complex_k.mH)
            still = list(a.still_lanes)
            parts.append(query[:, still] @ key[:, still].T)
            out.append(parts)
        return out

    ours, theirs = circuits(p), circuits(q)
    return torch.stack([torch.stack([sum((s - t).abs().square().sum() for s, t in zip(x, y, strict=True)) for y in theirs]) for x in ours])


ENCODINGS = {
    "none": None,
    "rope": Rotary.standard(6),
    "partial": Rotary.standard(4, pairing="interleaved"),
    "repeated": Rotary(((0.9,), (0.0,), (0.9,))),
}


@pytest.mark.parametrize("kv", [6, 3, 1])
@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS.keys())
def test_cost_is_the_distance_of_circuits(encoding: object, kv: int) -> None:
    architecture = one_layer(attention(encoding, kv=kv, lanes=7, values=5))
    a, p, q = architecture.layers[0].attention, model(architecture, 1), model(architecture, 2)
    features = [head_features(architecture, 0, x, circuits=True) for x in (p, q)]
    cost = head_cost(group(architecture).factors["layers.0.heads"], *features)  # type: ignore[arg-type]
    assert cost.shape == (kv, 6 // kv, kv, 6 // kv)
    assert torch.allclose(cost.reshape(6, 6), explicit_cost(a, p, q))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS.keys())
def test_cost_does_not_see_the_basis_nor_invisible_biases(encoding: object, bias: bool) -> None:
    architecture = one_layer(attention(encoding, lanes=7, bias=bias))
    p, q = model(architecture, 1), model(architecture, 2)
    moved = random_transform(architecture, q, spaces=("qk", "vo", "shifts"))(q)
    costs = []
    for x in (q, moved):
        features = [head_features(architecture, 0, y, circuits=True) for y in (p, x)]
        costs.append(head_cost(group(architecture).factors["layers.0.heads"], *features))  # type: ignore[arg-type]
    assert torch.allclose(*costs)


def test_under_rotation_equal_circuits_are_not_equal_heads() -> None:
    # A general map of queries and keys leaves Q Kᵀ and changes the function: the cost must see it.
    architecture = one_layer(attention(Rotary.standard(4), kv=6))
    p, g = model(architecture), torch.linalg.qr(model(architecture)["layers.0.attention.o"][0, 0, :, :4])[0]
    q = p | {n: p[n] @ g for n in ("layers.0.attention.q", "layers.0.attention.k")}
    assert difference(function(architecture, q), function(architecture, p)) > 0.01
    features = [head_features(architecture, 0, x, circuits=True) for x in (p, q)]
    cost = head_cost(group(architecture).factors["layers.0.heads"], *features)  # type: ignore[arg-type]
    assert float(cost.reshape(6, 6).diagonal().min()) > 0.1


def test_position_bias_tells_heads_apart() -> None:
    architecture = one_layer(attention(RelativeBias(8, 20), kv=3))
    p = model(architecture)
    q = dict(p)
    q["layers.0.attention.position_bias"] = p["layers.0.attention.position_bias"] + torch.arange(6.0, dtype=torch.float64).reshape(3, 2)
    q["layers.0.attention.position_bias"][3, 1, 0] += 2.0
    features = [head_features(architecture, 0, x, circuits=True) for x in (p, q)]
    cost = head_cost(group(architecture).factors["layers.0.heads"], *features).reshape(6, 6).diagonal()  # type: ignore[arg-type]
    # A constant for every head is invisible; one bucket moved by 2, less the mean it moves.
    assert torch.allclose(cost, torch.tensor([0, 0, 4 * 7 / 8, 0, 0, 0], dtype=torch.float64), atol=1e-9)


@pytest.mark.parametrize(("kv", "query"), [(4, 1), (1, 4), (3, 2), (2, 3)])
def test_assignment_is_the_best_of_all_permutations(kv: int, query: int) -> None:
    wreath = heads(kv, query, GeneralLinear(3), GeneralLinear(3))
    for seed in range(20):
        cost = torch.randn(kv, query, kv, query, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        order, queries = assign_heads(wreath, cost)

        def total(order: tuple[int, ...], queries: tuple[tuple[int, ...], ...], cost: Tensor = cost) -> float:
            return sum(float(cost[i, s, order[i], queries[i][s]]) for i in range(kv) for s in range(query))

        inside = list(itertools.permutations(range(query)))
        best = min(total(o, qs) for o in itertools.permutations(range(kv)) for qs in itertools.product(inside, repeat=kv))
        found = total(tuple(order.tolist()), tuple(map(tuple, queries.tolist())))
        assert found == pytest.approx(best)


def test_assignment_keeps_alibi_classes() -> None:
    slopes = (0.5, 0.1, 0.5, 0.1, 0.5)
    architecture = one_layer(attention(Alibi(slopes), heads=5, kv=5))
    wreath = group(architecture).factors["layers.0.heads"]
    assert isinstance(wreath, Wreath)
    for seed in range(20):
        cost = torch.randn(5, 1, 5, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        order, queries = assign_heads(wreath, cost)
        allowed = [o for o in itertools.permutations(range(5)) if all(slopes[o[i]] == slopes[i] for i in range(5))]
        assert len(allowed) == 12
        assert float(cost[torch.arange(5), 0, order, 0].sum()) == pytest.approx(
            min(sum(float(cost[i, 0, o[i], 0]) for i in range(5)) for o in allowed)
        )
        assert not queries.any()


def test_heads_alone_find_the_planted_order() -> None:
    architecture = flags("rope", "rms", "qkv", 3, None, "gelu", False)
    p = model(architecture)
    planted = random_transform(architecture, p, spaces=("heads",), seed=5)
    found = align(architecture, p, planted(p), spaces=("heads",))
    assert distance(found.parameters, p) == 0.0
    back = planted.inverse().element
    for i in range(2):
        key = f"layers.{i}.heads"
        got, expected = found.transform.element[key], back[key]
        assert torch.equal(got.order, expected.order)
        assert torch.equal(got.inner["query"], expected.inner["query"])
        assert torch.equal(got.inner["qk"], torch.eye(4, dtype=torch.float64).expand(3, 4, 4))


SOLVERS = [Solvers(), Solvers("brent"), Solvers(linear="gradient"), Solvers("brent", "gradient"), Solvers(linear="orthogonal")]


@pytest.mark.parametrize("pe", ["none", "rope", "t5"])
def test_our_solvers_are_never_above_the_variants(pe: str) -> None:
    architecture = flags(pe, "none", "qkv", 3, None, "gelu", False)
    a, b = model(architecture, 1), model(architecture, 2)
    b = {n: a[n] + 0.5 * (b[n] - a[n]) for n in a}
    expected = function(architecture, b)
    reached = []
    for solvers in SOLVERS:
        found = align(architecture, a, b, spaces=("heads", "qk", "vo"), how=Matching(solvers=solvers))
        assert difference(function(architecture, found.parameters), expected) <= 1e-10
        reached.append(distance(found.parameters, a))
    assert all(reached[0] <= other * (1 + 1e-6) for other in reached)
    assert reached[0] < reached[-1] < distance(b, a)


def test_orthogonal_variant_stays_among_isometries() -> None:
    architecture = flags("rope", "none", "none", 3, None, "gelu", False, layers=1)
    a, b = model(architecture, 1), model(architecture, 2)
    element = align(architecture, a, b, spaces=("heads", "qk", "vo"), how=Matching(solvers=Solvers(linear="orthogonal"))).transform.element[
        "layers.0.heads"
    ]
    eye = torch.eye(4, dtype=torch.float64)
    for space in ("qk", "vo"):
        assert float((element.inner[space] @ element.inner[space].mT - eye).abs().max()) <= 1e-12


def test_two_equal_heads() -> None:
    architecture = flags("none", "rms", "none", 6, None, "gelu", False, layers=1)
    p = model(architecture)
    for n, axis in (("q", 1), ("k", 1), ("v", 1), ("o", 0)):
        p[f"layers.0.attention.{n}"].select(axis, 3).copy_(p[f"layers.0.attention.{n}"].select(axis, 1))
    q = random_transform(architecture, p)(p)
    found = align(architecture, p, q)
    assert distance(found.parameters, p) <= 1e-8


def test_an_order_that_changes_nothing_is_an_identity() -> None:
    architecture = flags("rope", "none", "none", 3, None, "gelu", False, layers=1)
    p = model(architecture)
    wreath = group(architecture).factors["layers.0.heads"]
    found = align(architecture, p, p, spaces=("heads", "qk", "vo")).transform.element["layers.0.heads"]
    identity = wreath.identity()
    assert isinstance(found, WreathElement)
    assert all(torch.allclose(x, y) for x, y in zip(wreath.leaves(found).values(), wreath.leaves(identity).values(), strict=True))
    assert distance(move(architecture, {"layers.0.heads": found}, p), p) <= 1e-13


def test_an_order_that_would_raise_the_distance_is_not_taken() -> None:
    # Alone, the right order may lie further away: the bases inside the heads do not agree.
    architecture = flags("rope", "none", "none", 3, None, "gelu", False, layers=1)
    p, refused = model(architecture), 0
    for seed in range(20):
        q = random_transform(architecture, p, spaces=("heads", "qk", "vo"), seed=seed)(p)
        found = align(architecture, p, q, spaces=("heads",))
        assert distance(found.parameters, p) <= distance(q, p) * (1 + 1e-12)
        refused += distance(found.parameters, q) == 0.0
    assert refused
