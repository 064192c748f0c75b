"""Learned alignment stays inside the group, lowers the loss between the models, keeps the best state, and resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from architecture_zoo import difference, distance, flags, function, model
from coset.alignment import Learning, Match, Matching, align, learn, match_activations, probe_inputs
from coset.alignment.learned import orthogonalised
from coset.architecture import Architecture, Norm, uniform
from coset.connect import score
from coset.errors import CosetError
from coset.parameters import Parameters
from coset.transform import SPACES
from coset.transformer import forward, initialise

QUICK = Learning(steps=40, batch=16, every=10)


def pair(pe: str = "rope", **fields: object) -> tuple[Architecture, dict[str, Tensor], dict[str, Tensor], Tensor]:
    a = uniform(pe=pe, layers=2, width=24, heads=4, kv_heads=2, vocab=31, positions=9, **fields)  # type: ignore[arg-type]
    return a, *(initialise(a, seed=s, generic=True) for s in (0, 1)), probe_inputs(a, 120, length=9)


def between(a: Architecture, p: Parameters, q: Parameters, inputs: Tensor, t: float = 0.5) -> float:
    """Cross-entropy of a point of the segment to the mean of the ends' probabilities, from the definitions."""
    outputs = [forward(a, {n: x.float() for n, x in m.items()}, inputs).softmax(-1) for m in (p, q)]
    middle = forward(a, {n: (1 - t) * p[n] + t * q[n].float() for n in p}, inputs)
    return float(-(sum(outputs) / 2 * middle.log_softmax(-1)).sum(-1).mean())


@pytest.mark.parametrize(
    ("pe", "fields"),
    [
        ("rope", {"mlp": "swiglu"}),
        ("rope", {"qk_norm": True}),
        ("rope", {"tied": True}),
        ("learned", {"norm": "layer", "bias": "all"}),
        ("sinusoidal", {"stored_table": True, "mlp": "relu"}),
        ("none", {"norm": "none"}),
        ("alibi", {"norm": "layer", "post_norm": True}),
    ],
)
def test_lowers_the_loss_inside_the_group(pe: str, fields: dict[str, object]) -> None:
    a, p, q, x = pair(pe, **fields)
    start = match_activations(a, p, q, x)
    found = learn(a, p, q, start, x, how=QUICK, spaces=SPACES)
    moved = found.transform(q)
    assert found.transform.belongs()
    assert between(a, p, moved, x) < between(a, p, start.transform(q), x)
    assert found.history[-1].objective < found.history[0].objective
    # Exactly the same function, in float64, whatever was learned.
    exact = {n: t.double() for n, t in q.items()}
    assert difference(forward(a, found.transform(exact), x), forward(a, exact, x)) <= 1e-9
    assert torch.equal(forward(a, p, x), forward(a, p, x))


def test_history_is_what_the_result_gives() -> None:
    """The held-out loss that is reported is the loss of the segment that is returned: one element serves for both ends."""
    a, p, q, x = pair()
    start = match_activations(a, p, q, x)
    found = learn(a, p, q, start, x, how=replace(QUICK, validation=0.5), spaces=SPACES)
    held = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: len(x) // 2]
    best = min(s.objective for s in found.history)
    moved = found.transform(q)
    assert sum(between(a, p, moved, x[held], t) for t in (0.25, 0.5, 0.75)) / 3 == pytest.approx(best, rel=1e-4)


def test_one_end_or_both() -> None:
    a, p, q, x = pair()
    start = match_activations(a, p, q, x)
    both, one = (learn(a, p, q, start, x, how=replace(QUICK, keep_reference=k), spaces=SPACES) for k in (False, True))
    assert distance(both.transform(q), one.transform(q)) > 1e-3
    assert between(a, p, one.transform(q), x) < between(a, p, start.transform(q), x)


def test_gains_are_free_on_the_other_end() -> None:
    """Gains of its own let the other model come closer, though neither end sees them; without the space they stay the reference's."""
    a, p, q, x = pair(mlp="swiglu", qk_norm=True)
    start = match_activations(a, p, q, x)
    still, free = (learn(a, p, q, start, x, how=replace(QUICK, steps=80, gain_rate=rate), spaces=SPACES) for rate in (0.0, 0.1))
    exact = {n: t.double() for n, t in q.items()}
    moved = free.transform(exact)
    assert difference(forward(a, moved, x), forward(a, exact, x)) <= 1e-9
    assert between(a, p, moved, x) < between(a, p, still.transform(q), x)
    gains = [n for n in p if n.endswith(".gain")]
    assert all(difference(still.transform(exact)[n], p[n].double()) <= 1e-12 for n in gains)
    assert all(difference(moved[n], p[n].double()) > 1e-2 for n in gains)
    assert free.transform.belongs()
    back = free.transform.inverse()(moved)
    assert all(difference(back[n], exact[n]) <= 1e-9 for n in exact)

    spaces = tuple(s for s in SPACES if s != "gains")
    fixed = learn(a, p, q, match_activations(a, p, q, x, spaces=spaces), x, how=QUICK, spaces=spaces)
    assert all(difference(fixed.transform(exact)[n], p[n].double()) <= 1e-12 for n in gains)


