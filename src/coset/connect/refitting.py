r"""Refitting a merged model to the outputs of its ends: least squares, map by map, in forward order.

The result is *not* a point of the line between the models, and says nothing about linear connectivity: every linear map is solved for.
It is what one can have without gradients once the models are aligned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from coset.architecture import Architecture, Experts, StreamOutput
from coset.errors import CosetError
from coset.parameters import Parameters, check, tensors
from coset.transformer import forward


@dataclass(frozen=True)
class Refit:
    """The refitted model, in the dtypes of the merged one, and a note for every map that was left as it was."""

    parameters: dict[str, Tensor]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Site:
    """A tap, and the maps that read what it gives."""

    name: str
    maps: tuple[str, ...]


def _sites(architecture: Architecture) -> Iterator[_Site | str]:
    """Sites in forward order, and notes on what has none."""
    for i, layer in enumerate(architecture.layers):
        p = f"layers.{i}"
        if layer.attention.qk_norm is None:
            yield _Site(f"{p}.attention.input", (f"{p}.attention.q", f"{p}.attention.k", f"{p}.attention.v"))
        else:
            yield f"layer {i}: queries and keys were left alone, their norm makes them no linear target"
            yield _Site(f"{p}.attention.input", (f"{p}.attention.v",))
        yield _Site(f"{p}.attention.heads", (f"{p}.attention.o",))
        if isinstance(layer.mlp, Experts):
            yield f"layer {i}: router and experts were left alone, each of them reads only the inputs that are sent to it"
            continue
        yield _Site(f"{p}.mlp.input", (f"{p}.mlp.gate", f"{p}.mlp.up") if layer.mlp.gated else (f"{p}.mlp.up",))
        yield _Site(f"{p}.mlp.hidden", (f"{p}.mlp.down",))
    if architecture.tied:
        yield "head: left alone, it is the token embedding"
    elif not isinstance(architecture.outputs, StreamOutput):
        yield _Site("final.input", ("head",))


def refit(
    architecture: Architecture,
    merged: Parameters,
    ends: Sequence[Parameters],
    inputs: Tensor,
    *,
    ridge: float = 1e-3,
    batch: int = 256,
    progress: Callable[[str, int, int], None] | None = None,
) -> Refit:
    r"""Refit the linear maps of a merged model to the mean of what the ends' maps give on their own inputs.

    Map by map in forward order, with x the input of the map in the merged model *as refitted so far*, and :math:`x_e` its input in end e,

    .. math:: \min_{W, b}\ \mathrm{E}\,\Big\|x W + b - \tfrac1n \sum_e (x_e W_e + b_e)\Big\|^2
              + \lambda \|W - W_\mathrm{merged}\|^2 + \lambda \|b - b_\mathrm{merged}\|^2,

    where the bias is only there if the architecture has one. Targets are linear in the ends' inputs, so second moments
    :math:`\mathrm{E}[x^\top x]` and :math:`\mathrm{E}[x^\top x_e]` are all that is needed: no labels, no gradients, and memory that does
    not depend on the number of samples. The result leaves the line between the ends; call it refitted, not merged, and never use it to
    claim linear connectivity.

    Refitted are queries, keys and values (queries and keys not under QK-norm), attention outputs, MLPs, and an untied head. Embeddings,
    norms and experts stay as they are in `merged`.

    Parameters
    ----------
    architecture
        Of all models.
    merged
        Where to start, and what `ridge` holds on to: usually the mean of the ends. Its dtype is that of the result; forward passes run in
        it, or in float32 if that is finer.
    ends
        The models that were merged, *aligned* with each other: lane by lane their activations must mean the same.
    inputs
        Token ids [samples, length] or patches [samples, patches, features]. Other than the data, text sampled from the models will do.
    ridge
        λ as a fraction of the mean diagonal of :math:`\mathrm{E}[x^\top x]`; positive.
    batch
        Samples in a forward pass.
    progress
        Called with the site, how many sites are done, and of how many.

    Raises
    ------
    CosetError
        If the models or the inputs do not fit the architecture, if there are no ends or no inputs, if ridge or batch is not positive, or
        if activations are not finite.
    """
    if not ends:
        raise CosetError("refit: expected at least one end, got none")
    if not 0 < ridge < math.inf:
        raise CosetError(f"refit: ridge must be positive, got {ridge}")
    if batch < 1:
        raise CosetError(f"refit: batch must be positive, got {batch}")
    if len(inputs) == 0:
        raise CosetError(f"refit: inputs are empty, shape {list(inputs.shape)}")
    check(architecture, merged, "merged model")
    for e, end in enumerate(ends):
        check(architecture, end, f"end {e}")
    compute = {name: torch.promote_types(x.dtype, torch.float32) for name, x in merged.items()}
    model = {name: x.to(compute[name]) for name, x in merged.items()}
    own = [{name: x.to(compute[name]) for name, x in end.items()} for end in ends]
    steps = list(_sites(architecture))
    sites = [step for step in steps if isinstance(step, _Site)]
    with torch.no_grad():
        for done, site in enumerate(sites):
            if progress is not None:
                progress(site.name, done, len(sites))
            moment, cross = _moments(architecture, model, own, inputs, site.name, batch)
            for name in site.maps:
                model |= _solve(architecture, name, model, own, moment, cross, ridge)
    fitted = {name: model[name].to(merged[name].dtype) for name in tensors(architecture)}
    return Refit(fitted, tuple(step for step in steps if isinstance(step, str)))


class _Reached(Exception):
    """Ends a forward pass whose rest nobody needs."""


def _read(architecture: Architecture, parameters: Parameters, inputs: Tensor, site: str, axes: int) -> Tensor:
    """``[x, 1]`` [rows, size + 1], float64, for the inputs x at a site whose last `axes` axes are features."""
    seen: list[Tensor] = []

    def tap(name: str, value: Tensor) -> None:
        if name == site:
            seen.append(value)
            raise _Reached

    with suppress(_Reached):
        forward(architecture, parameters, inputs, tap=tap)
    x = seen[0].flatten(-axes).flatten(0, -2).to(torch.float64)
    return torch.cat([x, torch.ones_like(x[:, :1])], -1)


def _moments(
    architecture: Architecture, model: Parameters, ends: Sequence[Parameters], inputs: Tensor, site: str, batch: int
) -> tuple[Tensor, list[Tensor]]:
    """``E[[x, 1]ᵀ [x, 1]]`` of the model and ``E[[x, 1]ᵀ [x_e, 1]]`` with every end, [size + 1, size + 1]."""
    axes = 3 if site.endswith(".heads") else 1
    total: list[Tensor] = []
    rows = 0
    for part in torch.split(inputs, batch):
        x = _read(architecture, model, part, site, axes)
        products = [x.mT @ other for other in (x, *(_read(architecture, end, part, site, axes) for end in ends))]
        total = [s + p for s, p in zip(total, products, strict=True)] if total else products
        rows += len(x)
    if not all(bool(torch.isfinite(s).all()) for s in total):
        raise CosetError(f"refit: activations at {site} hold NaN or infinity; check the inputs and the models")
    return total[0] / rows, [s / rows for s in total[1:]]


def _solve(
    architecture: Architecture,
    name: str,
    model: Parameters,
    ends: Sequence[Parameters],
    moment: Tensor,
    cross: Sequence[Tensor],
    ridge: float,
) -> dict[str, Tensor]:
    """The map's new tensors. Solved for the change, so that what the data say nothing about stays to the bit."""
    bias = f"{name}_bias" if f"{name}_bias" in tensors(architecture) else None
    size = len(moment) - 1
    n = size + (bias is not None)
    strength = ridge * float(moment.diagonal()[:size].mean())
    if strength == 0.0:
        return {}

    def stacked(p: Parameters) -> Tensor:
        weight = p[name].to(torch.float64).reshape(size, -1)
        return weight if bias is None else torch.cat([weight, p[bias].to(torch.float64).reshape(1, -1)])

    start = stacked(model)
    aim = sum((c[:n, :n] @ stacked(end) for c, end in zip(cross, ends, strict=True)), torch.zeros_like(start)) / len(ends)
    shifted = moment[:n, :n] + strength * torch.eye(n, dtype=torch.float64, device=moment.device)
    change = torch.linalg.solve(shifted, aim - moment[:n, :n] @ start)
    solved = start + change
    out = {name: solved[:size].reshape(model[name].shape).to(model[name].dtype)}
    if bias is not None:
        out[bias] = solved[size].reshape(model[bias].shape).to(model[bias].dtype)
    return out
