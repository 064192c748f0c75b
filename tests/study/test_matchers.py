"""The matchers of a study: every one keeps the function, and looks at no more data than its name says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from coset.architecture import Architecture, Patches, uniform
from coset.errors import CosetError
from coset.study.matchers import LEARNED, MATCHERS, PATHS, Case, matcher
from coset.transformer import forward, initialise, random_inputs

LM = uniform(pe="rope", layers=1, width=12, heads=3, vocab=19, positions=7)
VIT = uniform(pe="learned", layers=1, width=12, heads=3, inputs=Patches(5, (2, 3)), positions=6, classes=4, norm="layer", bias="all")


def case(a: Architecture, **fields: object) -> Case:
    p, q = (initialise(a, seed=s, generic=True) for s in (0, 1))
    inputs = random_inputs(a, 40, length=7 if a is LM else None)
    targets = None if a is LM else torch.arange(40) % 4
    return replace(Case(a, p, q, None, inputs, targets, steps=3), **fields)  # type: ignore[arg-type]


def same(x: dict[str, Tensor], y: dict[str, Tensor]) -> bool:
    return all(torch.equal(t, y[n]) for n, t in x.items())


@pytest.mark.parametrize("name", MATCHERS)
@pytest.mark.parametrize("a", [LM, VIT], ids=["lm", "vit"])
def test_keeps_the_function(name: str, a: Architecture) -> None:
    c = case(a)
    moved = matcher(name)(c)
    assert {n: t.dtype for n, t in moved.items()} == {n: t.dtype for n, t in c.other.items()}
    assert same(dict(moved), dict(c.other)) == (name == "naive")
    torch.testing.assert_close(forward(a, moved, c.inputs), forward(a, c.other, c.inputs), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["two_stage", "weights", "circuits", "probes", "self", "learned_free"])
def test_data_free_matchers_look_at_no_data(name: str) -> None:
    for a in (LM, VIT):
        c = case(a)
        assert same(dict(matcher(name)(c)), dict(matcher(name)(replace(c, inputs=c.inputs[:1], targets=None))))


def test_only_the_task_looks_at_labels() -> None:
    c = case(VIT)
    other = replace(c, targets=(c.targets + 1) % 4)  # type: ignore[operator]
    for name in ("activations", "search", "learned", "two_stage_metric"):
        assert same(dict(matcher(name)(c)), dict(matcher(name)(other)))
    assert not same(dict(matcher("learned_task")(c)), dict(matcher("learned_task")(other)))


def test_names() -> None:
    assert set(MATCHERS) > LEARNED
    assert set(PATHS) < set(MATCHERS)
    with pytest.raises(CosetError, match="expected one of naive"):
        matcher("magic")
