"""The metric Σ: second moments of what a layer's maps read."""

from __future__ import annotations

import torch
from torch import Tensor

from coset.architecture import Architecture
from coset.parameters import Parameters
from coset.transformer import forward


def input_moments(architecture: Architecture, parameters: Parameters, inputs: Tensor, *, batch: int = 256) -> dict[str, Tensor]:
    """Second moments ``E[(x, 1)ᵀ (x, 1)]`` of the inputs of every attention and MLP.

    Parameters
    ----------
    inputs
        Token ids [samples, length] or patches [samples, patches, features]; no labels are needed.
    batch
        Samples a forward pass; memory does not depend on the number of samples.

    Returns
    -------
    dict
        ``layers.i.attention.input`` and ``layers.i.mlp.input`` -> [width + 1, width + 1], float64: the metric of `align`.
    """
    total: dict[str, Tensor] = {}
    seen: dict[str, int] = {}

    def tap(site: str, value: Tensor) -> None:
        if site.endswith((".attention.input", ".mlp.input")):
            x = value.reshape(-1, value.shape[-1]).to(torch.float64)
            x = torch.cat([x, torch.ones_like(x[:, :1])], -1)
            total[site] = total.get(site, torch.zeros(x.shape[-1], x.shape[-1], dtype=torch.float64)) + x.mT @ x
            seen[site] = seen.get(site, 0) + len(x)

    with torch.no_grad():
        for part in torch.split(inputs, batch):
            forward(architecture, parameters, part, tap=tap)
    return {site: moment / seen[site] for site, moment in total.items()}


def mean_moments(*metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """The average of several models' metrics, site by site: what both ends of a segment read."""
    return {site: torch.stack([m[site] for m in metrics]).mean(0) for site in metrics[0]}
