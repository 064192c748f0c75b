"""Inputs on which two models are compared: where the inner products of a matching come from, other than the weights themselves.

``probes`` are random and need nothing; ``self`` is text that language models write themselves; ``activations`` stands for the user's data.
None needs labels.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from coset.architecture import Alibi, Architecture, Experts, LanguageModel, Patches, RelativeBias
from coset.errors import CosetError
from coset.parameters import Parameters
from coset.transformer import Cache, forward, random_inputs


def probe_inputs(architecture: Architecture, samples: int, *, length: int | None = None, seed: int = 0) -> Tensor:
    """Random inputs of several distributions, in equal parts.

    Tokens: uniform; by a Zipf law over a random ranking (weights 1/rank); and few distinct tokens a sample (8), which repeat. Patches: white
    noise; smooth noise (white noise averaged over the grid's neighbours, at unit variance); and white noise with a size of its own for every
    sample (log-normal, σ = 1).

    Returns
    -------
    Tensor
        Token ids [samples, length] (int64), or patches [samples, patches, features] (float32).

    Raises
    ------
    CosetError
        If the length is impossible for the architecture.
    """
    parts = [samples // 3 + (i < samples % 3) for i in range(3)]
    generator = torch.Generator().manual_seed(seed)
    plain = random_inputs(architecture, samples, length=length, seed=seed)
    first, second, third = torch.split(plain, parts)
    if isinstance(architecture.inputs, Patches):
        size = torch.randn(len(third), 1, 1, generator=generator).exp()
        return torch.cat([first, _smooth(second, architecture.inputs.grid), third * size])
    vocabulary = architecture.inputs.vocabulary
    rank = torch.randperm(vocabulary, generator=generator)
    zipf = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    if len(second):
        second = rank[torch.multinomial(zipf, second.numel(), replacement=True, generator=generator)].reshape(second.shape)
    few = torch.randint(vocabulary, (len(third), 8), generator=generator)
    third = torch.gather(few, 1, torch.randint(8, third.shape, generator=generator))
    return torch.cat([first, second, third])


def _smooth(x: Tensor, grid: tuple[int, ...]) -> Tensor:
    """White noise [samples, patches, features] summed over neighbours along every axis of the grid, at unit variance."""
    y = x.reshape(len(x), *grid, x.shape[-1])
    for axis in range(1, 1 + len(grid)):
        y = y + y.roll(1, axis) + y.roll(-1, axis)
    return (y / y.std().clamp_min(1e-12)).reshape(x.shape) if len(x) else x


def sample_text(
    architecture: Architecture,
    models: Sequence[Parameters],
    samples: int,
    *,
    length: int | None = None,
    seed: int = 0,
    batch: int = 256,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Text that language models write: an equal share from each model, token after token from its own distribution (temperature 1).

    The first token is uniform over the vocabulary: nothing is assumed of a start token.

    Parameters
    ----------
    models
        Parameters of the models that write.
    length
        Tokens of a sample; None for the longest that the architecture allows, at most 64.
    progress
        Called with (tokens written in every sample so far, in all), over all models and batches.

    Returns
    -------
    Tensor [samples, length], int64. The same arguments give the same text.

    Raises
    ------
    CosetError
        If the architecture is not a causal language model, the length is impossible, or a model's probabilities are not finite.
    """
    if not isinstance(architecture.outputs, LanguageModel) or not architecture.causal or isinstance(architecture.inputs, Patches):
        raise CosetError("self: only a causal language model can write text; use probes or activations for this architecture")
    start = random_inputs(architecture, samples, length=length, seed=seed)
    length = start.shape[1]
    generator = torch.Generator().manual_seed(seed)
    parts = torch.tensor_split(start[:, :1], len(models))
    jobs = [(model, piece) for model, part in zip(models, parts, strict=True) for piece in torch.split(part, batch) if len(piece)]
    out = []
    with torch.no_grad():
        for done, (model, piece) in enumerate(jobs):
            cache: Cache = {}
            text = [piece]
            for at in range(1, length):
                logits = forward(architecture, model, text[-1], cache=cache)[:, -1].to(torch.float64)
                probabilities = torch.softmax(logits, -1)
                if not bool(torch.isfinite(probabilities).all()):
                    raise CosetError("self: a model's probabilities are not finite, so it cannot write text; use probes instead")
                text.append(torch.multinomial(probabilities, 1, generator=generator))
                if progress is not None:
                    progress(done * length + at, len(jobs) * length)
            out.append(torch.cat(text, 1))
    return torch.cat(out)


def check_size(architecture: Architecture, samples: int, length: int, *, together: int = 1) -> None:
    """Refuse inputs that cannot fit, before an allocator does.

    Counted are the inputs while they are made, and the largest array of one forward pass in float32: a lower bound of what is needed.

    Parameters
    ----------
    samples, length
        Inputs to make, and positions in each.
    together
        Inputs that run through a model at once.

    Raises
    ------
    CosetError
        If either needs more memory than the machine has; it says how much, and what to try.
    """
    memory = machine_memory()
    tokens, features = (False, architecture.inputs.features) if isinstance(architecture.inputs, Patches) else (True, 1)
    made = 3 * 8 * samples * length * features  # as drawn, in parts, and joined; 8 bytes a number
    run = 4 * min(samples, together) * _largest(architecture, length)
    what = f"{samples:,} inputs of {length:,} {'tokens' if tokens else 'patches'}"
    for need, purpose, remedy in (
        (made, "while they are made", "fewer inputs" + (", or shorter ones" if tokens else "")),
        (run, "in a forward pass", "shorter inputs" if tokens else "a smaller model"),
    ):
        if need > memory:
            raise CosetError(
                f"{what} need at least {_gigabytes(need)} {purpose}, and this machine has {_gigabytes(memory)}; ask for {remedy}"
            )


def _largest(architecture: Architecture, length: int) -> int:
    """Numbers in the largest array that a forward pass of one input makes."""
    widest = architecture.width
    if isinstance(architecture.outputs, LanguageModel) and not isinstance(architecture.inputs, Patches):
        widest = max(widest, architecture.inputs.vocabulary)
    square = 0
    for layer in architecture.layers:
        inner, attention = layer.mlp, layer.attention
        widest = max(
            widest, inner.count * inner.mlp.width if isinstance(inner, Experts) else inner.width, attention.heads * attention.head_dim
        )
        if isinstance(attention.positions, Alibi | RelativeBias) or attention.window is not None:
            square = max(square, length * length)  # the bias of every query and key, at least once
    return max(widest * length, square)


def machine_memory() -> int:
    """Bytes of memory that this machine has; where the system does not say, as many as a pointer reaches."""
    if sys.platform == "win32":
        return sys.maxsize
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"


def default_samples(architecture: Architecture, length: int, tokens: int = 1 << 14) -> int:
    """How many samples of a length make about `tokens` positions, at least 32 and never fewer positions than a map reads."""
    widest = max(layer.attention.heads * layer.attention.value_dim for layer in architecture.layers)
    return max(32, math.ceil(max(tokens, 2 * max(widest, architecture.width)) / length))
