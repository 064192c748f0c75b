"""The theorems: from an architecture to its functional-equivalence group, space by space, with dimensions.

The positional encoding enters in one place, :func:`qk_group`: it decides which changes of basis of a head's queries and keys are left.
Everything else follows from how the pieces of a Transformer read from and write to the residual stream. `docs/theory.md` states each rule;
`coset certify` checks the dimensions against the numerical rank of the Jacobian.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from coset.architecture import (
    MLP,
    Alibi,
    Architecture,
    Attention,
    Classifier,
    Experts,
    LanguageModel,
    Layer,
    LearnedPositions,
    NoPositions,
    Norm,
    Patches,
    RelativeBias,
    Rotary,
    Sinusoidal,
    StreamOutput,
    Tokens,
)
from coset.groups import (
    GeneralLinear,
    Group,
    Mirrored,
    Monomial,
    Orthogonal,
    Permutation,
    Product,
    RotaryCommutant,
    Scaling,
    Wreath,
    finite_order,
    heads,
)
from coset.parameters import count, readers, tensors
from coset.transformer import sinusoidal_table

# --- groups on the spaces -------------------------------------------------------------------------------------------


def qk_group(attention: Attention) -> Group:
    """What may change the basis of a KV head's queries and keys: the commutant of the rotations; signs only under QK-norm.

    With QK-norm and gains of their own on every lane, a change of basis must keep the RMS and the gains: a sign on every plane.
    """
    if attention.qk_norm is not None:
        return Scaling(attention.head_dim, "sign", (*attention.planes, *((lane,) for lane in attention.still_lanes)))
    if not attention.planes:
        return GeneralLinear(attention.head_dim)
    return RotaryCommutant(attention.head_dim, attention.planes, attention.plane_frequencies)


def head_group(attention: Attention) -> Wreath:
    """Permutations of heads and changes of basis inside them: ``(S_group × QK × GL(d_v)) ≀ S_kv``.

    ALiBi pins the order of heads whose slopes differ.
    """
    classes = query_classes = None
    if isinstance(attention.positions, Alibi):
        slopes = attention.positions.slopes
        if attention.group == 1:
            classes = tuple(slopes.index(s) for s in slopes)
        else:
            classes, query_classes = tuple(range(attention.kv_heads)), tuple(range(attention.group))
    return heads(
        attention.kv_heads,
        attention.group,
        qk_group(attention),
        GeneralLinear(attention.value_dim),
        classes=classes,
        query_classes=query_classes,
    )


def neuron_group(mlp: MLP) -> Group:
    """Permutations of the neurons, with the scales that the activation lets through."""
    if mlp.gated:
        return Monomial(mlp.width, "nonzero")
    if mlp.activation == "relu":
        return Monomial(mlp.width, "positive")
    if mlp.activation == "tanh":
        return Monomial(mlp.width, "sign")
    return Permutation(mlp.width)


def mlp_group(mlp: MLP | Experts) -> Group:
    """The neurons' group; for a mixture of experts its wreath product with the permutations of the experts."""
    return Wreath(neuron_group(mlp.mlp), mlp.count) if isinstance(mlp, Experts) else neuron_group(mlp)


def _stream_norms(architecture: Architecture) -> Iterator[tuple[Norm, bool]]:
    """Every norm on the stream, and whether its gain can be folded into linear maps that read it."""
    if architecture.embedding_norm.kind != "none":
        yield architecture.embedding_norm, False
    for layer in architecture.layers:
        for norm in (layer.attention_norm, layer.mlp_norm):
            if norm is not None and norm.kind != "none":
                yield norm, layer.arrangement == "pre"
    if architecture.final_norm.kind != "none":
        yield architecture.final_norm, not architecture.tied and not isinstance(architecture.outputs, StreamOutput)


def fixed_rows(architecture: Architecture) -> Tensor | None:
    """Orthonormal rows [k, width] of the stream that no rotation may move: LayerNorm's **1**, and the rows of a fixed position table."""
    d = architecture.width
    rows = []
    if any(norm.kind == "layer" for norm, _ in _stream_norms(architecture)):
        rows.append(torch.ones(1, d, dtype=torch.float64) / math.sqrt(d))
    if isinstance(architecture.positions, Sinusoidal) and not architecture.positions.stored:
        if architecture.positions.count >= d:
            return torch.eye(d, dtype=torch.float64)
        rows.append(sinusoidal_table(architecture.positions, d))
    if not rows:
        return None
    return torch.linalg.qr(torch.cat(rows).mT)[0].mT if sum(map(len, rows)) < d else torch.eye(d, dtype=torch.float64)


