from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coset.errors import CosetError
from coset.groups import Element, GeneralLinear, MatrixGroup, Orthogonal, polar, random_orthogonal
from groups.laws import SEEDS, CompactLaws, LieLaws, generator


def rows(n: int, k: int, seed: int) -> Tensor:
    """k orthonormal rows of n lanes."""
    return torch.linalg.qr(torch.randn(n, n, generator=generator(seed), dtype=torch.float64))[0][:k]


@st.composite
def fixed_rows(draw: st.DrawFn, smallest_free: int) -> tuple[int, Tensor | None]:
    n = draw(st.integers(max(1, smallest_free), 6))
    k = draw(st.integers(0, n - smallest_free))
    return n, draw(st.sampled_from([rows(n, k, 7), None])) if k == 0 else rows(n, k, draw(SEEDS))


def near_identity(group: MatrixGroup, dtype: torch.dtype, size: float = 0.05) -> Tensor:
    """A matrix near 1, in general position."""
    noise = torch.randn(2, group.n, group.n, generator=generator(3), dtype=torch.float64)
    return torch.matrix_exp(size * noise).to(dtype)


class TestGeneralLinear(LieLaws):
    orders_only = False

    def groups(self) -> st.SearchStrategy[GeneralLinear]:
        return fixed_rows(0).map(lambda case: GeneralLinear(*case))

    def conditions(self, group: GeneralLinear, x: Tensor) -> Tensor:
        return torch.zeros(len(x), 1, dtype=x.dtype) if group.fixed is None else group.fixed @ x

    def outsiders(self, group: GeneralLinear, dtype: torch.dtype) -> Iterator[Tensor]:
        noise = torch.randn(group.n, group.n, generator=generator(1), dtype=torch.float64)
        yield (noise[:, :1] @ noise[:1] if group.n > 1 else torch.zeros(1, 1)).to(dtype)  # rank one
        if group.fixed is not None and len(group.fixed):
            yield near_identity(group, dtype)

    def test_names(self) -> None:
        assert GeneralLinear(16).name == "GL(16)"
        assert GeneralLinear(7, rows(7, 2, 0)).name == "GL(5) ⋉ R^(2×5)"
        assert GeneralLinear(3, rows(3, 3, 0)).name == "1"
        assert GeneralLinear(7, rows(7, 2, 0)).dimension == 35


class TestOrthogonal(CompactLaws, LieLaws):
    orders_only = False

    def groups(self) -> st.SearchStrategy[Orthogonal]:
        return fixed_rows(0).map(lambda case: Orthogonal(*case))

    def conditions(self, group: Orthogonal, x: Tensor) -> Tensor:
        parts = [(x + x.mT).flatten(1)] + ([] if group.fixed is None else [(group.fixed @ x).flatten(1)])
        return torch.cat(parts, -1)

    def rivals(self, group: Orthogonal, best: Element, batch: tuple[int, ...], draw: torch.Generator) -> Iterator[Tensor]:
        yield from super().rivals(group, best, batch, draw)
        free = torch.eye(group.n, dtype=torch.float64)
        if group.fixed is not None:
            free = free - group.fixed.mT @ group.fixed
        for size in (1e-1, 1e-2, 1e-3):
            noise = torch.randn(group.n, group.n, generator=draw, dtype=torch.float64)
            yield best @ torch.matrix_exp(size * free @ (noise - noise.mT) @ free)

    def outsiders(self, group: Orthogonal, dtype: torch.dtype) -> Iterator[Tensor]:
        if group.n > 1:
            yield near_identity(group, dtype)
        yield 1.01 * group.identity(dtype=dtype)
        if group.fixed is not None and len(group.fixed):
            yield Orthogonal(group.n).random(generator(5), (2,), dtype=dtype) if group.n > 1 else -group.identity(dtype=dtype)

    def test_names(self) -> None:
        assert Orthogonal(6).name == "O(6)"
        assert Orthogonal(6, rows(6, 1, 0)).name == "O(5)"
        assert Orthogonal(2, rows(2, 2, 0)).name == "1"
        assert Orthogonal(6, rows(6, 1, 0)).dimension == 10

    def test_both_components_are_drawn(self) -> None:
        signs = torch.linalg.det(Orthogonal(3).random(generator(0), (100,))).round()
        assert 25 < (signs > 0).sum() < 75


@pytest.mark.parametrize("kind", [GeneralLinear, Orthogonal])
@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        (torch.eye(4, dtype=torch.float64), "rows \\[k <= 3, 3\\], got \\[4, 4\\]"),
        (torch.ones(3, dtype=torch.float64), "got \\[3\\]"),
        (torch.ones(1, 3, dtype=torch.float64), "orthonormal"),
        (torch.eye(3), "float64, got torch.float32"),
    ],
)
def test_fixed_rows_must_be_orthonormal_float64(kind: type[GeneralLinear], fixed: Tensor, message: str) -> None:
    with pytest.raises(CosetError, match=message):
        kind(3, fixed)


@given(SEEDS, st.integers(1, 5))
def test_polar_factor_leaves_a_positive_matrix(seed: int, n: int) -> None:
    inner = torch.view_as_complex(torch.randn(3, n, n, 2, generator=generator(seed), dtype=torch.float64))
    u = polar(inner)
    rest = u.mH @ inner
    torch.testing.assert_close(u @ u.mH, torch.eye(n, dtype=u.dtype).expand(3, n, n))
    torch.testing.assert_close(rest, rest.mH)
    assert (torch.linalg.eigvalsh(rest) > 0).all()


def test_random_orthogonal_has_the_moments_of_haar_measure() -> None:
    q = random_orthogonal(generator(0), 3, (20_000,))
    assert (q.mean(0).abs() < 0.02).all()
    torch.testing.assert_close((q**2).mean(0), torch.full((3, 3), 1 / 3, dtype=torch.float64), atol=0.01, rtol=0)
