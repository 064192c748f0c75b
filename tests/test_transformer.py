"""The reference forward pass against the models of `transformers`, built from tiny random configs, and its own conventions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    BertConfig,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PixtralVisionConfig,
    PixtralVisionModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.models.t5.modeling_t5 import T5Attention

from coset.architecture import (
    MLP,
    NO_NORM,
    Alibi,
    Architecture,
    Attention,
    Classifier,
    Experts,
    LanguageModel,
    Layer,
    LearnedPositions,
    Norm,
    Patches,
    RelativeBias,
    Rotary,
    Sinusoidal,
    StreamOutput,
    Tokens,
    uniform,
)
from coset.errors import CosetError
from coset.parameters import check
from coset.transformer import attention, forward, initialise, random_inputs, sinusoidal_table

LENGTH = 71
VOCABULARY = 37


def difference(got: Tensor, expected: Tensor) -> float:
    """Relative Frobenius distance."""
    assert got.shape == expected.shape
    return float((got - expected).norm() / expected.norm())


# --- parity with transformers ---------------------------------------------------------------------------------------
# Each case builds a model and writes its tensors under canonical names, by hand: a name or shape that is wrong here fails `check`.


@dataclass(frozen=True)
class Case:
    """A random model of `transformers` as architecture and canonical tensors, with an input and the outputs it gives."""

    architecture: Architecture
    parameters: dict[str, Tensor]
    inputs: Tensor
    expected: Tensor
    types: Tensor | None = None


class Reader:
    """The state dict of a model whose tensors were all drawn at random, gains and biases included."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self.model = model.to(dtype).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
                p.copy_(p + 0.3 * noise if p.ndim == 1 else 0.25 * noise)
        self.tensors = dict(model.state_dict())

    def __call__(self, name: str) -> Tensor:
        return self.tensors[name]

    def linear(self, name: str, *outputs: int) -> Tensor:
        """The transpose of a torch.nn.Linear weight, its outputs split over axes."""
        return self(f"{name}.weight").T.reshape(-1, *outputs)

    def bias(self, name: str, *outputs: int) -> Tensor:
        return self(f"{name}.bias").reshape(outputs)

    def run(self, **inputs: Tensor) -> Tensor:
        with torch.no_grad():
            out = self.model(**inputs)
        return out.logits if "logits" in out else out.last_hidden_state


def token_ids(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(2))


LAYER_NORM = Norm("layer", 1e-5, bias=True)
HEADS, KV, LANES, WIDTH, NEURONS = 6, 3, 10, 42, 19


def gpt2(dtype: torch.dtype) -> Case:
    d, h = 30, 3
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=80, n_embd=d, n_layer=2, n_head=h, n_inner=NEURONS, bos_token_id=None, eos_token_id=None
    )
    r = Reader(GPT2LMHeadModel(config), dtype)
    att = Attention(h, h, 10, 10, query_bias=True, key_bias=True, value_bias=True, output_bias=True)
    layer = Layer(att, MLP(NEURONS, "gelu_tanh", up_bias=True, down_bias=True), LAYER_NORM, LAYER_NORM)
    a = Architecture(d, (layer,) * 2, Tokens(VOCABULARY), LanguageModel(tied=True), positions=LearnedPositions(80), final_norm=LAYER_NORM)
    t = {"embed.tokens": r("transformer.wte.weight"), "embed.positions": r("transformer.wpe.weight")}
    t |= {"final_norm.gain": r("transformer.ln_f.weight"), "final_norm.bias": r("transformer.ln_f.bias")}
    for i in range(2):
        b, p = f"transformer.h.{i}", f"layers.{i}"
        qkv, qkv_bias = r(f"{b}.attn.c_attn.weight").reshape(d, 3, h, 10), r(f"{b}.attn.c_attn.bias").reshape(3, h, 10)
        t |= {f"{p}.attention.q": qkv[:, 0].unsqueeze(2), f"{p}.attention.k": qkv[:, 1], f"{p}.attention.v": qkv[:, 2]}
        t |= {f"{p}.attention.q_bias": qkv_bias[0].unsqueeze(1), f"{p}.attention.k_bias": qkv_bias[1], f"{p}.attention.v_bias": qkv_bias[2]}
        t[f"{p}.attention.o"] = r(f"{b}.attn.c_proj.weight").reshape(h, 1, 10, d)
        t[f"{p}.attention.o_bias"] = r(f"{b}.attn.c_proj.bias")
        t |= {f"{p}.mlp.up": r(f"{b}.mlp.c_fc.weight"), f"{p}.mlp.up_bias": r(f"{b}.mlp.c_fc.bias")}
        t |= {f"{p}.mlp.down": r(f"{b}.mlp.c_proj.weight"), f"{p}.mlp.down_bias": r(f"{b}.mlp.c_proj.bias")}
        for ours, theirs in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            t |= {f"{p}.{ours}.gain": r(f"{b}.{theirs}.weight"), f"{p}.{ours}.bias": r(f"{b}.{theirs}.bias")}
    ids = token_ids()
    return Case(a, t, ids, r.run(input_ids=ids))


