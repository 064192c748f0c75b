"""Flags that several verbs share, as dataclasses whose fields are the flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from coset.architecture import PE, Architecture, Sinusoidal, uniform
from coset.errors import CosetError

if TYPE_CHECKING:
    from coset.alignment.matchers import Matching


@Parameter(name="*")
@dataclass(frozen=True)
class Common:
    """What every verb takes."""

    json: bool = False
    """One JSON document on standard output, and nothing else there."""

    quiet: bool = False
    """Neither progress nor warnings."""

    debug: bool = False
    """Tracebacks of errors."""


DEFAULTS = Common()


@Parameter(name="*")
@dataclass(frozen=True)
class ArchitectureFlags:
    """A Transformer whose layers are all alike; the arguments of `coset.architecture.uniform`."""

    pe: PE = "rope"
    """Positional encoding."""

    layers: int = 2
    """Number of layers."""

    width: int = 64
    """Width of the residual stream."""

    heads: int = 4
    """Query heads."""

    kv_heads: int | None = None
    """Key/value heads, each shared by as many query heads. Default: one for each query head."""

    head_dim: int | None = None
    """Width of a head. Default: width / heads."""

    rotary_dim: int | None = None
    """Lanes of a head that rotate (pe rope). Default: all."""

    rope_base: float | None = None
    """Base of the rotary frequencies (pe rope). Default: 10000."""

    rope_pairing: Literal["half", "interleaved"] | None = None
    """Which lanes form a rotary plane (pe rope): j and j + half (Llama), or neighbours (GPT-J). Default: half."""

    norm: Literal["none", "rms", "layer"] = "rms"
    """Norm in front of attention, the MLP and the head."""

    post_norm: bool = False
    """Norm after each residual addition, and none in front of the head."""

    mlp: Literal["gelu", "relu", "silu", "tanh", "swiglu", "geglu"] = "gelu"
    """Activation of the MLP; swiglu and geglu are gated."""

    mlp_width: int | None = None
    """Neurons of an MLP. Default: 4 * width."""

    bias: Literal["none", "qkv", "all"] = "none"
    """Linear maps with a bias; all includes LayerNorm but not the unembedding."""

    qk_norm: bool = False
    """RMSNorm of queries and keys inside every head."""

    tied: bool = False
    """The unembedding is the token embedding."""

    vocab: int = 256
    """Size of the vocabulary."""

    positions: int | None = None
    """Rows of the position table (pe sinusoidal or learned). Default: 128."""

    outputs: Literal["logits", "probabilities"] = "logits"
    """What must stay equal: the logits, or only their softmax."""

    def given(self) -> tuple[str, ...]:
        """The flags that say something."""
        return _given(self)

    def architecture(self) -> Architecture:
        """The architecture that the flags describe.

        Raises
        ------
        CosetError
            If they contradict each other, a size is larger than is counted, or a flag has no meaning beside the positional encoding.
        """
        given = {name: value for name, value in asdict(self).items() if value is not None}
        for name, encodings in _MEANT_FOR.items():
            if name in given and self.pe not in encodings:
                raise CosetError(
                    f"{typed(name)}: it has no meaning with --pe {self.pe}; leave it out, or use --pe {' or '.join(encodings)}"
                )
        for name, most in _MOST.items():
            if given.get(name, 0) > most:
                raise CosetError(f"{typed(name)}: expected at most {most:,}, got {given[name]:,}")
        if self.head_dim is None and self.heads > 0 and self.width // self.heads > _MOST["head_dim"]:
            raise CosetError(
                f"--width: {self.heads} heads would be wider than {_MOST['head_dim']:,} lanes; give more --heads, or --head-dim"
            )
        architecture = uniform(**given)
        if isinstance(architecture.positions, Sinusoidal) and (table := self.width * architecture.positions.count) > _TABLE:
            raise CosetError(
                f"--positions: a fixed table holds at most {_TABLE:,} numbers here, got {table:,}; give fewer, or less --width"
            )
        return architecture


_TABLE = 1 << 24
"""Most numbers of a fixed position table, whose rank is computed."""

_MEANT_FOR: Mapping[str, tuple[PE, ...]] = {
    "rotary_dim": ("rope",),
    "rope_base": ("rope",),
    "rope_pairing": ("rope",),
    "positions": ("sinusoidal", "learned"),
}

# Well beyond any model, and counted in seconds.
_MOST: Mapping[str, int] = {"layers": 2_000, "heads": 1_024, "kv_heads": 1_024, "head_dim": 8_192, "rotary_dim": 8_192}


def typed(name: str) -> str:
    """A flag as it is typed, from its name in Python."""
    return f"--{name.replace('_', '-')}"


def _given(flags: ArchitectureFlags | MatchingFlags) -> tuple[str, ...]:
    """The flags that are not at their defaults."""
    return tuple(typed(f.name) for f in fields(flags) if getattr(flags, f.name) != f.default)


@Parameter(name="*")
@dataclass(frozen=True)
class OutputFlags:
    """What every verb takes that writes a checkpoint."""

    output: Annotated[Path, Parameter(name=["--output", "-o"])]
    """Folder to write."""

    overwrite: bool = False
    """Replace existing outputs."""

    legacy: bool = False
    """Accept pytorch_model.bin."""


@Parameter(name="*")
@dataclass(frozen=True)
class MatchingFlags:
    """How two models are matched; the arguments of `coset.alignment.Matching`, and files."""

    matcher: Literal["weights", "probes", "self", "activations", "search", "learned"] | None = None
    """What is compared: weights, or what both models compute on random inputs (probes), on text that they write (self) or on your data
    (activations); search then tries orders of heads, and learned follows gradients, for the loss between them. Default: weights; of
    barrier, none."""

    spaces: str | None = None
    """What may move, comma separated: heads (with qk and vo), neurons, experts, gains, shifts, stream. Default: all there is."""

    source: Literal["probes", "self", "activations"] | None = None
    """Inputs of search and learned. Default: your data if there are any, else self for language models and probes for others."""

    match_samples: int | None = None
    """Inputs to match on. Default: some ten thousand tokens (a hundred thousand for learned), or all of your data."""

    match_length: int | None = None
    """Tokens in each. Default: 64 (256 of your text), or all of the position table if it has fewer. A model without one (RoPE, ALiBi)
    takes any length."""

    seed: int = 0
    """Same seed, same bytes."""

    task: bool = False
    """Learned: lower the loss of your data's task, not the disagreement with both models, which needs no labels."""

    steps: int | None = None
    """Learned: gradient steps. Default: 600."""

    state: Path | None = None
    """Learned: file to write the state to now and then, and to continue from after an interruption."""

    def given(self) -> tuple[str, ...]:
        """The flags that say something."""
        return _given(self)

    def matching(self, *, refit: bool = False) -> Matching:
        """The options that the flags describe; a refit needs inputs even where the matcher does not.

        Raises
        ------
        CosetError
            If a flag has no meaning with the matcher, or a number is out of range.
        """
        from coset.alignment.learned import Learning
        from coset.alignment.matchers import Matching

        matcher = self.matcher or "weights"
        given = self.given()
        for flag, matchers in _MATCHERS_OF.items():
            if flag in given and matcher not in matchers and not (refit and matchers == _INPUTS):
                raise CosetError(
                    f"{flag}: it has no meaning with --matcher {matcher}; leave it out, or use --matcher {' or '.join(matchers)}"
                )
        learning = Learning() if self.steps is None else Learning(steps=self.steps)
        return Matching(matcher, self.source, self.match_samples, self.match_length, seed=self.seed, task=self.task, learning=learning)


_LEARNED = ("learned",)
_INPUTS = ("probes", "self", "activations", "search", "learned")
_MATCHERS_OF: Mapping[str, tuple[str, ...]] = {
    "--source": ("search", "learned"),
    "--match-samples": _INPUTS,
    "--match-length": _INPUTS,
    "--task": _LEARNED,
    "--steps": _LEARNED,
    "--state": _LEARNED,
}
