"""GPT-J: partial RoPE on interleaved lanes, one norm in front of parallel attention and MLP, a biased head."""

from coset.architecture import MLP, Architecture, Attention, Layer, Norm, Rotary, Tokens
from coset.checkpoint.config import Config
from coset.checkpoint.families.base import Family, Layout, Outputs, decoder_heads
from coset.checkpoint.layout import Entry, linear, norm, one
from coset.checkpoint.rope import rotary

_LAYER = "{body}h.{i}"
_TABLE: tuple[Entry, ...] = (
    one("{body}wte.weight", "embed.tokens", "vocabulary stream"),
    *norm(f"{_LAYER}.ln_1", "layers.{i}.attention_norm"),
    *linear(f"{_LAYER}.attn.q_proj", "layers.{i}.attention.q", "(kv query qk)", "stream"),
    *linear(f"{_LAYER}.attn.k_proj", "layers.{i}.attention.k", "(kv qk)", "stream"),
    *linear(f"{_LAYER}.attn.v_proj", "layers.{i}.attention.v", "(kv vo)", "stream"),
    *linear(f"{_LAYER}.attn.out_proj", "layers.{i}.attention.o", "stream", "(kv query vo)"),
    *linear(f"{_LAYER}.mlp.fc_in", "layers.{i}.mlp.up", "neuron", "stream"),
    *linear(f"{_LAYER}.mlp.fc_out", "layers.{i}.mlp.down", "stream", "neuron"),
    *norm("{body}ln_f", "final_norm"),
)


def _rotary(config: Config, head_dim: int) -> Rotary:
    if "rotary_dim" in config.values and config.values["rotary_dim"] is None:
        raise config.fault("rotary_dim", "null is not supported; give the number of rotated lanes")
    lanes = config.integer("rotary_dim", default=64)
    if lanes > head_dim:
        raise config.fault("rotary_dim", f"{lanes} lanes cannot rotate in heads of width {head_dim}")
    # The base is fixed in this family, whatever the config says.
    return rotary(Config(config.path, {}), lanes, pairing="interleaved")


def _architecture(config: Config, outputs: Outputs) -> Architecture:
    width, heads = config.integer("n_embd", "hidden_size"), config.integer("n_head", "num_attention_heads")
    head_dim = Config(config.path, {}).head_dim(width, heads)  # the class knows no head_dim
    normalise = Norm("layer", eps=config.number("layer_norm_epsilon", 1e-5), bias=True)
    mlp = MLP(
        config.integer("n_inner", default=4 * width),
        config.activation("activation_function", default="gelu_new"),
        up_bias=True,
        down_bias=True,
    )
    attention = Attention(heads=heads, kv_heads=heads, head_dim=head_dim, value_dim=head_dim, positions=_rotary(config, head_dim))
    layer = Layer(attention, mlp, normalise, None, parallel=True)
    return Architecture(
        width=width,
        layers=(layer,) * config.integer("n_layer", "num_hidden_layers"),
        inputs=Tokens(config.integer("vocab_size")),
        outputs=outputs,
        final_norm=normalise,
    )


FAMILY = Family(
    model_type="gptj",
    bodies=("transformer.", ""),
    heads=decoder_heads("GPTJ", tied=False, bias=True),
    layouts=lambda config: (Layout("{body}wte.weight", _TABLE, (f"{_LAYER}.attn.bias", f"{_LAYER}.attn.masked_bias")),),
    architecture=_architecture,
)
