"""Data files for checkpoints: text through the checkpoint's own tokenizer, token ids, or inputs with targets."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from coset.architecture import Patches, Tokens
from coset.checkpoint.model import Model
from coset.errors import CosetError

LENGTH = 256
"""Tokens in a window of text, where the model allows as many."""


def read_data(
    path: str | os.PathLike[str], model: Model, *, length: int | None = None, samples: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Inputs and targets from a file.

    Parameters
    ----------
    path
        ``.txt``: UTF-8 text, cut into windows of `length` tokens by the checkpoint's ``tokenizer.json``; ``.safetensors``: ``input_ids``
        [n, length], or ``inputs``; with ``targets`` where there are any.
    length
        Tokens in a window of text (default 256, or less if the model's context is shorter).
    samples
        Use only the first so many.

    Returns
    -------
    inputs, targets
        Targets are None where the next token is the target.

    Raises
    ------
    CosetError
        If the file is missing, unreadable, of another kind, has the wrong tensors, or a text is too short for one window.
    """
    path = Path(path)
    if not path.is_file():
        raise CosetError(f"{path}: no such data file; expected text (.txt) or tensors (.safetensors)")
    if path.suffix == ".txt":
        inputs, targets = _text(path, model, length), None
    elif path.suffix == ".safetensors":
        inputs, targets = _tensors(path)
    else:
        raise CosetError(f"{path}: unknown kind of data {path.suffix or '(no suffix)'!r}; expected .txt or .safetensors")
    if samples is not None:
        if samples < 1:
            raise CosetError(f"samples: expected at least one, got {samples}")
        inputs, targets = inputs[:samples], None if targets is None else targets[:samples]
    return inputs, targets


def read_inputs(
    path: str | os.PathLike[str], model: Model, *, length: int | None = None, samples: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Inputs and targets from a file, to run models on: as :func:`read_data`, and checked against the model, which needs no head here.

    Raises
    ------
    CosetError
        As :func:`read_data` does, and if shapes, dtypes or ids do not fit the model.
    """
    inputs, targets = read_data(path, model, length=length, samples=samples)
    reads, longest = model.architecture.inputs, model.architecture.length
    got = f"got {inputs.dtype} of shape {list(inputs.shape)}"
    if inputs.numel() == 0:
        raise CosetError(f"{path}: expected at least one input, {got}")
    if isinstance(reads, Patches):
        shape = (math.prod(reads.grid), reads.features)
        if inputs.ndim != 3 or tuple(inputs.shape[1:]) != shape or not inputs.is_floating_point():
            raise CosetError(f"{path}: expected floating-point patches [n, {shape[0]}, {shape[1]}], {got}")
        if not bool(torch.isfinite(inputs).all()):
            raise CosetError(f"{path}: inputs hold NaN or infinity")
        return inputs, targets
    if inputs.ndim != 2 or inputs.dtype != torch.int64:
        raise CosetError(f"{path}: expected token ids [n, length], {got}")
    if longest is not None and inputs.shape[1] > longest:
        raise CosetError(f"{path}: sequences of {inputs.shape[1]} tokens are longer than the model's context of {longest}; cut them")
    low, high = int(inputs.min()), int(inputs.max())
    if low < 0 or high >= reads.vocabulary:
        raise CosetError(
            f"{path}: expected token ids from 0 to {reads.vocabulary - 1}, the vocabulary of {model.path}, got {low if low < 0 else high}"
        )
    return inputs, targets


def _tensors(path: Path) -> tuple[Tensor, Tensor | None]:
    try:
        with safe_open(str(path), framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError) as error:
        raise CosetError(f"{path}: not a readable safetensors file: {error}") from None
    if "input_ids" in found:
        inputs, targets = found["input_ids"], found.get("targets")
    elif "inputs" in found:
        inputs, targets = found["inputs"], found.get("targets")
    else:
        raise CosetError(f"{path}: expected tensors input_ids [n, length], or inputs and targets; got {', '.join(sorted(found)) or 'none'}")
    for name, x in (("inputs", inputs), ("targets", targets)):
        if x is not None and (x.dtype == torch.bool or x.is_complex()):
            raise CosetError(f"{path}: {name} must be integers or floating point, got {x.dtype}")
    whole = [x if x is None or x.is_floating_point() else x.to(torch.int64) for x in (inputs, targets)]
    assert whole[0] is not None
    return whole[0], whole[1]


def _text(path: Path, model: Model, length: int | None) -> Tensor:
    if not isinstance(model.architecture.inputs, Tokens):
        raise CosetError(f"{path}: this model reads patches, not text; give a .safetensors file with inputs and targets")
    file = model.path / "tokenizer.json"
    if not file.is_file():
        raise CosetError(
            f"{model.path}: no tokenizer.json to read text with; give token ids instead (.safetensors with input_ids [n, length])"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise CosetError(f"{path}: reading text needs the package tokenizers; install it, or give token ids (.safetensors)") from None
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CosetError(f"{path}: not UTF-8 text: {error}") from None
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids, dtype=torch.int64)
    limit = model.architecture.length
    window = length if length is not None else min(LENGTH, limit or LENGTH)
    if window < 2 or (limit is not None and window > limit):
        raise CosetError(f"length: expected 2 to {limit or 'any number of'} tokens, got {window}")
    if len(ids) < window:
        raise CosetError(f"{path}: {len(ids)} tokens are too few for one window of {window}; give more text, or a smaller --length")
    return ids[: len(ids) // window * window].reshape(-1, window)
