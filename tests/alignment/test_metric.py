"""The metric Σ: inner products on the input side with second moments in place of the identity."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from architecture_zoo import difference, distance, flags, function, model, special
from coset.alignment import align, input_moments, mean_moments
from coset.alignment.features import head_features, metric_factor, neuron_features
from coset.alignment.heads import head_cost
from coset.architecture import Architecture
from coset.errors import CosetError
from coset.groups import Wreath
from coset.parameters import tensors
from coset.symmetries import group
from coset.transform import random_transform
from coset.transformer import forward, random_inputs

SPACES = ("heads", "qk", "vo", "neurons", "experts")
ZOO = {
    "no norm": flags("learned", "none", "all", 3, None, "swiglu", False),
    "rope": flags("rope", "none", "qkv", 3, None, "relu", True),
    "post-norm": special()["post-norm rms"],
    "experts": special()["experts, gelu"],
    "without biases": flags("sinusoidal", "none", "none", 6, None, "gelu", False),
}


def sites(architecture: Architecture) -> list[str]:
    return [f"layers.{i}.{part}.input" for i in range(len(architecture.layers)) for part in ("attention", "mlp")]


def white(architecture: Architecture) -> dict[str, Tensor]:
    return {site: torch.eye(architecture.width + 1, dtype=torch.float64) for site in sites(architecture)}


def random_metric(architecture: Architecture, seed: int = 0) -> dict[str, Tensor]:
    n, generator = architecture.width + 1, torch.Generator().manual_seed(seed)
    factors = {site: torch.randn(n, n, generator=generator, dtype=torch.float64) for site in sites(architecture)}
    return {site: f @ f.T / n for site, f in factors.items()}


def read_distance(architecture: Architecture, a: dict[str, Tensor], b: dict[str, Tensor], metric: dict[str, Tensor]) -> float:
    """The objective written out: (W; b) of every reader inside a layer in Σ, everything else plain."""
    total, done = 0.0, set()
    for name, spec in tensors(architecture).items():
        kind = name.rsplit(".", 1)[-1]
        if kind not in ("q", "k", "v", "up", "gate", "router"):
            continue
        sigma = metric[f"layers.{spec.layer}.{'attention' if '.attention.' in name else 'mlp'}.input"]
        gap = (a[name] - b[name]).movedim(spec.axis("stream") or 0, 0)
        bias = a[f"{name}_bias"] - b[f"{name}_bias"] if f"{name}_bias" in a else torch.zeros_like(gap[0])
        both = torch.cat([gap, bias[None]]).flatten(1)
        total += float((both.T @ sigma @ both).trace())
        done |= {name, f"{name}_bias"}
    return total + sum(float((a[n] - b[n]).square().sum()) for n in a if n not in done)


@pytest.mark.parametrize("architecture", ZOO.values(), ids=ZOO.keys())
def test_objective_is_the_distance_in_the_metric_and_falls(architecture: Architecture) -> None:
    a, b, metric = model(architecture, 1), model(architecture, 2), random_metric(architecture)
    found = align(architecture, a, b, spaces=SPACES, metric=metric)
    assert found.history[0].objective == pytest.approx(read_distance(architecture, a, b, metric))
    assert found.history[-1].objective == pytest.approx(read_distance(architecture, a, found.parameters, metric))
    assert found.history[-1].objective < found.history[0].objective
    plain = align(architecture, a, b, spaces=SPACES)
    assert found.history[-1].objective < read_distance(architecture, a, plain.parameters, metric) * (1 + 1e-9)
    assert distance(plain.parameters, a) < distance(found.parameters, a)
    assert difference(function(architecture, found.parameters), function(architecture, b)) <= 1e-10


@pytest.mark.parametrize("architecture", ZOO.values(), ids=ZOO.keys())
def test_a_white_metric_changes_nothing(architecture: Architecture) -> None:
    a, b = model(architecture, 1), model(architecture, 2)
    plain = align(architecture, a, b, spaces=SPACES)
    metric = align(architecture, a, b, spaces=SPACES, metric=white(architecture))
    assert [s.objective for s in metric.history] == pytest.approx([s.objective for s in plain.history], rel=1e-6)
    assert distance(metric.parameters, plain.parameters) <= 1e-4


@pytest.mark.parametrize("name", ["no norm", "rope"])
def test_features_are_those_of_whitened_tensors(name: str) -> None:
    """Without biases, Σ = F Fᵀ is the identity for weights ``Fᵀ W``; circuits of such weights are what the cost compares."""
    architecture = flags("learned" if name == "no norm" else "rope", "none", "none", 3, None, "gelu", False, layers=1)
    a, b = model(architecture, 1), model(architecture, 2)
    metric = random_metric(architecture)
    for site, moment in metric.items():  # no bias: the row of ones must not matter
        moment[-1], moment[:, -1] = 0, 0
        assert torch.linalg.matrix_rank(moment) == 10, site
    root = torch.linalg.cholesky(metric["layers.0.attention.input"][:10, :10])

    def whitened(p: dict[str, Tensor]) -> dict[str, Tensor]:
        return p | {n: torch.tensordot(root.T, p[n], dims=1) for n in (f"layers.0.attention.{x}" for x in "qkv")}

    factor = metric_factor(metric, "layers.0.attention.input", 11, torch.float64)
    wreath = group(architecture).factors["layers.0.heads"]
    assert isinstance(wreath, Wreath)
    in_metric = head_cost(wreath, *(head_features(architecture, 0, p, factor, circuits=True) for p in (a, b)))
    explicit = head_cost(wreath, *(head_features(architecture, 0, whitened(p), circuits=True) for p in (a, b)))
    assert torch.allclose(in_metric, explicit)
    plain = head_cost(wreath, *(head_features(architecture, 0, p, circuits=True) for p in (a, b)))
    assert not torch.allclose(in_metric, plain, rtol=0.1)
    # And the whole of stage 2 finds the same element.
    one = align(architecture, a, b, spaces=("heads", "qk", "vo"), metric=metric).transform.element["layers.0.heads"]
    two = align(architecture, whitened(a), whitened(b), spaces=("heads", "qk", "vo")).transform.element["layers.0.heads"]
    assert torch.equal(one.order, two.order)
    assert torch.allclose(one.inner["qk"], two.inner["qk"], atol=1e-4)
    assert torch.allclose(one.inner["vo"], two.inner["vo"], atol=1e-4)


def test_experts_read_in_the_metric() -> None:
    architecture = special()["experts, gated"]
    a = model(architecture)
    factor = metric_factor(random_metric(architecture), "layers.0.mlp.input", 11, torch.float64)
    f = neuron_features(architecture, 0, a, factor)
    assert torch.allclose(f.covariant[3], factor.T[:, :10] @ a["layers.0.mlp.up"][3])
    assert f.router is not None
    assert torch.allclose(f.router, factor.T[:, :10] @ a["layers.0.mlp.router"])


@pytest.mark.parametrize("name", ["rope", "learned", "t5"])
def test_planted_elements_are_recovered_in_a_metric(name: str) -> None:
    architecture = flags(name, "layer", "all", 3, None, "swiglu", False)
    p = model(architecture)
    spaces = (*SPACES, "gains", "shifts")
    q = random_transform(architecture, p, spaces=spaces)(p)
    inputs = random_inputs(architecture, 40, length=9)
    metric = mean_moments(*(input_moments(architecture, m, inputs) for m in (p, q)))
    found = align(architecture, p, q, spaces=spaces, metric=metric)
    assert distance(found.parameters, p) <= 1e-8


# --- moments --------------------------------------------------------------------------------------------------------


def test_moments_are_those_of_the_inputs() -> None:
    architecture = ZOO["no norm"]
    p, inputs = model(architecture), random_inputs(architecture, 7, length=9)
    seen: dict[str, Tensor] = {}
    forward(architecture, p, inputs, tap=lambda site, x: seen.update({site: x}))
    found = input_moments(architecture, p, inputs, batch=3)
    assert list(found) == sites(architecture)
    for site, moment in found.items():
        x = seen[site].reshape(-1, 10)
        assert torch.allclose(moment[:10, :10], x.T @ x / len(x))
        assert torch.allclose(moment[10, :10], x.mean(0))
        assert float(moment[10, 10]) == 1.0
    twice = mean_moments(found, {site: 3 * moment for site, moment in found.items()})
    assert all(torch.allclose(twice[site], 2 * moment) for site, moment in found.items())


def test_moments_of_patches() -> None:
    architecture = special()["patches, class token"]
    moments = input_moments(architecture, model(architecture), random_inputs(architecture, 5, dtype=torch.float64))
    # LayerNorm without its bias would have mean zero; every input has the norm's own mean.
    assert moments["layers.0.mlp.input"].shape == (11, 11)
    assert all(float(torch.linalg.eigvalsh(m)[0]) > -1e-12 for m in moments.values())


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_metric_belongs_to_a_basis_of_the_stream() -> None:
    architecture = flags("rope", "rms", "none", 3, None, "gelu", False)
    p = model(architecture)
    with pytest.raises(CosetError, match=r"metric: .* basis of the stream"):
        align(architecture, p, p, metric=white(architecture))


def test_metrics_that_are_none_are_refused() -> None:
    architecture = ZOO["rope"]
    p, metric, site = model(architecture), white(architecture), "layers.1.mlp.input"

    def refused(match: str, **change: Tensor) -> None:
        with pytest.raises(CosetError, match=match):
            align(architecture, p, p, spaces=SPACES, metric={n: x for n, x in (metric | change).items() if x.numel()})

    refused(rf"no second moment for {site}", **{site: torch.zeros(0)})
    refused(rf"second moment of {site} is not symmetric", **{site: torch.triu(torch.ones(11, 11))})
    refused(rf"second moment of {site} is not positive semidefinite", **{site: torch.diag(torch.tensor([1.0] * 10 + [-1.0]))})
    refused(rf"second moment of {site} must have shape \[11, 11\], got \[10, 10\]", **{site: torch.eye(10)})
    refused(rf"second moment of {site} holds NaN", **{site: torch.full((11, 11), torch.nan)})
