r"""Stage 2: the change of basis inside a head.

Everything here works on Gram matrices, so that the cost of a step does not depend on the width of the model, and on any leading
batch (heads, planes).
A head's queries Q and keys K [rows, m] (complex lanes for planes that rotate) change as ``Q -> Q U``, ``K -> K U^{-H}``.
Every solver minimises

    f(U) = ‖Q_A − Q_B U‖² + ‖K_A − K_B U^{-H}‖²

over its group. Values and outputs are the same problem with Q = V and K = Oᵀ. Source: "Functional Equivalence in Attention" (ICML 2026),
stage 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from coset.groups import polar

Planes = Literal["exact", "brent"]
Linear = Literal["newton", "gradient", "orthogonal"]


@dataclass(frozen=True)
class Grams:
    """What the objective needs of a pair of heads: all [*batch, m, m], real or complex.

    ``q`` = Q_BᴴQ_B, ``k`` = K_BᴴK_B, ``cross_q`` = Q_BᴴQ_A, ``cross_k`` = K_BᴴK_A, and ``q_ref`` = Q_AᴴQ_A, ``k_ref`` = K_AᴴK_A.
    """

    q: Tensor
    k: Tensor
    cross_q: Tensor
    cross_k: Tensor
    q_ref: Tensor
    k_ref: Tensor

    @staticmethod
    def of(q_a: Tensor, k_a: Tensor, q_b: Tensor, k_b: Tensor) -> Grams:
        """From the factors themselves, [*batch, rows, m]."""
        return Grams(q_b.mH @ q_b, k_b.mH @ k_b, q_b.mH @ q_a, k_b.mH @ k_a, q_a.mH @ q_a, k_a.mH @ k_a)

    @property
    def reference(self) -> Tensor:
        """‖Q_A‖² + ‖K_A‖², [*batch]."""
        return _trace(self.q_ref) + _trace(self.k_ref)


def _trace(x: Tensor) -> Tensor:
    return x.diagonal(dim1=-2, dim2=-1).sum(-1).real


def _inner(x: Tensor, y: Tensor) -> Tensor:
    """Re tr(xᴴ y)."""
    return (x.conj() * y).sum((-2, -1)).real


def objective(grams: Grams, u: Tensor, w: Tensor | None = None) -> Tensor:
    """f(U) for U [*batch, m, m]; `w` is its inverse where that is known. Returns [*batch]."""
    w = torch.linalg.inv(u) if w is None else w
    moved_q = _inner(u, grams.q @ u) - 2 * _inner(u, grams.cross_q)
    moved_k = _inner(w.mH, grams.k @ w.mH) - 2 * _inner(w.mH, grams.cross_k)
    return grams.reference + moved_q + moved_k


# --- planes: C^× ----------------------------------------------------------------------------------------------------


def solve_planes(alpha: Tensor, beta: Tensor, q: Tensor, k: Tensor, method: Planes = "exact") -> Tensor:
    r"""The complex factor of every plane, ``z = r e^{iφ}``, that minimises ‖q_A − z q_B‖² + ‖k_A − k_B / z̄‖².

    With α = ⟨q_B, q_A⟩ and β = ⟨k_B, k_A⟩ (conjugate-linear in B) the best phase at radius r is arg(αr + β/r), which leaves

        h(r) = r²‖q_B‖² + ‖k_B‖²/r² − 2|αr + β/r|.

    h may have two minima. The lower one is alone on a known side of the radius at which both norms are equal: the *global* minimum, for
    all planes at once.

    Parameters
    ----------
    alpha, beta : Tensor [*batch], real or complex
        Real values give real factors, with a sign for a phase.
    q, k : Tensor [*batch]
        ‖q_B‖² and ‖k_B‖². Where either vanishes the infimum may not be attained; there the factor keeps r = 1.
    method
        ``exact``, or ``brent``: scipy's Brent search for each plane in turn, as the paper does.

    Returns
    -------
    Tensor [*batch], dtype of `alpha`.
    """
    real = q.dtype
    alive = (q > 0) & (k > 0)
    one = torch.ones_like(q)
    q_safe, k_safe = torch.where(alive, q, one), torch.where(alive, k, one)
    # In t = s sqrt(q/k) both norms are equal to sqrt(qk); dividing by it leaves numbers of order one.
    unit = (q_safe * k_safe).sqrt()
    balance = (k_safe / q_safe).sqrt()
    a = alpha * balance.sqrt() / unit
    b = beta / balance.sqrt() / unit
    radius = _brent(a, b) if method == "brent" else _exact(a, b)
    radius = torch.where(alive, radius * balance.sqrt(), one)
    direction = alpha * radius + beta / radius
    size = direction.abs()
    phase = torch.where(size > 0, direction / torch.where(size > 0, size, torch.ones_like(size)), torch.ones_like(direction))
    return (radius * phase).to(alpha.dtype if alpha.is_complex() else real)


def _exact(a: Tensor, b: Tensor) -> Tensor:
    """Global minimiser r of h(r) = r² + 1/r² − 2|ar + b/r|, [*batch].

    Let |a| >= |b| (1/r exchanges them). Then |ar + b/r| >= |a/r + br| for r >= 1, so h(r) <= h(1/r) and the minimum lies in r >= 1. With
    t = r², N = |a|² t − |b|² / t and D = |ar + b/r|, h falls while t − 1/t < N / D. The ratio of the two sides, (t − 1/t) D / N,
    increases for t >= 1, so h falls and then rises, once: bisection cannot miss the minimum, and Newton steps in log t make it fast.
    """
    swapped = a.abs() < b.abs()
    cosine = 2 * (a * b.conj()).real
    sizes = (a * a.conj()).real, (b * b.conj()).real
    p, q = torch.maximum(*sizes), torch.minimum(*sizes)
    tiny, noise = torch.finfo(p.dtype).tiny, torch.finfo(p.dtype).eps
    low = torch.zeros_like(p)
    high = 2 * torch.log1p(p.sqrt() + q.sqrt())  # from t − 1/t <= (|a| + |b|) r
    x = high / 2
    for _ in range(60):
        t = torch.exp(x)
        back = 1 / t
        upper, lower = p * t, q * back
        square = torch.maximum(upper + lower + cosine, noise * upper).clamp_min(tiny)
        root = square.sqrt()
        ratio = (upper - lower) / root
        slope = t - back - ratio
        curve = t + back + (ratio * ratio / 2 - upper - lower) / root
        rises = slope >= 0
        low, high = torch.where(rises, low, x), torch.where(rises, x, high)
        newton = x - slope / curve
        moved = torch.where((curve > 0) & (newton >= low) & (newton <= high), newton, (low + high) / 2)
        settled = bool(((moved - x).abs() <= 1e-8).all())  # a last Newton step squares that
        x = moved
        if settled:
            break
    return torch.exp(torch.where(swapped, -x, x) / 2)


def _brent(a: Tensor, b: Tensor) -> Tensor:
    """One-dimensional search plane by plane, over log r from around the balanced radius."""
    flat_a, flat_b = a.detach().cpu().reshape(-1).numpy(), b.detach().cpu().reshape(-1).numpy()
    out = np.empty(flat_a.shape)
    for i, (x, y) in enumerate(zip(flat_a, flat_b, strict=True)):
        found = minimize_scalar(
            lambda t, x=x, y=y: np.exp(2 * t) + np.exp(-2 * t) - 2 * abs(x * np.exp(t) + y * np.exp(-t)),
            bracket=(-1.0, 1.0),
            method="brent",
        )
        out[i] = np.exp(found.x)
    return torch.from_numpy(out).reshape(a.shape).to(device=a.device, dtype=a.real.dtype)


# --- GL(m, R) and GL(m, C) ------------------------------------------------------------------------------------------


def _spd_power(x: Tensor, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(x)
    return (vectors * values.clamp_min(0).pow(power)[..., None, :]) @ vectors.mH


def balancing(q: Tensor, k: Tensor) -> Tensor:
    """The positive definite T for which Q T and K T^{-H} have equal Gram matrices, [*batch, m, m].

    T² is the geometric mean of q^{-1} and k, for Gram matrices q and k of full rank.
    """
    root, inverse = _spd_power(q, 0.5), _spd_power(q, -0.5)
    return _spd_power(inverse @ _spd_power(root @ k @ root, 0.5) @ inverse, 0.5)


def full_rank(gram: Tensor) -> Tensor:
    """Whether each Gram matrix [*batch, m, m] is numerically of full rank (factor condition below about 1e6), [*batch]."""
    values = torch.linalg.eigvalsh(gram)
    return (values[..., 0] > 1e-12 * values[..., -1]) & (values[..., -1] > 0)


def regular(grams: Grams) -> Tensor:
    """Whether queries and keys of both models have full rank, [*batch]: elsewhere the minimum need not exist."""
    return full_rank(grams.q) & full_rank(grams.k) & full_rank(grams.q_ref) & full_rank(grams.k_ref)


def solve_linear(grams: Grams, method: Linear = "newton", *, steps: int = 100, tolerance: float = 1e-7) -> Tensor:
    """U [*batch, m, m] in GL(m) (real or complex, as the Gram matrices are) that minimises f.

    ``newton``
        From the better of two Procrustes starts, in the raw and in the balanced basis (the second is exact when an exact solution
        exists). Each step solves Newton's equation in the Lie algebra by conjugate gradients (:func:`newton`), then moves along
        ``U exp(tX)`` with t halved until f falls. O(m³) a step, whatever the width of the model. A local minimum; f never rises.
    ``gradient``
        The paper's: gradient descent on U with backtracking, from the Procrustes start in the raw basis.
    ``orthogonal``
        That start alone: the isometry that maximises ⟨Q_B U, Q_A⟩ + ⟨K_B U, K_A⟩.

    Where a factor is rank deficient (a dead head) the minimum need not exist; the result is then the isometry, or the least-squares
    solution of the linear equations if it is better: exact where the two heads are equivalent.
    """
    rotation = polar(grams.cross_q + grams.cross_k)
    if method == "orthogonal" or rotation.shape[-1] == 0:
        return rotation
    healthy = regular(grams)
    eye = torch.eye(rotation.shape[-1], dtype=rotation.dtype, device=rotation.device)

    def only_healthy(x: Tensor) -> Tensor:
        return torch.where(healthy[..., None, None], x, eye)

    safe = Grams(*(only_healthy(x) for x in (grams.q, grams.k, grams.cross_q, grams.cross_k, grams.q_ref, grams.k_ref)))
    start = only_healthy(rotation)
    if method == "gradient":
        u = _descend(safe, start, steps=steps * 20, tolerance=tolerance)
    else:
        t_a, t_b = balancing(safe.q_ref, safe.k_ref), balancing(safe.q, safe.k)
        inv_a, inv_b = torch.linalg.inv(t_a), torch.linalg.inv(t_b)
        balanced = t_b @ polar(t_b.mH @ safe.cross_q @ t_a + inv_b @ safe.cross_k @ inv_a.mH) @ inv_a
        better = objective(safe, balanced) < objective(safe, start)
        u = newton(safe, torch.where(better[..., None, None], balanced, start), steps=steps, tolerance=tolerance)
    if bool(healthy.all()):
        return u
    linear = least_squares(grams)
    invertible = torch.linalg.cond(linear) < 1e8
    linear = torch.where(invertible[..., None, None], linear, rotation)
    better = objective(grams, linear) < objective(grams, rotation)
    return torch.where(healthy[..., None, None], u, torch.where(better[..., None, None], linear, rotation))


def least_squares(grams: Grams) -> Tensor:
    """The U that minimises ‖Q_B U − Q_A‖² + ‖K_A Uᴴ − K_B‖²: linear equations, so rank does not matter.

    The normal equations ``G_Q U + U G_K = C_Q + C_K``, with the Grams of Q_B and K_A, are a Sylvester equation; what no equation determines
    (directions that vanish in both factors) is filled with ones.
    """
    values_q, vectors_q = torch.linalg.eigh(grams.q)
    values_k, vectors_k = torch.linalg.eigh(grams.k_ref)
    right = vectors_q.mH @ (grams.cross_q + grams.cross_k) @ vectors_k
    free = (values_q <= 1e-12 * values_q[..., -1:])[..., :, None] & (values_k <= 1e-12 * values_k[..., -1:])[..., None, :]
    total = torch.where(free, 1.0, values_q[..., :, None] + values_k[..., None, :])
    ones = torch.eye(right.shape[-1], dtype=right.dtype, device=right.device)
    return vectors_q @ torch.where(free, ones, right / total) @ vectors_k.mH


def newton(grams: Grams, u: Tensor, *, steps: int = 100, tolerance: float = 1e-7, free: Tensor | None = None) -> Tensor:
    """Descend from U along ``U exp(tX)``; f never rises.

    With `free` (orthonormal rows [n, m]) only steps X whose columns lie in their span are taken, so that ``v U`` stays as it is for every
    row vector v orthogonal to them.
    """
    value = objective(grams, u)
    # Differences of Gram matrices resolve f to rounding of its terms, no further.
    floor = 1e2 * torch.finfo(value.dtype).eps * grams.reference
    for _ in range(steps):
        step, right = _newton_step(grams, u, free)
        slope = 2 * _inner(step, right)  # how fast f falls along the step
        t = torch.ones_like(value)
        moved, new = u, value
        pending = torch.ones_like(value, dtype=torch.bool)
        for _ in range(30):
            trial = u @ torch.linalg.matrix_exp(t[..., None, None] * step)
            trial_value = objective(grams, trial)
            good = pending & torch.isfinite(trial_value) & (trial_value <= value - 1e-4 * t * slope)
            moved = torch.where(good[..., None, None], trial, moved)
            new = torch.where(good, trial_value, new)
            pending = pending & ~good
            if not bool(pending.any()):
                break
            t = torch.where(pending, t / 2, t)
        fell = value - new
        u, value = moved, new
        if bool((fell <= tolerance * value + floor).all()):
            break
    # One more full step where the steps have become tiny: it is correct to first order even where f is too flat to tell.
    step, _ = _newton_step(grams, u, free)
    trial = u @ torch.linalg.matrix_exp(step)
    near = (torch.linalg.matrix_norm(step) < 1e-3) & (objective(grams, trial) <= value + floor)
    return torch.where(near[..., None, None], trial, u)


def _newton_step(grams: Grams, u: Tensor, free: Tensor | None, iterations: int = 20) -> tuple[Tensor, Tensor]:
    """A descent direction X at U, in the Lie algebra, and R = −½∇f there.

    To second order ``f(U exp X) = f − 2⟨X, R⟩ + ⟨X, H X⟩`` with ``H X = G_Q X + X G_K + ½ (X S + S X)ᴴ`` and S = G_Q − C_Qᴴ + G_K − C_K
    (all at U), zero for an exact fit. ``H X = R`` is solved by conjugate gradients, preconditioned by the Sylvester operator ``G_Q X + X
    G_K`` (the Gauss-Newton approximation, which two eigendecompositions diagonalise), as far as the curvature stays positive.
    """
    w = torch.linalg.inv(u)
    g_q, g_k = u.mH @ grams.q @ u, w @ grams.k @ w.mH
    c_q, c_k = u.mH @ grams.cross_q, w @ grams.cross_k
    right = c_q - g_q - c_k.mH + g_k
    residual = g_q - c_q.mH + g_k - c_k
    values_q, vectors_q = torch.linalg.eigh(g_q if free is None else free @ g_q @ free.mH)
    vectors_q = vectors_q if free is None else free.mH @ vectors_q
    values_k, vectors_k = torch.linalg.eigh(g_k)
    sums = values_q[..., :, None] + values_k[..., None, :]

    def precondition(x: Tensor) -> Tensor:
        return vectors_q @ ((vectors_q.mH @ x @ vectors_k) / sums) @ vectors_k.mH

    step = torch.zeros_like(u)
    rest, moved = right, precondition(right)
    direction, start = moved, _inner(moved, right)
    size, active = start, start > 0
    for iteration in range(iterations):
        bent = direction @ residual + residual @ direction
        image = g_q @ direction + direction @ g_k + bent.mH / 2
        curve = _inner(direction, image)
        # Each direction is measured against the positive definite part of H.
        active = active & (curve > 1e-3 * _inner(direction, image - bent.mH / 2))
        if iteration == 0:
            step = torch.where(active[..., None, None], step, direction)
        rate = torch.where(active, size / torch.where(active, curve, torch.ones_like(curve)), torch.zeros_like(size))[..., None, None]
        step, rest = step + rate * direction, rest - rate * image
        moved = precondition(rest)
        new = _inner(moved, rest)
        active = active & (new > 1e-4 * start)
        if not bool(active.any()):
            break
        direction = moved + (new / torch.where(size > 0, size, torch.ones_like(size)))[..., None, None] * direction
        size = new
    return step, right


def _descend(grams: Grams, u: Tensor, *, steps: int, tolerance: float) -> Tensor:
    """Gradient descent, ∇f = 2[G_Q U − C_Q − WᴴW G_K Wᴴ + Wᴴ C_Kᴴ Wᴴ] with W = U^{-1}; the step doubles after success, halves after failure."""
    value = objective(grams, u)
    rate = 0.5 / torch.linalg.matrix_norm(grams.q, 2).clamp_min(torch.finfo(value.dtype).tiny)
    stalled = torch.zeros_like(value, dtype=torch.int64)
    for _ in range(steps):
        w = torch.linalg.inv(u)
        gradient = 2 * (grams.q @ u - grams.cross_q - w.mH @ (w @ grams.k @ w.mH) + w.mH @ grams.cross_k.mH @ w.mH)
        trial = u - rate[..., None, None] * gradient
        trial_value = objective(grams, trial)
        good = torch.isfinite(trial_value) & (trial_value < value)
        fell = torch.where(good, value - trial_value, torch.zeros_like(value))
        u = torch.where(good[..., None, None], trial, u)
        value = torch.where(good, trial_value, value)
        rate = torch.where(good, rate * 1.2, rate / 2)
        stalled = torch.where(good & (fell > tolerance * value), torch.zeros_like(stalled), stalled + 1)
        if bool((stalled > 10).all()):
            break
    return u
