"""Broken and degenerate models: a clear error, or a stated handling that keeps the function; never a traceback, never a silent wrong answer."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from architecture_zoo import LAYER, attention, difference, distance, flags, function, model, of_layers
from coset.alignment import Learning, Matching, Solvers, align, match, match_activations, probe_inputs
from coset.alignment.matchers import find_match
from coset.architecture import MLP, Architecture, Layer, Patches, uniform
from coset.errors import CosetError
from coset.transform import SPACES, random_transform
from coset.transformer import initialise

ROPE = flags("rope", "rms", "qkv", 3, None, "swiglu", False)
PLAIN = flags("none", "layer", "all", 3, None, "relu", False)
SHALLOW = [replace(a, layers=a.layers[:1]) for a in (ROPE, PLAIN)]
SOLVERS = [Solvers(), Solvers("brent", "gradient"), Solvers(linear="orthogonal")]


# --- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", ["reference", "other"])
def test_values_that_are_not_finite(value: float, side: str) -> None:
    good, bad = model(ROPE), model(ROPE)
    bad["layers.1.attention.v"][3, 1, 2] = value
    pair = (bad, good) if side == "reference" else (good, bad)
    with pytest.raises(CosetError, match=rf"^{side}: tensor layers\.1\.attention\.v holds NaN or infinity"):
        align(ROPE, *pair)


def test_every_fault_has_a_line() -> None:
    bad = model(ROPE)
    del bad["head"]
    bad["extra"] = torch.ones(3)
    bad["final_norm.gain"] = torch.ones(9)
    bad["layers.0.mlp.up"] = bad["layers.0.mlp.up"].long()
    with pytest.raises(CosetError) as caught:
        align(ROPE, model(ROPE), bad)
    lines = sorted(str(caught.value).splitlines())
    assert len(lines) == 4
    assert lines[0] == "other: tensor extra does not belong to this architecture"
    assert lines[1] == "other: tensor final_norm.gain [stream] must have shape [10], got [9]"
    assert lines[2].startswith("other: tensor head is missing")
    assert lines[3] == "other: tensor layers.0.mlp.up must be floating point, got torch.int64"


def test_choices_that_make_no_sense() -> None:
    p = model(ROPE)
    with pytest.raises(CosetError, match="spaces: hats; choose from heads"):
        align(ROPE, p, p, spaces=("hats",))
    with pytest.raises(CosetError, match="spaces: none given"):
        align(ROPE, p, p, spaces=())
    with pytest.raises(CosetError, match=r"layers: \[2, -1\] of 2 layers do not exist"):
        align(ROPE, p, p, layers=(0, 2, -1))
    with pytest.raises(CosetError, match="nothing to move in experts"):
        align(ROPE, p, p, spaces=("experts",))


def test_data_are_checked_whoever_reads_them() -> None:
    p, ids = model(ROPE), torch.zeros(3, 5, dtype=torch.int64)
    vocabulary = ROPE.inputs.vocabulary  # type: ignore[union-attr]
    for how in (Matching(), Matching("activations")):
        for inputs, targets, message in (
            (ids[0], None, r"inputs must be int64 token ids \[n, length\], got torch.int64 of shape \[5\]"),
            (ids[:0], None, r"inputs are empty, shape \[0, 5\]"),
            (ids + vocabulary, None, rf"token ids must lie in 0..{vocabulary - 1}, got {vocabulary}..{vocabulary}"),
            (ids, ids[:2], r"targets must be int64 of shape \[3, 5\], got torch.int64 of shape \[2, 5\]"),
            (ids, ids - 1, rf"targets must lie in 0..{vocabulary - 1}, got -1..-1"),
        ):
            with pytest.raises(CosetError, match=message):
                align(ROPE, p, p, how, inputs=inputs, targets=targets)


def test_inputs_that_no_machine_holds() -> None:
    p = model(ROPE)
    with pytest.raises(
        CosetError, match=r"1,000,000,000,000 inputs of 5 tokens need at least 120,000.0 GB while they are made, and this machine"
    ):
        align(ROPE, p, p, Matching("probes", samples=10**12, length=5))
    with pytest.raises(CosetError, match=r"1 inputs of 100,000,000,000 tokens need at least 2,400.0 GB"):
        align(ROPE, p, p, Matching("self", samples=1, length=10**11))


def test_shifts_of_a_model_without_any() -> None:
    bare = flags("rope", "rms", "none", 3, None, "gelu", True, layers=1)
    with pytest.raises(CosetError, match="nothing to move in shifts"):
        align(bare, model(bare), model(bare), spaces=("shifts",))


# --- degenerate -----------------------------------------------------------------------------------------------------


def with_zero(p: dict[str, Tensor], what: str) -> dict[str, Tensor]:
    """The model with something dead in layer 0."""
    p = {n: x.clone() for n, x in p.items()}
    name = "layers.0.attention."
    if what == "all":
        return {n: torch.zeros_like(x) if not n.endswith("gain") else x for n, x in p.items()}
    if what in ("head", "q"):
        p[f"{name}q"][:, 1] = 0
        p[f"{name}q_bias"][1] = 0
    if what in ("head", "k"):
        p[f"{name}k"][:, 1] = 0
        p[f"{name}k_bias"][1] = 0
    if what in ("head", "v"):
        p[f"{name}v"][:, 1] = 0
        p[f"{name}v_bias"][1] = 0
    if what in ("head", "o"):
        p[f"{name}o"][1] = 0
    if what == "one query head":
        p[f"{name}q"][:, 1, 0] = 0
        p[f"{name}q_bias"][1, 0] = 0
        p[f"{name}o"][1, 0] = 0
    if what == "rank":
        p[f"{name}v"][..., 2] = p[f"{name}v"][..., 0] - p[f"{name}v"][..., 1]
        p[f"{name}v_bias"][..., 2] = p[f"{name}v_bias"][..., 0] - p[f"{name}v_bias"][..., 1]
    if what == "plane":
        lanes = torch.tensor([0, 2])  # the first plane of four lanes in halves
        p[f"{name}k"][:, 2, lanes] = 0
        p[f"{name}k_bias"][2, lanes] = 0
    if what == "attention":
        for n in p:
            if n.startswith(name):
                p[n].zero_()
    return p


DEAD = ["head", "q", "k", "v", "o", "one query head", "rank", "plane", "attention", "all"]


def safe(architecture: Architecture, found: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert all(bool(torch.isfinite(x).all()) for x in found.values())
    expected = function(architecture, other)
    gap = float((function(architecture, found) - expected).norm())
    assert gap <= 1e-9 * max(float(expected.norm()), 1e-3)


@pytest.mark.parametrize("solvers", SOLVERS, ids=["ours", "paper", "orthogonal"])
@pytest.mark.parametrize("what", DEAD)
@pytest.mark.parametrize("architecture", SHALLOW, ids=["rope", "vanilla"])
def test_dead_parts_against_a_healthy_model(architecture: Architecture, what: str, solvers: Solvers) -> None:
    healthy, sick = model(architecture, 1), with_zero(model(architecture, 2), what)
    for reference, other in ((healthy, sick), (sick, healthy)):
        # The stream makes many passes; the paper's solvers are slow.
        found = align(
            architecture, reference, other, how=Matching(solvers=solvers, cycles=3), spaces=SPACES if solvers == SOLVERS[0] else SPACES[:3]
        )
        safe(architecture, found.parameters, other)
        assert found.transform.belongs()


@pytest.mark.parametrize("what", DEAD)
@pytest.mark.parametrize("architecture", [ROPE, PLAIN], ids=["rope", "vanilla"])
def test_dead_parts_of_equivalent_models(architecture: Architecture, what: str) -> None:
    p = with_zero(model(architecture), what)
    q = random_transform(architecture, p, seed=3)(p)
    found = align(architecture, p, q)
    safe(architecture, found.parameters, q)
    if what in ("head", "q", "k", "v", "o", "rank", "attention", "all"):
        assert any("rank deficient" in note for note in found.notes)
    # Whatever is alive is found in spite of what is not: layer 1 as well.
    if what != "all":
        assert difference(found.parameters["layers.1.attention.q"], p["layers.1.attention.q"]) <= 1e-6


def test_a_healthy_model_gets_no_notes() -> None:
    p = model(ROPE)
    assert align(ROPE, p, random_transform(ROPE, p)(p)).notes == ()


@pytest.mark.parametrize("spaces", [None, ("heads", "qk", "vo", "gains")])
def test_a_gain_of_zero_in_the_reference(spaces: tuple[str, ...] | None) -> None:
    a, b = model(ROPE, 1), model(ROPE, 2)
    a["layers.0.mlp_norm.gain"][4] = 0.0
    found = align(ROPE, a, b) if spaces is None else align(ROPE, a, b, spaces=spaces)
    safe(ROPE, found.parameters, b)
    assert len(found.notes) == 1
    assert found.notes[0].startswith("layers.0.mlp_norm.gain: the reference's gain is nearly zero on 1 lanes")
    kept = torch.arange(10) != 4
    assert torch.allclose(found.parameters["layers.0.mlp_norm.gain"][kept], a["layers.0.mlp_norm.gain"][kept])


def test_a_gain_of_zero_in_the_other() -> None:
    a, b = model(ROPE, 1), model(ROPE, 2)
    b["layers.0.mlp_norm.gain"][4] = 0.0
    found = align(ROPE, a, b)
    safe(ROPE, found.parameters, b)
    assert torch.allclose(found.parameters["layers.0.mlp_norm.gain"], a["layers.0.mlp_norm.gain"])
    assert found.notes == (
        "layers.0.mlp_norm.gain: the other model's gain is zero on 1 lanes; what reads it there is not seen and not kept, "
        "so the transform has no inverse",
    )
    with pytest.raises(CosetError, match="holds a zero"):
        found.transform.inverse()(found.parameters)


def test_a_reference_of_zeros_leaves_the_other_as_it_is() -> None:
    """Nothing of it can be matched: scales stay at one, and nothing overflows."""
    a = uniform(pe="rope", layers=2, width=16, heads=2, vocab=17, mlp="swiglu")
    p, q = (model(a, seed) for seed in (0, 1))
    p = {n: x if n.endswith(".gain") else torch.zeros_like(x) for n, x in p.items()}
    found = match_activations(a, p, q, probe_inputs(a, 20, length=9))
    moved = found.transform(q)
    safe(a, moved, q)
    assert max(float(x.abs().max()) for x in moved.values()) < 1e2


def test_activations_that_leave_the_range() -> None:
    a = uniform(pe="rope", layers=2, width=16, heads=2, vocab=17, mlp="swiglu")
    p, q = ({n: x.float() for n, x in model(a, seed).items()} for seed in (0, 1))
    p["layers.0.mlp_norm.gain"][:3] = 1e30
    with pytest.raises(CosetError, match=r"activations: what the models compute at layers\.\d.*leaves the range of torch.float32"):
        match_activations(a, p, q, probe_inputs(a, 20, length=9))


def test_a_gain_of_zero_under_a_bias_is_refused_with_a_way_out() -> None:
    architecture = of_layers(Layer(attention(), MLP(7), LAYER, LAYER), final_norm=LAYER)
    a, b = model(architecture, 1), model(architecture, 2)
    b["layers.0.attention_norm.gain"][4] = 0.0
    with pytest.raises(CosetError, match=r"leave the spaces gains and stream out"):
        align(architecture, a, b)
    found = align(architecture, a, b, spaces=("heads", "qk", "vo", "neurons", "shifts"))
    safe(architecture, found.parameters, b)


def test_tiny_and_huge_models() -> None:
    for size in (1e-12, 1e12):
        architecture = flags("rope", "none", "none", 3, None, "relu", False, layers=1)
        p = {n: x * size for n, x in model(architecture).items()}
        q = random_transform(architecture, p, spaces=("heads", "qk", "vo", "neurons"))(p)
        assert distance(align(architecture, p, q, spaces=("heads", "qk", "vo", "neurons")).parameters, p) <= 1e-8


def test_match_finds_the_same_without_applying() -> None:
    p = model(ROPE)
    q = random_transform(ROPE, p)(p)
    found, aligned = match(ROPE, p, q), align(ROPE, p, q)
    moved = found.transform(q)
    assert all(torch.equal(moved[n], aligned.parameters[n]) for n in p)
    assert found.history == aligned.history


class Lazy(dict[str, Tensor]):
    """A mapping that remembers what is asked for, in order."""

    def __init__(self, source: dict[str, Tensor]):
        super().__init__(source)
        self.asked: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.asked.append(name)
        return super().__getitem__(name)


def test_match_asks_for_one_block_at_a_time() -> None:
    p = model(ROPE)
    sides = Lazy(p), Lazy(random_transform(ROPE, p)(p))
    match(ROPE, *sides, spaces=("heads", "qk", "vo"))
    for side in sides:
        blocks = [n.split(".")[1] if n.startswith("layers.") else "ends" for n in side.asked]
        runs = 1 + sum(x != y for x, y in itertools.pairwise(blocks))
        assert runs <= 12


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Matching("probes", samples=2.5), "samples must be an integer, got 2.5"),  # type: ignore[arg-type]
        (lambda: Matching("probes", length=True), "length must be an integer, got True"),
        (lambda: Matching("probes", seed=-1), "seed must be at least 0, got -1"),
        (lambda: Matching(cycles=0), "cycles must be at least 1, got 0"),
        (lambda: Learning(steps=1.5), "learning: steps must be an integer, got 1.5"),  # type: ignore[arg-type]
        (lambda: Learning(patience=0), "learning: patience must be at least 1, got 0"),
    ],
)
def test_numbers_that_are_no_counts(make: Callable[[], object], message: str) -> None:
    with pytest.raises(CosetError, match=re.escape(message)):
        make()


def test_images_have_a_length_of_their_own() -> None:
    a = uniform(pe="none", layers=1, width=12, heads=2, inputs=Patches(4, (3, 3)), classes=5)
    p = initialise(a, seed=0)
    for matcher in ("probes", "learned"):
        with pytest.raises(CosetError, match="leave out length 7"):
            align(a, p, p, Matching(matcher, length=7))  # type: ignore[arg-type]


def test_what_comes_after_the_closed_form_is_refused_before_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    p = model(ROPE)
    state = tmp_path / "state.safetensors"
    save_file({"x": torch.zeros(3)}, state)

    def run(how: Matching, **more: object) -> None:
        find_match(ROPE, p, p, how, **more)  # type: ignore[arg-type]

    def never(*_: object, **__: object) -> None:
        raise AssertionError("inputs were made")

    monkeypatch.setattr("coset.alignment.matchers.make_inputs", never)
    with pytest.raises(CosetError, match="add heads"):
        run(Matching("search"), spaces=("neurons",))
    with pytest.raises(CosetError, match="no continuous freedom"):
        run(Matching("learned"), spaces=("heads",))
    with pytest.raises(CosetError, match="not a state of learning"):
        run(Matching("learned"), state=state)
    with pytest.raises(AssertionError, match="inputs were made"):
        run(Matching("learned"), state=tmp_path / "new.safetensors")
