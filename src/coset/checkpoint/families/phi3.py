"""Phi-3: queries, keys and values in one matrix, gate and up in another, block after block."""

from coset.architecture import Architecture
from coset.checkpoint.config import Config
from coset.checkpoint.families import decoder as d
from coset.checkpoint.families.base import Family, Layout, Outputs, decoder_heads
from coset.checkpoint.layout import Entry, fused_linear, linear
from coset.checkpoint.rope import rotary

_TABLE: tuple[Entry, ...] = (
    *d.ENDS,
    *d.PRE_NORMS,
    *fused_linear(
        f"{d.LAYER}.self_attn.qkv_proj",
        {"layers.{i}.attention.q": "(kv query qk)", "layers.{i}.attention.k": "(kv qk)", "layers.{i}.attention.v": "(kv vo)"},
        "stream",
    ),
    *linear(f"{d.LAYER}.self_attn.o_proj", "layers.{i}.attention.o", "stream", "(kv query vo)"),
    *fused_linear(f"{d.LAYER}.mlp.gate_up_proj", {"layers.{i}.mlp.gate": "neuron", "layers.{i}.mlp.up": "neuron"}, "stream"),
    *linear(f"{d.LAYER}.mlp.down_proj", "layers.{i}.mlp.down", "stream", "neuron"),
)


def _architecture(config: Config, outputs: Outputs) -> Architecture:
    width = d.width_head_dim(config)
    # Early configs call the only scaled type of this family "su" or "yarn".
    positions = rotary(config, width, aliases={"su": "longrope", "yarn": "longrope"}, types=("default", "longrope"), original=4096)
    attention = d.attention(config, width, positions, window=config.optional_integer("sliding_window"))
    layer = d.pre_norm(attention, d.gated_mlp(config), d.rms(config, 1e-5))
    return d.decoder(config, outputs, (layer,) * config.integer("num_hidden_layers"), layer.attention_norm)


FAMILY = Family(
    model_type="phi3",
    bodies=d.BODIES,
    heads=decoder_heads("Phi3", tied=False),
    layouts=lambda config: (Layout(d.ANCHOR, _TABLE, d.BUFFERS),),
    architecture=_architecture,
)
