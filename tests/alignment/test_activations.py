"""Matching by activations: planted elements of every space come back exactly, noise degrades it slowly, and nothing depends on the start."""

from __future__ import annotations

import pytest
import torch

from architecture_zoo import LENGTH, difference, distance, flags, function, grid, model, special
from coset.alignment import Learning, Matching, align, match_activations, probe_inputs, sample_text, search_heads
from coset.alignment.activations import gather
from coset.alignment.moments import Cross, Moments, square_root
from coset.alignment.pair import Pair
from coset.architecture import Architecture, Tokens, uniform
from coset.errors import CosetError
from coset.transform import SPACES, random_transform
from coset.transformer import forward, initialise, random_inputs

ZOO = {**special(), **grid(40, seed=1)}


def probes(architecture: Architecture, samples: int = 150, seed: int = 0) -> torch.Tensor:
    return probe_inputs(architecture, samples, length=LENGTH if isinstance(architecture.inputs, Tokens) else None, seed=seed)


@pytest.mark.parametrize("name", ZOO)
def test_planted_element_comes_back(name: str) -> None:
    a = ZOO[name]
    p = model(a)
    moved = random_transform(a, p, seed=5)(p)
    found = match_activations(a, p, moved, probes(a))
    back = found.transform(moved)
    assert distance(moved, p) > 1e-2
    assert distance(back, p) <= 1e-9
    assert difference(function(a, back), function(a, p)) <= 1e-9
    assert found.transform.belongs()


@pytest.mark.parametrize("matcher", ["weights", "probes", "self", "search", "learned"])
def test_every_matcher_finds_a_planted_element(matcher: str) -> None:
    a = flags("rope", "rms", "none", 3, None, "swiglu", False)
    p = model(a)
    moved = random_transform(a, p, seed=2)(p)
    how = Matching(matcher, samples=120, length=9)  # type: ignore[arg-type]
    if matcher == "learned":
        how = Matching("learned", samples=120, length=9, learning=Learning(steps=5, every=5))
    back = align(a, p, moved, how)
    assert distance(back.parameters, p) <= 1e-8
    assert difference(function(a, back.parameters), function(a, moved)) <= 1e-9


def test_other_seeds_do_not_come_back() -> None:
    """The control: what is not equivalent is not carried over, and stays the function it was."""
    a = flags("rope", "rms", "none", 3, None, "swiglu", False)
    p, other = model(a, 0), model(a, 1)
    found = align(a, p, other, Matching("activations"), inputs=probes(a))
    assert distance(found.parameters, p) > 0.3
    assert difference(function(a, found.parameters), function(a, other)) <= 1e-9


def test_does_not_depend_on_the_start() -> None:
    a = flags("learned", "layer", "all", 6, None, "gelu", False)
    p, q = model(a, 0), model(a, 1)
    other = {n: x + 0.3 * q[n] for n, x in p.items()}
    moved = random_transform(a, other, seed=7)(other)
    x = probes(a)
    direct, around = (align(a, p, o, Matching("activations"), inputs=x).parameters for o in (other, moved))
    assert distance(around, direct) <= 1e-7


def test_noise_degrades_slowly() -> None:
    """The relative distance left is near the noise; a random start's is above one."""
    a = uniform(pe="rope", layers=2, width=24, heads=4, kv_heads=2, vocab=31, mlp="gelu")
    p = initialise(a, seed=0, dtype=torch.float64, generic=True)
    left = []
    for noise in (0.0, 0.01, 0.05):
        generator = torch.Generator().manual_seed(1)
        noisy = {n: x + noise * x.square().mean().sqrt() * torch.randn(x.shape, generator=generator, dtype=x.dtype) for n, x in p.items()}
        moved = random_transform(a, noisy, seed=3, spaces=("heads", "qk", "vo", "neurons", "stream"))(noisy)
        left.append(distance(align(a, p, moved, Matching("activations"), inputs=probe_inputs(a, 300, length=17)).parameters, p))
    assert left[0] <= 1e-9
    assert left[1] <= 0.03
    assert left[2] <= 0.15


def test_spaces_and_layers_are_respected() -> None:
    a = flags("rope", "rms", "none", 3, None, "gelu", False)
    p, other = model(a, 0), model(a, 1)
    found = match_activations(a, p, other, probes(a), spaces=("heads", "qk", "vo"), layers=(1,))
    moved = found.transform(other)
    changed = {name for name, x in moved.items() if not torch.equal(x, other[name])}
    assert changed == {f"layers.1.attention.{x}" for x in "qkvo"}


def test_moments_do_not_depend_on_the_batch() -> None:
    a = flags("sinusoidal", "rms", "none", 6, None, "gelu", False)
    p, other = model(a, 0), model(a, 1)
    pair = Pair(a, p, other, spaces=SPACES, layers=None, pinned=())
    x = probes(a, 300)
    whole = gather(pair, pair.normal(p), pair.normal(other), x, torch.float64)
    halves = [gather(pair, pair.normal(p), pair.normal(other), part, torch.float64) for part in (x[:100], x[100:])]
    for site, moments in whole.joint.items():
        together = halves[0].joint[site].square + halves[1].joint[site].square
        torch.testing.assert_close(moments.square, together, rtol=1e-9, atol=1e-9)


