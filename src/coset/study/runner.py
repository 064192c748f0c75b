"""Run a study: do what is not done yet, collect what is, and say what failed."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from coset.errors import CosetError
from coset.parameters import count
from coset.study import cost
from coset.study.config import Study
from coset.study.engines import Engine, Local, Ray, cores
from coset.study.plan import Plan, make
from coset.study.results import assemble, failure_lines
from coset.study.store import Store, Unit

EngineName = Literal["local", "ray"]
_SPARE = 200 * 2**20
"""Bytes of disk that a study leaves free."""


class Interrupted(KeyboardInterrupt):
    """A study that was stopped; its message says how far it came. Nothing that was finished is lost."""


@dataclass(frozen=True)
class Options:
    """How to run a study. None of it changes the results, but for the device."""

    engine: EngineName = "local"
    address: str | None = None
    workers: int | None = None
    device: str = "cpu"
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.engine not in ("local", "ray"):
            raise CosetError(f"engine: expected local or ray, got {self.engine!r}")
        if self.workers is not None and self.workers < 1:
            raise CosetError(f"workers: expected at least 1, got {self.workers}")
        if self.address is not None and self.engine != "ray":
            raise CosetError("address: names a Ray cluster; add --engine ray")
        if self.address is not None and self.workers is not None:
            raise CosetError("workers: a cluster that is there already has its own; leave out workers or address")
        if self.device not in ("cpu", "cuda"):
            raise CosetError(f"device: expected cpu or cuda, got {self.device!r}")


DEFAULT = Options()


def run(study: Study, output: Path, options: Options = DEFAULT) -> dict[str, Any]:
    """Do every unit of `study` that is not done yet, and write ``results.json`` to the folder `output`.

    Finished units lie in ``output/units`` and are never repeated: a run that was interrupted goes on where it stopped, and another
    configuration redoes only what it touches.

    Returns
    -------
    dict
        What ``results.json`` holds. Everything but the values of `timing` depends on the configuration, the code and the type of machine
        alone. Units that failed are listed under ``failures``.

    Raises
    ------
    CosetError
        Before anything is computed: with one line for everything that stands in the way.
    Interrupted
        After Ctrl-C.
    """
    began = time.perf_counter()
    plan = make(study, device=options.device)
    faults = [*plan.faults, *check_output(output, plan), *_check_device(options.device)]
    if faults:
        raise CosetError(f"study {study.name}: cannot run\n" + "\n".join(faults))
    store = Store(output.absolute() / "units")
    with _locked(output):
        store.sweep()
        seconds = cost.estimate(plan, device=options.device)
        errors = _run_units(plan, store, seconds, options)
        timing = {"total_seconds": time.perf_counter() - began, "engine": options.engine}
        results = assemble(plan, store, failure_lines(plan, errors), timing, options.device)
        _write(output / "results.json", results)
    return results


def check_output(output: Path, plan: Plan) -> list[str]:
    """What stands in the way of writing to `output`, one line each; the folder is not made."""
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        return [f"{output}: expected a folder to write to, or nothing; it is something else"]
    if output.exists() and any(output.iterdir()) and not (output / "units").is_dir():
        return [f"{output}: is not the folder of a study (it holds no folder units); choose another output"]
    there = next(parent for parent in (output.absolute(), *output.absolute().parents) if parent.exists())
    if not there.is_dir():
        return [f"{output}: cannot be made, {there} is no folder; choose another output"]
    if not os.access(there, os.W_OK):
        return [f"{there}: cannot be written to"]
    store = Store(output.absolute() / "units")
    left = sum(not store.done(unit) for unit in plan.units) / max(1, len(plan.units))
    needed, free = round(left * cost.size(plan)) + _SPARE, shutil.disk_usage(there).free
    if needed > free:
        return [f"{there}: the study needs about {needed / 2**30:.1f} GiB of disk, and {free / 2**30:.1f} GiB are free"]
    return []


def _check_device(device: str) -> list[str]:
    return [] if device == "cpu" or torch.cuda.is_available() else [f"device: {device} is not available here; leave out --device"]


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    output.mkdir(parents=True, exist_ok=True)
    (output / "units").mkdir(exist_ok=True)
    try:
        with FileLock(output / "study.lock", timeout=0):
            yield
    except Timeout as error:
        raise CosetError(f"{output}: another run is using this folder; wait for it, or choose another output") from error


def _engine(store: Store, options: Options) -> Engine:
    workers = options.workers or cores()
    if options.engine == "ray":
        return Ray(store.folder, address=options.address, workers=workers, device=options.device)
    return Local(store.folder, workers)


def _run_units(plan: Plan, store: Store, seconds: Mapping[Unit, float], options: Options) -> dict[Unit, str]:
    """Do all units, inputs first. Returns the errors of those that failed; what needs them is not tried."""
    waiting = [unit for unit in plan.units if not store.done(unit)]
    errors: dict[Unit, str] = {}
    if not waiting:
        return errors
    engine = _engine(store, options)
    running: dict[str, Unit] = {}
    try:
        with _progress(plan, waiting, seconds, options.quiet) as advance:
            while waiting or running:
                for unit in list(waiting):
                    if len(running) >= engine.slots:
                        break
                    if all(store.done(source) for source in unit.inputs.values()):
                        waiting.remove(unit)
                        engine.submit(unit)
                        running[unit.key] = unit
                for outcome in engine.wait():
                    unit = running.pop(outcome.key)
                    if outcome.error is not None:
                        errors[unit] = outcome.error
                        lost = _dependent(unit, waiting)
                        waiting = [other for other in waiting if other not in lost]
                        for other in lost:
                            advance(other)
                    advance(unit)
    except KeyboardInterrupt as interrupt:
        done = sum(store.done(unit) for unit in plan.units)
        raise Interrupted(f"stopped with {done} of {len(plan.units)} units done; the same command goes on from there") from interrupt
    finally:
        engine.close()
        store.sweep()
    return errors


def _dependent(failed: Unit, waiting: list[Unit]) -> set[Unit]:
    """Those of `waiting`, inputs first, that cannot be done without `failed`."""
    lost = {failed}
    for unit in waiting:
        if any(source in lost for source in unit.inputs.values()):
            lost.add(unit)
    return lost - {failed}


@contextmanager
def _progress(plan: Plan, waiting: list[Unit], seconds: Mapping[Unit, float], quiet: bool) -> Iterator[Callable[[Unit], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[units]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    total, finished = len(plan.units), len(plan.units) - len(waiting)
    with Progress(*columns, console=Console(stderr=True), disable=quiet, speed_estimate_period=600) as progress:
        # Progress is in estimated seconds, so that the time left does not take a long unit for a short one.
        task = progress.add_task(plan.study.name, total=sum(seconds[unit] for unit in waiting), units=f"{finished}/{total} units")

        def advance(unit: Unit) -> None:
            nonlocal finished
            finished += 1
            progress.update(task, advance=seconds[unit], units=f"{finished}/{total} units")

        yield advance


def _write(path: Path, document: Mapping[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


# --- dry run ----------------------------------------------------------------------------------------------------------


def preview(study: Study, output: Path, options: Options = DEFAULT) -> dict[str, Any]:
    """What :func:`run` would do, as plain data: counts, costs, and under ``missing`` what stands in the way. Writes nothing."""
    plan = make(study, device=options.device)
    store = Store(output.absolute() / "units")
    seconds = cost.estimate(plan, device=options.device)
    kinds: dict[str, dict[str, float]] = {}
    for unit in plan.units:
        row = kinds.setdefault(unit.kind, {"units": 0, "done": 0, "core_seconds": 0.0})
        row["units"] += 1
        row["done"] += store.done(unit)
        row["core_seconds"] += 0.0 if store.done(unit) else seconds[unit]
    workers = options.workers or (cores() if options.device == "cpu" else 1)
    total = sum(row["core_seconds"] for row in kinds.values())
    return {
        "name": study.name,
        "settings": [
            {"id": cell.id, "parameters": count(cell.architecture), "train": cell.shape.train, "test": cell.shape.test,
             "core_seconds": sum(seconds[unit] for unit in dict.fromkeys(cell.units()) if not store.done(unit))}
            for cell in plan.cells
        ],
        "models": sum(unit.kind == "train" for unit in plan.units),
        "pairs": sum(len(cell.pairs) for cell in plan.cells),
        "units": kinds,
        "disk_bytes": cost.size(plan),
        "estimate": {"core_seconds": total, "workers": workers, "wall_seconds": total / workers, "device": options.device},
        "missing": [*plan.faults, *check_output(output, plan), *_check_device(options.device)],
    }  # fmt: skip