def stream_group(architecture: Architecture) -> Group | None:
    """What may act on the residual stream once every gain that can be folded is folded; None where the stream is pinned.

    No norm: GL(d), or O(d) when the unembedding is tied. RMSNorm: O(d). LayerNorm: O(d - 1) on the complement of **1**. A gain that
    cannot be folded (tied unembedding, post-norm) leaves signed permutations, or under LayerNorm permutations with one global sign. A
    fixed position table leaves only what fixes its rows; a model without a head outputs the stream and pins it.
    """
    if isinstance(architecture.outputs, StreamOutput):
        return None
    d = architecture.width
    found = list(_stream_norms(architecture))
    rows = fixed_rows(architecture)
    table = isinstance(architecture.positions, Sinusoidal) and not architecture.positions.stored
    if any(norm.has_gain and not foldable for norm, foldable in found):
        if table:
            return None
        layer = any(norm.kind == "layer" for norm, _ in found)
        return Monomial(d, "global sign" if layer else "sign")
    if rows is not None and len(rows) == d:
        return None
    if not found and not architecture.tied:
        return GeneralLinear(d, rows)
    return Orthogonal(d, rows) if rows is None or table else Mirrored(d, rows)


# --- the account ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One line of the account: a space, the group on it, how many copies act, their total dimension, and why."""

    space: str
    group: str
    copies: int
    dimension: int
    why: str


@dataclass(frozen=True)
class LayerAccount:
    """What one layer leaves free. `order` is the number of head permutations; `shifts` are those of attention alone."""

    heads: Entry
    order: int
    qk: Entry
    vo: Entry
    shifts: tuple[Entry, ...]
    neurons: Entry
    gains: Entry

    @property
    def attention_dimension(self) -> int:
        return self.qk.dimension + self.vo.dimension + sum(s.dimension for s in self.shifts)

    @property
    def dimension(self) -> int:
        return self.attention_dimension + self.neurons.dimension + self.gains.dimension


@dataclass(frozen=True)
class Symmetry:
    """The symmetry group of an architecture and its account.

    Attributes
    ----------
    architecture
        As given.
    layers, stream, gains, shifts
        The account: per layer, of the residual stream, of the final norm's gain, and of the shifts outside attention.
    notes
        Caveats in words, such as a gauge that is exact only for a norm without epsilon.
    """

    architecture: Architecture
    layers: tuple[LayerAccount, ...]
    stream: Entry
    gains: Entry
    shifts: tuple[Entry, ...]
    notes: tuple[str, ...]

    @cached_property
    def group(self) -> Product:
        """The group that acts on the normal form, one factor a space: ``stream``, ``layers.i.heads``, ``layers.i.neurons``."""
        return group(self.architecture)

    @property
    def attention_dimension(self) -> int:
        """QK + VO + attention's own shifts, over all layers."""
        return sum(layer.attention_dimension for layer in self.layers)

    @property
    def total_dimension(self) -> int:
        """Dimension of the whole group: the nullity of the Jacobian of (parameters -> function) at a generic point."""
        rest = self.stream.dimension + self.gains.dimension + sum(s.dimension for s in self.shifts)
        return sum(layer.dimension for layer in self.layers) + rest

    def to_json(self) -> dict[str, Any]:
        """The account as plain data, with the keys that scripts rely on."""

        def plain(entry: Entry) -> dict[str, Any]:
            return {"group": entry.group, "copies": entry.copies, "dimension": entry.dimension, "why": entry.why}

        def shifts(entries: tuple[Entry, ...]) -> dict[str, Any]:
            return {
                "dimension": sum(s.dimension for s in entries),
                "which": [{"name": s.space, "dimension": s.dimension, "why": s.why} for s in entries],
            }

        return {
            "layers": [
                {
                    "heads": {"group": layer.heads.group, "order": layer.order},
                    "qk": plain(layer.qk),
                    "vo": plain(layer.vo),
                    "shifts": shifts(layer.shifts),
                    "neurons": plain(layer.neurons),
                    "gains": {"dimension": layer.gains.dimension},
                }
                for layer in self.layers
            ],
            "stream": plain(self.stream),
            "gains": {"dimension": self.gains.dimension},
            "shifts": shifts(self.shifts),
            "attention_dimension": self.attention_dimension,
            "total_dimension": self.total_dimension,
            "parameters": count(self.architecture),
            "notes": list(self.notes),
        }


@lru_cache(maxsize=64)
def group(architecture: Architecture) -> Product:
    """The product group that acts on the normal form of `architecture`: factors ``stream``, ``layers.i.heads``, ``layers.i.neurons``.

    A pinned stream has no factor.
    """
    factors: dict[str, Group] = {}
    stream = stream_group(architecture)
    if stream is not None:
        factors["stream"] = stream
    for i, layer in enumerate(architecture.layers):
        factors[f"layers.{i}.heads"] = head_group(layer.attention)
        factors[f"layers.{i}.neurons"] = mlp_group(layer.mlp)
    return Product(factors)


