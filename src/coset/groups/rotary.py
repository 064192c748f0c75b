r"""The commutant of the rotations: what a rotary encoding leaves of GL(head width).

Rotary encoding multiplies queries and keys at position t by R_t, which turns every plane of lanes by an angle proportional to its
frequency. A change of basis M of a head's queries (``q -> q M``, ``k -> k M^{-T}``) keeps every logit ``q R_t k^T`` exactly when M
commutes with all R_t. So lanes are grouped by frequency: n lanes of frequency zero give GL(n, R); m planes of one nonzero frequency give
GL(m, C), where a plane (a, b) of lanes is the complex lane ``q_a + i q_b``. All frequencies zero is plain attention, all distinct is
(C^×)^(n/2).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coset.errors import CosetError
from coset.groups.base import default_tolerance, is_tensor, log_uniform, power
from coset.groups.linear import MatrixGroup, polar, random_orthogonal

Frequency = tuple[float, ...]


class Block(NamedTuple):
    """Lanes of one frequency. Real block: `imaginary` is None. Complex block: lane pair j is (real[j], imaginary[j])."""

    real: tuple[int, ...]
    imaginary: tuple[int, ...] | None

    @property
    def size(self) -> int:
        return len(self.real)


@dataclass(frozen=True)
class RotaryCommutant(MatrixGroup):
    """Matrices [*batch, n, n] that commute with the rotations of the given planes.

    Parameters
    ----------
    planes
        Lane pairs (real, imaginary); any layout, each lane at most once.
    frequencies
        One for every plane; planes with equal frequencies share a block, planes of frequency zero count as still lanes. A plane that
        turns backwards is the same plane with its lanes exchanged, turning forwards.
    compact
        Only the isometries among them: U(1) for a plane, U(m) for m equal ones, O(k) for k still lanes.
    """

    planes: tuple[tuple[int, int], ...] = ()
    frequencies: tuple[Frequency, ...] = ()
    compact: bool = False

    def __post_init__(self) -> None:
        lanes = [lane for plane in self.planes for lane in plane]
        if len(lanes) != len(set(lanes)) or any(not 0 <= lane < self.n for lane in lanes):
            raise CosetError(f"rotary planes {self.planes} must use each of the {self.n} lanes at most once")
        if len(self.planes) != len(self.frequencies):
            raise CosetError(f"{len(self.planes)} rotary planes need as many frequencies, got {len(self.frequencies)}")
        if len({len(frequency) for frequency in self.frequencies}) > 1:
            raise CosetError(f"rotary frequencies must have one number for every coordinate of a position, got {self.frequencies}")

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks of lanes, the still lanes first, then one for every distinct frequency in order of first use."""
        turning: dict[Frequency, list[tuple[int, int]]] = {}
        for (a, b), frequency in zip(self.planes, self.frequencies, strict=True):
            leading = next((angle for angle in frequency if angle), 0.0)
            if leading > 0:
                turning.setdefault(frequency, []).append((a, b))
            elif leading < 0:
                turning.setdefault(tuple(-angle for angle in frequency), []).append((b, a))
        used = {lane for planes in turning.values() for plane in planes for lane in plane}
        still = tuple(lane for lane in range(self.n) if lane not in used)
        blocks = [Block(still, None)] if still else []
        return tuple(blocks + [Block(tuple(a for a, _ in planes), tuple(b for _, b in planes)) for planes in turning.values()])

    @property
    def name(self) -> str:
        sizes = [b.size for b in self.blocks if b.imaginary is not None]
        single, circle = sizes.count(1), "U(1)" if self.compact else "C^×"
        parts = [power(circle, single)] if single else []
        parts += [f"U({m})" if self.compact else f"GL({m}, C)" for m in sizes if m > 1]
        parts += [f"{'O' if self.compact else 'GL'}({b.size})" for b in self.blocks if b.imaginary is None]
        return " × ".join(parts)

    @property
    def dimension(self) -> int:
        if self.compact:
            return sum(b.size * (b.size - 1) // 2 if b.imaginary is None else b.size**2 for b in self.blocks)
        return sum(b.size**2 * (1 if b.imaginary is None else 2) for b in self.blocks)

    def embed(self, block: Block, value: Tensor) -> Tensor:
        """The n×n matrix [*batch, n, n] that is `value` [*batch, m, m] (complex for a turning block) on one block and zero elsewhere."""
        real = value.real if value.is_complex() else value
        out = torch.zeros(*value.shape[:-2], self.n, self.n, dtype=real.dtype, device=value.device)
        re = torch.tensor(block.real, device=value.device)
        if block.imaginary is None:
            out[..., re[:, None], re] = real
            return out
        im = torch.tensor(block.imaginary, device=value.device)
        out[..., re[:, None], re] = value.real
        out[..., im[:, None], im] = value.real
        out[..., re[:, None], im] = value.imag
        out[..., im[:, None], re] = -value.imag
        return out

    def extract(self, block: Block, matrix: Tensor) -> Tensor:
        """The block's part [*batch, m, m] of n×n matrices: the orthogonal projection onto what commutes with the rotations, as a complex matrix."""
        re = torch.tensor(block.real, device=matrix.device)
        if block.imaginary is None:
            return matrix[..., re[:, None], re]
        im = torch.tensor(block.imaginary, device=matrix.device)
        real = (matrix[..., re[:, None], re] + matrix[..., im[:, None], im]) / 2
        imag = (matrix[..., re[:, None], im] - matrix[..., im[:, None], re]) / 2
        return torch.complex(real, imag)

    @cached_property
    def _entries(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Row and column of every entry (real, real) and of its partner (imaginary, imaginary), over all turning blocks."""
        columns: tuple[list[int], ...] = ([], [], [], [])
        for block in self.blocks:
            for i, j in itertools.product(range(block.size), repeat=2) if block.imaginary is not None else ():
                imaginary = block.imaginary or ()
                for column, lane in zip(columns, (block.real[i], block.real[j], imaginary[i], imaginary[j]), strict=True):
                    column.append(lane)
        re_i, re_j, im_i, im_j = (torch.tensor(column, dtype=torch.int64) for column in columns)
        return re_i, re_j, im_i, im_j

    def project(self, matrix: Tensor) -> Tensor:
        """Orthogonal projection of matrices [*batch, n, n] onto the algebra that commutes with the rotations."""
        out = torch.zeros_like(matrix)
        re_i, re_j, im_i, im_j = (index.to(matrix.device) for index in self._entries)
        real = (matrix[..., re_i, re_j] + matrix[..., im_i, im_j]) / 2
        imaginary = (matrix[..., re_i, im_j] - matrix[..., im_i, re_j]) / 2
        out[..., re_i, re_j], out[..., im_i, im_j] = real, real
        out[..., re_i, im_j], out[..., im_i, re_j] = imaginary, -imaginary
        for block in self.blocks:
            if block.imaginary is None:
                lanes = torch.tensor(block.real, device=matrix.device)
                out[..., lanes[:, None], lanes] = matrix[..., lanes[:, None], lanes]
        return out

    def random(self, generator: torch.Generator, batch: tuple[int, ...] = (), *, dtype: torch.dtype = torch.float64) -> Tensor:
        out = torch.zeros(*batch, self.n, self.n, dtype=torch.float64)
        for block in self.blocks:
            factors = [self._isometry(block, generator, batch)]
            if not self.compact:
                scale = log_uniform(generator, (*batch, block.size), torch.float64)
                factors.append(torch.diag_embed(scale).to(factors[0].dtype))
                factors.append(self._isometry(block, generator, batch))
            value = factors[0]
            for factor in factors[1:]:
                value = value @ factor
            out = out + self.embed(block, value)
        return out.to(dtype)

    @staticmethod
    def _isometry(block: Block, generator: torch.Generator, batch: tuple[int, ...]) -> Tensor:
        if block.imaginary is None:
            return random_orthogonal(generator, block.size, batch)
        gaussian = torch.randn(*batch, block.size, block.size, 2, generator=generator, dtype=torch.float64)
        return polar(torch.view_as_complex(gaussian))

    def belongs(self, g: Any, tolerance: float | None = None) -> bool:
        if not is_tensor(g, (self.n, self.n)):
            return False
        tol = default_tolerance(g.dtype) if tolerance is None else tolerance
        size = torch.linalg.matrix_norm(g)
        if not bool((torch.linalg.matrix_norm(g - self.project(g)) <= tol * size).all()):
            return False
        if self.compact:
            return bool(((g @ g.mT - torch.eye(self.n, dtype=g.dtype, device=g.device)).abs() <= tol).all())
        return bool((torch.linalg.matrix_rank(g) == self.n).all())

    def tangent(self, direction: Tensor) -> Tensor:
        inside = self.project(direction)
        return (inside - inside.mT) / 2 if self.compact else inside

    def best(self, inner: Tensor) -> Tensor:
        r"""The isometry g of the group that maximises ``⟨B g, A⟩`` given ``inner = BᵀA`` [*batch, n, n]. Exact: a polar factor per block."""
        return sum((self.embed(b, polar(self.extract(b, inner))) for b in self.blocks), torch.zeros_like(inner))


def PlanePhases(n: int, planes: tuple[tuple[int, int], ...], frequencies: tuple[Frequency, ...]) -> RotaryCommutant:
    """The unitary plane phases: the isometries among the rotary commutant, U(1) for every plane of its own frequency."""
    return RotaryCommutant(n, planes, frequencies, compact=True)
