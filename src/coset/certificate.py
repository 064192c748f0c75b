"""Is the group complete? The Jacobian's nullity at a generic point, measured and compared with the predicted dimension.

At a generic point the null directions of (parameters -> outputs on many random inputs) are exactly the tangents of the symmetry group, so a
continuous symmetry that the account misses, or one that it makes up, shows as a difference of integers. The test is infinitesimal and
local to the inputs drawn: it sees neither discrete symmetries nor what happens where a mixture of experts changes its choice.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, cast

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from coset.architecture import (
    MLP,
    AdditiveEncoding,
    Alibi,
    Architecture,
    Attention,
    Classifier,
    Experts,
    LearnedPositions,
    Norm,
    Patches,
    RelativeBias,
    RelativeEncoding,
    Rotary,
    Sinusoidal,
    Tokens,
)
from coset.parameters import Parameters
from coset.symmetries import symmetry
from coset.transformer import attention, forward, initialise, random_inputs

MINIMAL_GAP = 1e4
"""How far the smallest visible singular value must stand above the largest invisible one for a rank to count as measured."""

# --- the tiny instance ----------------------------------------------------------------------------------------------

_SMALL_WIDTH = 8
_SMALL_HEADS = 4
_SMALL_LANES = 6
_SMALL_TABLE = 13


def tiny(architecture: Architecture, *, own_encoding: bool = False, context: int = 16) -> Architecture:
    """A small architecture with the same kinds of symmetry: the instance on which the Jacobian is affordable.

    Sizes that are small already are kept, so a small architecture comes back as it is. Larger ones shrink, with what decides the
    group left in place: layers that differ (at most two kinds), heads per KV head, which rotary planes share a frequency and which lanes
    do not rotate, which ALiBi slopes coincide, which biases and gains exist, whether values are wider than queries, whether they fit the
    stream. Every ε becomes 0, where the scales that a norm undoes are exact.

    Parameters
    ----------
    own_encoding
        Keep the architecture's own slowest and fastest rotary frequencies, and its sinusoidal base, in place of well separated ones:
        the instance then shows approximate symmetries.
    context
        Positions of a sinusoidal table when `own_encoding` is set, at most the architecture's own.

    Returns
    -------
    Architecture
    """
    kinds = list(dict.fromkeys(architecture.layers))[:2]
    count = len(architecture.layers) if len(architecture.layers) <= 2 else 2
    chosen = architecture.layers if len(architecture.layers) <= 2 else (kinds * count)[:count]
    attentions = [_tiny_attention(layer.attention, architecture.width, own_encoding) for layer in chosen]
    width = architecture.width
    if width > _SMALL_WIDTH:
        width = max(6, *(max(a.head_dim, a.value_dim) + 2 for a in attentions))
        if any(a.qk_norm == "all" and a.still_lanes for a in attentions):
            width = max(width, 10)  # narrower, changes of basis that differ by head can keep the common norm between them
        width += width % 2
    layers = tuple(
        dataclasses.replace(
            layer,
            attention=a,
            mlp=_tiny_mlp(layer.mlp, architecture.width, width),
            attention_norm=_exact(layer.attention_norm),
            mlp_norm=None if layer.mlp_norm is None else _exact(layer.mlp_norm),
        )
        for layer, a in zip(chosen, attentions, strict=True)
    )
    # What reads single tokens takes many of them: a parallel first MLP to tell its neurons apart, a norm over all heads to tell their lanes apart.
    needed = 5 * width if chosen[0].parallel else width + 5
    if attentions[0].qk_norm == "all":
        needed = max(needed, attentions[0].heads * attentions[0].head_dim + 5)
    inputs = _tiny_inputs(architecture.inputs, width, needed)
    outputs = architecture.outputs
    if isinstance(outputs, Classifier) and architecture.width > _SMALL_WIDTH:
        outputs = dataclasses.replace(outputs, classes=width - 2 if outputs.classes < architecture.width else width + 1)
    return dataclasses.replace(
        architecture,
        width=width,
        layers=layers,
        inputs=inputs,
        outputs=outputs,
        positions=_tiny_table(architecture, inputs, width, context if own_encoding else None),
        embedding_norm=_exact(architecture.embedding_norm),
        final_norm=_exact(architecture.final_norm),
    )


def _exact(norm: Norm) -> Norm:
    return norm if norm.kind == "none" else dataclasses.replace(norm, eps=0.0)


def _tiny_attention(a: Attention, width: int, own_encoding: bool) -> Attention:
    small = width <= _SMALL_WIDTH and a.heads <= _SMALL_HEADS and a.head_dim <= _SMALL_LANES
    kv, group = (a.kv_heads, a.group) if small else (min(a.kv_heads, 2), min(a.group, 2))
    lanes, encoding = _tiny_encoding(a, kv, group, small, own_encoding)
    return dataclasses.replace(
        a,
        heads=kv * group,
        kv_heads=kv,
        head_dim=lanes,
        # Two KV heads of width 3 fit a stream of 6, of width 4 they do not.
        value_dim=a.value_dim if small else min(a.value_dim, 3 if a.kv_heads * a.value_dim <= width else 4),
        positions=encoding,
        qk_norm_eps=0.0,
        scale=None,
        window=None if a.window is None else 3,
    )


def _tiny_encoding(a: Attention, kv: int, group: int, small: bool, own_encoding: bool) -> tuple[int, RelativeEncoding]:
    """The head width, and the relative encoding, of a small head."""
    if isinstance(a.positions, Rotary):
        planes = a.positions.frequencies if small else _tiny_planes(a.positions)
        still = a.head_dim - a.positions.width
        frequencies = planes if own_encoding else _separated(planes)
        return 2 * len(planes) + (still if small else min(still, 2)), dataclasses.replace(a.positions, frequencies=frequencies)
    lanes = a.head_dim if small else min(a.head_dim, 4)
    if isinstance(a.positions, Alibi):
        return lanes, Alibi(tuple(a.positions.slopes[j * a.group + q] for j in range(kv) for q in range(group)))
    # Four buckets: every one that can be read is read within the first four distances.
    return lanes, RelativeBias(4, 4) if isinstance(a.positions, RelativeBias) else None


def _tiny_planes(rotary: Rotary) -> tuple[tuple[float, ...], ...]:
    """Frequencies of the planes to keep: two that coincide if any do, else the fastest and the slowest, one that stands still."""
    single = [f for f in dict.fromkeys(rotary.frequencies) if any(f) and rotary.frequencies.count(f) == 1]
    single.sort(key=lambda f: -max(map(abs, f)))
    repeated = next((f for f in rotary.frequencies if any(f) and rotary.frequencies.count(f) > 1), None)
    # One plane for every coordinate of a position first, so that an axial encoding stays one.
    kept = list({tuple(x != 0 for x in f): f for f in reversed(single)}.values())[: rotary.axes]
    kept += [f for f in single[:1] + single[-1:] if f not in kept and not repeated]
    still = [f for f in rotary.frequencies if not any(f)][:1]
    return tuple(dict.fromkeys(kept)) + ((repeated,) * 2 if repeated else ()) + tuple(still)


def _separated(frequencies: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
    """Frequencies that differ clearly within a few positions, equal where the given ones are equal, with the same signs and zeros."""
    distinct = [f for f in dict.fromkeys(frequencies) if any(f)]
    angles = {f: 0.35 + 1.6 * (j + 1) / (len(distinct) + 1) for j, f in enumerate(distinct)}
    return tuple(tuple(math.copysign(angles[f], x) if x else 0.0 for x in f) for f in frequencies)


def _tiny_mlp(mlp: MLP | Experts, width: int, shrunk: int) -> MLP | Experts:
    if isinstance(mlp, Experts):
        count = min(mlp.count, 3)
        # Two are active at least: how strongly one chosen expert was preferred leaves no trace near the point.
        active = count if mlp.active == mlp.count else min(2, count)
        return Experts(count, active, cast(MLP, _tiny_mlp(mlp.mlp, width, shrunk)))
    if mlp.width <= _SMALL_WIDTH and width == shrunk:
        return mlp
    return dataclasses.replace(mlp, width=shrunk + 1 if mlp.width >= width else shrunk - 1)


def _tiny_inputs(inputs: Tokens | Patches, width: int, needed: int) -> Tokens | Patches:
    if isinstance(inputs, Tokens):
        keep = width < inputs.vocabulary <= _SMALL_TABLE and needed <= _SMALL_TABLE
        vocabulary = inputs.vocabulary if keep else needed
        return dataclasses.replace(inputs, vocabulary=vocabulary, types=min(inputs.types, 2), scale=1.0 if inputs.scale == 1.0 else 2.0)
    longest = 8 if len(inputs.grid) == 1 else 3
    return dataclasses.replace(inputs, features=width + 1, grid=tuple(min(n, longest) for n in inputs.grid))


def _tiny_table(architecture: Architecture, inputs: Tokens | Patches, width: int, context: int | None) -> AdditiveEncoding:
    table = architecture.positions
    if isinstance(table, Sinusoidal):
        base = 3.0 if context is None else table.base
        if isinstance(inputs, Patches):
            return dataclasses.replace(table, count=inputs.count, base=base)
        most = width + 3 if context is None else max(context, width + 3)
        return dataclasses.replace(table, count=min(table.count, most), base=base)
    if isinstance(table, LearnedPositions):
        offset = min(table.offset, 2)
        if isinstance(inputs, Patches):
            unread = isinstance(architecture.inputs, Patches) and table.count - table.offset > architecture.inputs.count
            return LearnedPositions(inputs.count + offset + unread, offset)
        return LearnedPositions(min(table.count - table.offset, 7) + offset, offset)
    return table


# --- measurement ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """Predicted and measured nullity of one Jacobian.

    Attributes
    ----------
    scope
        ``layers.i.attention`` or ``model``.
    predicted, measured
        Dimension of the group in the account; nullity by the largest gap of the spectrum.
    gap
        Ratio of the singular values on the two sides of the split; values below rounding count as rounding.
    spectrum
        Singular values over the largest, descending, one for every parameter.
    null_shares
        Where the two disagree: the share of the null space that lies in each tensor (mean squared norm, summing to one). Else empty.
    """

    scope: str
    predicted: int
    measured: int
    gap: float
    spectrum: tuple[float, ...]
    null_shares: Mapping[str, float]

    @property
    def agrees(self) -> bool:
        return self.predicted == self.measured and self.gap >= MINIMAL_GAP

    @property
    def smallest_visible(self) -> float:
        """The smallest singular value above the split, relative to the largest."""
        return self.spectrum[len(self.spectrum) - self.measured - 1]


@dataclass(frozen=True)
class Approximate:
    """Directions that change the outputs, but far less than any other: singular values below those of a well separated encoding.

    Attributes
    ----------
    scope
        ``layers.i.attention`` or ``model``.
    singular_values
        Over the largest, descending.
    below
        The smallest visible singular value of the same model with well separated frequencies: the values lie under a tenth of it.
    shares
        Share of these directions that lies in each tensor.
    """

    scope: str
    singular_values: tuple[float, ...]
    below: float
    shares: Mapping[str, float]


@dataclass(frozen=True)
class Certificate:
    """Measured against predicted dimensions, for every layer's attention and for the whole model.

    Attributes
    ----------
    architecture
        The tiny instance that was measured.
    attention, model
        The measurements.
    approximate
        Approximate symmetries of the architecture's own frequencies in a short context.
    """

    architecture: Architecture
    attention: tuple[Measurement, ...]
    model: Measurement
    approximate: tuple[Approximate, ...]

    @property
    def agrees(self) -> bool:
        """Whether every measured nullity is the predicted dimension, across a gap of at least `MINIMAL_GAP`."""
        return self.model.agrees and all(m.agrees for m in self.attention)

    def to_json(self) -> dict[str, Any]:
        """The certificate as plain data, with the keys that scripts rely on."""

        def plain(m: Measurement) -> dict[str, Any]:
            return {"scope": m.scope, "predicted": m.predicted, "measured": m.measured, "gap": m.gap, "agrees": m.agrees}

        return {
            "attention": {
                "predicted": sum(m.predicted for m in self.attention),
                "measured": sum(m.measured for m in self.attention),
                "gap": min(m.gap for m in self.attention),
                "layers": [plain(m) for m in self.attention],
            },
            "model": {**plain(self.model), "parameters": len(self.model.spectrum), "spectrum": list(self.model.spectrum)},
            "agrees": self.agrees,
            "unexplained": [
                {"scope": m.scope, "dimension": m.measured - m.predicted, "tensors": dict(m.null_shares)}
                for m in (*self.attention, self.model)
                if not m.agrees
            ],
            "approximate": [
                {"scope": a.scope, "singular_values": list(a.singular_values), "below": a.below, "tensors": dict(a.shares)}
                for a in self.approximate
            ],
        }


def certify(architecture: Architecture, *, seed: int = 0, context: int | None = 16) -> Certificate:
    r"""Measure the dimension of the functional-equivalence group and compare it with the account.

    The nullity of the Jacobian of :math:`\theta \mapsto (f_\theta(x_1), \dots, f_\theta(x_n))` at a generic float64 point, on more
    random inputs than there are parameters, is the dimension of the group there. Outputs are logits, or log-probabilities where only
    those count. Each layer's attention is measured alone as well, on generic inputs. The instance is :func:`tiny` of the architecture.

    Parameters
    ----------
    architecture : Architecture
    seed
        Of the parameters and inputs.
    context
        Number of positions in which the architecture's own frequencies are judged for approximate symmetries; None leaves that out.

    Returns
    -------
    Certificate

    Notes
    -----
    ReLU neurons that never switch on the drawn inputs are linear, or dead, and would add null directions that belong to the draw:
    parameters are drawn again until every neuron is on for some positions and off for others.
    """
    instance = tiny(architecture)
    account = symmetry(instance)
    jacobians = dict(_jacobians(instance, seed, None))
    predicted = {f"layers.{i}.attention": layer.attention_dimension for i, layer in enumerate(account.layers)}
    predicted["model"] = account.total_dimension
    measured = {scope: _measure(scope, jacobian, predicted[scope]) for scope, jacobian in jacobians.items()}
    approximate: tuple[Approximate, ...] = ()
    if context is not None:
        own = tiny(architecture, own_encoding=True, context=context)
        approximate = tuple(_approximate(own, instance, seed, context, measured))
    return Certificate(instance, tuple(m for scope, m in measured.items() if scope != "model"), measured["model"], approximate)


@dataclass(frozen=True)
class _Jacobian:
    """Rows are outputs, columns parameters; `columns` says which belong to which tensor."""

    matrix: Tensor
    columns: Mapping[str, slice]

    def shares(self, directions: Tensor) -> dict[str, float]:
        """Share of the squared norm of unit rows [k, parameters] in each tensor, largest first; tensors below a thousandth left out."""
        squares = directions.square().sum(0) / max(1, len(directions))
        shares = {name: float(squares[at].sum()) for name, at in self.columns.items()}
        return {name: share for name, share in sorted(shares.items(), key=lambda item: -item[1]) if share >= 1e-3}


def _jacobians(instance: Architecture, seed: int, length: int | None, scopes: Set[str] | None = None) -> Iterator[tuple[str, _Jacobian]]:
    """The Jacobian of each layer's attention on generic inputs, then of the whole model, by scope: all of them, or those in `scopes`."""
    parameters = _generic_point(instance, seed)
    reach = _reach(instance) if length is None else length
    if instance.length is not None:
        reach = instance.length if isinstance(instance.inputs, Patches) else min(reach, instance.length)
    generator = torch.Generator().manual_seed(seed + 1)
    for i in range(len(instance.layers)):
        if scopes is not None and f"layers.{i}.attention" not in scopes:
            continue
        own = {name: tensor for name, tensor in parameters.items() if name.startswith(f"layers.{i}.attention.")}
        samples = _samples(own, reach * instance.width)
        x = torch.randn(samples, reach, instance.width, generator=generator, dtype=torch.float64)
        yield f"layers.{i}.attention", _differentiate(lambda p, i=i, x=x: attention(instance, i, p, x), own)  # type: ignore[misc]
    if scopes is not None and "model" not in scopes:
        return
    # One output is worth as many equations as the stream that it shows has dimensions.
    if isinstance(instance.outputs, Classifier):
        worth = min(instance.outputs.classes, instance.width)
    else:
        worth = reach * min(instance.width, instance.inputs.vocabulary if isinstance(instance.inputs, Tokens) else instance.width)
    samples = _samples(parameters, worth) * (2 if _switches(instance) else 1)
    tokens = isinstance(instance.inputs, Tokens)
    inputs = random_inputs(instance, samples, length=reach if tokens else None, seed=seed + 2, dtype=torch.float64)
    types = None
    if isinstance(instance.inputs, Tokens) and instance.inputs.types:
        types = torch.randint(instance.inputs.types, inputs.shape, generator=generator)

    def outputs(p: Parameters) -> Tensor:
        found = forward(instance, p, inputs, types=types)
        return found.log_softmax(-1) if instance.probabilities else found

    yield "model", _differentiate(outputs, parameters)


