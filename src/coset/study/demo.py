"""The demo: small Transformers on real digits, aligned, with the barriers between them before and after.

Two encodings times two scopes of the re-initialisation protocol. Models train in parallel processes of one torch thread each, so results
depend on seeds alone, not on the number of cores.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import zip_longest
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

import safetensors
import safetensors.torch
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from coset.alignment import align
from coset.architecture import Architecture, Patches, Rotary, uniform
from coset.checkpoint.outputs import check_place
from coset.connect import DEFINITION, Barrier, Curve, Panel, barrier, draw, percent_of_naive, save, score, summarise
from coset.errors import CosetError
from coset.parameters import Parameters
from coset.study.data import DIGITS_CLASSES, DIGITS_FEATURES, DIGITS_GRID, digits
from coset.study.matchers import Case, matcher
from coset.study.protocol import Scope, retrain
from coset.study.training import Recipe, train
from coset.symmetries import symmetry
from coset.transform import random_transform
from coset.transformer import forward, initialise, random_inputs

Encoding = Literal["sinusoidal", "rope"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)

VARIANTS: Mapping[Scope, tuple[str, ...]] = {
    # One attention layer was drawn afresh; the rest of the models shares a gauge and must stay in it.
    "first-attention": ("naive", "two_stage", "two_stage_metric"),
    "whole": ("naive", "two_stage", "two_stage_metric", "weights", "learned"),
}
_LAYERS: Mapping[Scope, tuple[int, ...] | None] = {"first-attention": (0,), "whole": None}
_SCOPES: tuple[Scope, ...] = tuple(VARIANTS)

_LABELS = {
    "naive": "naive",
    "two_stage": "two-stage",
    "two_stage_metric": "two-stage + Σ",
    "weights": "all spaces, by weights",
    "learned": "all spaces, learned",
}
_TITLES = {"first-attention": "first attention", "whole": "whole model", "sinusoidal": "sinusoidal", "rope": "RoPE"}


_WHOLE = Recipe(epochs=40, learning_rate=3e-3, weight_decay=1.0)
_AGAIN = Recipe(epochs=20, learning_rate=3e-3, weight_decay=1.0)


@dataclass(frozen=True)
class Settings:
    """Sizes and recipes of the demo: `whole` trains from scratch, `again` trains a model whose first attention layer was drawn afresh."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    mlp_width: int = 128
    rope_base: float = 100.0
    whole: Recipe = _WHOLE
    again: Recipe = _AGAIN
    freeze: bool = False
    points: int = 25
    learning_steps: int = 200


DEFAULT = Settings()


