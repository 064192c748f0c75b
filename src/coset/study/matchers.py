"""The ways of aligning two models that a study compares, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from coset.alignment import align, input_moments
from coset.architecture import Architecture
from coset.errors import CosetError
from coset.parameters import Parameters
from coset.transform import SPACES

HEADS = ("heads", "qk", "vo")
"""The spaces inside attention: order of the heads, and the basis inside each head."""


@dataclass(frozen=True)
class Case:
    """Two models to align.

    Attributes
    ----------
    layers
        The layers that may move; None for all of them.
    inputs
        Data from which a matcher may take second moments of activations.
    """

    architecture: Architecture
    reference: Parameters
    other: Parameters
    layers: tuple[int, ...] | None
    inputs: Tensor


Matcher = Callable[[Case], Parameters]
"""From a case to the other model, the same function, expressed in the reference's gauge."""


def _naive(case: Case) -> Parameters:
    return case.other


_CYCLES = 20
"""Passes over all spaces. Measured on the demo's models, twice as many lower the squared distance by 0.1 % at most and leave the barrier."""


def _aligned(case: Case, spaces: tuple[str, ...], metric: Mapping[str, Tensor] | None = None) -> Parameters:
    found = align(
        case.architecture, case.reference, case.other, spaces=spaces, layers=case.layers, metric=metric, cycles=_CYCLES
    ).parameters
    # Computed in float64; this is the one cast, to what the model came in.
    return {name: found[name].to(x.dtype) for name, x in case.other.items()}


def _two_stage(case: Case) -> Parameters:
    return _aligned(case, HEADS)


def _two_stage_metric(case: Case) -> Parameters:
    return _aligned(case, HEADS, input_moments(case.architecture, case.reference, case.inputs))


def _full(case: Case) -> Parameters:
    return _aligned(case, SPACES)


MATCHERS: Mapping[str, Matcher] = {
    "naive": _naive,
    "two_stage": _two_stage,
    "two_stage_metric": _two_stage_metric,
    "full": _full,
}
"""``naive`` does nothing; ``two_stage`` is the paper's; ``_metric`` weighs the input side by its second moments; ``full`` moves all spaces."""


def matcher(name: str) -> Matcher:
    """The matcher called `name`.

    Raises
    ------
    CosetError
        If there is none; the message lists them.
    """
    if name not in MATCHERS:
        raise CosetError(f"matcher: expected one of {', '.join(MATCHERS)}, got {name!r}")
    return MATCHERS[name]