def _reach(instance: Architecture) -> int:
    """Positions enough to tell every lane's rotation and every bucket apart: as many offsets as a head has lanes, and the longest table."""
    lanes = max(layer.attention.head_dim for layer in instance.layers)
    table = instance.length or 0
    return max(7, lanes + 3, table)


def _samples(parameters: Parameters, worth: int) -> int:
    """Five equations for every three parameters."""
    return 4 + math.ceil(5 / 3 * sum(t.numel() for t in parameters.values()) / worth)


def _switches(instance: Architecture) -> bool:
    """Whether the function has pieces: ReLU neurons, or a choice of experts."""
    return any(isinstance(layer.mlp, Experts) or layer.mlp.activation == "relu" for layer in instance.layers)


def _generic_point(instance: Architecture, seed: int, draws: int = 200, least: float = 0.15) -> dict[str, Tensor]:
    """Random parameters in which everything switches.

    ReLU neurons are drawn again, one by one, until each is on for a share `least` of positions, and off for as many; so are router columns until
    each expert is chosen for that share.
    """
    parameters = initialise(instance, seed=seed * draws, dtype=torch.float64, generic=True)
    if not _switches(instance):
        return parameters
    length = None if isinstance(instance.inputs, Patches) else _reach(instance)
    inputs = random_inputs(instance, 16, length=length, seed=seed, dtype=torch.float64)
    for draw in range(1, draws):
        poor = _poor_switches(instance, parameters, inputs, least)
        if not poor:
            break
        fresh = initialise(instance, seed=seed * draws + draw, dtype=torch.float64, generic=True)
        for name, again in poor.items():
            parameters[name] = torch.where(again, fresh[name], parameters[name])
    return parameters


