"""GPT-NeoX (Pythia): head by head its query, key and value in one matrix; partial RoPE; parallel residual unless switched off."""

from coset.architecture import MLP, Architecture, Attention, Layer, Norm, Tokens
from coset.checkpoint.config import Config
from coset.checkpoint.families.base import Family, Layout, Outputs, decoder_heads, linear_head
from coset.checkpoint.layout import Entry, interleaved_linear, linear, mirror, norm, one
from coset.checkpoint.rope import rotary

_LAYER = "{body}layers.{i}"
_TABLE: tuple[Entry, ...] = (
    one("{body}embed_in.weight", "embed.tokens", "vocabulary stream"),
    *norm(f"{_LAYER}.input_layernorm", "layers.{i}.attention_norm"),
    *interleaved_linear(
        f"{_LAYER}.attention.query_key_value",
        {"layers.{i}.attention.q": "(query qk)", "layers.{i}.attention.k": "qk", "layers.{i}.attention.v": "vo"},
        "kv",
        "stream",
    ),
    *linear(f"{_LAYER}.attention.dense", "layers.{i}.attention.o", "stream", "(kv query vo)"),
    *norm(f"{_LAYER}.post_attention_layernorm", "layers.{i}.mlp_norm"),
    *linear(f"{_LAYER}.mlp.dense_h_to_4h", "layers.{i}.mlp.up", "neuron", "stream"),
    *linear(f"{_LAYER}.mlp.dense_4h_to_h", "layers.{i}.mlp.down", "stream", "neuron"),
    *norm("{body}final_layer_norm", "final_norm"),
)
_BUFFERS = (f"{_LAYER}.attention.bias", f"{_LAYER}.attention.masked_bias", f"{_LAYER}.attention.rotary_emb.inv_freq")
_HEAD = (one("embed_out.weight", "head", "vocabulary stream"), mirror("embed_out.weight", "embed.tokens", "vocabulary stream"))


def _architecture(config: Config, outputs: Outputs) -> Architecture:
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.head_dim(width, heads)
    bias = config.flag("attention_bias", True)
    normalise = Norm("layer", eps=config.number("layer_norm_eps", 1e-5), bias=True)
    mlp = MLP(config.integer("intermediate_size"), config.activation("hidden_act", default="gelu"), up_bias=True, down_bias=True)
    attention = Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        value_dim=head_dim,
        positions=rotary(config, head_dim, theta_name="rotary_emb_base", fraction=0.25, fraction_name="rotary_pct"),
        query_bias=bias,
        key_bias=bias,
        value_bias=bias,
        output_bias=bias,
    )
    layer = Layer(attention, mlp, normalise, normalise, parallel=config.flag("use_parallel_residual", True))
    return Architecture(
        width=width,
        layers=(layer,) * config.integer("num_hidden_layers"),
        inputs=Tokens(config.integer("vocab_size")),
        outputs=outputs,
        final_norm=normalise,
    )


FAMILY = Family(
    model_type="gpt_neox",
    bodies=("gpt_neox.", ""),
    heads=decoder_heads("GPTNeoX", tied=False, head=_HEAD)
    | {"GPTNeoXForTokenClassification": linear_head("classifier"), "GPTNeoXForQuestionAnswering": linear_head("qa_outputs")},
    layouts=lambda config: (Layout("{body}embed_in.weight", _TABLE, _BUFFERS),),
    architecture=_architecture,
)