def decoder(r: Reader, a: Architecture) -> Case:
    """Models with the tensor names of Llama."""
    d = a.width
    t = {"embed.tokens": r("model.embed_tokens.weight"), "final_norm.gain": r("model.norm.weight")}
    if not a.tied:
        t["head"] = r.linear("lm_head", VOCABULARY)
    for i, layer in enumerate(a.layers):
        b, p, att = f"model.layers.{i}", f"layers.{i}", layer.attention
        heads = (att.kv_heads, att.group)
        t[f"{p}.attention.q"] = r.linear(f"{b}.self_attn.q_proj", *heads, att.head_dim)
        t[f"{p}.attention.k"] = r.linear(f"{b}.self_attn.k_proj", att.kv_heads, att.head_dim)
        t[f"{p}.attention.v"] = r.linear(f"{b}.self_attn.v_proj", att.kv_heads, att.value_dim)
        t[f"{p}.attention.o"] = r.linear(f"{b}.self_attn.o_proj", d).reshape(*heads, att.value_dim, d)
        if att.qk_norm is not None:
            t[f"{p}.attention.q_gain"] = r(f"{b}.self_attn.q_norm.weight")
            t[f"{p}.attention.k_gain"] = r(f"{b}.self_attn.k_norm.weight")
        if att.qk_norm == "all":
            t[f"{p}.attention.q_gain"] = t[f"{p}.attention.q_gain"].reshape(*heads, att.head_dim)
            t[f"{p}.attention.k_gain"] = t[f"{p}.attention.k_gain"].reshape(att.kv_heads, att.head_dim)
        before, behind = "input_layernorm", "post_attention_layernorm"
        if layer.arrangement == "output":
            before, behind = "post_attention_layernorm", "post_feedforward_layernorm"
        t |= {f"{p}.attention_norm.gain": r(f"{b}.{before}.weight"), f"{p}.mlp_norm.gain": r(f"{b}.{behind}.weight")}
        if isinstance(layer.mlp, Experts):
            gate, up = r(f"{b}.mlp.experts.gate_up_proj").mT.chunk(2, dim=-1)
            t |= {f"{p}.mlp.router": r.linear(f"{b}.mlp.gate", layer.mlp.count), f"{p}.mlp.gate": gate, f"{p}.mlp.up": up}
            t[f"{p}.mlp.down"] = r(f"{b}.mlp.experts.down_proj").mT
        else:
            t |= {f"{p}.mlp.{x}": r.linear(f"{b}.mlp.{x}_proj", layer.mlp.width) for x in ("gate", "up")}
            t[f"{p}.mlp.down"] = r.linear(f"{b}.mlp.down_proj", d)
    ids = token_ids()
    return Case(a, t, ids, r.run(input_ids=ids))


