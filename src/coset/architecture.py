"""What a Transformer is: frozen descriptions that validate themselves.

Nothing here holds weights. An :class:`Architecture` says which tensors exist (`coset.parameters`), what they compute
(`coset.transformer`) and which changes of the weights leave that function alone (`coset.symmetries`).

Additive position tables belong to the input, so they are a field of the architecture. Relative encodings (rotary,
ALiBi, bucketed bias) act inside attention, so they are a field of :class:`Attention`: layers may differ in them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from coset.errors import CosetError

Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "tanh", "quick_gelu"]
ACTIVATIONS: tuple[Activation, ...] = ("gelu", "gelu_tanh", "relu", "silu", "tanh", "quick_gelu")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise CosetError(message)


# --- positional encodings -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoPositions:
    """Nothing is added to the input: order enters through attention only, or not at all."""


@dataclass(frozen=True)
class Sinusoidal:
    r"""The fixed table ``P[t, 2j] = sin(t / base^(2j/d))``, ``P[t, 2j+1] = cos(...)``, added to the input.

    With ``stored`` the table is a parameter, ``embed.positions``, that a rotation of the stream takes along; without it
    the table is part of the function and pins the stream to the rotations that fix its rows.
    """

    count: int
    base: float = 10_000.0
    stored: bool = False

    def __post_init__(self) -> None:
        _require(self.count > 0, f"sinusoidal table: expected at least one position, got {self.count}")
        _require(self.base > 1, f"sinusoidal table: expected a base above 1, got {self.base}")


@dataclass(frozen=True)
class LearnedPositions:
    """A trained table ``embed.positions`` [count, stream]; position t reads row ``t + offset`` (RoBERTa: offset 2)."""

    count: int
    offset: int = 0

    def __post_init__(self) -> None:
        _require(self.count > self.offset >= 0, f"learned positions: {self.count} rows leave none after offset {self.offset}")


AdditiveEncoding = NoPositions | Sinusoidal | LearnedPositions


@dataclass(frozen=True)
class Rotary:
    r"""Rotary encoding: plane j of the first ``2 * len(frequencies)`` lanes turns by ``<position, frequencies[j]>``.

    Parameters
    ----------
    frequencies
        One tuple a plane, with one angle (radians per step) for every coordinate of a position: ``((1.0,), (0.01,))`` for
        text, ``((1.0, 0.0), (0.0, 1.0))`` for axial two-dimensional patches. The first nonzero angle must lie in
        (0, pi): a plane that turns backwards is the same plane with its two lanes exchanged. All-zero planes never turn.
    pairing
        ``half``: lanes (j, j + planes) form plane j (Llama, NeoX). ``interleaved``: lanes (2j, 2j + 1) (GPT-J).
    magnitude
        Factor on cosines and sines (YaRN and LongRoPE scale attention in this way).

    Which lanes pair up and which frequencies coincide decide the symmetry group; the base does not.
    """

    frequencies: tuple[tuple[float, ...], ...]
    pairing: Literal["half", "interleaved"] = "half"
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        _require(len(self.frequencies) > 0, "rotary encoding: expected at least one plane, got none")
        axes = {len(f) for f in self.frequencies}
        _require(len(axes) == 1 and 0 not in axes, f"rotary encoding: planes disagree on position coordinates: {sorted(axes)}")
        _require(self.pairing in ("half", "interleaved"), f"rotary pairing: expected half or interleaved, got {self.pairing!r}")
        for j, angles in enumerate(self.frequencies):
            _require(all(math.isfinite(a) for a in angles), f"rotary plane {j}: frequency {angles} is not finite")
            leading = next((a for a in angles if a != 0.0), 1.0)
            _require(
                0 < leading < math.pi and all(abs(a) < math.pi for a in angles),
                f"rotary plane {j}: frequency {angles} must lie in (0, pi) in its first nonzero coordinate "
                "(exchange the plane's two lanes to turn the other way)",
            )

    @staticmethod
    def standard(width: int, base: float = 10_000.0, pairing: Literal["half", "interleaved"] = "half") -> Rotary:
        """The usual frequencies ``base^(-2j/width)`` over `width` rotated lanes."""
        _require(width > 0 and width % 2 == 0, f"rotary width: expected a positive even number of lanes, got {width}")
        _require(base > 0, f"rotary base: expected a positive number, got {base}")
        return Rotary(tuple((base ** (-2 * j / width),) for j in range(width // 2)), pairing)

    @staticmethod
    def axial(width: int, base: float = 100.0, axes: int = 2, pairing: Literal["half", "interleaved"] = "half") -> Rotary:
        """Planes shared out evenly over the coordinates of a grid; each turns with one coordinate."""
        _require(
            width > 0 and width % (2 * axes) == 0,
            f"axial rotary width: expected a multiple of {2 * axes} (a pair of lanes for each of {axes} coordinates), got {width}",
        )
        each = width // (2 * axes)
        return Rotary(
            tuple(tuple(base ** (-j / each) if axis == at else 0.0 for at in range(axes)) for axis in range(axes) for j in range(each)),
            pairing,
        )

    @property
    def width(self) -> int:
        """Number of rotated lanes."""
        return 2 * len(self.frequencies)

    @property
    def axes(self) -> int:
        """Number of coordinates of a position."""
        return len(self.frequencies[0])

    @property
    def planes(self) -> tuple[tuple[int, int], ...]:
        """Lane pair of every plane: (real part, imaginary part)."""
        n = len(self.frequencies)
        if self.pairing == "half":
            return tuple((j, j + n) for j in range(n))
        return tuple((2 * j, 2 * j + 1) for j in range(n))


@dataclass(frozen=True)
class Alibi:
    """Adds ``-slope * distance`` to the attention logits; one slope a query head.

    Distance is ``|query - key|``; under a causal mask this is the usual ``query - key``.
    """

    slopes: tuple[float, ...]

    @staticmethod
    def standard(heads: int) -> Alibi:
        """The published slopes: a geometric series, with every second one of the next series when `heads` is no power of two."""

        def series(n: int) -> list[float]:
            return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

        _require(heads > 0, f"ALiBi: expected at least one head, got {heads}")
        power = 2 ** int(math.log2(heads))
        return Alibi(tuple(series(power) + series(2 * power)[0::2][: heads - power]))


@dataclass(frozen=True)
class RelativeBias:
    """T5's learned bias per head and bucket of the relative position (logarithmic buckets beyond half)."""

    buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        _require(self.buckets >= 4 and self.buckets % 2 == 0, f"relative bias: expected an even number >= 4 of buckets, got {self.buckets}")
        _require(self.max_distance > self.buckets // 2, f"relative bias: max_distance {self.max_distance} must exceed half the buckets")


RelativeEncoding = Rotary | Alibi | RelativeBias | None


# --- blocks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    """RMSNorm, LayerNorm or none. The gain that multiplies is ``offset + tensor``: offset 1 for the 1+gamma convention."""

    kind: Literal["none", "rms", "layer"]
    eps: float = 1e-6
    gain: bool = True
    bias: bool = False
    offset: float = 0.0

    def __post_init__(self) -> None:
        _require(self.kind in ("none", "rms", "layer"), f"norm: expected none, rms or layer, got {self.kind!r}")
        _require(self.eps >= 0, f"norm: eps must not be negative, got {self.eps}")

    @property
    def has_gain(self) -> bool:
        return self.kind != "none" and self.gain

    @property
    def has_bias(self) -> bool:
        return self.kind != "none" and self.bias


NO_NORM = Norm("none")


@dataclass(frozen=True)
class Attention:
    """Multi-head attention; `heads` query heads share `kv_heads` key/value heads in groups of ``heads // kv_heads``.

    `qk_norm` is an RMS norm of queries and keys before the rotation: ``head`` over the lanes of each head with one gain
    vector for all heads (Qwen3), ``all`` over the lanes of all heads together with a gain for each (OLMo2).
    `scale` multiplies the logits (None: ``head_dim ** -0.5``); `window` limits how far back a query sees.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    positions: RelativeEncoding = None
    query_bias: bool = False
    key_bias: bool = False
    value_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["head", "all"] | None = None
    qk_norm_eps: float = 1e-6
    qk_norm_offset: float = 0.0
    scale: float | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim", "value_dim"):
            _require(getattr(self, name) > 0, f"attention: {name} must be positive, got {getattr(self, name)}")
        _require(
            self.heads % self.kv_heads == 0,
            f"attention: {self.heads} heads are not a multiple of {self.kv_heads} KV heads; every KV head must serve the same number of query heads",
        )
        if isinstance(self.positions, Rotary):
            _require(
                self.positions.width <= self.head_dim,
                f"attention: rotary width {self.positions.width} exceeds the head width {self.head_dim}",
            )
        if isinstance(self.positions, Alibi):
            _require(
                len(self.positions.slopes) == self.heads,
                f"attention: ALiBi gives {len(self.positions.slopes)} slopes for {self.heads} heads",
            )
        _require(self.qk_norm in (None, "head", "all"), f"attention: qk_norm must be None, 'head' or 'all', got {self.qk_norm!r}")
        _require(self.window is None or self.window > 0, f"attention: window must be positive, got {self.window}")

    @property
    def group(self) -> int:
        """Query heads served by one KV head."""
        return self.heads // self.kv_heads

    @property
    def planes(self) -> tuple[tuple[int, int], ...]:
        """Lane pairs that rotate (none without a rotary encoding; planes of frequency zero do not)."""
        if not isinstance(self.positions, Rotary):
            return ()
        return tuple(p for p, f in zip(self.positions.planes, self.positions.frequencies, strict=True) if any(f))

    @property
    def plane_frequencies(self) -> tuple[tuple[float, ...], ...]:
        """Frequencies of :attr:`planes`."""
        return tuple(f for f in self.positions.frequencies if any(f)) if isinstance(self.positions, Rotary) else ()

    @property
    def still_lanes(self) -> tuple[int, ...]:
        """Query/key lanes of frequency zero: all of them without a rotary encoding."""
        turning = {lane for plane in self.planes for lane in plane}
        return tuple(lane for lane in range(self.head_dim) if lane not in turning)


@dataclass(frozen=True)
class MLP:
    """``down(act(up x))``, or gated ``down(act(gate x) * up x)`` (SwiGLU, GeGLU)."""

    width: int
    activation: Activation = "gelu"
    gated: bool = False
    up_bias: bool = False
    down_bias: bool = False

    def __post_init__(self) -> None:
        _require(self.width > 0, f"MLP: width must be positive, got {self.width}")
        _require(self.activation in ACTIVATIONS, f"MLP: activation {self.activation!r} is not one of {', '.join(ACTIVATIONS)}")


@dataclass(frozen=True)
class Experts:
    """A mixture of `count` equal MLPs: the router's softmax picks `active` of them, renormalised to sum to one."""

    count: int
    active: int
    mlp: MLP

    def __post_init__(self) -> None:
        _require(0 < self.active <= self.count, f"experts: cannot use {self.active} of {self.count}")


@dataclass(frozen=True)
class Layer:
    """One Transformer layer.

    `arrangement`: ``pre`` x + f(norm x) · ``post`` norm(x + f x) (BERT) · ``output`` x + norm(f x) (OLMo2).
    `parallel`: attention and MLP both read the layer's input and are added together (GPT-J, NeoX). A parallel layer with
    ``mlp_norm=None`` shares one norm between the two.
    """

    attention: Attention
    mlp: MLP | Experts
    attention_norm: Norm
    mlp_norm: Norm | None
    arrangement: Literal["pre", "post", "output"] = "pre"
    parallel: bool = False

    def __post_init__(self) -> None:
        _require(self.arrangement in ("pre", "post", "output"), f"layer: unknown arrangement {self.arrangement!r}")
        _require(self.mlp_norm is not None or self.parallel, "layer: only a parallel layer can share one norm between attention and MLP")
        _require(not self.parallel or self.arrangement == "pre", "layer: a parallel residual needs the pre-norm arrangement")


# --- ends -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """Token input: rows of ``embed.tokens`` times `scale`, plus a row of ``embed.types`` where there are `types`."""

    vocabulary: int
    scale: float = 1.0
    types: int = 0

    def __post_init__(self) -> None:
        _require(self.vocabulary > 1, f"tokens: expected a vocabulary of at least two, got {self.vocabulary}")


@dataclass(frozen=True)
class Patches:
    """Patch input [..., patches, features] on a grid, linearly embedded; an optional class token stands in front."""

    features: int
    grid: tuple[int, ...]
    class_token: bool = False
    bias: bool = True

    def __post_init__(self) -> None:
        _require(self.features > 0, f"patches: expected at least one feature, got {self.features}")
        _require(len(self.grid) > 0 and all(g > 0 for g in self.grid), f"patches: grid {self.grid} is empty")

    @property
    def count(self) -> int:
        """Sequence length, class token included."""
        return math.prod(self.grid) + self.class_token


@dataclass(frozen=True)
class LanguageModel:
    """Logits over the vocabulary at every position; `tied` uses ``embed.tokens`` for the unembedding."""

    tied: bool = False
    bias: bool = False


@dataclass(frozen=True)
class Classifier:
    """Logits over `classes` from the mean over positions, the first position (class token), or the last."""

    classes: int
    pooling: Literal["mean", "first", "last"] = "mean"
    bias: bool = True

    def __post_init__(self) -> None:
        _require(self.classes > 1, f"classifier: expected at least two classes, got {self.classes}")
        _require(self.pooling in ("mean", "first", "last"), f"classifier: unknown pooling {self.pooling!r}")


@dataclass(frozen=True)
class StreamOutput:
    """No head: the final residual stream itself is the output, so its basis is pinned."""


@dataclass(frozen=True)
class Architecture:
    """A whole Transformer. ``embedding_norm`` normalises the input (BERT, BLOOM); `positions` is the additive table.

    ``probabilities`` counts models as equal when their softmax outputs are: a uniform shift of the logits is invisible.
    """

    width: int
    layers: tuple[Layer, ...]
    inputs: Tokens | Patches
    outputs: LanguageModel | Classifier | StreamOutput
    positions: AdditiveEncoding = NoPositions()
    embedding_norm: Norm = NO_NORM
    final_norm: Norm = NO_NORM
    causal: bool = True
    probabilities: bool = False

    def __post_init__(self) -> None:
        _require(self.width > 0, f"architecture: width must be positive, got {self.width}")
        _require(len(self.layers) > 0, "architecture: expected at least one layer")
        if isinstance(self.outputs, LanguageModel) and isinstance(self.inputs, Patches):
            raise CosetError("architecture: a language-model head needs token input, got patches")
        if isinstance(self.positions, Sinusoidal):
            _require(self.width % 2 == 0, f"sinusoidal table: expected an even width, got {self.width}")
        if isinstance(self.inputs, Patches) and isinstance(self.positions, (Sinusoidal, LearnedPositions)):
            _require(
                self.positions.count >= self.inputs.count,
                f"architecture: {self.inputs.count} patches need as many positions, got {self.positions.count}",
            )
        for i, layer in enumerate(self.layers):
            rotary = layer.attention.positions
            if not isinstance(rotary, Rotary):
                continue
            axes = len(self.inputs.grid) if isinstance(self.inputs, Patches) else 1
            _require(
                rotary.axes in (1, axes),
                f"layer {i}: rotary frequencies have {rotary.axes} coordinates, positions of this input have {axes}",
            )

    @property
    def tied(self) -> bool:
        """Whether the unembedding is the token embedding."""
        return isinstance(self.outputs, LanguageModel) and self.outputs.tied

    @property
    def length(self) -> int | None:
        """Longest input, where the architecture fixes one."""
        if isinstance(self.inputs, Patches):
            return self.inputs.count
        if isinstance(self.positions, Sinusoidal):
            return self.positions.count
        if isinstance(self.positions, LearnedPositions):
            return self.positions.count - self.positions.offset
        return None


PE = Literal["none", "sinusoidal", "learned", "rope", "alibi", "t5"]


def uniform(
    *,
    pe: PE = "rope",
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rotary_dim: int | None = None,
    rope_base: float = 10_000.0,
    rope_pairing: Literal["half", "interleaved"] = "half",
    norm: Literal["none", "rms", "layer"] = "rms",
    post_norm: bool = False,
    mlp: Literal["gelu", "relu", "silu", "tanh", "swiglu", "geglu"] = "gelu",
    mlp_width: int | None = None,
    bias: Literal["none", "qkv", "all"] = "none",
    qk_norm: bool = False,
    tied: bool = False,
    vocab: int = 256,
    positions: int = 128,
    outputs: Literal["logits", "probabilities"] = "logits",
    frequencies: Sequence[float | tuple[float, ...]] | None = None,
    inputs: Tokens | Patches | None = None,
    classes: int | None = None,
    pooling: Literal["mean", "first", "last"] = "mean",
    causal: bool | None = None,
    stored_table: bool = False,
    eps: float = 1e-6,
) -> Architecture:
    """A Transformer whose layers are all alike, from the flags of ``coset symmetry``.

    `bias` ``all`` puts a bias on every linear map and LayerNorm but not on a language model's unembedding; ``qkv`` only on queries, keys
    and values. A classifier (`classes`) is bidirectional and has a bias on its head unless `bias` is ``none``. `frequencies` replaces the
    standard rotary frequencies (numbers, or tuples for a grid).

    Raises
    ------
    CosetError
        If the flags contradict each other, such as a head count that does not divide, or an odd rotated width.
    """
    _require(pe in ("none", "sinusoidal", "learned", "rope", "alibi", "t5"), f"pe: unknown positional encoding {pe!r}")
    _require(bias in ("none", "qkv", "all"), f"bias: expected none, qkv or all, got {bias!r}")
    if head_dim is None:
        _require(heads > 0 and width % heads == 0, f"head width: width {width} is not a multiple of {heads} heads; give --head-dim")
        head_dim = width // heads
    relative: RelativeEncoding = None
    if pe == "rope" and frequencies is not None:
        relative = Rotary(tuple(f if isinstance(f, tuple) else (float(f),) for f in frequencies), rope_pairing)
    elif pe == "rope":
        relative = Rotary.standard(head_dim if rotary_dim is None else rotary_dim, rope_base, rope_pairing)
    elif pe == "alibi":
        relative = Alibi.standard(heads)
    elif pe == "t5":
        relative = RelativeBias()
    _require(
        pe == "rope" or (rotary_dim is None and frequencies is None),
        f"rotary width or frequencies: only a rotary encoding rotates lanes, not pe {pe!r}",
    )
    qkv, rest = bias in ("qkv", "all"), bias == "all"
    attention = Attention(
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        positions=relative,
        query_bias=qkv,
        key_bias=qkv,
        value_bias=qkv,
        output_bias=rest,
        qk_norm="head" if qk_norm else None,
        qk_norm_eps=eps,
    )
    _require(mlp in ("gelu", "relu", "silu", "tanh", "swiglu", "geglu"), f"mlp: unknown kind {mlp!r}")
    activation: Activation = {"swiglu": "silu", "geglu": "gelu"}.get(mlp, mlp)  # type: ignore[assignment]
    block = MLP(4 * width if mlp_width is None else mlp_width, activation, mlp in ("swiglu", "geglu"), rest, rest)
    normalise = Norm(norm, eps=eps, bias=norm == "layer" and rest)
    _require(not post_norm or norm != "none", "post-norm: expected a norm, got none")
    layer = Layer(attention, block, normalise, normalise, "post" if post_norm else "pre")
    additive: AdditiveEncoding = NoPositions()
    if pe == "sinusoidal":
        additive = Sinusoidal(positions, stored=stored_table)
    elif pe == "learned":
        additive = LearnedPositions(positions)
    return Architecture(
        width=width,
        layers=(layer,) * layers,
        inputs=Tokens(vocab) if inputs is None else inputs,
        outputs=LanguageModel(tied) if classes is None else Classifier(classes, pooling, bias != "none"),
        positions=additive,
        final_norm=NO_NORM if post_norm else normalise,
        causal=classes is None if causal is None else causal,
        probabilities=outputs == "probabilities",
    )
