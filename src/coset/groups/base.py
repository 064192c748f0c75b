"""What every group offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Element = Any
"""A tensor, a :class:`~coset.groups.monomial.MonomialElement`, a wreath element, or a dict of elements: whatever its group says."""

CONDITION = 4.0
"""Condition number of the random matrices and scales that :meth:`Group.random` draws."""


def default_tolerance(dtype: torch.dtype) -> float:
    """How far from its group an element of this dtype may be: 1e-9 in float64, 1e-3 below."""
    return 1e-9 if dtype == torch.float64 else 1e-3


@dataclass(frozen=True)
class Group(ABC):
    """A group with its action on row vectors ``x`` [..., n] from the right.

    Elements carry leading batch dimensions, written ``[*batch, ...]`` throughout; the group itself holds only sizes. The action is a
    *right* action: ``act(compose(g, h), x) = act(h, act(g, x))``, so that for matrices composing is the product ``g @ h``.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Readable name, such as ``GL(16)`` or ``S_4 ⋉ ((C^×)^8 × GL(16))^4``."""

    @property
    @abstractmethod
    def dimension(self) -> int:
        """Dimension as a real manifold; 0 for a finite group."""

    @abstractmethod
    def identity(self, batch: tuple[int, ...] = (), *, dtype: torch.dtype = torch.float64) -> Element:
        """The element that moves nothing, repeated over `batch`."""

    @abstractmethod
    def random(self, generator: torch.Generator, batch: tuple[int, ...] = (), *, dtype: torch.dtype = torch.float64) -> Element:
        """A random element, well conditioned (condition number at most :data:`CONDITION`); the same generator state gives the same bytes."""

    @abstractmethod
    def compose(self, first: Element, second: Element) -> Element:
        """The element that does `first`, then `second`."""

    @abstractmethod
    def inverse(self, g: Element) -> Element:
        """The element that undoes `g`."""

    @abstractmethod
    def belongs(self, g: Element, tolerance: float | None = None) -> bool:
        """Whether `g` (every one of its batch) is an element, to `tolerance` relative to its size; wrong types and shapes are not.

        Default tolerance: 1e-9 in float64, 1e-3 in float32.
        """

    @abstractmethod
    def act(self, g: Element, x: Any, variance: int = 1) -> Any:
        """Apply `g` to `x` [*batch, ..., n].

        Parameters
        ----------
        variance
            1: ``x g``; -1: the dual action ``x g^{-T}``; 0: only the reordering that g contains, neither scaled nor mixed.

        Raises
        ------
        CosetError
            If `variance` is 0 and g mixes lanes, so that "order only" has no meaning.
        """

    @abstractmethod
    def tangent(self, direction: Element) -> Element:
        """Orthogonal projection of a direction at the identity onto the Lie algebra.

        Parameters
        ----------
        direction
            Numbers in the places of an element's numbers (a gradient with respect to an element, say); the orders in it are the identity.
            Where the group has no freedom the result is zero.
        """

    @abstractmethod
    def exponential(self, tangent: Element) -> Element:
        """The element exp(X) at the end of a direction X of the Lie algebra (as :meth:`tangent` returns it)."""

    @abstractmethod
    def leaves(self, g: Element) -> dict[str, Tensor]:
        """The tensors that make up `g`, by name, for saving."""

    @abstractmethod
    def build(self, leaves: Mapping[str, Tensor]) -> Element:
        """Inverse of :meth:`leaves`. Does not check membership: call :meth:`belongs`."""


def power(name: str, copies: int) -> str:
    """``name^copies``, bracketed where needed."""
    if copies == 1:
        return name
    return f"({name})^{copies}" if " " in name or "^" in name else f"{name}^{copies}"


def log_uniform(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Positive numbers whose ratios stay within :data:`CONDITION`, uniform in the logarithm around 1."""
    u = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
    return torch.pow(torch.tensor(CONDITION, dtype=torch.float64), u).to(dtype)


def random_signs(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Independent fair signs, +1 or -1."""
    return (2 * torch.randint(0, 2, shape, generator=generator) - 1).to(dtype)


def is_tensor(g: Any, tail: tuple[int, ...]) -> bool:
    """Whether `g` is a finite floating tensor [*batch, *tail]."""
    return (
        isinstance(g, Tensor)
        and g.is_floating_point()
        and g.ndim >= len(tail)
        and tuple(g.shape[g.ndim - len(tail) :]) == tail
        and bool(torch.isfinite(g).all())
    )
