"""Units of work and where their results lie: one folder for each unit, named by everything that the unit depends on.

A folder appears whole or not at all, so what is there is finished. Two units with the same dependencies are one unit.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor

from coset.parameters import Parameters
from coset.study.version import code_version

Kind = Literal["data", "train", "pair", "ablation"]

_RECORD = "record.json"


@dataclass(frozen=True)
class Unit:
    """One task with inputs and outputs on disk.

    Attributes
    ----------
    kind
        Which module of `coset.study.units` does it.
    config
        Plain data that the result depends on.
    inputs
        The units whose results it reads, by role.
    place
        Plain data that the result does not depend on: where files lie.
    label
        In words, for messages.
    """

    kind: Kind
    config: Mapping[str, Any]
    inputs: Mapping[str, Unit]
    label: str
    place: Mapping[str, Any] = field(default_factory=dict)
    key: str = field(init=False)
    """Content hash of kind, configuration, inputs, and versions of code and torch."""

    def __post_init__(self) -> None:
        content = {
            "kind": self.kind,
            "config": self.config,
            "inputs": {role: unit.key for role, unit in self.inputs.items()},
            "code": code_version(f"coset.study.units.{self.kind}"),
            "torch": torch.__version__,
        }
        text = json.dumps(content, sort_keys=True, allow_nan=False)
        object.__setattr__(self, "key", hashlib.sha256(text.encode()).hexdigest()[:24])

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unit) and self.key == other.key


@dataclass(frozen=True)
class Store:
    """The folder of all units of a study."""

    folder: Path

    def place(self, unit: Unit) -> Path:
        """Where the unit's results lie, or will."""
        return self.folder / unit.key

    def done(self, unit: Unit) -> bool:
        """Whether they are there."""
        return self.place(unit).is_dir()

    def record(self, unit: Unit) -> dict[str, Any]:
        """The numbers of a finished unit."""
        return dict(json.loads((self.place(unit) / _RECORD).read_text(encoding="utf-8")))

    @contextmanager
    def writing(self, unit: Unit) -> Iterator[Path]:
        """A folder to write to, which becomes the unit's when the block ends without an error."""
        partial = self.folder / f".{unit.key}.{secrets.token_hex(4)}.partial"
        partial.mkdir(parents=True)
        try:
            yield partial
            try:
                os.replace(partial, self.place(unit))
            except OSError:
                # Another worker was quicker (a cluster may start a task twice); the results are the same.
                if not self.done(unit):
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what interrupted runs left half-written."""
        for partial in self.folder.glob(".*.partial"):
            shutil.rmtree(partial, ignore_errors=True)


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """The numbers of a unit, as the last file of its folder."""
    (folder / _RECORD).write_text(json.dumps(record, allow_nan=False), encoding="utf-8")


def write_tensors(path: Path, parameters: Parameters) -> None:
    """Tensors by name, as safetensors."""
    safetensors.torch.save_file({name: x.detach().cpu().contiguous() for name, x in parameters.items()}, path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """What :func:`write_tensors` wrote."""
    return safetensors.torch.load_file(path)
