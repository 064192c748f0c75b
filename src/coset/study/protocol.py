"""The re-initialisation protocol: draw part of a trained model afresh, train again, and ask what still connects the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from torch import Tensor

from coset.architecture import Architecture
from coset.errors import CosetError
from coset.parameters import Parameters, check, tensors
from coset.study.data import Dataset
from coset.study.training import Recipe, learnable, train
from coset.transformer import initialise

Scope = Literal["first-attention", "all-attention", "last-attention", "first-layer", "last-layer", "whole"]
SCOPES: tuple[Scope, ...] = get_args(Scope)


def scope_tensors(architecture: Architecture, scope: Scope) -> tuple[str, ...]:
    """Names of the tensors that a scope draws afresh, in forward order.

    ``first-attention``: every attention tensor of layer 0, biases included, its norm not; ``last-attention``: of the last layer;
    ``all-attention``: of every layer. ``first-layer`` and ``last-layer``: everything in that layer. ``whole``: everything.

    Raises
    ------
    CosetError
        If `scope` is none of them.
    """
    layers = scope_layers(architecture, scope)
    if scope == "whole":
        return tuple(tensors(architecture))
    owned = [name for name, spec in tensors(architecture).items() if spec.layer is not None and (layers is None or spec.layer in layers)]
    return tuple(name for name in owned if scope.endswith("-layer") or ".attention." in name)


def scope_layers(architecture: Architecture, scope: Scope) -> tuple[int, ...] | None:
    """Layers that a scope draws afresh; None for all of them.

    Raises
    ------
    CosetError
        If `scope` is unknown.
    """
    if scope not in SCOPES:
        raise CosetError(f"scope: expected one of {', '.join(SCOPES)}, got {scope!r}")
    if scope.startswith("first-"):
        return (0,)
    return (len(architecture.layers) - 1,) if scope.startswith("last-") else None


def reinitialise(architecture: Architecture, parameters: Parameters, scope: Scope, seed: int) -> dict[str, Tensor]:
    """`parameters` with the tensors of `scope` drawn afresh from `seed`, as a new model of this architecture would have them.

    The other tensors are the same objects. Each new tensor has the dtype of the one it replaces.

    Raises
    ------
    CosetError
        If `scope` is unknown or `parameters` do not fit the architecture.
    """
    names = set(scope_tensors(architecture, scope))
    check(architecture, parameters)
    dtype = next(iter(parameters.values())).dtype
    fresh = initialise(architecture, seed=seed, dtype=dtype)
    return {name: fresh[name].to(x.dtype) if name in names else x for name, x in parameters.items()}


def retrain(
    architecture: Architecture,
    parameters: Parameters,
    scope: Scope,
    data: Dataset,
    recipe: Recipe,
    *,
    seed: int,
    freeze: bool = False,
    progress: Callable[[int, float], None] | None = None,
) -> dict[str, Tensor]:
    """Re-initialise `scope` from `seed` and train again; `freeze` keeps everything outside the scope as it was.

    The seed decides the new weights and the order of the data. `progress` is that of :func:`~coset.study.training.train`.
    """
    start = reinitialise(architecture, parameters, scope, seed)
    moving = learnable(architecture)
    if freeze:
        moving = tuple(name for name in scope_tensors(architecture, scope) if name in moving)
    return train(architecture, start, data, recipe, seed=seed, trainable=moving, progress=progress)