def _poor_switches(instance: Architecture, parameters: Parameters, inputs: Tensor, least: float) -> dict[str, Tensor]:
    """Masks of the columns to draw again, by tensor: those of the first layer that has any (the layers behind it will see other inputs)."""
    mlps = {f"layers.{i}.mlp": layer.mlp for i, layer in enumerate(instance.layers)}
    poor: dict[str, Tensor] = {}

    def tap(site: str, value: Tensor) -> None:
        place, _, kind = site.rpartition(".")
        if place not in mlps or any(bool(again.any()) for again in poor.values()):
            return
        mlp = mlps[place]
        if kind == "input" and isinstance(mlp, Experts) and mlp.active < mlp.count:
            chosen = torch.topk(value @ parameters[f"{place}.router"], mlp.active, dim=-1).indices.flatten()
            poor[f"{place}.router"] = chosen.bincount(minlength=mlp.count) < least * chosen.numel() / mlp.active
        elif kind == "hidden" and _inner(mlp).activation == "relu":
            on = (value != 0).flatten(0, 1).double().mean(0)
            again = torch.minimum(on, 1 - on) < least
            for name in (f"{place}.up", f"{place}.gate"):
                poor.update({n: m for n, m in ((name, again.unsqueeze(-2)), (f"{name}_bias", again)) if n in parameters})

    forward(instance, parameters, inputs, tap=tap)
    return {name: again for name, again in poor.items() if bool(again.any())}


