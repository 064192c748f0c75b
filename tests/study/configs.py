"""Configurations that train in seconds."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

from coset.study.config import Study, parse

DIGITS: dict[str, Any] = {
    "task": "digits", "model": "vit", "pe": "rope", "scope": "first-attention", "layers": 1, "width": 24, "heads": 3, "mlp_width": 17,
    "rope_base": 50.0, "train_size": 210, "test_size": 70, "steps": 60, "batch": 21, "ablations": True,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "task": "text", "path": "words.txt", "model": "llama", "pe": "learned", "scope": "whole", "layers": 1, "width": 10, "heads": 2,
    "kv_heads": 1, "mlp_width": 7, "context": 9, "train_size": 50, "test_size": 11, "epochs": 3, "batch": 13,
}  # fmt: skip
TOP: dict[str, Any] = {"name": "tiny", "seeds": 2, "points": 5, "matchers": ["naive", "two_stage"]}


def document(*tables: dict[str, Any], **top: Any) -> dict[str, Any]:
    """A configuration as it would be read from TOML."""
    return {**TOP, **top, "setting": copy.deepcopy(list(tables))}


def study(folder: Path, *tables: dict[str, Any], **top: Any) -> Study:
    """A study in a folder that holds its text."""
    write_text(folder / "words.txt")
    return parse(document(*(tables or (DIGITS, TEXT)), **top), folder=folder)


def write_text(path: Path, size: int = 5000) -> None:
    """Reproducible text with some structure."""
    draw = random.Random(0)
    path.write_text(" ".join(draw.choice(("the", "cat", "sat", "on", "a", "mat")) for _ in range(size // 4))[:size])


def toml(configuration: dict[str, Any]) -> str:
    """The few forms of TOML that these configurations need."""

    def value(x: Any) -> str:
        return str(x).lower() if isinstance(x, bool) else repr(x)

    lines = [f"{key} = {value(x)}" for key, x in configuration.items() if key != "setting"]
    for table in configuration["setting"]:
        lines += ["[[setting]]", *(f"{key} = {value(x)}" for key, x in table.items())]
    return "\n".join(lines) + "\n"
