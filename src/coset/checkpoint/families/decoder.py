"""Names and readings that Llama and its relatives share."""

from __future__ import annotations

from coset.architecture import MLP, Architecture, Attention, Experts, Layer, Norm, Rotary, Tokens
from coset.checkpoint.config import Config
from coset.checkpoint.families.base import Outputs
from coset.checkpoint.layout import Entry, linear, norm, one

BODIES = ("model.", "")
ANCHOR = "{body}embed_tokens.weight"
LAYER = "{body}layers.{i}"
BUFFERS = (f"{LAYER}.self_attn.rotary_emb.inv_freq", "{body}rotary_emb.inv_freq")

ENDS: tuple[Entry, ...] = (one(ANCHOR, "embed.tokens", "vocabulary stream"), *norm("{body}norm", "final_norm"))
PRE_NORMS: tuple[Entry, ...] = (
    *norm(f"{LAYER}.input_layernorm", "layers.{i}.attention_norm"),
    *norm(f"{LAYER}.post_attention_layernorm", "layers.{i}.mlp_norm"),
)
ATTENTION: tuple[Entry, ...] = (
    *linear(f"{LAYER}.self_attn.q_proj", "layers.{i}.attention.q", "(kv query qk)", "stream"),
    *linear(f"{LAYER}.self_attn.k_proj", "layers.{i}.attention.k", "(kv qk)", "stream"),
    *linear(f"{LAYER}.self_attn.v_proj", "layers.{i}.attention.v", "(kv vo)", "stream"),
    *linear(f"{LAYER}.self_attn.o_proj", "layers.{i}.attention.o", "stream", "(kv query vo)"),
)
GATED_MLP: tuple[Entry, ...] = (
    *linear(f"{LAYER}.mlp.gate_proj", "layers.{i}.mlp.gate", "neuron", "stream"),
    *linear(f"{LAYER}.mlp.up_proj", "layers.{i}.mlp.up", "neuron", "stream"),
    *linear(f"{LAYER}.mlp.down_proj", "layers.{i}.mlp.down", "stream", "neuron"),
)
LLAMA: tuple[Entry, ...] = (*ENDS, *PRE_NORMS, *ATTENTION, *GATED_MLP)


def attention(
    config: Config,
    head_dim: int,
    positions: Rotary,
    *,
    kv_heads: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    window: int | None = None,
    qk_norm_eps: float | None = None,
    qk_norm_all: bool = False,
) -> Attention:
    """Grouped attention with rotary positions; without `kv_heads` in the config, the given default or one for each head."""
    heads = config.integer("num_attention_heads")
    return Attention(
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", default=heads if kv_heads is None else kv_heads),
        head_dim=head_dim,
        value_dim=head_dim,
        positions=positions,
        query_bias=qkv_bias,
        key_bias=qkv_bias,
        value_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=None if qk_norm_eps is None else "all" if qk_norm_all else "head",
        qk_norm_eps=1e-6 if qk_norm_eps is None else qk_norm_eps,
        window=window,
    )


def gated_mlp(config: Config, activation: str = "silu", bias: bool = False) -> MLP:
    """The gated MLP; `activation` is the class's default of ``hidden_act``."""
    return MLP(config.integer("intermediate_size"), config.activation("hidden_act", default=activation), True, bias, bias)


def rms(config: Config, eps: float = 1e-6, offset: float = 0.0) -> Norm:
    """The RMS norm; `eps` is the class's default."""
    return Norm("rms", eps=config.number("rms_norm_eps", eps), offset=offset)


def decoder(config: Config, outputs: Outputs, layers: tuple[Layer, ...], final: Norm, scale: float = 1.0) -> Architecture:
    """A causal decoder without an additive position table."""
    return Architecture(
        width=config.integer("hidden_size"),
        layers=layers,
        inputs=Tokens(config.integer("vocab_size"), scale),
        outputs=outputs,
        final_norm=final,
    )


def pre_norm(attention: Attention, mlp: MLP | Experts, normalise: Norm) -> Layer:
    """A pre-norm layer."""
    return Layer(attention, mlp, normalise, normalise)


def width_head_dim(config: Config, default: int | None = None) -> int:
    """Head width of a config with ``hidden_size`` and ``num_attention_heads``."""
    return config.head_dim(config.integer("hidden_size"), config.integer("num_attention_heads"), default)
