"""Llama: RoPE, grouped queries, SwiGLU, RMSNorm; biases where the config asks for them."""

from coset.architecture import Architecture
from coset.checkpoint.config import Config
from coset.checkpoint.families import decoder as d
from coset.checkpoint.families.base import Family, Layout, Outputs, decoder_heads
from coset.checkpoint.rope import rotary


def _architecture(config: Config, outputs: Outputs) -> Architecture:
    width = d.width_head_dim(config)
    bias = config.flag("attention_bias", False)
    attention = d.attention(config, width, rotary(config, width), qkv_bias=bias, output_bias=bias)
    layer = d.pre_norm(attention, d.gated_mlp(config, bias=config.flag("mlp_bias", False)), d.rms(config))
    return d.decoder(config, outputs, (layer,) * config.integer("num_hidden_layers"), layer.attention_norm)


FAMILY = Family(
    model_type="llama",
    bodies=d.BODIES,
    heads=decoder_heads("Llama", tied=False),
    layouts=lambda config: (Layout(d.ANCHOR, d.LLAMA, d.BUFFERS),),
    architecture=_architecture,
)