def sizes(**more: object) -> dict[str, object]:
    """Common config keys of the Llama-like models."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": NEURONS,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": LANES,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    } | more


def decoder_architecture(
    attention: Attention, *, norm: Norm | None = None, mlp: MLP | Experts | None = None, width: int = WIDTH, tied: bool = False
) -> Architecture:
    norm = Norm("rms", 1e-6) if norm is None else norm
    layer = Layer(attention, MLP(NEURONS, "silu", gated=True) if mlp is None else mlp, norm, norm)
    return Architecture(width, (layer,) * 2, Tokens(VOCABULARY), LanguageModel(tied), final_norm=norm)


def grouped(**more: object) -> Attention:
    return replace(Attention(HEADS, KV, LANES, LANES, Rotary.standard(LANES)), **more)


def llama(dtype: torch.dtype) -> Case:
    return decoder(Reader(LlamaForCausalLM(LlamaConfig(**sizes())), dtype), decoder_architecture(grouped()))


def llama_yarn(dtype: torch.dtype) -> Case:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0}
    r = Reader(LlamaForCausalLM(LlamaConfig(**sizes(rope_parameters=rope, max_position_embeddings=128))), dtype)
    frequencies = tuple((float(f),) for f in r.model.model.rotary_emb.inv_freq)
    rotary = Rotary(frequencies, magnitude=r.model.model.rotary_emb.attention_scaling)
    assert rotary.magnitude > 1.1
    return decoder(r, decoder_architecture(grouped(positions=rotary)))


def mistral(dtype: torch.dtype) -> Case:
    r = Reader(MistralForCausalLM(MistralConfig(**sizes(sliding_window=9))), dtype)
    return decoder(r, decoder_architecture(grouped(window=9)))


def qwen3(dtype: torch.dtype) -> Case:
    r = Reader(Qwen3ForCausalLM(Qwen3Config(**sizes(rms_norm_eps=1e-4))), dtype)
    return decoder(r, decoder_architecture(grouped(qk_norm="head", qk_norm_eps=1e-4), norm=Norm("rms", 1e-4)))


def mixtral(dtype: torch.dtype) -> Case:
    r = Reader(
        MixtralForCausalLM(MixtralConfig(**sizes(num_local_experts=5, num_experts_per_tok=2, experts_implementation="eager"))), dtype
    )
    base = r.model.config.rope_parameters["rope_theta"]
    experts = Experts(5, 2, MLP(NEURONS, "silu", gated=True))
    norm = Norm("rms", r.model.config.rms_norm_eps)
    return decoder(r, decoder_architecture(grouped(positions=Rotary.standard(LANES, base)), norm=norm, mlp=experts))


def gemma(dtype: torch.dtype) -> Case:
    r = Reader(GemmaForCausalLM(GemmaConfig(**sizes(hidden_activation="gelu_pytorch_tanh"))), dtype)
    a = decoder_architecture(grouped(), norm=Norm("rms", 1e-6, offset=1.0), mlp=MLP(NEURONS, "gelu_tanh", gated=True), tied=True)
    return decoder(r, replace(a, inputs=Tokens(VOCABULARY, scale=math.sqrt(WIDTH))))


def olmo2(dtype: torch.dtype) -> Case:
    width = HEADS * LANES
    config = sizes(hidden_size=width)
    del config["head_dim"]
    r = Reader(Olmo2ForCausalLM(Olmo2Config(**config)), dtype)
    eps = r.model.config.rms_norm_eps
    a = decoder_architecture(grouped(qk_norm="all", qk_norm_eps=eps), norm=Norm("rms", eps), width=width)
    return decoder(r, replace(a, layers=tuple(replace(layer, arrangement="output") for layer in a.layers)))


def gpt_neox(dtype: torch.dtype) -> Case:
    d, h = 30, 3
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=d,
        intermediate_size=NEURONS,
        num_hidden_layers=2,
        num_attention_heads=h,
        bos_token_id=None,
        eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.4},
    )
    r = Reader(GPTNeoXForCausalLM(config), dtype)
    att = Attention(h, h, 10, 10, Rotary.standard(4, 500.0), query_bias=True, key_bias=True, value_bias=True, output_bias=True)
    layer = Layer(att, MLP(NEURONS, "gelu", up_bias=True, down_bias=True), LAYER_NORM, LAYER_NORM, parallel=True)
    a = Architecture(d, (layer,) * 2, Tokens(VOCABULARY), LanguageModel(), final_norm=LAYER_NORM)
    t = {"embed.tokens": r("gpt_neox.embed_in.weight"), "head": r.linear("lm_head", VOCABULARY)}
    t |= {"final_norm.gain": r("gpt_neox.final_layer_norm.weight"), "final_norm.bias": r("gpt_neox.final_layer_norm.bias")}
    for i in range(2):
        b = f"gpt_neox.layers.{i}"
        t |= fused(r, f"{b}.attention", i, d, h)
        t |= norms_and_mlp(r, b, i, d, ("input_layernorm", "post_attention_layernorm"))
    ids = token_ids()
    return Case(a, t, ids, r.run(input_ids=ids))


def fused(r: Reader, b: str, i: int, d: int, h: int) -> dict[str, Tensor]:
    """Attention whose rows run over heads first, then q, k, v (NeoX, BLOOM)."""
    p = f"layers.{i}.attention"
    qkv, bias = r.linear(f"{b}.query_key_value", h, 3, d // h), r.bias(f"{b}.query_key_value", h, 3, d // h)
    return {
        f"{p}.q": qkv[:, :, 0].unsqueeze(2),
        f"{p}.k": qkv[:, :, 1],
        f"{p}.v": qkv[:, :, 2],
        f"{p}.q_bias": bias[:, 0].unsqueeze(1),
        f"{p}.k_bias": bias[:, 1],
        f"{p}.v_bias": bias[:, 2],
        f"{p}.o": r.linear(f"{b}.dense", d).reshape(h, 1, d // h, d),
        f"{p}.o_bias": r.bias(f"{b}.dense", d),
    }


def norms_and_mlp(r: Reader, b: str, i: int, d: int, names: tuple[str, str]) -> dict[str, Tensor]:
    t = {}
    for ours, theirs in zip(("attention_norm", "mlp_norm"), names, strict=True):
        t |= {f"layers.{i}.{ours}.gain": r(f"{b}.{theirs}.weight"), f"layers.{i}.{ours}.bias": r(f"{b}.{theirs}.bias")}
    for ours, theirs in (("up", "dense_h_to_4h"), ("down", "dense_4h_to_h")):
        weight = r(f"{b}.mlp.{theirs}.weight").T
        t |= {f"layers.{i}.mlp.{ours}": weight, f"layers.{i}.mlp.{ours}_bias": r(f"{b}.mlp.{theirs}.bias")}
    return t


def bloom(dtype: torch.dtype) -> Case:
    d, h = 42, HEADS
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=d, n_layer=2, n_head=h, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    r = Reader(BloomForCausalLM(config), dtype)
    att = Attention(h, h, 7, 7, Alibi.standard(h), query_bias=True, key_bias=True, value_bias=True, output_bias=True)
    layer = Layer(att, MLP(4 * d, "gelu_tanh", up_bias=True, down_bias=True), LAYER_NORM, LAYER_NORM)
    a = Architecture(d, (layer,) * 2, Tokens(VOCABULARY), LanguageModel(tied=True), embedding_norm=LAYER_NORM, final_norm=LAYER_NORM)
    t = {"embed.tokens": r("transformer.word_embeddings.weight")}
    for ours, theirs in (("embed.norm", "word_embeddings_layernorm"), ("final_norm", "ln_f")):
        t |= {f"{ours}.gain": r(f"transformer.{theirs}.weight"), f"{ours}.bias": r(f"transformer.{theirs}.bias")}
    for i in range(2):
        b = f"transformer.h.{i}"
        t |= fused(r, f"{b}.self_attention", i, d, h)
        t |= norms_and_mlp(r, b, i, d, ("input_layernorm", "post_attention_layernorm"))
    ids = token_ids()
    return Case(a, t, ids, r.run(input_ids=ids))


def gptj(dtype: torch.dtype) -> Case:
    d, h = 30, 3
    config = GPTJConfig(
        vocab_size=VOCABULARY, n_embd=d, n_layer=2, n_head=h, rotary_dim=4, n_positions=80, bos_token_id=None, eos_token_id=None
    )
    r = Reader(GPTJForCausalLM(config), dtype)
    att = Attention(h, h, 10, 10, Rotary.standard(4, pairing="interleaved"))
    layer = Layer(att, MLP(4 * d, "gelu_tanh", up_bias=True, down_bias=True), LAYER_NORM, None, parallel=True)
    a = Architecture(d, (layer,) * 2, Tokens(VOCABULARY), LanguageModel(bias=True), final_norm=LAYER_NORM)
    t = {"embed.tokens": r("transformer.wte.weight"), "head": r.linear("lm_head", VOCABULARY), "head_bias": r("lm_head.bias")}
    t |= {"final_norm.gain": r("transformer.ln_f.weight"), "final_norm.bias": r("transformer.ln_f.bias")}
    for i in range(2):
        b, p = f"transformer.h.{i}", f"layers.{i}"
        t |= {f"{p}.attention.{x}": r.linear(f"{b}.attn.{x}_proj", h, 10) for x in "kv"}
        t[f"{p}.attention.q"] = r.linear(f"{b}.attn.q_proj", h, 1, 10)
        t[f"{p}.attention.o"] = r.linear(f"{b}.attn.out_proj", d).reshape(h, 1, 10, d)
        t |= {f"{p}.attention_norm.gain": r(f"{b}.ln_1.weight"), f"{p}.attention_norm.bias": r(f"{b}.ln_1.bias")}
        t |= {f"{p}.mlp.up": r.linear(f"{b}.mlp.fc_in", 4 * d), f"{p}.mlp.up_bias": r(f"{b}.mlp.fc_in.bias")}
        t |= {f"{p}.mlp.down": r.linear(f"{b}.mlp.fc_out", d), f"{p}.mlp.down_bias": r(f"{b}.mlp.fc_out.bias")}
    ids = token_ids()
    return Case(a, t, ids, r.run(input_ids=ids))


def separate(r: Reader, names: dict[str, str], i: int, d: int, h: int) -> dict[str, Tensor]:
    """Attention and MLP of plain torch.nn.Linear modules with biases, given their names (BERT, ViT)."""
    p, lanes = f"layers.{i}", d // h
    t = {f"{p}.attention.{x}": r.linear(names[x], h, lanes) for x in "kv"}
    t |= {f"{p}.attention.{x}_bias": r.bias(names[x], h, lanes) for x in "kv"}
    t |= {f"{p}.attention.q": r.linear(names["q"], h, 1, lanes), f"{p}.attention.q_bias": r.bias(names["q"], h, 1, lanes)}
    t |= {f"{p}.attention.o": r.linear(names["o"], d).reshape(h, 1, lanes, d), f"{p}.attention.o_bias": r.bias(names["o"], d)}
    for x in ("up", "down"):
        t |= {f"{p}.mlp.{x}": r(names[x] + ".weight").T, f"{p}.mlp.{x}_bias": r(names[x] + ".bias")}
    for x in ("attention_norm", "mlp_norm"):
        t |= {f"{p}.{x}.gain": r(names[x] + ".weight"), f"{p}.{x}.bias": r(names[x] + ".bias")}
    return t


def bert(dtype: torch.dtype) -> Case:
    d, h = 30, 3
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=d,
        num_hidden_layers=2,
        num_attention_heads=h,
        intermediate_size=NEURONS,
        max_position_embeddings=80,
        layer_norm_eps=1e-5,
        pad_token_id=None,
    )
    r = Reader(BertModel(config, add_pooling_layer=False), dtype)
    att = Attention(h, h, 10, 10, query_bias=True, key_bias=True, value_bias=True, output_bias=True)
    layer = Layer(att, MLP(NEURONS, "gelu", up_bias=True, down_bias=True), LAYER_NORM, LAYER_NORM, "post")
    a = Architecture(
        d,
        (layer,) * 2,
        Tokens(VOCABULARY, types=2),
        StreamOutput(),
        positions=LearnedPositions(80),
        embedding_norm=LAYER_NORM,
        causal=False,
    )
    e = "embeddings"
    t = {"embed.tokens": r(f"{e}.word_embeddings.weight"), "embed.types": r(f"{e}.token_type_embeddings.weight")}
    t |= {"embed.positions": r(f"{e}.position_embeddings.weight")}
    t |= {"embed.norm.gain": r(f"{e}.LayerNorm.weight"), "embed.norm.bias": r(f"{e}.LayerNorm.bias")}
    for i in range(2):
        b = f"encoder.layer.{i}"
        names = {"q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value", "o": "attention.output.dense"}
        names |= {"up": "intermediate.dense", "down": "output.dense"}
        names |= {"attention_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"}
        t |= separate(r, {k: f"{b}.{v}" for k, v in names.items()}, i, d, h)
    ids = token_ids()
    types = (torch.arange(LENGTH) > 40).long().expand(2, -1)
    return Case(a, t, ids, r.run(input_ids=ids, token_type_ids=types), types)


def patchify(pixels: Tensor, size: int) -> Tensor:
    """[batch, channels, height, width] to [batch, patches, channels * size * size]."""
    return F.unfold(pixels, size, stride=size).transpose(1, 2)


def vit(dtype: torch.dtype) -> Case:
    d, h = 30, 3
    config = ViTConfig(
        hidden_size=d,
        num_hidden_layers=2,
        num_attention_heads=h,
        intermediate_size=NEURONS,
        image_size=(14, 20),
        patch_size=2,
        num_channels=3,
        num_labels=7,
        layer_norm_eps=1e-5,
    )
    r = Reader(ViTForImageClassification(config), dtype)
    att = Attention(h, h, 10, 10, query_bias=True, key_bias=True, value_bias=True, output_bias=True)
    layer = Layer(att, MLP(NEURONS, "gelu", up_bias=True, down_bias=True), LAYER_NORM, LAYER_NORM)
    a = Architecture(
        d,
        (layer,) * 2,
        Patches(12, (7, 10), class_token=True),
        Classifier(7, "first"),
        positions=LearnedPositions(71),
        final_norm=LAYER_NORM,
        causal=False,
    )
    e = "vit.embeddings"
    t = {"embed.patches": r(f"{e}.patch_embeddings.projection.weight").flatten(1).T, "embed.class_token": r(f"{e}.cls_token")[0, 0]}
    t |= {"embed.patches_bias": r(f"{e}.patch_embeddings.projection.bias"), "embed.positions": r(f"{e}.position_embeddings")[0]}
    t |= {"final_norm.gain": r("vit.layernorm.weight"), "final_norm.bias": r("vit.layernorm.bias")}
    t |= {"head": r.linear("classifier", 7), "head_bias": r("classifier.bias")}
    for i in range(2):
        names = {x: f"attention.{x}_proj" for x in "qkvo"} | {"up": "mlp.fc1", "down": "mlp.fc2"}
        names |= {"attention_norm": "layernorm_before", "mlp_norm": "layernorm_after"}
        t |= separate(r, {k: f"vit.layers.{i}.{v}" for k, v in names.items()}, i, d, h)
    pixels = torch.randn(2, 3, 14, 20, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    return Case(a, t, patchify(pixels, 2), r.run(pixel_values=pixels))


def pixtral(dtype: torch.dtype) -> Case:
    d, h, lanes = 36, 3, 12
    config = PixtralVisionConfig(
        hidden_size=d,
        intermediate_size=NEURONS,
        num_hidden_layers=2,
        num_attention_heads=h,
        image_size=20,
        patch_size=2,
        hidden_act="silu",
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )
    r = Reader(PixtralVisionModel(config), dtype)
    rates = [100.0 ** (-2 * j / lanes) for j in range(lanes // 2)]
    rotary = Rotary(tuple((f, 0.0) for f in rates[0::2]) + tuple((0.0, f) for f in rates[1::2]))
    norm = Norm("rms", 1e-5)
    layer = Layer(Attention(h, h, lanes, lanes, rotary), MLP(NEURONS, "silu", gated=True), norm, norm)
    a = Architecture(d, (layer,) * 2, Patches(12, (7, 10), bias=False), StreamOutput(), embedding_norm=norm, causal=False)
    t = {"embed.patches": r("patch_conv.weight").flatten(1).T, "embed.norm.gain": r("ln_pre.weight")}
    for i in range(2):
        b, p = f"transformer.layers.{i}", f"layers.{i}"
        t |= {f"{p}.attention.{x}": r.linear(f"{b}.attention.{x}_proj", h, lanes) for x in "kv"}
        t[f"{p}.attention.q"] = r.linear(f"{b}.attention.q_proj", h, 1, lanes)
        t[f"{p}.attention.o"] = r.linear(f"{b}.attention.o_proj", d).reshape(h, 1, lanes, d)
        t |= {f"{p}.attention_norm.gain": r(f"{b}.attention_norm.weight"), f"{p}.mlp_norm.gain": r(f"{b}.ffn_norm.weight")}
        t |= {f"{p}.mlp.{x}": r(f"{b}.feed_forward.{x}_proj.weight").T for x in ("gate", "up", "down")}
    pixels = torch.randn(1, 3, 14, 20, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    return Case(a, t, patchify(pixels, 2), r.run(pixel_values=pixels))


def t5(dtype: torch.dtype) -> Case:
    d, h, lanes = 26, 3, 10
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=d,
        d_kv=lanes,
        d_ff=NEURONS,
        num_layers=2,
        num_heads=h,
        relative_attention_num_buckets=14,
        relative_attention_max_distance=50,
        eos_token_id=None,
        pad_token_id=0,
    )
    r = Reader(T5EncoderModel(config), dtype)
    att = Attention(h, h, lanes, lanes, RelativeBias(14, 50), scale=1.0)
    norm = Norm("rms", 1e-6)
    layer = Layer(att, MLP(NEURONS, "relu"), norm, norm)
    a = Architecture(d, (layer,) * 2, Tokens(VOCABULARY), StreamOutput(), final_norm=norm, causal=False)
    t = {"embed.tokens": r("shared.weight"), "final_norm.gain": r("encoder.final_layer_norm.weight")}
    for i in range(2):
        b, p = f"encoder.block.{i}.layer", f"layers.{i}"
        t |= {f"{p}.attention.{x}": r.linear(f"{b}.0.SelfAttention.{x}", h, lanes) for x in "kv"}
        t[f"{p}.attention.q"] = r.linear(f"{b}.0.SelfAttention.q", h, 1, lanes)
        t[f"{p}.attention.o"] = r.linear(f"{b}.0.SelfAttention.o", d).reshape(h, 1, lanes, d)
        # T5 holds one bias, in its first layer, and every layer uses it.
        t[f"{p}.attention.position_bias"] = r("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight").unsqueeze(2)
        t |= {f"{p}.attention_norm.gain": r(f"{b}.0.layer_norm.weight"), f"{p}.mlp_norm.gain": r(f"{b}.1.layer_norm.weight")}
        t |= {f"{p}.mlp.up": r(f"{b}.1.DenseReluDense.wi.weight").T, f"{p}.mlp.down": r(f"{b}.1.DenseReluDense.wo.weight").T}
    ids = token_ids()
    return Case(a, t, ids, r.run(input_ids=ids))


CASES: dict[str, Callable[[torch.dtype], Case]] = {
    f.__name__: f for f in (gpt2, llama, llama_yarn, mistral, qwen3, olmo2, mixtral, gemma, gpt_neox, gptj, bloom, bert, vit, pixtral, t5)
}
# The other models compute rotary angles, softmax or norms in float32 whatever the dtype of their weights.
EXACT = ("gpt2", "bert", "vit")


@pytest.mark.parametrize("name", CASES)
def test_parity_float32(name: str) -> None:
    case = CASES[name](torch.float32)
    check(case.architecture, case.parameters)
    assert case.expected.shape[1] > 64 or isinstance(case.architecture.outputs, Classifier)
    got = forward(case.architecture, case.parameters, case.inputs, types=case.types)
    assert got.dtype == torch.float32
    assert difference(got, case.expected) <= 1e-5


@pytest.mark.parametrize("name", EXACT)
def test_parity_float64(name: str) -> None:
    case = CASES[name](torch.float64)
    got = forward(case.architecture, case.parameters, case.inputs, types=case.types)
    assert got.dtype == torch.float64
    assert difference(got, case.expected) <= 1e-10


def altered(case: Case, **changes: object) -> float:
    """How far the outputs move when every layer's attention is described differently."""
    layers = tuple(replace(layer, attention=replace(layer.attention, **changes)) for layer in case.architecture.layers)
    got = forward(replace(case.architecture, layers=layers), case.parameters, case.inputs, types=case.types)
    return difference(got, case.expected)


