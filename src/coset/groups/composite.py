"""Direct products and wreath products of groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coset.groups.base import Element, Group, power
from coset.groups.monomial import Permutation, inverse_order


def map_leaves(function: Any, g: Element) -> Element:
    """Apply `function` to every tensor of an element, keeping its structure."""
    if isinstance(g, Tensor):
        return function(g)
    if isinstance(g, Mapping):
        return {key: map_leaves(function, value) for key, value in g.items()}
    return type(g)(*(map_leaves(function, value) for value in g))


@dataclass(frozen=True)
class Product(Group):
    """Direct product of named groups; elements are dicts with the same keys, and so is what they act on."""

    factors: Mapping[str, Group]

    @property
    def name(self) -> str:
        # A semidirect factor binds less tightly than the product, so it needs brackets of its own.
        names = [f.name for f in self.factors.values() if f.name != "1"]
        return " × ".join(f"({n})" if "⋉" in n and len(names) > 1 else n for n in names) or "1"

    @property
    def dimension(self) -> int:
        return sum(f.dimension for f in self.factors.values())

    def identity(self, batch: tuple[int, ...] = (), *, dtype: torch.dtype = torch.float64) -> dict[str, Element]:
        return {key: f.identity(batch, dtype=dtype) for key, f in self.factors.items()}

    def random(self, generator: torch.Generator, batch: tuple[int, ...] = (), *, dtype: torch.dtype = torch.float64) -> dict[str, Element]:
        return {key: f.random(generator, batch, dtype=dtype) for key, f in self.factors.items()}

    def compose(self, first: dict[str, Element], second: dict[str, Element]) -> dict[str, Element]:
        return {key: f.compose(first[key], second[key]) for key, f in self.factors.items()}

    def inverse(self, g: dict[str, Element]) -> dict[str, Element]:
        return {key: f.inverse(g[key]) for key, f in self.factors.items()}

    def belongs(self, g: Any, tolerance: float | None = None) -> bool:
        return (
            isinstance(g, dict) and g.keys() == self.factors.keys() and all(f.belongs(g[key], tolerance) for key, f in self.factors.items())
        )

    def act(self, g: dict[str, Element], x: Mapping[str, Any], variance: int = 1) -> dict[str, Any]:
        return {key: f.act(g[key], x[key], variance) for key, f in self.factors.items()}

    def tangent(self, direction: dict[str, Element]) -> dict[str, Element]:
        return {key: f.tangent(direction[key]) for key, f in self.factors.items()}

    def exponential(self, tangent: dict[str, Element]) -> dict[str, Element]:
        return {key: f.exponential(tangent[key]) for key, f in self.factors.items()}

    def leaves(self, g: dict[str, Element]) -> dict[str, Tensor]:
        return {f"{key}.{name}" if name else key: leaf for key, f in self.factors.items() for name, leaf in f.leaves(g[key]).items()}

    def build(self, leaves: Mapping[str, Tensor]) -> dict[str, Element]:
        out = {}
        for key, f in self.factors.items():
            own = {name[len(key) + 1 :]: leaf for name, leaf in leaves.items() if name == key or name.startswith(f"{key}.")}
            out[key] = f.build(own)
        return out


class WreathElement(NamedTuple):
    """Copy i of the result is copy ``order[i]`` of the input, acted on by the i-th of the `inner` elements.

    `order` is [*batch, copies]; `inner` is an element of the inner group with batch [*batch, copies].
    """

    order: Tensor
    inner: Element


@dataclass(frozen=True)
class Wreath(Group):
    """``inner ≀ S_copies = S_copies ⋉ inner^copies``: act on every copy, and permute the copies (within `classes`).

    Multi-head attention is the wreath product of what one KV head allows: permuting its query heads, and a change of basis of its
    queries and keys and of its values. Batches must be unbatched or match ``[*batch, copies]``.
    """

    inner: Group
    copies: int
    classes: tuple[int, ...] | None = None

    @property
    def top(self) -> Permutation:
        """The permutations of the copies."""
        return Permutation(self.copies, self.classes)

    @property
    def name(self) -> str:
        parts = [n for n in (self.top.name, power(self.inner.name, self.copies)) if n not in ("1", f"1^{self.copies}")]
        return " ⋉ ".join(parts) or "1"

    @property
    def dimension(self) -> int:
        return self.copies * self.inner.dimension

    def identity(self, batch: tuple[int, ...] = (), *, dtype: torch.dtype = torch.float64) -> WreathElement:
        return WreathElement(self.top.identity(batch), self.inner.identity((*batch, self.copies), dtype=dtype))

    def random(self, generator: torch.Generator, batch: tuple[int, ...] = (), *, dtype: torch.dtype = torch.float64) -> WreathElement:
        return WreathElement(self.top.random(generator, batch), self.inner.random(generator, (*batch, self.copies), dtype=dtype))

    @staticmethod
    def reorder(inner: Any, order: Tensor) -> Any:
        """Move copy ``order[i]`` to place i in every tensor [*batch, copies, ...] of `inner`."""

        def move(leaf: Tensor) -> Tensor:
            index = order.reshape(*order.shape, *(1,) * (leaf.ndim - order.ndim))
            return torch.gather(leaf, order.ndim - 1, index.expand(*order.shape, *leaf.shape[order.ndim :]))

        return map_leaves(move, inner)

    def compose(self, first: WreathElement, second: WreathElement) -> WreathElement:
        inner = self.inner.compose(self.reorder(first.inner, second.order), second.inner)
        return WreathElement(self.top.compose(first.order, second.order), inner)

    def inverse(self, g: WreathElement) -> WreathElement:
        back = inverse_order(g.order)
        return WreathElement(back, self.reorder(self.inner.inverse(g.inner), back))

    def belongs(self, g: Any, tolerance: float | None = None) -> bool:
        if not isinstance(g, WreathElement) or not self.top.belongs(g.order) or not self.inner.belongs(g.inner, tolerance):
            return False
        expected = self.inner.leaves(self.inner.identity(tuple(g.order.shape)))
        return all(leaf.shape == expected[name].shape for name, leaf in self.inner.leaves(g.inner).items())

    def act(self, g: WreathElement, x: Any, variance: int = 1) -> Any:
        return self.inner.act(g.inner, self.reorder(x, g.order), variance)

    def tangent(self, direction: WreathElement) -> WreathElement:
        return WreathElement(direction.order, self.inner.tangent(direction.inner))

    def exponential(self, tangent: WreathElement) -> WreathElement:
        return WreathElement(tangent.order, self.inner.exponential(tangent.inner))

    def leaves(self, g: WreathElement) -> dict[str, Tensor]:
        return {"order": g.order} | {f"inner.{name}" if name else "inner": leaf for name, leaf in self.inner.leaves(g.inner).items()}

    def build(self, leaves: Mapping[str, Tensor]) -> WreathElement:
        own = {
            name[len("inner") :].removeprefix("."): leaf for name, leaf in leaves.items() if name == "inner" or name.startswith("inner.")
        }
        return WreathElement(leaves["order"], self.inner.build(own))


def heads(
    kv_heads: int, group: int, qk: Group, vo: Group, *, classes: tuple[int, ...] | None = None, query_classes: tuple[int, ...] | None = None
) -> Wreath:
    """What permutes and re-bases attention heads: ``(S_group × qk × vo) ≀ S_kv_heads``.

    Whole KV heads are permuted together with the `group` query heads each serves; query heads only inside their KV head.
    Elements: ``WreathElement(order [kv], {"query": [kv, group], "qk": ..., "vo": ...})``.
    """
    return Wreath(Product({"query": Permutation(group, query_classes), "qk": qk, "vo": vo}), kv_heads, classes)


def finite_order(group: Group) -> int:
    """Number of permutations in the head group: ``kv! * (group!)^kv`` where nothing is pinned."""
    if isinstance(group, Permutation):
        return math.prod(math.factorial(s) for s in group.sizes)
    if isinstance(group, Product):
        return math.prod(finite_order(f) for f in group.factors.values())
    if isinstance(group, Wreath):
        return finite_order(group.top) * finite_order(group.inner) ** group.copies
    return 1
