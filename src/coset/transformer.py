"""The reference forward pass of an :class:`~coset.architecture.Architecture`, as pure functions of a parameter dict.

Everything is differentiable and follows the dtype of the parameters (float32 or float64). Rotary angles, ALiBi biases and sinusoidal tables
are computed in float64 and cast once.

Under `torch.func` (``vmap``, ``jacrev``, ``jacfwd``) open ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`` around the call: PyTorch's
fused attention has no batching rule and no forward derivative. Token ids are checked by value, so `vmap` can run over parameters and
patches but not over token ids; give those a batch axis.

Sites of `tap`
--------------
In forward order, each called once a pass with (site, tensor):

=================================== ===================================================================================================
``embed.output``                    the stream that enters the first layer [batch, length, width]
``layers.i.attention.input``        what queries, keys and values read: normalised in the pre-norm arrangement [batch, length, width]
``layers.i.attention.q``            queries after bias and QK-norm, before the rotation [batch, length, kv, query, qk]
``layers.i.attention.k``            keys, likewise [batch, length, kv, qk]
``layers.i.attention.v``            values [batch, length, kv, vo]
``layers.i.attention.heads``        outputs of the heads, before O [batch, length, kv, query, vo]
``layers.i.attention.output``       what O writes, bias included [batch, length, width]
``layers.i.mlp.input``              what the MLP, or the router and the experts, read [batch, length, width]
``layers.i.mlp.hidden``             after activation and gating [batch, length, neuron], of every expert [batch, length, expert, neuron]
``layers.i.mlp.output``             what the MLP writes, bias included [batch, length, width]
``layers.i.output``                 the stream behind the layer [batch, length, width]
``final.input``                     what the head reads, behind the final norm; a classifier reads the pooled stream [batch, width]
=================================== ===================================================================================================
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from coset.architecture import (
    MLP,
    Activation,
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
)
from coset.errors import CosetError
from coset.parameters import Parameters, TensorSpec, norms, tensors

Tap = Callable[[str, Tensor], None]
"""Receives (site, tensor) for every intermediate value in the list above."""

Cache = dict[str, Tensor]
"""Keys (rotated) [batch, length, kv, qk] and values [batch, length, kv, vo] of the tokens read so far, by site; starts empty."""


# --- initialisation -------------------------------------------------------------------------------------------------


def sinusoidal_table(encoding: Sinusoidal, width: int) -> Tensor:
    r"""The table ``P[t, 2j] = sin(t / base^(2j/width))``, ``P[t, 2j+1] = cos(t / base^(2j/width))``.

    Returns
    -------
    Tensor
        [count, width], float64; callers cast.

    Raises
    ------
    CosetError
        If `width` is odd.
    """
    if width % 2:
        raise CosetError(f"sinusoidal table: expected an even width, got {width}")
    time = torch.arange(encoding.count, dtype=torch.float64)
    rates = encoding.base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(time, rates)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


def initialise(
    architecture: Architecture, *, seed: int = 0, dtype: torch.dtype = torch.float32, generic: bool = False
) -> dict[str, Tensor]:
    r"""Random parameters to train from, or a generic point of parameter space.

    To train from: linear maps are normal with variance ``1/fan_in``, those that write to the stream from inside a layer divided by
    :math:`\sqrt{2 \cdot \text{layers}}`; embeddings, position tables and the class token have standard deviation 0.02; multiplied gains
    are 1; biases are 0; a stored sinusoidal table holds the table.

    With `generic` no value is special: linear maps have variance ``1/fan_in``, embeddings and tables (a stored sinusoidal one too) unit
    variance, multiplied gains lie in (0.5, 1.5), and biases have standard deviation 0.5.

    Parameters
    ----------
    seed
        Drawn in float64 on the CPU, then cast: the same seed gives the same model in every dtype.

    Returns
    -------
    dict[str, Tensor]
        Exactly the tensors of :func:`coset.parameters.tensors`.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(spec: TensorSpec, deviation: float) -> Tensor:
        return torch.randn(spec.shape, generator=generator, dtype=torch.float64) * deviation

    offsets = {f"{name}.gain": norm.offset for name, norm in norms(architecture).items()}
    for i, layer in enumerate(architecture.layers):
        offsets |= {f"layers.{i}.attention.{x}_gain": layer.attention.qk_norm_offset for x in "qk"}

    def draw(spec: TensorSpec) -> Tensor:
        if spec.name in offsets:
            spread = torch.rand(spec.shape, generator=generator, dtype=torch.float64) - 0.5
            return 1 - offsets[spec.name] + (spread if generic else 0 * spread)
        fan_in = _fan_in(spec)
        if fan_in is not None:
            writes = spec.layer is not None and _variance(spec, "stream") == 1
            depth = 2 * len(architecture.layers) if writes and not generic else 1
            return normal(spec, (fan_in * depth) ** -0.5)
        if spec.name == "embed.positions" and isinstance(architecture.positions, Sinusoidal) and not generic:
            return sinusoidal_table(architecture.positions, architecture.width)
        if spec.name == "embed.class_token" or (spec.layer is None and len(spec.axes) == 2):
            return normal(spec, 1.0 if generic else 0.02)
        return normal(spec, 0.5 if generic else 0.0)

    return {name: draw(spec).to(dtype) for name, spec in tensors(architecture).items()}


