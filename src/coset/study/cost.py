"""What a study will cost: seconds of one core for every unit, measured where that is quick and counted where it is not."""

from __future__ import annotations

import math
import time
from functools import cache

import torch

from coset.alignment import Learning
from coset.architecture import Architecture, Classifier, Patches
from coset.parameters import count, tensors
from coset.study.data import Dataset
from coset.study.matchers import LEARNED
from coset.study.plan import Cell, Plan
from coset.study.store import Unit
from coset.study.training import Recipe, one_thread, train
from coset.study.units.ablation import MOST
from coset.transformer import initialise, random_inputs

_QUICK = 2e10
"""Floating-point operations of a training step that is measured; a larger one is computed from the rate of a matrix product."""
ASSUMED = 5e13
"""Operations a second of an accelerator that is not here, in single precision."""
_ALIGN = 0.3
"""Seconds of aligning a pair by a matcher that does not learn, roughly."""
_LEARN = 1.5
"""A step of learning, in training steps of as many samples: it runs through the group's parametrisation as well."""


def operations(architecture: Architecture, length: int) -> float:
    """Floating-point operations of a forward pass over one sample: two for every weight and position, and attention's products."""
    weights = sum(
        torch.Size(spec.shape).numel()
        for name, spec in tensors(architecture).items()
        if len(spec.axes) > 1 and name not in ("embed.tokens", "embed.positions")
    )
    attention = sum(
        2 * length * layer.attention.heads * (layer.attention.head_dim + layer.attention.value_dim) for layer in architecture.layers
    )
    return length * (2.0 * weights + attention)


def estimate(plan: Plan, *, device: str = "cpu") -> dict[Unit, float]:
    """Seconds of every unit on one core, or on the accelerator of `device`."""
    steps: dict[tuple[Architecture, int], float] = {}
    seconds: dict[Unit, float] = {}
    for cell in plan.cells:
        batch = cell.setting.batch
        key = (cell.architecture, batch)
        if key not in steps:
            steps[key] = _step(cell.architecture, cell.shape.length, batch, device)
        seconds |= _cell(cell, steps[key])
    return seconds


def _cell(cell: Cell, step: float) -> dict[Unit, float]:
    setting, shape = cell.setting, cell.shape
    recipe = Recipe(setting.learning_rate, setting.epochs, setting.steps, batch=setting.batch)
    # A backward pass costs about two forward passes.
    testing = step / 3 * shape.test / setting.batch
    training = step * recipe.length(shape.train)
    seconds = {cell.data: 1.0, cell.base: training + testing}
    seconds |= dict.fromkeys(cell.models.values(), setting.retrain * training + testing)
    for pair, by_matcher in cell.pairs.items():
        learning = _LEARN * setting.learning_steps * step * Learning().batch / setting.batch
        for matcher, unit in by_matcher.items():
            seconds[unit] = _ALIGN + unit.config["points"] * testing + (learning if matcher in LEARNED else 0.0)
        if pair in cell.ablations:
            # Four curves, and one point for each of a layer's orders.
            tried = min(MOST, math.factorial(setting.heads)) * (setting.layers if setting.scope == "all-attention" else 1)
            seconds[cell.ablations[pair]] = (4 * cell.ablations[pair].config["points"] + tried) * testing
    return seconds


def size(plan: Plan) -> int:
    """Bytes that the models and data of a study take on disk."""
    models = {unit: 4 * count(cell.architecture) for cell in plan.cells for unit in (cell.base, *cell.models.values())}
    data = {cell.data: _sample_bytes(cell) * (cell.shape.train + cell.shape.test) for cell in plan.cells}
    return sum(models.values()) + sum(data.values())


def _sample_bytes(cell: Cell) -> int:
    return 8 * cell.shape.length if cell.shape.features is None else 4 * cell.shape.length * cell.shape.features


def _step(architecture: Architecture, length: int, batch: int, device: str) -> float:
    needed = 3 * batch * operations(architecture, length)
    return needed / _rate(device) if needed > _QUICK or not _present(device) else _measured(architecture, length, batch, device)


def _present(device: str) -> bool:
    return device == "cpu" or torch.cuda.is_available()


def _measured(architecture: Architecture, length: int, batch: int, device: str) -> float:
    inputs = random_inputs(architecture, batch, length=None if isinstance(architecture.inputs, Patches) else length)
    targets = torch.zeros(batch, dtype=torch.int64) if isinstance(architecture.outputs, Classifier) else None
    data = Dataset(inputs, targets, inputs, targets).to(device)
    start = {name: x.to(device) for name, x in initialise(architecture).items()}
    # Other work on the same cores does not count; an accelerator's work is not in the process's time.
    clock = time.process_time if device == "cpu" else time.perf_counter
    took = []
    for steps in (2, 6):
        began = clock()
        train(architecture, start, data, Recipe(1e-6, steps=steps, batch=batch), seed=0)
        took.append(clock() - began)
    return max(took[1] - took[0], took[1] / 10) / 4


@cache
def _rate(device: str) -> float:
    """Floating-point operations a second of a large matrix product; models reach about half of it."""
    if not _present(device):
        return 0.5 * ASSUMED
    n = 1024 if device == "cpu" else 8192
    a = torch.randn(n, n, device=device)
    with one_thread():
        best = min(_product(a) for _ in range(4))
    return 0.5 * 2 * n**3 / best


def _product(a: torch.Tensor) -> float:
    began = time.perf_counter()
    float((a @ a).sum())
    return time.perf_counter() - began
