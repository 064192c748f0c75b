"""OLMo 2: norms on the outputs of attention and MLP, and RMS norms over all lanes of queries and of keys."""

from coset.architecture import Architecture, Layer
from coset.checkpoint.config import Config
from coset.checkpoint.families import decoder as d
from coset.checkpoint.families.base import Family, Layout, Outputs, decoder_heads
from coset.checkpoint.layout import Entry, norm, one
from coset.checkpoint.rope import rotary

_TABLE: tuple[Entry, ...] = (
    *d.ENDS,
    *d.ATTENTION,
    one(f"{d.LAYER}.self_attn.q_norm.weight", "layers.{i}.attention.q_gain", "(kv query qk)"),
    one(f"{d.LAYER}.self_attn.k_norm.weight", "layers.{i}.attention.k_gain", "(kv qk)"),
    *norm(f"{d.LAYER}.post_attention_layernorm", "layers.{i}.attention_norm"),
    *d.GATED_MLP,
    *norm(f"{d.LAYER}.post_feedforward_layernorm", "layers.{i}.mlp_norm"),
)


def _architecture(config: Config, outputs: Outputs) -> Architecture:
    config.refuse("clip_qkv")
    width = d.width_head_dim(config)
    bias = config.flag("attention_bias", False)
    normalise = d.rms(config, 1e-5)
    attention = d.attention(
        config, width, rotary(config, width), qkv_bias=bias, output_bias=bias, qk_norm_eps=normalise.eps, qk_norm_all=True
    )
    layer = Layer(attention, d.gated_mlp(config), normalise, normalise, arrangement="output")
    return d.decoder(config, outputs, (layer,) * config.integer("num_hidden_layers"), normalise)


FAMILY = Family(
    model_type="olmo2",
    bodies=d.BODIES,
    heads=decoder_heads("Olmo2", tied=False),
    layouts=lambda config: (Layout(d.ANCHOR, _TABLE, d.BUFFERS),),
    architecture=_architecture,
)