def _qk(attention: Attention) -> Entry:
    g = qk_group(attention)
    kv = attention.kv_heads
    if attention.qk_norm is None:
        why = "the commutant of the rotations" if attention.planes else "queries and keys meet only in q kᵀ"
        return Entry("qk", g.name, kv, kv * g.dimension, why)
    blocks = len(attention.planes) + len(attention.still_lanes)
    moved = blocks * (kv if attention.qk_norm == "all" else 1)
    scales = 2 if attention.qk_norm == "all" else attention.heads + kv
    why = f"QK-norm: {moved} scales move between the query and key gains, {scales} are undone by the norm (exact at ε = 0)"
    return Entry("qk", g.name, kv, moved + scales, why)


def _attention_shifts(architecture: Architecture, attention: Attention) -> Iterator[Entry]:
    width = architecture.width
    kv = attention.kv_heads
    if attention.key_bias and attention.qk_norm is None and attention.still_lanes:
        lanes = len(attention.still_lanes)
        yield Entry("key bias", f"R^{lanes}", kv, kv * lanes, "adds a constant along each softmax row, on lanes that do not rotate")
    constants = (kv * attention.value_dim if attention.value_bias else 0) + (width if attention.output_bias else 0)
    if attention.value_bias and constants > width:
        yield Entry("value bias", f"R^{constants - width}", 1, constants - width, "softmax rows sum to one: it moves into the output bias")
    if isinstance(attention.positions, RelativeBias):
        why = "a constant added to a head's bias table leaves its softmax alone"
        if not architecture.causal:
            why += "; the first of the buckets for keys ahead is never read"
        size = attention.heads * (1 if architecture.causal else 2)
        yield Entry("position bias", "R" if architecture.causal else "R^2", attention.heads, size, why)


def _neurons(mlp: MLP | Experts) -> Entry:
    g = mlp_group(mlp)
    inner = mlp.mlp if isinstance(mlp, Experts) else mlp
    gates = 0
    if inner.gated:
        why = "neurons in any order; up and down trade a scale"
        if inner.activation == "relu":
            gates = inner.width * (mlp.count if isinstance(mlp, Experts) else 1)
            why += ", gate and down a positive one"
    elif inner.activation == "relu":
        why = "neurons in any order; ReLU commutes with positive scales"
    elif inner.activation == "tanh":
        why = "neurons in any order; tanh is odd"
    else:
        why = "neurons in any order"
    name = f"{g.name} × R_{{>0}}^{gates}" if gates else g.name
    return Entry("neurons", name, 1, g.dimension + gates, why)


def _layer(architecture: Architecture, layer: Layer) -> LayerAccount:
    attention = layer.attention
    g = head_group(attention)
    slopes = isinstance(attention.positions, Alibi)
    permutations = g.top.name
    if attention.group > 1:
        inner = g.inner.factors["query"].name if isinstance(g.inner, Product) else "1"
        permutations = f"{inner} ≀ {permutations}" if inner != "1" else permutations
    why = (
        "ALiBi slopes tell heads apart"
        if slopes
        else "heads are summed" + ("; queries stay with their KV head" if attention.group > 1 else "")
    )
    gains = sum(
        architecture.width for n in (layer.attention_norm, layer.mlp_norm) if n is not None and n.has_gain and layer.arrangement == "pre"
    )
    return LayerAccount(
        heads=Entry("heads", permutations, 1, 0, why),
        order=finite_order(g),
        qk=_qk(attention),
        vo=Entry(
            "vo",
            f"GL({attention.value_dim})",
            attention.kv_heads,
            attention.kv_heads * attention.value_dim**2,
            "values meet only the output map",
        ),
        shifts=tuple(_attention_shifts(architecture, attention)),
        neurons=_neurons(layer.mlp),
        gains=Entry("gains", f"(R^×)^{gains}" if gains else "1", 1, gains, "norm gains move into the linear maps that read them"),
    )


def _fixed_table(architecture: Architecture) -> bool:
    """Whether a position table is part of the function, not of the parameters."""
    return isinstance(architecture.positions, Sinusoidal) and not architecture.positions.stored


def _post(architecture: Architecture) -> bool:
    """Whether every layer normalises behind its residual sum."""
    return all(layer.arrangement == "post" for layer in architecture.layers)


def _last_norm(architecture: Architecture) -> Norm:
    """The norm whose output the head reads: the final norm, or without one the last of the last post-norm layer."""
    last = architecture.layers[-1]
    if architecture.final_norm.kind == "none" and last.arrangement == "post" and last.mlp_norm is not None:
        return last.mlp_norm
    return architecture.final_norm


