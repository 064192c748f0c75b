"""Inputs on which two models are compared: where the inner products of a matching come from, other than the weights themselves.

``probes`` are random and need nothing; ``self`` is text that language models write themselves; ``activations`` stands for the user's data.
None needs labels.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from coset.architecture import Alibi, Architecture, Experts, LanguageModel, Patches, RelativeBias
from coset.errors import CosetError
from coset.parameters import Parameters
from coset.transformer import Cache, forward, random_inputs, require_no_length

_TOGETHER = 64
"""Random images made at a time."""
_Kind = Literal["full", "plain", "middle"]
_KINDS: tuple[_Kind, ...] = get_args(_Kind)


def probe_inputs(architecture: Architecture, samples: int, *, length: int | None = None, seed: int = 0) -> Tensor:
    """Random inputs of several distributions, in equal parts, shuffled.

    Tokens: uniform; by a Zipf law over a random ranking (weights 1/rank); and few distinct tokens a sample (8), which repeat. Patches: random
    images; random images on a plain background; and such with more in the middle. An image is a Gaussian field whose amplitudes fall with
    frequency as 1/f^a, with a uniform in [1, 2] for every image; a plain background is what cutting it off at its mean leaves; before that,
    3u (E r² − r²) is added for the middle, with u uniform in [0, 1] for every image and r² the sum of squares of positions, −1 to 1 from
    border to border. Every image has mean zero and variance one.

    Returns
    -------
    Tensor
        Token ids [samples, length] (int64), or patches [samples, patches, features] (float32). Features of a patch are taken as channel, row,
        column of its pixels (one channel where they are a square, three where a third of them is), else as channels.

    Raises
    ------
    CosetError
        If the length is impossible for the architecture.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = [samples // 3 + (i < samples % 3) for i in range(3)]
    if isinstance(architecture.inputs, Patches):
        require_no_length(architecture.inputs, length)
        parts = [_images(architecture.inputs, n, kind, generator) for n, kind in zip(sizes, _KINDS, strict=True)]
    else:
        parts = list(torch.split(random_inputs(architecture, samples, length=length, seed=seed), sizes))
        vocabulary = architecture.inputs.vocabulary
        rank = torch.randperm(vocabulary, generator=generator)
        zipf = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
        if sizes[1]:
            parts[1] = rank[torch.multinomial(zipf, parts[1].numel(), replacement=True, generator=generator)].reshape(parts[1].shape)
        few = torch.randint(vocabulary, (sizes[2], 8), generator=generator)
        parts[2] = torch.gather(few, 1, torch.randint(8, parts[2].shape, generator=generator))
    return torch.cat(parts)[torch.randperm(samples, generator=generator)]


def _pixels(patches: Patches) -> tuple[int, int]:
    """Channels of an image, and pixels along the side of a patch."""
    if len(patches.grid) == 2:
        for channels in (1, 3):
            side = math.isqrt(patches.features // channels)
            if channels * side**2 == patches.features:
                return channels, side
    return patches.features, 1


def _images(patches: Patches, samples: int, kind: _Kind, generator: torch.Generator) -> Tensor:
    """Random images [samples, patches, features], float32. See `probe_inputs`."""
    channels, side = _pixels(patches)
    dims = len(patches.grid)
    shape = [side * n for n in patches.grid]

    def squares(axes: Sequence[Tensor]) -> Tensor:
        return torch.stack(torch.meshgrid(*axes, indexing="ij")).square().sum(0)

    frequency = squares([torch.fft.fftfreq(n) for n in shape]).sqrt().clamp_min(1 / max(shape))
    far = squares([torch.linspace(-1, 1, n) for n in shape])
    middle = 3 * (far.mean() - far)
    axes = tuple(range(2, 2 + dims))
    out = [torch.zeros(0, math.prod(patches.grid), patches.features)]
    for start in range(0, samples, _TOGETHER):
        count = min(_TOGETHER, samples - start)
        noise = torch.randn(count, channels, *shape, generator=generator)
        if channels > 1:
            noise = noise + torch.randn(count, 1, *shape, generator=generator)  # colours go together
        power, u = torch.rand(2, count, 1, *[1] * dims, generator=generator).unbind()
        image = _standard(torch.fft.ifftn(torch.fft.fftn(noise, dim=axes) * frequency ** -(1 + power), dim=axes).real)
        if kind == "middle":
            image = image + u * middle
        if kind != "full":
            image = _standard(image.clamp_min(0))
        image = image.reshape(count, channels, *(size for n in patches.grid for size in (n, side)))
        image = image.permute(0, *range(2, 2 + 2 * dims, 2), 1, *range(3, 3 + 2 * dims, 2))
        out.append(image.reshape(count, -1, patches.features))
    return torch.cat(out)


def _standard(x: Tensor) -> Tensor:
    """Every sample at mean zero and variance one; constant ones at zero."""
    axes = tuple(range(1, x.ndim))
    x = x - x.mean(axes, keepdim=True)
    return x / x.square().mean(axes, keepdim=True).sqrt().clamp_min(1e-6)


def surest_inputs(
    architecture: Architecture,
    models: Sequence[Parameters],
    draw: Callable[[int], Tensor],
    samples: int,
    *,
    rounds: int,
    seed: int = 0,
    batch: int = 256,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Of random inputs, those that classifiers together are surest of: nearest to what they were trained on.

    Every round draws candidates and keeps those with the lowest entropy of the models' mean probabilities, as many of every class (the mean's
    most probable one) as there are. Memory does not grow with the rounds.

    Parameters
    ----------
    draw
        Candidates for a seed.
    samples, rounds
        How many to keep in all; every round keeps its share.
    progress
        Called with (rounds done, rounds in all).

    Returns
    -------
    Tensor [samples, ...], of what `draw` gives; fewer if the draws are too few.
    """
    kept = []
    for done in range(rounds):
        candidates = draw(seed * rounds + done)
        share = samples // rounds + (done < samples % rounds)
        with torch.no_grad():
            mean = torch.cat(
                [
                    torch.stack([torch.softmax(forward(architecture, model, part), -1) for model in models]).mean(0)
                    for part in torch.split(candidates, batch)
                ]
            )
        order = torch.special.entr(mean).sum(-1).argsort(stable=True)
        label = mean.argmax(-1)[order]
        place = torch.nn.functional.one_hot(label, mean.shape[-1]).cumsum(0)[torch.arange(len(label)), label]  # in its class
        kept.append(candidates[order[place.argsort(stable=True)[:share]]])
        if progress is not None:
            progress(done + 1, rounds)
    return torch.cat(kept)


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
