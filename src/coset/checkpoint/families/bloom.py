"""BLOOM: ALiBi, a norm behind the embedding, head by head its query, key and value in one matrix, tied by default."""

from coset.architecture import MLP, Alibi, Architecture, Attention, Layer, Norm, Tokens
from coset.checkpoint.config import Config
from coset.checkpoint.families.base import Family, Layout, Outputs, decoder_heads, linear_head
from coset.checkpoint.layout import Entry, interleaved_linear, linear, norm, one

_LAYER = "{body}h.{i}"
_TABLE: tuple[Entry, ...] = (
    one("{body}word_embeddings.weight", "embed.tokens", "vocabulary stream"),
    *norm("{body}word_embeddings_layernorm", "embed.norm"),
    *norm(f"{_LAYER}.input_layernorm", "layers.{i}.attention_norm"),
    *interleaved_linear(
        f"{_LAYER}.self_attention.query_key_value",
        {"layers.{i}.attention.q": "(query qk)", "layers.{i}.attention.k": "qk", "layers.{i}.attention.v": "vo"},
        "kv",
        "stream",
    ),
    *linear(f"{_LAYER}.self_attention.dense", "layers.{i}.attention.o", "stream", "(kv query vo)"),
    *norm(f"{_LAYER}.post_attention_layernorm", "layers.{i}.mlp_norm"),
    *linear(f"{_LAYER}.mlp.dense_h_to_4h", "layers.{i}.mlp.up", "neuron", "stream"),
    *linear(f"{_LAYER}.mlp.dense_4h_to_h", "layers.{i}.mlp.down", "stream", "neuron"),
    *norm("{body}ln_f", "final_norm"),
)


def _architecture(config: Config, outputs: Outputs) -> Architecture:
    config.refuse("apply_residual_connection_post_layernorm", False)
    width, heads = config.integer("hidden_size", "n_embed"), config.integer("n_head", "num_attention_heads")
    head_dim = Config(config.path, {}).head_dim(width, heads)  # the class knows no head_dim
    normalise = Norm("layer", eps=config.number("layer_norm_epsilon", 1e-5), bias=True)
    attention = Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        value_dim=head_dim,
        positions=Alibi.standard(heads),
        query_bias=True,
        key_bias=True,
        value_bias=True,
        output_bias=True,
    )
    layer = Layer(attention, MLP(4 * width, "gelu_tanh", up_bias=True, down_bias=True), normalise, normalise)
    return Architecture(
        width=width,
        layers=(layer,) * config.integer("n_layer", "num_hidden_layers"),
        inputs=Tokens(config.integer("vocab_size")),
        outputs=outputs,
        embedding_norm=normalise,
        final_norm=normalise,
    )


FAMILY = Family(
    model_type="bloom",
    bodies=("transformer.", ""),
    heads=decoder_heads("Bloom", tied=True)
    | {"BloomForTokenClassification": linear_head("classifier"), "BloomForQuestionAnswering": linear_head("qa_outputs")},
    layouts=lambda config: (Layout("{body}word_embeddings.weight", _TABLE),),
    architecture=_architecture,
)