def test_moments_against_the_definition() -> None:
    x = torch.randn(50, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 3
    m = Moments.zero(7)
    for part in x.split(11):
        m.add(part)
    centred = torch.tensor([True, False, True, False, False, True, False])
    y = torch.where(centred, x - x.mean(0), x)
    torch.testing.assert_close(m.mean(centred), y.mT @ y / 50)
    root = square_root(m.mean())
    torch.testing.assert_close(root.mT @ root, x.mT @ x / 50)
    deficient = torch.ones(4, 4, dtype=torch.float64)
    root = square_root(deficient)
    torch.testing.assert_close(root.mT @ root, deficient)


def test_correlation_against_numpy() -> None:
    import numpy as np

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, dtype=torch.float64, generator=generator)
    y = x.flip(1) + 0.3 * torch.randn(60, 4, dtype=torch.float64, generator=generator)
    y[:, 2] = 5.0  # a constant lane correlates with nothing
    c = Cross.zero(4)
    c.add(x[:20], y[:20])
    c.add(x[20:], y[20:])
    found = c.correlation().numpy()
    expected = np.corrcoef(x.numpy(), y[:, [0, 1, 3]].numpy(), rowvar=False)[:4, 4:]
    np.testing.assert_allclose(found[:, [0, 1, 3]], expected, atol=1e-12)
    assert not found[:, 2].any()


def test_sampled_text_follows_the_model() -> None:
    """Pairs of tokens in the text have the probabilities that the model gives them; another model's text does not."""
    a = uniform(pe="rope", layers=1, width=16, heads=2, vocab=5)
    sharp = {n: 3 * x if n == "head" else x for n, x in initialise(a, seed=0, generic=True).items()}
    text = sample_text(a, [sharp], 4000, length=3, seed=1)
    assert text.shape == (4000, 3)
    expected = torch.softmax(forward(a, sharp, torch.arange(5)[:, None])[:, -1], -1)
    for first in range(5):
        rows = text[text[:, 0] == first]
        share = torch.bincount(rows[:, 1], minlength=5) / len(rows)
        assert float((share - expected[first]).abs().max()) < 0.06
        assert float((share - 1 / 5).abs().max()) > 0.1
    assert torch.equal(text, sample_text(a, [sharp], 4000, length=3, seed=1))
    assert not torch.equal(text, sample_text(a, [sharp], 4000, length=3, seed=2))


@pytest.mark.parametrize("pe", ["none", "sinusoidal", "learned", "rope", "alibi", "t5"])
def test_cache_continues_the_sequence(pe: str) -> None:
    a = uniform(pe=pe, layers=2, width=24, heads=4, kv_heads=2, vocab=31)  # type: ignore[arg-type]
    p = initialise(a, seed=1, dtype=torch.float64, generic=True)
    x = random_inputs(a, 3, length=17)
    cache: dict[str, torch.Tensor] = {}
    parts = [forward(a, p, part, cache=cache) for part in (x[:, :5], x[:, 5:6], x[:, 6:])]
    torch.testing.assert_close(torch.cat(parts, 1), forward(a, p, x))
    assert difference(parts[2], forward(a, p, x[:, 6:])) > 1e-3


def test_search_never_ends_above_its_start() -> None:
    a = uniform(pe="rope", layers=1, width=24, heads=4, kv_heads=2, vocab=31)
    p, other = (initialise(a, seed=s, dtype=torch.float64, generic=True) for s in (0, 1))
    x = probe_inputs(a, 40, length=9)
    start = match_activations(a, p, other, x)
    found = search_heads(a, p, other, start, x, spaces=SPACES, rounds=2)
    values = [s.objective for s in found.history]
    assert values == sorted(values, reverse=True)
    assert difference(forward(a, found.transform(other), x), forward(a, other, x)) <= 1e-9
    with pytest.raises(CosetError, match="add heads"):
        search_heads(a, p, other, start, x, spaces=("qk",))


def test_search_finds_a_planted_order_from_a_wrong_one() -> None:
    a = uniform(pe="rope", layers=1, width=24, heads=4, vocab=31)
    p = initialise(a, seed=0, dtype=torch.float64, generic=True)
    spaces = ("heads", "qk", "vo")
    moved = random_transform(a, p, seed=3, spaces=spaces)(p)
    x = probe_inputs(a, 60, length=9)
    wrong = match_activations(a, p, moved, x, spaces=("qk", "vo"))
    assert distance(wrong.transform(moved), p) > 0.1
    found = search_heads(a, p, moved, wrong, x, spaces=spaces)
    assert distance(found.transform(moved), p) <= 1e-8


def test_slopes_keep_heads_in_place() -> None:
    a = ZOO["alibi, equal slopes"]
    p, other = model(a, 0), model(a, 1)
    found = search_heads(a, p, other, match_activations(a, p, other, probes(a)), probes(a), spaces=SPACES)
    assert found.transform.belongs()


def test_bad_inputs() -> None:
    a = flags("rope", "rms", "none", 3, None, "gelu", False)
    p = model(a)
    with pytest.raises(CosetError, match="inputs are empty"):
        match_activations(a, p, p, torch.zeros(0, 5, dtype=torch.int64))
    with pytest.raises(CosetError, match="ids must lie in 0"):
        match_activations(a, p, p, torch.full((3, 5), 99))
    with pytest.raises(CosetError, match="on your data"):
        align(a, p, p, Matching("activations"))
    with pytest.raises(CosetError, match="expected one of weights"):
        Matching("magic")  # type: ignore[arg-type]
    with pytest.raises(CosetError, match="leave the source out"):
        Matching("weights", source="probes")
    with pytest.raises(CosetError, match="samples"):
        Matching("probes", samples=0)
    vit = ZOO["patches, mean"]
    with pytest.raises(CosetError, match="causal language model"):
        sample_text(vit, [model(vit)], 3)
    broken = {**p, "head": p["head"] * float("nan")}
    with pytest.raises(CosetError, match="not finite"):
        sample_text(a, [broken], 3, length=4)
