"""GPT-2: Conv1D matrices [in, out], fused query-key-value blocks, a learned position table, LayerNorm, tied by default."""

from coset.architecture import MLP, Architecture, Attention, Layer, LearnedPositions, Norm, Tokens
from coset.checkpoint.config import Config
from coset.checkpoint.families.base import Family, Layout, Outputs, decoder_heads, linear_head
from coset.checkpoint.layout import Entry, conv1d, fused_conv1d, norm, one

_LAYER = "{body}h.{i}"
_TABLE: tuple[Entry, ...] = (
    one("{body}wte.weight", "embed.tokens", "vocabulary stream"),
    one("{body}wpe.weight", "embed.positions", "position stream"),
    *norm(f"{_LAYER}.ln_1", "layers.{i}.attention_norm"),
    *fused_conv1d(
        f"{_LAYER}.attn.c_attn",
        {"layers.{i}.attention.q": "(kv query qk)", "layers.{i}.attention.k": "(kv qk)", "layers.{i}.attention.v": "(kv vo)"},
        "stream",
    ),
    *conv1d(f"{_LAYER}.attn.c_proj", "layers.{i}.attention.o", "stream", "(kv query vo)"),
    *norm(f"{_LAYER}.ln_2", "layers.{i}.mlp_norm"),
    *conv1d(f"{_LAYER}.mlp.c_fc", "layers.{i}.mlp.up", "neuron", "stream"),
    *conv1d(f"{_LAYER}.mlp.c_proj", "layers.{i}.mlp.down", "stream", "neuron"),
    *norm("{body}ln_f", "final_norm"),
)


def _architecture(config: Config, outputs: Outputs) -> Architecture:
    width, heads = config.integer("n_embd", "hidden_size"), config.integer("n_head", "num_attention_heads")
    head_dim = Config(config.path, {}).head_dim(width, heads)  # the class knows no head_dim
    scale = head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
    normalise = Norm("layer", eps=config.number("layer_norm_epsilon", 1e-5), bias=True)
    mlp = MLP(
        config.integer("n_inner", default=4 * width),
        config.activation("activation_function", default="gelu_new"),
        up_bias=True,
        down_bias=True,
    )
    layers = [
        Layer(
            Attention(
                heads=heads,
                kv_heads=heads,
                head_dim=head_dim,
                value_dim=head_dim,
                query_bias=True,
                key_bias=True,
                value_bias=True,
                output_bias=True,
                scale=scale / (i + 1) if by_layer else scale,
            ),
            mlp,
            normalise,
            normalise,
        )
        for i in range(config.integer("n_layer", "num_hidden_layers"))
    ]
    return Architecture(
        width=width,
        layers=tuple(layers),
        inputs=Tokens(config.integer("vocab_size")),
        outputs=outputs,
        positions=LearnedPositions(config.integer("n_positions", "max_position_embeddings")),
        final_norm=normalise,
    )


FAMILY = Family(
    model_type="gpt2",
    bodies=("transformer.", ""),
    heads=decoder_heads("GPT2", tied=True, lm="LMHeadModel")
    | {"GPT2ForTokenClassification": linear_head("classifier"), "GPT2ForQuestionAnswering": linear_head("qa_outputs")},
    layouts=lambda config: (Layout("{body}wte.weight", _TABLE, (f"{_LAYER}.attn.bias", f"{_LAYER}.attn.masked_bias")),),
    architecture=_architecture,
)
