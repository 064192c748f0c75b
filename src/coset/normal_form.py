r"""Gauge fixing: folding norm gains, dropping what is invisible, and putting both back.

Some coordinates of the parameters can be set at will without changing the function: norm gains (the linear maps that read
the norm take them in), a key bias without rotation, a value bias next to an output bias, whatever LayerNorm removes. :func:`fold` sets
the chosen coordinates to their normal value and records what they were, the *gauge*; :func:`unfold` puts any gauge in. So a model can be
brought to normal form, acted on there, and written in the gauge of another model::

    folded, normal, own = fold(architecture, parameters, coordinates)
    unfold(architecture, normal, own) == parameters          # to rounding
    unfold(architecture, normal, of_another_model)           # same function, in the other's gauge

Both work on any subset of whole blocks (one layer, or the two ends), so that checkpoints can be streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

import torch
from torch import Tensor

from coset.architecture import (
    Architecture,
    Attention,
    Experts,
    LearnedPositions,
    Norm,
    Patches,
    RelativeBias,
    Sinusoidal,
    Tokens,
)
from coset.errors import CosetError
from coset.parameters import Parameters, TensorSpec, blocks, readers, tensors
from coset.symmetries import removes_mean

Gauge = Mapping[str, Tensor]
"""Values of gauge coordinates, by coordinate name."""


@dataclass(frozen=True)
class Coordinate:
    """One coordinate of the gauge.

    Attributes
    ----------
    name
        Unique; by convention the tensor whose value is arbitrary, or that tensor and what is arbitrary in it.
    space
        ``gains`` or ``shifts``: what users call it.
    layer
        Owning layer, or None for the ends of the model.
    shape
        Of the value.
    take
        ``parameters -> (parameters, value)``: set to normal, return what it was.
    put
        ``(parameters, value) -> parameters``: the reverse, for any value.
    changes
        Tensors outside the layers that it changes.
    needs
        Coordinates that must be folded with it: only then is it free.
    offset
        Of a norm's gain, what is subtracted from it where it is stored; None for every other coordinate.
    """

    name: str
    space: str
    layer: int | None
    shape: tuple[int, ...]
    take: Callable[[Parameters], tuple[dict[str, Tensor], Tensor]]
    put: Callable[[Parameters, Tensor], dict[str, Tensor]]
    changes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    offset: float | None = None


def _outside(*names: str) -> tuple[str, ...]:
    """Those of the named tensors that no layer owns."""
    return tuple(name for name in names if not name.startswith("layers."))


def _rows(x: Tensor, spec: TensorSpec, scale: Tensor) -> Tensor:
    """Multiply a reader, of any layout, by ``diag(scale)`` on its stream axis."""
    axis = spec.axis("stream")
    assert axis is not None
    return x * scale.to(x.dtype).reshape(*(-1 if i == axis else 1 for i in range(x.ndim)))


def _contract(vector: Tensor, x: Tensor, spec: TensorSpec) -> Tensor:
    """``vector @ x`` over the reader's stream axis."""
    axis = spec.axis("stream")
    assert axis is not None
    return torch.tensordot(vector.to(x.dtype), x, dims=([0], [axis]))


def _gain(architecture: Architecture, name: str, norm: Norm, layer: int | None) -> Coordinate:
    """``gain * x̂ @ W = x̂ @ diag(gain) W``. A bias of the norm that is not folded stays, divided by the gain: it is then a vector of the stream."""
    read = readers(architecture, name)

    def take(p: Parameters) -> tuple[dict[str, Tensor], Tensor]:
        out = dict(p)
        gain = out.pop(f"{name}.gain") + norm.offset
        for spec in read:
            out[spec.name] = _rows(out[spec.name], spec, gain)
        if f"{name}.bias" in out:
            dead = gain == 0
            if bool((dead & (out[f"{name}.bias"] != 0)).any()):
                raise CosetError(
                    f"tensor {name}.gain is zero on a lane where {name}.bias is not: the bias cannot be folded there; "
                    "leave the spaces gains and stream out"
                )
            out[f"{name}.bias"] = torch.where(dead, 0.0, out[f"{name}.bias"] / torch.where(dead, 1.0, gain))
        return out, gain

    def put(p: Parameters, gain: Tensor) -> dict[str, Tensor]:
        out = dict(p)
        if bool((gain == 0).any()):
            raise CosetError(f"gauge coordinate {name}.gain holds a zero: what read the norm there left no trace, so it cannot be had back")
        for spec in read:
            out[spec.name] = _rows(out[spec.name], spec, 1 / gain)
        if f"{name}.bias" in out:
            out[f"{name}.bias"] = out[f"{name}.bias"] * gain.to(out[f"{name}.bias"].dtype)
        out[f"{name}.gain"] = (gain - norm.offset).to(next(iter(p.values())).dtype)
        return out

    return Coordinate(
        f"{name}.gain",
        "gains",
        layer,
        (architecture.width,),
        take,
        put,
        _outside(f"{name}.gain", *((f"{name}.bias",) if norm.has_bias else ()), *(s.name for s in read)),
        offset=norm.offset,
    )


