"""Which stage of the two-stage algorithm does what: the rank of stage 1's permutation, and stage 2 left out, orthogonal and full."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coset.alignment.features import HeadFeatures, head_features
from coset.alignment.heads import Solvers, assign_heads, head_cost, reordered, solve_within
from coset.architecture import Architecture
from coset.connect import Curve, evaluate, interpolate, score
from coset.groups import Permutation, Product, Wreath, WreathElement
from coset.parameters import Parameters
from coset.study.models import architecture
from coset.study.protocol import scope_layers
from coset.study.store import read_tensors
from coset.study.units import data, train
from coset.study.units.pair import measures
from coset.symmetries import group as symmetry_group
from coset.transform import move

STAGE_TWO: Mapping[str, Solvers | None] = {"none": None, "orthogonal": Solvers(linear="orthogonal"), "full": Solvers()}
"""Ways to solve stage 2 behind the same permutation; None leaves the bases as they are."""
MOST = 120
"""Most orders of the heads of a layer that are all tried: 5!."""


def run(config: Mapping[str, Any], place: Mapping[str, Any], inputs: Mapping[str, Path], folder: Path) -> dict[str, Any]:
    r"""Curves by variant of stage 2, and for every layer of the scope the chosen permutation among all others.

    Each layer's permutation is judged by the loss barrier at the middle of the segment, :math:`L(1/2) - (L(0) + L(1))/2`, with stage 2
    solved for every permutation and the other layers aligned as chosen. ``rank`` counts from 1. `config` as for `coset.study.units.pair`,
    without a matcher.
    """
    arch, device = architecture(config["model"], config["shape"]), config["device"]
    samples = data.read(inputs["data"]).to(device)
    reference, other = (read_tensors(inputs[role] / train.MODEL) for role in ("reference", "other"))

    def curve(aligned: Parameters) -> Curve:
        return evaluate(arch, reference, aligned, samples.test_inputs, samples.test_targets, points=config["points"], device=device)

    unaligned = curve(other)
    ends = (unaligned.loss[0] + unaligned.loss[-1]) / 2

    def middle(aligned: Parameters) -> float:
        half = {name: x.to(device) for name, x in interpolate(reference, aligned, 0.5).items()}
        return score(arch, half, samples.test_inputs, samples.test_targets).loss - ends

    layers = scope_layers(arch, config["scope"])
    heads = [_Heads(arch, i, reference, other) for i in (range(len(arch.layers)) if layers is None else layers)]
    variants = {
        name: curve(_moved(arch, other, {h.key: h.element(h.chosen, solvers) for h in heads})) for name, solvers in STAGE_TWO.items()
    }
    chosen = {h.key: h.element(h.chosen, Solvers()) for h in heads}
    naive, best_so_far = middle(other), middle(_moved(arch, other, chosen))
    ranks = []
    for h in heads:
        orders = h.orders()
        if orders is None:
            continue
        found = [middle(_moved(arch, other, {**chosen, h.key: h.element(order, Solvers())})) for order in orders]
        ranks.append({"layer": h.index, "rank": 1 + sum(x < best_so_far for x in found), "of": len(found), "chosen": best_so_far,
                      "best": min(*found, best_so_far), "naive": naive})  # fmt: skip
    return {"stage_two": {"naive": measures(unaligned), **{name: measures(c) for name, c in variants.items()}}, "ranks": ranks}


Order = tuple[Tensor, Tensor]
"""Permutation of KV heads [kv], and of the query heads in each [kv, query]."""


class _Heads:
    """The heads of one layer of two models, in float64."""

    def __init__(self, arch: Architecture, index: int, reference: Parameters, other: Parameters):
        self.index, self.key = index, f"layers.{index}.heads"
        group = symmetry_group(arch).factors[self.key]
        assert isinstance(group, Wreath)
        self.group = group
        models = [{name: x.to(torch.float64) for name, x in p.items() if name.startswith(f"layers.{index}.")} for p in (reference, other)]
        self.features: list[HeadFeatures] = [head_features(arch, index, p) for p in models]
        circuits = [head_features(arch, index, p, circuits=True) for p in models]
        self.chosen: Order = assign_heads(group, head_cost(group, *circuits))

    def element(self, order: Order, solvers: Solvers | None) -> WreathElement:
        """The heads in this order, stage 2 solved for it."""
        moved = reordered(self.features[1], *order)
        spaces = () if solvers is None else ("qk", "vo")
        inner, _ = solve_within(self.group, self.features[0], moved, solvers or Solvers(), spaces)
        return WreathElement(order[0], {"query": order[1], **inner})

    def orders(self) -> list[Order] | None:
        """Every order of the heads that the architecture allows; None if there is only one, or more than :data:`MOST`."""
        inner = self.group.inner
        assert isinstance(inner, Product)
        query = inner.factors["query"]
        assert isinstance(query, Permutation)
        if self.group.top.classes is not None or query.classes is not None:
            return None
        kv, each = self.group.copies, query.n
        count = torch.tensor(range(1, kv + 1)).prod().item() * torch.tensor(range(1, each + 1)).prod().item() ** kv
        return list(_orders(kv, each)) if 1 < count <= MOST else None


def _orders(kv: int, each: int) -> Iterator[Order]:
    for top in itertools.permutations(range(kv)):
        for inner in itertools.product(itertools.permutations(range(each)), repeat=kv):
            yield torch.tensor(top), torch.tensor(inner)


def _moved(arch: Architecture, other: Parameters, element: Mapping[str, WreathElement]) -> Parameters:
    """`other` after the element, computed in float64 and cast once."""
    moved = move(arch, element, {name: x.to(torch.float64) for name, x in other.items()})
    return {name: moved[name].to(x.dtype) for name, x in other.items()}
