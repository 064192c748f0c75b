r"""Numbers of a model that no symmetry changes, and a hash of them: to look a disguised copy up without the other model at hand.

The numbers are taken in normal form (gauge folded), where the rest of the group is a rotation of the stream, permutations, and changes of
basis inside heads; so they are norms and singular values of circuits ``Q Kᵀ`` (of every rotary plane, under RoPE) and ``V O``, and norms
and inner products of what neurons read and write.

The hash is a lookup key, not a proof. It rounds a few well averaged combinations of all the numbers: with x_l = √n_l log I_l for an
invariant I_l that averages n_l weights, rounding the stored weights moves every x_l by about the unit roundoff u, whatever the size of
the model, and so do the combinations ``v_k = Σ_l ± x_l / √N``. Cells are a large multiple of u wide, which keeps a copy in its cell, and
a change of the weights by a relative δ moves v_k by about δ, many cells if δ is well above the cell.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coset.alignment.features import HeadFeatures, head_features, neuron_features
from coset.alignment.heads import head_cost
from coset.alignment.neurons import invariants
from coset.architecture import Architecture
from coset.errors import CosetError
from coset.groups import GeneralLinear, Wreath
from coset.normal_form import coordinates, fold, folded_architecture
from coset.parameters import Parameters, tensors
from coset.symmetries import group as symmetry_group
from coset.transform import move, signature

COMBINATIONS = 5
"""How many numbers are rounded and hashed."""

CELLS = {torch.float32: 1e-3, torch.float16: 0.4, torch.bfloat16: 1.0}
"""Width of a cell of the hash, by the coarsest stored dtype; float64 counts as float32, so that both give one hash."""


@dataclass(frozen=True)
class Fingerprint:
    """Invariants of a model, and their hash.

    Attributes
    ----------
    hash
        Hexadecimal; the same for equivalent checkpoints of one precision.
    alternate
        The same on a grid shifted by half a cell. About one model in a hundred lies so near an edge of its cell that rounding moves its copies
        across: they then still share the other hash.
    precision
        The stored precision for which the hash is stable, and the cell that it rounds to.
    layers
        For every layer its numbers by name; lists run over heads (in ascending order) or rotary planes.
    ends
        Numbers of what lies outside the layers.
    values
        The logarithms of everything that enters the hash.
    """

    hash: str
    alternate: str
    precision: str
    layers: tuple[Mapping[str, Any], ...]
    ends: Mapping[str, float]
    values: tuple[float, ...]

    def distance(self, other: Fingerprint) -> float:
        """Root mean square relative difference of the invariants: for equivalent models of the size of the roundoff, whatever their hashes.

        Infinite if the two have other sizes.
        """
        if len(self.values) != len(other.values):
            return math.inf
        gap = torch.tensor(self.values, dtype=torch.float64) - torch.tensor(other.values, dtype=torch.float64)
        return float(gap.square().mean().sqrt()) / 2

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the keys that scripts rely on."""
        return {
            "fingerprint": self.hash,
            "alternate": self.alternate,
            "precision": self.precision,
            "layers": [dict(layer) for layer in self.layers],
            "ends": dict(self.ends),
            "values": list(self.values),
        }


def fingerprint(architecture: Architecture, parameters: Parameters, *, stored: torch.dtype | None = None) -> Fingerprint:
    """Invariants and hash of a model.

    Parameters
    ----------
    architecture
        Of the parameters.
    parameters
        Canonical tensors by name; asked for block by block, so a lazy mapping keeps memory at a layer.
    stored
        The coarsest dtype in which they are stored; default their own.

    Raises
    ------
    CosetError
        If the gauge cannot be folded (a gain is zero where a bias is not), or no input table determines the basis of a stream without
        norms.
    """
    if stored is None:
        stored = max((parameters[name].dtype for name in tensors(architecture)), key=lambda d: torch.finfo(d).eps)
    stored = torch.float32 if stored == torch.float64 else stored
    names = tuple(coordinates(architecture))
    folded = folded_architecture(architecture, names)
    groups = symmetry_group(folded).factors
    basis: Tensor | None = None
    layers, ends, values, sizes = [], {}, [], []
    for index in (None, *range(len(architecture.layers))):
        own = {n: parameters[n].to(torch.float64) for n, spec in tensors(architecture).items() if spec.layer == index}
        block: Parameters = fold(architecture, own, names)[1]
        if index is None and isinstance(groups.get("stream"), GeneralLinear):
            basis = _basis(block)
        if basis is not None:
            block = move(folded, {"stream": basis}, block)
        numbers: dict[str, Any] = {}
        for name, value, n in _vectors(folded, block):
            numbers[name] = math.sqrt(value)
            values.append(math.log(value))
            sizes.append(n)
        if index is None:
            ends = numbers
            continue
        for name, shown, total, n in _layer(folded, index, block):
            if shown is not None:
                numbers[name] = shown
            if total > 0:
                values.append(math.log(total))
                sizes.append(n)
        layers.append({name.removeprefix(f"layers.{index}."): value for name, value in numbers.items()})
    precision = f"{str(stored).removeprefix('torch.')}, cell {CELLS[stored]:g}"
    points = _combined(values, sizes) / CELLS[stored]
    hashes = [_hash(architecture, points, precision, shift) for shift in (0.0, 0.5)]
    return Fingerprint(hashes[0], hashes[1], precision, tuple(layers), ends, tuple(values))


def _combined(values: list[float], sizes: list[int]) -> Tensor:
    """The sums with random signs, each moved by rounding about as much as any one value times the root of its size."""
    x = torch.tensor(values, dtype=torch.float64) * torch.tensor(sizes, dtype=torch.float64).sqrt()
    signs = 2.0 * torch.randint(0, 2, (COMBINATIONS, len(x)), generator=torch.Generator().manual_seed(0)).to(torch.float64) - 1
    return signs @ x / math.sqrt(len(x))


