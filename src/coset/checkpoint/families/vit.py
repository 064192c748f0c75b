"""ViT: patches embedded by a convolution, a class token in front, a learned position table, a classifier on the class token."""

from coset.architecture import MLP, Architecture, Attention, Classifier, Layer, LearnedPositions, Norm, Patches, StreamOutput
from coset.checkpoint.config import Config
from coset.checkpoint.families.base import Family, Head, Layout, Outputs, stream
from coset.checkpoint.layout import Entry, Part, linear, norm, one

_LAYER = "{body}encoder.layer.{i}"
_PATCHES = "{body}embeddings.patch_embeddings.projection"


def _table(config: Config) -> tuple[Entry, ...]:
    patch = (config.integer("num_channels", default=3), *config.pair("patch_size", 16))
    return (
        one("{body}embeddings.cls_token", "embed.class_token", "1 1 stream"),
        one("{body}embeddings.position_embeddings", "embed.positions", "1 position stream"),
        Entry(f"{_PATCHES}.weight", (Part("embed.patches", "stream patch"),), shape=patch),
        one(f"{_PATCHES}.bias", "embed.patches_bias", "stream"),
        *norm(f"{_LAYER}.layernorm_before", "layers.{i}.attention_norm"),
        *linear(f"{_LAYER}.attention.attention.query", "layers.{i}.attention.q", "(kv query qk)", "stream"),
        *linear(f"{_LAYER}.attention.attention.key", "layers.{i}.attention.k", "(kv qk)", "stream"),
        *linear(f"{_LAYER}.attention.attention.value", "layers.{i}.attention.v", "(kv vo)", "stream"),
        *linear(f"{_LAYER}.attention.output.dense", "layers.{i}.attention.o", "stream", "(kv query vo)"),
        *norm(f"{_LAYER}.layernorm_after", "layers.{i}.mlp_norm"),
        *linear(f"{_LAYER}.intermediate.dense", "layers.{i}.mlp.up", "neuron", "stream"),
        *linear(f"{_LAYER}.output.dense", "layers.{i}.mlp.down", "stream", "neuron"),
        *norm("{body}layernorm", "final_norm"),
    )


def _classifier(config: Config) -> Outputs:
    classes = config.labels()
    return Classifier(classes, "first", bias=True) if classes > 1 else StreamOutput()


def _architecture(config: Config, outputs: Outputs) -> Architecture:
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.head_dim(width, heads)
    image, patch = config.pair("image_size", 224), config.pair("patch_size", 16)
    grid = tuple(n // p for n, p in zip(image, patch, strict=True))
    bias = config.flag("qkv_bias", True)
    normalise = Norm("layer", eps=config.number("layer_norm_eps", 1e-12), bias=True)
    mlp = MLP(config.integer("intermediate_size"), config.activation("hidden_act", default="gelu"), up_bias=True, down_bias=True)
    attention = Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        value_dim=head_dim,
        query_bias=bias,
        key_bias=bias,
        value_bias=bias,
        output_bias=True,
    )
    inputs = Patches(config.integer("num_channels", default=3) * patch[0] * patch[1], grid, class_token=True)
    return Architecture(
        width=width,
        layers=(Layer(attention, mlp, normalise, normalise),) * config.integer("num_hidden_layers"),
        inputs=inputs,
        outputs=outputs,
        positions=LearnedPositions(inputs.count),
        final_norm=normalise,
        causal=False,
    )


FAMILY = Family(
    model_type="vit",
    bodies=("vit.", ""),
    heads={
        "ViTModel": Head(stream),
        "ViTForImageClassification": Head(
            _classifier, linear("classifier", "head", "class", "stream"), optional=("classifier.weight", "classifier.bias")
        ),
        "ViTForMaskedImageModeling": Head(
            stream, required=("{body}embeddings.mask_token", "decoder.0.weight", "decoder.0.bias"), pinned=("embed.positions",)
        ),
    },
    layouts=lambda config: (
        Layout(
            f"{_PATCHES}.weight",
            _table(config),
            ("{body}pooler.dense.weight", "{body}pooler.dense.bias"),
        ),
    ),
    architecture=_architecture,
)