def _scales(architecture: Architecture, stream: Group | None) -> int:
    """Scales that norms or linear maps undo (up to a norm's ε): of the stream, of what an embedding norm reads, of what an output norm reads.

    The stream takes the scale of its writers. What follows is a norm, or a linear map that takes the inverse, except at the end: tied, the
    unembedding has the scale of the input, and only a gain or the stream's own scale can make up for it.
    """
    if isinstance(stream, GeneralLinear):
        return 0  # GL(d) holds it
    first, final = architecture.embedding_norm, _last_norm(architecture)
    if _post(architecture):
        gains = [n for layer in architecture.layers for n in (layer.attention_norm, layer.mlp_norm) if n][
            : None if final is architecture.final_norm else -1
        ]
        table = not _fixed_table(architecture) and (not architecture.tied or final.has_gain)
        return table + first.has_gain + sum(n.has_gain for n in gains)
    # Each free scale as (its effect on the stream, its effect on the embedding).
    free = [] if _fixed_table(architecture) else [(0, 1) if first.kind != "none" else (1, 1)]
    free += [(1, 0)] if first.has_gain else []
    written = [n for layer in architecture.layers if layer.arrangement == "output" for n in (layer.attention_norm, layer.mlp_norm) if n]
    if any(n.kind != "none" and not n.has_gain for n in written):
        free = [(s, e) for s, e in free if not s]  # what such a norm writes has a scale of its own
    if architecture.tied:
        logits = [e * (not final.has_gain) + s * (final.kind == "none") for s, e in free]
    elif isinstance(architecture.outputs, StreamOutput):
        logits = [s * (final.kind == "none") for s, _ in free]
    else:
        logits = [0 for _ in free]
    return len(free) - any(logits) + sum(n.kind != "none" for n in written)


def _reads(architecture: Architecture) -> dict[str, Norm]:
    """Pre-norms, whose output only linear maps read, by name."""
    found = {}
    for i, layer in enumerate(architecture.layers):
        if layer.arrangement == "pre":
            found[f"layers.{i}.attention_norm"] = layer.attention_norm
            if layer.mlp_norm is not None:
                found[f"layers.{i}.mlp_norm"] = layer.mlp_norm
    found["final_norm"] = architecture.final_norm
    return {name: norm for name, norm in found.items() if norm.kind != "none"}


