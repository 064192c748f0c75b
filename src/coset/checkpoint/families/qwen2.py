"""Qwen2: Llama with biases on queries, keys and values only; a sliding window on some layers if switched on."""

from coset.architecture import Architecture
from coset.checkpoint.config import Config
from coset.checkpoint.families import decoder as d
from coset.checkpoint.families.base import Family, Layout, Outputs, decoder_heads
from coset.checkpoint.rope import rotary


def windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """The window of each layer: from ``max_window_layers`` on, if ``use_sliding_window``."""
    window = config.optional_integer("sliding_window", 4096) if config.flag("use_sliding_window", False) else None
    first = int(config.values.get("max_window_layers", 28)) if window else None
    return config.layer_windows(layers, window, first)


def _architecture(config: Config, outputs: Outputs) -> Architecture:
    width = d.width_head_dim(config)
    layers = config.integer("num_hidden_layers")
    positions, mlp, normalise = rotary(config, width), d.gated_mlp(config), d.rms(config)
    made = [
        d.pre_norm(d.attention(config, width, positions, kv_heads=32, qkv_bias=True, window=w), mlp, normalise)
        for w in windows(config, layers)
    ]
    return d.decoder(config, outputs, tuple(made), normalise)


FAMILY = Family(
    model_type="qwen2",
    bodies=d.BODIES,
    heads=decoder_heads("Qwen2", tied=False),
    layouts=lambda config: (Layout(d.ANCHOR, d.LLAMA, d.BUFFERS),),
    architecture=_architecture,
)
