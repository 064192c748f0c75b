"""Loss and accuracy of a model on data: what barriers measure and what training lowers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from coset.architecture import Architecture, Classifier, LanguageModel, Patches, StreamOutput, Tokens
from coset.errors import CosetError
from coset.parameters import Parameters
from coset.transformer import forward

IGNORED = -100
"""Target of a position that counts neither in the loss nor in the accuracy."""


@dataclass(frozen=True)
class Score:
    """Mean cross-entropy (nats) and accuracy over all targets that are not :data:`IGNORED`."""

    loss: float
    accuracy: float


def check_data(architecture: Architecture, inputs: Tensor, targets: Tensor | None, owner: str = "data") -> None:
    """Raise unless `inputs` and `targets` are what `architecture` reads and predicts.

    Parameters
    ----------
    inputs
        Token ids [n, length] (int64), or patches [n, patches, features] (floating point).
    targets
        Classifier: classes [n]. Language model: token ids [n, length] scored position by position, or None for the next
        token (causal models only). Targets of -100 are left out.

    Raises
    ------
    CosetError
        As :func:`check_inputs` and :func:`check_targets` do, and if the architecture has no head, or needs targets and there are none.
    """
    if isinstance(architecture.outputs, StreamOutput):
        raise CosetError(f"{owner}: no head is modelled here, so there is no loss; expected a causal language model or a classifier")
    check_inputs(architecture, inputs, owner)
    if targets is not None:
        check_targets(architecture, inputs, targets, owner)
    elif isinstance(architecture.outputs, Classifier):
        raise CosetError(f"{owner}: a classifier needs targets, one class for each of {len(inputs)} inputs; got none")
    elif not architecture.causal:
        raise CosetError(
            f"{owner}: a bidirectional language model sees the next token, so it needs targets "
            f"(masked positions; {IGNORED} elsewhere); got none"
        )
    elif inputs.shape[1] < 2:
        raise CosetError(f"{owner}: next-token targets need sequences of at least 2 tokens, got {inputs.shape[1]}")


def check_inputs(architecture: Architecture, inputs: Tensor, owner: str = "data") -> None:
    """Raise unless `inputs` are what `architecture` reads; it needs no head.

    Parameters
    ----------
    inputs
        Token ids [n, length] (int64), or patches [n, patches, features] (floating point).
    owner
        What the message begins with: the file, or the argument.

    Raises
    ------
    CosetError
        With expected and got, if there are no inputs, a shape, dtype or id does not fit, a sequence is longer than the architecture allows, or
        patches are not finite.
    """
    got = f"got {inputs.dtype} of shape {list(inputs.shape)}"
    if isinstance(architecture.inputs, Patches):
        # A class token is made by the model, so it is no row of the input.
        rows, features = architecture.inputs.count - architecture.inputs.class_token, architecture.inputs.features
        if inputs.ndim != 3 or tuple(inputs.shape[1:]) != (rows, features) or not inputs.is_floating_point():
            raise CosetError(f"{owner}: inputs must be floating-point patches [n, patches={rows}, features={features}], {got}")
    elif inputs.ndim != 2 or inputs.dtype != torch.int64:
        raise CosetError(f"{owner}: inputs must be int64 token ids [n, length], {got}")
    if inputs.numel() == 0:
        raise CosetError(f"{owner}: inputs are empty, shape {list(inputs.shape)}; expected at least one")
    if isinstance(architecture.inputs, Patches):
        if not bool(torch.isfinite(inputs).all()):
            raise CosetError(f"{owner}: inputs hold NaN or infinity")
        return
    if architecture.length is not None and inputs.shape[1] > architecture.length:
        raise CosetError(
            f"{owner}: sequences of {inputs.shape[1]} tokens are longer than the model's context of {architecture.length}; cut them"
        )
    _check_range(inputs, architecture.inputs.vocabulary, f"{owner}: token ids")


def check_targets(architecture: Architecture, inputs: Tensor, targets: Tensor, owner: str = "data") -> None:
    """Raise unless `targets` belong to `inputs` that have been checked, whether or not anything is going to read them.

    Parameters
    ----------
    targets
        Classifier: classes [n]. Language model: token ids [n, length]. int64; targets of -100 are left out. A model without a head predicts
        nothing: its targets need only be as many as the inputs.

    Raises
    ------
    CosetError
        With expected and got, if shape, dtype or range disagree, or if every target is left out.
    """
    if isinstance(architecture.outputs, StreamOutput):
        if targets.ndim == 0 or len(targets) != len(inputs):
            raise CosetError(f"{owner}: targets must be as many as the {len(inputs)} inputs, got shape {list(targets.shape)}")
        return
    if isinstance(architecture.outputs, Classifier):
        classes, shape = architecture.outputs.classes, list(inputs.shape[:1])
    else:
        assert isinstance(architecture.inputs, Tokens)
        classes, shape = architecture.inputs.vocabulary, list(inputs.shape)
    if targets.dtype != torch.int64 or list(targets.shape) != shape:
        raise CosetError(f"{owner}: targets must be int64 of shape {shape}, got {targets.dtype} of shape {list(targets.shape)}")
    scored = targets[targets != IGNORED]
    if scored.numel() == 0:
        raise CosetError(f"{owner}: every target is {IGNORED}; there is nothing to score")
    _check_range(scored, classes, f"{owner}: targets")


def _check_range(values: Tensor, count: int, what: str) -> None:
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= count:
        raise CosetError(f"{what} must lie in 0..{count - 1}, got {low}..{high}")


def predictions(architecture: Architecture, outputs: Tensor, inputs: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs [m, classes] and the labels [m] they are scored against, one row a prediction; without targets the next token."""
    if isinstance(architecture.outputs, LanguageModel) and targets is None:
        outputs, labels = outputs[:, :-1], inputs[:, 1:]
    else:
        assert targets is not None
        labels = targets
    return outputs.flatten(0, -2), labels.flatten()