def test_learned_gains_are_stored_without_rounding() -> None:
    """Also near zero under the convention that stores gain - 1, where rounding would be far larger than the gain."""
    a = uniform(pe="rope", layers=2, width=24, heads=4, vocab=31)
    plus_one = Norm("rms", offset=1.0)
    a = replace(a, layers=tuple(replace(x, attention_norm=plus_one, mlp_norm=plus_one) for x in a.layers))
    p, q = (initialise(a, seed=s, generic=True) for s in (0, 1))
    name = "layers.0.attention_norm.gain"
    p[name][:4] = torch.tensor([-0.99609375, -0.95, -0.8, -(1 - 2.0**-17)])
    x = probe_inputs(a, 60, length=9)
    found = learn(a, p, q, match_activations(a, p, q, x), x, how=replace(QUICK, gain_rate=1.0), spaces=SPACES)
    exact = {n: t.double() for n, t in q.items()}
    moved = found.transform(exact)
    assert difference(moved[name], p[name].double()) > 1e-2
    assert torch.equal(moved[name][:3].bfloat16().double(), moved[name][:3])
    stored = {n: t.bfloat16().double() if n.endswith("norm.gain") else t for n, t in moved.items()}
    # The fourth lane cannot move on that grid: it keeps the reference's gain, which float32 holds.
    stored[name][3] = moved[name][3].float().double()
    assert float(moved[name][3]) == float(p[name][3])
    assert difference(forward(a, stored, x), forward(a, exact, x)) <= 1e-9


def test_gains_alone_can_be_learned() -> None:
    a, p, q, x = pair()
    start = match_activations(a, p, q, x, spaces=("gains",))
    found = learn(a, p, q, start, x, how=QUICK, spaces=("gains",))
    assert between(a, p, found.transform(q), x) < between(a, p, start.transform(q), x)


def test_places_beside_the_middle() -> None:
    """Learning at three places lowers the loss at the quarters below what learning halfway leaves there."""
    a, p, q, x = pair()
    start = match_activations(a, p, q, x)

    def quarters(found: Match) -> float:
        b = found.transform(q)
        target = sum(forward(a, m, x).softmax(-1) for m in (p, q)) / 2
        losses = []
        for t in (0.25, 0.75):
            between = {n: (1 - t) * p[n] + t * b[n].float() for n in p}
            losses.append(float(-(target * forward(a, between, x).log_softmax(-1)).sum(-1).mean()))
        return sum(losses) / 2

    middle, spread = (
        learn(a, p, q, start, x, how=replace(QUICK, steps=60, places=places), spaces=SPACES) for places in ((0.5,), (0.25, 0.5, 0.75))
    )
    assert quarters(spread) < quarters(middle)
    exact = {n: t.double() for n, t in q.items()}
    assert difference(forward(a, spread.transform(exact), x), forward(a, exact, x)) <= 1e-9


def test_task_loss_uses_targets() -> None:
    a, p, q, x = pair()
    start = match_activations(a, p, q, x)
    found = learn(a, p, q, start, x, task=True, how=QUICK, spaces=SPACES)
    middle = [{n: (p[n] + m.transform(q)[n].float()) / 2 for n in p} for m in (start, found)]
    losses = [score(a, m, x).loss for m in middle]
    assert losses[1] < losses[0]


def test_same_seed_same_bytes_and_resumes(tmp_path: Path) -> None:
    a, p, q, x = pair(mlp="swiglu")
    start = match_activations(a, p, q, x)
    whole = learn(a, p, q, start, x, how=QUICK, spaces=SPACES)

    class Stop(Exception):
        pass

    def interrupt(name: str, done: int, total: int) -> None:
        if done == 30:
            raise Stop

    state = tmp_path / "state.safetensors"
    with pytest.raises(Stop):
        learn(a, p, q, start, x, how=QUICK, spaces=SPACES, state=state, progress=interrupt)
    assert state.exists()
    # Another run's state is refused, and left alone.
    without = tuple(s for s in SPACES if s != "gains")
    for how, spaces, layers in ((replace(QUICK, rate=0.5), SPACES, None), (QUICK, without, None), (QUICK, SPACES, (0,))):
        with pytest.raises(CosetError, match="belongs to another run"):
            learn(a, p, q, start, x, how=how, spaces=spaces, layers=layers, state=state)
    whole_state = state.read_bytes()
    with safe_open(str(state), framework="pt") as file:
        facts, content = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    first = next(iter(content))
    for spoilt, told in (({**content, first: content[first] + 1}, facts), (content, facts | {"done": "7"}), ({}, facts)):
        save_file(spoilt, state, told)
        with pytest.raises(CosetError, match="not as it was written"):
            learn(a, p, q, start, x, how=QUICK, spaces=SPACES, state=state)
    state.write_bytes(whole_state)
    resumed = learn(a, p, q, start, x, how=QUICK, spaces=SPACES, state=state)
    assert not state.exists()
    assert [s.objective for s in resumed.history] == [s.objective for s in whole.history]
    for name, tensor in whole.transform(q).items():
        assert torch.equal(tensor, resumed.transform(q)[name])


