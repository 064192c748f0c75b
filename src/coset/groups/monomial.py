"""Permutations, with or without a scale on every lane, and scalings without a permutation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from coset.errors import CosetError
from coset.groups.base import Group, default_tolerance, is_tensor, log_uniform, random_signs

Scales = Literal["global sign", "sign", "positive", "nonzero"]

_FACTOR: dict[str, str] = {"sign": "{±1}", "positive": "R_{>0}", "nonzero": "R^×"}


class MonomialElement(NamedTuple):
    """Lane i of the result is lane ``order[i]`` of the input times ``scale[i]``; both are [*batch, n]."""

    order: Tensor
    scale: Tensor


def assignment(score: Tensor) -> Tensor:
    r"""Permutations p that maximise ``Σ_i score[..., i, p_i]``.

    Parameters
    ----------
    score : Tensor [*batch, n, n]

    Returns
    -------
    Tensor [*batch, n], int64. Exact (Jonker-Volgenant, `scipy.optimize.linear_sum_assignment`).
    """
    flat = score.detach().to("cpu", torch.float64).reshape(-1, *score.shape[-2:]).numpy()
    solved = np.stack([linear_sum_assignment(s, maximize=True)[1] for s in flat]) if len(flat) else np.zeros((0, score.shape[-1]))
    return torch.from_numpy(solved.astype(np.int64)).reshape(score.shape[:-1]).to(score.device)


def inverse_order(order: Tensor) -> Tensor:
    """Inverse permutations, [*batch, n]."""
    return torch.argsort(order, dim=-1)


def random_order(generator: torch.Generator, n: int, batch: tuple[int, ...], classes: tuple[int, ...] | None = None) -> Tensor:
    """Uniform random permutations [*batch, n] that keep every lane inside its class."""
    keys = torch.rand((*batch, n), generator=generator, dtype=torch.float64)
    if classes is None:
        return torch.argsort(keys, dim=-1)
    labels = torch.tensor(classes)
    # Two sorts by (class, key): slots of one class receive that class's lanes in random order.
    lanes = torch.argsort(labels + keys, dim=-1)
    slots = torch.argsort(labels, stable=True)
    order = torch.empty_like(lanes)
    order[..., slots] = lanes
    return order


def is_order(order: Any, n: int, classes: tuple[int, ...] | None = None) -> bool:
    """Whether `order` [*batch, n] holds permutations (that keep classes)."""
    if not isinstance(order, Tensor) or order.dtype != torch.int64 or order.ndim == 0 or order.shape[-1] != n:
        return False
    if not bool((order.sort(dim=-1).values == torch.arange(n, device=order.device)).all()):
        return False
    return classes is None or bool((torch.tensor(classes, device=order.device)[order] == torch.tensor(classes, device=order.device)).all())


def reorder(x: Tensor, order: Tensor, axis: int = -1) -> Tensor:
    """Move slice ``order[i]`` of an axis to place i, for order [n]. The result keeps the memory order of x: to transpose large tensors costs more."""
    axis %= x.ndim
    layout = sorted(range(x.ndim), key=x.stride().__getitem__, reverse=True)
    moved = torch.index_select(x.permute(layout), layout.index(axis), order)
    return moved.permute(sorted(range(x.ndim), key=layout.__getitem__))


def take(x: Tensor, order: Tensor) -> Tensor:
    """Reorder the last axis of x [*batch, ..., n] by order [*batch, n]."""
    if order.ndim == 1:
        return reorder(x, order)
    index = order.reshape(*order.shape[:-1], *(1,) * (x.ndim - order.ndim), order.shape[-1])
    return torch.gather(x, -1, index.expand(x.shape))


@dataclass(frozen=True)
class Permutation(Group):
    """S_n; with `classes` the permutations that keep every lane inside its class (heads with fixed ALiBi slopes).

    Elements are index tensors [*batch, n]: lane i of the result is lane ``g[i]`` of the input.
    """

    n: int
    classes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.classes is not None and len(self.classes) != self.n:
            raise CosetError(f"a permutation of {self.n} lanes needs as many classes, got {len(self.classes)}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the classes."""
        if self.classes is None:
            return (self.n,)
        return tuple(sorted((self.classes.count(c) for c in set(self.classes)), reverse=True))

    @property
    def name(self) -> str:
        return " × ".join(f"S_{s}" for s in self.sizes if s > 1) or "1"

    @property
    def dimension(self) -> int:
        return 0

    def identity(self, batch: tuple[int, ...] = (), *, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.arange(self.n).expand(*batch, self.n).clone()

    def random(self, generator: torch.Generator, batch: tuple[int, ...] = (), *, dtype: torch.dtype = torch.float64) -> Tensor:
        return random_order(generator, self.n, batch, self.classes)

    def compose(self, first: Tensor, second: Tensor) -> Tensor:
        return take(first, second)

    def inverse(self, g: Tensor) -> Tensor:
        return inverse_order(g)

    def belongs(self, g: Any, tolerance: float | None = None) -> bool:
        return is_order(g, self.n, self.classes)

    def act(self, g: Tensor, x: Tensor, variance: int = 1) -> Tensor:
        return take(x, g)

    def best(self, inner: Tensor) -> Tensor:
        """The permutation that maximises ``Σ_i inner[order_i, i]`` and keeps the classes. Exact."""
        score = inner.mT
        if self.classes is not None:
            labels = torch.tensor(self.classes, device=score.device)
            allowed = labels[:, None] == labels[None, :]
            score = score.masked_fill(~allowed, -1 - 2 * self.n * float(score.abs().max()))
        return assignment(score)

    def tangent(self, direction: Tensor) -> Tensor:
        return direction

    def exponential(self, tangent: Tensor) -> Tensor:
        return tangent

    def leaves(self, g: Tensor) -> dict[str, Tensor]:
        return {"": g}

    def build(self, leaves: Mapping[str, Tensor]) -> Tensor:
        return leaves[""]


@dataclass(frozen=True)
class Monomial(Group):
    """Permutations of n lanes with a scale on each: ``S_n ⋉ F^n`` for F = {±1}, R_{>0} or R^×.

    `scales`: ``global sign`` (one sign for all lanes), ``sign``, ``positive`` or ``nonzero``.
    """

    n: int
    scales: Scales

    @property
    def name(self) -> str:
        if self.scales == "global sign":
            return f"S_{self.n} × {{±1}}"
        return f"S_{self.n} ⋉ ({_FACTOR[self.scales]})^{self.n}"

    @property
    def dimension(self) -> int:
        return self.n if self.scales in ("positive", "nonzero") else 0

    def identity(self, batch: tuple[int, ...] = (), *, dtype: torch.dtype = torch.float64) -> MonomialElement:
        return MonomialElement(torch.arange(self.n).expand(*batch, self.n).clone(), torch.ones(*batch, self.n, dtype=dtype))

    def random(self, generator: torch.Generator, batch: tuple[int, ...] = (), *, dtype: torch.dtype = torch.float64) -> MonomialElement:
        scale = torch.ones(*batch, self.n, dtype=dtype)
        if self.scales in ("positive", "nonzero"):
            scale = log_uniform(generator, (*batch, self.n), dtype)
        if self.scales in ("sign", "nonzero"):
            scale = scale * random_signs(generator, (*batch, self.n), dtype)
        elif self.scales == "global sign":
            scale = scale * random_signs(generator, (*batch, 1), dtype)
        return MonomialElement(random_order(generator, self.n, batch), scale)

    def compose(self, first: MonomialElement, second: MonomialElement) -> MonomialElement:
        return MonomialElement(take(first.order, second.order), take(first.scale, second.order) * second.scale)

    def inverse(self, g: MonomialElement) -> MonomialElement:
        back = inverse_order(g.order)
        return MonomialElement(back, 1 / take(g.scale, back))

    def belongs(self, g: Any, tolerance: float | None = None) -> bool:
        if not isinstance(g, MonomialElement) or not is_order(g.order, self.n) or not is_tensor(g.scale, (self.n,)):
            return False
        s = g.scale
        tol = default_tolerance(s.dtype) if tolerance is None else tolerance
        if s.shape != g.order.shape:
            return False
        if self.scales == "nonzero":
            return bool((s != 0).all())
        if self.scales == "positive":
            return bool((s > 0).all())
        if not bool(((s.abs() - 1).abs() <= tol).all()):
            return False
        return self.scales == "sign" or bool((s.sign() == s[..., :1].sign()).all())

    def act(self, g: MonomialElement, x: Tensor, variance: int = 1) -> Tensor:
        moved = take(x, g.order)
        if variance == 0:
            return moved
        scale = g.scale.reshape(*g.scale.shape[:-1], *(1,) * (x.ndim - g.scale.ndim), self.n).to(x.dtype)
        # `take` has made a copy: scaled in place, for a second one of a large tensor costs as much as the product.
        return moved.mul_(scale) if variance > 0 else moved.div_(scale)

    def best(self, inner: Tensor) -> MonomialElement:
        r"""The element g of a compact group (no free scales) that maximises ``⟨B g, A⟩`` given ``inner = BᵀA`` [*batch, n, n].

        Exact: an assignment on the inner products, on their magnitudes where every lane has a sign of its own.
        """
        score = inner.mT  # score[i, j]: what lane i gains from receiving lane j
        if self.scales == "sign":
            order = assignment(score.abs())
            sign = torch.gather(score, -1, order[..., None])[..., 0].sign()
            return MonomialElement(order, torch.where(sign == 0, torch.ones_like(sign), sign))
        if self.scales != "global sign":
            raise TypeError(f"{self.name} has free scales: ⟨B g, A⟩ is unbounded over it")
        order, flipped = assignment(score), assignment(-score)
        ones = torch.ones_like(score[..., 0])
        gain = torch.gather(score, -1, order[..., None]).sum((-1, -2))
        gain_flipped = -torch.gather(score, -1, flipped[..., None]).sum((-1, -2))
        keep = (gain >= gain_flipped)[..., None]
        return MonomialElement(torch.where(keep, order, flipped), torch.where(keep, ones, -ones))

    def tangent(self, direction: MonomialElement) -> MonomialElement:
        return MonomialElement(direction.order, direction.scale if self.dimension else torch.zeros_like(direction.scale))

    def exponential(self, tangent: MonomialElement) -> MonomialElement:
        return MonomialElement(tangent.order, tangent.scale.exp())

    def leaves(self, g: MonomialElement) -> dict[str, Tensor]:
        return {"order": g.order, "scale": g.scale}

    def build(self, leaves: Mapping[str, Tensor]) -> MonomialElement:
        return MonomialElement(leaves["order"], leaves["scale"])


def SignedPermutation(n: int) -> Monomial:
    """S_n ⋉ {±1}^n, the hyperoctahedral group."""
    return Monomial(n, "sign")


@dataclass(frozen=True)
class Scaling(Group):
    """One scale for every block of lanes, and no reordering; elements are tensors [*batch, blocks].

    Blocks partition the n lanes (default: each lane is its own block). `scales`: ``sign``, ``positive`` or ``nonzero``.
    """

    n: int
    scales: Literal["sign", "positive", "nonzero"] = "nonzero"
    blocks: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.blocks is not None and sorted(lane for lanes in self.blocks for lane in lanes) != list(range(self.n)):
            raise CosetError(f"the blocks of a scaling must use each of the {self.n} lanes once, got {self.blocks}")

    @property
    def size(self) -> int:
        """Number of blocks."""
        return self.n if self.blocks is None else len(self.blocks)

    @cached_property
    def owner(self) -> Tensor:
        """Block of every lane, [n]."""
        if self.blocks is None:
            return torch.arange(self.n)
        owner = torch.empty(self.n, dtype=torch.int64)
        for b, lanes in enumerate(self.blocks):
            owner[list(lanes)] = b
        return owner

    @property
    def name(self) -> str:
        return f"({_FACTOR[self.scales]})^{self.size}"

    @property
    def dimension(self) -> int:
        return 0 if self.scales == "sign" else self.size

    def identity(self, batch: tuple[int, ...] = (), *, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.ones(*batch, self.size, dtype=dtype)

    def random(self, generator: torch.Generator, batch: tuple[int, ...] = (), *, dtype: torch.dtype = torch.float64) -> Tensor:
        shape = (*batch, self.size)
        scale = torch.ones(shape, dtype=dtype) if self.scales == "sign" else log_uniform(generator, shape, dtype)
        return scale if self.scales == "positive" else scale * random_signs(generator, shape, dtype)

    def compose(self, first: Tensor, second: Tensor) -> Tensor:
        return first * second

    def inverse(self, g: Tensor) -> Tensor:
        return 1 / g

    def belongs(self, g: Any, tolerance: float | None = None) -> bool:
        if not is_tensor(g, (self.size,)):
            return False
        if self.scales == "sign":
            return bool(((g.abs() - 1).abs() <= (default_tolerance(g.dtype) if tolerance is None else tolerance)).all())
        return bool((g > 0).all() if self.scales == "positive" else (g != 0).all())

    def act(self, g: Tensor, x: Tensor, variance: int = 1) -> Tensor:
        if variance == 0:
            return x
        scale = g[..., self.owner.to(g.device)].to(x.dtype)
        scale = scale.reshape(*scale.shape[:-1], *(1,) * (x.ndim - scale.ndim), self.n)
        return x * scale if variance > 0 else x / scale

    def best(self, inner: Tensor) -> Tensor:
        """The signs that maximise ``⟨B g, A⟩`` given ``inner = BᵀA`` [*batch, n, n]."""
        if self.scales != "sign":
            raise TypeError(f"{self.name} has free scales: ⟨B g, A⟩ is unbounded over it")
        diagonal = inner.diagonal(dim1=-2, dim2=-1)
        owner = self.owner.to(diagonal.device).expand(diagonal.shape)
        total = torch.zeros(*diagonal.shape[:-1], self.size, dtype=diagonal.dtype, device=diagonal.device).scatter_add(-1, owner, diagonal)
        return torch.where(total < 0, -torch.ones_like(total), torch.ones_like(total))

    def tangent(self, direction: Tensor) -> Tensor:
        return direction if self.dimension else torch.zeros_like(direction)

    def exponential(self, tangent: Tensor) -> Tensor:
        return tangent.exp()

    def leaves(self, g: Tensor) -> dict[str, Tensor]:
        return {"": g}

    def build(self, leaves: Mapping[str, Tensor]) -> Tensor:
        return leaves[""]
