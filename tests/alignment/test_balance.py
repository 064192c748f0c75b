"""Balancing keeps the function, makes both factors of every product equally large, and is undone by its inverse."""

from dataclasses import replace

import pytest
import torch

from coset.alignment import balancing_element
from coset.architecture import Architecture, Experts, uniform
from coset.parameters import Parameters
from coset.symmetries import group
from coset.transform import move
from coset.transformer import forward, initialise, random_inputs

SIZES = {"heads": 6, "kv_heads": 3, "head_dim": 10, "width": 22, "mlp_width": 17, "vocab": 31, "positions": 24}
CASES = {
    "none": uniform(pe="none", norm="layer", bias="all", **SIZES),
    "rope": uniform(pe="rope", mlp="swiglu", bias="qkv", **SIZES),
    "partial": uniform(pe="rope", rotary_dim=4, mlp="relu", **SIZES),
    "repeated": uniform(pe="rope", frequencies=(1.0, 0.5, 0.5, 0.1, 0.0), **SIZES),
    "qk-norm": uniform(pe="rope", qk_norm=True, mlp="geglu", **SIZES),
}


def _outputs(architecture: Architecture, p: Parameters) -> torch.Tensor:
    return forward(architecture, p, random_inputs(architecture, 3, length=20, seed=5))


def _with_bias(p: Parameters, name: str) -> torch.Tensor:
    weight = p[name]
    return torch.cat([weight, p[f"{name}_bias"][None]]) if f"{name}_bias" in p else weight


@pytest.mark.parametrize("name", CASES)
def test_balanced(name: str) -> None:
    a = CASES[name]
    p = initialise(a, seed=3, dtype=torch.float64, generic=True)
    element = balancing_element(a, p)
    q = move(a, element, p)
    before, after = _outputs(a, p), _outputs(a, q)
    assert float((after - before).norm() / before.norm()) < 1e-10
    for key, g in element.items():
        assert group(a).factors[key].belongs(g)
    inverse = {key: group(a).factors[key].inverse(g) for key, g in element.items()}
    back = move(a, inverse, q)
    assert all(torch.allclose(back[n], p[n], rtol=0, atol=1e-10) for n in p)
    prefix = "layers.1.attention"
    values = _with_bias(q, f"{prefix}.v")
    read = torch.einsum("dkm,dkn->kmn", values, values)
    written = torch.einsum("kqmd,kqnd->kmn", q[f"{prefix}.o"], q[f"{prefix}.o"])
    assert torch.allclose(read, written, rtol=1e-8, atol=1e-8)
    if a.layers[1].attention.qk_norm is None:
        queries, keys = _with_bias(q, f"{prefix}.q"), _with_bias(q, f"{prefix}.k")
        size_q, size_k = queries.square().sum((0, 2)), keys.square().sum(0)
        for plane in a.layers[1].attention.planes:
            assert torch.allclose(size_q[:, list(plane)].sum(-1), size_k[:, list(plane)].sum(-1), rtol=1e-8)
        still = list(a.layers[1].attention.still_lanes)
        gram_q = torch.einsum("dkqm,dkqn->kmn", queries[..., still], queries[..., still])
        gram_k = torch.einsum("dkm,dkn->kmn", keys[..., still], keys[..., still])
        assert torch.allclose(gram_q, gram_k, rtol=1e-8, atol=1e-8)
    if a.layers[1].mlp.gated or a.layers[1].mlp.activation == "relu":
        up, down = _with_bias(q, "layers.1.mlp.up"), q["layers.1.mlp.down"]
        assert torch.allclose(up.norm(dim=0), down.norm(dim=1), rtol=1e-8)


def test_experts_and_dead_parts_keep_their_function() -> None:
    a = uniform(pe="rope", mlp="swiglu", **SIZES)
    a = replace(a, layers=tuple(replace(layer, mlp=Experts(3, 2, layer.mlp)) for layer in a.layers))
    p = initialise(a, seed=4, dtype=torch.float64, generic=True)
    p["layers.0.attention.v"][:, 1] = 0
    p["layers.0.mlp.up"][1, :, 3] = 0
    p["layers.1.attention.k"][:, 2] = 0
    q = move(a, balancing_element(a, p), p)
    before, after = _outputs(a, p), _outputs(a, q)
    assert all(bool(torch.isfinite(x).all()) for x in q.values())
    assert float((after - before).norm() / before.norm()) < 1e-10


def test_an_unbalanced_change_of_basis_is_not_balanced() -> None:
    a = CASES["none"]
    p = initialise(a, seed=5, dtype=torch.float64, generic=True)
    again = balancing_element(a, move(a, balancing_element(a, p), p))["layers.0.heads"].inner["vo"]
    first = balancing_element(a, p)["layers.0.heads"].inner["vo"]
    eye = torch.eye(10, dtype=torch.float64)
    assert float((again - eye).abs().max()) < 1e-7
    assert float((first - eye).abs().max()) > 1e-2
