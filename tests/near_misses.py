"""Models that are almost another one, and are not: every kind of slip that a comparison must see."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from coset.architecture import Architecture, Rotary
from coset.groups import RotaryCommutant
from coset.parameters import tensors
from coset.symmetries import qk_group
from coset.transformer import forward, initialise, random_inputs

Model = Mapping[str, Tensor]


def _copy(p: Model) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in p.items()}


def visible_weights(a: Architecture) -> list[str]:
    """Tensors of which every entry matters (matrices and embeddings, no biases, no tables with rows that are never read)."""
    return [n for n, s in tensors(a).items() if len(s.axes) > 1 and not n.endswith("bias") and n not in ("embed.positions", "embed.types")]


def one_weight(a: Architecture, p: Model, draw: random.Random) -> dict[str, Tensor] | None:
    """One weight 0.1 % larger."""
    out = _copy(p)
    name = draw.choice(visible_weights(a))
    out[name].view(-1)[draw.randrange(out[name].numel())] *= 1.001
    return out


def heads_across_groups(a: Architecture, p: Model, draw: random.Random) -> dict[str, Tensor] | None:
    """Two query heads of different KV groups swapped, with their outputs, but not the keys and values."""
    i = draw.randrange(len(a.layers))
    att = a.layers[i].attention
    if att.kv_heads < 2:
        return None
    one, two = draw.sample(range(att.kv_heads), 2)
    x, y = draw.randrange(att.group), draw.randrange(att.group)
    out = _copy(p)
    for name, axis in (("q", 1), ("q_bias", 0), ("o", 0), ("q_gain", 0)):
        full = f"layers.{i}.attention.{name}"
        if full in out and not (name == "q_gain" and att.qk_norm == "head"):
            heads = out[full].movedim((axis, axis + 1), (0, 1))
            kept = heads[one, x].clone()
            heads[one, x] = heads[two, y]
            heads[two, y] = kept
    return out


def rotary_pairing(a: Architecture, p: Model, draw: random.Random) -> dict[str, Tensor] | None:
    """One KV head in the other pairing of rotary lanes."""
    i = draw.randrange(len(a.layers))
    att = a.layers[i].attention
    if not isinstance(att.positions, Rotary) or len(att.planes) < 2 or att.qk_norm == "all":
        return None
    n = att.positions.width
    order = torch.arange(att.head_dim)
    order[:n] = (
        torch.arange(n).reshape(2, n // 2).mT.reshape(-1)
        if att.positions.pairing == "half"
        else torch.arange(n).reshape(-1, 2).mT.reshape(-1)
    )
    j = draw.randrange(att.kv_heads)
    out = _copy(p)
    for name, axis in (("q", 1), ("k", 1), ("q_bias", 0), ("k_bias", 0)):
        full = f"layers.{i}.attention.{name}"
        if full in out:
            heads = out[full].movedim(axis, 0)
            heads[j] = heads[j][..., order]
    return out


def bias_dropped(a: Architecture, p: Model, draw: random.Random) -> dict[str, Tensor] | None:
    """One bias that outputs depend on set to zero."""
    names = []
    for name in tensors(a):
        if not name.endswith("bias") or name.endswith("position_bias"):
            continue
        if name.endswith("k_bias"):
            group = qk_group(a.layers[int(name.split(".")[1])].attention)
            if not isinstance(group, RotaryCommutant) or not group.planes:
                continue
        if name == "embed.patches_bias":
            continue
        if bool(p[name].any()):
            names.append(name)
    if not names:
        return None
    name = draw.choice(names)
    return {**_copy(p), name: torch.zeros_like(p[name])}


def other_seed(a: Architecture, p: Model, draw: random.Random) -> dict[str, Tensor] | None:
    """Another draw."""
    fresh = initialise(a, seed=draw.randrange(10**6) + 10**6, generic=True, dtype=torch.float64)
    return {name: x.to(p[name].dtype) for name, x in fresh.items()}


def fine_tuned(a: Architecture, p: Model, draw: random.Random) -> dict[str, Tensor] | None:
    """One step of gradient descent that changes the weights by 0.1 to 1 %."""
    own = {name: x.to(torch.float64).clone().requires_grad_() for name, x in p.items()}
    inputs = random_inputs(a, 3, seed=draw.randrange(10**6), dtype=torch.float64)
    out = forward(a, own, inputs)
    target = torch.randint(out.shape[-1], out.shape[:-1], generator=torch.Generator().manual_seed(draw.randrange(10**6)))
    loss = torch.nn.functional.cross_entropy(out.flatten(0, -2), target.flatten())
    grads = torch.autograd.grad(loss, list(own.values()), allow_unused=True, materialize_grads=True)
    size = sum(float(x.detach().square().sum()) for x in own.values()) ** 0.5
    step = sum(float(g.square().sum()) for g in grads) ** 0.5
    rate = 10 ** draw.uniform(-3, -2) * size / step
    return {name: (x.detach() - rate * g).to(p[name].dtype) for (name, x), g in zip(own.items(), grads, strict=True)}


def gain_changed(a: Architecture, p: Model, draw: random.Random) -> dict[str, Tensor] | None:
    """One norm's gain 1 % larger on one lane."""
    names = [n for n in p if n.endswith(".gain")]
    if not names:
        return None
    out = _copy(p)
    name = draw.choice(names)
    lane = draw.randrange(len(out[name]))
    out[name][lane] += 0.01 * float(out[name].abs().mean())
    return out


KINDS: dict[str, Callable[[Architecture, Model, random.Random], dict[str, Tensor] | None]] = {
    "one weight": one_weight,
    "heads across groups": heads_across_groups,
    "rotary pairing": rotary_pairing,
    "bias dropped": bias_dropped,
    "other seed": other_seed,
    "fine-tuned": fine_tuned,
    "gain changed": gain_changed,
}
