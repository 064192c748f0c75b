"""The laws that every group must keep. Each concrete group inherits them and says which groups to try."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coset.groups import Element, Group, MatrixGroup
from coset.groups.base import CONDITION

BATCHES = st.sampled_from([(), (3,), (2, 3), (1,)])
SEEDS = st.integers(0, 2**31)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tensors(x: Any) -> Iterator[Tensor]:
    """Every tensor inside what a group acts on."""
    if isinstance(x, Tensor):
        yield x
    else:
        for value in x.values():
            yield from tensors(value)


def close(x: Any, y: Any, tolerance: float) -> None:
    for a, b in zip(tensors(x), tensors(y), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


class GroupLaws(ABC):
    """Axioms of a group and of its right action, membership, saving and drawing.

    Elements are compared leaf by leaf, points tensor by tensor.
    """

    orders_only = True
    """Whether variance 0 has a meaning: false for groups that mix lanes."""

    @abstractmethod
    def groups(self) -> st.SearchStrategy[Any]:
        """The groups on which to try the laws."""

    def points(self, group: Any, batch: tuple[int, ...], draw: torch.Generator, dtype: torch.dtype) -> Any:
        """What the group acts on, with one more leading dimension than the group needs."""
        return torch.randn(*batch, 5, group.n, generator=draw, dtype=torch.float64).to(dtype)

    def outsiders(self, group: Any, dtype: torch.dtype) -> Iterator[Element]:
        """Elements of some larger group, near this one or at least of the right shape."""
        yield from ()

    def draw(self, data: st.DataObject) -> tuple[Group, tuple[int, ...], torch.Generator]:
        return data.draw(self.groups()), data.draw(BATCHES), generator(data.draw(SEEDS))

    @staticmethod
    def same(group: Group, g: Element, h: Element, tolerance: float) -> None:
        left, right = group.leaves(g), group.leaves(h)
        assert left.keys() == right.keys()
        for name in left:
            assert left[name].dtype == right[name].dtype
            torch.testing.assert_close(left[name], right[name], rtol=tolerance, atol=tolerance)

    @given(data=st.data())
    def test_identity(self, data: st.DataObject, dtype: torch.dtype, tolerance: float) -> None:
        group, batch, draw = self.draw(data)
        one, g = group.identity(batch, dtype=dtype), group.random(draw, batch, dtype=dtype)
        assert group.belongs(one)
        self.same(group, group.compose(one, g), g, tolerance)
        self.same(group, group.compose(g, one), g, tolerance)

    def directions(self, group: Group, batch: tuple[int, ...], dtype: torch.dtype, fill: Any) -> Element:
        """A direction at the identity: numbers from ``fill(shape)``, orders as they are."""
        leaves = group.leaves(group.identity(batch, dtype=dtype))
        return group.build({name: fill(leaf.shape).to(dtype) if leaf.is_floating_point() else leaf for name, leaf in leaves.items()})

    @given(data=st.data())
    def test_exponential_of_a_tangent_is_an_element(self, data: st.DataObject, dtype: torch.dtype, tolerance: float) -> None:
        group, batch, draw = self.draw(data)
        direction = self.directions(group, batch, dtype, lambda shape: 0.3 * torch.randn(shape, generator=draw, dtype=torch.float64))
        tangent = group.tangent(direction)
        self.same(group, group.tangent(tangent), tangent, tolerance)
        g = group.exponential(tangent)
        assert group.belongs(g)
        leaves = group.leaves(tangent)
        back = group.build({name: -leaf if leaf.is_floating_point() else leaf for name, leaf in leaves.items()})
        self.same(group, group.compose(g, group.exponential(back)), group.identity(batch, dtype=dtype), 100 * tolerance)

    @given(data=st.data())
    def test_tangents_span_the_dimension(self, data: st.DataObject) -> None:
        group = data.draw(self.groups())
        leaves = group.leaves(group.identity())
        sizes = [leaf.numel() for leaf in leaves.values() if leaf.is_floating_point()]
        # Every basis direction at once, along a batch axis.
        basis = iter(torch.eye(sum(sizes), dtype=torch.float64).split(sizes, 1))
        direction = self.directions(group, (sum(sizes),), torch.float64, lambda shape: next(basis).reshape(shape))
        tangent = group.leaves(group.tangent(direction))
        flat = [leaf.flatten(1) for leaf in tangent.values() if leaf.is_floating_point()]
        rank = int(torch.linalg.matrix_rank(torch.cat(flat, 1), atol=1e-9, rtol=0.0)) if flat else 0
        assert rank == group.dimension

    @given(data=st.data())
    def test_inverse(self, data: st.DataObject, dtype: torch.dtype, tolerance: float) -> None:
        group, batch, draw = self.draw(data)
        g, one = group.random(draw, batch, dtype=dtype), group.identity(batch, dtype=dtype)
        back = group.inverse(g)
        assert group.belongs(back)
        self.same(group, group.compose(g, back), one, tolerance)
        self.same(group, group.compose(back, g), one, tolerance)

    @given(data=st.data())
    def test_closed_and_associative(self, data: st.DataObject, dtype: torch.dtype, tolerance: float) -> None:
        group, batch, draw = self.draw(data)
        g, h, k = (group.random(draw, batch, dtype=dtype) for _ in range(3))
        assert group.belongs(group.compose(g, h))
        self.same(group, group.compose(group.compose(g, h), k), group.compose(g, group.compose(h, k)), tolerance)

    @given(data=st.data(), variance=st.sampled_from([1, -1, 0]))
    def test_right_action(self, data: st.DataObject, variance: int, dtype: torch.dtype, tolerance: float) -> None:
        group, batch, draw = self.draw(data)
        if variance == 0 and not self.orders_only:
            return
        g, h, one = *(group.random(draw, batch, dtype=dtype) for _ in range(2)), group.identity(batch, dtype=dtype)
        x = self.points(group, batch, draw, dtype)
        close(group.act(one, x, variance), x, tolerance)
        close(group.act(group.compose(g, h), x, variance), group.act(h, group.act(g, x, variance), variance), tolerance)

    @given(data=st.data())
    def test_dual_action_keeps_the_pairing(self, data: st.DataObject, dtype: torch.dtype, tolerance: float) -> None:
        group, batch, draw = self.draw(data)
        g = group.random(draw, batch, dtype=dtype)
        x, y = (self.points(group, batch, draw, dtype) for _ in range(2))
        before = sum((a * b).sum() for a, b in zip(tensors(x), tensors(y), strict=True))
        after = sum((a * b).sum() for a, b in zip(tensors(group.act(g, x)), tensors(group.act(g, y, -1)), strict=True))
        # A sum of many signed terms: close on the scale of the terms, not of what is left of them.
        size = 1 + sum((a * b).abs().sum() for a, b in zip(tensors(x), tensors(y), strict=True))
        assert abs(after - before) <= tolerance * size

    @given(data=st.data())
    def test_acts_in_the_precision_of_the_points(self, data: st.DataObject) -> None:
        group, batch, draw = self.draw(data)
        g, x = group.random(draw, batch), self.points(group, batch, draw, torch.float64)
        for variance in (1, -1):
            exact = group.act(g, x, variance)
            single = group.act(g, group_map(x, torch.float32), variance)
            assert all(t.dtype == torch.float32 for t in tensors(single))
            close(group_map(single, torch.float64), exact, 1e-4)
            assert all(t.dtype == torch.bfloat16 for t in tensors(group.act(g, group_map(x, torch.bfloat16), variance)))

    @given(data=st.data())
    def test_variance_zero_reorders_without_scaling(self, data: st.DataObject, dtype: torch.dtype) -> None:
        group, batch, draw = self.draw(data)
        g, x = group.random(draw, batch, dtype=dtype), self.points(group, batch, draw, dtype)
        if not self.orders_only:
            with pytest.raises(ValueError, match="mixes lanes"):
                group.act(g, x, 0)
            return
        for moved, t in zip(tensors(group.act(g, x, 0)), tensors(x), strict=True):
            assert torch.equal(moved.flatten().sort().values, t.flatten().sort().values)

    @given(data=st.data())
    def test_random_is_seeded(self, data: st.DataObject, dtype: torch.dtype) -> None:
        group, batch = data.draw(self.groups()), data.draw(BATCHES)
        seed = data.draw(SEEDS)
        drawn = []
        for unrelated in (0, 1):
            torch.manual_seed(unrelated)
            drawn.append(group.leaves(group.random(generator(seed), batch, dtype=dtype)))
        assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])
        assert all(leaf.dtype in (dtype, torch.int64) for leaf in drawn[0].values())
        assert all(tuple(leaf.shape[: len(batch)]) == batch for leaf in drawn[0].values())

    @given(data=st.data())
    def test_random_varies(self, data: st.DataObject) -> None:
        group = data.draw(self.groups())
        drawn = [torch.cat([t.double().flatten() for t in group.leaves(group.random(generator(s), (30,))).values()]) for s in (0, 1)]
        if group.name != "1":
            assert not torch.equal(*drawn)

    @given(data=st.data())
    def test_leaves_round_trip(self, data: st.DataObject, dtype: torch.dtype) -> None:
        group, batch, draw = self.draw(data)
        g = group.random(draw, batch, dtype=dtype)
        copied = group.build({name: leaf.clone() for name, leaf in group.leaves(g).items()})
        assert type(copied) is type(g)
        assert group.belongs(copied)
        self.same(group, copied, g, 0.0)

    @given(data=st.data())
    def test_belongs_accepts(self, data: st.DataObject, dtype: torch.dtype) -> None:
        group, batch, draw = self.draw(data)
        g = group.random(draw, batch, dtype=dtype)
        assert group.belongs(g)
        for _ in range(4):
            g = group.compose(group.inverse(g), group.random(draw, batch, dtype=dtype))
        assert group.belongs(g)

    @given(data=st.data())
    def test_belongs_rejects_what_is_no_element(self, data: st.DataObject, dtype: torch.dtype) -> None:
        group, batch, draw = self.draw(data)
        leaves = group.leaves(group.random(draw, batch, dtype=dtype))
        for other in (None, "1", 1.0, [], (), {}, torch.tensor(1.0), torch.zeros(0), leaves | {"more": torch.zeros(1)}):
            assert not group.belongs(other), other
        for broken in corrupted(leaves):
            assert not group.belongs(group.build(broken)), broken

    @given(data=st.data())
    def test_belongs_rejects_neighbours(self, data: st.DataObject, dtype: torch.dtype) -> None:
        group = data.draw(self.groups())
        for other in self.outsiders(group, dtype):
            assert not group.belongs(other), other


def group_map(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) else {key: group_map(value, dtype) for key, value in x.items()}


def corrupted(leaves: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Copies of an element's leaves with one fault each: shape, type, a number that is none, a singular or repeated entry."""
    for name, leaf in leaves.items():
        if leaf.numel() == 0:
            continue
        faults = [leaf[..., :-1], torch.cat([leaf, leaf], -1), torch.tensor(0).to(leaf), leaf.to(torch.complex64)]
        if leaf.is_floating_point():
            for value in (float("nan"), float("inf"), 0.0):
                fault = leaf.clone()
                fault[..., 0] = value  # zero makes a matrix singular and a scale vanish
                faults.append(fault)
            faults.append(leaf.long())
        else:
            faults += [leaf.double(), leaf + 1, leaf - 1, leaf.to(torch.int32)]
            if leaf.shape[-1] > 1:
                faults.append(torch.cat([leaf[..., :1], leaf[..., :-1]], -1))
        yield from ({**leaves, name: fault} for fault in faults)


