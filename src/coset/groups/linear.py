"""General linear and orthogonal groups, and their subgroups that fix given vectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coset.errors import CosetError
from coset.groups.base import Group, default_tolerance, is_tensor, log_uniform


def random_orthogonal(generator: torch.Generator, n: int, batch: tuple[int, ...] = (), *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Haar-distributed orthogonal matrices [*batch, n, n] (QR of a Gaussian, signs fixed)."""
    q, r = torch.linalg.qr(torch.randn(*batch, n, n, generator=generator, dtype=torch.float64))
    signs = r.diagonal(dim1=-2, dim2=-1).sign()
    return (q * torch.where(signs == 0, torch.ones_like(signs), signs)[..., None, :]).to(dtype)


def polar(inner: Tensor) -> Tensor:
    """The orthogonal (unitary) matrix U that maximises ``Re tr(U^H inner)``, [*batch, n, n]: the polar factor of `inner`, by SVD."""
    u, _, vh = torch.linalg.svd(inner)
    return u @ vh


@dataclass(frozen=True)
class MatrixGroup(Group):
    """A group of invertible matrices [*batch, n, n] that multiply row vectors from the right."""

    n: int

    def identity(self, batch: tuple[int, ...] = (), *, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.eye(self.n, dtype=dtype).expand(*batch, self.n, self.n).clone()

    def compose(self, first: Tensor, second: Tensor) -> Tensor:
        return first @ second

    def inverse(self, g: Tensor) -> Tensor:
        return torch.linalg.inv(g)

    def act(self, g: Tensor, x: Tensor, variance: int = 1) -> Tensor:
        if variance == 0:
            raise CosetError(
                f"an element of {self.name} mixes lanes, so a tensor that is only reordered (a norm gain) cannot follow it; fold the gains first"
            )
        # Inverted in the element's own precision, which may be finer than the tensor's.
        matrix = (self.inverse(g).mT if variance < 0 else g).to(x.dtype)
        rows = x.reshape(*g.shape[:-2], -1, self.n)
        return (rows @ matrix).reshape(x.shape)

    def exponential(self, tangent: Tensor) -> Tensor:
        return torch.linalg.matrix_exp(tangent)

    def leaves(self, g: Tensor) -> dict[str, Tensor]:
        return {"": g}

    def build(self, leaves: Mapping[str, Tensor]) -> Tensor:
        return leaves[""]


def _complement(fixed: Tensor) -> Tensor:
    """Orthonormal rows [n - k, n] that complete the orthonormal rows `fixed` [k, n]."""
    return torch.linalg.svd(fixed, full_matrices=True)[2][fixed.shape[0] :]


def _fixed_faults(fixed: Tensor | None, n: int) -> None:
    if fixed is None:
        return
    if fixed.ndim != 2 or fixed.shape[1] != n or fixed.shape[0] > n:
        raise CosetError(f"fixed vectors must be rows [k <= {n}, {n}], got {list(fixed.shape)}")
    if fixed.dtype != torch.float64:
        raise CosetError(f"fixed vectors must be float64, got {fixed.dtype}")
    if not torch.allclose(fixed @ fixed.mT, torch.eye(len(fixed), dtype=fixed.dtype), atol=1e-9):
        raise CosetError("fixed vectors must be orthonormal rows")


@dataclass(frozen=True)
class GeneralLinear(MatrixGroup):
    """GL(n): every invertible matrix; with `fixed` (orthonormal rows [k, n], float64) those S with ``fixed S = fixed``."""

    fixed: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        _fixed_faults(self.fixed, self.n)

    @property
    def name(self) -> str:
        if self.fixed is None or not len(self.fixed):
            return f"GL({self.n})"
        free = self.n - len(self.fixed)
        return f"GL({free}) ⋉ R^({len(self.fixed)}×{free})" if free else "1"

    @property
    def dimension(self) -> int:
        return self.n * (self.n - (0 if self.fixed is None else len(self.fixed)))

    def random(self, generator: torch.Generator, batch: tuple[int, ...] = (), *, dtype: torch.dtype = torch.float64) -> Tensor:
        if self.fixed is None:
            left = random_orthogonal(generator, self.n, batch)
            right = random_orthogonal(generator, self.n, batch)
            return ((left * log_uniform(generator, (*batch, self.n), torch.float64)[..., None, :]) @ right).to(dtype)
        # The condition numbers of the two factors multiply: 2 for the scales, below 2 for a shear of norm at most a half.
        keep = self.fixed
        free = _complement(keep)
        left, right = (random_orthogonal(generator, len(free), batch) for _ in range(2))
        scale = log_uniform(generator, (*batch, len(free)), torch.float64).sqrt()
        inner = (left * scale[..., None, :]) @ right
        shear = torch.randn(*batch, len(free), len(keep), generator=generator, dtype=torch.float64)
        shear = shear / (2 * torch.linalg.matrix_norm(shear, keepdim=True).clamp(min=1.0))
        return (keep.mT @ keep + free.mT @ inner @ (free + shear @ keep)).to(dtype)

    def belongs(self, g: Any, tolerance: float | None = None) -> bool:
        if not is_tensor(g, (self.n, self.n)):
            return False
        if not bool((torch.linalg.matrix_rank(g) == self.n).all()):
            return False
        if self.fixed is None:
            return True
        tol = default_tolerance(g.dtype) if tolerance is None else tolerance
        return bool(((self.fixed.to(g) @ g - self.fixed.to(g)).abs() <= tol).all())

    def tangent(self, direction: Tensor) -> Tensor:
        if self.fixed is None:
            return direction
        fixed = self.fixed.to(direction)
        return direction - fixed.mT @ (fixed @ direction)


@dataclass(frozen=True)
class Orthogonal(MatrixGroup):
    """O(n); with `fixed` (orthonormal rows [k, n], float64) the subgroup O(n - k) that leaves them where they are.

    LayerNorm fixes the all-ones direction; a position table that is part of the function fixes its rows.
    """

    fixed: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        _fixed_faults(self.fixed, self.n)

    @property
    def free(self) -> int:
        """Dimension of the space that is turned."""
        return self.n - (0 if self.fixed is None else len(self.fixed))

    @property
    def name(self) -> str:
        return f"O({self.free})" if self.free else "1"

    @property
    def dimension(self) -> int:
        return self.free * (self.free - 1) // 2

    def _embed(self, inner: Tensor) -> Tensor:
        if self.fixed is None:
            return inner
        fixed = self.fixed.to(inner)
        free = _complement(fixed)
        return fixed.mT @ fixed + free.mT @ inner @ free

    def random(self, generator: torch.Generator, batch: tuple[int, ...] = (), *, dtype: torch.dtype = torch.float64) -> Tensor:
        return self._embed(random_orthogonal(generator, self.free, batch)).to(dtype)

    def inverse(self, g: Tensor) -> Tensor:
        return g.mT

    def belongs(self, g: Any, tolerance: float | None = None) -> bool:
        if not is_tensor(g, (self.n, self.n)):
            return False
        tol = default_tolerance(g.dtype) if tolerance is None else tolerance
        eye = torch.eye(self.n, dtype=g.dtype, device=g.device)
        if not bool(((g @ g.mT - eye).abs() <= tol).all()):
            return False
        return self.fixed is None or bool(((self.fixed.to(g) @ g - self.fixed.to(g)).abs() <= tol).all())

    def best(self, inner: Tensor) -> Tensor:
        r"""Procrustes: the element g that maximises ``⟨B g, A⟩`` given ``inner = BᵀA`` [*batch, n, n]. Exact."""
        if self.fixed is None:
            return polar(inner)
        free = _complement(self.fixed.to(inner))
        return self._embed(polar(free @ inner @ free.mT))

    def tangent(self, direction: Tensor) -> Tensor:
        skew = (direction - direction.mT) / 2
        if self.fixed is None:
            return skew
        fixed = self.fixed.to(direction)
        rest = skew - fixed.mT @ (fixed @ skew)
        return rest - (rest @ fixed.mT) @ fixed


@dataclass(frozen=True)
class Mirrored(Orthogonal):
    """The orthogonal matrices that map the one `fixed` row to itself or to its opposite: O(n - 1), and a sign.

    LayerNorm commutes with all of them. The sign is seen only where something along **1** cannot be folded: where a norm's bias meets readers
    without a bias, their components along **1** and the bias's may change sign together. `random` leaves it alone.
    """

    def belongs(self, g: Any, tolerance: float | None = None) -> bool:
        return super().belongs(g, tolerance) or super().belongs(self._mirror(g), tolerance)

    def best(self, inner: Tensor) -> Tensor:
        assert self.fixed is not None
        g, one = super().best(inner), self.fixed[0].to(inner)
        # Where everything along the line is folded, its product is rounding, and says nothing.
        opposite = one @ inner @ one < -1e-9 * torch.linalg.matrix_norm(inner)
        return self._mirror(g) if bool(opposite) else g

    def _mirror(self, g: Tensor) -> Tensor:
        """The element with the other sign."""
        assert self.fixed is not None
        line = self.fixed.to(g)
        return g - 2 * line.mT @ (line @ g)