def test_parity_would_notice_another_encoding() -> None:
    case = llama(torch.float32)
    assert altered(case, positions=Rotary.standard(LANES, pairing="interleaved")) > 0.01
    assert altered(case, positions=Rotary.standard(LANES, base=9_000.0)) > 0.01
    assert altered(case, positions=None) > 0.01
    assert altered(case, window=LENGTH - 1) > 1e-4
    assert altered(case, window=LENGTH) < 1e-5
    assert altered(gptj(torch.float32), positions=Rotary.standard(4)) > 0.01
    assert altered(gpt_neox(torch.float32), positions=Rotary.standard(6, 500.0)) > 0.01
    assert altered(bloom(torch.float32), positions=Alibi(Alibi.standard(HEADS).slopes[::-1])) > 0.01
    assert altered(mistral(torch.float32), window=10) > 0.01
    assert altered(qwen3(torch.float32), qk_norm_eps=1e-2) > 1e-4
    assert altered(t5(torch.float32), positions=RelativeBias(14, 60)) > 1e-4


def test_parity_would_notice_the_transposed_grid() -> None:
    case = pixtral(torch.float32)
    transposed = replace(case.architecture, inputs=replace(case.architecture.inputs, grid=(10, 7)))
    assert difference(forward(transposed, case.parameters, case.inputs), case.expected) > 0.01