def _variance(spec: TensorSpec, space: str) -> int:
    at = spec.axis(space)
    return 0 if at is None else spec.axes[at].variance


def _fan_in(spec: TensorSpec) -> int | None:
    """Number of inputs that a linear map sums over: its dual axes, or the patch. None for tables and vectors."""
    if _variance(spec, "stream") == -1:
        return next(a.size for a in spec.axes if a.space == "stream")
    inputs = [a for a in spec.axes if a.space not in ("stream", "expert")]
    writes = _variance(spec, "stream") == 1 and any(a.variance == -1 or a.space == "patch" for a in inputs)
    return math.prod(a.size for a in inputs) if writes else None


def require_no_length(patches: Patches, length: int | None) -> None:
    """Raise if a length is asked for where the grid of patches is one."""
    if length is not None:
        raise CosetError(f"length: the grid {patches.grid} fixes the number of patches; leave out length {length}")


def random_inputs(
    architecture: Architecture, samples: int, *, length: int | None = None, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Random inputs: uniform token ids [samples, length] (int64), or standard normal patches [samples, patches, features].

    Parameters
    ----------
    length
        Tokens in each sample; None for the longest that the architecture allows, at most 64. Patches have the length of their grid.
    dtype
        Of patches; token ids are int64.

    Raises
    ------
    CosetError
        If `length` is not positive, exceeds what the architecture allows, or is given for patches.
    """
    generator = torch.Generator().manual_seed(seed)
    if isinstance(architecture.inputs, Patches):
        require_no_length(architecture.inputs, length)
        shape = (samples, math.prod(architecture.inputs.grid), architecture.inputs.features)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    longest = architecture.length
    if length is None:
        length = 64 if longest is None else min(64, longest)
    _check_length(architecture, length)
    return torch.randint(architecture.inputs.vocabulary, (samples, length), generator=generator)


# --- the forward pass -----------------------------------------------------------------------------------------------


def forward(
    architecture: Architecture,
    parameters: Parameters,
    inputs: Tensor,
    *,
    types: Tensor | None = None,
    tap: Tap | None = None,
    cache: Cache | None = None,
) -> Tensor:
    """Outputs of the model.

    Parameters
    ----------
    parameters
        Canonical tensors; not checked here, see :func:`coset.parameters.check`.
    inputs
        Token ids [batch, length] (int64), or patches [batch, patches, features] in row-major order of the grid.
    types
        Token types [batch, length] (int64) where the architecture has them; None for type 0 everywhere.
    tap
        Called with (site, tensor) for intermediate values; the sites are listed at the top of this module.
    cache
        Of a causal model of tokens: what it has read before `inputs`, which continue there. Grows by what is read now.

    Returns
    -------
    Tensor
        Logits [batch, length, vocabulary] of a language model, logits [batch, classes] of a classifier, or the stream
        [batch, length, width], behind the final norm, of a model without a head. A class token counts in `length`.

    Raises
    ------
    CosetError
        If token ids or types are out of range or of the wrong dtype or shape, a sequence is longer than the position table, or patches do
        not have the shape of the grid; or there is a cache and the model is not causal, or reads patches.
    """
    tap = _ignore if tap is None else tap
    if cache is not None and (not architecture.causal or isinstance(architecture.inputs, Patches)):
        raise CosetError("cache: only a causal model of tokens can continue from what it has read; leave the cache out")
    start = 0 if not cache else cache["layers.0.attention.k"].shape[1]
    x = _embed(architecture, parameters, inputs, types, start)
    tap("embed.output", x)
    for i in range(len(architecture.layers)):
        x = run_layer(architecture, i, parameters, x, tap, cache)
        tap(f"layers.{i}.output", x)
    x = _norm(architecture.final_norm, "final_norm", parameters, x)
    return _head(architecture, parameters, x, tap)


def attention(architecture: Architecture, index: int, parameters: Parameters, x: Tensor, tap: Tap | None = None) -> Tensor:
    r"""The attention of layer `index` alone, ``sum_i softmax(q_i R (k_i R)^T * scale + bias) v_i O_i + b_O``.

    Positions are those of the whole model. Token positions count from 0. On a patch grid, rotary planes with one coordinate turn with the
    index in the sequence, where a class token is number 0; planes with a coordinate for every axis turn with the patch's place on the
    grid, which starts at zero with or without a class token, and the class token stands at all zeros. ALiBi, relative bias, causal mask and
    window always go by the index in the sequence. A window of w leaves visible the keys at distance below w, on both sides if the
    model is not causal.

    Parameters
    ----------
    x
        The input of this layer's linear maps, already normalised [batch, length, width].
    tap
        As in :func:`forward`; sites of this attention only.

    Returns
    -------
    Tensor
        [batch, length, width]

    Raises
    ------
    CosetError
        If `x` does not have the architecture's width, or has more positions than the architecture allows.
    """
    if x.ndim != 3 or x.shape[-1] != architecture.width:
        raise CosetError(f"attention input: expected shape [batch, length, {architecture.width}], got {list(x.shape)}")
    _check_length(architecture, x.shape[1])
    return _attention(architecture, index, parameters, x, _ignore if tap is None else tap, None)


def _ignore(site: str, value: Tensor) -> None:
    """The tap of a caller who wants none."""


def _check_length(architecture: Architecture, length: int) -> None:
    longest = architecture.length
    if isinstance(architecture.inputs, Patches):
        if length != longest:
            raise CosetError(f"inputs: expected {longest} positions for the grid {architecture.inputs.grid}, got {length}")
    elif length < 1:
        raise CosetError(f"inputs: expected at least one token in a sequence, got length {length}")
    elif longest is not None and length > longest:
        raise CosetError(
            f"inputs: sequence of {length} tokens is longer than the position table, which has {longest}; shorten the sequence"
        )


def _check_ids(what: str, ids: Tensor, count: int) -> None:
    if ids.dtype != torch.int64:
        raise CosetError(f"{what}: expected dtype torch.int64, got {ids.dtype}")
    if ids.numel() == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= count:
        raise CosetError(f"{what}: expected ids from 0 to {count - 1}, got {low if low < 0 else high}")


def _embed(a: Architecture, parameters: Parameters, inputs: Tensor, types: Tensor | None, start: int) -> Tensor:
    if isinstance(a.inputs, Tokens):
        x = _embed_tokens(a, a.inputs, parameters, inputs, types, start)
    else:
        if types is not None:
            raise CosetError("token types: this architecture reads patches, which have none")
        x = _embed_patches(a.inputs, parameters, inputs)
    end = start + x.shape[1]
    if isinstance(a.positions, LearnedPositions):
        x = x + parameters["embed.positions"][a.positions.offset + start : a.positions.offset + end]
    elif isinstance(a.positions, Sinusoidal) and a.positions.stored:
        x = x + parameters["embed.positions"][start:end]
    elif isinstance(a.positions, Sinusoidal):
        x = x + sinusoidal_table(dataclasses.replace(a.positions, count=end), a.width)[start:].to(x)
    return _norm(a.embedding_norm, "embed.norm", parameters, x)


def _embed_tokens(a: Architecture, tokens: Tokens, parameters: Parameters, ids: Tensor, types: Tensor | None, start: int) -> Tensor:
    if ids.ndim != 2:
        raise CosetError(f"token ids: expected shape [batch, length], got {list(ids.shape)}")
    _check_length(a, start + ids.shape[1])
    _check_ids("token ids", ids, tokens.vocabulary)
    x = F.embedding(ids, parameters["embed.tokens"])
    if tokens.scale != 1:
        x = x * tokens.scale
    if types is not None:
        if not tokens.types:
            raise CosetError("token types: this architecture has none; leave them out")
        if types.shape != ids.shape:
            raise CosetError(f"token types: expected the shape of the token ids, {list(ids.shape)}, got {list(types.shape)}")
        _check_ids("token types", types, tokens.types)
        return x + F.embedding(types, parameters["embed.types"])
    return x + parameters["embed.types"][0] if tokens.types else x


def _embed_patches(patches: Patches, parameters: Parameters, inputs: Tensor) -> Tensor:
    count = math.prod(patches.grid)
    if inputs.ndim != 3 or tuple(inputs.shape[1:]) != (count, patches.features):
        raise CosetError(
            f"patches: expected shape [batch, {count}, {patches.features}] for the grid {patches.grid}, got {list(inputs.shape)}"
        )
    if not inputs.is_floating_point():
        raise CosetError(f"patches: expected a floating dtype, got {inputs.dtype}")
    weight = parameters["embed.patches"]
    x = inputs.to(weight.dtype) @ weight
    if patches.bias:
        x = x + parameters["embed.patches_bias"]
    if patches.class_token:
        token = parameters["embed.class_token"].expand(x.shape[0], 1, -1)
        x = torch.cat((token, x), dim=1)
    return x


def run_layer(architecture: Architecture, i: int, parameters: Parameters, x: Tensor, tap: Tap, cache: Cache | None = None) -> Tensor:
    """Layer i alone: the stream behind it from the stream before it, both [samples, positions, width]; `tap` and `cache` as for `forward`."""
    a, layer = architecture, architecture.layers[i]

    def attention_norm(y: Tensor) -> Tensor:
        return _norm(layer.attention_norm, f"layers.{i}.attention_norm", parameters, y)

    def mlp_norm(y: Tensor) -> Tensor:
        return y if layer.mlp_norm is None else _norm(layer.mlp_norm, f"layers.{i}.mlp_norm", parameters, y)

    if layer.arrangement == "post":
        x = attention_norm(x + _attention(a, i, parameters, x, tap, cache))
        return mlp_norm(x + _mlp(layer, i, parameters, x, tap))
    if layer.arrangement == "output":
        x = x + attention_norm(_attention(a, i, parameters, x, tap, cache))
        return x + mlp_norm(_mlp(layer, i, parameters, x, tap))
    normalised = attention_norm(x)
    attended = x + _attention(a, i, parameters, normalised, tap, cache)
    if not layer.parallel:
        return attended + _mlp(layer, i, parameters, mlp_norm(attended), tap)
    return attended + _mlp(layer, i, parameters, normalised if layer.mlp_norm is None else mlp_norm(x), tap)


def _head(a: Architecture, parameters: Parameters, x: Tensor, tap: Tap) -> Tensor:
    if isinstance(a.outputs, Classifier):
        pooling = a.outputs.pooling
        x = x.mean(dim=1) if pooling == "mean" else x[:, 0 if pooling == "first" else -1]
    tap("final.input", x)
    if isinstance(a.outputs, StreamOutput):
        return x
    logits = x @ (parameters["embed.tokens"].T if isinstance(a.outputs, LanguageModel) and a.outputs.tied else parameters["head"])
    return logits + parameters["head_bias"] if a.outputs.bias else logits


def _rms(x: Tensor, dims: int, eps: float) -> Tensor:
    """`x` over its root mean square along the last `dims` axes."""
    return x * torch.rsqrt(x.square().mean(tuple(range(-dims, 0)), keepdim=True) + eps)


def _norm(norm: Norm, name: str, parameters: Parameters, x: Tensor) -> Tensor:
    if norm.kind == "none":
        return x
    gain = norm.offset + parameters[f"{name}.gain"] if norm.gain else None
    bias = parameters[f"{name}.bias"] if norm.bias else None
    if norm.kind == "layer":
        return F.layer_norm(x, x.shape[-1:], gain, bias, norm.eps)
    x = _rms(x, 1, norm.eps)
    if gain is not None:
        x = x * gain
    return x if bias is None else x + bias


# --- attention ------------------------------------------------------------------------------------------------------


def _project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[..., stream] times [stream, *heads] plus [*heads]."""
    y = (x @ weight.flatten(1)).reshape(*x.shape[:-1], *weight.shape[1:])
    return y if bias is None else y + bias


def _attention(a: Architecture, i: int, parameters: Parameters, x: Tensor, tap: Tap, cache: Cache | None) -> Tensor:
    layer, p = a.layers[i].attention, f"layers.{i}.attention"
    tap(f"{p}.input", x)
    q = _project(x, parameters[f"{p}.q"], parameters[f"{p}.q_bias"] if layer.query_bias else None)
    k = _project(x, parameters[f"{p}.k"], parameters[f"{p}.k_bias"] if layer.key_bias else None)
    v = _project(x, parameters[f"{p}.v"], parameters[f"{p}.v_bias"] if layer.value_bias else None)
    if layer.qk_norm is not None:
        over_all = layer.qk_norm == "all"
        q_gain, k_gain = (layer.qk_norm_offset + parameters[f"{p}.{side}_gain"] for side in "qk")
        q = _rms(q, 3 if over_all else 1, layer.qk_norm_eps) * q_gain
        k = _rms(k, 2 if over_all else 1, layer.qk_norm_eps) * k_gain
    tap(f"{p}.q", q)
    tap(f"{p}.k", k)
    tap(f"{p}.v", v)
    start = 0 if not cache or f"{p}.k" not in cache else cache[f"{p}.k"].shape[1]
    length = start + x.shape[1]
    if isinstance(layer.positions, Rotary):
        cos, sin = (t[start:].to(x) for t in _rotation(a, layer.positions, length))
        q = _rotate(layer.positions, q, cos[:, None, None], sin[:, None, None])
        k = _rotate(layer.positions, k, cos[:, None], sin[:, None])

    if cache is not None:
        if start:
            k, v = torch.cat((cache[f"{p}.k"], k), 1), torch.cat((cache[f"{p}.v"], v), 1)
        cache[f"{p}.k"], cache[f"{p}.v"] = k, v
    # [batch, length, kv, query, lanes] -> [batch, heads, length, lanes]; the query heads of a group see the same key and value.
    queries = q.flatten(2, 3).transpose(1, 2)
    keys, values = (t.unsqueeze(3).expand(-1, -1, -1, layer.group, -1).flatten(2, 3).transpose(1, 2) for t in (k, v))
    bias = _bias(a.causal, layer, parameters, p, length, x, start)
    causal = a.causal and bias is None
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, is_causal=causal, scale=layer.scale)
    heads = out.transpose(1, 2).reshape(*x.shape[:2], layer.kv_heads, layer.group, layer.value_dim)
    tap(f"{p}.heads", heads)
    y = heads.flatten(2) @ parameters[f"{p}.o"].flatten(0, 2)
    if layer.output_bias:
        y = y + parameters[f"{p}.o_bias"]
    tap(f"{p}.output", y)
    return y


