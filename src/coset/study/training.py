"""Training on the reference forward pass: AdamW, warm-up and cosine, the same seed gives the same bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from coset.architecture import Architecture, Sinusoidal
from coset.errors import CosetError
from coset.objective import IGNORED, check_data, predictions
from coset.parameters import Parameters, check, tensors
from coset.study.data import Dataset
from coset.transformer import forward


@dataclass(frozen=True)
class Recipe:
    """How to train: AdamW with linear warm-up over the first `warmup` of all steps, then a cosine down to zero.

    Its length is a number of `epochs` or of `steps`. Weight decay acts on matrices only: tensors that have a stream axis and another one.
    Gradients are clipped at norm `clip`.
    """

    learning_rate: float
    epochs: int | None = None
    steps: int | None = None
    weight_decay: float = 0.05
    batch: int = 64
    warmup: float = 0.1
    label_smoothing: float = 0.0
    clip: float = 1.0

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise CosetError(f"training: give either epochs or steps, got epochs {self.epochs} and steps {self.steps}")
        for name in ("epochs", "steps", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise CosetError(f"training: {name} must be at least 1, got {value}")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise CosetError(f"training: {name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.weight_decay < math.inf:
            raise CosetError(f"training: weight_decay must not be negative, got {self.weight_decay}")
        for name in ("warmup", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise CosetError(f"training: {name} must lie in [0, 1), got {getattr(self, name)}")

    def length(self, samples: int) -> int:
        """Steps of a training on so many samples."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * math.ceil(samples / self.batch)


def learnable(architecture: Architecture) -> tuple[str, ...]:
    """Names of the tensors that training moves: all but a stored sinusoidal table, which is a constant of the model."""
    positions = architecture.positions
    fixed = isinstance(positions, Sinusoidal) and positions.stored
    return tuple(name for name in tensors(architecture) if not (fixed and name == "embed.positions"))


def train(
    architecture: Architecture,
    parameters: Parameters,
    data: Dataset,
    recipe: Recipe,
    *,
    seed: int,
    trainable: Collection[str] | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> dict[str, Tensor]:
    r"""Lower the mean cross-entropy of `parameters` on the training part of `data`.

    Runs on one torch thread and shuffles with its own generator, so that the same arguments give the same bytes.

    Parameters
    ----------
    parameters
        Where to start; left untouched.
    recipe
        Optimiser, schedule and length.
    seed
        Order of the data.
    trainable
        Names of the tensors to train; the rest come back as they are. None: those of :func:`learnable`.
    progress
        Called after every step with its number (from 1) and the loss of its batch.

    Returns
    -------
    dict
        New parameters, same dtypes.

    Raises
    ------
    CosetError
        If parameters or data do not fit the architecture, if `trainable` is empty or names an unknown tensor, or if the loss
        stops being finite.
    """
    check(architecture, parameters)
    inputs, targets = data.train_inputs, data.train_targets
    check_data(architecture, inputs, targets, "training data")
    names = learnable(architecture) if trainable is None else tuple(sorted(trainable))
    unknown = [name for name in names if name not in parameters]
    if unknown or not names:
        raise CosetError("\n".join(f"training: there is no tensor {name} to train" for name in unknown) or "training: nothing to train")

    with one_thread():
        # Cloned: the optimiser writes in place.
        state = {name: x.detach().clone() for name, x in parameters.items()}
        for name in names:
            state[name].requires_grad_()
        optimiser = _optimiser(architecture, state, names, recipe)
        steps = recipe.length(len(inputs))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, _warm_cosine(steps, recipe.warmup))
        for step, rows in zip(range(1, steps + 1), _batches(len(inputs), recipe.batch, seed), strict=False):
            part, aims = inputs[rows], None if targets is None else targets[rows]
            outputs, labels = predictions(architecture, forward(architecture, state, part), part, aims)
            loss = F.cross_entropy(outputs, labels, ignore_index=IGNORED, label_smoothing=recipe.label_smoothing)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_([state[name] for name in names], recipe.clip)
            optimiser.step()
            schedule.step()
            value = loss.item()
            if not math.isfinite(value):
                raise CosetError(f"training: the loss is not finite in step {step}; try a lower learning rate than {recipe.learning_rate}")
            if progress is not None:
                progress(step, value)
        return {name: x.detach() for name, x in state.items()}


def _batches(count: int, size: int, seed: int) -> Iterator[Tensor]:
    """Rows of one batch after the other, every epoch in another order, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.split(torch.randperm(count, generator=generator), size)


def _optimiser(architecture: Architecture, state: Parameters, names: tuple[str, ...], recipe: Recipe) -> torch.optim.Optimizer:
    specs = tensors(architecture)
    matrices = {name for name in names if len(specs[name].axes) > 1 and specs[name].axis("stream") is not None}
    groups = [
        {"params": [state[name] for name in names if name in matrices], "weight_decay": recipe.weight_decay},
        {"params": [state[name] for name in names if name not in matrices], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=recipe.learning_rate, betas=(0.9, 0.98), fused=True)


def _warm_cosine(steps: int, warmup: float) -> Callable[[int], float]:
    warm = max(1, round(warmup * steps))

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))

    return factor


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one torch thread inside the block."""
    # Sums split over threads depend on how many there are.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
