"""Align one pair of models with one matcher, and evaluate the segment between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from coset.architecture import Architecture
from coset.connect import Curve, barrier_of, evaluate, segment
from coset.parameters import Parameters
from coset.study.data import Dataset
from coset.study.matchers import HEADS, PATHS, Case, matcher
from coset.study.models import architecture
from coset.study.protocol import Scope, scope_layers
from coset.study.store import read_tensors
from coset.study.units import data, train
from coset.transform import SPACES


def run(config: Mapping[str, Any], place: Mapping[str, Any], inputs: Mapping[str, Path], folder: Path) -> dict[str, Any]:
    """The curve, its barriers and area, and the distance of the aligned models.

    `config` holds ``model`` and ``shape`` (see `coset.study.models`), ``scope``, ``matcher``, ``points`` and ``device``, and
    ``learning_steps`` for a matcher that learns.
    """
    arch = architecture(config["model"], config["shape"])
    samples = data.read(inputs["data"])
    reference, other = (read_tensors(inputs[role] / train.MODEL) for role in ("reference", "other"))
    aligned = matcher(config["matcher"])(case(arch, reference, other, samples, config))
    path = PATHS.get(config["matcher"], segment)
    curve = evaluate(
        arch, reference, aligned, samples.test_inputs, samples.test_targets, points=config["points"], device=config["device"], path=path
    )
    return {**measures(curve), "distance": distance(reference, aligned)}


def case(arch: Architecture, reference: Parameters, other: Parameters, samples: Dataset, config: Mapping[str, Any]) -> Case:
    """What a matcher may move: the spaces and layers in which models that differ by a scope may differ.

    The rest of the two models shares a gauge and must stay in it.
    """
    scope: Scope = config["scope"]
    found = Case(
        arch,
        reference,
        other,
        layers=scope_layers(arch, scope),
        inputs=samples.train_inputs,
        targets=samples.train_targets,
        spaces=SPACES if scope == "whole" else (*HEADS, "neurons") if scope.endswith("-layer") else HEADS,
    )
    return replace(found, steps=config["learning_steps"]) if "learning_steps" in config else found


def measures(curve: Curve) -> dict[str, Any]:
    """Barriers and area of a curve, and the curve itself."""
    found = barrier_of(curve)
    return {
        "loss_barrier": found.loss,
        "accuracy_barrier": found.accuracy,
        "loss_area": area(curve),
        "points": list(curve.points),
        "loss": list(curve.loss),
        "accuracy": list(curve.accuracy),
    }


def area(curve: Curve) -> float:
    r"""Mean excess of the loss over the chord, :math:`\int_0^1 L(t) - (1-t) L(0) - t L(1)\,dt`, by the trapezoidal rule."""
    excess = [x - (1 - t) * curve.loss[0] - t * curve.loss[-1] for t, x in zip(curve.points, curve.loss, strict=True)]
    steps = zip(curve.points, curve.points[1:], excess, excess[1:], strict=False)
    return sum((b - a) * (x + y) / 2 for a, b, x, y in steps)


def distance(reference: Parameters, other: Parameters) -> float:
    """Relative Euclidean distance over all tensors, in float64."""
    gap = sum(float((x.double() - other[name].double()).square().sum()) for name, x in reference.items())
    return math.sqrt(gap / sum(float(x.double().square().sum()) for x in reference.values()))