def _rotation(a: Architecture, rotary: Rotary, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position and plane, times the magnitude: two tensors [length, planes], float64."""
    if rotary.axes == 1:
        place = torch.arange(length, dtype=torch.float64)[:, None]
    else:
        # An architecture with more coordinates than one has a patch grid: it validates that.
        grid = a.inputs.grid if isinstance(a.inputs, Patches) else ()
        place = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float64) for n in grid))
        place = torch.cat((torch.zeros(length - place.shape[0], len(grid), dtype=torch.float64), place))
    angles = place @ torch.tensor(rotary.frequencies, dtype=torch.float64).T
    return angles.cos() * rotary.magnitude, angles.sin() * rotary.magnitude


def _rotate(rotary: Rotary, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the planes in the first lanes of `x` [..., lanes]; `cos` and `sin` broadcast against [..., planes]."""
    turning, still = x[..., : rotary.width], x[..., rotary.width :]
    pair = -2 if rotary.pairing == "half" else -1
    planes = rotary.width // 2
    shape = (2, planes) if rotary.pairing == "half" else (planes, 2)
    real, imaginary = turning.reshape(*x.shape[:-1], *shape).unbind(pair)
    turned = torch.stack((real * cos - imaginary * sin, imaginary * cos + real * sin), dim=pair)
    return torch.cat((turned.flatten(-2), still), dim=-1)


def _bias(causal: bool, layer: Attention, parameters: Parameters, p: str, length: int, like: Tensor, start: int) -> Tensor | None:
    """What is added to the logits [heads or 1, query, key], hidden keys at minus infinity; None where only a causal mask may be needed.

    Keys stand at the positions below `length`, queries at those from `start` on.
    """
    index = torch.arange(length, device=like.device)
    distance = index[start:, None] - index
    if isinstance(layer.positions, Alibi):
        slopes = torch.tensor(layer.positions.slopes, dtype=torch.float64, device=like.device)
        bias = (-slopes[:, None, None] * distance.abs()).to(like.dtype)
    elif isinstance(layer.positions, RelativeBias):
        buckets = _buckets(layer.positions, distance, causal)
        bias = parameters[f"{p}.position_bias"][buckets].flatten(2).permute(2, 0, 1)
    elif layer.window is not None or start:
        # Behind a cache too: the fused causal mask would line the first query up with the first key.
        bias = torch.zeros(1, *distance.shape, dtype=like.dtype, device=like.device)
    else:
        return None
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if layer.window is not None:
        hidden = hidden | (distance.abs() >= layer.window)
    return bias.masked_fill(hidden, float("-inf"))


def _buckets(encoding: RelativeBias, distance: Tensor, causal: bool) -> Tensor:
    """T5's bucket of every query position minus key position.

    Without a causal mask the upper half of the buckets is for keys behind the query's position. Inside a half (or the whole, if causal)
    the first half of the buckets holds one distance each, the rest grow logarithmically up to `max_distance`.
    """
    count = encoding.buckets if causal else encoding.buckets // 2
    ahead = torch.zeros_like(distance) if causal else (distance < 0) * count
    away = distance.clamp(min=0) if causal else distance.abs()
    exact = count // 2
    # Single precision and this order of operations, as in T5: distances on the edge of a bucket fall where rounding puts them.
    ratio = torch.log(away.clamp(min=1).float() / exact) / math.log(encoding.max_distance / exact) * (count - exact)
    large = (exact + ratio.to(torch.int64)).clamp(max=count - 1)
    return ahead + torch.where(away < exact, away, large)


# --- MLPs -----------------------------------------------------------------------------------------------------------


def _activate(activation: Activation, x: Tensor) -> Tensor:
    match activation:
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
        case "silu":
            return F.silu(x)
        case "tanh":
            return torch.tanh(x)
        case "quick_gelu":
            return x * torch.sigmoid(1.702 * x)


def _mlp(layer: Layer, i: int, parameters: Parameters, x: Tensor, tap: Tap) -> Tensor:
    p = f"layers.{i}.mlp"
    tap(f"{p}.input", x)
    if isinstance(layer.mlp, Experts):
        y = _experts(layer.mlp, p, parameters, x, tap)
    else:
        hidden = _hidden(layer.mlp, p, parameters, x)
        tap(f"{p}.hidden", hidden)
        y = hidden @ parameters[f"{p}.down"]
        if layer.mlp.down_bias:
            y = y + parameters[f"{p}.down_bias"]
    tap(f"{p}.output", y)
    return y


def _hidden(mlp: MLP, p: str, parameters: Parameters, x: Tensor) -> Tensor:
    """``act(up x)`` or ``act(gate x) * up x``: [..., length, neuron], with `x` [..., length, stream] broadcasting against experts."""
    up = x @ parameters[f"{p}.up"]
    if mlp.up_bias:
        up = up + parameters[f"{p}.up_bias"].unsqueeze(-2)
    if not mlp.gated:
        return _activate(mlp.activation, up)
    gate = x @ parameters[f"{p}.gate"]
    if mlp.up_bias:
        gate = gate + parameters[f"{p}.gate_bias"].unsqueeze(-2)
    return _activate(mlp.activation, gate) * up


def _experts(experts: Experts, p: str, parameters: Parameters, x: Tensor, tap: Tap) -> Tensor:
    """Every expert on every position, summed with the router's weights (zero for the experts it did not pick)."""
    chosen = torch.topk(x @ parameters[f"{p}.router"], experts.active, dim=-1)
    # A softmax over the chosen logits is the softmax over all of them, renormalised over the chosen.
    weights = torch.zeros_like(x[..., :1]).expand(*x.shape[:-1], experts.count)
    weights = weights.scatter(-1, chosen.indices, torch.softmax(chosen.values, dim=-1))
    hidden = _hidden(experts.mlp, p, parameters, x.unsqueeze(1)).transpose(1, 2)
    tap(f"{p}.hidden", hidden)
    y = torch.einsum("blen,ble,end->bld", hidden, weights, parameters[f"{p}.down"])
    return y + weights @ parameters[f"{p}.down_bias"] if experts.mlp.down_bias else y