def _norm_bias(architecture: Architecture, name: str, layer: int | None) -> Coordinate:
    """``(x̂ + β) W + b = x̂ W + (b + β W)``, where every reader has a bias of its own. Runs before the gain is folded."""
    read = readers(architecture, name)

    def move(p: Parameters, bias: Tensor, sign: int) -> dict[str, Tensor]:
        out = dict(p)
        for spec in read:
            out[f"{spec.name}_bias"] = out[f"{spec.name}_bias"] + sign * _contract(bias, out[spec.name], spec)
        return out

    def take(p: Parameters) -> tuple[dict[str, Tensor], Tensor]:
        out = dict(p)
        bias = out.pop(f"{name}.bias")
        return move(out, bias, 1), bias

    def put(p: Parameters, bias: Tensor) -> dict[str, Tensor]:
        return move(p, bias, -1) | {f"{name}.bias": bias.to(next(iter(p.values())).dtype)}

    return Coordinate(
        f"{name}.bias", "shifts", layer, (architecture.width,), take, put, _outside(f"{name}.bias", *(f"{s.name}_bias" for s in read))
    )


def _reader_mean(spec: TensorSpec, needs: tuple[str, ...]) -> Coordinate:
    """LayerNorm's output (gain folded, bias folded) has mean zero: the component of a reader along **1** is arbitrary."""
    axis = spec.axis("stream")
    assert axis is not None

    def take(p: Parameters) -> tuple[dict[str, Tensor], Tensor]:
        mean = p[spec.name].mean(axis)
        return {**p, spec.name: p[spec.name] - mean.unsqueeze(axis)}, mean

    def put(p: Parameters, mean: Tensor) -> dict[str, Tensor]:
        return {**p, spec.name: p[spec.name] + mean.to(p[spec.name].dtype).unsqueeze(axis)}

    shape = tuple(n for i, n in enumerate(spec.shape) if i != axis)
    # With the norm's bias folded the reader's bias holds what passes through the reader.
    biases = (f"{spec.name}_bias",) if any(n.endswith(".bias") for n in needs) else ()
    return Coordinate(f"{spec.name} along 1", "shifts", spec.layer, shape, take, put, _outside(spec.name, *biases), needs)


def _writer_mean(spec: TensorSpec) -> Coordinate:
    """What a writer adds along **1** is removed by every LayerNorm that reads the stream."""

    def take(p: Parameters) -> tuple[dict[str, Tensor], Tensor]:
        mean = p[spec.name].mean(-1)
        return {**p, spec.name: p[spec.name] - mean.unsqueeze(-1)}, mean

    def put(p: Parameters, mean: Tensor) -> dict[str, Tensor]:
        return {**p, spec.name: p[spec.name] + mean.to(p[spec.name].dtype).unsqueeze(-1)}

    return Coordinate(f"{spec.name} along 1", "shifts", spec.layer, spec.shape[:-1], take, put, _outside(spec.name))


def _key_bias(i: int, attention: Attention) -> Coordinate:
    """A key bias on lanes that do not rotate adds a constant along each softmax row."""
    name, lanes = f"layers.{i}.attention.k_bias", torch.tensor(attention.still_lanes)

    def take(p: Parameters) -> tuple[dict[str, Tensor], Tensor]:
        bias = p[name].clone()
        value = bias[..., lanes].clone()
        bias[..., lanes] = 0
        return {**p, name: bias}, value

    def put(p: Parameters, value: Tensor) -> dict[str, Tensor]:
        bias = p[name].clone()
        bias[..., lanes] = value.to(bias.dtype)
        return {**p, name: bias}

    return Coordinate(name, "shifts", i, (attention.kv_heads, len(lanes)), take, put)


