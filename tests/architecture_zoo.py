"""Small architectures of every kind, with odd and coprime sizes, and the function of a model as an oracle sees it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from coset.architecture import (
    MLP,
    NO_NORM,
    Alibi,
    Architecture,
    Attention,
    Classifier,
    Experts,
    LanguageModel,
    Layer,
    LearnedPositions,
    Norm,
    Patches,
    RelativeBias,
    Rotary,
    Sinusoidal,
    StreamOutput,
    Tokens,
    uniform,
)
from coset.transformer import forward, initialise, random_inputs

VOCABULARY, POSITIONS, LENGTH = 13, 11, 9
RMS, LAYER = Norm("rms"), Norm("layer", bias=True)
TOKENS = Tokens(VOCABULARY)


def flags(pe: str, norm: str, bias: str, kv: int, qk_norm: str | None, mlp: str, tied: bool, layers: int = 2) -> Architecture:
    """One point of the grid: 6 heads of width 4 on 3 or 6 KV heads, in a stream of width 10."""
    stored = pe == "stored"
    a = uniform(
        pe="sinusoidal" if stored else pe,  # type: ignore[arg-type]
        stored_table=stored,
        layers=layers,
        width=10,
        heads=6,
        kv_heads=kv,
        head_dim=4,
        norm=norm,  # type: ignore[arg-type]
        mlp=mlp,  # type: ignore[arg-type]
        mlp_width=7,
        bias=bias,  # type: ignore[arg-type]
        tied=tied,
        vocab=VOCABULARY,
        positions=POSITIONS,
    )
    if qk_norm is None:
        return a
    return replace(a, layers=tuple(replace(x, attention=replace(x.attention, qk_norm=qk_norm)) for x in a.layers))  # type: ignore[arg-type]


GRID: dict[str, tuple[object, ...]] = {
    "pe": ("none", "sinusoidal", "stored", "learned", "rope", "alibi", "t5"),
    "norm": ("none", "rms", "layer"),
    "bias": ("none", "qkv", "all"),
    "kv": (6, 3),
    "qk_norm": (None, None, "head", "all"),
    "mlp": ("gelu", "relu", "silu", "tanh", "swiglu", "geglu"),
    "tied": (False, True),
}


def grid(n: int, seed: int = 0) -> dict[str, Architecture]:
    """`n` points of the grid, every value of every flag equally often."""
    draw = random.Random(seed)
    columns = []
    for values in GRID.values():
        column = list(itertools.islice(itertools.cycle(values), n))
        draw.shuffle(column)
        columns.append(column)
    return {"-".join(map(str, point)): flags(*point) for point in zip(*columns, strict=True)}  # type: ignore[arg-type]


def of_layers(*layers: Layer, width: int = 10, tied: bool = False, **fields: object) -> Architecture:
    """A language model of the given layers with a final RMSNorm, unless `fields` say otherwise."""
    ends: dict[str, object] = {"inputs": TOKENS, "outputs": LanguageModel(tied), "final_norm": RMS}
    return Architecture(width=width, layers=layers, **(ends | fields))  # type: ignore[arg-type]


def attention(
    positions: object = None, *, heads: int = 6, kv: int = 3, lanes: int = 4, values: int | None = None, bias: bool = False, **more: object
) -> Attention:
    """Attention with the given relative encoding and biases everywhere or nowhere."""
    biases = dict.fromkeys(("query_bias", "key_bias", "value_bias", "output_bias"), bias)
    return Attention(heads, kv, lanes, lanes if values is None else values, positions, **(biases | more))  # type: ignore[arg-type]


def special() -> dict[str, Architecture]:
    """What the flags cannot say."""
    rope, biased = Rotary.standard(4), {"up_bias": True, "down_bias": True}
    swiglu, relu = MLP(7, "silu", gated=True), MLP(7, "relu", **biased)
    grid_rope = Rotary.axial(4)
    post = Layer(attention(bias=True), MLP(7, "gelu", **biased), LAYER, LAYER, "post")
    shifted = Norm("rms", offset=1.0)
    patches = Patches(5, (2, 3), class_token=True)
    wide = Rotary(((0.9,), (0.0,), (0.9,), (0.31,)), "interleaved")
    return {
        "post-norm layer": of_layers(post, post, final_norm=NO_NORM, embedding_norm=LAYER, positions=LearnedPositions(POSITIONS)),
        "post-norm rms": of_layers(replace(post, attention_norm=RMS, mlp_norm=RMS), final_norm=NO_NORM),
        "output arrangement": of_layers(*[Layer(attention(rope, qk_norm="all"), swiglu, RMS, RMS, "output")] * 2),
        "output arrangement, 1+gamma": of_layers(Layer(attention(rope, bias=True), relu, shifted, shifted, "output"), final_norm=shifted),
        "parallel, two norms": of_layers(
            *[Layer(attention(rope, bias=True), MLP(7, **biased), LAYER, LAYER, parallel=True)] * 2, final_norm=LAYER
        ),
        "parallel, one norm": of_layers(*[Layer(attention(rope), MLP(7, **biased), LAYER, None, parallel=True)] * 2, final_norm=LAYER),
        "parallel, one norm, biased": of_layers(
            Layer(attention(bias=True), MLP(7, **biased), LAYER, None, parallel=True), final_norm=LAYER
        ),
        "experts, gated": of_layers(*[Layer(attention(rope), Experts(5, 2, swiglu), RMS, RMS)] * 2),
        "experts, relu": of_layers(Layer(attention(bias=True), Experts(3, 2, relu), LAYER, LAYER), final_norm=LAYER),
        "experts, gelu": of_layers(Layer(attention(), Experts(3, 3, MLP(7)), NO_NORM, NO_NORM), final_norm=NO_NORM),
        "experts, tanh": of_layers(Layer(attention(), Experts(3, 1, MLP(7, "tanh", **biased)), RMS, RMS)),
        "patches, class token": of_layers(
            *[Layer(attention(grid_rope, bias=True), MLP(7, **biased), LAYER, LAYER)] * 2,
            inputs=patches,
            outputs=Classifier(7, "first"),
            positions=LearnedPositions(patches.count),
            final_norm=LAYER,
            causal=False,
        ),
        "patches, mean": of_layers(
            Layer(attention(bias=True), relu, RMS, RMS),
            inputs=Patches(5, (2, 3)),
            outputs=Classifier(7),
            positions=Sinusoidal(6),
            causal=False,
        ),
        "patches, stored table, probabilities": of_layers(
            Layer(attention(grid_rope), MLP(7, **biased), LAYER, LAYER),
            inputs=replace(patches, bias=False),
            outputs=Classifier(7, "last"),
            positions=Sinusoidal(7, stored=True),
            final_norm=LAYER,
            causal=False,
            probabilities=True,
        ),
        "types, embedding norm": of_layers(
            Layer(attention(bias=True), MLP(7, **biased), LAYER, LAYER),
            inputs=Tokens(VOCABULARY, types=3),
            embedding_norm=LAYER,
            positions=LearnedPositions(POSITIONS),
            final_norm=LAYER,
            causal=False,
        ),
        "types, tied": of_layers(
            Layer(attention(), MLP(7), RMS, RMS), tied=True, inputs=Tokens(VOCABULARY, types=3), positions=LearnedPositions(POSITIONS)
        ),
        "embedding rms": of_layers(Layer(attention(rope), MLP(7), LAYER, LAYER), embedding_norm=RMS, final_norm=LAYER),
        "embedding norm without gain": of_layers(
            Layer(attention(), relu, LAYER, LAYER), embedding_norm=Norm("layer", gain=False), final_norm=LAYER
        ),
        "norms without gain": of_layers(
            Layer(attention(rope), swiglu, Norm("layer", gain=False, bias=True), Norm("layer", gain=False)),
            final_norm=Norm("layer", gain=False),
        ),
        "probabilities, tied": of_layers(Layer(attention(rope), MLP(7), LAYER, LAYER), tied=True, final_norm=LAYER, probabilities=True),
        "probabilities": of_layers(Layer(attention(), swiglu, RMS, RMS), outputs=LanguageModel(bias=True), probabilities=True),
        "output bias, tied": of_layers(Layer(attention(), swiglu, LAYER, LAYER), outputs=LanguageModel(True, bias=True), final_norm=LAYER),
        "no head": of_layers(Layer(attention(rope), swiglu, RMS, RMS), outputs=StreamOutput(), causal=False),
        "1+gamma": of_layers(
            *[Layer(attention(rope, qk_norm="head", qk_norm_offset=1.0), swiglu, shifted, shifted)] * 2, tied=True, final_norm=shifted
        ),
        "qk-norm all, offset": of_layers(Layer(attention(Rotary.standard(2), qk_norm="all", qk_norm_offset=1.0), swiglu, RMS, RMS)),
        "unlike layers": of_layers(
            Layer(attention(rope, kv=2), swiglu, RMS, RMS),
            Layer(attention(None, heads=5, kv=5, lanes=3, bias=True), MLP(9, "tanh"), LAYER, RMS),
        ),
        "wide values": of_layers(Layer(attention(rope, values=3), swiglu, RMS, RMS)),
        "partial rotary": of_layers(Layer(attention(Rotary.standard(4), lanes=7, bias=True), swiglu, RMS, RMS)),
        "repeated and zero frequencies": of_layers(Layer(attention(wide, lanes=9, bias=True), swiglu, RMS, RMS)),
        "window, magnitude": of_layers(Layer(attention(replace(rope, magnitude=1.3), window=3), MLP(7), RMS, RMS)),
        "one KV head": of_layers(Layer(attention(RelativeBias(8, 20), heads=5, kv=1), MLP(7), RMS, RMS), causal=False),
        "alibi, equal slopes": of_layers(Layer(attention(Alibi((0.5, 0.1, 0.5, 0.1, 0.5)), heads=5, kv=5), MLP(7), RMS, RMS)),
        "learned positions, offset": of_layers(Layer(attention(), MLP(7), RMS, RMS), positions=LearnedPositions(POSITIONS, offset=2)),
        "scaled embedding": of_layers(
            Layer(attention(), MLP(7), RMS, RMS), inputs=Tokens(VOCABULARY, scale=3.0), positions=LearnedPositions(POSITIONS)
        ),
        "head wider than the stream": of_layers(Layer(attention(lanes=13), MLP(7), RMS, RMS)),
        "one layer norm without bias": of_layers(Layer(attention(), MLP(7), Norm("layer"), Norm("layer")), final_norm=Norm("layer")),
        "mixed norms": of_layers(Layer(attention(bias=True), MLP(7, **biased), LAYER, RMS), final_norm=NO_NORM),
    }


def model(architecture: Architecture, seed: int = 0) -> dict[str, Tensor]:
    """A generic model in float64: no gain is one, no bias zero."""
    return initialise(architecture, seed=seed, dtype=torch.float64, generic=True)


def function(architecture: Architecture, parameters: Mapping[str, Tensor]) -> Tensor:
    """What the reference forward pass makes of fixed random inputs: logits, or log-probabilities where only those count."""
    tokens = isinstance(architecture.inputs, Tokens)
    inputs = random_inputs(architecture, 4, length=LENGTH if tokens else None, dtype=torch.float64)
    types = None
    if isinstance(architecture.inputs, Tokens) and architecture.inputs.types:
        types = torch.randint(architecture.inputs.types, inputs.shape, generator=torch.Generator().manual_seed(3))
    out = forward(architecture, parameters, inputs, types=types)
    return out.log_softmax(-1) if architecture.probabilities else out


def difference(x: Tensor, y: Tensor) -> float:
    """Relative Frobenius distance."""
    return float((x - y).norm() / y.norm())


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Relative Frobenius distance of all parameters together."""
    gap = sum(float((a[name] - b[name]).square().sum()) for name in b)
    return float((gap / sum(float(x.square().sum()) for x in b.values())) ** 0.5)
