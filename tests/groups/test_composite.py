import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coset.groups import (
    Element,
    GeneralLinear,
    Group,
    Monomial,
    Permutation,
    Product,
    RotaryCommutant,
    Scaling,
    Wreath,
    WreathElement,
    finite_order,
    heads,
)
from groups.laws import SEEDS, GroupLaws, generator

ROTARY = RotaryCommutant(10, tuple((j, j + 3) for j in range(3)), tuple((0.5**j,) for j in range(3)))


def points(group: Any, batch: tuple[int, ...], draw: torch.Generator, dtype: torch.dtype) -> Any:
    """What a nested group acts on: a dict for a product, one more axis for a wreath product."""
    if isinstance(group, Product):
        return {key: points(factor, batch, draw, dtype) for key, factor in group.factors.items()}
    if isinstance(group, Wreath):
        return points(group.inner, (*batch, group.copies), draw, dtype)
    return torch.randn(*batch, 2, group.n, generator=draw, dtype=torch.float64).to(dtype)


class CompositeLaws(GroupLaws):
    def points(self, group: Any, batch: tuple[int, ...], draw: torch.Generator, dtype: torch.dtype) -> Any:
        return points(group, batch, draw, dtype)


class TestProduct(CompositeLaws):
    def groups(self) -> st.SearchStrategy[Product]:
        factors = st.sampled_from([Permutation(4), Monomial(3, "nonzero"), Scaling(2, "positive"), Permutation(3, (0, 0, 1))])
        nested = factors | st.builds(lambda a, b: Product({"a": a, "a.b": b}), factors, factors) | st.builds(Wreath, factors, st.just(2))
        return st.dictionaries(st.sampled_from(["stream", "layers.1.heads", "layers.10.heads"]), nested, min_size=1).map(Product)

    def outsiders(self, group: Product, dtype: torch.dtype) -> Iterator[Element]:
        one = group.identity(dtype=dtype)
        yield one | {"more": torch.ones(1)}
        yield dict(list(one.items())[1:])
        yield tuple(one.values())

    def test_names(self) -> None:
        assert Product({"a": ROTARY, "b": GeneralLinear(16)}).name == "(C^×)^3 × GL(4) × GL(16)"
        assert Product({"a": Permutation(1), "b": GeneralLinear(2)}).name == "GL(2)"
        assert Product({"a": Monomial(3, "positive"), "b": GeneralLinear(2)}).name == "(S_3 ⋉ (R_{>0})^3) × GL(2)"
        assert Product({}).name == "1"

    def test_dimensions_add(self) -> None:
        assert Product({"a": ROTARY, "b": GeneralLinear(5), "c": Permutation(9)}).dimension == 22 + 25


class TestProductOfMatrices(CompositeLaws):
    orders_only = False

    def groups(self) -> st.SearchStrategy[Product]:
        return st.just(Product({"qk": ROTARY, "vo": GeneralLinear(3)}))


class TestWreath(CompositeLaws):
    def groups(self) -> st.SearchStrategy[Wreath]:
        inner: st.SearchStrategy[Group] = st.sampled_from([Permutation(3), Monomial(2, "positive"), Scaling(3, "sign")])
        deeper = inner | st.builds(Wreath, inner, st.integers(1, 3))
        free = st.builds(Wreath, deeper, st.integers(1, 4))
        classed = st.lists(st.integers(0, 1), min_size=1, max_size=4).flatmap(
            lambda classes: st.builds(Wreath, inner, st.just(len(classes)), st.just(tuple(classes)))
        )
        return free | classed

    def outsiders(self, group: Wreath, dtype: torch.dtype) -> Iterator[Element]:
        one = group.identity((2,), dtype=dtype)
        yield WreathElement(one.order[0], one.inner)
        yield WreathElement(one.order, group.inner.identity((2, group.copies + 1), dtype=dtype))
        yield WreathElement(one.order, group.inner.identity((2, group.copies, 2), dtype=dtype))
        yield (one.order, one.inner)
        if group.classes is not None and len(set(group.classes)) > 1:
            other = group.classes.index(next(c for c in group.classes if c != group.classes[0]))
            order = torch.arange(group.copies)
            order[[0, other]] = order[[other, 0]]
            yield WreathElement(order.expand(2, -1), one.inner)

    @given(SEEDS)
    def test_copy_i_receives_copy_order_i(self, seed: int) -> None:
        group = Wreath(GeneralLinear(3), 5)
        g = group.random(generator(seed))
        x = torch.randn(5, 2, 3, generator=generator(seed), dtype=torch.float64)
        moved = group.act(g, x)
        for i in range(5):
            torch.testing.assert_close(moved[i], x[int(g.order[i])] @ g.inner[i])

    def test_names(self) -> None:
        assert Wreath(GeneralLinear(3), 5).name == "S_5 ⋉ GL(3)^5"
        assert Wreath(Monomial(7, "nonzero"), 3).name == "S_3 ⋉ (S_7 ⋉ (R^×)^7)^3"
        assert Wreath(GeneralLinear(3), 3, (0, 1, 2)).name == "GL(3)^3"
        assert Wreath(GeneralLinear(3), 1).name == "GL(3)"
        assert Wreath(Permutation(1), 4).name == "S_4"
        assert Wreath(Permutation(1), 1).name == "1"