def _value_bias(i: int, attention: Attention) -> Coordinate:
    """Softmax rows sum to one: a value bias is a constant that the output bias can hold, ``b_O + Σ_heads b_V O``."""
    name, o, out_bias = (f"layers.{i}.attention.{t}" for t in ("v_bias", "o", "o_bias"))

    def carried(p: Parameters, bias: Tensor) -> Tensor:
        return torch.einsum("km,kqmd->d", bias.to(p[o].dtype), p[o])

    def take(p: Parameters) -> tuple[dict[str, Tensor], Tensor]:
        bias = p[name]
        return {**p, name: torch.zeros_like(bias), out_bias: p[out_bias] + carried(p, bias)}, bias

    def put(p: Parameters, bias: Tensor) -> dict[str, Tensor]:
        return {**p, name: bias.to(p[o].dtype), out_bias: p[out_bias] - carried(p, bias)}

    return Coordinate(name, "shifts", i, (attention.kv_heads, attention.value_dim), take, put)


def _bias_table(i: int, attention: Attention) -> Coordinate:
    """A constant added to a head's table of position biases leaves its softmax alone."""
    name = f"layers.{i}.attention.position_bias"

    def take(p: Parameters) -> tuple[dict[str, Tensor], Tensor]:
        mean = p[name].mean(0)
        return {**p, name: p[name] - mean}, mean

    def put(p: Parameters, mean: Tensor) -> dict[str, Tensor]:
        return {**p, name: p[name] + mean.to(p[name].dtype)}

    return Coordinate(name, "shifts", i, (attention.kv_heads, attention.group), take, put)


def _qk_gain(i: int, attention: Attention) -> Coordinate:
    """A scale on each plane (or still lane) moves between the query and the key gain; normal: both equally large there."""
    q, k = f"layers.{i}.attention.q_gain", f"layers.{i}.attention.k_gain"
    blocks = (*attention.planes, *((lane,) for lane in attention.still_lanes))
    owner = torch.empty(attention.head_dim, dtype=torch.int64)
    for b, lanes in enumerate(blocks):
        owner[list(lanes)] = b
    offset = attention.qk_norm_offset
    per_head = attention.qk_norm == "all"

    def energy(gain: Tensor) -> Tensor:
        total = torch.zeros(*gain.shape[:-1], len(blocks), dtype=gain.dtype)
        return total.index_add(-1, owner, gain**2)

    def scaled(p: Parameters, s: Tensor) -> dict[str, Tensor]:
        """Multiply the query gain and divide the key gain by s [(kv,) blocks]."""
        lanes = s.to(p[q].dtype)[..., owner]
        q_gain = (p[q] + offset) * (lanes.unsqueeze(1) if per_head else lanes)
        return {**p, q: q_gain - offset, k: (p[k] + offset) / lanes - offset}

    def take(p: Parameters) -> tuple[dict[str, Tensor], Tensor]:
        query = energy(p[q] + offset)
        query = query.sum(1) if per_head else query
        ratio = query / energy(p[k] + offset)
        if not bool((torch.isfinite(ratio) & (ratio > 0)).all()):
            raise CosetError(
                f"tensors {q} and {k}: a plane has gain zero, so the scale between them is undefined; leave the space gains out"
            )
        s = ratio**0.25
        return scaled(p, 1 / s), s

    return Coordinate(f"{q} / k_gain", "gains", i, ((attention.kv_heads,) if per_head else ()) + (len(blocks),), take, scaled)


def _mean_to(source: str, target: str, width: int, unused: int = 0) -> Coordinate:
    """Every input adds one row of each table: a constant moves from table `source` to table `target`.

    The first `unused` rows of `source` are never read, so they say nothing about its mean.
    """

    def take(p: Parameters) -> tuple[dict[str, Tensor], Tensor]:
        mean = p[source][unused:].mean(0)
        return {**p, source: p[source] - mean, target: p[target] + mean}, mean

    def put(p: Parameters, mean: Tensor) -> dict[str, Tensor]:
        mean = mean.to(p[source].dtype)
        return {**p, source: p[source] + mean, target: p[target] - mean}

    return Coordinate(f"{source} mean", "shifts", None, (width,), take, put, (source, target))


