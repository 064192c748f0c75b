"""Train one model: a base from scratch, or a copy of a base with part of it drawn afresh."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from coset.connect import score
from coset.study.models import architecture
from coset.study.protocol import retrain
from coset.study.store import read_tensors, write_tensors
from coset.study.training import Recipe, train
from coset.study.units import data
from coset.transformer import initialise

MODEL = "model.safetensors"
"""The file of the trained weights."""
_POINTS = 60
"""Points of a training curve."""


def run(config: Mapping[str, Any], place: Mapping[str, Any], inputs: Mapping[str, Path], folder: Path) -> dict[str, Any]:
    """Write ``model.safetensors``.

    `config` holds ``model`` and ``shape`` (see `coset.study.models`), ``recipe`` and the ``fraction`` of its length, ``seed``, ``device``,
    and ``scope`` and ``freeze`` if the input ``base`` is there.
    """
    arch = architecture(config["model"], config["shape"])
    device, seed = config["device"], config["seed"]
    samples = data.read(inputs["data"]).to(device)
    whole = Recipe(**config["recipe"])
    # Part of the full length, in steps: a fraction of an epoch has no other meaning.
    steps = max(1, round(config["fraction"] * whole.length(len(samples.train_inputs))))
    recipe = replace(whole, epochs=None, steps=steps)
    losses: list[float] = []

    def note(step: int, loss: float) -> None:
        losses.append(loss)

    if "base" in inputs:
        start = {name: x.to(device) for name, x in read_tensors(inputs["base"] / MODEL).items()}
        result = retrain(arch, start, config["scope"], samples, recipe, seed=seed, freeze=config["freeze"], progress=note)
    else:
        start = {name: x.to(device) for name, x in initialise(arch, seed=seed).items()}
        result = train(arch, start, samples, recipe, seed=seed, progress=note)
    write_tensors(folder / MODEL, result)
    test = score(arch, result, samples.test_inputs, samples.test_targets)
    return {"loss": test.loss, "accuracy": test.accuracy, "training": _curve(losses)}


def _curve(losses: list[float]) -> dict[str, list[float]]:
    """Mean losses over equal stretches of the training, each at its last step."""
    edges = sorted({round(i * len(losses) / _POINTS) for i in range(_POINTS + 1)})
    stretches = list(itertools.pairwise(edges))
    return {"steps": [last for _, last in stretches], "loss": [fmean(losses[first:last]) for first, last in stretches]}