def architecture(pe: Encoding, settings: Settings = DEFAULT) -> Architecture:
    """A pre-norm RMSNorm Transformer on 4x4 patches, mean pooled; RoPE is axial, half of the planes turn with each coordinate."""
    rotary = Rotary.axial(settings.width // settings.heads, settings.rope_base)
    return uniform(
        pe=pe,
        layers=settings.layers,
        width=settings.width,
        heads=settings.heads,
        mlp="gelu",
        mlp_width=settings.mlp_width,
        norm="rms",
        inputs=Patches(DIGITS_FEATURES, DIGITS_GRID),
        positions=DIGITS_GRID[0] * DIGITS_GRID[1],
        frequencies=rotary.frequencies if pe == "rope" else None,
        classes=DIGITS_CLASSES,
        causal=False,
    )


# --- what a worker process does ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """One model of the demo; `scope` None is the base that re-trained ones start from."""

    pe: Encoding
    scope: Scope | None
    seed: int

    @property
    def file(self) -> str:
        return f"models/{self.pe}-{self.scope or 'base'}-{self.seed}.safetensors"


@dataclass(frozen=True)
class Trained:
    """A model that lies in its file."""

    model: Model
    accuracy: float
    loss: float
    seconds: float


@dataclass(frozen=True)
class Pair:
    """Two models of one scope, to be aligned and connected."""

    first: Model
    second: Model


@dataclass(frozen=True)
class Measured:
    """Barriers of a pair by variant."""

    pair: Pair
    barriers: Mapping[str, Barrier]
    seconds: float


def _start_worker() -> None:
    # As many processes as cores already; threads on top would fight over them.
    torch.set_num_threads(1)


def _write(path: Path, parameters: Parameters) -> None:
    partial = path.with_name(f".{path.name}.partial")
    safetensors.torch.save_file({name: x.contiguous() for name, x in parameters.items()}, partial)
    os.replace(partial, path)


def _read(path: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(path)


def _train(folder: Path, model: Model, base: Model, settings: Settings) -> Trained:
    began = time.perf_counter()
    data, arch = digits(), architecture(model.pe, settings)
    if model.scope in (None, "whole"):
        result = train(arch, initialise(arch, seed=model.seed), data, settings.whole, seed=model.seed)
    else:
        start = _read(folder / base.file)
        result = retrain(arch, start, model.scope, data, settings.again, seed=model.seed, freeze=settings.freeze)
    _write(folder / model.file, result)
    test = score(arch, result, data.test_inputs, data.test_targets)
    return Trained(model, test.accuracy, test.loss, time.perf_counter() - began)


def _measure(folder: Path, pair: Pair, settings: Settings) -> Measured:
    began = time.perf_counter()
    scope = pair.first.scope
    assert scope is not None
    data, arch = digits(), architecture(pair.first.pe, settings)
    reference, other = _read(folder / pair.first.file), _read(folder / pair.second.file)
    case = Case(arch, reference, other, _LAYERS[scope], data.train_inputs, steps=settings.learning_steps)
    barriers = {
        name: barrier(arch, reference, matcher(name)(case), data.test_inputs, data.test_targets, points=settings.points)
        for name in VARIANTS[scope]
    }
    return Measured(pair, barriers, time.perf_counter() - began)


def recover(architecture: Architecture, parameters: Parameters, *, seed: int) -> dict[str, Any]:
    """Scramble a trained model by a random element of its whole group, and find the element from the two models alone.

    Returns
    -------
    dict
        How far the scrambled weights are from the model's, how far the recovered ones are (largest relative error of a tensor, float64),
        how far the logits of the three differ on random inputs (relative), and the dimension of the group.
    """
    reference = {name: x.to(torch.float64) for name, x in parameters.items()}
    planted = random_transform(architecture, reference, seed=seed)
    scrambled = planted(reference)
    found = align(architecture, reference, scrambled)
    inputs = random_inputs(architecture, 16, seed=seed, dtype=torch.float64)
    logits = [forward(architecture, p, inputs) for p in (reference, scrambled, found.parameters)]

    def largest(p: Parameters) -> float:
        return max(float((p[name] - x).norm() / x.norm()) for name, x in reference.items() if bool(x.any()))

    def apart(x: Tensor) -> float:
        return float((x - logits[0]).norm() / logits[0].norm())

    account = symmetry(architecture)
    return {
        "group_dimension": account.total_dimension,
        "scrambled": {"parameter_error": largest(scrambled), "logit_error": apart(logits[1])},
        "recovered": {"parameter_error": largest(found.parameters), "logit_error": apart(logits[2])},
        "cycles": sum(step.name == "stream" for step in found.history),
    }


# --- the whole run ----------------------------------------------------------------------------------------------------


def run(
    output: Path,
    *,
    seeds: int = 3,
    base_seed: int = 0,
    overwrite: bool = False,
    quiet: bool = False,
    workers: int | None = None,
    settings: Settings = DEFAULT,
) -> dict[str, Any]:
    """Train, align, measure, and write ``results.json``, ``barriers.png`` and ``models/*.safetensors`` to the folder `output`.

    The folder appears when everything is done; progress goes to stderr.

    Parameters
    ----------
    seeds
        Models for each encoding and scope; every pair of them is measured.
    base_seed
        Another value gives other models throughout.
    overwrite
        Replace the folder of an earlier demo; a folder that holds anything else is never touched.
    quiet
        No progress.
    workers
        Processes; by default one for each core.
    settings
        Sizes and recipes.

    Returns
    -------
    dict
        What ``results.json`` holds. Everything but the values of `timing` and `versions` depends on the arguments alone.

    Raises
    ------
    CosetError
        If `output` may not be written, fewer than 2 seeds are asked for, scikit-learn is missing, or a worker process dies.
    """
    if seeds < 2:
        raise CosetError(f"demo: seeds: a pair needs at least 2, got {seeds}")
    if workers is not None and workers < 1:
        raise CosetError(f"demo: workers: expected at least 1, got {workers}")
    _check_output(output, overwrite)
    digits()
    began = time.perf_counter()
    bases = {pe: Model(pe, None, 1000 * base_seed) for pe in ENCODINGS}
    models = [Model(pe, scope, 1000 * base_seed + i) for scope in reversed(_SCOPES) for pe in ENCODINGS for i in range(1, seeds + 1)]
    pairs = [Pair(a, b) for a, b in itertools.combinations(models, 2) if (a.pe, a.scope) == (b.pe, b.scope)]
    # Beside the output, so that the last step is a rename within one file system.
    folder = output.absolute().parent / f".{output.name}.{secrets.token_hex(4)}.partial"
    (folder / "models").mkdir(parents=True)
    try:
        with _pool(min(workers or _cores(), len(models))) as pool, _progress(quiet) as progress:
            trained = _train_all(pool, progress, folder, bases, models, settings)
            measured = _measure_all(pool, progress, folder, pairs, settings)
        example = bases["rope"]
        results = {
            "rows": [_row(pe, scope, trained, measured) for pe in ENCODINGS for scope in _SCOPES],
            "recovery": recover(architecture(example.pe, settings), _read(folder / example.file), seed=base_seed),
            "definition": DEFINITION,
            "settings": {"seeds": seeds, "base_seed": base_seed, **asdict(settings)},
            "base": {pe: {"test_accuracy": trained[base].accuracy, "test_loss": trained[base].loss} for pe, base in bases.items()},
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "timing": {
                "total_seconds": time.perf_counter() - began,
                "train_seconds": {model.file: t.seconds for model, t in trained.items()},
                "align_and_measure_seconds": sum(m.seconds for m in measured),
            },
        }
        save(_figure(measured), folder / "barriers.png")
        (folder / "results.json").write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        _publish(folder, output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return results


def table(results: Mapping[str, Any]) -> Table:
    """The rows of :func:`run` as a table: mean barrier ± standard error, and what is left of naive."""
    pairs = ", ".join(sorted({str(row["pairs"]) for row in results["rows"]}))
    shown = Table(title=f"Barriers between models (mean ± standard error over {pairs} pairs)", box=SIMPLE_HEAD, pad_edge=False)
    for title in ("models", "alignment", "loss barrier", "accuracy barrier", "% left"):
        shown.add_column(title, justify="left" if title in ("models", "alignment") else "right", no_wrap=True)
    for row in results["rows"]:
        # The description of a row's models runs down its first column.
        described = (_TITLES[row["pe"]], _TITLES[row["scope"]], f"accuracy {row['test_accuracy']['mean']:.3f}")
        variants = VARIANTS[row["scope"]]
        for words, variant in zip_longest(described, variants, fillvalue=""):
            cell = row[variant]
            shown.add_row(
                words,
                _LABELS[variant],
                _with_error(cell["loss_barrier"]),
                _with_error(cell["accuracy_barrier"]),
                "–" if cell["percent_of_naive"] is None else f"{cell['percent_of_naive']:.1f}",
                end_section=variant == variants[-1],
            )
    return shown


def _with_error(value: Mapping[str, float | None]) -> str:
    error = value["standard_error"]
    return f"{value['mean']:.3f}" + ("" if error is None else f" ± {error:.3f}")


def _row(pe: Encoding, scope: Scope, trained: Mapping[Model, Trained], measured: list[Measured]) -> dict[str, Any]:
    accuracies = [t.accuracy for model, t in trained.items() if (model.pe, model.scope) == (pe, scope)]
    here = [m for m in measured if (m.pair.first.pe, m.pair.first.scope) == (pe, scope)]
    naive = [m.barriers["naive"].loss for m in here]
    row: dict[str, Any] = {
        "pe": pe,
        "scope": scope,
        "pairs": len(here),
        "test_accuracy": {"mean": fmean(accuracies), "min": min(accuracies), "models": accuracies},
    }
    for variant in VARIANTS[scope]:
        losses = [m.barriers[variant].loss for m in here]
        row[variant] = {
            "loss_barrier": summarise(losses),
            "accuracy_barrier": summarise([m.barriers[variant].accuracy for m in here]),
            "percent_of_naive": percent_of_naive(losses, naive),
        }
    row["curves"] = [
        {"pair": [m.pair.first.file, m.pair.second.file], **{variant: asdict(b.curve) for variant, b in m.barriers.items()}} for m in here
    ]
    return row


def _figure(measured: list[Measured]) -> Any:
    panels = []
    for pe, scope in itertools.product(ENCODINGS, _SCOPES):
        curves: dict[str, list[Curve]] = {variant: [] for variant in VARIANTS[scope]}
        for m in measured:
            if (m.pair.first.pe, m.pair.first.scope) == (pe, scope):
                for variant, b in m.barriers.items():
                    curves[variant].append(b.curve)
        panels.append(Panel(_TITLES[pe], _TITLES[scope], curves))
    return draw(panels, labels=_LABELS)


# --- processes --------------------------------------------------------------------------------------------------------


def _cores() -> int:
    if sys.platform == "linux":
        # Those that this process may use: a container often has fewer than the machine.
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return cores


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    # Spawned, not forked: a forked child inherits torch's thread pools in whatever state they are.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker)
    try:
        yield pool
    except BrokenProcessPool as error:
        raise CosetError("demo: a worker process died, perhaps for lack of memory; try fewer workers") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
        yield progress


def _train_all(
    pool: ProcessPoolExecutor, progress: Progress, folder: Path, bases: Mapping[Encoding, Model], models: list[Model], settings: Settings
) -> dict[Model, Trained]:
    task = progress.add_task("training models", total=len(bases) + len(models))

    def submit(model: Model) -> Future[Trained]:
        return pool.submit(_train, folder, model, bases[model.pe], settings)

    done: dict[Model, Trained] = {}
    running = {submit(model) for model in (*bases.values(), *(m for m in models if m.scope == "whole"))}
    waiting = [m for m in models if m.scope != "whole"]
    while running:
        finished, running = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            result = future.result()
            done[result.model] = result
            progress.advance(task)
        ready = [m for m in waiting if bases[m.pe] in done]
        waiting = [m for m in waiting if m not in ready]
        running |= {submit(model) for model in ready}
    # In one order, whatever finished first.
    return {model: done[model] for model in (*bases.values(), *models)}


def _measure_all(pool: ProcessPoolExecutor, progress: Progress, folder: Path, pairs: list[Pair], settings: Settings) -> list[Measured]:
    task = progress.add_task("aligning pairs, measuring barriers", total=len(pairs))
    futures = [pool.submit(_measure, folder, pair, settings) for pair in pairs]
    results = []
    for future in futures:
        results.append(future.result())
        progress.advance(task)
    return results


# --- files ------------------------------------------------------------------------------------------------------------

_OWN = {"results.json", "barriers.png", "models"}


def _check_output(output: Path, overwrite: bool) -> None:
    if not output.exists() and not output.is_symlink():
        check_place(output, "demo")
        return
    if not output.is_dir() or output.is_symlink():
        raise CosetError(f"{output}: expected a folder to write to, or nothing; it is something else")
    if not any(output.iterdir()):
        return
    if not overwrite:
        raise CosetError(f"{output}: exists already; choose another output or pass --overwrite")
    foreign = sorted(p.name for p in output.iterdir() if p.name not in _OWN)
    if foreign or not (output / "results.json").is_file():
        raise CosetError(f"{output}: is not the folder of an earlier demo (it holds {foreign or 'no results.json'}); choose another output")


def _publish(folder: Path, output: Path) -> None:
    if not output.exists():
        os.replace(folder, output)
        return
    old = folder.with_suffix(".old")
    os.replace(output, old)
    os.replace(folder, output)
    shutil.rmtree(old)
