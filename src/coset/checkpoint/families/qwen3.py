"""Qwen3: Llama with an RMS norm over the lanes of each query and key head; head width 128 by default."""

from coset.architecture import Architecture
from coset.checkpoint.config import Config
from coset.checkpoint.families import decoder as d
from coset.checkpoint.families.base import Family, Layout, Outputs, decoder_heads
from coset.checkpoint.families.qwen2 import windows
from coset.checkpoint.layout import Entry, one
from coset.checkpoint.rope import rotary

_TABLE: tuple[Entry, ...] = (
    *d.LLAMA,
    one(f"{d.LAYER}.self_attn.q_norm.weight", "layers.{i}.attention.q_gain", "lane"),
    one(f"{d.LAYER}.self_attn.k_norm.weight", "layers.{i}.attention.k_gain", "lane"),
)


def _architecture(config: Config, outputs: Outputs) -> Architecture:
    width = d.width_head_dim(config, default=128)
    bias = config.flag("attention_bias", False)
    positions, mlp, normalise = rotary(config, width), d.gated_mlp(config), d.rms(config)
    made = [
        d.pre_norm(
            d.attention(config, width, positions, kv_heads=32, qkv_bias=bias, output_bias=bias, window=w, qk_norm_eps=normalise.eps),
            mlp,
            normalise,
        )
        for w in windows(config, config.integer("num_hidden_layers"))
    ]
    return d.decoder(config, outputs, tuple(made), normalise)


FAMILY = Family(
    model_type="qwen3",
    bodies=d.BODIES,
    heads=decoder_heads("Qwen3", tied=False),
    layouts=lambda config: (Layout(d.ANCHOR, _TABLE, d.BUFFERS),),
    architecture=_architecture,
)
