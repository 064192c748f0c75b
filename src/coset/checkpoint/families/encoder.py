"""Names and readings that BERT and RoBERTa share."""

from __future__ import annotations

from coset.architecture import MLP, Architecture, Attention, Layer, LearnedPositions, Norm, Tokens
from coset.checkpoint.config import Config
from coset.checkpoint.families.base import Layout, Outputs
from coset.checkpoint.layout import Entry, linear, norm, one

_LAYER = "{body}encoder.layer.{i}"
_OPTIONAL = ("{body}embeddings.position_ids", "{body}embeddings.token_type_ids", "{body}pooler.dense.weight", "{body}pooler.dense.bias")

POOLER = ("{body}pooler.dense.weight", "{body}pooler.dense.bias")
"""Required by the heads that read the pooled first token."""


def _table(weight: str, bias: str) -> tuple[Entry, ...]:
    return (
        one("{body}embeddings.word_embeddings.weight", "embed.tokens", "vocabulary stream"),
        one("{body}embeddings.position_embeddings.weight", "embed.positions", "position stream"),
        one("{body}embeddings.token_type_embeddings.weight", "embed.types", "type stream"),
        *norm("{body}embeddings.LayerNorm", "embed.norm", weight, bias),
        *linear(f"{_LAYER}.attention.self.query", "layers.{i}.attention.q", "(kv query qk)", "stream"),
        *linear(f"{_LAYER}.attention.self.key", "layers.{i}.attention.k", "(kv qk)", "stream"),
        *linear(f"{_LAYER}.attention.self.value", "layers.{i}.attention.v", "(kv vo)", "stream"),
        *linear(f"{_LAYER}.attention.output.dense", "layers.{i}.attention.o", "stream", "(kv query vo)"),
        *norm(f"{_LAYER}.attention.output.LayerNorm", "layers.{i}.attention_norm", weight, bias),
        *linear(f"{_LAYER}.intermediate.dense", "layers.{i}.mlp.up", "neuron", "stream"),
        *linear(f"{_LAYER}.output.dense", "layers.{i}.mlp.down", "stream", "neuron"),
        *norm(f"{_LAYER}.output.LayerNorm", "layers.{i}.mlp_norm", weight, bias),
    )


LAYOUTS: tuple[Layout, ...] = (
    Layout("{body}embeddings.LayerNorm.weight", _table("weight", "bias"), _OPTIONAL),
    # Files converted from TensorFlow keep its names of the norms' tensors.
    Layout("{body}embeddings.LayerNorm.gamma", _table("gamma", "beta"), _OPTIONAL),
)


def encoder(config: Config, outputs: Outputs, offset: int) -> Architecture:
    """A post-norm encoder with learned positions, of which row `offset` is the first position."""
    config.refuse("position_embedding_type", "absolute")
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = Config(config.path, {}).head_dim(width, heads)  # the class knows no head_dim
    normalise = Norm("layer", eps=config.number("layer_norm_eps", 1e-12), bias=True)
    attention = Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        value_dim=head_dim,
        query_bias=True,
        key_bias=True,
        value_bias=True,
        output_bias=True,
    )
    mlp = MLP(config.integer("intermediate_size"), config.activation("hidden_act", default="gelu"), up_bias=True, down_bias=True)
    layer = Layer(attention, mlp, normalise, normalise, arrangement="post")
    return Architecture(
        width=width,
        layers=(layer,) * config.integer("num_hidden_layers"),
        inputs=Tokens(config.integer("vocab_size"), types=config.integer("type_vocab_size", default=2)),
        outputs=outputs,
        positions=LearnedPositions(config.integer("max_position_embeddings", default=512), offset),
        embedding_norm=normalise,
        causal=config.flag("is_decoder", False),
    )
