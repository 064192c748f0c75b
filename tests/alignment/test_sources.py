"""Probes: random images that are images, and the choice of those that classifiers are surest of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coset.alignment import Matching, probe_inputs
from coset.alignment.matchers import make_inputs
from coset.alignment.sources import surest_inputs
from coset.architecture import Architecture, Patches, uniform
from coset.errors import CosetError
from coset.transformer import forward, initialise


def images(features: int, grid: tuple[int, ...]) -> Architecture:
    return uniform(pe="none", layers=1, width=12, heads=2, inputs=Patches(features, grid), classes=5)


def pixels(x: Tensor, grid: tuple[int, int], channels: int, side: int) -> Tensor:
    """[n, channel, row, column] of patches whose features are channel, row, column."""
    return x.reshape(len(x), *grid, channels, side, side).permute(0, 3, 1, 4, 2, 5).reshape(len(x), channels, grid[0] * side, -1)


@pytest.mark.parametrize(
    ("features", "grid", "channels", "side"), [(9, (3, 5), 1, 3), (12, (5, 3), 3, 2), (1, (7, 6), 1, 1), (3, (5, 7), 3, 1)]
)
@pytest.mark.parametrize("samples", [576, 601])
def test_random_images_go_on_across_patches(features: int, grid: tuple[int, int], channels: int, side: int, samples: int) -> None:
    """Neighbours are alike, wherever the border of a patch lies; were features laid out otherwise, borders would show."""
    a = images(features, grid)
    x = probe_inputs(a, samples, seed=3)
    assert x.shape == (samples, grid[0] * grid[1], features)
    torch.testing.assert_close(x, probe_inputs(a, samples, seed=3), rtol=0, atol=0)
    assert not torch.equal(x, probe_inputs(a, samples, seed=4))
    plain = (x == x.flatten(1).min(1).values[:, None, None]).float().mean((1, 2))
    assert abs(float((plain > 0.2).float().mean()) - 2 / 3) < 0.05  # two thirds have a plain background

    def alike(y: Tensor, axis: int) -> Tensor:
        image = pixels(y, grid, channels, side)
        return (image * image.roll(-1, axis)).mean((0, 1, 5 - axis))[:-1]  # of each pixel and the next

    for axis in (2, 3):
        own = alike(x, axis)
        assert float(own.min()) > 0.15
        if side > 1:
            inside = torch.arange(len(own)) % side != side - 1
            assert abs(float(own[inside].mean() - own[~inside].mean())) < 0.1
            turned = alike(x.flip(-1), axis)
            assert float(turned[inside].mean() - turned[~inside].mean()) > 0.1
    if channels > 1:
        image = pixels(x, grid, channels, side)
        assert float((image[:, 0] * image[:, 1]).mean()) > 0.15


def test_other_grids_and_features_have_probes() -> None:
    for features, grid in ((5, (7,)), (7, (3, 2)), (4, (2, 3, 2))):
        x = probe_inputs(images(features, grid), 60)
        assert x.shape[2] == features
        assert bool(torch.isfinite(x).all())
        torch.testing.assert_close(x.var((1, 2), correction=0), torch.ones(60), rtol=1e-4, atol=0)
    with pytest.raises(CosetError, match="leave out length 7"):
        probe_inputs(images(4, (3, 3)), 6, length=7)


def entropy(architecture: Architecture, models: list[dict[str, Tensor]], x: Tensor) -> tuple[float, Tensor]:
    mean = torch.stack([torch.softmax(forward(architecture, p, x), -1) for p in models]).mean(0)
    return float(torch.special.entr(mean).sum(-1).mean()), torch.bincount(mean.argmax(-1), minlength=mean.shape[-1])


@pytest.mark.parametrize("tokens", [True, False])
def test_surest_inputs(tokens: bool) -> None:
    a = uniform(pe="learned", layers=1, width=12, heads=2, vocab=11, positions=9, classes=5) if tokens else images(4, (3, 3))
    models = [{n: 6 * x if n == "head" else x for n, x in initialise(a, seed=s, generic=True).items()} for s in (0, 1)]
    length = 9 if tokens else None
    x = surest_inputs(a, models, lambda seed: probe_inputs(a, 300, length=length, seed=seed), 101, rounds=3)
    sure, shares = entropy(a, models, x)
    drawn, all_shares = entropy(a, models, probe_inputs(a, 101, length=length))
    assert len(x) == 101
    assert sure < 0.95 * drawn
    assert int(shares.max() - shares.min()) < int(all_shares.max() - all_shares.min())
    again = surest_inputs(a, models, lambda seed: probe_inputs(a, 300, length=length, seed=seed), 101, rounds=3)
    torch.testing.assert_close(x, again, rtol=0, atol=0)


def test_classifiers_learn_on_chosen_probes() -> None:
    a = images(4, (3, 3))
    models = [{n: 6 * x if n == "head" else x for n, x in initialise(a, seed=s, generic=True).items()} for s in (0, 1)]
    made = {m: make_inputs(a, models, Matching(m, samples=90), "probes") for m in ("learned", "search")}  # type: ignore[arg-type]
    assert {len(x) for x in made.values()} == {90}
    assert entropy(a, models, made["learned"])[0] < 0.97 * entropy(a, models, made["search"])[0]
