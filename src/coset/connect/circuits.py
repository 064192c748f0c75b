r"""The path that interpolates circuits instead of their factors.

A head acts through its circuits ``M = Q Kᵀ`` and ``N = V O`` alone, so two models can be joined by

    M_t = (1 − t) Q_A K_Aᵀ + t Q_B K_Bᵀ,   N_t = (1 − t) V_A O_A + t V_B O_B,

whatever bases their heads use. A circuit between the ends has up to twice the rank of a head, so the path leaves the architecture: its
points are models with heads twice as wide, in which both models' factors stand side by side,

    Q = [(1 − t) Q_A, t Q_B],   K = [K_A, K_B],   V = [V_A, V_B],   O = [(1 − t) O_A; t O_B].

Nothing here is an average of attention patterns: the logits are interpolated, before the softmax. Under a rotary encoding the lanes of
both models keep their own planes, and what is interpolated is the whole family ``Q R_s Kᵀ`` over offsets s.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from coset.architecture import Architecture, Attention, Rotary
from coset.connect.paths import interpolate
from coset.errors import CosetError
from coset.parameters import Parameters


def interpolate_circuits(architecture: Architecture, a: Parameters, b: Parameters, t: float) -> tuple[Architecture, dict[str, Tensor]]:
    r"""The point t of the path between two models along which circuits of heads are straight.

    Everything outside the heads, norm gains included, is interpolated as by :func:`coset.connect.interpolate`. Changing the basis inside a
    head of either model changes nothing on the path; the order of the heads, the neurons and the basis of the stream do matter, so
    align those first. Query heads that share keys and values share the wider ones.

    Parameters
    ----------
    architecture
        Of both models; without QK-norm.
    a, b
        Two parameter mappings with the same names, shapes and dtypes.
    t
        Place on the path, in [0, 1].

    Returns
    -------
    architecture, parameters
        At the ends, the given architecture and the ends themselves, byte for byte. Between them, the architecture with heads of twice the
        width and the same scale of the logits, and its parameters: computed in float64 and cast once to the dtype of the tensors.

    Raises
    ------
    CosetError
        If t lies outside [0, 1], if the models differ in names, shapes or dtypes, or if a layer normalises its queries and keys: what
        a norm stands between is no product of factors.
    """
    for i, layer in enumerate(architecture.layers):
        if layer.attention.qk_norm is not None:
            raise CosetError(
                f"circuits: layer {i} normalises queries and keys (qk_norm {layer.attention.qk_norm!r}), so its logits are no bilinear form "
                "of its input; interpolate the weights instead"
            )
    middle = interpolate(a, b, t)
    if t in (0.0, 1.0):
        return architecture, middle
    for i, layer in enumerate(architecture.layers):
        middle |= _side_by_side(layer.attention, f"layers.{i}.attention", a, b, t)
    layers = tuple(replace(layer, attention=_wider(layer.attention)) for layer in architecture.layers)
    return replace(architecture, layers=layers), middle


def _wider(attention: Attention) -> Attention:
    """Heads of twice the width, the scale of the logits as it was, every plane twice."""
    scale = attention.head_dim**-0.5 if attention.scale is None else attention.scale
    positions = attention.positions
    if isinstance(positions, Rotary):
        positions = replace(positions, frequencies=positions.frequencies * 2)
    return replace(attention, head_dim=2 * attention.head_dim, value_dim=2 * attention.value_dim, scale=scale, positions=positions)


def _lanes(attention: Attention) -> Tensor:
    """For every lane of the wider heads, the lane of ``[A, B]`` that it holds: planes of A, planes of B, and the lanes without one behind them."""
    rotary, n = attention.positions, attention.head_dim
    if not isinstance(rotary, Rotary):
        return torch.arange(2 * n)
    wider = replace(rotary, frequencies=rotary.frequencies * 2)
    both = [tuple(lane + shift for lane in plane) for shift in (0, n) for plane in rotary.planes]
    held = {lane: source for plane, sources in zip(wider.planes, both, strict=True) for lane, source in zip(plane, sources, strict=True)}
    rest = [lane + shift for shift in (0, n) for lane in range(rotary.width, n)]
    return torch.tensor([held[lane] for lane in range(wider.width)] + rest)


def _side_by_side(attention: Attention, p: str, a: Parameters, b: Parameters, t: float) -> dict[str, Tensor]:
    """The attention tensors of the wider heads; t weighs queries and outputs, which every query head has to itself."""
    lanes = _lanes(attention)

    def both(name: str, axis: int, weights: tuple[float, float]) -> Tensor:
        parts = [weight * end[name].to(torch.float64) for weight, end in zip(weights, (a, b), strict=True)]
        return torch.cat(parts, axis).to(a[name].dtype)

    out = {}
    for side, weights in (("q", (1.0 - t, t)), ("k", (1.0, 1.0))):
        for name in (f"{p}.{side}", f"{p}.{side}_bias"):
            if name in a:
                out[name] = both(name, -1, weights)[..., lanes.to(a[name].device)]
    for name in (f"{p}.v", f"{p}.v_bias"):
        if name in a:
            out[name] = both(name, -1, (1.0, 1.0))
    out[f"{p}.o"] = both(f"{p}.o", -2, (1.0 - t, t))
    return out