def test_query_heads_belong_to_their_kv_group() -> None:
    case = llama(torch.float32)

    def reordered(order: list[int]) -> float:
        moved = dict(case.parameters)
        for name in ("q", "o"):
            tensor = moved[f"layers.0.attention.{name}"]
            at = 1 if name == "q" else 0
            flat = tensor.flatten(at, at + 1).index_select(at, torch.tensor(order))
            moved[f"layers.0.attention.{name}"] = flat.reshape(tensor.shape)
        return difference(forward(case.architecture, moved, case.inputs), case.expected)

    assert reordered([1, 0, 2, 3, 5, 4]) < 1e-5  # inside the groups (0, 1), (2, 3), (4, 5)
    assert reordered([0, 2, 1, 3, 4, 5]) > 0.01  # across two of them


def test_causal_relative_bias_is_that_of_the_t5_decoder() -> None:
    d, h, lanes, length = 26, 3, 10, 150
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=d,
        d_kv=lanes,
        num_heads=h,
        is_decoder=True,
        relative_attention_num_buckets=14,
        relative_attention_max_distance=50,
        eos_token_id=None,
        pad_token_id=0,
    )
    r = Reader(T5Attention(config, has_relative_attention_bias=True, layer_idx=0), torch.float32)
    layer = Layer(Attention(h, h, lanes, lanes, RelativeBias(14, 50), scale=1.0), MLP(5), NO_NORM, NO_NORM)
    a = Architecture(d, (layer,), Tokens(VOCABULARY), StreamOutput(), causal=True)
    t = {f"layers.0.attention.{x}": r.linear(x, h, lanes) for x in "kv"}
    t |= {"layers.0.attention.q": r.linear("q", h, 1, lanes), "layers.0.attention.o": r.linear("o", d).reshape(h, 1, lanes, d)}
    t["layers.0.attention.position_bias"] = r("relative_attention_bias.weight").unsqueeze(2)
    x = torch.randn(2, length, d, generator=torch.Generator().manual_seed(3))
    hidden = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)
    with torch.no_grad():
        expected = r.model(x, mask=hidden[None, None])[0]
    assert difference(attention(a, 0, t, x), expected) <= 1e-5
    assert difference(attention(replace(a, causal=False), 0, t, x), expected) > 0.01


