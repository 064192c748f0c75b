"""Paths between two models in the space of weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coset.architecture import Architecture
from coset.errors import CosetError
from coset.parameters import Parameters

Path = Callable[[Architecture, Parameters, Parameters, float], tuple[Architecture, dict[str, Tensor]]]
"""From an architecture, two models of it and a place t in [0, 1] to a model, which may be of another architecture."""


def segment(architecture: Architecture, a: Parameters, b: Parameters, t: float) -> tuple[Architecture, dict[str, Tensor]]:
    """The straight path in the space of weights: :func:`interpolate`, in the same architecture."""
    return architecture, interpolate(a, b, t)


def interpolate(a: Parameters, b: Parameters, t: float) -> dict[str, Tensor]:
    r"""The point ``(1 - t) a + t b`` of the segment between two models.

    Computed in float64 and cast once to the dtype of the tensors. The ends are exact: t = 0 gives `a`, t = 1 gives `b`,
    byte for byte.

    Parameters
    ----------
    a, b
        Two parameter mappings with the same names, shapes and dtypes.
    t
        Place on the segment, in [0, 1].

    Raises
    ------
    CosetError
        If `t` lies outside [0, 1], or with one line for every tensor that differs in name, shape or dtype.
    """
    if not 0.0 <= t <= 1.0:
        raise CosetError(f"interpolation: t must lie in [0, 1], got {t}")
    check_alike(a, b)
    if t in (0.0, 1.0):
        # Not left to arithmetic: 0 * b turns -0.0 into 0.0.
        return dict(a if t == 0.0 else b)
    return {name: ((1.0 - t) * x.to(torch.float64) + t * b[name].to(torch.float64)).to(x.dtype) for name, x in a.items()}


def check_alike(a: Parameters, b: Parameters) -> None:
    """Raise :class:`CosetError`, one line a tensor, unless `a` and `b` agree in names, shapes and dtypes."""
    faults = [f"interpolation: tensor {name} is in the first model only" for name in a if name not in b]
    faults += [f"interpolation: tensor {name} is in the second model only" for name in b if name not in a]
    for name, x in a.items():
        y = b.get(name)
        if y is None:
            continue
        if x.shape != y.shape:
            faults.append(f"interpolation: tensor {name} has shape {list(x.shape)} in the first model and {list(y.shape)} in the second")
        elif x.dtype != y.dtype:
            faults.append(
                f"interpolation: tensor {name} has dtype {x.dtype} in the first model and {y.dtype} in the second; cast one of them"
            )
    if faults:
        raise CosetError("\n".join(faults))