def _inner(mlp: MLP | Experts) -> MLP:
    return mlp.mlp if isinstance(mlp, Experts) else mlp


def _differentiate(function: Callable[[Parameters], Tensor], parameters: Parameters) -> _Jacobian:
    names = list(parameters)
    sizes = [parameters[n].numel() for n in names]

    def flat(vector: Tensor) -> Tensor:
        pieces = torch.split(vector, sizes)
        return function({n: piece.reshape(parameters[n].shape) for n, piece in zip(names, pieces, strict=True)}).flatten()

    # Sixty-four directions at a time, to stay in cache.
    # PyTorch loads its rules for forward derivatives with a call that it deprecates itself.
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no forward derivative
        warnings.filterwarnings("ignore", message=".*torch.jit.script.*", category=DeprecationWarning)
        point = torch.cat([parameters[n].flatten() for n in names])
        columns = torch.vmap(lambda tangent: torch.func.jvp(flat, (point,), (tangent,))[1], chunk_size=64)
        matrix = columns(torch.eye(len(point), dtype=point.dtype)).T
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return _Jacobian(matrix, {n: slice(end - size, end) for n, end, size in zip(names, ends, sizes, strict=True)})


def nullity(spectrum: Tensor) -> tuple[int, float]:
    """Number of singular values below the largest gap of a descending `spectrum` [n], and the gap: the ratio of the values on its two sides.

    Values under rounding, ``eps`` of the largest, count as rounding: exact zeros open no gap among the zeros. If nothing is null the gap
    is that of the smallest value over rounding.
    """
    floor = spectrum[0] * torch.finfo(spectrum.dtype).eps
    values = torch.cat((spectrum.clamp(min=floor), floor[None]))
    ratios = values[:-1] / values[1:]
    split = int(ratios.argmax())
    return len(spectrum) - split - 1, float(ratios[split])


