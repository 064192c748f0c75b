"""The forward evidence: the outputs of both models on random inputs, against what one random rounding does to them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from coset.architecture import Architecture, Classifier, Experts, LearnedPositions, Tokens
from coset.equivalence.sides import LARGE, Doubled, Rounded, Side
from coset.errors import CosetError
from coset.parameters import Parameters, check, count
from coset.transformer import forward, random_inputs

OUTPUT_FACTOR = 5.0
"""Largest difference of the outputs, in multiples of what one random rounding does to them: of the maxima over positions, and of the medians."""

LONGEST = 32_768
"""Most tokens of an input."""

EXACT = 1e-12
"""Relative difference of outputs that float64 arithmetic may make by itself."""


@dataclass(frozen=True)
class Outputs:
    """The outputs of both models on random inputs.

    Attributes
    ----------
    difference
        Largest over positions of ‖y_A − y_B‖ / ‖y_B‖.
    typical
        Median over positions of the same.
    noise, typical_noise
        The same of one random rounding of a model, the larger of the two models'.
    positions
        How far into the context the inputs reach: positions 0 to `positions` − 1.
    tipped
        For a mixture of experts, the share of positions that differ by ten times the median noise or more: of the two models, and of one model
        after a rounding. There the chosen experts may change.
    """

    difference: float
    typical: float
    noise: float
    typical_noise: float
    positions: int
    tipped: tuple[float, float] | None = None

    @property
    def significant(self) -> bool:
        """Whether rounding does not explain the difference. Where a router chooses, single positions may tip over: then their number decides."""
        if self.typical > OUTPUT_FACTOR * self.typical_noise + EXACT:
            return True
        if self.tipped is not None:
            return self.tipped[0] > 5 * self.tipped[1] + 0.02
        return self.difference > OUTPUT_FACTOR * self.noise + EXACT


@dataclass(frozen=True)
class Probe:
    """Random inputs, and the function of a model on them: logits, or log-probabilities where only those count."""

    architecture: Architecture
    inputs: Tensor
    types: Tensor | None

    @staticmethod
    def random(architecture: Architecture, samples: int, length: int | None, seed: int) -> Probe:
        tokens = isinstance(architecture.inputs, Tokens)
        if tokens and length is not None and length > LONGEST:
            raise CosetError(f"length: expected at most {LONGEST:,} tokens, got {length:,}")
        inputs = random_inputs(architecture, samples, length=length if tokens else None, seed=seed, dtype=torch.float64)
        types = None
        if isinstance(architecture.inputs, Tokens) and architecture.inputs.types:
            types = torch.randint(architecture.inputs.types, inputs.shape, generator=torch.Generator().manual_seed(seed + 1))
        return Probe(architecture, inputs, types)

    def short(self, length: int) -> Probe:
        """The first positions only, where the architecture lets inputs be shortened."""
        if not isinstance(self.architecture.inputs, Tokens):
            return self
        return Probe(self.architecture, self.inputs[:, :length], None if self.types is None else self.types[:, :length])

    def reading(self, tensor: str, row: int) -> Probe:
        """The same inputs, changed where they do not read a row of an input table so that they do."""
        a = self.architecture
        if tensor == "embed.tokens" and not bool((self.inputs == row).any()):
            inputs = self.inputs.clone()
            inputs[:, 0] = row  # from where the other positions see it, too
            return Probe(a, inputs, self.types)
        if tensor == "embed.positions" and isinstance(a.inputs, Tokens):
            needed = row + 1 - (a.positions.offset if isinstance(a.positions, LearnedPositions) else 0)
            times = -(-needed // self.inputs.shape[1])
            if times > 1:
                types = None if self.types is None else self.types.repeat(1, times)
                return Probe(a, self.inputs.repeat(1, times), types).short(needed)
        return self

    @property
    def stepwise(self) -> bool:
        """Whether the outputs at a position depend on the inputs up to there alone."""
        a = self.architecture
        return a.causal and isinstance(a.inputs, Tokens) and not isinstance(a.outputs, Classifier)

    def beginning(self, outputs: Tensor, near: Probe) -> Tensor:
        """From this probe's outputs those on the inputs of a shorter one, for stepwise models."""
        samples, length = self.inputs.shape
        return outputs.reshape(samples, length, -1)[:, : near.inputs.shape[1]].flatten(0, 1)

    def __call__(self, parameters: Parameters, architecture: Architecture | None = None) -> Tensor:
        """[points, classes or width]; parameters of any dtype, computed in float64."""
        a = self.architecture if architecture is None else architecture
        out = forward(a, Doubled(parameters), self.inputs, types=self.types)
        return (out.log_softmax(-1) if a.probabilities else out).flatten(0, -2)


