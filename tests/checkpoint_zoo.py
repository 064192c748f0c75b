"""Tiny random checkpoints of every family, made by transformers: odd sizes, every parameter random (gains and biases too)."""

from pathlib import Path
from typing import Any

import torch
import transformers as T

VOCABULARY, LENGTH = 97, 150
COMMON = {"bos_token_id": None, "eos_token_id": None}
WIDE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 54,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 160,
} | COMMON
ROPE = WIDE | {"num_key_value_heads": 3, "head_dim": 10, "intermediate_size": 77, "pad_token_id": None}
SQUARE = {"hidden_size": 60}
ENCODER = WIDE | SQUARE | {"intermediate_size": 77, "type_vocab_size": 3, "num_labels": 5}
GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 60,
    "n_layer": 2,
    "n_head": 6,
    "n_positions": 160,
    "pad_token_id": None,
    "num_labels": 5,
} | COMMON
IMAGE = SQUARE | {
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 77,
    "image_size": [52, 44],
    "patch_size": [4, 4],
    "num_labels": 5,
}
LONG = {"short_factor": [1.0, 1.1, 1.3, 1.7, 2.0], "long_factor": [1.0, 1.5, 2.5, 4.0, 8.0]}


def _llama(**changes: Any) -> tuple[Any, Any]:
    return T.LlamaForCausalLM, T.LlamaConfig(**(ROPE | changes))


def _scaled(**parameters: Any) -> tuple[Any, Any]:
    return _llama(rope_parameters={"rope_theta": 500.0} | parameters)


