"""Stage 2: solvers of one head against dense grids, closed forms and each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch import Tensor

from coset.alignment.within_head import Grams, balancing, full_rank, newton, objective, regular, solve_linear, solve_planes
from coset.groups import GeneralLinear, RotaryCommutant

F64, C128 = torch.float64, torch.complex128


def normal(seed: int, *shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# --- planes ---------------------------------------------------------------------------------------------------------


def plane_distance(z: Tensor, q_a: Tensor, k_a: Tensor, q_b: Tensor, k_b: Tensor) -> Tensor:
    """‖q_A − z q_B‖² + ‖k_A − k_B / z̄‖² of [*batch, rows], written out."""
    return (q_a - z[..., None] * q_b).abs().square().sum(-1) + (k_a - k_b / z.conj()[..., None]).abs().square().sum(-1)


def products(q_a: Tensor, k_a: Tensor, q_b: Tensor, k_b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (q_b.conj() * q_a).sum(-1), (k_b.conj() * k_a).sum(-1), q_b.abs().square().sum(-1), k_b.abs().square().sum(-1)


def over_radii(alpha: Tensor, beta: Tensor, q: Tensor, k: Tensor, log_radii: Tensor) -> Tensor:
    """The objective up to a constant, [*batch, radii], at the best phase for every radius."""
    r = log_radii.exp()
    cross = (alpha[..., None] * r + beta[..., None] / r).abs()
    return q[..., None] * r**2 + k[..., None] / r**2 - 2 * cross


@given(st.integers(0, 10**6), st.integers(1, 4), st.floats(-5, 5), st.floats(-5, 5), st.floats(-5, 5))
def test_planes_reach_the_global_minimum(seed: int, rows: int, size_a: float, size_k: float, size_b: float) -> None:
    q_a, k_a, q_b, k_b = normal(seed, 4, 60, rows, dtype=C128)
    q_a, k_a = q_a * np.exp(size_a), k_a * np.exp(size_a + size_k)
    q_b, k_b = q_b * np.exp(size_b), k_b * np.exp(-size_b)
    z = solve_planes(*products(q_a, k_a, q_b, k_b))
    found = plane_distance(z, q_a, k_a, q_b, k_b)
    alpha, beta, q, k = products(q_a, k_a, q_b, k_b)
    constant = q_a.abs().square().sum(-1) + k_a.abs().square().sum(-1)
    grid = constant + over_radii(alpha, beta, q, k, torch.linspace(-16, 16, 8001, dtype=F64)).amin(-1)
    assert bool((found <= grid + 1e-10 * constant).all())
    # And nothing nearby is better: a minimum in the phase as well.
    for nudge in (1.001, 0.999, np.exp(1e-3j), np.exp(-1e-3j)):
        assert bool((plane_distance(z * nudge, q_a, k_a, q_b, k_b) >= found - 1e-12 * constant).all())


@given(st.integers(0, 10**6), st.sampled_from([0.0, 1e-12, 1e-6, 1e-3, 0.1]))
def test_planes_with_opposed_queries_and_keys_reach_the_global_minimum(seed: int, off: float) -> None:
    # α and β (nearly) opposed: this is where h has two minima and a kink between them.
    size = 5 * torch.rand(2, 200, generator=torch.Generator().manual_seed(seed), dtype=F64)
    alpha = torch.polar(size[0], normal(seed, 200))
    beta = -alpha / alpha.abs() * size[1] * np.exp(1j * off)
    beta[:50] = -alpha[:50]
    q, k = torch.ones(200, dtype=F64), torch.full((200,), 9.0, dtype=F64)
    z = solve_planes(alpha, beta, q, k)
    found = over_radii(alpha, beta, q, k, z.abs().log()[:, None])[:, 0]
    grid = over_radii(alpha, beta, q, k, torch.linspace(-6, 6, 6001, dtype=F64)).amin(-1)
    assert float((found - grid).max()) <= 1e-8


def test_a_single_bracket_misses_one_of_two_minima() -> None:
    alpha, beta = torch.tensor([2.0 + 0j], dtype=C128), torch.tensor([-2.1 + 0j], dtype=C128)
    one = torch.ones(1, dtype=F64)

    def h(log_r: float) -> float:
        return float(over_radii(alpha, beta, one, one, torch.tensor([log_r], dtype=F64)))

    grid = over_radii(alpha, beta, one, one, torch.linspace(-3, 3, 6001, dtype=F64))[0]
    inner = (grid[1:-1] < grid[:-2]) & (grid[1:-1] < grid[2:])
    assert int(inner.sum()) == 2
    missed = minimize_scalar(h, bracket=(0.1, 0.5), method="brent")
    found = h(float(solve_planes(alpha, beta, one, one).abs().log()))
    assert found <= float(grid.min()) + 1e-12
    assert missed.success
    assert missed.fun > found + 0.1


@given(st.integers(0, 10**6))
def test_exact_planes_are_never_above_brent(seed: int) -> None:
    q_a, k_a, q_b, k_b = normal(seed, 4, 25, 2, dtype=C128)
    found, brent = (
        plane_distance(solve_planes(*products(q_a, k_a, q_b, k_b), method), q_a, k_a, q_b, k_b) for method in ("exact", "brent")
    )  # type: ignore[arg-type]
    assert bool((found <= brent + 1e-12).all())
    assert float((brent - found).median()) < 1e-7


def test_real_planes_have_a_sign_for_a_phase() -> None:
    q_a, k_a, q_b, k_b = normal(3, 4, 50, 3)
    z = solve_planes(*products(q_a, k_a, q_b, k_b))
    assert z.dtype == F64
    assert bool((z < 0).any() and (z > 0).any())
    scale = torch.linspace(-4, 4, 8001, dtype=F64).exp()
    for x in (scale, -scale):
        every = plane_distance(x[:, None].expand(-1, 50), q_a, k_a, q_b, k_b)
        assert bool((plane_distance(z, q_a, k_a, q_b, k_b) <= every.amin(0) + 1e-9).all())


def test_planted_planes_are_recovered() -> None:
    q_b, k_b = normal(4, 2, 5, 7, 3, dtype=C128)
    z = torch.polar(torch.linspace(0.2, 5.0, 35, dtype=F64).reshape(5, 7), normal(5, 5, 7))
    found = solve_planes(*products(q_b * z[..., None], k_b / z.conj()[..., None], q_b, k_b))
    assert float((found - z).abs().max()) <= 1e-12


def test_dead_planes_keep_modulus_one() -> None:
    zero, one, two = (torch.full((1,), float(x), dtype=F64) for x in range(3))
    turned = torch.tensor([2j], dtype=C128)
    for q, k in ((zero, one), (one, zero), (zero, zero)):
        for method in ("exact", "brent"):
            z = solve_planes(turned if q > 0 else 0 * turned, turned if k > 0 else 0 * turned, q, k, method)  # type: ignore[arg-type]
            assert bool(torch.isfinite(z.real) & torch.isfinite(z.imag))
            assert float(z.abs()) == pytest.approx(1.0)
    # Nothing to agree with: the norms of q and k alone decide, q r² + k / r².
    assert float(solve_planes(0 * turned, 0 * turned, two, 8 * two).abs()) == pytest.approx(8**0.25)
    assert solve_planes(turned[:0], turned[:0], zero[:0], zero[:0]).shape == (0,)


def test_planes_of_any_size_in_single_precision() -> None:
    q_a, k_a, q_b, k_b = (x.to(torch.complex64) for x in normal(6, 4, 40, 5, dtype=C128))
    for size in (1e-6, 1.0, 1e6):
        z = solve_planes(*products(q_a * size, k_a * size, q_b * size, k_b * size))
        assert z.dtype == torch.complex64
        wide = solve_planes(*products(*(x.to(C128) for x in (q_a, k_a, q_b, k_b))))
        assert float((z - wide).abs().max()) <= 1e-3


# --- GL(m) ----------------------------------------------------------------------------------------------------------


def linear_distance(u: Tensor, q_a: Tensor, k_a: Tensor, q_b: Tensor, k_b: Tensor) -> Tensor:
    """‖Q_A − Q_B U‖² + ‖K_A − K_B U^{-H}‖², written out."""
    w = torch.linalg.inv(u).mH
    return (q_a - q_b @ u).abs().square().sum((-2, -1)) + (k_a - k_b @ w).abs().square().sum((-2, -1))


DTYPES = pytest.mark.parametrize("dtype", [F64, C128], ids=["real", "complex"])


@DTYPES
def test_objective_and_grams(dtype: torch.dtype) -> None:
    factors = normal(1, 4, 3, 11, 5, dtype=dtype)
    u = normal(2, 3, 5, 5, dtype=dtype)
    grams = Grams.of(*factors)
    expected = linear_distance(u, *factors)
    assert torch.allclose(objective(grams, u), expected)
    assert torch.allclose(objective(grams, u, torch.linalg.inv(u)), expected)
    assert torch.allclose(grams.reference, factors[0].abs().square().sum((-2, -1)) + factors[1].abs().square().sum((-2, -1)))


@DTYPES
@pytest.mark.parametrize("method", ["newton", "gradient", "orthogonal"])
def test_linear_solvers_never_end_above_their_start(method: str, dtype: torch.dtype) -> None:
    for seed in range(5):
        factors = normal(seed, 4, 6, 7, 3, dtype=dtype)
        factors[0] *= 1 + seed
        grams = Grams.of(*factors)
        u = solve_linear(grams, method)  # type: ignore[arg-type]
        assert u.dtype == dtype
        isometry = solve_linear(grams, "orthogonal")
        eye = torch.eye(3, dtype=dtype)
        assert float((isometry @ isometry.mH - eye).abs().max()) <= 1e-12
        value, start = linear_distance(u, *factors), linear_distance(isometry, *factors)
        assert bool((value <= start * (1 + 1e-12)).all())
        assert bool((start <= linear_distance(eye.expand(6, 3, 3), *factors) * (1 + 1e-12)).all())


@DTYPES
def test_newton_ends_where_the_gradient_vanishes_and_below_descent(dtype: torch.dtype) -> None:
    factors = normal(9, 4, 8, 9, 4, dtype=dtype)
    factors[0], factors[1] = factors[2] + 0.7 * factors[0], factors[3] + 0.7 * factors[1]
    grams = Grams.of(*factors)
    u = solve_linear(grams)
    free = u.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(linear_distance(free, *factors).sum(), free)
    assert float(gradient.abs().max()) <= 1e-2  # of about a hundred at the start
    descended = solve_linear(grams, "gradient")
    assert bool((linear_distance(u, *factors) <= linear_distance(descended, *factors) * (1 + 1e-9)).all())
    assert bool((linear_distance(u, *factors) < linear_distance(solve_linear(grams, "orthogonal"), *factors)).all())


@DTYPES
def test_planted_bases_are_recovered_by_newton(dtype: torch.dtype) -> None:
    q, k = normal(3, 2, 10, 8, 5, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    if dtype == C128:
        planes = tuple((2 * j, 2 * j + 1) for j in range(5))
        commutant = RotaryCommutant(10, planes, ((0.3,),) * 5)
        u = commutant.extract(commutant.blocks[0], commutant.random(generator, (10,)))
    else:
        u = GeneralLinear(5).random(generator, (10,))
    found = solve_linear(Grams.of(q @ u, k @ torch.linalg.inv(u).mH, q, k))
    assert float((found - u).abs().max()) <= 1e-10


def test_balancing_makes_gram_matrices_equal() -> None:
    for dtype in (F64, C128):
        q, k = normal(4, 2, 3, 9, 4, dtype=dtype)
        t = balancing(q.mH @ q, k.mH @ k)
        q, k = q @ t, k @ torch.linalg.inv(t).mH
        assert torch.allclose(q.mH @ q, k.mH @ k)
        assert torch.allclose(t, t.mH)


def test_rank_deficient_heads_stay_invertible_and_do_not_disturb_others() -> None:
    factors = normal(5, 4, 3, 9, 4)
    factors[3, 1, :, 2] = 0.0  # a lane of one head's keys is dead
    factors[0, 2] = 0.0
    grams = Grams.of(*factors)
    assert regular(grams).tolist() == [True, False, False]
    assert full_rank(grams.k).tolist() == [True, False, True]
    start = linear_distance(solve_linear(grams, "orthogonal"), *factors)
    for method in ("newton", "gradient"):
        u = solve_linear(grams, method)  # type: ignore[arg-type]
        assert bool(torch.isfinite(u).all())
        assert float(torch.linalg.cond(u).max()) < 1e8
        assert bool((linear_distance(u, *factors) <= start * (1 + 1e-12)).all())
        alone = solve_linear(Grams.of(*factors[:, :1]), method)  # type: ignore[arg-type]
        assert torch.allclose(u[:1], alone, atol=1e-6)


@DTYPES
def test_newton_keeps_what_it_is_told_to_keep(dtype: torch.dtype) -> None:
    factors = normal(6, 4, 9, 5, dtype=dtype)
    grams = Grams.of(*factors)
    basis = torch.linalg.qr(normal(7, 5, 5, dtype=dtype))[0].mH
    fixed, free = basis[:2], basis[2:]
    eye = torch.eye(5, dtype=dtype)
    u = newton(grams, eye, free=free)
    assert float((fixed @ u - fixed).abs().max()) <= 1e-12
    value = linear_distance(u, *factors)
    assert value < linear_distance(eye, *factors)
    assert value > linear_distance(newton(grams, eye), *factors)
    # Stationary among the maps that keep them: moves along free rows gain nothing, to first order.
    move = torch.zeros(5, 5, dtype=dtype).requires_grad_()
    (gradient,) = torch.autograd.grad(linear_distance(u @ (eye + move), *factors), move)
    assert float((free @ gradient).abs().max()) <= 1e-3
    assert float((fixed @ gradient).abs().max()) > 0.1


def test_heads_of_no_width() -> None:
    empty = torch.zeros(2, 5, 0, dtype=F64)
    assert solve_linear(Grams.of(empty, empty, empty, empty)).shape == (2, 0, 0)