def distances(x: Tensor, y: Tensor) -> Tensor:
    """Relative distance point by point; points of tiny output count by the typical size."""
    size = y.norm(dim=-1)
    return (x - y).norm(dim=-1) / torch.maximum(size, size.square().mean().sqrt() * 1e-3).clamp_min(torch.finfo(x.dtype).tiny)


def sizes(architecture: Architecture) -> tuple[int, int]:
    """Samples and length of the inputs: far into the context for small models, an affordable way for large ones."""
    longest = architecture.length or 512
    if count(architecture) > LARGE:
        return 1, min(longest, 512)
    return 2, min(longest, 512)


def measure(probe: Probe, a: Side, b: Side, seed: int) -> Outputs:
    """The outputs of both, and what one random rounding of each does on a shorter stretch of the same inputs."""
    near = probe.short(64 if count(probe.architecture) > LARGE else 128)
    y_a, y_b = probe(a.parameters), probe(b.parameters)
    apart = distances(y_a, y_b)
    plain = [probe.beginning(y, near).clone() for y in (y_a, y_b)] if probe.stepwise else [near(side.parameters) for side in (a, b)]
    del y_a, y_b
    roundings = [distances(near(Rounded(side, 7919 + 2 * seed + i)), y) for i, (side, y) in enumerate(zip((a, b), plain, strict=True))]
    noise, typical = (max(float(value) for value in values) for values in zip(*((x.max(), x.median()) for x in roundings), strict=True))
    tipped = None
    if any(isinstance(layer.mlp, Experts) for layer in probe.architecture.layers):
        limit = 10 * typical + EXACT
        tipped = float((apart > limit).double().mean()), max(float((x > limit).double().mean()) for x in roundings)
    return Outputs(float(apart.max()), float(apart.median()), noise, typical, probe.inputs.shape[1], tipped)


def invariance_error(
    architecture: Architecture,
    a: Parameters,
    b: Parameters,
    *,
    outputs: Literal["logits", "probabilities"] | None = None,
    samples: int | None = None,
    length: int | None = None,
    seed: int = 0,
) -> float:
    """Relative Frobenius distance of the outputs of two models on the same random inputs, computed in float64.

    Parameters
    ----------
    architecture
        Of both.
    a, b
        Canonical tensors by name, of any floating dtype.
    outputs
        Compare logits, or log-probabilities; default what the architecture says.
    samples, length
        Inputs, and tokens in each; by default few samples that reach far into the context.
    seed
        Of the inputs.

    Raises
    ------
    CosetError
        If the tensors are not those of the architecture, or `length` is not possible.

    Examples
    --------
    >>> from coset.architecture import uniform
    >>> from coset.transformer import initialise
    >>> architecture = uniform(pe="rope", layers=1, width=8, heads=2, vocab=11)
    >>> model = initialise(architecture, seed=0)
    >>> invariance_error(architecture, model, model)
    0.0
    """
    architecture = with_outputs(architecture, outputs)
    check(architecture, a, "a")
    check(architecture, b, "b")
    usual = sizes(architecture)
    probe = Probe.random(architecture, usual[0] if samples is None else samples, usual[1] if length is None else length, seed)
    y_a, y_b = probe(a), probe(b)
    return float((y_a - y_b).norm() / y_b.norm())


def with_outputs(architecture: Architecture, outputs: Literal["logits", "probabilities"] | None) -> Architecture:
    """The architecture with what counts as its outputs set; None leaves it."""
    return architecture if outputs is None else dataclasses.replace(architecture, probabilities=outputs == "probabilities")
