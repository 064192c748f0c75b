"""Prepare a data set: read, split, subsample, write as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from coset.study.data import Dataset
from coset.study.store import read_tensors, write_tensors
from coset.study.tasks import TASKS, Request

_FILE = "data.safetensors"
_FIELDS = ("train_inputs", "train_targets", "test_inputs", "test_targets")


def run(config: Mapping[str, Any], place: Mapping[str, Any], inputs: Mapping[str, Path], folder: Path) -> dict[str, Any]:
    """Write ``data.safetensors``. `config` is that of `coset.study.tasks.hashed`, `place` holds the options with their paths."""
    data = TASKS[config["task"]].load(Request(place["options"], config["seed"]))
    parts = {name: getattr(data, name) for name in _FIELDS}
    write_tensors(folder / _FILE, {name: x for name, x in parts.items() if x is not None})
    return {"train": len(data.train_inputs), "test": len(data.test_inputs)}


def read(folder: Path) -> Dataset:
    """The data set that :func:`run` wrote."""
    tensors: Mapping[str, Tensor] = read_tensors(folder / _FILE)
    return Dataset(
        tensors["train_inputs"],
        tensors.get("train_targets"),
        tensors["test_inputs"],
        tensors.get("test_targets"),
    )
