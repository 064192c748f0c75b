"""Paths, barriers, statistics and figures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coset.architecture import Architecture, Patches, StreamOutput, uniform
from coset.connect import Curve, Panel, barrier, barrier_of, draw, evaluate, interpolate, percent_of_naive, save, score, summarise
from coset.errors import CosetError
from coset.objective import IGNORED
from coset.transformer import forward, initialise, random_inputs


def language_model(causal: bool = True) -> Architecture:
    return uniform(pe="rope", layers=1, width=18, heads=6, kv_heads=3, head_dim=10, vocab=13, mlp_width=7, causal=causal)


def classifier() -> Architecture:
    return uniform(
        pe="sinusoidal", layers=1, width=14, heads=3, head_dim=5, mlp_width=11, inputs=Patches(5, (2, 3)), classes=7, positions=6
    )


def identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))


# --- paths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_ends_of_a_path_are_the_models_byte_for_byte(dtype: torch.dtype) -> None:
    a = {"x": torch.tensor([-0.0, 1e30, 0.1], dtype=dtype), "y": torch.tensor([[1 / 3]], dtype=dtype)}
    b = {"x": torch.tensor([5.0, -0.0, -1e30], dtype=dtype), "y": torch.tensor([[-7.0]], dtype=dtype)}
    for t, end in ((0.0, a), (1.0, b), (0, a), (1, b)):
        path = interpolate(a, b, t)
        assert list(path) == list(a)
        assert all(identical(path[name], end[name]) for name in end)


def test_interpolation_is_linear_and_keeps_the_dtype() -> None:
    a, b = {"x": torch.tensor([0.0, 8.0])}, {"x": torch.tensor([4.0, -8.0])}
    middle = interpolate(a, b, 0.25)["x"]
    assert middle.tolist() == [1.0, 4.0]
    assert middle.dtype == torch.float32
    same = {"x": torch.tensor([0.1, -0.3, 1e-40])}
    assert identical(interpolate(same, same, 1 / 3)["x"], same["x"])


def test_interpolation_leaves_the_ends_alone() -> None:
    a, b = {"x": torch.ones(3)}, {"x": torch.zeros(3)}
    interpolate(a, b, 0.5)
    assert a["x"].tolist() == [1, 1, 1]
    assert b["x"].tolist() == [0, 0, 0]


def test_interpolation_lists_every_difference() -> None:
    a = {"p": torch.ones(2), "q": torch.ones(2), "r": torch.ones(2)}
    b = {"q": torch.ones(3), "r": torch.ones(2, dtype=torch.float64), "s": torch.ones(2)}
    with pytest.raises(CosetError) as caught:
        interpolate(a, b, 0.5)
    lines = str(caught.value).splitlines()
    assert [next(n for n in "pqrs" if f"tensor {n} " in line) for line in lines] == ["p", "s", "q", "r"]


@pytest.mark.parametrize("t", [-0.1, 1.1, math.nan])
def test_interpolation_refuses_to_extrapolate(t: float) -> None:
    with pytest.raises(CosetError, match=r"\[0, 1\]"):
        interpolate({"x": torch.ones(1)}, {"x": torch.ones(1)}, t)


# --- barriers -------------------------------------------------------------------------------------------------------


def test_barrier_of_a_hand_made_curve() -> None:
    # Chord of the loss: 1, 2, 3, 4, 5; excess 0, 0, 4, 1, 0. Chord of the accuracy: 1, .9, .8, .7, .6; deficit 0, .5, .2, 0, 0.
    curve = Curve((0.0, 0.25, 0.5, 0.75, 1.0), (1.0, 2.0, 7.0, 5.0, 5.0), (1.0, 0.4, 0.6, 0.7, 0.6))
    found = barrier_of(curve)
    assert found.loss == pytest.approx(4.0)
    assert found.accuracy == pytest.approx(0.5)
    # The other definition in circulation, max minus the mean of the ends, coincides here only by t = 1/2.
    assert barrier_of(Curve((0.0, 0.25, 1.0), (1.0, 4.0, 5.0), (1.0, 1.0, 1.0))).loss == pytest.approx(2.0)
    assert "chord" in found.definition


def test_a_valley_is_no_barrier() -> None:
    found = barrier_of(Curve((0.0, 0.5, 1.0), (2.0, 1.0, 2.0), (0.5, 0.9, 0.5)))
    assert found.loss == 0.0
    assert found.accuracy == 0.0


@given(
    ends=st.tuples(st.floats(0, 10), st.floats(0, 10)),
    bumps=st.lists(st.floats(-5, 5), min_size=1, max_size=9),
)
def test_the_barrier_does_not_see_what_is_linear(ends: tuple[float, float], bumps: list[float]) -> None:
    points = tuple(i / (len(bumps) + 1) for i in range(len(bumps) + 2))
    loss = tuple((1 - t) * ends[0] + t * ends[1] + bump for t, bump in zip(points, (0.0, *bumps, 0.0), strict=True))
    assert barrier_of(Curve(points, loss, (0.0,) * len(points))).loss == pytest.approx(max(0.0, *bumps), abs=1e-9)


@pytest.mark.parametrize(
    ("points", "loss", "match"),
    [
        ((0.0, 1.0), (1.0,), "length"),
        ((0.0,), (1.0,), "length"),
        ((0.0, 0.9), (1.0, 1.0), "0 to 1"),
        ((0.0, 0.5, 0.5, 1.0), (1.0,) * 4, "0 to 1"),
        ((0.0, 0.5, 1.0), (1.0, math.nan, 1.0), "t = 0.5"),
        ((0.0, 0.5, 1.0), (1.0, math.inf, 1.0), "t = 0.5"),
    ],
)
def test_curves_refuse_nonsense(points: tuple[float, ...], loss: tuple[float, ...], match: str) -> None:
    with pytest.raises(CosetError, match=match):
        Curve(points, loss, loss)


def test_next_token_loss_is_measured_at_the_points_of_the_segment() -> None:
    arch = language_model()
    a, b = (initialise(arch, seed=s, dtype=torch.float64, generic=True) for s in (1, 2))
    ids = random_inputs(arch, 5, length=9, seed=3)
    curve = evaluate(arch, a, b, ids, points=4, batch=2)
    assert curve.points == (0.0, 1 / 3, 2 / 3, 1.0)
    for t, loss, accuracy in zip(curve.points, curve.loss, curve.accuracy, strict=True):
        logits = forward(arch, {n: (1 - t) * a[n] + t * b[n] for n in a}, ids)
        log_p = torch.log_softmax(logits, -1)
        expected = [-log_p[i, j, ids[i, j + 1]].item() for i in range(5) for j in range(8)]
        assert loss == pytest.approx(sum(expected) / 40)
        assert accuracy == pytest.approx((logits[:, :-1].argmax(-1) == ids[:, 1:]).double().mean().item())


def test_classifier_loss_and_accuracy_do_not_depend_on_the_batch() -> None:
    arch = classifier()
    a = initialise(arch, seed=4, generic=True)
    x = random_inputs(arch, 11, seed=5)
    labels = forward(arch, a, x).argmax(-1)
    labels[:2] = (labels[:2] + 1) % 7
    small, large = (score(arch, a, x, labels, batch=n) for n in (3, 512))
    assert small.accuracy == large.accuracy == pytest.approx(9 / 11)
    assert small.loss == pytest.approx(large.loss, rel=1e-6)


def test_ignored_targets_do_not_count() -> None:
    arch = language_model(causal=False)
    a = initialise(arch, seed=6, dtype=torch.float64, generic=True)
    ids = random_inputs(arch, 3, length=5, seed=7)
    targets = torch.full_like(ids, IGNORED)
    targets[1, 2] = 4
    log_p = torch.log_softmax(forward(arch, a, ids), -1)
    assert score(arch, a, ids, targets).loss == pytest.approx(-log_p[1, 2, 4].item())


def test_no_barrier_between_a_model_and_itself() -> None:
    arch = classifier()
    a = initialise(arch, seed=8, generic=True)
    found = barrier(arch, a, a, random_inputs(arch, 9, seed=9), torch.arange(9) % 7, points=5)
    assert found.loss == pytest.approx(0.0, abs=1e-12)
    assert found.accuracy == pytest.approx(0.0, abs=1e-12)
    assert set(found.to_json()) == {"points", "loss", "accuracy", "loss_barrier", "accuracy_barrier", "definition"}


def test_a_permuted_copy_is_the_same_function_behind_a_barrier() -> None:
    arch = classifier()
    a = initialise(arch, seed=10, dtype=torch.float64, generic=True)
    x = random_inputs(arch, 40, seed=11, dtype=torch.float64)
    labels = forward(arch, a, x).argmax(-1)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(12))
    b = a | {"layers.0.mlp.up": a["layers.0.mlp.up"][:, order], "layers.0.mlp.down": a["layers.0.mlp.down"][order]}
    curve = evaluate(arch, a, b, x, labels)
    assert curve.loss[0] == pytest.approx(curve.loss[-1])
    assert curve.accuracy[0] == curve.accuracy[-1] == 1.0
    assert barrier_of(curve).accuracy > 0.1


def refusals() -> list[tuple[str, Architecture, torch.Tensor, torch.Tensor | None]]:
    lm, c = language_model(), classifier()
    ids, x, y = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 6, 5), torch.zeros(2, dtype=torch.int64)
    return [
        ("needs targets", c, x, None),
        ("needs targets", language_model(causal=False), ids, None),
        (r"shape \[2\]", c, x, y[:1]),
        ("int64", c, x, y.float()),
        (r"0\.\.6", c, x, y + 7),
        ("patches=6, features=5", c, x[..., :4], y),
        ("NaN", c, x * math.nan, y),
        ("empty", c, x[:0], y[:0]),
        ("token ids", lm, ids.float(), None),
        (r"0\.\.12", lm, ids + 13, None),
        ("at least 2 tokens", lm, ids[:, :1], None),
        ("nothing to score", lm, ids, torch.full_like(ids, IGNORED)),
        ("no head is modelled", replace(lm, outputs=StreamOutput()), ids, None),
    ]


@pytest.mark.parametrize(("match", "arch", "inputs", "targets"), refusals())
def test_data_that_does_not_fit_is_refused(match: str, arch: Architecture, inputs: torch.Tensor, targets: torch.Tensor | None) -> None:
    a = initialise(arch, seed=0)
    with pytest.raises(CosetError, match=match):
        evaluate(arch, a, a, inputs, targets)


def test_models_that_do_not_fit_are_refused() -> None:
    arch = classifier()
    a = initialise(arch, seed=0)
    x, y = random_inputs(arch, 2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(CosetError, match=r"second model: tensor head is missing"):
        evaluate(arch, a, {n: v for n, v in a.items() if n != "head"}, x, y)
    with pytest.raises(CosetError, match="first model: tensor head holds NaN"):
        evaluate(arch, a | {"head": a["head"] * math.nan}, a, x, y)
    with pytest.raises(CosetError, match="at least 2 points"):
        evaluate(arch, a, a, x, y, points=1)


# --- statistics -----------------------------------------------------------------------------------------------------


def test_summary_over_pairs() -> None:
    # Sample variance of 1, 2, 6 is 7.
    assert summarise([1.0, 2.0, 6.0]) == {"mean": pytest.approx(3.0), "standard_error": pytest.approx(math.sqrt(7 / 3))}
    assert summarise([5.0]) == {"mean": 5.0, "standard_error": None}
    with pytest.raises(CosetError, match="at least one"):
        summarise([])


def test_percent_of_naive_is_a_ratio_of_means() -> None:
    assert percent_of_naive([1.0, 1.0], [1.0, 7.0]) == pytest.approx(25.0)
    assert percent_of_naive([0.0], [0.0]) is None
    with pytest.raises(CosetError, match="same pairs"):
        percent_of_naive([1.0], [1.0, 2.0])


# --- figures --------------------------------------------------------------------------------------------------------


def panel(row: str = "RoPE", column: str = "whole", height: float = 1.0) -> Panel:
    points = tuple(i / 8 for i in range(9))
    bumps = [
        Curve(points, tuple(1 + h * t * (1 - t) for t in points), tuple(1 - t * (1 - t) for t in points)) for h in (height, 2 * height)
    ]
    return Panel(row, column, {"naive": bumps, "aligned": bumps[:1]})


def test_figures_are_the_same_bytes_every_time(tmp_path) -> None:
    grid = [panel(), panel("sinusoidal", height=3.0), panel(column="first")]
    for name in ("a.png", "b.png"):
        save(draw(grid), tmp_path / name)
    first = (tmp_path / "a.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    assert first == (tmp_path / "b.png").read_bytes()
    save(draw([panel(height=4.0), *grid[1:]]), tmp_path / "b.png")
    assert first != (tmp_path / "b.png").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "b.png"]


def test_a_figure_that_cannot_be_written_leaves_nothing_behind(tmp_path) -> None:
    (tmp_path / "folder.png").mkdir()
    for name, message in (
        ("folder.png", "cannot write the figure"),
        ("no/f.png", "cannot write the figure"),
        ("f.bmp", "unknown kind of figure"),
    ):
        with pytest.raises(CosetError, match=message):
            save(draw([panel()]), tmp_path / name)
    assert [p.name for p in tmp_path.rglob("*")] == ["folder.png"]


def test_lines_are_means_and_bands_reach_from_lowest_to_highest_pair() -> None:
    axes = draw([panel(height=4.0)]).axes[0]
    assert axes.lines[0].get_ydata()[4] == pytest.approx(1 + 1.5)
    low, high = axes.collections[0].get_datalim(axes.transData).intervaly
    assert (low, high) == (pytest.approx(1.0), pytest.approx(3.0))
    assert draw([panel()], quantity="accuracy").axes[0].lines[0].get_ydata()[4] == pytest.approx(0.75)


def test_figures_do_not_touch_global_style() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    draw([panel()])
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(
    ("panels", "match"),
    [
        ([], "at least one panel"),
        ([panel(), panel()], "share a place"),
        ([Panel("a", "b", {"naive": []})], "no curves"),
        ([Panel("a", "b", {"naive": [*panel().curves["naive"], Curve((0.0, 1.0), (1.0, 1.0), (1.0, 1.0))]})], "different points"),
    ],
)
def test_figures_refuse_nonsense(panels: list[Panel], match: str) -> None:
    with pytest.raises(CosetError, match=match):
        draw(panels)
