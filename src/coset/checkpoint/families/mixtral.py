"""Mixtral: Mistral with a router and experts, stored expert by expert, or stacked and fused as transformers 5 holds them in memory."""

from coset.architecture import Architecture, Experts
from coset.checkpoint.config import Config
from coset.checkpoint.families import decoder as d
from coset.checkpoint.families.base import Family, Layout, Outputs, decoder_heads
from coset.checkpoint.layout import Entry, Part, one
from coset.checkpoint.rope import rotary

_SHARED: tuple[Entry, ...] = (*d.ENDS, *d.PRE_NORMS, *d.ATTENTION)
_MOE = f"{d.LAYER}.block_sparse_moe"
_BY_EXPERT: tuple[Entry, ...] = (
    *_SHARED,
    one(f"{_MOE}.gate.weight", "layers.{i}.mlp.router", "expert stream"),
    one(f"{_MOE}.experts.{{e}}.w1.weight", "layers.{i}.mlp.gate", "neuron stream"),
    one(f"{_MOE}.experts.{{e}}.w2.weight", "layers.{i}.mlp.down", "stream neuron"),
    one(f"{_MOE}.experts.{{e}}.w3.weight", "layers.{i}.mlp.up", "neuron stream"),
)
_STACKED: tuple[Entry, ...] = (
    *_SHARED,
    one(f"{d.LAYER}.mlp.gate.weight", "layers.{i}.mlp.router", "expert stream"),
    Entry(
        f"{d.LAYER}.mlp.experts.gate_up_proj",
        (Part("layers.{i}.mlp.gate", "expert neuron stream"), Part("layers.{i}.mlp.up", "expert neuron stream")),
        join=1,
    ),
    one(f"{d.LAYER}.mlp.experts.down_proj", "layers.{i}.mlp.down", "expert stream neuron"),
)


def _architecture(config: Config, outputs: Outputs) -> Architecture:
    width = d.width_head_dim(config)
    positions = rotary(config, width, theta=1_000_000.0)
    attention = d.attention(config, width, positions, kv_heads=8, window=config.optional_integer("sliding_window"))
    experts = Experts(
        config.integer("num_local_experts", "num_experts", default=8), config.integer("num_experts_per_tok", default=2), d.gated_mlp(config)
    )
    layer = d.pre_norm(attention, experts, d.rms(config, 1e-5))
    return d.decoder(config, outputs, (layer,) * config.integer("num_hidden_layers"), layer.attention_norm)


FAMILY = Family(
    model_type="mixtral",
    bodies=d.BODIES,
    heads=decoder_heads("Mixtral", tied=False),
    layouts=lambda config: (
        Layout("{body}layers.0.block_sparse_moe.gate.weight", _BY_EXPERT, d.BUFFERS),
        Layout("{body}layers.0.mlp.gate.weight", _STACKED, d.BUFFERS),
    ),
    architecture=_architecture,
)
