"""The canonical tensors of an architecture and their labelled axes.

Every axis of every tensor belongs to a *space*; a symmetry is one group element per space. How an axis answers to the element g
of its space is its *variance*:

* ``+1``  covariant, a row vector there becomes ``x g`` (the outputs of W_Q, the columns that write to the stream);
* ``-1``  dual, it becomes ``x g^{-T}`` (what is contracted with a covariant axis: the stream axis of every reader);
* ``0``   order only, the axis is reordered with g but neither scaled nor signed (norm gains, SwiGLU gates).

Given this table, acting, counting and matching are loops over axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import torch
from torch import Tensor

from coset.architecture import (
    MLP,
    Architecture,
    Classifier,
    Experts,
    LanguageModel,
    LearnedPositions,
    Norm,
    Patches,
    RelativeBias,
    Sinusoidal,
    Tokens,
)
from coset.errors import CosetError

Parameters = Mapping[str, Tensor]
"""Canonical tensors by name. Always treated as immutable: functions return new mappings."""


@dataclass(frozen=True)
class Axis:
    """One axis: its space, its size, and its variance (+1 covariant, -1 dual, 0 order only).

    Spaces are ``stream``; the layer's ``kv``, ``query`` (query heads inside a KV group), ``qk``, ``vo``, ``neuron``, ``expert``;
    and fixed ones that no symmetry touches (``vocabulary``, ``position``, ``patch``, ``class``, ``type``, ``bucket``, ``lane``).
    """

    space: str
    size: int
    variance: int = 1


@dataclass(frozen=True)
class TensorSpec:
    """Name, axes and place of a canonical tensor.

    Attributes
    ----------
    layer
        Index of the layer that owns it; None for the two ends of the model.
    reads
        Name of the norm whose output the tensor multiplies (``layers.0.attention_norm``, ``final_norm``); None where it
        does not read a normalised stream.
    """

    name: str
    axes: tuple[Axis, ...]
    layer: int | None = None
    reads: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(a.size for a in self.axes)

    def axis(self, space: str) -> int | None:
        """Index of the axis that belongs to `space`, or None."""
        return next((i for i, a in enumerate(self.axes) if a.space == space), None)


def _norm(name: str, norm: Norm, width: int, layer: int | None) -> Iterator[TensorSpec]:
    if norm.has_gain:
        yield TensorSpec(f"{name}.gain", (Axis("stream", width, 0),), layer)
    if norm.has_bias:
        yield TensorSpec(f"{name}.bias", (Axis("stream", width),), layer)


def _layer(a: Architecture, i: int) -> Iterator[TensorSpec]:
    layer, d, p = a.layers[i], a.width, f"layers.{i}"
    att = layer.attention
    read = Axis("stream", d, -1)
    write = Axis("stream", d)
    kv, query = Axis("kv", att.kv_heads), Axis("query", att.group)
    qk, qk_dual = Axis("qk", att.head_dim), Axis("qk", att.head_dim, -1)
    vo, vo_dual = Axis("vo", att.value_dim), Axis("vo", att.value_dim, -1)

    def reads(norm: str, present: Norm) -> str | None:
        return norm if layer.arrangement == "pre" and present.kind != "none" else None

    source = reads(f"{p}.attention_norm", layer.attention_norm)
    yield from _norm(f"{p}.attention_norm", layer.attention_norm, d, i)
    yield TensorSpec(f"{p}.attention.q", (read, kv, query, qk), i, source)
    if att.query_bias:
        yield TensorSpec(f"{p}.attention.q_bias", (kv, query, qk), i)
    yield TensorSpec(f"{p}.attention.k", (read, kv, qk_dual), i, source)
    if att.key_bias:
        yield TensorSpec(f"{p}.attention.k_bias", (kv, qk_dual), i)
    yield TensorSpec(f"{p}.attention.v", (read, kv, vo), i, source)
    if att.value_bias:
        yield TensorSpec(f"{p}.attention.v_bias", (kv, vo), i)
    yield TensorSpec(f"{p}.attention.o", (kv, query, vo_dual, write), i)
    if att.output_bias:
        yield TensorSpec(f"{p}.attention.o_bias", (write,), i)
    if att.qk_norm == "head":
        lanes = Axis("lane", att.head_dim)
        yield TensorSpec(f"{p}.attention.q_gain", (lanes,), i)
        yield TensorSpec(f"{p}.attention.k_gain", (lanes,), i)
    elif att.qk_norm == "all":
        lanes = Axis("qk", att.head_dim, 0)
        yield TensorSpec(f"{p}.attention.q_gain", (kv, query, lanes), i)
        yield TensorSpec(f"{p}.attention.k_gain", (kv, lanes), i)
    if isinstance(att.positions, RelativeBias):
        yield TensorSpec(f"{p}.attention.position_bias", (Axis("bucket", att.positions.buckets), kv, query), i)

    if layer.mlp_norm is None:
        source = reads(f"{p}.attention_norm", layer.attention_norm)
    else:
        source = reads(f"{p}.mlp_norm", layer.mlp_norm)
        yield from _norm(f"{p}.mlp_norm", layer.mlp_norm, d, i)
    experts: tuple[Axis, ...] = ()
    mlp = layer.mlp
    if isinstance(mlp, Experts):
        experts = (Axis("expert", mlp.count),)
        yield TensorSpec(f"{p}.mlp.router", (read, *experts), i, source)
        mlp = mlp.mlp
    yield from _mlp(p, i, mlp, experts, read, write, source)


def _mlp(p: str, i: int, mlp: MLP, experts: tuple[Axis, ...], read: Axis, write: Axis, source: str | None) -> Iterator[TensorSpec]:
    neuron, dual = Axis("neuron", mlp.width), Axis("neuron", mlp.width, -1)
    if mlp.gated:
        gate = Axis("neuron", mlp.width, 0)
        yield TensorSpec(f"{p}.mlp.gate", (*experts, read, gate), i, source)
        if mlp.up_bias:
            yield TensorSpec(f"{p}.mlp.gate_bias", (*experts, gate), i)
    yield TensorSpec(f"{p}.mlp.up", (*experts, read, neuron), i, source)
    if mlp.up_bias:
        yield TensorSpec(f"{p}.mlp.up_bias", (*experts, neuron), i)
    yield TensorSpec(f"{p}.mlp.down", (*experts, dual, write), i)
    if mlp.down_bias:
        yield TensorSpec(f"{p}.mlp.down_bias", (*experts, write), i)


def _specs(a: Architecture) -> Iterator[TensorSpec]:
    d = a.width
    write = Axis("stream", d)
    read = Axis("stream", d, -1)
    if isinstance(a.inputs, Tokens):
        yield TensorSpec("embed.tokens", (Axis("vocabulary", a.inputs.vocabulary), write))
        if a.inputs.types:
            yield TensorSpec("embed.types", (Axis("type", a.inputs.types), write))
    elif isinstance(a.inputs, Patches):
        yield TensorSpec("embed.patches", (Axis("patch", a.inputs.features), write))
        if a.inputs.bias:
            yield TensorSpec("embed.patches_bias", (write,))
        if a.inputs.class_token:
            yield TensorSpec("embed.class_token", (write,))
    if isinstance(a.positions, LearnedPositions) or (isinstance(a.positions, Sinusoidal) and a.positions.stored):
        yield TensorSpec("embed.positions", (Axis("position", a.positions.count), write))
    yield from _norm("embed.norm", a.embedding_norm, d, None)
    for i in range(len(a.layers)):
        yield from _layer(a, i)
    yield from _norm("final_norm", a.final_norm, d, None)
    source = None if a.final_norm.kind == "none" else "final_norm"
    if isinstance(a.outputs, LanguageModel) and isinstance(a.inputs, Tokens):
        vocabulary = Axis("vocabulary", a.inputs.vocabulary)
        if not a.outputs.tied:
            yield TensorSpec("head", (read, vocabulary), None, source)
        if a.outputs.bias:
            yield TensorSpec("head_bias", (vocabulary,))
    elif isinstance(a.outputs, Classifier):
        yield TensorSpec("head", (read, Axis("class", a.outputs.classes)), None, source)
        if a.outputs.bias:
            yield TensorSpec("head_bias", (Axis("class", a.outputs.classes),))


@lru_cache(maxsize=128)
def tensors(architecture: Architecture) -> Mapping[str, TensorSpec]:
    """Every canonical tensor of `architecture`, in forward order, by name."""
    return MappingProxyType({spec.name: spec for spec in _specs(architecture)})


def blocks(architecture: Architecture) -> tuple[tuple[str, ...], ...]:
    """Names of the tensors of the two ends together, then of every layer: the units in which a checkpoint is read."""
    out: dict[int | None, list[str]] = {None: []}
    for name, spec in tensors(architecture).items():
        out.setdefault(spec.layer, []).append(name)
    return tuple(tuple(names) for names in out.values())


def readers(architecture: Architecture, norm: str) -> tuple[TensorSpec, ...]:
    """The tensors that multiply the output of the named norm. The list comes from the architecture, never from a name pattern."""
    return tuple(spec for spec in tensors(architecture).values() if spec.reads == norm)


def norms(architecture: Architecture) -> dict[str, Norm]:
    """Every norm over the stream that does anything, by name, in forward order."""
    found = {"embed.norm": architecture.embedding_norm}
    for i, layer in enumerate(architecture.layers):
        found[f"layers.{i}.attention_norm"] = layer.attention_norm
        if layer.mlp_norm is not None:
            found[f"layers.{i}.mlp_norm"] = layer.mlp_norm
    found["final_norm"] = architecture.final_norm
    return {name: norm for name, norm in found.items() if norm.kind != "none"}


def check(architecture: Architecture, parameters: Parameters, owner: str = "parameters") -> None:
    """Raise unless `parameters` are exactly the tensors of `architecture`: names, shapes, floating dtype, all values finite.

    Raises
    ------
    CosetError
        With one line for every tensor that is missing, extra, of another shape or dtype, or holds NaN or infinity.
    """
    expected = tensors(architecture)
    faults = [
        f"{owner}: tensor {name} is missing (expected shape {list(spec.shape)})"
        for name, spec in expected.items()
        if name not in parameters
    ]
    faults += [f"{owner}: tensor {name} does not belong to this architecture" for name in parameters if name not in expected]
    for name, spec in expected.items():
        if name not in parameters:
            continue
        tensor = parameters[name]
        if tuple(tensor.shape) != spec.shape:
            labels = ", ".join(a.space for a in spec.axes)
            faults.append(f"{owner}: tensor {name} [{labels}] must have shape {list(spec.shape)}, got {list(tensor.shape)}")
        elif not tensor.is_floating_point():
            faults.append(f"{owner}: tensor {name} must be floating point, got {tensor.dtype}")
        elif not bool(torch.isfinite(tensor).all()):
            faults.append(f"{owner}: tensor {name} holds NaN or infinity; a checkpoint like that cannot be transformed or compared")
    if faults:
        raise CosetError("\n".join(faults))


def count(architecture: Architecture) -> int:
    """Number of scalar parameters."""
    return sum(torch.Size(spec.shape).numel() for spec in tensors(architecture).values())