# model_type -> the plain case and its variants
ZOO: dict[str, dict[str, Any]] = {
    "gpt2": {
        "plain": lambda: (T.GPT2LMHeadModel, T.GPT2Config(**GPT)),
        "untied": lambda: (T.GPT2LMHeadModel, T.GPT2Config(**GPT, tie_word_embeddings=False)),
        "scales": lambda: (T.GPT2LMHeadModel, T.GPT2Config(**GPT, n_inner=77, scale_attn_by_inverse_layer_idx=True)),
        "unscaled": lambda: (T.GPT2LMHeadModel, T.GPT2Config(**GPT, scale_attn_weights=False, activation_function="relu")),
        "base": lambda: (T.GPT2Model, T.GPT2Config(**GPT)),
        "classes": lambda: (T.GPT2ForSequenceClassification, T.GPT2Config(**GPT)),
        "tokens": lambda: (T.GPT2ForTokenClassification, T.GPT2Config(**GPT)),
    },
    "gpt_neox": {
        "plain": lambda: (T.GPTNeoXForCausalLM, T.GPTNeoXConfig(**(WIDE | SQUARE), intermediate_size=77)),
        "half": lambda: (
            T.GPTNeoXForCausalLM,
            T.GPTNeoXConfig(**(WIDE | SQUARE), intermediate_size=77, rotary_pct=0.6, rotary_emb_base=300, use_parallel_residual=False),
        ),
        "no_bias": lambda: (T.GPTNeoXForCausalLM, T.GPTNeoXConfig(**(WIDE | SQUARE), intermediate_size=77, attention_bias=False)),
        "tied": lambda: (T.GPTNeoXForCausalLM, T.GPTNeoXConfig(**(WIDE | SQUARE), intermediate_size=77, tie_word_embeddings=True)),
    },
    "gptj": {
        "plain": lambda: (T.GPTJForCausalLM, T.GPTJConfig(**GPT, rotary_dim=6)),
        "base": lambda: (T.GPTJModel, T.GPTJConfig(**GPT, rotary_dim=10, n_inner=77)),
    },
    "llama": {
        "plain": lambda: _llama(),
        "tied": lambda: _llama(tie_word_embeddings=True),
        "biases": lambda: _llama(attention_bias=True, mlp_bias=True, num_key_value_heads=1, hidden_act="gelu"),
        "linear": lambda: _scaled(rope_type="linear", factor=3.0),
        "dynamic": lambda: _scaled(rope_type="dynamic", factor=3.0),
        "yarn": lambda: _scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=40),
        "yarn_mscale": lambda: _scaled(
            rope_type="yarn", factor=4.0, original_max_position_embeddings=40, mscale=0.7, mscale_all_dim=0.3, beta_fast=20, truncate=False
        ),
        "llama3": lambda: _scaled(
            rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
        ),
        "longrope": lambda: _scaled(rope_type="longrope", factor=4.0, original_max_position_embeddings=155, **LONG),
        "base": lambda: (T.LlamaModel, T.LlamaConfig(**ROPE)),
        "classes": lambda: (T.LlamaForSequenceClassification, T.LlamaConfig(**ROPE, num_labels=5)),
        "regression": lambda: (T.LlamaForSequenceClassification, T.LlamaConfig(**ROPE, num_labels=1)),
    },
    "mistral": {
        "plain": lambda: (T.MistralForCausalLM, T.MistralConfig(**ROPE, sliding_window=37)),
        "no_window": lambda: (T.MistralForCausalLM, T.MistralConfig(**ROPE, sliding_window=None)),
    },
    "qwen2": {
        "plain": lambda: (T.Qwen2ForCausalLM, T.Qwen2Config(**ROPE)),
        "windows": lambda: (T.Qwen2ForCausalLM, T.Qwen2Config(**ROPE, use_sliding_window=True, sliding_window=37, max_window_layers=1)),
    },
    "qwen3": {
        "plain": lambda: (T.Qwen3ForCausalLM, T.Qwen3Config(**ROPE)),
        "biases": lambda: (T.Qwen3ForCausalLM, T.Qwen3Config(**ROPE, attention_bias=True, tie_word_embeddings=True)),
    },
    "gemma": {
        "plain": lambda: (T.GemmaForCausalLM, T.GemmaConfig(**ROPE)),
        "untied": lambda: (T.GemmaForCausalLM, T.GemmaConfig(**ROPE, tie_word_embeddings=False, hidden_act="gelu")),
    },
    "phi3": {
        "plain": lambda: (T.Phi3ForCausalLM, T.Phi3Config(**(ROPE | SQUARE), sliding_window=37)),
        "longrope": lambda: (
            T.Phi3ForCausalLM,
            T.Phi3Config(
                **(ROPE | SQUARE | {"max_position_embeddings": 500}),
                original_max_position_embeddings=155,
                rope_parameters={"rope_type": "longrope"} | LONG,
            ),
        ),
        "partial": lambda: (T.Phi3ForCausalLM, T.Phi3Config(**(ROPE | SQUARE), partial_rotary_factor=0.6)),
    },
    "olmo2": {
        "plain": lambda: (T.Olmo2ForCausalLM, T.Olmo2Config(**ROPE)),
        "biases": lambda: (T.Olmo2ForCausalLM, T.Olmo2Config(**ROPE, attention_bias=True)),
    },
    "bloom": {
        "plain": lambda: (T.BloomForCausalLM, T.BloomConfig(vocab_size=VOCABULARY, hidden_size=60, n_layer=2, n_head=6, **COMMON)),
        "base": lambda: (T.BloomModel, T.BloomConfig(vocab_size=VOCABULARY, hidden_size=60, n_layer=2, n_head=5, **COMMON)),
    },
    "mixtral": {
        "plain": lambda: (T.MixtralForCausalLM, T.MixtralConfig(**ROPE, num_local_experts=5, num_experts_per_tok=2)),
        "window": lambda: (T.MixtralForCausalLM, T.MixtralConfig(**ROPE, num_local_experts=3, num_experts_per_tok=3, sliding_window=37)),
    },
    "bert": {
        "plain": lambda: (T.BertForMaskedLM, T.BertConfig(**ENCODER)),
        "base": lambda: (T.BertModel, T.BertConfig(**ENCODER)),
        "classes": lambda: (T.BertForSequenceClassification, T.BertConfig(**ENCODER, hidden_act="gelu_new")),
        "pretraining": lambda: (T.BertForPreTraining, T.BertConfig(**ENCODER)),
        "causal": lambda: (T.BertLMHeadModel, T.BertConfig(**ENCODER, is_decoder=True)),
    },
    "roberta": {
        "plain": lambda: (T.RobertaForMaskedLM, T.RobertaConfig(**ENCODER)),
        "base": lambda: (T.RobertaModel, T.RobertaConfig(**ENCODER, pad_token_id=5)),
        "classes": lambda: (T.RobertaForSequenceClassification, T.RobertaConfig(**ENCODER)),
    },
    "vit": {
        "plain": lambda: (T.ViTForImageClassification, T.ViTConfig(**IMAGE)),
        "base": lambda: (T.ViTModel, T.ViTConfig(**IMAGE, qkv_bias=False)),
    },
}

CASES = [(family, case) for family, cases in ZOO.items() for case in cases]
PLAIN = [(family, "plain") for family in ZOO]


def build(family: str, case: str = "plain", dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """The transformers model, in evaluation mode, with every parameter random."""
    kind, config = ZOO[family][case]()
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the grouped kernel wants strides of 16 bytes, which odd widths lack
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape)
                parameter.copy_(0.15 * noise if parameter.ndim > 1 else parameter + 0.3 * noise)
    return model.to(dtype)


def saved(
    folder: Path, family: str, case: str = "plain", dtype: torch.dtype = torch.float32, shards: str | None = None, seed: int = 0
) -> Path:
    """A folder as save_pretrained writes it; `shards` is the largest size of one."""
    path = folder / f"{family}-{case}"
    build(family, case, dtype, seed).save_pretrained(path, **({} if shards is None else {"max_shard_size": shards}))
    return path