# --- conventions of its own -----------------------------------------------------------------------------------------

EVERYTHING = Architecture(
    width=14,
    layers=(
        Layer(
            Attention(6, 3, 10, 7, Rotary(((1.0,), (0.0,), (0.3,)), "interleaved"), qk_norm="head", qk_norm_offset=1.0, window=4),
            Experts(5, 2, MLP(9, "silu", gated=True, up_bias=True, down_bias=True)),
            Norm("rms", offset=1.0),
            Norm("layer", bias=True),
        ),
        Layer(
            Attention(6, 2, 5, 4, Alibi.standard(6), value_bias=True, output_bias=True, scale=0.3),
            MLP(11, "quick_gelu", up_bias=True, down_bias=True),
            Norm("rms", gain=False),
            None,
            parallel=True,
        ),
        Layer(Attention(3, 3, 4, 4, RelativeBias(8, 20), qk_norm="all"), MLP(9, "tanh"), Norm("rms"), Norm("rms"), "output"),
        Layer(Attention(3, 1, 4, 5, query_bias=True, key_bias=True), MLP(9, "relu", gated=True), Norm("layer"), Norm("rms"), "post"),
    ),
    inputs=Tokens(23, scale=1.7, types=3),
    outputs=LanguageModel(bias=True),
    positions=LearnedPositions(20, offset=2),
    embedding_norm=Norm("layer", bias=True),
    final_norm=Norm("rms"),
)
IMAGE = uniform(
    pe="rope",
    layers=2,
    width=20,
    heads=3,
    head_dim=12,
    frequencies=((0.7, 0.0), (0.0, 0.4), (0.2, -0.1)),
    mlp="swiglu",
    mlp_width=11,
    bias="all",
    norm="layer",
    inputs=Patches(5, (3, 4), class_token=True),
    classes=7,
)
ARCHITECTURES = {
    "everything": EVERYTHING,
    "not causal": replace(EVERYTHING, causal=False),
    "image": IMAGE,
    "stored table": uniform(pe="sinusoidal", stored_table=True, width=18, heads=3, vocab=19, tied=True, positions=17),
    "table": uniform(pe="sinusoidal", width=18, heads=3, vocab=19, classes=5, pooling="last", post_norm=True),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("generic", [False, True])
def test_initialised_models_run(name: str, generic: bool) -> None:
    a = ARCHITECTURES[name]
    parameters = initialise(a, seed=5, generic=generic)
    check(a, parameters)
    inputs = random_inputs(a, 3, seed=1)
    out = forward(a, parameters, inputs)
    assert torch.isfinite(out).all()
    assert (
        difference(
            forward(
                a,
                initialise(a, seed=5, dtype=torch.float64, generic=generic),
                inputs.to(out.dtype) if inputs.is_floating_point() else inputs,
            ).float(),
            out,
        )
        < 1e-4
    )
    assert difference(forward(a, initialise(a, seed=6, generic=generic), inputs), out) > 0.1


def test_initialise_scales() -> None:
    norm = Norm("rms", offset=0.25)
    layer = Layer(
        Attention(6, 3, 20, 20, RelativeBias(), qk_norm="head", qk_norm_offset=0.5, output_bias=True),
        Experts(5, 2, MLP(300, "gelu", up_bias=True)),
        norm,
        norm,
    )
    a = Architecture(200, (layer,) * 2, Tokens(1000), LanguageModel(bias=True), LearnedPositions(300), final_norm=norm)
    t = initialise(a, seed=3, dtype=torch.float64)
    expected = {"embed.tokens": 0.02, "embed.positions": 0.02, "head": 200**-0.5, "layers.0.mlp.router": 200**-0.5}
    expected |= {f"layers.0.attention.{x}": 200**-0.5 for x in "qkv"} | {"layers.1.attention.o": (120 * 4) ** -0.5}
    expected |= {"layers.0.mlp.up": 200**-0.5, "layers.0.mlp.down": (300 * 4) ** -0.5}
    for name, deviation in expected.items():
        assert float(t[name].std()) == pytest.approx(deviation, rel=0.1), name
    for name in ("head_bias", "layers.0.attention.o_bias", "layers.0.mlp.up_bias", "layers.0.attention.position_bias"):
        assert not t[name].any(), name
    for name in ("final_norm.gain", "layers.0.mlp_norm.gain"):
        assert torch.equal(t[name], torch.full_like(t[name], 0.75)), name
    assert torch.equal(t["layers.1.attention.k_gain"], torch.full((20,), 0.5, dtype=torch.float64))

    generic = initialise(a, seed=3, dtype=torch.float64, generic=True)
    for name, tensor in generic.items():
        assert tensor.unique().numel() == tensor.numel(), name
    assert float(generic["layers.1.attention.o"].std()) == pytest.approx(120**-0.5, rel=0.1)
    assert float(generic["embed.tokens"].std()) == pytest.approx(1, rel=0.1)
    gain = generic["final_norm.gain"] + 0.25
    assert 0.5 < float(gain.min()) < 0.7
    assert 1.3 < float(gain.max()) < 1.5

    image = initialise(IMAGE, dtype=torch.float64)
    assert float(image["embed.patches"].std()) == pytest.approx(5**-0.5, rel=0.2)
    assert image["embed.class_token"].any()
    assert not image["embed.patches_bias"].any()


def test_sinusoidal_table_is_added_or_stored() -> None:
    table = sinusoidal_table(Sinusoidal(7, base=50.0), 6)
    assert table.dtype == torch.float64
    assert table[5, 2].item() == pytest.approx(math.sin(5 * 50 ** (-2 / 6)))
    assert table[5, 5].item() == pytest.approx(math.cos(5 * 50 ** (-4 / 6)))
    stored = ARCHITECTURES["stored table"]
    t = initialise(stored, dtype=torch.float64)
    assert torch.equal(t["embed.positions"], sinusoidal_table(stored.positions, 18))
    fixed = replace(stored, positions=replace(stored.positions, stored=False))
    without = {k: v for k, v in t.items() if k != "embed.positions"}
    ids = random_inputs(stored, 2, length=9)
    assert difference(forward(fixed, without, ids), forward(stored, t, ids)) < 1e-13
    assert difference(forward(replace(stored, positions=LearnedPositions(17, 1)), t, ids), forward(stored, t, ids)) > 1e-3


def test_types_default_to_zero() -> None:
    t = initialise(EVERYTHING, generic=True)
    ids = random_inputs(EVERYTHING, 2)
    zero = forward(EVERYTHING, t, ids, types=torch.zeros_like(ids))
    assert torch.equal(forward(EVERYTHING, t, ids), zero)
    assert difference(forward(EVERYTHING, t, ids, types=torch.ones_like(ids)), zero) > 0.01


def test_padding_on_the_right_is_invisible_only_to_a_causal_model() -> None:
    for a in (EVERYTHING, replace(EVERYTHING, causal=False)):
        t = initialise(a, generic=True, dtype=torch.float64)
        ids = random_inputs(a, 2, length=17)
        short, long = forward(a, t, ids[:, :11]), forward(a, t, ids)[:, :11]
        assert (difference(short, long) < 1e-12) == a.causal


def test_grid_coordinates() -> None:
    """Transposing the grid with its frequencies changes nothing, and the class token stands at the origin."""
    a = replace(IMAGE, outputs=StreamOutput())
    t = {k: v for k, v in initialise(IMAGE, generic=True, dtype=torch.float64).items() if not k.startswith("head")}
    x = random_inputs(a, 2, dtype=torch.float64)

    def encoded(b: Architecture, rotary: Rotary) -> Architecture:
        return replace(b, layers=tuple(replace(layer, attention=replace(layer.attention, positions=rotary)) for layer in b.layers))

    rotary = a.layers[0].attention.positions
    out = forward(a, t, x)
    order = torch.arange(12).reshape(3, 4).T.flatten()
    transposed = replace(a, inputs=replace(a.inputs, grid=(4, 3)))
    moved = forward(transposed, t, x[:, order])
    assert difference(moved[:, 0], out[:, 0]) > 1e-3
    exchanged = Rotary(((0.0, 0.7), (0.4, 0.0), (0.1, -0.2)))
    # The third plane turns backwards: the same plane with its two lanes exchanged.
    swap = torch.tensor([0, 1, 5, 3, 4, 2, *range(6, 12)])
    names = [f"layers.{i}.attention.{x}" for i in range(2) for x in ("q", "q_bias", "k", "k_bias")]
    turned = t | {name: t[name][..., swap] for name in names}
    moved = forward(encoded(transposed, exchanged), turned, x[:, order])
    assert difference(moved[:, 0], out[:, 0]) < 1e-12
    assert difference(moved[:, 1:], out[:, 1:][:, order]) < 1e-12

    # A first patch that embeds to the class token cannot be told from it on the grid, but can be in the sequence.
    same = t | {"embed.class_token": x[0, 0] @ t["embed.patches"] + t["embed.patches_bias"]}
    out = forward(a, same, x[:1])
    assert difference(out[:, 0], out[:, 1]) < 1e-12
    out = forward(encoded(a, Rotary(((0.7,), (0.4,), (0.2,)))), same, x[:1])
    assert difference(out[:, 0], out[:, 1]) > 1e-3
    assert rotary.axes == 2


def test_taps_see_what_the_model_computes() -> None:
    a, seen = EVERYTHING, {}
    t = initialise(a, generic=True, dtype=torch.float64)
    ids = random_inputs(a, 2, length=13)
    logits = forward(a, t, ids, tap=seen.__setitem__)
    shapes = {"q": (2, 13, 3, 2, 10), "k": (2, 13, 3, 10), "v": (2, 13, 3, 7), "heads": (2, 13, 3, 2, 7)}
    for name, shape in shapes.items():
        assert seen[f"layers.0.attention.{name}"].shape == shape
    sites = {"embed.output", "final.input"}
    for i in range(4):
        sites |= {f"layers.{i}.attention.{x}" for x in ("input", "q", "k", "v", "heads", "output")}
        sites |= {f"layers.{i}.mlp.{x}" for x in ("input", "hidden", "output")} | {f"layers.{i}.output"}
    assert set(seen) == sites
    assert difference(seen["final.input"] @ t["head"] + t["head_bias"], logits) < 1e-13
    for i in range(4):
        p = f"layers.{i}.attention"
        assert difference(attention(a, i, t, seen[f"{p}.input"]), seen[f"{p}.output"]) < 1e-13
        wrote = torch.einsum("blkgo,kgod->bld", seen[f"{p}.heads"], t[f"{p}.o"]) + t.get(f"{p}.o_bias", 0)
        assert difference(wrote, seen[f"{p}.output"]) < 1e-13
    # Queries are tapped behind the QK-norm, whose gain is offset + tensor.
    rms = (seen["layers.0.attention.q"] / (1 + t["layers.0.attention.q_gain"])).square().mean(-1)
    assert torch.allclose(rms, torch.ones_like(rms), atol=1e-4)
    assert seen["layers.0.mlp.hidden"].shape == (2, 13, 5, 9)
    assert difference(seen["layers.2.mlp.hidden"] @ t["layers.2.mlp.down"], seen["layers.2.mlp.output"]) < 1e-13
    assert torch.equal(seen["layers.1.mlp.input"], seen["layers.1.attention.input"])
    assert torch.equal(
        seen["layers.1.attention.v"],
        (seen["layers.1.attention.input"] @ t["layers.1.attention.v"].flatten(1)).reshape(2, 13, 2, 4) + t["layers.1.attention.v_bias"],
    )


def test_gradients_reach_every_tensor() -> None:
    for a in (EVERYTHING, IMAGE):
        t = {k: v.requires_grad_() for k, v in initialise(a, generic=True, dtype=torch.float64).items()}
        forward(a, t, random_inputs(a, 3, dtype=torch.float64)).square().sum().backward()
        for name, tensor in t.items():
            assert tensor.grad is not None, name
            assert tensor.grad.any(), name


# PyTorch's own, on the first use of forward differentiation.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_function_transforms() -> None:
    for a in (EVERYTHING, IMAGE):
        models = [initialise(a, seed=s, generic=True, dtype=torch.float64) for s in range(3)]
        stacked = {k: torch.stack([m[k] for m in models]) for k in models[0]}
        inputs = random_inputs(a, 2, dtype=torch.float64)
        with sdpa_kernel(SDPBackend.MATH):
            batched = torch.func.vmap(lambda t, a=a, inputs=inputs: forward(a, t, inputs))(stacked)
            assert difference(batched, torch.stack([forward(a, m, inputs) for m in models])) < 1e-12

            def outputs(q: Tensor, a: Architecture = a, inputs: Tensor = inputs, model: dict[str, Tensor] = models[0]) -> Tensor:
                return forward(a, model | {"layers.1.attention.q": q}, inputs).flatten()[-5:]

            q = models[0]["layers.1.attention.q"]
            jacobian = torch.func.jacrev(outputs)(q)
            step = torch.randn(q.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            slope = (outputs(q + 1e-5 * step) - outputs(q - 1e-5 * step)) / 2e-5
            assert difference((jacobian * step).flatten(1).sum(1), slope) < 1e-6
            assert difference(torch.func.jvp(outputs, (q,), (step,))[1], slope) < 1e-6


def test_random_inputs() -> None:
    a = ARCHITECTURES["everything"]
    assert random_inputs(a, 5).shape == (5, 18)
    assert random_inputs(uniform(pe="none"), 2).shape == (2, 64)
    assert torch.equal(random_inputs(a, 5, length=7, seed=2), random_inputs(a, 5, length=7, seed=2))
    assert not torch.equal(random_inputs(a, 5, length=7, seed=2), random_inputs(a, 5, length=7, seed=3))
    assert random_inputs(a, 500).unique().numel() == 23
    assert random_inputs(IMAGE, 2, dtype=torch.float64).shape == (2, 12, 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: run(EVERYTHING, torch.full((1, 3), 23)), "token ids: expected ids from 0 to 22, got 23"),
        (lambda: run(EVERYTHING, torch.full((1, 3), -1)), "got -1"),
        (lambda: run(EVERYTHING, torch.zeros(1, 3)), "expected dtype torch.int64, got torch.float32"),
        (lambda: run(EVERYTHING, torch.zeros(3, dtype=torch.int64)), r"expected shape \[batch, length\], got \[3\]"),
        (lambda: run(EVERYTHING, torch.zeros(1, 0, dtype=torch.int64)), "at least one token"),
        (lambda: run(EVERYTHING, torch.zeros(1, 19, dtype=torch.int64)), "19 tokens is longer than the position table, which has 18"),
        (
            lambda: run(EVERYTHING, torch.zeros(1, 3, dtype=torch.int64), torch.full((1, 3), 3)),
            "token types: expected ids from 0 to 2, got 3",
        ),
        (
            lambda: run(EVERYTHING, torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)),
            "token types: expected the shape",
        ),
        (lambda: run(ARCHITECTURES["table"], torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3)), "has none"),
        (lambda: run(IMAGE, torch.zeros(2, 13, 5)), r"expected shape \[batch, 12, 5\] for the grid \(3, 4\), got \[2, 13, 5\]"),
        (lambda: run(IMAGE, torch.zeros(2, 12, 5, dtype=torch.int64)), "floating"),
        (lambda: run(IMAGE, torch.zeros(2, 12, 5), torch.zeros(2, 12)), "patches, which have none"),
        (lambda: attention(IMAGE, 0, initialise(IMAGE), torch.zeros(2, 12, 20)), "expected 13 positions"),
        (lambda: attention(IMAGE, 0, initialise(IMAGE), torch.zeros(2, 13, 19)), r"\[batch, length, 20\]"),
        (lambda: random_inputs(IMAGE, 2, length=12), "leave out length"),
        (lambda: random_inputs(EVERYTHING, 2, length=0), "at least one token"),
        (lambda: sinusoidal_table(Sinusoidal(4), 5), "even width"),
    ],
)
def test_errors(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(CosetError, match=message):
        call()


def run(a: Architecture, inputs: Tensor, types: Tensor | None = None) -> Tensor:
    return forward(a, initialise(a), inputs, types=types)
