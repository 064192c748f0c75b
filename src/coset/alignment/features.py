"""What the solvers compare: a layer's tensors as stacked columns, one block of lanes at a time.

Weights and bias of a reader are stacked, ``[W; b]``: one row more than the stream is wide, where there is a bias or a metric. A
*metric* Σ (second moment of the input, with a one appended) replaces the identity in every inner product on the input side; with
Σ = F Fᵀ that is the plain inner product of ``Fᵀ [W; b]``, so the solvers never see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from coset.architecture import MLP, Architecture, Attention, Experts
from coset.errors import CosetError
from coset.groups import Block, RotaryCommutant
from coset.parameters import Parameters
from coset.symmetries import qk_group

Metric = Mapping[str, Tensor]
"""Second moments [width + 1, width + 1] of ``[x, 1]`` for the inputs x of maps, by site (``layers.i.attention.input``, ``layers.i.mlp.input``)."""


def metric_factor(metric: Metric, site: str, size: int, dtype: torch.dtype) -> Tensor:
    """F with Σ = F Fᵀ for a site of the metric, [size, size].

    Raises
    ------
    CosetError
        If Σ is missing, not of that size, not finite, or not symmetric positive semidefinite.
    """
    if site not in metric:
        raise CosetError(f"metric: no second moment for {site}; it has {', '.join(metric)}")
    moment = metric[site].to(torch.float64)
    if tuple(moment.shape) != (size, size):
        raise CosetError(f"metric: the second moment of {site} must have shape {[size, size]}, got {list(moment.shape)}")
    if not bool(torch.isfinite(moment).all()):
        raise CosetError(f"metric: the second moment of {site} holds NaN or infinity")
    if not torch.allclose(moment, moment.mT, rtol=1e-6, atol=1e-9 * float(moment.abs().max())):
        raise CosetError(f"metric: the second moment of {site} is not symmetric")
    values, vectors = torch.linalg.eigh(moment)
    if float(values[0]) < -1e-6 * float(values[-1]):
        raise CosetError(f"metric: the second moment of {site} is not positive semidefinite (smallest eigenvalue {float(values[0]):.3g})")
    return (vectors * values.clamp_min(0).sqrt()).to(dtype)


def stacked(weight: Tensor, bias: Tensor | None, factor: Tensor | None) -> Tensor:
    """``[W; b]``, times Fᵀ where there is a metric: [rows, ...] from W [width, ...] and b [...]."""
    row = torch.zeros_like(weight[:1]) if bias is None else bias.unsqueeze(0)
    # Most files store the stream as the last axis: joined there, memory is copied in its order.
    both = torch.cat([weight.movedim(0, -1), row.movedim(0, -1)], -1).movedim(-1, 0)
    return both if factor is None else torch.tensordot(factor, both, dims=([0], [0]))


@dataclass(frozen=True)
class QKBlocks:
    """Blocks of lanes of one kind and size, stacked: q [block, kv, query, rows, m], k [block, kv, rows, m]; complex where lanes turn."""

    blocks: tuple[Block, ...]
    q: Tensor
    k: Tensor


@dataclass(frozen=True)
class HeadFeatures:
    """Attention of one layer.

    Attributes
    ----------
    qk
        Queries and keys block by block; under QK-norm one real block holds all lanes.
    v, o
        [kv, rows, m] and [kv, query, m, width].
    per_query
        Further numbers that only travel with the heads, [kv, query, n]: position-bias rows, per-head gains.
    heads
        Outputs of the query heads [kv, query, rows, m], where activations are compared; None for weights.
    """

    qk: tuple[QKBlocks, ...]
    v: Tensor
    o: Tensor
    per_query: Tensor | None
    heads: Tensor | None = None


def head_features(
    architecture: Architecture, i: int, p: Parameters, factor: Tensor | None = None, *, circuits: bool = False
) -> HeadFeatures:
    """Features of layer i's attention from its canonical tensors.

    With `circuits` the biases that no output can see (a key bias without rotation, a value bias beside an output bias) are left out: the
    products ``Q Kᵀ`` and ``V O`` of what remains are invariant.
    """
    a = architecture.layers[i].attention
    prefix = f"layers.{i}.attention"
    k_bias, v_bias = p.get(f"{prefix}.k_bias"), p.get(f"{prefix}.v_bias")
    if circuits and k_bias is not None and a.qk_norm is None and a.still_lanes:
        k_bias = k_bias.clone()
        k_bias[..., torch.tensor(a.still_lanes)] = 0
    if circuits and a.output_bias:
        v_bias = None

    def columns(name: str, bias: Tensor | None) -> Tensor:
        weight = p[f"{prefix}.{name}"]
        return weight if bias is None and factor is None else stacked(weight, bias, factor)

    q, k = columns("q", p.get(f"{prefix}.q_bias")), columns("k", k_bias)
    v = columns("v", v_bias).permute(1, 0, 2)
    return HeadFeatures(lane_features(a, q, k), v, p[f"{prefix}.o"], per_query_features(a, prefix, p))


def per_query_features(a: Attention, prefix: str, p: Parameters) -> Tensor | None:
    """What only travels with the query heads of a layer, [kv, query, n]; None where there is nothing."""
    parts = []
    table = p.get(f"{prefix}.position_bias")
    if table is not None:
        parts.append((table - table.mean(0)).permute(1, 2, 0))
    if a.qk_norm == "all":
        q_gain, k_gain = p[f"{prefix}.q_gain"], p[f"{prefix}.k_gain"]
        parts += [q_gain, k_gain.unsqueeze(1).expand_as(q_gain)]
    return torch.cat(parts, -1) if parts else None


def lane_blocks(a: Attention) -> tuple[tuple[Block, ...], ...]:
    """Blocks of the QK group, grouped by kind and size so that each group is solved in one batch."""
    group = qk_group(a)
    if not isinstance(group, RotaryCommutant):
        return ((Block(tuple(range(a.head_dim)), None),),)
    kinds: dict[tuple[bool, int], list[Block]] = {}
    for block in group.blocks:
        kinds.setdefault((block.imaginary is None, block.size), []).append(block)
    return tuple(tuple(blocks) for blocks in kinds.values())


def lane_features(a: Attention, q: Tensor, k: Tensor) -> tuple[QKBlocks, ...]:
    """Queries [rows, kv, query, lanes] and keys [rows, kv, lanes] by blocks of lanes of one kind and size."""
    out = []
    for blocks in lane_blocks(a):
        parts = [_lanes(x, blocks) for x in (q, k)]
        out.append(QKBlocks(blocks, parts[0].permute(0, 2, 3, 1, 4), parts[1].permute(0, 2, 1, 3)))
    return tuple(out)


def _lanes(x: Tensor, blocks: tuple[Block, ...]) -> Tensor:
    """The lanes of blocks of one kind and size m, complex where they turn: [block, *x.shape[:-1], m] from [.., lanes].

    With the blocks in front in memory as well, their products with each other are plain batches of matrix products.
    """
    count, m = len(blocks), blocks[0].size
    if count == 1 and blocks[0].imaginary is None and m == x.shape[-1]:
        return x.unsqueeze(0)
    picked = x[..., torch.tensor([lane for b in blocks for lane in b.real])]
    if blocks[0].imaginary is not None:
        picked = torch.complex(picked, x[..., torch.tensor([lane for b in blocks for lane in b.imaginary or ()])])
    flat = picked.reshape(-1, count * m)
    if m == 1:
        return flat.mT.contiguous().reshape(count, *x.shape[:-1], 1)
    return flat.reshape(-1, count, m).transpose(0, 1).contiguous().reshape(count, *x.shape[:-1], m)


@dataclass(frozen=True)
class NeuronFeatures:
    """An MLP, one column a neuron, with a leading expert axis where there are experts.

    Attributes
    ----------
    covariant
        ``[up; up bias]``, [.., rows, m]: scales with the neuron. One row more than `dual` has where there is a bias or a metric.
    dual
        ``down``ᵀ, [.., width, m]: scales inversely.
    plain
        ``[gate; gate bias]``, [.., rows, m], only reordered; None without a gate.
    router
        [rows, experts]; None without experts.
    """

    covariant: Tensor
    dual: Tensor
    plain: Tensor | None
    router: Tensor | None


def neuron_features(architecture: Architecture, i: int, p: Parameters, factor: Tensor | None = None) -> NeuronFeatures:
    """Features of layer i's MLP from its canonical tensors."""
    mlp: MLP | Experts = architecture.layers[i].mlp
    prefix = f"layers.{i}.mlp"
    experts = isinstance(mlp, Experts)

    def columns(name: str) -> Tensor:
        weight, bias = p[f"{prefix}.{name}"], p.get(f"{prefix}.{name}_bias")
        if bias is None and factor is None:
            return weight  # MLPs are most of a layer: no copy
        # The stream axis leads in `stacked`, so experts step behind it and back.
        both = stacked(weight.movedim(-2, 0), bias, factor)
        return both.movedim(0, -2)

    inner = mlp.mlp if isinstance(mlp, Experts) else mlp
    return NeuronFeatures(
        columns("up"),
        p[f"{prefix}.down"].mT,
        columns("gate") if inner.gated else None,
        stacked(p[f"{prefix}.router"], None, factor) if experts else None,
    )
