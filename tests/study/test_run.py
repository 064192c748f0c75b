"""Running: from units to results, through interruptions, changed configurations, dying workers and failing units."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from coset.cli.app import run as command
from coset.connect import DEFINITION, Curve
from coset.errors import CosetError
from coset.study import runner
from coset.study.plan import make
from coset.study.results import relative_to
from coset.study.runner import Options, preview, run
from coset.study.store import Store
from coset.study.units.pair import area, distance
from study.configs import DIGITS, TEXT, document, study, toml, write_text

QUIET = Options(workers=2, quiet=True)


def timeless(document: Any) -> Any:
    """A document without the values of `timing`."""
    if isinstance(document, dict):
        return {key: timeless(value) for key, value in document.items() if key != "timing"}
    return [timeless(value) for value in document] if isinstance(document, list) else document


def units(output: Path) -> dict[str, int]:
    """Finished units and when they were written; there must be nothing else."""
    found = {path.name: path.stat().st_mtime_ns for path in (output / "units").iterdir()}
    assert not [name for name in found if name.startswith(".")]
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A finished study: its folder, which holds ``out``, and its results."""
    folder = tmp_path_factory.mktemp("study")
    return folder, run(study(folder), folder / "out", QUIET)


def test_results_hold_what_the_report_reads(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, results = finished
    assert json.loads((folder / "out" / "results.json").read_text()) == results
    assert (results["name"], results["definition"], results["failures"]) == ("tiny", DEFINITION, [])
    assert [s["id"] for s in results["settings"]] == ["digits-vit-rope-first-attention", "text-llama-learned-whole"]
    digits, text = results["settings"]
    assert (digits["rope_base"], text["rope_base"]) == (50.0, None)
    assert (text["kv_heads"], text["width"], text["layers"], text["freeze"]) == (1, 10, 1, False)
    assert digits["base"]["accuracy"] > 0.3
    assert digits["symmetry"]["attention_dimension"] < digits["symmetry"]["total_dimension"] < digits["parameters"]
    for setting in results["settings"]:
        assert [m["seed"] for m in setting["models"]] == [1, 2]
        for model in setting["models"]:
            steps, loss = model["training"]["steps"], model["training"]["loss"]
            assert len(steps) == len(loss) > 5
            assert steps == sorted(set(steps))
            assert loss[-1] < loss[0]
        assert list(setting["matchers"]) == ["naive", "two_stage"]
        for cell in setting["matchers"].values():
            (pair,) = cell["pairs"]
            assert pair["seeds"] == [1, 2]
            assert pair["points"] == [0, 0.25, 0.5, 0.75, 1]
            assert pair["loss_barrier"] == cell["loss_barrier"]["mean"] >= pair["loss_area"]
            assert cell["loss_barrier"]["standard_error"] is None
        naive, aligned = (setting["matchers"][m] for m in ("naive", "two_stage"))
        assert naive["percent_of_naive"] == pytest.approx(100.0)
        # Both ends are the same functions before and after.
        for key in ("loss", "accuracy"):
            ends = [[cell["pairs"][0][key][end] for end in (0, -1)] for cell in (naive, aligned)]
            assert ends[0] == pytest.approx(ends[1], abs=1e-4)
            assert ends[0] == pytest.approx([m[key] for m in setting["models"]], abs=1e-4)
        assert 0 < aligned["distance"]["mean"] < naive["distance"]["mean"]


def test_ablations_agree_with_the_matchers(finished: tuple[Path, dict[str, Any]]) -> None:
    digits, text = finished[1]["settings"]
    found = digits["ablations"]
    assert text["ablations"] is None
    assert found["permutation_rank"]["of"] == math.factorial(3)
    assert 1 <= found["permutation_rank"]["mean"] <= 6
    assert found["l_hat"]["mean"] >= 0
    assert set(found["stage_two"]) == {"none", "orthogonal", "full"}
    # Stage 1 and full stage 2 are the two-stage matcher.
    ours, theirs = found["stage_two"]["full"], digits["matchers"]["two_stage"]
    assert ours["loss_barrier"]["mean"] == pytest.approx(theirs["loss_barrier"]["mean"], rel=1e-3)
    assert ours["percent_of_naive"] == pytest.approx(theirs["percent_of_naive"], rel=1e-3)


def test_finished_units_are_not_repeated(finished: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, results = finished
    before = units(folder / "out")
    monkeypatch.setattr(runner, "_engine", lambda *_: pytest.fail("a worker was started"))
    assert timeless(run(study(folder), folder / "out", QUIET)) == timeless(results)
    assert units(folder / "out") == before


@pytest.mark.parametrize(
    ("change", "redone"),
    [
        ({"seeds": 3}, {"train": 2, "pair": 8, "ablation": 2}),  # a third model of both, and its two pairs
        ({"points": 7}, {"pair": 4, "ablation": 1}),
        ({"matchers": ["naive", "two_stage_metric"]}, {"pair": 2}),
        ({"name": "other"}, {}),
        ({"base_seed": 5}, {"train": 4, "pair": 2, "ablation": 1}),  # both bases; the whole models do not start from theirs
        ({"clip": 0.5}, {"train": 6, "pair": 4, "ablation": 1}),
    ],
)
def test_a_changed_configuration_touches_what_depends_on_it(
    finished: tuple[Path, dict[str, Any]], change: dict[str, Any], redone: dict[str, int]
) -> None:
    folder = finished[0]
    store = Store(folder / "out" / "units")
    kinds = [unit.kind for unit in make(study(folder, **change)).units if not store.done(unit)]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == redone


def test_changed_data_is_noticed(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    store = Store(finished[0] / "out" / "units")
    same = study(tmp_path, TEXT)
    assert all(store.done(unit) for unit in make(same).units)
    write_text(tmp_path / "words.txt", 4999)
    assert not any(store.done(unit) for unit in make(same).units)


def test_settings_that_differ_in_scope_share_their_base(tmp_path: Path) -> None:
    plan = make(study(tmp_path, {**DIGITS, "scope": ["first-attention", "last-layer", "whole"], "freeze": [False, True]}))
    assert len(plan.cells) == 5
    assert len({cell.base.key for cell in plan.cells}) == len({cell.data.key for cell in plan.cells}) == 1
    assert len({unit.key for cell in plan.cells for unit in cell.models.values()}) == 10


# --- interruptions ----------------------------------------------------------------------------------------------------


def test_ctrl_c_and_then_the_same_results(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    write_text(tmp_path / "words.txt")
    (tmp_path / "study.toml").write_text(toml(document(DIGITS, TEXT)))
    words = [sys.executable, "-c", "from coset.cli import main; main()", "study", "run", "study.toml", "-o", "out", "--workers", "2"]
    process = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for(lambda: sum(1 for _ in (tmp_path / "out").glob("units/[!.]*")) >= 3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "units done; the same command goes on from there" in errors
    assert not (tmp_path / "out" / "results.json").exists()
    before = units(tmp_path / "out")
    assert 3 <= len(before) < len(units(finished[0] / "out"))
    assert timeless(run(study(tmp_path), tmp_path / "out", QUIET)) == timeless(finished[1])
    after = units(tmp_path / "out")
    assert before.items() <= after.items()


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def in_mid_training(output: Path) -> bool:
    """Whether a unit is under way that reads a data set which is there."""
    names = [path.name for path in (output / "units").glob("*")] if output.exists() else []
    return any(name.startswith(".") for name in names) and any(not name.startswith(".") for name in names)


class Killer(threading.Thread):
    """Kills one process, as the system does when memory runs out, when a unit is under way."""

    def __init__(self, output: Path, victims: Callable[[], list[int]]):
        super().__init__(daemon=True)
        self.output, self.victims, self.killed = output, victims, 0

    def run(self) -> None:
        wait_for(self.strike, seconds=600)  # a busy machine takes minutes to start Ray

    def strike(self) -> bool:
        for pid in self.victims() if in_mid_training(self.output) else []:
            # It may have ended by itself since.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.killed = 1
                return True
        return False


def ray_workers() -> list[int]:
    """Processes that run one of our tasks and descend from this one."""
    parents, found = {}, []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            rest = stat.read_text().rpartition(")")[2]
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        pid = int(stat.parent.name)
        parents[pid] = int(rest.split()[1])
        if command.startswith(b"ray::execute"):
            found.append(pid)

    def ours(pid: int) -> bool:
        while pid > 1 and pid != os.getpid():
            pid = parents.get(pid, 0)
        return pid == os.getpid()

    return [pid for pid in found if ours(pid)]


def local_workers() -> list[int]:
    return [p.pid for p in multiprocessing.active_children() if p.name == "coset study worker" and p.pid is not None]


def test_a_local_worker_that_is_killed_is_replaced(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    killer = Killer(tmp_path / "out", local_workers)
    killer.start()
    results = run(study(tmp_path), tmp_path / "out", QUIET)
    assert killer.killed
    assert timeless(results) == timeless(finished[1])
    units(tmp_path / "out")


@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.skipif(sys.platform != "linux", reason="finds Ray's processes in /proc")
def test_ray_gives_the_same_results_with_a_worker_killed_in_mid_task(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    pytest.importorskip("ray")
    killer = Killer(tmp_path / "out", ray_workers)
    killer.start()
    results = run(study(tmp_path), tmp_path / "out", Options(engine="ray", workers=2, quiet=True))
    assert killer.killed
    assert timeless(results) == timeless(finished[1])
    units(tmp_path / "out")


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_failed_unit_does_not_take_the_rest_down(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "words.txt")
    bad = {**TEXT, "learning_rate": 1e30, "scope": ["whole", "first-layer"]}
    (tmp_path / "study.toml").write_text(toml(document(bad, TEXT)))
    monkeypatch.chdir(tmp_path)
    assert command(["study", "run", "study.toml", "-o", "out", "--workers", "1", "--json", "--quiet"]) == 2
    printed = capsys.readouterr()
    results = json.loads(printed.out)
    # What is not touched is there; ids differ, because they tell it apart from what failed.
    (setting,) = results["settings"]
    assert timeless(setting["models"]) == timeless(finished[1]["settings"][1]["models"])
    assert {f["unit"].split(" ")[0] for f in results["failures"]} == {"base", "model"}
    assert all("the loss is not finite" in f["error"] for f in results["failures"])
    failed = {f["setting"] for f in results["failures"]}
    assert len(failed) == 2
    assert all(name in printed.err for name in failed)


def test_a_pair_that_failed_is_left_out(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """What is on disk is what is reported."""
    folder = finished[0]
    plan = make(study(folder))
    lost = plan.cells[0].pairs[1, 2]["two_stage"]
    kept = Store(folder / "out" / "units").place(lost)
    hidden = tmp_path / "hidden"
    kept.rename(hidden)
    try:
        results = runner.assemble(plan, Store(folder / "out" / "units"), [], {}, "cpu")
    finally:
        hidden.rename(kept)
    assert list(results["settings"][0]["matchers"]) == ["naive"]
    assert list(results["settings"][1]["matchers"]) == ["naive", "two_stage"]


# --- before anything runs ---------------------------------------------------------------------------------------------


def test_what_is_wrong_is_said_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CosetError, match=r"nothing\.txt: there is no such file"):
        run(study(tmp_path, {**TEXT, "path": "nothing.txt"}), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("precious")
    (tmp_path / "file").touch()
    for below in ("out", "deep/out"):
        with pytest.raises(CosetError, match="file is no folder; choose another output"):
            run(study(tmp_path), tmp_path / "file" / below)
    with pytest.raises(CosetError, match="is not the folder of a study"):
        run(study(tmp_path), tmp_path / "foreign")
    with pytest.raises(CosetError, match="something else"):
        run(study(tmp_path), tmp_path / "words.txt")
    usage = runner.shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(runner.shutil, "disk_usage", lambda _: usage._replace(free=1000))
        with pytest.raises(CosetError, match=r"GiB of disk, and 0\.0 GiB are free"):
            run(study(tmp_path), tmp_path / "out")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CosetError, match="device: cuda is not available"):
        run(study(tmp_path), tmp_path / "out", Options(device="cuda"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"engine": "slurm"}, "engine: expected local or ray"),
        ({"workers": 0}, "workers: expected at least 1"),
        ({"address": "auto"}, "add --engine ray"),
        ({"address": "auto", "engine": "ray", "workers": 2}, "leave out workers or address"),
        ({"device": "tpu"}, "device: expected cpu or cuda"),
    ],
)
def test_options_that_contradict_each_other(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(CosetError, match=message):
        Options(**wrong)


def test_one_run_at_a_time(finished: tuple[Path, dict[str, Any]]) -> None:
    folder = finished[0]
    with runner._locked(folder / "out"), pytest.raises(CosetError, match="another run is using this folder"):
        run(study(folder), folder / "out", QUIET)


def test_a_dry_run_says_what_would_be_done(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished[0]
    plan = preview(study(folder, seeds=3), folder / "out")
    assert (len(plan["settings"]), plan["models"], plan["pairs"], plan["missing"]) == (2, 8, 6, [])
    assert {kind: (row["units"], row["done"]) for kind, row in plan["units"].items()} == {
        "data": (2, 2), "train": (8, 6), "pair": (12, 4), "ablation": (3, 1)
    }  # fmt: skip
    assert 0 < plan["estimate"]["wall_seconds"] < 60
    (tmp_path / "study.toml").write_text(toml(document(DIGITS, {**TEXT, "path": "missing.txt"})))
    assert command(["study", "run", str(tmp_path / "study.toml"), "-o", str(tmp_path / "out"), "--dry-run"]) == 2
    printed = capsys.readouterr()
    assert "2 settings, 6 models, 2 pairs" in printed.out
    assert "coset: missing: task text:" in printed.err
    assert not (tmp_path / "out").exists()


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_the_area_is_the_mean_excess_over_the_chord() -> None:
    grid = tuple(i / 100 for i in range(101))
    # Chord 1 + t, excess c t (1 - t): mean c / 6.
    curve = Curve(grid, tuple(1 + t + 0.6 * t * (1 - t) for t in grid), (0.5,) * 101)
    assert area(curve) == pytest.approx(0.1, abs=1e-4)
    assert area(Curve((0.0, 1.0), (3.0, 1.0), (0.5, 0.5))) == 0.0


def test_the_distance_is_relative() -> None:
    a = {"x": torch.tensor([3.0, 0.0]), "y": torch.tensor([[4.0]])}
    assert distance(a, a) == 0.0
    assert distance(a, {"x": torch.tensor([3.0, 3.0]), "y": torch.tensor([[0.0]])}) == pytest.approx(1.0)


def test_the_error_of_a_ratio_of_means() -> None:
    proportional = relative_to({0: 1.0, 1: 2.0, 2: 4.0}, {0: 10.0, 1: 20.0, 2: 40.0})
    assert proportional == {"percent_of_naive": pytest.approx(10.0), "percent_standard_error": pytest.approx(0.0, abs=1e-9)}
    # With equal naive barriers the jackknife is the standard error of the mean.
    equal = relative_to({0: 1.0, 1: 2.0, 2: 6.0}, {0: 10.0, 1: 10.0, 2: 10.0, 3: 99.0})
    assert equal["percent_of_naive"] == pytest.approx(30.0)
    assert equal["percent_standard_error"] == pytest.approx(10 * math.sqrt(7) / math.sqrt(3))
    assert relative_to({0: 1.0}, {0: 2.0}) == {"percent_of_naive": 50.0, "percent_standard_error": None}
    assert relative_to({0: 1.0}, {}) == {"percent_of_naive": None, "percent_standard_error": None}
    assert relative_to({0: 0.0, 1: 0.0}, {0: 0.0, 1: 0.0}) == {"percent_of_naive": None, "percent_standard_error": None}
