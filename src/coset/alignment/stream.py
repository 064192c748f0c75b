"""The residual stream: one rotation (or order and signs) for the whole model, from every tensor that touches it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from coset.alignment.within_head import Grams, full_rank, newton, objective, solve_linear
from coset.architecture import Architecture
from coset.groups import Element, GeneralLinear, Group, Monomial, MonomialElement, Orthogonal, assignment
from coset.parameters import Parameters, tensors


@dataclass
class StreamProducts:
    """Inner products between the stream axes of two models, summed over tensors; all [width, width].

    ``writers`` and ``readers`` hold BᵀA over covariant and dual axes; ``plain`` over axes that are only reordered. The Gram matrices of
    writers and readers of both models are kept where the group is not compact.
    """

    writers: Tensor
    readers: Tensor
    plain: Tensor
    grams: dict[str, Tensor] | None

    @staticmethod
    def zero(width: int, group: Group, dtype: torch.dtype = torch.float64) -> StreamProducts:
        """Nothing accumulated yet."""

        def empty() -> Tensor:
            return torch.zeros(width, width, dtype=dtype)

        grams = {key: empty() for key in ("q", "k", "q_ref", "k_ref")} if isinstance(group, GeneralLinear) else None
        return StreamProducts(empty(), empty(), empty(), grams)

    def add(self, architecture: Architecture, a: Parameters, b: Parameters) -> None:
        """Accumulate the tensors of a block of A and the corresponding ones of B."""
        for x, y, variance in _stream_rows(architecture, a, b):
            product = y.mT @ x
            if variance == 0:
                self.plain += product
            elif variance > 0:
                self.writers += product
            else:
                self.readers += product
            if self.grams is not None and variance != 0:
                own, reference = ("q", "q_ref") if variance > 0 else ("k", "k_ref")
                self.grams[own] += y.mT @ y
                self.grams[reference] += x.mT @ x

    def solve(self, group: Group) -> tuple[Element, float]:
        """The element that brings B's stream to A's, and by how much the squared distance falls."""
        eye = torch.eye(len(self.writers), dtype=self.writers.dtype)
        if self.grams is not None:
            grams = Grams(self.grams["q"], self.grams["k"], self.writers, self.readers, self.grams["q_ref"], self.grams["k_ref"])
            assert isinstance(group, GeneralLinear)
            g = solve_linear(grams) if group.fixed is None else _solve_fixing(grams, group.fixed)
            return g, float(objective(grams, eye) - objective(grams, g))
        inner = self.writers + self.readers
        if isinstance(group, Monomial):
            moved = _monomial(group, inner, self.plain)
            both = inner * moved.scale + self.plain
            gained = both[moved.order, torch.arange(group.n)].sum() - (inner + self.plain).trace()
            return moved, 2 * float(gained)
        assert isinstance(group, Orthogonal)
        g = group.best(inner)
        return g, 2 * float((g * inner).sum() - inner.trace())


def _solve_fixing(grams: Grams, fixed: Tensor) -> Tensor:
    """The g of least distance among those with ``fixed g = fixed`` (orthonormal rows [k, n]): Newton from the better of two starts.

    Writers alone are a linear least-squares problem over ``g = fixedᵀ fixed + freeᵀ M``, exact where an exact solution exists; the other
    start is the identity, which is kept where the readers are rank deficient.
    """
    eye = torch.eye(fixed.shape[1], dtype=grams.q.dtype)
    if not bool(full_rank(grams.k) & full_rank(grams.k_ref)):
        return eye
    free = torch.linalg.svd(fixed, full_matrices=True)[2][len(fixed) :]
    keep = fixed.mT @ fixed
    inner = torch.linalg.pinv(free @ grams.q @ free.mT, hermitian=True) @ free @ (grams.cross_q - grams.q @ keep)
    start = keep + free.mT @ inner
    inverse, fault = torch.linalg.inv_ex(start)
    if int(fault) or not float(objective(grams, start, inverse)) < float(objective(grams, eye)):
        start = eye
    return newton(grams, start, free=free)


def _monomial(group: Monomial, inner: Tensor, plain: Tensor) -> MonomialElement:
    """Order and signs of largest inner product, where `plain` counts for the order alone. Exact."""
    lanes = torch.arange(group.n)
    if group.scales == "sign":
        order = assignment((inner.abs() + plain).mT)
        sign = torch.where(inner[order, lanes] < 0, -1.0, 1.0).to(inner.dtype)
        return MonomialElement(order, sign)
    candidates = []
    for one in (1.0, -1.0):
        score = one * inner + plain
        order = assignment(score.mT)
        candidates.append((float(score[order, lanes].sum()), MonomialElement(order, torch.full((group.n,), one, dtype=inner.dtype))))
    return max(candidates, key=lambda c: c[0])[1]


def _stream_rows(architecture: Architecture, a: Parameters, b: Parameters) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Every stream axis of a block's tensors, as rows [.., width] of A and of B, with its variance."""
    for name, spec in tensors(architecture).items():
        if name not in a:
            continue
        for axis, label in enumerate(spec.axes):
            if label.space == "stream":
                x, y = (t.movedim(axis, -1).reshape(-1, label.size) for t in (a[name], b[name]))
                yield x, y, label.variance
