import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coset.errors import CosetError
from coset.groups import Element, Monomial, MonomialElement, Permutation, Scaling, SignedPermutation
from groups.laws import CompactLaws, LieLaws, LinearLaws, generator

SIZES = st.integers(1, 6)


def off_diagonal(x: Tensor) -> Tensor:
    return x - torch.diag_embed(x.diagonal(dim1=-2, dim2=-1))


def diagonal(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).contiguous()


class TestPermutation(CompactLaws, LinearLaws):
    def groups(self) -> st.SearchStrategy[Permutation]:
        free = SIZES.map(Permutation)
        classed = st.lists(st.integers(-1, 2), min_size=1, max_size=6).map(lambda c: Permutation(len(c), tuple(c)))
        return free | classed

    def rivals(self, group: Permutation, best: Element, batch: tuple[int, ...], draw: torch.Generator) -> Iterator[Tensor]:
        for order in itertools.permutations(range(group.n)):
            if group.classes is None or all(group.classes[i] == group.classes[j] for i, j in enumerate(order)):
                yield torch.tensor(order).expand(*batch, group.n)

    def test_classes_are_kept(self) -> None:
        group = Permutation(5, (0, 1, 0, 1, 2))
        assert group.belongs(torch.tensor([2, 1, 0, 3, 4]))
        assert not group.belongs(torch.tensor([1, 0, 2, 3, 4]))
        assert not group.belongs(torch.stack([torch.arange(5), torch.tensor([4, 1, 2, 3, 0])]))

    def test_every_permutation_within_the_classes_is_drawn(self) -> None:
        drawn = Permutation(5, (7, 3, 7, 3, 7)).random(generator(0), (400,))
        assert len({tuple(order.tolist()) for order in drawn}) == 12

    def test_classes_of_another_length_are_refused(self) -> None:
        with pytest.raises(CosetError, match="as many classes, got 2"):
            Permutation(3, (0, 1))

    def test_lane_i_receives_lane_order_i(self) -> None:
        x = torch.tensor([10.0, 11.0, 12.0])
        assert Permutation(3).act(torch.tensor([2, 0, 1]), x).tolist() == [12.0, 10.0, 11.0]

    def test_names(self) -> None:
        assert Permutation(4).name == "S_4"
        assert Permutation(6, (0, 1, 1, 2, 2, 2)).name == "S_3 × S_2"
        assert Permutation(2, (0, 1)).name == Permutation(1).name == "1"
        assert Permutation(9).dimension == 0


class MonomialLaws(LinearLaws):
    scales: Any

    def groups(self) -> st.SearchStrategy[Monomial]:
        return SIZES.map(lambda n: Monomial(n, self.scales))

    def near(self, group: Monomial, dtype: torch.dtype, *factors: float) -> Iterator[Element]:
        one = group.identity((2,), dtype=dtype)
        for factor in factors:
            scale = one.scale.clone()
            scale[..., -1] *= factor
            yield MonomialElement(one.order, scale)

    def outsiders(self, group: Monomial, dtype: torch.dtype) -> Iterator[Element]:
        one = group.identity((2,), dtype=dtype)
        yield MonomialElement(one.order, one.scale[0])
        yield MonomialElement(one.order[0], one.scale)
        yield (one.order, one.scale)
        yield one.order

    def test_order_then_scale(self) -> None:
        g = MonomialElement(torch.tensor([2, 0, 1]), torch.tensor([1.0, -1.0, 1.0]))
        assert Monomial(3, "sign").act(g, torch.tensor([10.0, 11.0, 12.0])).tolist() == [12.0, -10.0, 11.0]


class SignLaws(CompactLaws, MonomialLaws):
    def rivals(self, group: Monomial, best: Element, batch: tuple[int, ...], draw: torch.Generator) -> Iterator[Element]:
        if group.n > 4:
            yield from super().rivals(group, best, batch, draw)
            return
        for order in itertools.permutations(range(group.n)):
            for signs in itertools.product((1.0, -1.0), repeat=group.n):
                g = MonomialElement(torch.tensor(order), torch.tensor(signs, dtype=torch.float64))
                if group.belongs(g):
                    yield MonomialElement(*(leaf.expand(*batch, group.n) for leaf in g))

    def outsiders(self, group: Monomial, dtype: torch.dtype) -> Iterator[Element]:
        yield from super().outsiders(group, dtype)
        yield from self.near(group, dtype, 1.01, -0.99)


class TestSignedPermutation(SignLaws):
    scales = "sign"

    def test_names(self) -> None:
        assert SignedPermutation(5) == Monomial(5, "sign")
        assert SignedPermutation(5).name == "S_5 ⋉ ({±1})^5"
        assert SignedPermutation(5).dimension == 0