@st.composite
def head_groups(draw: st.DrawFn) -> Wreath:
    """6 query heads on 3 KV heads and the like, pinned or not, query-key and value widths apart."""
    kv, group = draw(st.sampled_from([(3, 2), (1, 5), (4, 1), (2, 3)]))
    qk: Group = draw(st.sampled_from([ROTARY, GeneralLinear(3), Scaling(4, "sign", ((0, 2), (1, 3)))]))
    pinned = draw(st.booleans())
    return heads(
        kv, group, qk, GeneralLinear(5), classes=tuple(range(kv)) if pinned else None, query_classes=tuple(range(group)) if pinned else None
    )


class TestHeads(CompositeLaws):
    orders_only = False

    def groups(self) -> st.SearchStrategy[Wreath]:
        return head_groups()

    def outsiders(self, group: Wreath, dtype: torch.dtype) -> Iterator[Element]:
        one = group.identity(dtype=dtype)
        # One query order for all query heads alike has no place here: queries belong to their KV head.
        yield WreathElement(one.order, one.inner | {"query": one.inner["query"].flatten()})
        yield WreathElement(one.order, {key: value for key, value in one.inner.items() if key != "vo"})

    @pytest.mark.parametrize(
        ("group", "name", "dimension", "order"),
        [
            (
                heads(
                    4, 1, RotaryCommutant(16, tuple((j, j + 8) for j in range(8)), tuple((0.5**j,) for j in range(8))), GeneralLinear(16)
                ),
                "S_4 ⋉ ((C^×)^8 × GL(16))^4",
                4 * (16 + 256),
                24,
            ),
            (heads(3, 2, GeneralLinear(10), GeneralLinear(7)), "S_3 ⋉ (S_2 × GL(10) × GL(7))^3", 3 * 149, 6 * 8),
            (heads(1, 5, GeneralLinear(3), GeneralLinear(2)), "S_5 × GL(3) × GL(2)", 13, 120),
            (heads(3, 1, GeneralLinear(3), GeneralLinear(2), classes=(0, 1, 2)), "(GL(3) × GL(2))^3", 39, 1),
            (heads(4, 1, GeneralLinear(3), GeneralLinear(2), classes=(0, 1, 0, 1)), "S_2 × S_2 ⋉ (GL(3) × GL(2))^4", 52, 4),
            (heads(2, 3, GeneralLinear(1), GeneralLinear(1), query_classes=(0, 0, 1)), "S_2 ⋉ (S_2 × GL(1) × GL(1))^2", 4, 2 * 4),
        ],
    )
    def test_names_dimensions_and_orders(self, group: Wreath, name: str, dimension: int, order: int) -> None:
        assert group.name == name
        assert group.dimension == dimension
        assert finite_order(group) == order

    def test_every_arrangement_of_the_heads_is_reached(self) -> None:
        group = heads(2, 3, GeneralLinear(1), GeneralLinear(1))
        g = group.random(generator(0), (2000,))
        seen = {(tuple(o.tolist()), tuple(q.flatten().tolist())) for o, q in zip(g.order, g.inner["query"], strict=True)}
        assert len(seen) == finite_order(group) == 2 * math.factorial(3) ** 2