def _measure(scope: str, jacobian: _Jacobian, predicted: int) -> Measurement:
    spectrum = torch.linalg.svdvals(jacobian.matrix)
    measured, gap = nullity(spectrum)
    shares = {}
    if measured != predicted:
        shares = jacobian.shares(_right_vectors(jacobian.matrix)[len(spectrum) - measured :])
    return Measurement(scope, predicted, measured, gap, tuple((spectrum / spectrum[0]).tolist()), shares)


def _right_vectors(matrix: Tensor) -> Tensor:
    """Right singular vectors as rows, of the triangular factor: the tall matrix has the same."""
    return torch.linalg.svd(torch.linalg.qr(matrix, mode="r")[1])[2]


def _approximate(
    own: Architecture, instance: Architecture, seed: int, context: int, clean: Mapping[str, Measurement]
) -> Iterator[Approximate]:
    """Visible singular values of the own encoding that lie under a tenth of every one of the well separated encoding."""
    scopes = {f"layers.{i}.attention" for i, (a, b) in enumerate(zip(own.layers, instance.layers, strict=True)) if a != b}
    scopes |= {"model"} if own.positions != instance.positions else set()
    if not scopes:
        return
    for scope, jacobian in _jacobians(own, seed, context, scopes):
        reference = clean[scope]
        spectrum = torch.linalg.svdvals(jacobian.matrix)
        spectrum = spectrum / spectrum[0]
        visible = len(spectrum) - reference.measured
        small = int((spectrum[:visible] < reference.smallest_visible / 10).sum())
        if small:
            directions = _right_vectors(jacobian.matrix)[visible - small : visible]
            values = tuple(spectrum[visible - small : visible].tolist())
            yield Approximate(scope, values, reference.smallest_visible, jacobian.shares(directions))