def test_spoilt_state(tmp_path: Path) -> None:
    a, p, q, x = pair()
    state = tmp_path / "state.safetensors"
    state.write_bytes(b"nonsense")
    with pytest.raises(CosetError, match=r"not a readable state of learning.*give another name"):
        learn(a, p, q, match_activations(a, p, q, x), x, how=QUICK, spaces=SPACES, state=state)


def test_state_that_cannot_be_written(tmp_path: Path) -> None:
    a, p, q, x = pair()
    start = match_activations(a, p, q, x)
    state = tmp_path / "missing" / "state.safetensors"
    with pytest.raises(CosetError, match="cannot write the state"):
        learn(a, p, q, start, x, how=QUICK, spaces=SPACES, state=state)


def test_divergence_keeps_the_best_state() -> None:
    a, p, q, x = pair()
    start = match_activations(a, p, q, x)
    found = learn(a, p, q, start, x, how=Learning(steps=60, every=5, rate=300.0, stream_rate=30.0, gain_rate=30.0), spaces=SPACES)
    assert found.notes
    assert any("not" in n or "nothing better" in n for n in found.notes)
    assert between(a, p, found.transform(q), x) <= between(a, p, start.transform(q), x) * (1 + 1e-6)
    assert found.transform.belongs()


@pytest.mark.parametrize("rates", [{"rate": 1e30}, {"gain_rate": 1e6}, {"stream_rate": 1e6}])
def test_absurd_rates_return_the_start(rates: dict[str, float]) -> None:
    a, p, q, x = pair()
    start = match_activations(a, p, q, x)
    found = learn(a, p, q, start, x, how=replace(QUICK, **rates), spaces=SPACES)  # type: ignore[arg-type]
    assert any("nothing better" in n for n in found.notes)
    assert between(a, p, found.transform(q), x) <= between(a, p, start.transform(q), x) * (1 + 1e-6)


def test_one_step_is_a_step() -> None:
    a, p, q, x = pair()
    found = learn(a, p, q, match_activations(a, p, q, x), x, how=replace(QUICK, steps=1), spaces=SPACES)
    assert found.history[1].objective != found.history[0].objective


def test_patience_stops_early() -> None:
    a, p, q, x = pair()
    start = match_activations(a, p, q, x)
    how = Learning(steps=500, every=1, patience=2, rate=0.0, stream_rate=0.0, gain_rate=0.0)
    found = learn(a, p, q, start, x, how=how, spaces=SPACES)
    assert len(found.history) == 3
    assert any("nothing better" in n for n in found.notes)


def test_layers_are_respected() -> None:
    a, p, q, x = pair()
    start = match_activations(a, p, q, x, spaces=("heads", "qk", "vo"), layers=(0,))
    found = learn(a, p, q, start, x, how=QUICK, spaces=("heads", "qk", "vo"), layers=(0,))
    moved = found.transform(q)
    changed = {n for n in q if not torch.equal(moved[n].float(), q[n])}
    assert changed == {f"layers.0.attention.{n}" for n in "qkvo"}


def test_a_head_less_model_learns_to_agree_in_its_stream() -> None:
    from architecture_zoo import special

    a = special()["no head"]
    p, q = model(a, 0), model(a, 1)
    x = probe_inputs(a, 60, length=9)
    found = align(a, p, q, Matching("learned", source="probes", samples=60, length=9, learning=QUICK))
    assert found.history[-1].objective <= found.history[0].objective
    assert difference(function(a, found.parameters), function(a, q)) <= 1e-9
    assert len(x)


def test_orthogonalised_momentum() -> None:
    x = torch.randn(9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    skew = x - x.mT
    y = orthogonalised(skew)
    torch.testing.assert_close(y, -y.mT)
    values = torch.linalg.svdvals(y)[:8]
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.5


def test_bad_settings() -> None:
    a, p, q, x = pair()
    start = match_activations(a, p, q, x)
    for wrong in (
        {"steps": 0},
        {"rate": -1.0},
        {"validation": 1.0},
        {"momentum": 1.5},
        {"batch": 0},
        {"stream_rate": float("nan")},
        {"gain_rate": -0.1},
        {"rate": True},
        {"places": ()},
        {"places": (0.5, 1.0)},
    ):
        with pytest.raises(CosetError, match=next(iter(wrong))):
            Learning(**wrong)  # type: ignore[arg-type]
    with pytest.raises(CosetError, match="two inputs"):
        learn(a, p, q, start, x[:1], how=QUICK, spaces=SPACES)
    b = flags("none", "layer", "none", 6, None, "gelu", True)
    neurons = match_activations(b, model(b), model(b, 1), probe_inputs(b, 30, length=9), spaces=("neurons",))
    assert isinstance(neurons, Match)
    with pytest.raises(CosetError, match="no continuous freedom"):
        learn(b, model(b), model(b, 1), neurons, probe_inputs(b, 30, length=9), how=QUICK, spaces=("neurons",))
