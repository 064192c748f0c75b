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

from coset.architecture import Architecture, Experts, Layer, StreamOutput
from coset.errors import CosetError
from coset.objective import check_inputs
from coset.parameters import Parameters, check, tensors
from coset.transformer import Tap, forward, run_layer

_HELD = 1 << 28
"""Numbers up to which activations are held from layer to layer (a gigabyte in float32)."""


@dataclass(frozen=True)
class Refit:
    """The refitted model, in the dtypes of the merged one, and a note for every map that was left as it was."""

    parameters: dict[str, Tensor]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Site:
    """A tap, its layer, how many of the last axes of what it gives are features, and the maps that read it."""

    name: str
    layer: int | None
    maps: tuple[str, ...]
    axes: int = 1


def _sites(architecture: Architecture) -> Iterator[_Site | str]:
    """Sites in forward order, and notes on what has none."""
    for i, own in enumerate(architecture.layers):
        p = f"layers.{i}"
        if own.attention.qk_norm is None:
            yield _Site(f"{p}.attention.input", i, (f"{p}.attention.q", f"{p}.attention.k", f"{p}.attention.v"))
        else:
            yield f"layer {i}: queries and keys were left alone, their norm makes them no linear target"
            yield _Site(f"{p}.attention.input", i, (f"{p}.attention.v",))
        yield _Site(f"{p}.attention.heads", i, (f"{p}.attention.o",), axes=3)
        if isinstance(own.mlp, Experts):
            yield f"layer {i}: router and experts were left alone, each of them reads only the inputs that are sent to it"
            continue
        yield _Site(f"{p}.mlp.input", i, (f"{p}.mlp.gate", f"{p}.mlp.up") if own.mlp.gated else (f"{p}.mlp.up",))
        yield _Site(f"{p}.mlp.hidden", i, (f"{p}.mlp.down",))
    if architecture.tied:
        yield "head: left alone, it is the token embedding"
    elif not isinstance(architecture.outputs, StreamOutput):
        yield _Site("final.input", None, ("head",))