def _row_to_positions(source: str, rows: slice, width: int) -> Coordinate:
    """A constant added at positions `rows` (patch bias, class token) can sit in the position table."""
    table = "embed.positions"

    def moved(p: Parameters, value: Tensor, sign: int) -> Tensor:
        out = p[table].clone()
        out[rows] += sign * value.to(out.dtype)
        return out

    def take(p: Parameters) -> tuple[dict[str, Tensor], Tensor]:
        value = p[source]
        return {**p, source: torch.zeros_like(value), table: moved(p, value, 1)}, value

    def put(p: Parameters, value: Tensor) -> dict[str, Tensor]:
        return {**p, source: value.to(p[table].dtype), table: moved(p, value, -1)}

    return Coordinate(source, "shifts", None, (width,), take, put, (source, table))


def _uniform_logits(source: str, width: int | None, layer: int | None = None) -> Coordinate:
    """Softmax (of the outputs, of a router) forgets what is added to every logit alike."""

    def take(p: Parameters) -> tuple[dict[str, Tensor], Tensor]:
        mean = p[source].mean(-1)
        return {**p, source: p[source] - mean.unsqueeze(-1)}, mean

    def put(p: Parameters, mean: Tensor) -> dict[str, Tensor]:
        return {**p, source: p[source] + mean.to(p[source].dtype).unsqueeze(-1)}

    return Coordinate(f"{source} uniform", "shifts", layer, () if width is None else (width,), take, put, _outside(source))


@lru_cache(maxsize=64)
def coordinates(architecture: Architecture) -> Mapping[str, Coordinate]:
    """Every gauge coordinate of `architecture`, in the order in which :func:`fold` takes them.

    Not among them, although `coset.symmetries` counts them: scales that a norm undoes only at ε = 0, and the blind part of a LayerNorm's
    readers where its bias cannot be folded because a reader has no bias.
    """
    a, specs = architecture, tensors(architecture)
    found: list[Coordinate] = []
    centred = removes_mean(a)
    pre = {f"layers.{i}.{n}": i for i, layer in enumerate(a.layers) if layer.arrangement == "pre" for n in ("attention_norm", "mlp_norm")}
    owners: list[tuple[str, int | None, Norm | None]] = [
        (name, i, a.layers[i].attention_norm if name.endswith("attention_norm") else a.layers[i].mlp_norm) for name, i in pre.items()
    ]
    owners.append(("final_norm", None, a.final_norm))
    for name, layer, norm in owners:
        read = readers(a, name)
        if norm is None or norm.kind == "none" or not read:
            continue
        # The bias first, while the readers still are what it meets: a lane whose gain is zero may have one.
        if norm.has_bias and all(f"{spec.name}_bias" in specs for spec in read):
            found.append(_norm_bias(a, name, layer))
        if norm.has_gain:
            found.append(_gain(a, name, norm, layer))
    foldable = {c.name for c in found}
    for i, layer_ in enumerate(a.layers):
        att = layer_.attention
        if att.key_bias and att.qk_norm is None and att.still_lanes:
            found.append(_key_bias(i, att))
        if att.value_bias and att.output_bias:
            found.append(_value_bias(i, att))
        if isinstance(att.positions, RelativeBias):
            found.append(_bias_table(i, att))
        if att.qk_norm is not None:
            found.append(_qk_gain(i, att))
        if isinstance(layer_.mlp, Experts):
            found.append(_uniform_logits(f"layers.{i}.mlp.router", a.width, i))
    found += _input_coordinates(a)
    for name, _, norm in owners:
        if norm is not None and norm.kind == "layer" and (not norm.has_bias or f"{name}.bias" in foldable):
            needs = tuple(n for n in (f"{name}.gain", f"{name}.bias") if n in foldable)
            found += [_reader_mean(spec, needs) for spec in readers(a, name)]
    if centred:
        found += [_writer_mean(s) for s in specs.values() if _writes(a, s)]
    if a.probabilities and "head" in specs:
        found.append(_uniform_logits("head", a.width))
    if a.probabilities and "head_bias" in specs:
        found.append(_uniform_logits("head_bias", None))
    return MappingProxyType({c.name: c for c in found})


