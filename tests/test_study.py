"""Data, training and the re-initialisation protocol."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from coset.architecture import Architecture, Patches, uniform
from coset.connect import score
from coset.errors import CosetError
from coset.parameters import tensors
from coset.study.data import Dataset, digits, patchify
from coset.study.protocol import SCOPES, reinitialise, retrain, scope_tensors
from coset.study.training import Recipe, train
from coset.transformer import initialise, random_inputs

RECIPE = Recipe(epochs=3, learning_rate=1e-2, batch=8)


def classifier(bias: str = "all") -> Architecture:
    return uniform(
        pe="rope", layers=3, width=18, heads=6, kv_heads=3, head_dim=10, mlp_width=7, norm="layer", bias=bias,
        inputs=Patches(5, (2, 3)), classes=3, causal=False,
    )  # fmt: skip


def toy_data(count: int = 37) -> Dataset:
    """The class is the sign pattern of the first features of two patches."""
    x = random_inputs(classifier(), count, seed=1)
    y = (x[:, 0, 0] > 0).long() + (x[:, 3, 1] > 0).long()
    return Dataset(x, y, x, y)


def changed(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> set[str]:
    assert list(a) == list(b)
    return {name for name in a if not torch.equal(a[name], b[name])}


# --- data -----------------------------------------------------------------------------------------------------------


def test_patches_are_cut_row_by_row() -> None:
    image = torch.arange(24.0).reshape(1, 4, 6)
    patches = patchify(image, 2)
    assert patches.shape == (1, 6, 4)
    assert patches[0, 0].tolist() == [0, 1, 6, 7]
    assert patches[0, 1].tolist() == [2, 3, 8, 9]
    assert patches[0, 3].tolist() == [12, 13, 18, 19]
    with pytest.raises(CosetError, match="divisible by 4"):
        patchify(image, 4)


def test_digits_are_standardised_and_split_once() -> None:
    data = digits()
    assert data.train_inputs.shape == (1437, 16, 4)
    assert data.test_inputs.shape == (360, 16, 4)
    assert data.train_inputs.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert data.train_inputs.std().item() == pytest.approx(1.0, abs=1e-3)
    assert sorted(data.test_targets.unique().tolist()) == list(range(10))
    again, other = digits(), digits(seed=1)
    assert torch.equal(data.test_inputs, again.test_inputs)
    assert not torch.equal(data.test_targets, other.test_targets)
    every = torch.cat((data.train_targets, data.test_targets)).bincount()
    assert torch.equal(every, torch.cat((other.train_targets, other.test_targets)).bincount())
    with pytest.raises(CosetError, match="between 1 and 1796"):
        digits(test=1797)


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(CosetError, match=r"pip install 'coset\[demo\]'"):
        digits()


# --- training -------------------------------------------------------------------------------------------------------


def test_training_lowers_the_loss_and_leaves_the_start_alone() -> None:
    arch, data = classifier(), toy_data()
    start = initialise(arch, seed=2)
    kept = {name: x.clone() for name, x in start.items()}
    losses = []
    end = train(arch, start, data, replace(RECIPE, epochs=25), seed=3, progress=lambda step, loss: losses.append((step, loss)))
    assert not changed(start, kept)
    assert [step for step, _ in losses] == list(range(1, 25 * 5 + 1))
    before, after = (score(arch, p, data.train_inputs, data.train_targets) for p in (start, end))
    assert after.loss < 0.5 * before.loss
    assert changed(start, end) == set(start)
    assert not any(x.requires_grad for x in end.values())


def test_the_same_seed_trains_to_the_same_bytes_on_any_number_of_threads() -> None:
    arch, data = classifier(), toy_data()
    start = initialise(arch, seed=4)
    threads = torch.get_num_threads()
    runs = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            torch.manual_seed(count)
            runs.append(train(arch, start, data, RECIPE, seed=5))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert not changed(*runs)
    assert changed(runs[0], train(arch, start, data, RECIPE, seed=6))


def test_training_touches_only_what_is_trainable() -> None:
    arch, data = classifier(), toy_data()
    start = initialise(arch, seed=7)
    names = {"layers.1.attention.q", "layers.1.attention.o_bias"}
    assert changed(start, train(arch, start, data, RECIPE, seed=8, trainable=names)) == names


def test_weight_decay_spares_gains_and_biases() -> None:
    arch, data = classifier(), toy_data()
    start = initialise(arch, seed=9, generic=True)
    # With a tiny step the gradient hardly moves anything; the decay of 10 % stays visible.
    recipe = Recipe(epochs=1, learning_rate=1e-7, weight_decay=1e6, batch=37, warmup=0.0)
    end = train(arch, start, data, recipe, seed=10)
    ratio = {name: (end[name].norm() / start[name].norm()).item() for name in start}
    spared = {name for name, r in ratio.items() if r == pytest.approx(1.0, abs=1e-4)}
    assert spared == {n for n in start if n.endswith(("gain", "bias"))}
    assert all(ratio[name] == pytest.approx(0.9, abs=1e-4) for name in ratio if name not in spared)


def test_language_models_train_on_the_next_token() -> None:
    arch = uniform(pe="alibi", layers=1, width=12, heads=3, head_dim=4, vocab=5, mlp_width=9)
    ids = torch.arange(12).remainder(5).expand(20, 12).contiguous()
    start = initialise(arch, seed=11)
    end = train(arch, start, Dataset(ids, None, ids, None), replace(RECIPE, epochs=20), seed=12)
    assert score(arch, end, ids).loss < 0.5 * score(arch, start, ids).loss


def test_training_refuses_what_does_not_fit() -> None:
    arch, data = classifier(), toy_data()
    start = initialise(arch, seed=0)
    with pytest.raises(CosetError, match="training data: inputs must be"):
        train(arch, start, replace(data, train_inputs=data.train_inputs[:, :5]), RECIPE, seed=0)
    with pytest.raises(CosetError, match="training data: targets must"):
        train(arch, start, replace(data, train_targets=data.train_targets[:-1]), RECIPE, seed=0)
    with pytest.raises(CosetError, match=r"no tensor layers\.9"):
        train(arch, start, data, RECIPE, seed=0, trainable=["layers.9.attention.q"])
    with pytest.raises(CosetError, match="nothing to train"):
        train(arch, start, data, RECIPE, seed=0, trainable=[])
    with pytest.raises(CosetError, match="tensor head is missing"):
        train(arch, {n: x for n, x in start.items() if n != "head"}, data, RECIPE, seed=0)
    with pytest.raises(CosetError, match="not finite"):
        train(arch, start, data, Recipe(epochs=3, learning_rate=1e30), seed=0)


def test_a_training_has_a_number_of_epochs_or_of_steps() -> None:
    arch, data = classifier(), toy_data()
    start = initialise(arch, seed=13)
    assert not changed(train(arch, start, data, RECIPE, seed=1), train(arch, start, data, replace(RECIPE, epochs=None, steps=15), seed=1))
    with pytest.raises(CosetError, match="either epochs or steps"):
        replace(RECIPE, steps=3)
    with pytest.raises(CosetError, match="either epochs or steps"):
        replace(RECIPE, epochs=None)


def test_a_stored_sinusoidal_table_stays_what_it_is() -> None:
    arch = uniform(pe="sinusoidal", layers=1, width=12, heads=3, vocab=5, mlp_width=9, positions=12, stored_table=True)
    ids = torch.arange(12).remainder(5).expand(20, 12).contiguous()
    start = initialise(arch, seed=11)
    for scope, freeze in (("whole", True), ("first-attention", False)):
        end = retrain(arch, start, scope, Dataset(ids, None, ids, None), RECIPE, seed=12, freeze=freeze)
        assert torch.equal(start["embed.positions"], end["embed.positions"])


@pytest.mark.parametrize(
    "wrong", [{"epochs": 0}, {"batch": 0}, {"learning_rate": 0.0}, {"weight_decay": -1.0}, {"warmup": 1.0}, {"clip": 0.0}]
)
def test_recipes_refuse_nonsense(wrong: dict[str, float]) -> None:
    with pytest.raises(CosetError, match=next(iter(wrong))):
        replace(RECIPE, **wrong)


# --- protocol -------------------------------------------------------------------------------------------------------


def test_scopes_hold_exactly_their_tensors() -> None:
    arch = classifier()
    attention = {f"attention.{x}" for x in ("q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias")}
    assert set(scope_tensors(arch, "first-attention")) == {f"layers.0.{x}" for x in attention}
    assert set(scope_tensors(arch, "all-attention")) == {f"layers.{i}.{x}" for i in range(3) for x in attention}
    rest = {
        "attention_norm.gain",
        "attention_norm.bias",
        "mlp_norm.gain",
        "mlp_norm.bias",
        "mlp.up",
        "mlp.up_bias",
        "mlp.down",
        "mlp.down_bias",
    }
    assert set(scope_tensors(arch, "first-layer")) == {f"layers.0.{x}" for x in attention | rest}
    assert set(scope_tensors(arch, "last-attention")) == {f"layers.2.{x}" for x in attention}
    assert set(scope_tensors(arch, "last-layer")) == {f"layers.2.{x}" for x in attention | rest}
    assert scope_tensors(arch, "whole") == tuple(tensors(arch))


@pytest.mark.parametrize("scope", SCOPES)
def test_reinitialisation_draws_the_scope_afresh_and_nothing_else(scope) -> None:
    arch = classifier()
    trained = initialise(arch, seed=1, generic=True)
    fresh = reinitialise(arch, trained, scope, seed=2)
    assert changed(trained, fresh) == set(scope_tensors(arch, scope))
    assert not changed(fresh, reinitialise(arch, trained, scope, seed=2))
    assert changed(fresh, reinitialise(arch, trained, scope, seed=3)) <= set(scope_tensors(arch, scope))
    new = initialise(arch, seed=2)
    assert all(torch.equal(fresh[name], new[name]) for name in scope_tensors(arch, scope))


def test_retraining_trains_everything_or_only_the_scope() -> None:
    arch, data = classifier(), toy_data()
    trained = initialise(arch, seed=1, generic=True)
    free = retrain(arch, trained, "first-attention", data, RECIPE, seed=2)
    assert changed(trained, free) == set(trained)
    frozen = retrain(arch, trained, "first-attention", data, RECIPE, seed=2, freeze=True)
    assert changed(trained, frozen) == set(scope_tensors(arch, "first-attention"))


def test_unknown_scope_is_refused() -> None:
    arch = classifier()
    with pytest.raises(CosetError, match=r"first-attention, .*whole, got 'middle-layer'"):
        reinitialise(arch, initialise(arch, seed=0), "middle-layer", seed=1)  # type: ignore[arg-type]
