"""From the records of finished units to ``results.json``."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from statistics import fmean
from typing import Any

import torch

from coset.connect import DEFINITION, percent_of_naive, summarise
from coset.parameters import count
from coset.study.models import rope_base
from coset.study.plan import Cell, Plan
from coset.study.store import Store, Unit
from coset.symmetries import symmetry


def assemble(plan: Plan, store: Store, failures: Sequence[Mapping[str, str]], timing: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The document ``results.json``. What a failed unit leaves out is left out: a pair, a matcher without pairs, a setting without any."""
    settings = [_setting(cell, store) for cell in plan.cells]
    spent: dict[str, float] = {}
    for unit in plan.units:
        if store.done(unit):
            kind = f"{unit.kind}:{unit.config['matcher']}" if unit.kind == "pair" else unit.kind
            spent[kind] = spent.get(kind, 0.0) + store.record(unit)["timing"]["cpu_seconds"]
    return {
        "name": plan.study.name,
        "coset_version": version("coset"),
        "definition": DEFINITION,
        "config": dict(plan.study.document),
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
            "device": torch.cuda.get_device_name() if device == "cuda" else device,
        },
        "settings": [setting for setting in settings if setting is not None],
        "failures": list(failures),
        "timing": {**timing, "cpu_seconds_by_kind": spent},
    }


def _setting(cell: Cell, store: Store) -> dict[str, Any] | None:
    setting, account = cell.setting, symmetry(cell.architecture)
    models = [
        {"seed": seed, **_kept(store.record(unit), ("loss", "accuracy", "training"))}
        for seed, unit in cell.models.items()
        if store.done(unit)
    ]
    matchers = _matchers(cell, store)
    if not matchers:
        return None
    return {
        "id": cell.id,
        **setting.model_dump(mode="json", exclude={"seeds", "matchers", "ablations"}),
        "rope_base": rope_base(setting.model_dump()),
        "parameters": count(cell.architecture),
        "symmetry": {
            "attention_dimension": account.attention_dimension,
            "total_dimension": account.total_dimension,
            "stream": {"group": account.stream.group, "dimension": account.stream.dimension},
        },
        "data": {**cell.shape.model_part(), **_kept(store.record(cell.data), ("train", "test"))},
        "base": _kept(store.record(cell.base), ("loss", "accuracy")),
        "models": models,
        "matchers": matchers,
        "ablations": _ablations(cell, store),
    }


def _kept(record: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: record[key] for key in keys}


_MEASURES = ("loss_barrier", "accuracy_barrier", "loss_area", "distance")


def _matchers(cell: Cell, store: Store) -> dict[str, Any]:
    records = {
        matcher: {pair: store.record(units[matcher]) for pair, units in cell.pairs.items() if store.done(units[matcher])}
        for matcher in cell.setting.matchers
    }
    naive = {pair: record["loss_barrier"] for pair, record in records.get("naive", {}).items()}
    return {
        matcher: {
            **{measure: summarise([record[measure] for record in by_pair.values()]) for measure in _MEASURES},
            **relative_to({pair: record["loss_barrier"] for pair, record in by_pair.items()}, naive),
            "pairs": [
                {"seeds": list(pair), **_kept(record, (*_MEASURES, "points", "loss", "accuracy"))} for pair, record in by_pair.items()
            ],
        }
        for matcher, by_pair in records.items()
        if by_pair
    }


def relative_to(barriers: Mapping[Any, float], naive: Mapping[Any, float]) -> dict[str, float | None]:
    """``percent_of_naive`` over the pairs that both have, and its standard error by the jackknife over pairs; None where undefined."""
    both = [pair for pair in barriers if pair in naive]
    ours, theirs = [barriers[pair] for pair in both], [naive[pair] for pair in both]
    if not both:
        return {"percent_of_naive": None, "percent_standard_error": None}
    left_out = [
        percent_of_naive(ours[:i] + ours[i + 1 :], theirs[:i] + theirs[i + 1 :]) if len(both) > 1 else None for i in range(len(both))
    ]
    values = [value for value in left_out if value is not None]
    error = None
    if len(values) == len(both):
        mean = fmean(values)
        error = math.sqrt((len(values) - 1) / len(values) * sum((value - mean) ** 2 for value in values))
    return {"percent_of_naive": percent_of_naive(ours, theirs), "percent_standard_error": error}


def _ablations(cell: Cell, store: Store) -> dict[str, Any] | None:
    records = {pair: store.record(unit) for pair, unit in cell.ablations.items() if store.done(unit)}
    if not records:
        return None
    barriers = {
        variant: {pair: record["stage_two"][variant]["loss_barrier"] for pair, record in records.items()}
        for variant in next(iter(records.values()))["stage_two"]
    }
    ranks = [rank for record in records.values() for rank in record["ranks"]]
    # Where every permutation is as good as the naive one there is nothing to judge.
    gaps = [100 * (r["chosen"] - r["best"]) / (r["naive"] - r["best"]) for r in ranks if r["naive"] > r["best"]]
    return {
        "permutation_rank": {**summarise([r["rank"] for r in ranks]), "of": ranks[0]["of"]} if ranks else None,
        "l_hat": summarise(gaps) if gaps else None,
        "stage_two": {
            variant: {"loss_barrier": summarise(list(values.values())), **relative_to(values, barriers["naive"])}
            for variant, values in barriers.items()
            if variant != "naive"
        },
    }


def failure_lines(plan: Plan, errors: Mapping[Unit, str]) -> list[dict[str, str]]:
    """One entry for every failed unit and every setting that it touches."""
    return [
        {"unit": unit.label, "setting": cell.id, "error": error}
        for unit, error in errors.items()
        for cell in plan.cells
        if unit in set(cell.units())
    ]