def refit(
    architecture: Architecture,
    merged: Parameters,
    ends: Sequence[Parameters],
    inputs: Tensor,
    *,
    ridge: float = 1e-3,
    batch: int = 32,
    progress: Callable[[str, int, int], None] | None = None,
) -> Refit:
    r"""Refit the linear maps of a merged model to the mean of what the ends' maps give on their own inputs.

    Map by map in forward order, with x the input of the map in the merged model *as refitted so far*, and :math:`x_e` its input in end e,

    .. math:: \min_{W, b}\ \mathrm{E}\,\Big\|x W + b - \tfrac1n \sum_e (x_e W_e + b_e)\Big\|^2
              + \lambda \|W - W_\mathrm{merged}\|^2 + \lambda \|b - b_\mathrm{merged}\|^2,

    where the bias is only there if the architecture has one. Targets are linear in the ends' inputs, so second moments
    :math:`\mathrm{E}[x^\top x]` and :math:`\mathrm{E}[x^\top (x_e - x)]` are all that is needed: no labels, and no gradients. Every layer is
    run a few times, from the streams in front of it; where those are more than a gigabyte, from the inputs, which is slower, but needs no
    memory for every sample. The result leaves the line between the ends; call it refitted, not merged, and never use it to
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
    check_inputs(architecture, inputs, "refit")
    check(architecture, merged, "merged model")
    for e, end in enumerate(ends):
        check(architecture, end, f"end {e}")
    compute = {name: torch.promote_types(x.dtype, torch.float32) for name, x in merged.items()}
    model = {name: x.to(compute[name]) for name, x in merged.items()}
    own = [{name: x.to(compute[name]) for name, x in end.items()} for end in ends]
    steps = list(_sites(architecture))
    sites = [step for step in steps if isinstance(step, _Site)]
    with torch.no_grad():
        reading = _Reading(architecture, (model, *own), sites, torch.split(inputs, batch))
        for done, site in enumerate(sites):
            if progress is not None:
                progress(site.name, done, len(sites))
            moment, cross = _moments(reading, site)
            for name in site.maps:
                model |= _solve(architecture, name, model, own, moment, cross, ridge)
    fitted = {name: model[name].to(merged[name].dtype) for name in tensors(architecture)}
    return Refit(fitted, tuple(step for step in steps if isinstance(step, str)))


class _Reached(Exception):
    """Ends a forward pass whose rest nobody needs."""


def _until(site: str, run: Callable[[Tap], Tensor]) -> Tensor:
    """What a forward pass gives at a site, where it ends."""
    seen: list[Tensor] = []

    def tap(name: str, value: Tensor) -> None:
        if name == site:
            seen.append(value)
            raise _Reached

    with suppress(_Reached):
        run(tap)
    return seen[0]


def _neurons(own: Layer) -> int:
    return 0 if isinstance(own.mlp, Experts) else own.mlp.width


class _Reading:
    """What the models read at one site after another, in forward order, the refitted one first: it changes in between, the others do not.

    Held are the streams of all models in front of a layer, and what the others read inside it, unless they are too many numbers.
    """

    def __init__(self, architecture: Architecture, models: Sequence[Parameters], sites: Sequence[_Site], parts: Sequence[Tensor]):
        self.architecture, self.models, self.parts = architecture, models, parts
        self.names = {site.name for site in sites}
        inner = max(max(own.attention.heads * own.attention.value_dim, _neurons(own)) for own in architecture.layers)
        numbers = len(models) * architecture.width + (len(models) - 1) * (3 * architecture.width + 2 * inner)
        self.holds = numbers * sum(part.shape[0] * part.shape[1] for part in parts) <= _HELD
        self.streams: list[list[Tensor]] = []  # of every model, in front of layer `at`
        self.read: list[list[dict[str, Tensor]]] = []  # of every model but the first, in layer `at`
        self.behind: list[list[Tensor]] = []  # likewise, behind it
        self.at = -1

    def at_site(self, site: _Site) -> Iterator[list[Tensor]]:
        """For every part of the inputs, ``[x, 1]`` [rows, size + 1] of every model."""
        if site.layer is not None and self.holds and site.layer > self.at:
            self._enter(site.layer)
        for k in range(len(self.parts)):
            values = [self._value(m, k, site) for m in range(len(self.models))]
            rows = [x.flatten(-site.axes).flatten(0, -2) for x in values]
            yield [torch.cat([x, torch.ones_like(x[:, :1])], -1) for x in rows]

    def _value(self, m: int, k: int, site: _Site) -> Tensor:
        model, index = self.models[m], site.layer
        if index is None or not self.holds:
            return _until(site.name, lambda tap: forward(self.architecture, model, self.parts[k], tap=tap))
        if m > 0:
            return self.read[m - 1][k][site.name]
        return _until(site.name, lambda tap: self._run(index, model, self.streams[0][k], tap))

    def _enter(self, index: int) -> None:
        """Move on to the next layer."""
        if self.at < 0:
            embedded = "embed.output"
            self.streams = [
                [_until(embedded, lambda tap, p=p, x=x: forward(self.architecture, p, x, tap=tap)) for x in self.parts]  # type: ignore[misc]
                for p in self.models
            ]
        else:
            refitted = [self._run(self.at, self.models[0], x, lambda name, value: None) for x in self.streams[0]]
            self.streams = [refitted, *self.behind]
        self.at = index
        self.read, self.behind = [], []
        for model, stream in zip(self.models[1:], self.streams[1:], strict=True):
            self.read.append([{} for _ in stream])
            self.behind.append([self._run(index, model, x, self._keep(into)) for x, into in zip(stream, self.read[-1], strict=True)])

    def _run(self, index: int, model: Parameters, x: Tensor, tap: Tap) -> Tensor:
        return run_layer(self.architecture, index, model, x, tap)

    def _keep(self, into: dict[str, Tensor]) -> Tap:
        def tap(name: str, value: Tensor) -> None:
            if name in self.names:
                into[name] = value

        return tap


def _moments(reading: _Reading, site: _Site) -> tuple[Tensor, list[Tensor]]:
    """``E[[x, 1]ᵀ [x, 1]]`` of the model and ``E[[x, 1]ᵀ ([x_e, 1] - [x, 1])]`` with every end, [size + 1, size + 1], float64.

    Differences are taken before products, so that where ends agree nothing is left but the rounding of activations.
    """
    total: list[Tensor] = []
    rows = 0
    for x, *others in reading.at_site(site):
        x, *others = (y.to(torch.float64) for y in (x, *others))
        products = [x.mT @ other for other in (x, *(y - x for y in others))]
        total = [s + p for s, p in zip(total, products, strict=True)] if total else products
        rows += len(x)
    if not all(bool(torch.isfinite(s).all()) for s in total):
        raise CosetError(f"refit: activations at {site.name} hold NaN or infinity; check the inputs and the models")
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

    start, whole = stacked(model), moment[:n, :n]
    missing = torch.zeros_like(start)  # E[[x, 1]ᵀ (target - what the map gives now)]
    for c, end in zip(cross, ends, strict=True):
        there = stacked(end)
        missing += (c[:n, :n] @ there + whole @ (there - start)) / len(ends)
    solved = start + torch.linalg.solve(whole + strength * torch.eye(n, dtype=torch.float64, device=moment.device), missing)
    out = {name: solved[:size].reshape(model[name].shape).to(model[name].dtype)}
    if bias is not None:
        out[bias] = solved[size].reshape(model[bias].shape).to(model[bias].dtype)
    return out
