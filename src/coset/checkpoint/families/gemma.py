"""Gemma: GeGLU, gains stored less one, the embedding scaled by the root of the width, tied by default, head width 256 by default."""

import dataclasses

from coset.architecture import Architecture
from coset.checkpoint.config import Config
from coset.checkpoint.families import decoder as d
from coset.checkpoint.families.base import Family, Layout, Outputs, decoder_heads
from coset.checkpoint.rope import rotary


def _architecture(config: Config, outputs: Outputs) -> Architecture:
    config.refuse("use_bidirectional_attention", False)
    width = d.width_head_dim(config, default=256)
    bias = config.flag("attention_bias", False)
    attention = d.attention(config, width, rotary(config, width), kv_heads=16, qkv_bias=bias, output_bias=bias)
    mlp = d.gated_mlp(config, "gelu_pytorch_tanh")
    if mlp.activation == "gelu":
        # The published configs say gelu and mean its tanh form; transformers corrects them in the same way.
        mlp = dataclasses.replace(mlp, activation="gelu_tanh")
    layer = d.pre_norm(attention, mlp, d.rms(config, offset=1.0))
    scale = config.integer("hidden_size") ** 0.5
    return d.decoder(config, outputs, (layer,) * config.integer("num_hidden_layers"), layer.attention_norm, scale)


FAMILY = Family(
    model_type="gemma",
    bodies=d.BODIES,
    heads=decoder_heads("Gemma", tied=True),
    layouts=lambda config: (Layout(d.ANCHOR, d.LLAMA, d.BUFFERS),),
    architecture=_architecture,
)