def score(
    architecture: Architecture,
    parameters: Parameters,
    inputs: Tensor,
    targets: Tensor | None = None,
    *,
    batch: int = 512,
) -> Score:
    """Mean cross-entropy and accuracy of one model; see :func:`check_data` for shapes and errors.

    Sums run in float64 over batches of `batch` inputs, so the result hardly depends on the batch.
    """
    check_data(architecture, inputs, targets)
    return accumulate(architecture, lambda x: forward(architecture, parameters, x), inputs, targets, batch)


def accumulate(
    architecture: Architecture,
    model: Callable[[Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor | None,
    batch: int,
) -> Score:
    """Score `model`, any function from inputs to outputs, on data that has been checked."""
    loss, hits, count = 0.0, 0, 0
    with torch.no_grad():
        for start in range(0, len(inputs), batch):
            part = inputs[start : start + batch]
            aims = None if targets is None else targets[start : start + batch]
            outputs, labels = predictions(architecture, model(part), part, aims)
            logits = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
            loss += float(F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum").double())
            scored = labels != IGNORED
            hits += int((logits.argmax(-1) == labels)[scored].sum())
            count += int(scored.sum())
    return Score(loss / count, hits / count)


class Agreement:
    """How far a model is from two others, without labels: cross-entropy to the mean of their probabilities.

    For a model without a head, whose output is the stream: mean squared distance from the mean of their outputs, relative to its mean square.
    The mean outputs are computed once where they are not too many, otherwise for every batch.
    """

    _HELD = 1 << 26

    def __init__(self, architecture: Architecture, ends: Sequence[Parameters], inputs: Tensor, *, batch: int = 64):
        self.architecture, self.ends, self.inputs = architecture, ends, inputs
        self._mean: Tensor | None = None
        first = self._targets(inputs[:1])
        if first.numel() * len(inputs) <= self._HELD:
            self._mean = torch.cat([self._targets(part) for part in torch.split(inputs, batch)])

    def _targets(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            outputs = [forward(self.architecture, end, inputs) for end in self.ends]
            if not isinstance(self.architecture.outputs, StreamOutput):
                outputs = [torch.softmax(x, -1) for x in outputs]
            return torch.stack(outputs).mean(0)

    def loss(self, parameters: Parameters, rows: Tensor) -> Tensor:
        """Mean over the inputs number `rows` [n]; differentiable in `parameters`."""
        inputs = self.inputs[rows]
        aims = self._targets(inputs) if self._mean is None else self._mean[rows]
        outputs = forward(self.architecture, parameters, inputs)
        if isinstance(self.architecture.outputs, StreamOutput):
            return (outputs - aims).square().mean() / aims.square().mean()
        return F.cross_entropy(outputs.flatten(0, -2), aims.flatten(0, -2))


class Task:
    """The task's own loss: mean cross-entropy to targets, or to the next token. See :func:`check_data` for shapes and errors."""

    def __init__(self, architecture: Architecture, inputs: Tensor, targets: Tensor | None):
        check_data(architecture, inputs, targets)
        self.architecture, self.inputs, self.targets = architecture, inputs, targets

    def loss(self, parameters: Parameters, rows: Tensor) -> Tensor:
        """Mean over the inputs number `rows` [n]; differentiable in `parameters`."""
        inputs, targets = self.inputs[rows], None if self.targets is None else self.targets[rows]
        outputs, labels = predictions(self.architecture, forward(self.architecture, parameters, inputs), inputs, targets)
        return F.cross_entropy(outputs, labels, ignore_index=IGNORED)
