from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coset.errors import CosetError
from coset.groups import Element, Orthogonal, PlanePhases, RotaryCommutant
from groups.laws import SEEDS, CompactLaws, LieLaws, generator

POSITIONS = {1: [(1.0,), (-0.37,), (2.6,)], 2: [(1.0, 0.0), (0.0, 1.0), (0.61, -1.7)]}
ONE_DIMENSION = [(0.0,), (0.3,), (0.7,), (1.1,), (-0.3,)]
TWO_DIMENSIONS = [(0.0, 0.0), (0.3, 0.0), (0.0, 0.3), (0.3, 0.7), (0.3, -0.7), (-0.3, 0.7)]


def rotations(group: RotaryCommutant) -> list[Tensor]:
    """R_t, entry by entry: ``x R_t`` turns (x_a, x_b) by the angle <t, frequency>."""
    found = []
    for t in POSITIONS[len(group.frequencies[0]) if group.frequencies else 1]:
        r = torch.eye(group.n, dtype=torch.float64)
        for (a, b), frequency in zip(group.planes, group.frequencies, strict=True):
            angle = torch.tensor(sum(s * f for s, f in zip(t, frequency, strict=True)), dtype=torch.float64)
            r[a, a] = r[b, b] = torch.cos(angle)
            r[a, b], r[b, a] = torch.sin(angle), -torch.sin(angle)
        found.append(r)
    return found


def standard(width: int, rotated: int, pairing: str, frequencies: list[tuple[float, ...]]) -> RotaryCommutant:
    half = rotated // 2
    planes = [(j, j + half) if pairing == "half" else (2 * j, 2 * j + 1) for j in range(half)]
    return RotaryCommutant(width, tuple(planes), tuple(frequencies))