# --- figure ---------------------------------------------------------------------------------------------------------


def plot_spectrum(certificate: Certificate) -> Figure:
    """The singular values of every measurement, descending, with the predicted split: what is right of the line should be at rounding.

    Returns
    -------
    matplotlib.figure.Figure
        One panel for each layer's attention and one for the model; without pyplot, so nothing global changes. Save it with ``savefig``.
    """
    measurements = (*certificate.attention, certificate.model)
    figure = Figure(figsize=(4 * len(measurements), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for place, m in enumerate(measurements):
        axes = figure.add_subplot(1, len(measurements), place + 1)
        floor = torch.finfo(torch.float64).eps / 10
        values = [max(v, floor) for v in m.spectrum]
        split = len(values) - m.measured
        axes.semilogy(range(1, split + 1), values[:split], ".", color="#0072B2", markersize=3, label=f"{split} visible")
        axes.semilogy(range(split + 1, len(values) + 1), values[split:], ".", color="#D55E00", markersize=3, label=f"{m.measured} null")
        axes.axvline(len(values) - m.predicted + 0.5, color="#4D4D4D", linewidth=0.8, linestyle="--", label=f"predicted {m.predicted}")
        axes.set_title(m.scope)
        axes.set_xlabel("index")
        if place == 0:
            axes.set_ylabel("singular value / largest")
        axes.legend(frameon=False, loc="lower left")
    return figure
