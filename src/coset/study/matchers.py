"""The ways of aligning two models that a study compares, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from coset.alignment import Matching, find_match, input_moments
from coset.alignment.sources import default_samples
from coset.architecture import Architecture, LanguageModel
from coset.connect import Path, interpolate_circuits
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
    inputs, targets
        Training data, for the matchers that use any; only those named ``_task`` look at the targets.
    spaces
        The spaces that may move.
    seed
        Of matchers that draw anything.
    steps
        Of learning.
    """

    architecture: Architecture
    reference: Parameters
    other: Parameters
    layers: tuple[int, ...] | None
    inputs: Tensor
    targets: Tensor | None = None
    spaces: tuple[str, ...] = SPACES
    seed: int = 0
    steps: int = 600


Matcher = Callable[[Case], Parameters]
"""From a case to the other model, the same function, expressed in the reference's gauge."""


def _naive(case: Case) -> Parameters:
    return case.other


# Measured on the demo's models, twice as many passes lower the squared distance by 0.1 % at most and leave the barrier.
_WEIGHTS = Matching("weights", cycles=20)


def _aligned(case: Case, how: Matching, *, data: bool = False, metric: Mapping[str, Tensor] | None = None) -> Parameters:
    inputs = _few(case, 1 << 17 if how.matcher == "learned" else 1 << 15)
    found = find_match(
        case.architecture,
        case.reference,
        case.other,
        replace(how, seed=case.seed, learning=replace(how.learning, steps=case.steps)),
        inputs=inputs if data else None,
        targets=None if case.targets is None or not data else case.targets[: len(inputs)],
        metric=metric,
        spaces=case.spaces,
        layers=case.layers,
    )
    moved = found.transform(case.other)
    # Computed in float64; this is the one cast, to what the model came in.
    return {name: moved[name].to(x.dtype) for name, x in case.other.items()}


def _few(case: Case, positions: int = 1 << 15) -> Tensor:
    """As much of the data as moments need, or as learning reads without repeating itself often."""
    return case.inputs[: default_samples(case.architecture, case.inputs.shape[1], positions)]


def _two_stage(case: Case) -> Parameters:
    return _aligned(replace(case, spaces=HEADS), _WEIGHTS)


def _two_stage_metric(case: Case) -> Parameters:
    metric = input_moments(case.architecture, case.reference, _few(case))
    return _aligned(replace(case, spaces=HEADS), _WEIGHTS, metric=metric)


def _self_or_probes(case: Case) -> Parameters:
    writes = isinstance(case.architecture.outputs, LanguageModel) and case.architecture.causal
    return _aligned(case, Matching("self" if writes else "probes"))


MATCHERS: Mapping[str, Matcher] = {
    "naive": _naive,
    "two_stage": _two_stage,
    "two_stage_metric": _two_stage_metric,
    "weights": lambda case: _aligned(case, _WEIGHTS),
    "probes": lambda case: _aligned(case, Matching("probes")),
    "self": _self_or_probes,
    "circuits": lambda case: _aligned(case, _WEIGHTS),
    "activations": lambda case: _aligned(case, Matching("activations"), data=True),
    "search": lambda case: _aligned(case, Matching("search"), data=True),
    "learned": lambda case: _aligned(case, Matching("learned"), data=True),
    "learned_task": lambda case: _aligned(case, Matching("learned", task=True), data=True),
    "learned_free": lambda case: _aligned(case, Matching("learned")),
}
"""``naive`` does nothing; ``two_stage`` is the paper's, and its ``_metric`` variant weighs the input side by its second moments; the others are
those of `coset.alignment.matchers`. ``circuits`` aligns by weights and takes the path of :data:`PATHS`. ``learned`` looks at inputs but not at
labels; ``learned_task`` looks at both, and ``learned_free`` at no data at all: text that language models write, probes for others; so does
``self``."""

LEARNED = frozenset({"learned", "learned_task", "learned_free"})
"""Matchers that learn: those to which the number of steps matters."""

PATHS: Mapping[str, Path] = {"circuits": interpolate_circuits}
"""Matchers whose models are joined by another path than the segment: ``circuits`` mixes the products inside heads instead of their factors."""


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
