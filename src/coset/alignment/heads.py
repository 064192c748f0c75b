r"""Stage 1: which head is which, and stage 2's element for the whole layer.

Circuits ``M_i = Q_i K_iᵀ`` and ``N_i = V_i O_i`` do not change with the basis inside a head, so heads are compared by

    C_ij = ‖M_i^A − M_j^B‖² + ‖N_i^A − N_j^B‖²

and assigned exactly. The d×d products are never formed: ``⟨Q_A K_Aᵀ, Q_B K_Bᵀ⟩ = Σ (Q_AᵀQ_B) ∘ (K_AᵀK_B)``, and the cross products
of all pairs of heads are one matrix product. Under a rotary encoding M alone does not determine the function; the complex products
``q_j k_j†`` of every plane do, and cost no more.
Source: "Functional Equivalence in Attention" (ICML 2026), stage 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from coset.alignment.features import HeadFeatures, QKBlocks
from coset.alignment.within_head import Grams, Linear, Planes, full_rank, least_squares, regular, solve_linear, solve_planes
from coset.groups import Permutation, Product, RotaryCommutant, Scaling, Wreath, WreathElement, polar
from coset.groups.monomial import assignment, take


@dataclass(frozen=True)
class Solvers:
    """How stage 2 is solved. The defaults are ours; the others reproduce the paper's variants.

    Attributes
    ----------
    planes
        ``exact`` global minimum of every plane, or ``brent`` one plane at a time.
    linear
        ``newton``, ``gradient`` (descent over GL), or ``orthogonal`` (Procrustes; planes then keep modulus one).
    """

    planes: Planes = "exact"
    linear: Linear = "newton"


def _cross(x: Tensor, y: Tensor) -> Tensor:
    """All cross products ``xᴴ y`` of [*batch, n, rows, m] and [*batch, n', rows, m]: [*batch, n, m, n', m], as one matrix product."""
    *batch, n, _, m = x.shape
    # Neither [rows, n, m] nor [n, m, rows] in memory needs a copy for this.
    left, right = x.mT.flatten(-3, -2), y.mT.flatten(-3, -2)
    return (left.conj() @ right.mT).reshape(*batch, n, m, y.shape[-3], m)


def _product_inner(left_a: Tensor, right_a: Tensor, left_b: Tensor, right_b: Tensor) -> Tensor:
    """``Re ⟨L_i R_iᴴ, L_j R_jᴴ⟩`` of every query head i of A and j of B: [kv, query, kv, query].

    Two stacks [block, kv, query, rows, m] and two [block, kv, rows, m]; either may be the left factor.
    """
    blocks, kv, query, rows, m = left_a.shape
    per_query = _cross(left_a.reshape(blocks, kv * query, rows, m), left_b.reshape(blocks, kv * query, rows, m))
    per_kv = _cross(right_a, right_b)
    per_query = per_query.reshape(blocks, kv, query, m, kv, query, m)
    if query == 1:
        # No sharing of keys: an elementwise product and a sum, without the copies a general contraction would make.
        return (per_query[:, :, 0, :, :, 0] * per_kv.conj()).sum((0, 2, 4)).real[:, None, :, None]
    return torch.einsum("bkqsKQt,bksKt->kqKQ", per_query, per_kv.conj()).real


def _square(x: Tensor) -> Tensor:
    """Squared norms of single columns [.., rows, 1], over the rows."""
    parts = torch.view_as_real(x) if x.is_complex() else x.unsqueeze(-1)
    return parts.square().sum(-3).sum((-2, -1))


def _product_norm(left: Tensor, right: Tensor) -> Tensor:
    """``‖L_i R_iᴴ‖²`` of every query head, [kv, query]."""
    if left.shape[-1] == 1:
        return (_square(left) * _square(right).unsqueeze(2)).sum(0)
    return ((left.mH @ left) * (right.mH @ right).conj().unsqueeze(2)).sum((0, -2, -1)).real


def _circuits(left_a: Tensor, right_a: Tensor, left_b: Tensor, right_b: Tensor) -> Tensor:
    own_a, own_b = _product_norm(left_a, right_a), _product_norm(left_b, right_b)
    return own_a[:, :, None, None] + own_b[None, None] - 2 * _product_inner(left_a, right_a, left_b, right_b)


def _lane_sums(x: Tensor, owner: Tensor, size: int) -> Tensor:
    """Add up the last axis by block of lanes."""
    return torch.zeros(*x.shape[:-1], size, dtype=x.dtype, device=x.device).index_add(-1, owner, x)


def _signed_cost(group: Scaling, a: QKBlocks, b: QKBlocks) -> Tensor:
    """QK-norm: products of queries and keys are not invariant; compare the factors, up to a sign on every plane."""
    query = a.q.shape[2]
    q = _lane_sums(torch.einsum("kqrn,KQrn->kqKQn", a.q[0], b.q[0]), group.owner, group.size)
    k = _lane_sums(torch.einsum("krn,Krn->kKn", a.k[0], b.k[0]), group.owner, group.size)
    same = (q + k[:, None, :, None] / query).abs().sum(-1)
    own = [f.q[0].square().sum((-2, -1)) + f.k[0].square().sum((-2, -1))[:, None] / query for f in (a, b)]
    return own[0][:, :, None, None] + own[1][None, None] - 2 * same


def head_cost(group: Wreath, a: HeadFeatures, b: HeadFeatures) -> Tensor:
    """C [kv, query, kv, query]: squared distance of every query head of A (first two axes) from every one of B, in invariants.

    Features come from `head_features(..., circuits=True)`.
    """
    qk = _inner(group).factors["qk"]
    if isinstance(qk, Scaling):
        cost = _signed_cost(qk, a.qk[0], b.qk[0])
    else:
        cost = sum((_circuits(x.q, x.k, y.q, y.k) for x, y in zip(a.qk, b.qk, strict=True)), torch.zeros((), dtype=a.v.dtype))
    if a.heads is not None and b.heads is not None:
        # Logits and outputs have units of their own, so each counts relative to its mean over all pairs.
        cost = _over_mean(cost) + _over_mean(_written(a, a.heads, b, b.heads))
    else:
        cost = cost + _value_circuits(a, b)
    if a.per_query is not None and b.per_query is not None:
        cost = cost + (a.per_query[:, :, None, None] - b.per_query[None, None]).square().sum(-1)
    return cost


def _over_mean(cost: Tensor) -> Tensor:
    return cost / cost.mean().clamp_min(torch.finfo(cost.dtype).tiny)


def _value_circuits(a: HeadFeatures, b: HeadFeatures) -> Tensor:
    # Here the output map is what each query head has of its own, and the values are shared.
    return _circuits(a.o.mT[None], a.v[None], b.o.mT[None], b.v[None])


def _written(a: HeadFeatures, z_a: Tensor, b: HeadFeatures, z_b: Tensor) -> Tensor:
    """Distances of what the query heads write to the stream, z O: every query head has outputs z of its own."""
    (kv, query), sides = a.o.shape[:2], []
    for f, z in ((a, z_a), (b, z_b)):
        sides += [f.o.mT.flatten(0, 1)[None, :, None], z.flatten(0, 1)[None]]
    return _circuits(*sides).reshape(kv, query, kv, query)


def _inner(group: Wreath) -> Product:
    assert isinstance(group.inner, Product)
    return group.inner


def assign_heads(group: Wreath, cost: Tensor) -> tuple[Tensor, Tensor]:
    """Permutation of KV heads [kv] and of the query heads in each [kv, query] with the least total cost. Exact, in two levels.

    For every pair of KV heads the best assignment of their query heads gives the cost of the pair; then the KV heads are assigned.
    """
    kv, query = cost.shape[:2]
    pairs = cost.permute(0, 2, 1, 3)  # [kv A, kv B, query A, query B]
    inner = _inner(group).factors["query"]
    assert isinstance(inner, Permutation)
    orders = assignment(-pairs) if inner.classes is None else torch.arange(query).expand(kv, kv, query)
    paired = torch.gather(pairs, -1, orders[..., None])[..., 0].sum(-1)
    order = group.top.best(-paired.mT)
    return order, orders[torch.arange(kv), order]


def reordered(f: HeadFeatures, order: Tensor, query: Tensor) -> HeadFeatures:
    """Features with KV head ``order[i]``, and in it query head ``query[i, j]``, moved to place (i, j)."""

    def per_query(x: Tensor, lead: int) -> Tensor:
        """Reorder [.., kv, query, ..] with `lead` axes in front."""
        x = torch.index_select(x, lead, order)
        moved = torch.movedim(x, (lead, lead + 1), (0, -1))
        return torch.movedim(take(moved, query), (0, -1), (lead, lead + 1))

    qk = tuple(QKBlocks(x.blocks, per_query(x.q, 1), torch.index_select(x.k, 1, order)) for x in f.qk)
    extra = None if f.per_query is None else per_query(f.per_query, 0)
    heads = None if f.heads is None else per_query(f.heads, 0)
    return HeadFeatures(qk, f.v[order], per_query(f.o, 0), extra, heads)


def _flatten_queries(q: Tensor) -> Tensor:
    """[block, kv, query, rows, m] -> [block, kv, query * rows, m]: one change of basis serves all query heads of a KV head."""
    return q.flatten(2, 3)


def solve_within(
    group: Wreath, a: HeadFeatures, b: HeadFeatures, solvers: Solvers, spaces: tuple[str, ...]
) -> tuple[dict[str, Tensor], list[str]]:
    """Stage 2 for features whose heads already correspond.

    Returns the elements for ``qk`` and ``vo`` ([kv, n, n], or signs [kv, blocks] under QK-norm), and a note for every degenerate head.
    """
    inner, notes = _inner(group), []
    kv = a.v.shape[0]
    out = {space: inner.factors[space].identity((kv,), dtype=a.v.dtype) for space in ("qk", "vo")}
    if "qk" in spaces:
        out["qk"], poor = _solve_qk(inner.factors["qk"], a.qk, b.qk, solvers)
        notes += [f"queries and keys of KV head {j} are rank deficient: only an isometry was matched there" for j in poor]
    if "vo" in spaces:
        o_a, o_b = (f.o.mT.flatten(1, 2) for f in (a, b))  # [kv, query * width, m]
        grams = Grams.of(a.v, o_a, b.v, o_b)
        out["vo"] = solve_linear(grams, solvers.linear)
        poor = [j for j, fine in enumerate(regular(grams).tolist()) if not fine]
        notes += [f"values and outputs of KV head {j} are rank deficient: only an isometry was matched there" for j in poor]
    return out, notes


def _solve_qk(group: object, a: tuple[QKBlocks, ...], b: tuple[QKBlocks, ...], solvers: Solvers) -> tuple[Tensor, list[int]]:
    if isinstance(group, Scaling):
        inner = torch.einsum("kqrn,kqrm->knm", b[0].q[0], a[0].q[0]) + torch.einsum("krn,krm->knm", b[0].k[0], a[0].k[0])
        return group.best(inner), []
    kv = a[0].k.shape[1]
    n = group.n  # type: ignore[attr-defined]
    total = torch.zeros(kv, n, n, dtype=a[0].q.real.dtype, device=a[0].q.device)
    poor: set[int] = set()
    for x, y in zip(a, b, strict=True):
        q_a, q_b = _flatten_queries(x.q), _flatten_queries(y.q)
        if x.q.shape[-1] == 1 and solvers.linear != "orthogonal":
            alpha, beta = (q_b.conj() * q_a).sum((-2, -1)), (y.k.conj() * x.k).sum((-2, -1))
            size_q, size_k = q_b.abs().square().sum((-2, -1)), y.k.abs().square().sum((-2, -1))
            value = solve_planes(alpha, beta, size_q, size_k, solvers.planes)[..., None, None]
            poor |= set(((size_q == 0) | (size_k == 0)).any(0).nonzero().flatten().tolist())
        else:
            grams = Grams.of(q_a, x.k, q_b, y.k)
            value = solve_linear(grams, solvers.linear)
            poor |= set((~regular(grams)).any(0).nonzero().flatten().tolist())
        for block, part in zip(x.blocks, value, strict=True):
            total = total + (group.embed(block, part) if isinstance(group, RotaryCommutant) else part)
    return total, sorted(poor)


def least_squares_within(group: Wreath, a: HeadFeatures, b: HeadFeatures) -> dict[str, Tensor]:
    """Stage 2 as linear equations, ``Q_B U = Q_A`` and ``K_A Uᴴ = K_B`` in least squares: for models that are equivalent, whatever the ranks.

    Returns the elements for ``qk`` (the identity under QK-norm) and ``vo`` ([kv, n, n]); the identity where the solution is not invertible.
    """
    inner = _inner(group)
    kv = a.v.shape[0]
    out = {space: inner.factors[space].identity((kv,), dtype=a.v.dtype) for space in ("qk", "vo")}
    qk = inner.factors["qk"]
    if isinstance(qk, RotaryCommutant):
        total = torch.zeros_like(out["qk"])
        for x, y in zip(a.qk, b.qk, strict=True):
            value = _invertible(least_squares(Grams.of(_flatten_queries(x.q), x.k, _flatten_queries(y.q), y.k)))
            for block, part in zip(x.blocks, value, strict=True):
                total = total + qk.embed(block, part)
        out["qk"] = total
    elif not isinstance(qk, Scaling):
        x, y = a.qk[0], b.qk[0]
        out["qk"] = _invertible(least_squares(Grams.of(_flatten_queries(x.q), x.k, _flatten_queries(y.q), y.k)))[0]
    o_a, o_b = (f.o.mT.flatten(1, 2) for f in (a, b))
    out["vo"] = _invertible(least_squares(Grams.of(a.v, o_a, b.v, o_b)))
    return out


def _invertible(u: Tensor) -> Tensor:
    eye = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
    return torch.where((torch.linalg.cond(u) < 1e8)[..., None, None], u, eye)


def match_heads(
    group: Wreath,
    a: HeadFeatures,
    b: HeadFeatures,
    circuits: tuple[HeadFeatures, HeadFeatures],
    solvers: Solvers,
    spaces: tuple[str, ...],
    *,
    permute: Literal["circuits", "keep"] = "circuits",
) -> tuple[WreathElement, list[str]]:
    """Stage 1 and stage 2 for one layer: the element of `group` that brings B's heads to A's, and notes on degenerate heads."""
    order, query = group.top.identity(), _inner(group).factors["query"].identity((group.copies,))
    if "heads" in spaces and permute == "circuits":
        order, query = assign_heads(group, head_cost(group, *circuits))
    inner, notes = solve_within(group, a, reordered(b, order, query), solvers, spaces)
    return WreathElement(order, {"query": query, **inner}), notes


__all__ = ["Solvers", "assign_heads", "full_rank", "head_cost", "match_heads", "polar", "reordered", "solve_within"]
