"""Where the element between two equivalent models is not unique: dead or repeated parts, and factors without full rank.

The theorem that the symmetry group is all of functional equivalence holds outside a null set of parameters. This module says, part by
part, where a model lies in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from coset.alignment.features import HeadFeatures, NeuronFeatures, QKBlocks, head_features, neuron_features
from coset.alignment.heads import head_cost
from coset.architecture import Architecture, Experts
from coset.groups import Group, Monomial, Orthogonal, Permutation, Wreath
from coset.parameters import Parameters, norms, tensors
from coset.symmetries import group as symmetry_group

_SHOWN = 6


def _listed(items: Sequence[object]) -> str:
    shown = ", ".join(map(str, items[:_SHOWN]))
    return shown if len(items) <= _SHOWN else f"{shown} and {len(items) - _SHOWN} more"


def degeneracies(architecture: Architecture, parameters: Parameters, precision: float = 1e-12) -> Iterator[str]:
    """Every degenerate spot of a model, in words: which layer, which part, and why nothing is unique there.

    Parameters
    ----------
    architecture
        Of the parameters.
    parameters
        Canonical tensors in float64, best in normal form; asked for in forward order, so a lazy mapping keeps memory at a layer.
    precision
        Relative spacing of the stored numbers (`eps` of their dtype): what differs by a few of them counts as equal.
    """
    groups = symmetry_group(architecture).factors
    width = architecture.width
    gram = torch.zeros(width, width, dtype=torch.float64)
    for index in (None, *range(len(architecture.layers))):
        block = {name: parameters[name] for name, spec in tensors(architecture).items() if spec.layer == index}
        yield from _gains(architecture, block, index)
        if index is not None:
            heads = groups[f"layers.{index}.heads"]
            assert isinstance(heads, Wreath)
            features = head_features(architecture, index, block, circuits=True)
            yield from (f"layer {index}: {text}" for text in _heads(heads, features, architecture.layers[index].attention.group, precision))
            mlp = architecture.layers[index].mlp
            own = neuron_features(architecture, index, block)
            count = mlp.count if isinstance(mlp, Experts) else None
            yield from (f"layer {index}: {text}" for text in _mlp(groups[f"layers.{index}.neurons"], own, count, precision))
        for name, x in block.items():
            spec = tensors(architecture)[name]
            for axis, label in enumerate(spec.axes):
                if label.space == "stream" and label.variance != 0:
                    rows = x.movedim(axis, -1).reshape(-1, width)
                    gram += rows.mT @ rows / max(float(rows.square().sum()), 1e-300)
    stream = groups.get("stream")
    if isinstance(stream, Orthogonal) and stream.fixed is not None:
        free = torch.linalg.svd(stream.fixed)[2][len(stream.fixed) :].to(gram)
        gram = free @ gram @ free.mT
    values = torch.linalg.eigvalsh(gram)
    flat = int((values <= max(precision**2, 1e-13) * values[-1]).sum())
    if flat:
        yield f"residual stream: no tensor reads or writes {flat} of its {width} directions, so its basis is free there"


def _gains(architecture: Architecture, block: Parameters, index: int | None) -> Iterator[str]:
    for name, norm in norms(architecture).items():
        if f"{name}.gain" in block:
            dead = (block[f"{name}.gain"] + norm.offset == 0).nonzero().flatten().tolist()
            if dead:
                where = "ends" if index is None else f"layer {index}"
                yield f"{where}: {name}.gain is zero on lanes {_listed(dead)}: what is read there is invisible"


def _rank(gram: Tensor, precision: float) -> Tensor:
    """Numerical rank of Gram matrices [*batch, m, m], against the largest of all: a head of mere rounding noise has rank 0."""
    values = torch.linalg.eigvalsh(gram)
    return (values > max((2 * precision) ** 2, 1e-14) * values.max()).logical_and(values > 0).sum(-1)


def _heads(group: Wreath, f: HeadFeatures, query: int, precision: float) -> Iterator[str]:
    kv = f.v.shape[0]
    factors = [("queries", x.q.flatten(2, 3)) for x in f.qk] + [("keys", x.k) for x in f.qk]
    factors += [("values", f.v.unsqueeze(0)), ("outputs", f.o.mT.flatten(1, 2).unsqueeze(0))]
    for what, x in factors:
        ranks = _rank(x.mH @ x, precision)  # [blocks, kv]
        for j in range(kv):
            poor = (ranks[:, j] < x.shape[-1]).nonzero().flatten().tolist()
            if poor and not bool(ranks[:, j].any()):
                yield f"{what} of KV head {j} are zero"
            elif poor and x.shape[0] > 1:
                yield f"{what} of KV head {j} lack full rank in {len(poor)} of {x.shape[0]} rotary planes"
            elif poor:
                yield f"{what} of KV head {j} have rank {int(ranks[0, j])} of {x.shape[-1]}"
    attending = dataclasses.replace(f, v=torch.zeros_like(f.v), o=torch.zeros_like(f.o))
    nothing = dataclasses.replace(
        attending,
        qk=tuple(QKBlocks(x.blocks, torch.zeros_like(x.q), torch.zeros_like(x.k)) for x in f.qk),
        per_query=None if f.per_query is None else torch.zeros_like(f.per_query),
    )
    n = kv * query
    cost = head_cost(group, attending, attending).reshape(n, n)
    size = head_cost(group, attending, nothing).reshape(n, n)[:, 0]
    close = cost <= max((5 * precision) ** 2, 1e-13) * (size[:, None] + size[None])
    pairs = [(int(i), int(j)) for i, j in close.triu(1).nonzero()]
    if pairs:
        yield f"query heads attend alike: {_listed(pairs)}"


def _mlp(group: Group, f: NeuronFeatures, experts: int | None, precision: float) -> Iterator[str]:
    if experts is None:
        yield from _neurons(group, f, precision)
        return
    assert isinstance(group, Wreath)
    sums = []
    for e in range(experts):
        own = NeuronFeatures(f.covariant[e], f.dual[e], None if f.plain is None else f.plain[e], None)
        yield from (f"expert {e}: {text}" for text in _neurons(group.inner, own, precision))
        sums.append(torch.stack([own.covariant.norm(), own.dual.norm(), (own.covariant.norm(dim=0) * own.dual.norm(dim=0)).sum()]))
    table = torch.stack(sums)
    for i in range(experts):
        for j in range(i + 1, experts):
            if bool(((table[i] - table[j]).abs() <= max(3 * precision, 1e-9) * table[i]).all()):
                yield f"experts {i} and {j} are equal"


def _neurons(group: Group, f: NeuronFeatures, precision: float) -> Iterator[str]:
    """Dead neurons, and neurons that compute the same of their input, so that what they write can be shared out at will."""
    parts = [("reads", f.covariant), ("writes", f.dual)] + ([] if f.plain is None else [("gates", f.plain)])
    for what, x in parts:
        dead = (~x.any(0)).nonzero().flatten().tolist()
        if dead:
            yield f"neurons {_listed(dead)}: {what} nothing"
    own = f.covariant
    scaled = not isinstance(group, Permutation)
    if scaled:
        size = own.norm(dim=0)
        own = own / torch.where(size > 0, size, torch.ones_like(size))
    signed = isinstance(group, Monomial) and group.scales != "positive"
    generator = torch.Generator().manual_seed(0)
    keys = [
        torch.randn(3, len(x), generator=generator, dtype=torch.float64) @ x / max(float(x.norm()), 1e-300)
        for x in (own, f.plain)
        if x is not None
    ]
    if signed:
        keys[0] = keys[0] * torch.where(keys[0][:1] < 0, -1.0, 1.0)
    table = torch.cat(keys).mT  # [neurons, numbers]
    order = table[:, 0].argsort()
    step = (table[order[1:]] - table[order[:-1]]).abs().amax(-1)
    alive = f.covariant.any(0)[order]
    same = (step <= max(3 * precision, 1e-9) * table.abs().mean()) & alive[1:] & alive[:-1]
    pairs = [tuple(sorted((int(order[k]), int(order[k + 1])))) for k in same.nonzero().flatten().tolist()]
    if pairs:
        yield f"neurons compute the same: {_listed(pairs)}"
