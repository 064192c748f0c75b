"""The supported model families, by ``model_type``: one declarative file each."""

from coset.checkpoint.families import (
    bert,
    bloom,
    gemma,
    gpt2,
    gpt_neox,
    gptj,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    roberta,
    vit,
)
from coset.checkpoint.families.base import Family, Head, Layout

_MODULES = (gpt2, gpt_neox, gptj, llama, mistral, qwen2, qwen3, gemma, phi3, olmo2, bloom, mixtral, bert, roberta, vit)

FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}

__all__ = ["FAMILIES", "Family", "Head", "Layout"]
