"""A small config of every family in its usual form: what ``coset certify --family`` measures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coset.architecture import Architecture
from coset.checkpoint.config import Config
from coset.checkpoint.families import FAMILIES
from coset.errors import CosetError

_TEXT = {"vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64}
_WIDE = {"intermediate_size": 48, "layer_norm_eps": 1e-5}
_ROPE = _TEXT | {"num_key_value_heads": 2, "intermediate_size": 48, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "hidden_act": "silu"}
_GPT = {"vocab_size": 97, "n_embd": 24, "n_layer": 1, "n_head": 4, "n_positions": 64, "layer_norm_epsilon": 1e-5}
_ENCODER = _TEXT | _WIDE | {"type_vocab_size": 2, "hidden_act": "gelu", "num_labels": 5}
_IMAGE = {"image_size": 16, "patch_size": 4, "num_channels": 3, "qkv_bias": True}

_CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", _GPT | {"activation_function": "gelu_new"}),
    "gpt_neox": ("GPTNeoXForCausalLM", _TEXT | _WIDE | {"hidden_act": "gelu", "rotary_pct": 0.5, "rotary_emb_base": 10_000}),
    "gptj": ("GPTJForCausalLM", _GPT | {"activation_function": "gelu_new", "rotary_dim": 4}),
    "llama": ("LlamaForCausalLM", _ROPE),
    "mistral": ("MistralForCausalLM", _ROPE | {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", _ROPE),
    "qwen3": ("Qwen3ForCausalLM", _ROPE | {"head_dim": 6}),
    "gemma": ("GemmaForCausalLM", _ROPE | {"head_dim": 6, "hidden_activation": "gelu_pytorch_tanh"}),
    "phi3": ("Phi3ForCausalLM", _ROPE | {"original_max_position_embeddings": 64}),
    "olmo2": ("Olmo2ForCausalLM", _ROPE),
    "bloom": ("BloomForCausalLM", {"vocab_size": 97, "hidden_size": 24, "n_layer": 1, "n_head": 4, "layer_norm_epsilon": 1e-5}),
    "mixtral": ("MixtralForCausalLM", _ROPE | {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "bert": ("BertModel", _ENCODER),
    "roberta": ("RobertaModel", _ENCODER),
    "vit": ("ViTForImageClassification", _ENCODER | _IMAGE),
}


def typical(family: str) -> Architecture:
    """A small architecture of a family, by ``model_type``, in its most common class.

    Raises
    ------
    CosetError
        If the family is not supported; the message lists those that are.
    """
    if family not in _CONFIGS:
        raise CosetError(f"family: {family!r} is not supported (supported: {', '.join(sorted(_CONFIGS))})")
    name, values = _CONFIGS[family]
    config = Config(f"typical {family}", {**values, "model_type": family, "architectures": [name]})
    return FAMILIES[family].architecture(config, FAMILIES[family].heads[name].outputs(config))