def _writes(a: Architecture, spec: TensorSpec) -> bool:
    """Whether the tensor only adds to the stream (a tied embedding is read too; a norm's bias is not a summand of the stream's layers)."""
    last = spec.axes[-1]
    if last.space != "stream" or last.variance != 1 or spec.name.endswith("norm.bias"):
        return False
    if spec.name.startswith("embed.") and a.embedding_norm.kind == "rms":
        return False
    return not (a.tied and spec.name == "embed.tokens")


def _input_coordinates(a: Architecture) -> list[Coordinate]:
    table = isinstance(a.positions, LearnedPositions) or (isinstance(a.positions, Sinusoidal) and a.positions.stored)
    unused = a.positions.offset if isinstance(a.positions, LearnedPositions) else 0
    found = []
    if isinstance(a.inputs, Tokens):
        if not a.tied and a.inputs.scale == 1.0:
            found += [_mean_to("embed.positions", "embed.tokens", a.width, unused)] if table else []
            found += [_mean_to("embed.types", "embed.tokens", a.width)] if a.inputs.types else []
        elif table and a.inputs.types:
            found.append(_mean_to("embed.types", "embed.positions", a.width))
    elif isinstance(a.inputs, Patches) and table:
        first = int(a.inputs.class_token)
        if a.inputs.bias:
            found.append(_row_to_positions("embed.patches_bias", slice(first, None), a.width))
        if first:
            found.append(_row_to_positions("embed.class_token", slice(0, 1), a.width))
    return found


def folded_architecture(architecture: Architecture, names: Iterable[str]) -> Architecture:
    """The architecture of the normal form in which coordinates `names` are folded: those norms lose their gain and bias."""
    chosen = set(names)

    def bare(norm: Norm, name: str) -> Norm:
        return replace(norm, gain=norm.gain and f"{name}.gain" not in chosen, bias=norm.bias and f"{name}.bias" not in chosen)

    layers = tuple(
        replace(
            layer,
            attention_norm=bare(layer.attention_norm, f"layers.{i}.attention_norm"),
            mlp_norm=None if layer.mlp_norm is None else bare(layer.mlp_norm, f"layers.{i}.mlp_norm"),
        )
        for i, layer in enumerate(architecture.layers)
    )
    return replace(architecture, layers=layers, final_norm=bare(architecture.final_norm, "final_norm"))


def _present(c: Coordinate, parameters: Parameters) -> bool:
    """Whether the block that holds the coordinate is in this subset of the parameters."""
    return any(name.startswith(f"layers.{c.layer}.") if c.layer is not None else not name.startswith("layers.") for name in parameters)


def fold(
    architecture: Architecture, parameters: Parameters, names: Iterable[str] | None = None
) -> tuple[Architecture, dict[str, Tensor], Gauge]:
    """Bring `parameters` to normal form in the chosen coordinates (default: all).

    Parameters
    ----------
    architecture
        Of the parameters.
    parameters
        All canonical tensors, or whole blocks of them (all tensors of some layers; all tensors outside layers). float64 is advised.
    names
        Coordinates to fold; see :func:`coordinates`. What a LayerNorm's readers are blind to needs its gain and bias folded too.

    Returns
    -------
    architecture, parameters, gauge
        The architecture of the normal form (folded norms have no gain), the tensors, and the values that were taken out. The function is
        the same.

    Raises
    ------
    CosetError
        If a coordinate does not exist or lacks one that it needs, a gain is zero where its norm's bias is not, or a query or key gain
        vanishes on a whole plane.
    """
    available = coordinates(architecture)
    chosen = set(available if names is None else names)
    unknown = chosen - available.keys()
    if unknown:
        raise CosetError(f"gauge: this architecture has no coordinate {', '.join(sorted(unknown))}")
    faults = [
        f"gauge: {name} is free only where {n} is folded too" for name in sorted(chosen) for n in available[name].needs if n not in chosen
    ]
    if faults:
        raise CosetError("\n".join(faults))
    out, gauge = dict(parameters), {}
    for name, c in available.items():
        if name in chosen and _present(c, parameters):
            out, gauge[name] = c.take(out)
    return folded_architecture(architecture, chosen), out, gauge


