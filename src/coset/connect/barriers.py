"""Loss and accuracy along a path between two models, and the barrier on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from torch import Tensor

from coset.architecture import Architecture
from coset.connect.paths import Path, segment
from coset.errors import CosetError
from coset.objective import accumulate, check_data
from coset.parameters import Parameters, check
from coset.transformer import forward

DEFINITION = (
    "largest excess over the chord between the ends: loss max_t [L(t) - (1-t) L(0) - t L(1)], accuracy max_t [(1-t) A(0) + t A(1) - A(t)]"
)
"""The barrier used here, in words. Another one in circulation subtracts the mean of the two ends instead of the chord."""


@dataclass(frozen=True)
class Curve:
    """Loss and accuracy at `points` of a segment; the first point is 0, the last is 1."""

    points: tuple[float, ...]
    loss: tuple[float, ...]
    accuracy: tuple[float, ...]

    def __post_init__(self) -> None:
        sizes = (len(self.points), len(self.loss), len(self.accuracy))
        if len(set(sizes)) != 1 or sizes[0] < 2:
            raise CosetError(f"curve: points, loss and accuracy must have one equal length of at least 2, got {sizes}")
        if self.points[0] != 0.0 or self.points[-1] != 1.0 or any(s >= t for s, t in zip(self.points, self.points[1:], strict=False)):
            raise CosetError(f"curve: points must rise from 0 to 1, got {self.points}")
        for t, values in zip(self.points, zip(self.loss, self.accuracy, strict=True), strict=True):
            if not all(map(math.isfinite, values)):
                raise CosetError(
                    f"curve: loss {values[0]} and accuracy {values[1]} at t = {t:.4g} must be finite; a barrier is not defined there"
                )


@dataclass(frozen=True)
class Barrier:
    """Barriers of one segment, never negative; `definition` says what they are."""

    curve: Curve
    loss: float
    accuracy: float
    definition: str = DEFINITION

    def to_json(self) -> dict[str, object]:
        """The record that ``coset barrier --json`` prints."""
        return {
            "points": list(self.curve.points),
            "loss": list(self.curve.loss),
            "accuracy": list(self.curve.accuracy),
            "loss_barrier": self.loss,
            "accuracy_barrier": self.accuracy,
            "definition": self.definition,
        }


def evaluate(
    architecture: Architecture,
    a: Parameters,
    b: Parameters,
    inputs: Tensor,
    targets: Tensor | None = None,
    *,
    path: Path = segment,
    points: int = 25,
    batch: int = 512,
    device: str | torch.device | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Curve:
    """Loss and accuracy at `points` equidistant points of a path from `a` (t = 0) to `b` (t = 1).

    Parameters
    ----------
    a, b
        Two models of `architecture`.
    inputs, targets
        Token ids [n, length] or patches [n, patches, features]; classes [n] or token ids [n, length]. A language model without
        targets is scored on the next token. See :func:`coset.objective.check_data`.
    path
        The straight segment by default; :func:`coset.connect.interpolate_circuits` interpolates circuits in place of their factors.
    points
        How many points, both ends included.
    batch
        Inputs per forward pass.
    device
        Where to compute; by default where `a` is.
    progress
        Called with (points done, points in all).

    Raises
    ------
    CosetError
        If parameters or data do not fit the architecture, if there are fewer than 2 points, or where the loss is not finite.
    """
    if points < 2:
        raise CosetError(f"barrier: expected at least 2 points, got {points}")
    if batch < 1:
        raise CosetError(f"barrier: batch must be positive, got {batch}")
    check(architecture, a, "first model")
    check(architecture, b, "second model")
    check_data(architecture, inputs, targets)
    where = torch.device(device) if device is not None else next(iter(a.values())).device
    a, b = ({name: x.to(where) for name, x in end.items()} for end in (a, b))
    inputs, targets = inputs.to(where), None if targets is None else targets.to(where)
    if inputs.is_floating_point():
        inputs = inputs.to(next(iter(a.values())).dtype)
    grid = tuple(i / (points - 1) for i in range(points))
    scores = []
    for done, t in enumerate(grid, 1):
        place, middle = path(architecture, a, b, t)

        def outputs(x: Tensor, at: Architecture = place, p: Parameters = middle) -> Tensor:
            return forward(at, p, x)

        scores.append(accumulate(architecture, outputs, inputs, targets, batch))
        if progress is not None:
            progress(done, points)
    return Curve(grid, tuple(s.loss for s in scores), tuple(s.accuracy for s in scores))


def barrier_of(curve: Curve) -> Barrier:
    r"""Barriers of a curve that has been measured.

    .. math:: B_\mathrm{loss} = \max_t [L(t) - (1-t) L(0) - t L(1)], \qquad
              B_\mathrm{accuracy} = \max_t [(1-t) A(0) + t A(1) - A(t)].

    Both are 0 at the ends, so neither is negative.
    """

    def excess(values: tuple[float, ...]) -> list[float]:
        return [v - (1 - t) * values[0] - t * values[-1] for t, v in zip(curve.points, values, strict=True)]

    return Barrier(curve, max(0.0, *excess(curve.loss)), max(0.0, *(-x for x in excess(curve.accuracy))))


def barrier(
    architecture: Architecture,
    a: Parameters,
    b: Parameters,
    inputs: Tensor,
    targets: Tensor | None = None,
    *,
    path: Path = segment,
    points: int = 25,
    batch: int = 512,
    device: str | torch.device | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Barrier:
    """Loss and accuracy barrier between two models: :func:`barrier_of` the curve of :func:`evaluate`."""
    return barrier_of(
        evaluate(architecture, a, b, inputs, targets, path=path, points=points, batch=batch, device=device, progress=progress)
    )


def summarise(values: Sequence[float]) -> dict[str, float | None]:
    """Mean over pairs and its standard error (sample standard deviation over the root of the number; None for one pair).

    Pairs that share a model are not independent, so the error is a guide and no confidence interval.

    Raises
    ------
    CosetError
        If there are no values.
    """
    if not values:
        raise CosetError("summary: expected at least one pair of models, got none")
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"mean": fmean(values), "standard_error": error}


def percent_of_naive(aligned: Sequence[float], naive: Sequence[float]) -> float | None:
    """Mean of the aligned barriers in % of the mean of the naive ones (a ratio of means, not a mean of ratios); None if naive is 0.

    Raises
    ------
    CosetError
        If the two are not over the same, positive number of pairs.
    """
    if len(aligned) != len(naive) or not naive:
        raise CosetError(f"summary: aligned and naive barriers must cover the same pairs, got {len(aligned)} and {len(naive)}")
    mean = fmean(naive)
    return 100.0 * fmean(aligned) / mean if mean > 0 else None