def _reader_shifts(architecture: Architecture) -> Iterator[Entry]:
    """LayerNorm: its bias moves into the biases that read it; every reader is blind along diag(gain)^{-1} **1**."""
    specs = tensors(architecture)
    for name, norm in _reads(architecture).items():
        if norm.kind != "layer" or (name == "final_norm" and isinstance(architecture.outputs, StreamOutput)):
            continue
        if name == "final_norm" and architecture.tied:
            # The tied unembedding cannot move; only an output bias can take the norm's bias in.
            if norm.has_bias and "head_bias" in specs:
                yield Entry(f"{name} bias", f"R^{architecture.width}", 1, architecture.width, "moves into the output bias")
            continue
        columns = [(math.prod(s.shape) // architecture.width, f"{s.name}_bias" in specs) for s in readers(architecture, name)]
        biased = sum(n for n, has in columns if has) + _forgetful_keys(architecture, name)
        total = sum(n for n, _ in columns)
        if norm.has_bias:
            yield Entry(
                f"{name} bias",
                f"R^{architecture.width}",
                1,
                architecture.width,
                "moves into the biases, or the blind part, of what reads it",
            )
        free = biased if norm.has_bias else total
        if free:
            yield Entry(f"{name} readers", f"R^{free}", 1, free, "a normalised stream has mean zero: readers are blind along diag(gain)⁻¹1")


def _keys_forget(attention: Attention) -> bool:
    """Whether a constant added to the keys is invisible: it shifts whole softmax rows, if nothing rotates or normalises it."""
    return attention.qk_norm is None and not attention.planes


def _absorbs(attention: Attention) -> bool:
    """Whether a constant in what attention reads moves into its biases (values pass it on to the output, as a constant)."""
    return attention.query_bias and (attention.key_bias or _keys_forget(attention))


def _constants(architecture: Architecture) -> Iterator[tuple[int, int]]:
    """The stream's reading points in order: (in how many directions a constant in the stream is seen there, constants written after it).

    A norm sees every constant (LayerNorm all but **1**). Without a norm, constants move into the biases of the linear maps that read the
    stream; where a map has none, it sees as many directions as it has columns. Constants written are counted in dimensions: those of the
    output biases, and those of the values (value biases, or the blind part of the value maps where LayerNorm adds a bias).
    """
    d = architecture.width
    visible = d - removes_mean(architecture)
    for layer in architecture.layers:
        a = layer.attention
        norm = layer.attention_norm
        inner = layer.mlp.mlp if isinstance(layer.mlp, Experts) else layer.mlp
        queries = 0 if a.query_bias else a.heads * a.head_dim
        keys = 0 if a.key_bias or _keys_forget(a) else a.kv_heads * a.head_dim
        neurons = 0 if inner.up_bias else inner.width * (1 + inner.gated)
        if isinstance(layer.mlp, Experts):
            neurons = layer.mlp.count * (neurons + 1)
        attention_sees = visible if norm.kind != "none" else min(visible, queries + keys)
        mlp_sees = visible if (layer.mlp_norm or norm).kind != "none" else min(visible, neurons)
        values = a.value_bias or (norm.kind == "layer" and norm.has_bias)
        written = (a.kv_heads * a.value_dim if values else 0) + (d if a.output_bias else 0)
        down = d if inner.down_bias else 0
        if layer.parallel:
            yield min(visible, attention_sees + mlp_sees), written + down
        else:
            yield attention_sees, written
            yield mlp_sees, down


def _head_columns(architecture: Architecture) -> int:
    """Directions in which the head sees an unnormalised stream: its columns, less the one that softmax forgets, or the whole width."""
    if architecture.final_norm.kind == "none" and isinstance(architecture.outputs, Classifier):
        return min(architecture.width, architecture.outputs.classes - architecture.probabilities)
    return architecture.width


def _surplus(architecture: Architecture, tables: int) -> int:
    """Dimensions in which constants written to the stream cancel each other, or are absorbed by what reads them."""
    d = architecture.width
    visible = d - removes_mean(architecture)
    offset = cancelled = 0  # directions in which the stream may be offset so far; ways to offset it by nothing

    def write(constants: int) -> None:
        nonlocal offset, cancelled
        reached = min(visible, offset + constants)
        cancelled += offset + constants - reached
        offset = reached

    if architecture.embedding_norm.kind == "none":
        write(tables * visible)
    elif architecture.embedding_norm.has_bias:
        write(d)
    for seen, written in _constants(architecture):
        offset = max(0, offset - seen)
        write(written)
    absorbed = architecture.final_norm.kind == "none" and "head_bias" in tensors(architecture)
    return cancelled + max(0, offset - (0 if absorbed else min(visible, _head_columns(architecture))))


def _tied_shift(architecture: Architecture) -> Iterator[Entry]:
    """A tied table may move where its own unembedding is blind, along diag(gain)⁻¹1, if the input can make up for it."""
    final = _last_norm(architecture)
    if not architecture.tied or final.kind != "layer" or (final.has_bias and "head_bias" not in tensors(architecture)):
        return
    if not final.has_gain and _input_centred(architecture):
        # Both uses of a row are blind along 1; all rows together are among the writers where softmax forgets that.
        free = tensors(architecture)["embed.tokens"].shape[0] - architecture.probabilities
        yield Entry("tied table", f"R^{free}", 1, free, "the stream and the unembedding are both blind along 1")
    elif _movable_tables(architecture) and not architecture.probabilities:
        yield Entry(
            "tied table", "R", 1, 1, "the unembedding is blind along diag(gain)⁻¹1; another table of the input takes the constant back"
        )


def _forgetful_keys(architecture: Architecture, norm: str) -> int:
    """Key columns without a bias, reading the named norm, whose constants shift whole softmax rows."""
    found = 0
    for i, layer in enumerate(architecture.layers):
        a = layer.attention
        if norm == f"layers.{i}.attention_norm" and not a.key_bias and a.qk_norm is None:
            found += a.kv_heads * len(a.still_lanes)
    return found


def _written_biases(architecture: Architecture) -> Iterator[Entry]:
    """Constants written to the stream add up, and move into what reads it without a norm."""
    d = architecture.width
    tables = _movable_tables(architecture)
    centred = removes_mean(architecture)
    moving = max(0, tables - 1) * (d - _input_centred(architecture))
    if moving:
        yield Entry("input tables", f"R^{moving}", 1, moving, "a constant moves from one table of the input to another")
    if any(layer.arrangement != "pre" for layer in architecture.layers):
        return
    counted = moving if architecture.embedding_norm.kind == "none" else 0
    counted += sum(
        s.dimension for layer in architecture.layers for s in _attention_shifts(architecture, layer.attention) if s.space == "value bias"
    )
    surplus = _surplus(architecture, tables) - counted
    if surplus:
        why = "constants written to the stream add up" + (" (modulo 1, which LayerNorm removes)" if centred else "")
        if any(seen < d - centred for seen, _ in _constants(architecture)):
            why += "; biases that read the stream without a norm absorb them"
        yield Entry("written biases", f"R^{surplus}", 1, surplus, why)


def _writer_shifts(architecture: Architecture) -> Iterator[Entry]:
    """What is written to the stream where no reader sees it: along **1** under LayerNorm, behind a narrow head, in rows that are not read."""
    d = architecture.width
    specs = tensors(architecture)

    def rows(name: str) -> int:
        return math.prod(specs[name].shape) // d if name in specs else 0

    last = architecture.layers[-1]
    unseen = d - _head_columns(architecture)
    if unseen and last.arrangement == "pre":
        size = rows(f"layers.{len(architecture.layers) - 1}.mlp.down")
        size = unseen * (size + (last.attention.heads * last.attention.value_dim if last.parallel else 0))
        yield Entry("writers before the head", f"R^{size}", 1, size, "a head with fewer columns than the stream reads it without a norm")
    unused = _unread_positions(architecture)
    if unused:
        yield Entry("unused positions", f"R^{unused * d}", 1, unused * d, "rows of the position table that no position reads")
    blind = 0
    if removes_mean(architecture):
        for i, layer in enumerate(architecture.layers):
            blind += rows(f"layers.{i}.attention.o") + rows(f"layers.{i}.mlp.down")
            # Moved together, the experts' biases are among the constants.
            blind += rows(f"layers.{i}.mlp.down_bias") - 1 if isinstance(layer.mlp, Experts) and layer.mlp.mlp.down_bias else 0
    if _input_centred(architecture):
        names = ["embed.types", "embed.patches", "embed.patches_bias", "embed.class_token", "embed.positions"]
        blind += sum(map(rows, names)) - unused
        # Tied tokens can only move together, and only where softmax forgets that.
        blind += architecture.probabilities if architecture.tied else rows("embed.tokens")
    if blind:
        yield Entry("writers along 1", f"R^{blind}", 1, blind, "LayerNorm removes the mean of whatever is written to the stream")


def _unread_positions(architecture: Architecture) -> int:
    """Rows of the position table that no input reaches."""
    table = architecture.positions
    if isinstance(table, NoPositions) or (isinstance(table, Sinusoidal) and not table.stored):
        return 0
    offset = table.offset if isinstance(table, LearnedPositions) else 0
    return table.count - architecture.inputs.count if isinstance(architecture.inputs, Patches) else offset


def _input_centred(architecture: Architecture) -> bool:
    """Whether everything that reads the input removes its mean."""
    first = architecture.embedding_norm.kind
    return first == "layer" or (first == "none" and bool(removes_mean(architecture)))


def _table_turns(architecture: Architecture) -> Iterator[Entry]:
    """A turn that moves every row of a fixed position table by the same constant: a table of the input takes the constant back."""
    positions = architecture.positions
    found = list(_stream_norms(architecture))
    pinned = any(norm.has_gain and not foldable for norm, foldable in found) or isinstance(architecture.outputs, StreamOutput)
    if not isinstance(positions, Sinusoidal) or positions.stored or pinned or not _movable_tables(architecture):
        return
    d = architecture.width
    rows = sinusoidal_table(positions, d).diff(dim=0)
    if any(norm.kind == "layer" for norm, _ in found):
        rows = torch.cat((torch.ones(1, d, dtype=rows.dtype), rows))
    free = d - (int(torch.linalg.matrix_rank(rows)) if len(rows) < d else d)
    turns = d * free if not found and not architecture.tied else free * (free - 1) // 2
    group = stream_group(architecture)
    extra = turns - (0 if group is None else group.dimension)
    if extra:
        yield Entry("position table", f"R^{extra}", 1, extra, "turns of the stream that move all rows of the fixed table by one constant")


def _movable_tables(architecture: Architecture) -> int:
    """In how many ways the same constant can be added to the whole input."""
    table = isinstance(architecture.positions, LearnedPositions) or (
        isinstance(architecture.positions, Sinusoidal) and architecture.positions.stored
    )
    inputs = architecture.inputs
    if isinstance(inputs, Tokens):
        return (not architecture.tied or architecture.probabilities) + table + bool(inputs.types)
    # With a class token in front, it and the bias of the patches are two constants, and a table can take either.
    return table * (inputs.bias + inputs.class_token) + (table or inputs.bias)


def removes_mean(architecture: Architecture) -> int:
    """Whether (1 or 0) every reader of the stream is a LayerNorm, which removes its mean: writers are then blind along **1**."""
    names = _reads(architecture)
    places = sum(1 if layer.mlp_norm is None else 2 for layer in architecture.layers) + 1
    return int(len(names) == places and all(n.kind == "layer" for n in names.values()))


def _post_norm(architecture: Architecture) -> Iterator[Entry]:
    """Post-norm: what each sublayer's input, residual sum and norm leave free.

    A sublayer reads the output of the norm before it (or the embedding) and adds to it, and the next norm sees the sum. So a constant added
    to its input must move into the biases that read it *and* be taken back by the biases written beside it.
    """
    if not _post(architecture):
        return
    d = architecture.width
    specs = tensors(architecture)
    source = architecture.embedding_norm
    tables = _movable_tables(architecture)
    for i, layer in enumerate(architecture.layers):
        p, a = f"layers.{i}", layer.attention
        inner = layer.mlp.mlp if isinstance(layer.mlp, Experts) else layer.mlp
        routed = isinstance(layer.mlp, Experts)
        own = sum(s.dimension for s in _attention_shifts(architecture, a) if s.space == "value bias")
        values = a.kv_heads * a.value_dim
        absorbs = _absorbs(a)
        sublayers = (
            ("attention", ("q", "k", "v"), "o", layer.attention_norm, absorbs, d * a.output_bias, values, a.value_bias, own),
            ("mlp", ("router", "gate", "up"), "down", layer.mlp_norm, inner.up_bias and not routed, d * inner.down_bias, 0, True, 0),
        )
        for name, reads, writes, norm, biased, written, hidden, certain, counted in sublayers:
            if norm is None:
                continue
            place = f"{p}.{name}"
            read = [specs[f"{place}.{r}"] for r in reads if f"{place}.{r}" in specs]
            columns = [(math.prod(s.shape) // d, f"{s.name}_bias" in specs) for s in read]
            blind = source.kind == "layer"
            if blind:
                free = sum(n for n, has in columns if has or not source.has_bias)
                if name == "attention" and source.has_bias and not a.key_bias and a.qk_norm is None:
                    free += a.kv_heads * len(a.still_lanes)
                if free:
                    yield Entry(
                        f"{place} readers",
                        f"R^{free}",
                        1,
                        free,
                        "what a LayerNorm puts out is flat along diag(gain)⁻¹1: readers are blind there",
                    )
            if norm.kind == "layer":
                rows = math.prod(specs[f"{place}.{writes}"].shape) // d
                yield Entry(f"{place} writers", f"R^{rows}", 1, rows, "the norm behind removes the mean of what is written")
                if source.kind == "none" and not architecture.tied and not _fixed_table(architecture):
                    yield Entry("embedding shear", f"R^{d}", 1, d, "x → x + (x·a)1 before the first norm, undone by what reads x")
            visible = d - (norm.kind == "layer")
            constants = written + (hidden if certain or (blind and source.has_bias) else 0)
            moved = 0
            if source.kind == "none" and biased:
                constants, moved = constants + tables * d, max(0, tables - 1) * d
            elif source.has_bias and (blind or biased):
                constants += d
            surplus = max(0, constants - visible) - counted - moved
            if surplus:
                yield Entry(
                    f"{place} biases",
                    f"R^{surplus}",
                    1,
                    surplus,
                    "constants before the norm add up; what reads them takes them into its biases",
                )
            source = norm
    final = _last_norm(architecture)
    if final is architecture.final_norm:
        return
    if "head" in specs and final.kind == "layer":
        columns_of_head = math.prod(specs["head"].shape) // d
        free = columns_of_head if not final.has_bias or "head_bias" in specs else 0
        free += d * final.has_bias
        if free:
            yield Entry(
                "head readers", f"R^{free}", 1, free, "the last norm's bias moves into the head, which is blind along diag(gain)⁻¹1"
            )
    elif architecture.tied and final.has_bias and "head_bias" in specs:
        yield Entry("last bias", f"R^{d}", 1, d, "moves into the output bias")
    gains = all(
        n is not None and n.kind == "layer" and n.has_gain for n in (architecture.layers[0].attention_norm, architecture.layers[0].mlp_norm)
    )
    if (
        len(architecture.layers) == 1
        and "head" in specs
        and gains
        and architecture.embedding_norm.kind == "none"
        and not _fixed_table(architecture)
    ):
        yield Entry("joint flow", "R", 1, 1, "a turn before the first norm, new gains, and behind them again a turn and a scale, modulo 1")


def _embedding_norm(architecture: Architecture) -> Iterator[Entry]:
    """What a norm of the input leaves free beyond its scale."""
    norm, inputs = architecture.embedding_norm, architecture.inputs
    if norm.kind == "none" or architecture.tied or _fixed_table(architecture):
        return
    if isinstance(inputs, Tokens) and not inputs.types and isinstance(architecture.positions, NoPositions):
        free = inputs.vocabulary - 1
        yield Entry(
            "token scales",
            f"R^{free}",
            1,
            free,
            "a norm that reads single tokens undoes the scale of each",
        )
    behind = [foldable or not n.has_gain for n, foldable in _stream_norms(architecture) if n is not norm]
    movable = all(behind) and not isinstance(architecture.outputs, StreamOutput)
    if norm.kind == "layer" and norm.has_gain and removes_mean(architecture) and movable:
        yield Entry(
            "joint flow", "R", 1, 1, "a turn before the embedding norm, new gains, and behind them again a turn and a scale, modulo 1"
        )


def _output_shifts(architecture: Architecture) -> Iterator[Entry]:
    """Softmax outputs forget a uniform shift of the logits."""
    if not architecture.probabilities or not isinstance(architecture.outputs, LanguageModel | Classifier):
        return
    d = architecture.width
    if "head_bias" in tensors(architecture):
        yield Entry("output bias", "R", 1, 1, "softmax forgets a uniform shift of the logits")
    if not architecture.tied:
        final = _last_norm(architecture)
        # Where readers are blind along diag(gain)^{-1} 1 in every column, the uniform column is already counted.
        counted = final.kind == "layer" and (not final.has_bias or "head_bias" in tensors(architecture))
        yield Entry("unembedding", f"R^{d - counted}", 1, d - counted, "softmax forgets a uniform shift of the logits")


def _router_shifts(architecture: Architecture) -> Iterator[Entry]:
    for i, layer in enumerate(architecture.layers):
        if isinstance(layer.mlp, Experts):
            norm = layer.mlp_norm or layer.attention_norm
            size = architecture.width - (norm.kind == "layer" and not norm.has_bias)
            why = "softmax over the experts forgets a uniform shift"
            if layer.mlp.active == 1:
                size += 1
                why += ", and the choice of one expert forgets the scale too"
            yield Entry(f"layers.{i} router", f"R^{size}", 1, size, why)


def _notes(architecture: Architecture, scale: int) -> Iterator[str]:
    if scale:
        yield "scales of the stream are undone by norms with ε = 0; they are counted, and never moved"
    arrangements = {layer.arrangement for layer in architecture.layers}
    if len(arrangements) > 1 or (_post(architecture) and architecture.final_norm.kind != "none"):
        yield "layers of different arrangement, or a final norm behind post-norm layers: the total counts the listed spaces only"
    for i, layer in enumerate(architecture.layers):
        a = layer.attention
        inner = architecture.width - (layer.attention_norm.kind == "layer")
        if max(a.head_dim, a.value_dim) > inner:
            yield f"layer {i}: heads wider than the stream are rank deficient; dimensions of qk and vo are then upper bounds"
            break


def symmetry(architecture: Architecture) -> Symmetry:
    """Derive the functional-equivalence group of an architecture, with an account of every space.

    Parameters
    ----------
    architecture : Architecture

    Returns
    -------
    Symmetry
        ``.group`` acts (`coset.act`), ``.total_dimension`` is what `coset certify` measures, ``.to_json()`` is the account.

    Notes
    -----
    Heads and bases: "Functional Equivalence in Attention" (ICML 2026). Sinusoidal and learned tables leave attention the group of plain
    attention, d_h² per head for queries and keys; a rotary encoding shrinks it to d_h. The stream, gains and shifts are derived in
    docs/theory.md.
    """
    stream = stream_group(architecture)
    scale = _scales(architecture, stream)
    name = "1" if stream is None else stream.name
    if scale:
        positive = "R_{>0}" if scale == 1 else f"R_{{>0}}^{scale}"
        name = positive if name == "1" else f"{name} × {positive}"
    final = _last_norm(architecture)
    foldable = final.has_gain and not architecture.tied and not isinstance(architecture.outputs, StreamOutput)
    rules = (
        _written_biases,
        _embedding_norm,
        _post_norm,
        _table_turns,
        _writer_shifts,
        _tied_shift,
        _reader_shifts,
        _router_shifts,
        _output_shifts,
    )
    shifts = tuple(entry for rule in rules for entry in rule(architecture))
    return Symmetry(
        architecture=architecture,
        layers=tuple(_layer(architecture, layer) for layer in architecture.layers),
        stream=Entry("stream", name, 1, (0 if stream is None else stream.dimension) + scale, _stream_reason(architecture, stream)),
        gains=Entry(
            "gains",
            f"(R^×)^{architecture.width}" if foldable else "1",
            1,
            architecture.width * foldable,
            "the final gain moves into the head",
        ),
        shifts=shifts,
        notes=tuple(_notes(architecture, scale)),
    )


def _stream_reason(architecture: Architecture, stream: Group | None) -> str:
    if isinstance(architecture.outputs, StreamOutput):
        return "the output is the stream itself"
    if isinstance(architecture.positions, Sinusoidal) and not architecture.positions.stored:
        return "the position table is part of the function: only what fixes its rows is free"
    if isinstance(stream, Monomial):
        return "a gain stays on the stream (tied unembedding or post-norm): its basis is fixed up to order and sign"
    if isinstance(stream, GeneralLinear):
        return "nothing but linear maps reads the stream"
    if stream is not None and any(n.kind == "layer" for n, _ in _stream_norms(architecture)):
        return "LayerNorm commutes with rotations that fix 1"
    return "RMSNorm commutes with rotations" if list(_stream_norms(architecture)) else "the tied unembedding keeps inner products"


def headline(architecture: Architecture) -> str:
    """One sentence: what the positional encoding does to the group of attention."""
    attention = architecture.layers[0].attention
    n = attention.head_dim
    if attention.qk_norm is not None:
        left = f"{_qk(attention).dimension} dimensions a layer, in place of {n}² = {n * n} a head"
        return f"QK-norm leaves queries and keys signs and scales only ({left})."
    if isinstance(attention.positions, Rotary):
        g = qk_group(attention)
        return f"RoPE shrinks the query-key group of plain attention from d_h² = {n * n} to {g.dimension} dimensions a head: {g.name}."
    kind = {Sinusoidal: "A sinusoidal table", LearnedPositions: "A learned table"}.get(type(architecture.positions), "")
    if kind:
        return f"{kind} keeps the query-key group of plain attention: GL({n}), d_h² = {n * n} dimensions a head."
    if isinstance(attention.positions, Alibi):
        return f"ALiBi keeps GL({n}), d_h² = {n * n} dimensions a head; its slopes fix the order of the heads."
    if isinstance(attention.positions, RelativeBias):
        return f"A learned bias keeps GL({n}), d_h² = {n * n} dimensions a head; its rows travel with the heads."
    return f"Plain attention: GL({n}), d_h² = {n * n} dimensions a head for queries and keys."
