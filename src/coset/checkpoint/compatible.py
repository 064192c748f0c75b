"""Whether two checkpoints can be compared at all: every difference that matters, before any weight is read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from coset.architecture import Architecture
from coset.checkpoint.model import Model
from coset.errors import CosetError

_TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "tokenizer.model")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]} ... ({len(text)} characters)"


def _differences(name: str, a: Any, b: Any) -> Iterator[str]:
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        for field in dataclasses.fields(a):
            yield from _differences(f"{name}.{field.name}" if name else field.name, getattr(a, field.name), getattr(b, field.name))
    elif name == "layers":
        if len(a) != len(b):
            yield f"layers: {len(a)} against {len(b)}"
            return
        seen: dict[str, list[int]] = {}
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            for line in _differences("", x, y):
                seen.setdefault(line, []).append(i)
        for line, where in seen.items():
            yield f"{'every layer' if len(where) == len(a) else f'layers {where}'}: {line}"
    elif name.endswith("positions.frequencies"):
        if a != b:
            first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            yield (
                f"RoPE frequencies ({name}): {len(a)} planes against {len(b)}, first difference at plane {first}; "
                "no group element leads from one base or scaling to another"
            )
    elif a != b:
        yield f"{name}: {_short(a)} against {_short(b)}"


def architecture_differences(a: Architecture, b: Architecture) -> list[str]:
    """Every field in which two architectures differ, one line each."""
    return list(_differences("", a, b))


def _tokenizer(folder: Path, name: str) -> Any:
    file = folder / name
    if not file.is_file():
        return None
    if name != "tokenizer.json":
        return file.read_bytes()
    try:
        content = json.loads(file.read_bytes())
        # Truncation and padding settings change with use, not with the vocabulary.
        return {key: content.get(key) for key in ("model", "added_tokens", "pre_tokenizer", "normalizer")}
    except (ValueError, AttributeError):
        return file.read_bytes()


def tied_beside_untied(models: Sequence[Model]) -> list[bool]:
    """Which models are tied while another is not: each is the same function as an untied one whose two tables are equal."""
    tied = [model.architecture.tied for model in models]
    return [mine and not all(tied) for mine in tied]


def require_comparable(reference: Model, other: Model) -> None:
    """Raise unless the two checkpoints describe the same architecture over the same tokens.

    Raises
    ------
    CosetError
        One line for every difference that matters: family, class, sizes, encoding, RoPE frequencies, norms, vocabulary, tokenizer.
    """
    lines = []
    if reference.family != other.family:
        lines.append(f"model_type: {reference.family!r} against {other.family!r}")
    if reference.head != other.head:
        lines.append(f"architectures: {reference.head!r} against {other.head!r}")
    lines += architecture_differences(reference.architecture, other.architecture)
    if reference.architecture.tied != other.architecture.tied:
        lines.append("only one of them has an unembedding of its own (tie_word_embeddings): untie the other as well, or tie both")
    for name in _TOKENIZERS:
        x, y = _tokenizer(reference.path, name), _tokenizer(other.path, name)
        if x is not None and y is not None and x != y:
            lines.append(f"tokenizer: {name} differs, so equal token ids mean different text")
    if not lines:
        missing = sorted(set(reference.invariants) ^ set(other.invariants))
        lines += [f"tensor {name} is in only one of the two" for name in missing]
    if lines:
        raise CosetError("\n".join([f"{reference.path} and {other.path} cannot be compared", *lines]))