def unfold(architecture: Architecture, parameters: Parameters, gauge: Gauge) -> dict[str, Tensor]:
    """Write the normal form `parameters` of `architecture` in the given gauge: the inverse of :func:`fold`, for any values.

    Raises
    ------
    CosetError
        If a gain in `gauge` is zero, or a coordinate does not exist.
    """
    available = coordinates(architecture)
    unknown = gauge.keys() - available.keys()
    if unknown:
        raise CosetError(f"gauge: this architecture has no coordinate {', '.join(sorted(unknown))}")
    out = dict(parameters)
    for name, c in reversed(list(available.items())):
        if name in gauge and _present(c, parameters):
            out = c.put(out, gauge[name])
    order = tensors(architecture)
    return {name: out[name] for name in order if name in out}


def read_gauge(architecture: Architecture, parameters: Parameters, names: Iterable[str]) -> dict[str, Tensor]:
    """The values of the named coordinates, in float64, reading one block of the parameters at a time, and only those that have any."""
    out: dict[str, Tensor] = {}
    chosen, specs = set(names), tensors(architecture)
    owners = {c.layer for name, c in coordinates(architecture).items() if name in chosen}
    for block in blocks(architecture):
        if specs[block[0]].layer in owners:
            out.update(fold(architecture, {name: parameters[name].to(torch.float64) for name in block}, chosen)[2])
    return out


def random_gauge(architecture: Architecture, own: Gauge, generator: torch.Generator) -> dict[str, Tensor]:
    """Random values of the same coordinates as `own`: gains and scales times factors in [1/2, 2], shifts plus noise of their own size."""
    space = {name: c.space for name, c in coordinates(architecture).items()}
    out = {}
    for name, value in own.items():
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        if space[name] == "gains":
            factor = torch.pow(
                torch.tensor(2.0, dtype=torch.float64), 2 * torch.rand(value.shape, generator=generator, dtype=torch.float64) - 1
            )
            alive = torch.where(value == 0, torch.ones_like(value), value)
            out[name] = alive * factor
        else:
            size = value.square().mean().sqrt()
            out[name] = value + noise * (size if size > 0 else 0.1)
    return out


def stored_exactly(architecture: Architecture, gauge: Gauge, instead: Gauge) -> dict[str, Tensor]:
    """`gauge` with every norm's gain at the nearest value that bfloat16, and so every wider type, stores without rounding.

    Readers are divided by the gain before they are stored: were the gain rounded afterwards, their product would not be what it was, the less so
    the smaller a gain beside its offset. Lanes that would become zero or leave the range have the gain that they have in `instead`.
    """
    out = dict(gauge)
    for name, value in gauge.items():
        offset = coordinates(architecture)[name].offset
        if offset is not None:
            near = (value - offset).to(torch.bfloat16).to(value.dtype) + offset
            out[name] = torch.where((near * value > 0) & torch.isfinite(near), near, instead[name])
    return out


def compatible_gauge(reference: Gauge, own: Gauge, floor: float = 1e-6) -> tuple[dict[str, Tensor], list[str]]:
    """The reference's gauge, with lanes replaced where its gain is too small to divide by.

    Returns the gauge and a note for every coordinate in which lanes were replaced by the gain's root mean square: there the
    result has a gain of its own, because ``W / gain`` would leave the range of 16-bit floats. Trained models do have gains 10⁻⁵ of their
    root mean square (SmolLM2-135M), so the floor is well below.
    """
    out, notes = {}, []
    for name, value in reference.items():
        if name.endswith(".gain"):
            size = value.square().mean().sqrt()
            small = (value.abs() < floor * size) | (value == 0)
            if bool(small.any()):
                own_size = own[name].square().mean().sqrt()
                fallback = size if size > 0 else (own_size if own_size > 0 else torch.ones(()))
                value = torch.where(small, fallback.to(value.dtype), value)
                notes.append(
                    f"{name}: the reference's gain is nearly zero on {int(small.sum())} lanes; the result has gains of its own there"
                )
        out[name] = value
    return out, notes
