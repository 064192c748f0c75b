"""Whether two checkpoints can be compared at all: every difference that matters, before any weight is read."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coset.architecture import Alibi, Architecture, Attention, LanguageModel, Layer, Norm, Rotary
from coset.checkpoint.model import Model
from coset.errors import CosetError

_NUMBER = re.compile(r"\.\d+\.")
"""Of a layer, in the name of a tensor."""

_TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "tokenizer.model")


def _short(value: Any) -> str:
    text = type(value).__name__ if dataclasses.is_dataclass(value) else repr(value)
    return text if len(text) <= 80 else f"{text[:60]} ... ({len(text)} characters)"


@dataclass(frozen=True)
class _Difference:
    """A field with the names that lead to it, its two values in words, and what it may share a line with."""

    name: str
    values: str
    kin: str


def _differences(name: str, a: Any, b: Any, kin: str = "") -> Iterator[_Difference]:
    """Every field in which two parts of an architecture differ, its layers left out."""
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        for field in dataclasses.fields(a):
            inner = f"{name}.{field.name}" if name else field.name
            # One setting of a config decides a field of every norm, or several of attention or an MLP: all biases, heads and KV heads.
            shared = f"norm.{field.name}" if isinstance(a, Norm) else name or inner
            # Layers are gone through one by one, and a tie has a line of its own.
            if field.name not in ("layers", "tied"):
                yield from _differences(inner, getattr(a, field.name), getattr(b, field.name), shared)
    elif isinstance(a, tuple) and name.endswith("positions.frequencies"):
        if a != b:
            first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            yield _Difference(
                f"RoPE frequencies ({name})",
                f"{len(a)} planes against {len(b)}, first difference at plane {first}; "
                "no group element leads from one base or scaling to another",
                name,
            )
    elif a != b:
        yield _Difference(name, f"{_short(a)} against {_short(b)}", kin)


def _layer_differences(a: Layer, b: Layer) -> Iterator[_Difference]:
    following = set(_following(a.attention, b.attention))
    return (d for d in _differences("", a, b) if d.name not in following)


def _following(a: Attention, b: Attention) -> Iterator[str]:
    """Fields whose difference follows from the number or the width of the heads, which is listed."""
    p, q = a.positions, b.positions
    if a.heads != b.heads and isinstance(p, Alibi) and isinstance(q, Alibi):
        yield "attention.positions.slopes"
    if a.head_dim == b.head_dim:
        return
    if (a.value_dim, b.value_dim) == (a.head_dim, b.head_dim):
        yield "attention.value_dim"
    if (a.scale, b.scale) == (a.head_dim**-0.5, b.head_dim**-0.5):
        yield "attention.scale"
    bases = {_base(p), _base(q)} if isinstance(p, Rotary) and isinstance(q, Rotary) else {None}
    if len(bases) == 1 and None not in bases:
        yield "RoPE frequencies (attention.positions.frequencies)"


def _base(rotary: Rotary) -> float | None:
    """Base of the usual frequencies, None for others: scaled ones, or of several coordinates."""
    planes = len(rotary.frequencies)
    base = float(f"{rotary.frequencies[-1][0] ** (-planes / max(1, planes - 1)):.6g}") if rotary.frequencies[-1][0] else 0.0
    usual = [base ** (-j / planes) for j in range(planes)]
    fits = all(len(f) == 1 and math.isclose(f[0], u, rel_tol=1e-4) for f, u in zip(rotary.frequencies, usual, strict=True))
    return base if fits else None


def architecture_differences(a: Architecture, b: Architecture) -> list[str]:
    """Every difference of two architectures, one line each, but for what follows from another line.

    What follows: values and rotary planes where the width of heads differs, positions of patches where their grid does. Fields that one
    setting of a config decides, with the same two values, share a line; so do layers.
    """
    places: dict[tuple[str, str], dict[str, list[str]]] = {}

    def add(where: str, d: _Difference) -> None:
        places.setdefault((d.kin, d.values), {}).setdefault(where, []).append(d.name)

    ends = list(_differences("", a, b))
    if any(d.name == "inputs.grid" for d in ends):
        ends = [d for d in ends if d.name != "positions.count"]
    first = [d for d in ends if d.name == "width"]
    for d in first:
        add("", d)
    if len(a.layers) != len(b.layers):
        add("", _Difference("layers", f"{len(a.layers)} against {len(b.layers)}", "layers"))
    seen: dict[_Difference, list[int]] = {}
    compared = list(zip(a.layers, b.layers, strict=False))
    for i, (x, y) in enumerate(compared):
        for d in _layer_differences(x, y):
            seen.setdefault(d, []).append(i)
    for d, where in seen.items():
        add("every layer: " if len(where) == len(compared) else f"layers {where}: ", d)
    for d in ends:
        if d not in first:
            add("", d)
    return [f"{'; '.join(where + ', '.join(names) for where, names in found.items())}: {values}" for (_, values), found in places.items()]


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
    outputs = [m.architecture.outputs for m in (reference, other)]
    if all(isinstance(x, LanguageModel) for x in outputs) and reference.architecture.tied != other.architecture.tied:
        lines.append("only one of them has an unembedding of its own (tie_word_embeddings): untie the other as well, or tie both")
    for name in _TOKENIZERS:
        x, y = _tokenizer(reference.path, name), _tokenizer(other.path, name)
        if x is not None and y is not None and x != y:
            lines.append(f"tokenizer: {name} differs, so equal token ids mean different text")
    if not lines:
        missing = Counter(_NUMBER.sub(".*.", name) for name in sorted(set(reference.invariants) ^ set(other.invariants)))
        lines += [f"tensor {name}{f' ({n} of them)' if n > 1 else ''} is in only one of the two" for name, n in missing.items()]
    if lines:
        raise CosetError("\n".join([f"{reference.path} and {other.path} cannot be compared", *lines]))
