"""Mistral: Llama without biases, with a sliding window on every layer unless the config sets it to null."""

from coset.architecture import Architecture
from coset.checkpoint.config import Config
from coset.checkpoint.families import decoder as d
from coset.checkpoint.families.base import Family, Layout, Outputs, decoder_heads
from coset.checkpoint.rope import rotary


def _architecture(config: Config, outputs: Outputs) -> Architecture:
    config.refuse("layer_types")
    width = d.width_head_dim(config)
    window = config.optional_integer("sliding_window", 4096)
    attention = d.attention(config, width, rotary(config, width), kv_heads=8, window=window)
    layer = d.pre_norm(attention, d.gated_mlp(config), d.rms(config))
    return d.decoder(config, outputs, (layer,) * config.integer("num_hidden_layers"), layer.attention_norm)


FAMILY = Family(
    model_type="mistral",
    bodies=d.BODIES,
    heads=decoder_heads("Mistral", tied=False),
    layouts=lambda config: (Layout(d.ANCHOR, d.LLAMA, d.BUFFERS),),
    architecture=_architecture,
)
