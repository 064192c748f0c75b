"""Data files for checkpoints: text through the checkpoint's own tokenizer, token ids, or inputs with targets."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from coset.architecture import StreamOutput, Tokens
from coset.checkpoint.model import Model
from coset.errors import CosetError
from coset.objective import check_inputs, check_targets

LENGTH = 256
"""Tokens in a window of text, where the model allows as many."""


def require_loss(model: Model) -> None:
    """Raise unless the model's own head is computed here, so that it has a loss."""
    if isinstance(model.architecture.outputs, StreamOutput):
        raise CosetError(
            f"{model.path}: {model.head} has no head that is computed here (it would be kept as it is), so there is no loss; expected a causal "
            "language model, or a classifier whose head reads the stream"
        )


def read_data(
    path: str | os.PathLike[str], model: Model, *, length: int | None = None, samples: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Inputs and targets from a file, checked against the model, whether or not its targets are going to be read.

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
        If the file is missing, unreadable, of another kind, or has the wrong tensors; if a text is too short for one window; and as
        :func:`coset.objective.check_inputs` and :func:`coset.objective.check_targets` do.
    """
    if samples is not None and samples < 1:
        raise CosetError(f"samples: must be at least 1, got {samples}")
    path = Path(path)
    if not path.is_file():
        raise CosetError(f"{path}: no such data file; expected text (.txt) or tensors (.safetensors)")
    if path.suffix == ".txt":
        inputs, targets = _text(path, model, length), None
    elif path.suffix == ".safetensors":
        if length is not None:
            raise CosetError(f"{path}: these inputs have a length of their own, and only text is cut into windows; leave the length out")
        inputs, targets = _tensors(path)
    else:
        raise CosetError(f"{path}: unknown kind of data {path.suffix or '(no suffix)'!r}; expected .txt or .safetensors")
    check_inputs(model.architecture, inputs, str(path))
    if targets is not None:
        check_targets(model.architecture, inputs, targets, str(path))
    return inputs[:samples], None if targets is None else targets[:samples]


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
        most = "" if limit is None else f", and the model's context is {limit}"
        raise CosetError(f"{path}: cannot cut the text into windows of {window} tokens: they hold at least 2{most}; ask for another length")
    if len(ids) < window:
        raise CosetError(f"{path}: {len(ids)} tokens are too few for one window of {window}; give more text, or a smaller length")
    return ids[: len(ids) // window * window].reshape(-1, window)