def _hash(architecture: Architecture, points: Tensor, precision: str, shift: float) -> str:
    text = json.dumps([signature(architecture), precision, shift, torch.round(points + shift).to(torch.int64).tolist()])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _basis(ends: Parameters) -> Tensor:
    """Without norms any basis of the stream will do; take the one, up to a rotation, in which the input tables have unit Gram matrix.

    Where they do not span the stream, the unembedding decides in the same way.
    """
    rows = torch.cat([x.reshape(-1, x.shape[-1]) for name, x in ends.items() if name.startswith("embed.")])
    grams = [(rows.mT @ rows, -0.5)]
    if "head" in ends:
        grams.append((ends["head"] @ ends["head"].mT, 0.5))  # a reader: what it spans turns the other way
    for gram, power in grams:
        values, vectors = torch.linalg.eigh(gram)
        if bool(values[0] > 1e-10 * values[-1]):
            return (vectors * values.pow(power)) @ vectors.mT
    raise CosetError(
        "fingerprint: nothing normalises the stream, and neither the input tables nor the unembedding span it: its basis cannot be fixed"
    )


def _vectors(a: Architecture, block: Parameters) -> Iterator[tuple[str, float, int]]:
    """Squared norms of the tensors that only the stream's group, or nothing, moves: (name, square, entries)."""
    for name, spec in tensors(a).items():
        inner = any(axis.space in ("kv", "query", "qk", "vo", "neuron", "expert", "lane") for axis in spec.axes)
        if name not in block or inner:
            continue
        square = float(block[name].square().sum())
        if square > 1e-24:
            yield name, square, block[name].numel()


def _layer(a: Architecture, i: int, block: Parameters) -> Iterator[tuple[str, Any, float, int]]:
    """Numbers of a layer: (name, what to show or None, what enters the hash, weights it averages)."""
    groups = symmetry_group(a).factors
    heads = groups[f"layers.{i}.heads"]
    assert isinstance(heads, Wreath)
    f = head_features(a, i, block, circuits=True)
    for name, part, entries in (
        ("qk", dataclasses.replace(f, v=torch.zeros_like(f.v), o=torch.zeros_like(f.o)), f.qk[0].k.numel() * len(f.qk)),
        ("vo", dataclasses.replace(f, qk=_empty(f).qk, per_query=_empty(f).per_query), f.v.numel()),
    ):
        cost = head_cost(heads, part, _empty(f))
        energy = cost.flatten(2)[..., 0].flatten()
        yield f"{name}_norms", sorted(energy.clamp_min(0).sqrt().tolist()), float(energy.sum()), entries
        yield f"{name}_squares", None, float(energy.square().sum()), entries
    for name, value in _spectra(f):
        yield name, value, 0.0, 1
    table = invariants(groups[f"layers.{i}.neurons"], neuron_features(a, i, block)).flatten(0, -2)
    width = a.width
    names = _NEURON_NAMES[: table.shape[-1]]
    for name, column in zip(names, table.mT, strict=True):
        total = float(column.square().sum())
        if total > 1e-24:
            yield f"neuron_{name}", math.sqrt(total / len(column)), total, len(column) * width
    router = block.get(f"layers.{i}.mlp.router")
    if router is not None:
        yield "router", float(router.norm()), float(router.square().sum()), router.numel()
    for name in ("q_gain", "k_gain"):
        gain = block.get(f"layers.{i}.attention.{name}")
        if gain is not None:
            yield name, float(gain.norm()), float(gain.square().sum()), gain.numel()
    bias = block.get(f"layers.{i}.mlp.down_bias")
    if bias is not None and bias.ndim > 1:
        yield "down_bias", float(bias.norm()), float(bias.square().sum()), bias.numel()


_NEURON_NAMES = ("read", "write", "read_write", "bias", "gate", "gate_products", "gate_bias")


def _empty(f: HeadFeatures) -> HeadFeatures:
    qk = tuple(dataclasses.replace(x, q=torch.zeros_like(x.q), k=torch.zeros_like(x.k)) for x in f.qk)
    return HeadFeatures(qk, torch.zeros_like(f.v), torch.zeros_like(f.o), None if f.per_query is None else torch.zeros_like(f.per_query))


def _spectra(f: HeadFeatures) -> Iterator[tuple[str, list[float]]]:
    """Largest singular value of every head's circuits, ascending; under RoPE the size of every plane's products, over all heads."""
    largest = []
    for x in f.qk:
        gram_q, gram_k = x.q.mH @ x.q, (x.k.mH @ x.k).unsqueeze(2)
        if x.k.shape[-1] == 1:
            planes = (gram_q * gram_k).real.sum((1, 2, 3, 4)).clamp_min(0).sqrt()
            yield "qk_planes", planes.tolist()
        largest.append(_top(gram_q, gram_k).amax(0))
    yield "qk_largest", sorted(torch.stack(largest).amax(0).flatten().tolist())
    gram_v, gram_o = (f.v.mT @ f.v).unsqueeze(1), f.o @ f.o.mT
    yield "vo_largest", sorted(_top(gram_o, gram_v).flatten().tolist())


def _top(left: Tensor, right: Tensor) -> Tensor:
    """Largest singular value of ``L Rᴴ`` from the Gram matrices of L and R, [*batch]."""
    values, vectors = torch.linalg.eigh(right)
    root = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mH
    return torch.linalg.eigvalsh(root @ left @ root)[..., -1].clamp_min(0).sqrt()
