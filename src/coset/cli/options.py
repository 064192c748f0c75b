"""Flags that several verbs share, as dataclasses whose fields are the flags."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from cyclopts import Parameter

from coset.architecture import PE, Architecture, uniform


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

    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""

    rope_pairing: Literal["half", "interleaved"] = "half"
    """Which lanes form a rotary plane: j and j + half (Llama), or neighbours (GPT-J)."""

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

    positions: int = 128
    """Rows of the position table (pe sinusoidal or learned)."""

    outputs: Literal["logits", "probabilities"] = "logits"
    """What must stay equal: the logits, or only their softmax."""

    def architecture(self) -> Architecture:
        """The architecture that the flags describe.

        Raises
        ------
        CosetError
            If they contradict each other.
        """
        return uniform(**asdict(self))
