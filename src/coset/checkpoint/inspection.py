"""What a checkpoint is, from its headers alone."""

from __future__ import annotations

from typing import Any

from coset.architecture import (
    Alibi,
    Architecture,
    Attention,
    Classifier,
    Experts,
    LanguageModel,
    LearnedPositions,
    Patches,
    RelativeBias,
    Rotary,
    Sinusoidal,
)
from coset.checkpoint.model import Model
from coset.parameters import count


def positional_encoding(architecture: Architecture) -> str:
    """The positional encoding in words."""
    parts = []
    if isinstance(architecture.positions, LearnedPositions):
        parts.append(f"learned table of {architecture.positions.count} positions")
    if isinstance(architecture.positions, Sinusoidal):
        parts.append(f"sinusoidal table of {architecture.positions.count} positions")
    kinds = dict.fromkeys(_relative(layer.attention) for layer in architecture.layers)
    parts += [k for k in kinds if k]
    return "; ".join(parts) or "none"


def _relative(attention: Attention) -> str:
    p = attention.positions
    if isinstance(p, Rotary):
        distinct = len(set(attention.plane_frequencies))
        still = len(attention.still_lanes)
        repeated = "" if distinct == len(attention.planes) else f", {distinct} distinct frequencies"
        partial = f", {still} lanes do not rotate" if still else ""
        return f"RoPE on {len(attention.planes)} planes ({p.pairing} pairing{repeated}{partial})"
    if isinstance(p, Alibi):
        return "ALiBi"
    return "learned bias per head" if isinstance(p, RelativeBias) else ""


def facts(model: Model) -> dict[str, Any]:
    """Architecture and files as plain data, with the keys ``architecture`` and ``files``."""
    a = model.architecture
    first = a.layers[0]
    attention, mlp = first.attention, first.mlp
    inner = mlp.mlp if isinstance(mlp, Experts) else mlp
    outputs = a.outputs
    if isinstance(outputs, LanguageModel):
        head = "language model, tied" if outputs.tied else "language model, untied"
    else:
        head = f"classifier, {outputs.classes} classes" if isinstance(outputs, Classifier) else "none (outputs the stream)"
    inputs = f"patches {a.inputs.grid}" if isinstance(a.inputs, Patches) else f"{a.inputs.vocabulary} tokens"
    stored = model.checkpoint.tensors
    return {
        "architecture": {
            "family": model.family,
            "class": model.head,
            "layers": len(a.layers),
            "width": a.width,
            "heads": attention.heads,
            "kv_heads": attention.kv_heads,
            "head_dim": attention.head_dim,
            "positional_encoding": positional_encoding(a),
            "norm": f"{first.attention_norm.kind}, {first.arrangement}" + (", parallel residual" if first.parallel else ""),
            "qk_norm": attention.qk_norm or "none",
            "mlp": f"{'gated ' if inner.gated else ''}{inner.activation}, width {inner.width}"
            + (f", {mlp.count} experts, {mlp.active} active" if isinstance(mlp, Experts) else ""),
            "inputs": inputs,
            "head": head,
            "layers_alike": len(set(a.layers)) == 1,
            "parameters": count(a),
        },
        "files": {
            "path": str(model.path),
            "shards": [shard.name for shard in model.checkpoint.shards],
            "tensors": len(stored),
            "bytes": sum(t.end - t.begin for t in stored.values()),
            "dtypes": sorted({t.dtype for t in stored.values()}),
            "invariants": list(model.invariants),
        },
    }