class TestGlobalSign(SignLaws):
    scales = "global sign"

    def outsiders(self, group: Monomial, dtype: torch.dtype) -> Iterator[Element]:
        yield from super().outsiders(group, dtype)
        if group.n > 1:
            yield from self.near(group, dtype, -1.0)

    def test_names(self) -> None:
        assert Monomial(5, "global sign").name == "S_5 × {±1}"
        assert Monomial(5, "global sign").dimension == 0


class FreeScales(MonomialLaws, LieLaws):
    def conditions(self, group: Monomial, x: Tensor) -> Tensor:
        return off_diagonal(x)

    def element(self, group: Monomial, matrix: Tensor) -> Element:
        return MonomialElement(torch.arange(group.n), diagonal(matrix))

    def test_best_is_refused(self) -> None:
        with pytest.raises(TypeError, match="unbounded"):
            Monomial(3, self.scales).best(torch.eye(3))


class TestPositiveMonomial(FreeScales):
    scales = "positive"

    def outsiders(self, group: Monomial, dtype: torch.dtype) -> Iterator[Element]:
        yield from super().outsiders(group, dtype)
        yield from self.near(group, dtype, -1.0)

    def test_names(self) -> None:
        assert Monomial(5, "positive").name == "S_5 ⋉ (R_{>0})^5"


class TestNonzeroMonomial(FreeScales):
    scales = "nonzero"

    def test_names(self) -> None:
        assert Monomial(5, "nonzero").name == "S_5 ⋉ (R^×)^5"


@st.composite
def partitions(draw: st.DrawFn) -> tuple[int, tuple[tuple[int, ...], ...] | None]:
    n = draw(SIZES)
    if draw(st.booleans()):
        return n, None
    owner = [draw(st.integers(0, 2)) for _ in range(n)]
    return n, tuple(tuple(i for i in range(n) if owner[i] == b) for b in sorted(set(owner), reverse=True))


class ScalingLaws(LinearLaws):
    scales: Any

    def groups(self) -> st.SearchStrategy[Scaling]:
        return partitions().map(lambda case: Scaling(case[0], self.scales, case[1]))


class FreeScaling(ScalingLaws, LieLaws):
    def conditions(self, group: Scaling, x: Tensor) -> Tensor:
        blocks = group.blocks if group.blocks is not None else [(lane,) for lane in range(group.n)]
        uneven = [diagonal(x)[:, i] - diagonal(x)[:, block[0]] for block in blocks for i in block]
        return torch.cat([off_diagonal(x).flatten(1), torch.stack(uneven, -1)], -1)

    def element(self, group: Scaling, matrix: Tensor) -> Tensor:
        first = [block[0] for block in group.blocks] if group.blocks is not None else list(range(group.n))
        return diagonal(matrix)[first]

    def test_best_is_refused(self) -> None:
        with pytest.raises(TypeError, match="unbounded"):
            Scaling(3, self.scales).best(torch.eye(3))


class TestSigns(CompactLaws, ScalingLaws):
    scales = "sign"

    def rivals(self, group: Scaling, best: Element, batch: tuple[int, ...], draw: torch.Generator) -> Iterator[Tensor]:
        for signs in itertools.product((1.0, -1.0), repeat=group.size):
            yield torch.tensor(signs, dtype=torch.float64).expand(*batch, group.size)

    def outsiders(self, group: Scaling, dtype: torch.dtype) -> Iterator[Tensor]:
        yield 1.01 * group.identity(dtype=dtype)


class TestPositiveScaling(FreeScaling):
    scales = "positive"

    def outsiders(self, group: Scaling, dtype: torch.dtype) -> Iterator[Tensor]:
        yield -group.identity(dtype=dtype)


class TestNonzeroScaling(FreeScaling):
    scales = "nonzero"


class TestScaling:
    def test_names(self) -> None:
        assert Scaling(4, "nonzero").name == "(R^×)^4"
        assert Scaling(4, "positive", ((0, 3), (1, 2))).name == "(R_{>0})^2"
        assert Scaling(4, "sign").name == "({±1})^4"

    def test_blocks_scale_together(self) -> None:
        group = Scaling(3, "positive", ((2, 0), (1,)))
        assert group.act(torch.tensor([2.0, 5.0]), torch.ones(3)).tolist() == [2.0, 5.0, 2.0]
        assert group.act(torch.tensor([2.0, 5.0]), torch.ones(3), -1).tolist() == pytest.approx([0.5, 0.2, 0.5])

    @pytest.mark.parametrize("blocks", [((0,), (1,)), ((0, 1), (1, 2)), ((0, 1), (2, 3))])
    def test_blocks_that_are_no_partition_are_refused(self, blocks: tuple[tuple[int, ...], ...]) -> None:
        with pytest.raises(CosetError, match="each of the 3 lanes once"):
            Scaling(3, "sign", blocks)

    @given(st.integers(0, 99))
    def test_no_reordering(self, seed: int) -> None:
        x = torch.randn(4, 3, generator=generator(seed))
        assert torch.equal(Scaling(3).act(Scaling(3).random(generator(seed), dtype=torch.float32), x, 0), x)
