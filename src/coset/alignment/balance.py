"""Balancing: the change of basis after which only isometries are left to choose.

A balanced layer has ``QᵀQ = KᵀK`` and ``VᵀV = O Oᵀ`` in every KV head (queries of a group stacked), ``|q_j| = |k_j|`` in every plane that
rotates, and neurons that read as much as they write where a scale is free. What remains of the group is compact: distances over it have a
minimum.

Trap: two balanced models still differ by arbitrary signs and order. Never interpolate layers that were balanced but not matched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coset.alignment.features import head_features, neuron_features
from coset.alignment.within_head import balancing, full_rank
from coset.architecture import Architecture
from coset.groups import Element, Monomial, MonomialElement, Product, RotaryCommutant, Wreath, WreathElement
from coset.parameters import Parameters
from coset.symmetries import group as symmetry_group


def _safe_balancing(q: Tensor, k: Tensor) -> Tensor:
    """T for Gram matrices [*batch, m, m] of full rank, the identity elsewhere: nothing balances a dead head."""
    alive = (full_rank(q) & full_rank(k))[..., None, None]
    eye = torch.eye(q.shape[-1], dtype=q.dtype)
    return torch.where(alive, balancing(torch.where(alive, q, eye), torch.where(alive, k, eye)), eye)


def balancing_element(architecture: Architecture, parameters: Parameters) -> dict[str, Element]:
    """The group element that balances every layer; it permutes nothing and turns nothing.

    Parameters
    ----------
    architecture, parameters
        A model, best in normal form (`coset.fold`). Under QK-norm queries and keys are left as they are: only signs are free there.

    Returns
    -------
    dict
        An element for `coset.transform.move` (spaces ``layers.i.heads``, ``layers.i.neurons``), so that the step can be recorded and
        undone. Heads whose factors are rank deficient, and dead neurons, keep their basis.
    """
    out: dict[str, Element] = {}
    groups = symmetry_group(architecture).factors
    for i in range(len(architecture.layers)):
        group = groups[f"layers.{i}.heads"]
        assert isinstance(group, Wreath)
        identity = group.identity()
        f = head_features(architecture, i, parameters)
        inner = dict(identity.inner)
        assert isinstance(group.inner, Product)
        qk = group.inner.factors["qk"]
        if architecture.layers[i].attention.qk_norm is None:
            total = torch.zeros_like(inner["qk"])
            for x in f.qk:
                q = x.q.flatten(2, 3)
                for block, part in zip(x.blocks, _safe_balancing(q.mH @ q, x.k.mH @ x.k), strict=True):
                    total = total + (qk.embed(block, part) if isinstance(qk, RotaryCommutant) else part)
            inner["qk"] = total
        o = f.o.mT.flatten(1, 2)
        inner["vo"] = _safe_balancing(f.v.mT @ f.v, o.mT @ o)
        out[f"layers.{i}.heads"] = WreathElement(identity.order, inner)
        neurons = groups[f"layers.{i}.neurons"]
        own = neurons.inner if isinstance(neurons, Wreath) else neurons
        if isinstance(own, Monomial) and own.scales in ("positive", "nonzero"):
            n = neuron_features(architecture, i, parameters)
            up, down = n.covariant.square().sum(-2), n.dual.square().sum(-2)
            alive = (up > 0) & (down > 0)
            scale = torch.where(alive, down / torch.where(alive, up, torch.ones_like(up)), torch.ones_like(up)).pow(0.25)
            element = MonomialElement(torch.arange(own.n).expand(scale.shape).clone(), scale)
            out[f"layers.{i}.neurons"] = WreathElement(neurons.identity().order, element) if isinstance(neurons, Wreath) else element
    return out