class LinearLaws(GroupLaws):
    """Groups of matrices, or of elements that act like them, on row vectors of n lanes."""

    @staticmethod
    def matrix(group: Any, g: Element, batch: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The matrix by which g acts, [*batch, n, n]."""
        return group.act(g, torch.eye(group.n, dtype=dtype).expand(*batch, group.n, group.n))

    @given(data=st.data())
    def test_random_is_well_conditioned(self, data: st.DataObject, dtype: torch.dtype) -> None:
        group, batch, draw = self.draw(data)
        values = torch.linalg.svdvals(self.matrix(group, group.random(draw, batch, dtype=dtype), batch, dtype))
        assert (values[..., 0] / values[..., -1]).max() <= CONDITION * 1.001

    @given(data=st.data())
    def test_dual_is_the_inverse_transpose(self, data: st.DataObject, dtype: torch.dtype, tolerance: float) -> None:
        group, batch, draw = self.draw(data)
        g, eye = group.random(draw, batch, dtype=dtype), torch.eye(group.n, dtype=dtype).expand(*batch, group.n, group.n)
        dual = torch.linalg.inv(self.matrix(group, g, batch, dtype)).mT
        torch.testing.assert_close(group.act(g, eye, -1), dual, rtol=tolerance, atol=tolerance)


class LieLaws(LinearLaws):
    """Groups with a tangent space: what the linear `conditions` leave free, no less and no more."""

    @abstractmethod
    def conditions(self, group: Any, x: Tensor) -> Tensor:
        """Linear conditions [batch, ...] that vanish exactly on the tangent vectors among the matrices x [batch, n, n]."""

    def element(self, group: Any, matrix: Tensor) -> Element:
        """The element that acts as `matrix`."""
        return matrix

    @given(data=st.data())
    def test_dimension_is_that_of_the_tangent(self, data: st.DataObject) -> None:
        group = data.draw(self.groups())
        n = group.n
        equations = self.conditions(group, torch.eye(n * n, dtype=torch.float64).reshape(-1, n, n)).reshape(n * n, -1).mT
        _, values, vh = torch.linalg.svd(equations, full_matrices=True)
        rank = int((values > 1e-9).sum())
        assert group.dimension == n * n - rank
        for vector in vh[rank:]:
            assert group.belongs(self.element(group, torch.matrix_exp(0.1 * vector.reshape(n, n))))
        if isinstance(group, MatrixGroup):
            for vector in vh[:rank]:
                assert not group.belongs(torch.matrix_exp(0.1 * vector.reshape(n, n)))


class CompactLaws:
    """`best` is the maximiser of ⟨B g, A⟩, which is ⟨matrix of g, BᵀA⟩. Mixed into the laws of groups where it exists."""

    def rivals(self, group: Any, best: Element, batch: tuple[int, ...], draw: torch.Generator) -> Iterator[Element]:
        """Every other element of a small finite group; else random ones, far and near."""
        for _ in range(30):
            yield group.random(draw, batch)

    @given(data=st.data())
    def test_best_is_the_maximiser(self, data: st.DataObject) -> None:
        group, batch, draw = self.draw(data)  # type: ignore[attr-defined]
        inner = torch.randn(*batch, group.n, group.n, generator=draw, dtype=torch.float64)

        def gain(g: Element) -> Tensor:
            return (self.matrix(group, g, batch, torch.float64) * inner).sum((-1, -2))  # type: ignore[attr-defined]

        best = group.best(inner)
        assert group.belongs(best)
        for g in self.rivals(group, best, batch, draw):
            assert (gain(best) >= gain(g) - 1e-9).all()

    @given(data=st.data())
    def test_best_recovers_a_planted_element(self, data: st.DataObject, dtype: torch.dtype, tolerance: float) -> None:
        group, batch, draw = self.draw(data)  # type: ignore[attr-defined]
        planted = group.random(draw, batch, dtype=dtype)
        b = torch.randn(*batch, 3 * group.n, group.n, generator=draw, dtype=torch.float64).to(dtype)
        found = group.best(b.mT @ group.act(planted, b))
        self.same(group, found, planted, tolerance)  # type: ignore[attr-defined]
