"""Neurons: which is which, at what scale; and which expert is which.

The assignment maximises the inner products of everything that belongs to a neuron,

    ⟨up_i^A, c up_j^B⟩ + ⟨down_i^A, down_j^B / c⟩ + ⟨gate_i^A, gate_j^B⟩,

exactly (linear assignment, as in Git Re-Basin); where the activation lets a scale c through, pairs are compared in the scale that
balances both sides alike, and the best scale of each chosen pair is then the best root of a quartic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coset.alignment.features import NeuronFeatures
from coset.groups import Element, Group, Monomial, MonomialElement, Permutation, Wreath, WreathElement, assignment
from coset.groups.monomial import reorder

_ROWS = 512
"""Neurons of A that are compared at a time."""


def solve_scales(alpha: Tensor, beta: Tensor, p: Tensor, q: Tensor, *, positive: bool) -> Tensor:
    r"""The real c ≠ 0 that minimises ``c² p + q / c² − 2 (α c + β / c)``, [*batch]; with `positive` among c > 0.

    Stationary points are the real roots of ``p c⁴ − α c³ + β c − q``: eigenvalues of companion matrices, all at once. Where p or q
    vanishes the infimum may not be attained; there c = 1 (or the better sign).
    """
    alive = (p > 0) & (q > 0)
    one = torch.ones_like(p)
    p_safe, q_safe = torch.where(alive, p, one), torch.where(alive, q, one)
    unit, root = (p_safe * q_safe).sqrt(), (q_safe / p_safe).pow(0.25)
    a, b = alpha * root / unit, beta / root / unit  # in c / root both norms are one
    companion = torch.zeros(*p.shape, 4, 4, dtype=p.dtype, device=p.device)
    companion[..., 1:, :-1] = torch.eye(3, dtype=p.dtype, device=p.device)
    companion[..., :, -1] = -torch.stack([-one, b, torch.zeros_like(b), -a], -1)
    roots = torch.linalg.eigvals(companion)
    c = torch.where(roots.imag.abs() <= 1e-3 * (1 + roots.abs()), roots.real, torch.ones_like(roots.real))
    extra = one[..., None] if positive else torch.stack([one, -one], -1)
    c = torch.cat([torch.where(c.abs() > 1e-8, c, torch.ones_like(c)), extra], -1)
    if positive:
        c = c.abs()
    value = c**2 + 1 / c**2 - 2 * (a[..., None] * c + b[..., None] / c)
    best = torch.gather(c, -1, value.argmin(-1, keepdim=True))[..., 0]
    sign = torch.where((alpha + beta < 0) & ~torch.tensor(positive), -one, one)
    return torch.where(alive, best * root, sign)


def _lean(f: NeuronFeatures) -> Tensor:
    """(‖covariant‖ / ‖dual‖)^½ of every neuron, or one for a dead neuron, [m]."""
    sizes = [x.square().sum(-2) for x in (f.covariant, f.dual)]
    fine = (sizes[0] > 0) & (sizes[1] > 0)
    ones = torch.ones_like(sizes[0])
    return torch.where(fine, (torch.where(fine, sizes[0], ones) / torch.where(fine, sizes[1], ones)).pow(0.25), ones)


def scores(group: Group, a: NeuronFeatures, b: NeuronFeatures) -> Tensor:
    """What A's neuron i gains from B's neuron j in the best sign and the balancing scale, [i, j]; a block of rows at a time."""
    signs = isinstance(group, Monomial) and group.scales != "positive"
    scaled = isinstance(group, Monomial) and group.scales != "sign"
    n = a.dual.shape[-1]
    out = torch.empty(n, n, dtype=a.dual.dtype, device=a.dual.device)
    if scaled:
        lean_a, lean_b = _lean(a), _lean(b)
        covariant, dual = b.covariant / lean_b, b.dual * lean_b
        size_covariant, size_dual = covariant.square().sum(-2), dual.square().sum(-2)
    else:
        covariant, dual = b.covariant, b.dual
    for start in range(0, n, _ROWS):
        rows = slice(start, start + _ROWS)
        x, y = a.covariant[:, rows], a.dual[:, rows]
        if scaled:
            x, y = x * lean_a[rows], y / lean_a[rows]
        block = torch.addmm(x.mT @ covariant, y.mT, dual)
        if signs:
            block.abs_()
        if a.plain is not None and b.plain is not None:
            block.addmm_(a.plain[:, rows].mT, b.plain)
        if scaled:
            c = lean_a[rows, None].square()
            block.sub_((c * size_covariant + size_dual / c) / 2)
        out[rows] = block
    return out


def _pair(group: Group, a: NeuronFeatures, b: NeuronFeatures) -> tuple[Element, Tensor]:
    """The best element for plain (unbatched) MLPs, and the score it reaches (for comparing experts)."""
    score = scores(group, a, b)
    order = assignment(score)
    reached = score[torch.arange(len(order)), order].sum()
    if not isinstance(group, Monomial):
        return order, reached
    found = NeuronFeatures(reorder(b.covariant, order), reorder(b.dual, order), None, None)
    return MonomialElement(order, rescale(group, a, found).scale), reached


def rescale(group: Monomial, a: NeuronFeatures, b: NeuronFeatures) -> MonomialElement:
    """The best scales (or signs) of neurons that already correspond; they stay in order."""
    alpha, beta = (b.covariant * a.covariant).sum(-2), (b.dual * a.dual).sum(-2)
    order = torch.arange(group.n).expand(alpha.shape)
    if group.scales == "sign":
        return MonomialElement(order, torch.where(alpha + beta < 0, -1.0, 1.0).to(alpha.dtype))
    p, q = b.covariant.square().sum(-2), b.dual.square().sum(-2)
    return MonomialElement(order, solve_scales(alpha, beta, p, q, positive=group.scales == "positive"))


def match_neurons(group: Group, a: NeuronFeatures, b: NeuronFeatures, spaces: tuple[str, ...]) -> Element:
    """The element of `group` that brings B's neurons (and experts, if `spaces` has them) to A's; exact for permutations."""
    if not isinstance(group, Wreath):
        return _pair(group, a, b)[0]

    def expert(f: NeuronFeatures, e: int) -> NeuronFeatures:
        return NeuronFeatures(f.covariant[e], f.dual[e], None if f.plain is None else f.plain[e], None)

    n = group.copies
    pairs = {(i, j): _pair(group.inner, expert(a, i), expert(b, j)) for i in range(n) for j in range(n) if i == j or "experts" in spaces}
    order = torch.arange(n)
    if "experts" in spaces:
        assert a.router is not None
        assert b.router is not None
        order = assignment(torch.stack([torch.stack([pairs[i, j][1] for j in range(n)]) for i in range(n)]) + a.router.mT @ b.router)
    chosen = [pairs[i, int(j)][0] for i, j in enumerate(order)]
    if "neurons" not in spaces:
        return WreathElement(order, group.inner.identity((n,)))
    if isinstance(group.inner, Permutation):
        return WreathElement(order, torch.stack(chosen))
    return WreathElement(order, MonomialElement(torch.stack([c.order for c in chosen]), torch.stack([c.scale for c in chosen])))


def invariants(group: Group, f: NeuronFeatures) -> Tensor:
    """Numbers [m, k] of every neuron that neither a rotation of the stream nor the neuron's own scale changes.

    Norms and inner products of what it reads and writes: they find the neurons' order before anything is known about the stream. Biases
    (the row behind those of the stream, zero where there are none) are numbers of their own.
    """
    group = group.inner if isinstance(group, Wreath) else group
    down, width = f.dual, f.dual.shape[-2]
    up, bias = f.covariant[..., :width, :], f.covariant[..., width:, :].sum(-2)
    if isinstance(group, Monomial) and group.scales != "sign":
        size_up, size_down = up.square().sum(-2), down.square().sum(-2)
        fine = (size_up > 0) & (size_down > 0)
        c = torch.where(fine, (size_down / torch.where(fine, size_up, torch.ones_like(size_up))).pow(0.25), torch.ones_like(size_up))
        up, down, bias = up * c.unsqueeze(-2), down / torch.where(c > 0, c, torch.ones_like(c)).unsqueeze(-2), bias * c
    signed = isinstance(group, Monomial) and group.scales != "positive"
    parts = [up.square().sum(-2).sqrt(), down.square().sum(-2).sqrt(), (up * down).sum(-2), bias.abs() if signed else bias]
    if f.plain is not None:
        gate = f.plain[..., :width, :]
        parts += [gate.square().sum(-2).sqrt(), (gate * up).sum(-2) * (gate * down).sum(-2), f.plain[..., width:, :].sum(-2)]
    return torch.stack(parts, -1)


def order_by_invariants(a: Tensor, b: Tensor) -> Tensor:
    """Permutation [m] of B's neurons with the least squared difference of invariants [m, k], each scaled to unit spread."""
    spread = a.std(0)
    weight = torch.where(spread > 0, 1 / torch.where(spread > 0, spread, torch.ones_like(spread)), torch.zeros_like(spread))
    return assignment(-torch.cdist(a * weight, b * weight).square())


__all__ = ["invariants", "match_neurons", "order_by_invariants", "rescale", "scores", "solve_scales"]
