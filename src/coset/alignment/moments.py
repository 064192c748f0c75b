"""Second moments of activations, accumulated as inputs stream by: memory does not depend on the number of samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from coset.architecture import Architecture
from coset.parameters import Parameters
from coset.transformer import forward


@dataclass
class Moments:
    """Second moments of rows x [.., n]: ``Σ xᵀx`` [n, n], ``Σ x`` [n], and how many rows; float64."""

    square: Tensor
    total: Tensor
    count: int = 0

    @staticmethod
    def zero(n: int) -> Moments:
        """Nothing seen yet."""
        return Moments(torch.zeros(n, n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64))

    def add(self, rows: Tensor) -> None:
        """Accumulate rows [.., n]."""
        x = rows.reshape(-1, rows.shape[-1])
        self.square += (x.mT @ x).to("cpu", torch.float64)
        self.total += x.sum(0).to("cpu", torch.float64)
        self.count += len(x)

    def mean(self, centred: Tensor | None = None) -> Tensor:
        """``E[xᵀx]`` [n, n]; the lanes where `centred` [n] is true are measured from their mean."""
        moment, mean = self.square / self.count, self.total / self.count
        if centred is None:
            return moment
        shift = torch.where(centred, mean, torch.zeros_like(mean))
        # E[(x - s)ᵀ(x - s)], with s = 0 in the other lanes.
        return moment - mean[:, None] * shift - shift[:, None] * mean + shift[:, None] * shift


def square_root(moment: Tensor) -> Tensor:
    """F [n, n] with ``FᵀF`` = `moment` (symmetric, positive semidefinite): columns whose inner products are the moments."""
    # Cholesky is far quicker; rounding makes a rank-deficient moment slightly indefinite, and then it fails.
    factor, fault = torch.linalg.cholesky_ex(moment, upper=True)
    if int(fault) == 0:
        return factor
    values, vectors = torch.linalg.eigh(moment)
    return (vectors * values.clamp_min(0).sqrt()).mT


@dataclass
class Cross:
    """Moments of two models' rows x, y [.., n] that correspond: ``Σ xᵀy`` [n, n], sums and sums of squares of each; float64."""

    product: Tensor
    totals: list[Tensor]
    squares: list[Tensor]
    count: int = 0

    @staticmethod
    def zero(n: int) -> Cross:
        """Nothing seen yet."""
        totals, squares = ([torch.zeros(n, dtype=torch.float64) for _ in range(2)] for _ in range(2))
        return Cross(torch.zeros(n, n, dtype=torch.float64), totals, squares)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Accumulate rows of both models, [.., n] each."""
        x, y = (z.reshape(-1, z.shape[-1]) for z in (x, y))
        self.product += (x.mT @ y).to("cpu", torch.float64)
        for side, z in enumerate((x, y)):
            self.totals[side] += z.sum(0).to("cpu", torch.float64)
            self.squares[side] += z.square().sum(0).to("cpu", torch.float64)
        self.count += len(x)

    def covariance(self) -> Tensor:
        """``E[(x − E x)ᵀ (y − E y)]``, [n, n]."""
        return self.product / self.count - torch.outer(self.totals[0] / self.count, self.totals[1] / self.count)

    def variances(self) -> tuple[Tensor, Tensor]:
        """Variance of every lane of x and of y."""
        a, b = ((s / self.count - (t / self.count).square()).clamp_min(0) for s, t in zip(self.squares, self.totals, strict=True))
        return a, b

    def correlation(self) -> Tensor:
        """Correlations of the lanes of x (rows) with those of y (columns); zero where a lane is constant."""
        a, b = self.variances()
        # A lane whose variance is rounding of its mean square is constant.
        alive = [v > 1e-10 * (s / self.count) for v, s in zip((a, b), self.squares, strict=True)]
        scale = [torch.where(ok, v, torch.ones_like(v)).rsqrt() * ok for ok, v in zip(alive, (a, b), strict=True)]
        return self.covariance() * scale[0][:, None] * scale[1]


def input_moments(architecture: Architecture, parameters: Parameters, inputs: Tensor, *, batch: int = 256) -> dict[str, Tensor]:
    """The metric Σ: second moments ``E[(x, 1)ᵀ (x, 1)]`` of the inputs of every attention and MLP.

    Parameters
    ----------
    inputs
        Token ids [samples, length] or patches [samples, patches, features]; no labels are needed.
    batch
        Samples a forward pass; memory does not depend on the number of samples.

    Returns
    -------
    dict
        ``layers.i.attention.input`` and ``layers.i.mlp.input`` -> [width + 1, width + 1], float64: the metric of `align`.
    """
    found: dict[str, Moments] = {}

    def tap(site: str, value: Tensor) -> None:
        if site.endswith((".attention.input", ".mlp.input")):
            x = value.reshape(-1, value.shape[-1]).to(torch.float64)
            found.setdefault(site, Moments.zero(x.shape[-1] + 1)).add(torch.cat([x, torch.ones_like(x[:, :1])], -1))

    with torch.no_grad():
        for part in torch.split(inputs, batch):
            forward(architecture, parameters, part, tap=tap)
    return {site: moments.mean() for site, moments in found.items()}


def mean_moments(*metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """The average of several models' metrics, site by site: what both ends of a segment read."""
    return {site: torch.stack([m[site] for m in metrics]).mean(0) for site in metrics[0]}


def run_side_by_side(
    architecture: Architecture,
    a: Parameters,
    b: Parameters,
    inputs: Tensor,
    visit: Callable[[str, Tensor, Tensor], None],
    *,
    batch: int,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Run both models on the same inputs, and call ``visit(site, x_A, x_B)`` at every site of the forward pass; a batch at a time."""
    parts = torch.split(inputs, batch)
    with torch.no_grad():
        for done, part in enumerate(parts, 1):
            held: dict[str, Tensor] = {}
            forward(architecture, a, part, tap=held.__setitem__)
            # Each site is forgotten as soon as its partner has come.
            forward(architecture, b, part, tap=lambda site, y, held=held: visit(site, held.pop(site), y))  # type: ignore[misc]
            if progress is not None:
                progress(done, len(parts))


__all__ = ["Cross", "Moments", "input_moments", "mean_moments", "run_side_by_side", "square_root"]