@st.composite
def layouts(draw: st.DrawFn, compact: bool = False) -> RotaryCommutant:
    """Both usual pairings and any other, partly rotated, frequencies zero, repeated, backwards and of grids."""
    n = draw(st.integers(1, 7))
    rotated = 2 * draw(st.integers(0, n // 2))
    pool = draw(st.sampled_from([ONE_DIMENSION, TWO_DIMENSIONS]))
    frequencies = [draw(st.sampled_from(pool)) for _ in range(rotated // 2)]
    group = standard(n, rotated, draw(st.sampled_from(["half", "interleaved"])), frequencies)
    if draw(st.booleans()):
        lanes = draw(st.permutations(range(n)))
        group = RotaryCommutant(n, tuple((lanes[a], lanes[b]) for a, b in group.planes), group.frequencies)
    return PlanePhases(n, group.planes, group.frequencies) if compact else group


class RotaryLaws(LieLaws):
    orders_only = False

    def conditions(self, group: RotaryCommutant, x: Tensor) -> Tensor:
        return torch.stack([x @ r - r @ x for r in rotations(group)], 1)

    def outsiders(self, group: RotaryCommutant, dtype: torch.dtype) -> Iterator[Tensor]:
        turning = [plane for plane, frequency in zip(group.planes, group.frequencies, strict=True) if any(frequency)]
        if not turning:
            return
        # An orthogonal map in general position, one near 1, a reflection of one plane, and a scale that treats its lanes unequally.
        yield Orthogonal(group.n).random(generator(8), (2,), dtype=dtype)
        a, b = turning[0]
        if group.n > 2:
            turn = torch.zeros(group.n, group.n, dtype=torch.float64)
            other = next(lane for lane in range(group.n) if lane not in (a, b))
            turn[a, other], turn[other, a] = 0.05, -0.05
            yield torch.matrix_exp(turn).to(dtype)
        for factor in (-1.0, 1.05):
            scaled = group.identity(dtype=dtype)
            scaled[b, b] = factor
            yield scaled

    @given(data=st.data())
    def test_elements_commute_with_every_rotation(self, data: st.DataObject, dtype: torch.dtype, tolerance: float) -> None:
        group, batch, draw = self.draw(data)
        m = group.random(draw, batch, dtype=dtype)
        for r in rotations(group):
            torch.testing.assert_close(m @ r.to(dtype), r.to(dtype) @ m, rtol=tolerance, atol=tolerance)

    @given(data=st.data())
    def test_logits_are_kept(self, data: st.DataObject, dtype: torch.dtype, tolerance: float) -> None:
        group, batch, draw = self.draw(data)
        m = group.random(draw, batch, dtype=dtype)
        q, k = (torch.randn(*batch, 4, group.n, generator=draw, dtype=torch.float64).to(dtype) for _ in range(2))
        for r in rotations(group):
            before = q @ r.to(dtype) @ k.mT
            after = group.act(m, q) @ r.to(dtype) @ group.act(m, k, -1).mT
            torch.testing.assert_close(after, before, rtol=10 * tolerance, atol=10 * tolerance)

    @given(data=st.data())
    def test_project_is_the_orthogonal_projection_onto_the_commutant(self, data: st.DataObject) -> None:
        group, batch, draw = self.draw(data)
        x, y = (torch.randn(*batch, group.n, group.n, generator=draw, dtype=torch.float64) for _ in range(2))
        p = group.project(x)
        for r in rotations(group):
            torch.testing.assert_close(p @ r, r @ p)
        torch.testing.assert_close(group.project(p), p)
        torch.testing.assert_close((p * y).sum((-1, -2)), (x * group.project(y)).sum((-1, -2)))

    @given(data=st.data())
    def test_blocks_share_out_the_lanes(self, data: st.DataObject) -> None:
        group = data.draw(self.groups())
        lanes = [lane for block in group.blocks for lane in (*block.real, *(block.imaginary or ()))]
        assert sorted(lanes) == list(range(group.n))


class TestRotaryCommutant(RotaryLaws):
    def groups(self) -> st.SearchStrategy[RotaryCommutant]:
        return layouts()

    @pytest.mark.parametrize(
        ("group", "name", "dimension"),
        [
            (standard(10, 10, "half", [(0.9**j,) for j in range(5)]), "(C^×)^5", 10),
            (standard(10, 6, "interleaved", [(0.9**j,) for j in range(3)]), "(C^×)^3 × GL(4)", 22),
            (standard(8, 8, "half", [(0.5,), (0.0,), (0.5,), (0.1,)]), "C^× × GL(2, C) × GL(2)", 2 + 8 + 4),
            (standard(8, 8, "half", [(0.5, 0.0), (0.0, 0.5), (0.5, 0.0), (0.0, 0.5)]), "GL(2, C) × GL(2, C)", 16),
            (standard(6, 6, "half", [(0.5,), (-0.5,), (0.5,)]), "GL(3, C)", 18),
            (RotaryCommutant(7), "GL(7)", 49),
            (standard(4, 4, "half", [(0.0,), (0.0,)]), "GL(4)", 16),
        ],
    )
    def test_names_and_dimensions(self, group: RotaryCommutant, name: str, dimension: int) -> None:
        assert group.name == name
        assert group.dimension == dimension

    def test_pairings_are_told_apart(self) -> None:
        frequencies = [(0.9**j,) for j in range(3)]
        half, interleaved = (standard(6, 6, pairing, frequencies) for pairing in ("half", "interleaved"))
        assert not half.belongs(interleaved.random(generator(0)))
        assert not interleaved.belongs(half.random(generator(0)))

    def test_a_plane_that_forgets_the_conjugate_is_no_dual(self) -> None:
        group = standard(4, 4, "half", [(1.0,), (0.1,)])
        g = group.random(generator(1))
        x, y = torch.randn(2, 4, generator=generator(2), dtype=torch.float64)
        assert abs(group.act(g, x) @ group.act(group.inverse(g), y) - x @ y) > 0.01 * abs(x @ y)


class TestPlanePhases(CompactLaws, RotaryLaws):
    def groups(self) -> st.SearchStrategy[RotaryCommutant]:
        return layouts(compact=True)

    def conditions(self, group: RotaryCommutant, x: Tensor) -> Tensor:
        return torch.cat([super().conditions(group, x).flatten(1), (x + x.mT).flatten(1)], -1)

    def rivals(self, group: RotaryCommutant, best: Element, batch: tuple[int, ...], draw: torch.Generator) -> Iterator[Tensor]:
        yield from super().rivals(group, best, batch, draw)
        # Near ones: a tangent vector is what n x n noise leaves on the commutant, made antisymmetric.
        for size in (1e-1, 1e-2, 1e-3):
            noise = group.project(torch.randn(group.n, group.n, generator=draw, dtype=torch.float64))
            yield best @ torch.matrix_exp(size * (noise - noise.mT))

    def outsiders(self, group: RotaryCommutant, dtype: torch.dtype) -> Iterator[Tensor]:
        yield from super().outsiders(group, dtype)
        yield 1.01 * group.identity(dtype=dtype)

    def test_names(self) -> None:
        frequencies = ((0.5,), (0.0,), (0.5,), (0.1,))
        group = PlanePhases(8, tuple(pairwise(range(5)))[::2] + ((4, 5), (6, 7)), frequencies)
        assert group.name == "U(1) × U(2) × O(2)"
        assert group.dimension == 1 + 4 + 1
        assert PlanePhases(6, ((0, 3), (1, 4), (2, 5)), ((0.5,), (0.4,), (0.3,))).name == "U(1)^3"


@pytest.mark.parametrize(
    ("planes", "frequencies", "message"),
    [
        (((0, 1), (1, 2)), ((0.5,), (0.1,)), "at most once"),
        (((0, 4),), ((0.5,),), "at most once"),
        (((0, 0),), ((0.5,),), "at most once"),
        (((0, 1),), (), "1 rotary planes need as many frequencies, got 0"),
        (((0, 1), (2, 3)), ((0.5,), (0.5, 0.1)), "every coordinate"),
    ],
)
def test_impossible_layouts_are_refused(
    planes: tuple[tuple[int, int], ...], frequencies: tuple[tuple[float, ...], ...], message: str
) -> None:
    with pytest.raises(CosetError, match=message):
        RotaryCommutant(4, planes, frequencies)


@given(SEEDS)
def test_equal_frequencies_mix_planes_and_distinct_ones_do_not(seed: int) -> None:
    planes = ((0, 2), (1, 3))
    equal, distinct = (RotaryCommutant(4, planes, f) for f in (((0.5,), (0.5,)), ((0.5,), (0.4,))))
    g = equal.random(generator(seed))
    assert g[0, 1].abs() > 0
    assert distinct.belongs(distinct.project(g))
    assert equal.belongs(distinct.random(generator(seed)))
    assert not distinct.belongs(g)
