"""A checkpoint as a model: its architecture, and its canonical tensors a layer at a time."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coset.architecture import Architecture, Experts, LanguageModel
from coset.checkpoint import files
from coset.checkpoint.config import Config, refuse_everywhere
from coset.checkpoint.families import FAMILIES, Family, Head, Layout
from coset.checkpoint.files import Checkpoint
from coset.checkpoint.layout import Table, check_finite, expand
from coset.errors import CosetError
from coset.parameters import tensors

Block = dict[str, Tensor]
"""Canonical tensors of one layer, or of the two ends."""

_FLOATING = ("F16", "BF16", "F32", "F64")
_SHOWN = 12
_PIECE = 1 << 18


@dataclass(frozen=True)
class Model:
    """A checkpoint read through its family. Holds no weights: every call reads what it needs.

    Attributes
    ----------
    checkpoint
        The files.
    family
        The config's ``model_type``.
    head
        The class in the config's ``architectures``.
    architecture
        What the model computes.
    table
        Where every canonical tensor is stored.
    invariants
        Stored tensors that no symmetry moves: buffers, and heads that the architecture cannot express. They are copied as they are.
    pinned
        Canonical tensors that an invariant head also reads (a masked-language-model head tied to the embedding): they must not change.
    """

    checkpoint: Checkpoint
    family: str
    head: str
    architecture: Architecture
    table: Table
    invariants: tuple[str, ...]
    pinned: tuple[str, ...]

    @property
    def config(self) -> Mapping[str, Any]:
        """The contents of config.json."""
        return self.checkpoint.config

    @property
    def path(self) -> Path:
        """The checkpoint's folder."""
        return self.checkpoint.path

    def block(self, layer: int, dtype: torch.dtype = torch.float64) -> Block:
        """Canonical tensors of one layer, by their full names (``layers.3.attention.q``).

        Raises
        ------
        CosetError
            If there is no such layer, a file changed, or a tensor holds NaN or infinity.
        """
        if not 0 <= layer < len(self.architecture.layers):
            raise CosetError(f"{self.path}: there is no layer {layer}; the model has {len(self.architecture.layers)}")
        return self._read(layer, dtype)

    def ends(self, dtype: torch.dtype = torch.float64) -> Block:
        """Canonical tensors outside the layers: embeddings, positions, final norm, head."""
        return self._read(None, dtype)

    def tensor(self, name: str, dtype: torch.dtype = torch.float64) -> Tensor:
        """One canonical tensor: at the ends, where vocabularies are large, all of them may be too many at once."""
        return self.table.canonical(tensors(self.architecture)[name].layer, self.checkpoint.read, dtype, self.path, name)[name]

    def parameters(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """Every canonical tensor, in forward order."""
        found = self.ends(dtype)
        for layer in range(len(self.architecture.layers)):
            found |= self.block(layer, dtype)
        return {name: found[name] for name in tensors(self.architecture)}

    def _read(self, layer: int | None, dtype: torch.dtype) -> Block:
        return self.table.canonical(layer, self.checkpoint.read, dtype, self.path)


def _head(config: Config, family: Family) -> tuple[str, Head]:
    names = config.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in family.heads:
        supported = ", ".join(family.heads)
        raise config.fault("architectures", f"expected one class that is supported for {family.model_type} ({supported}), got {names!r}")
    return names[0], family.heads[names[0]]


def _layout(checkpoint: Checkpoint, family: Family, config: Config) -> tuple[Layout, str]:
    present = checkpoint.tensors
    anchors = []
    for layout in family.layouts(config):
        for body in family.bodies:
            anchors.append(layout.anchor.format_map({"body": body}))
            if anchors[-1] in present:
                return layout, body
    raise CosetError(
        f"{checkpoint.path}: the tensors are not those of the architecture: "
        f"{family.model_type} files hold one of {', '.join(anchors)}; none is there"
    )


def _experts(architecture: Architecture) -> int:
    return max((layer.mlp.count for layer in architecture.layers if isinstance(layer.mlp, Experts)), default=0)


def _resolve(family: Family, head: Head, layout: Layout, body: str, architecture: Architecture) -> Table:
    return Table.resolve((*layout.entries, *head.entries), body, tensors(architecture), len(architecture.layers), _experts(architecture))


def _sorted_out(checkpoint: Checkpoint, table: Table, required: Iterable[str], optional: Iterable[str]) -> tuple[Table, tuple[str, ...]]:
    """The table less absent mirrors, and the invariants that are there; raise unless every tensor is accounted for, in its shape."""
    present = checkpoint.tensors
    table = table.without(place.stored for place in table.places if place.mirror and place.stored not in present)
    expected = {place.stored: place for place in table.places}
    known = {**dict.fromkeys(required), **dict.fromkeys(optional)}
    faults = [f"tensor {name} is missing (expected shape {list(place.shape)})" for name, place in expected.items() if name not in present]
    faults += [f"tensor {name} is missing" for name in required if name not in present]
    faults += [
        f"tensor {name} {list(stored.shape)} is not accounted for"
        for name, stored in present.items()
        if name not in expected and name not in known
    ]
    for name, place in expected.items():
        if name in present and present[name].shape != place.shape:
            faults.append(f"tensor {name}: the config gives shape {list(place.shape)}, the file holds {list(present[name].shape)}")
        elif name in present and present[name].dtype not in _FLOATING:
            faults.append(
                f"tensor {name}: expected one of {', '.join(_FLOATING)}, got {present[name].dtype} (quantised weights are not supported)"
            )
    if faults:
        more = [f"... and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        raise CosetError("\n".join([f"{checkpoint.path}: the tensors are not those of the architecture", *faults[:_SHOWN], *more]))
    return table, tuple(name for name in present if name not in expected)


def _described(path: Path) -> str:
    return str(path / files.CONFIG)


def load(path: str | os.PathLike[str], legacy: bool = False) -> Model:
    """Open a checkpoint folder as transformers saves it, validated against its config; reads headers only.

    Parameters
    ----------
    path
        Folder with config.json and safetensors.
    legacy
        Accept pytorch_model.bin, read with ``torch.load(weights_only=True)``.

    Raises
    ------
    CosetError
        If a file is corrupt, index and shards disagree, the family, class or a config field is not supported, or the tensors are not
        exactly those that the config describes.
    """
    checkpoint = Checkpoint.open(path, legacy)
    config = Config(_described(checkpoint.path), checkpoint.config)
    kind = config.text("model_type")
    if kind not in FAMILIES:
        raise config.fault("model_type", f"{kind!r} is not supported (supported: {', '.join(sorted(FAMILIES))})")
    family = FAMILIES[kind]
    refuse_everywhere(config)
    name, head = _head(config, family)
    try:
        architecture = family.architecture(config, head.outputs(config))
    except CosetError as error:
        raise error if str(error).startswith(config.path) else CosetError(f"{config.path}: {error}") from None
    layout, body = _layout(checkpoint, family, config)
    table = _resolve(family, head, layout, body, architecture)
    layers = len(architecture.layers)
    required = [full for n in head.required for full in expand(n, body, layers)]
    optional = [full for n in (*head.optional, *layout.optional) for full in expand(n, body, layers)]
    table, invariants = _sorted_out(checkpoint, table, required, optional)
    return Model(checkpoint, kind, name, architecture, table, invariants, head.pinned)


def untie(model: Model) -> Model:
    """The same model with an unembedding of its own, for :func:`save` with ``untied=True``.

    Its table stores ``head`` under the name that the family gives it; the checkpoint on disk is still the tied one, so only
    :func:`save` can use it.

    Raises
    ------
    CosetError
        If the unembedding is not tied.
    """
    outputs = model.architecture.outputs
    if not isinstance(outputs, LanguageModel) or not outputs.tied:
        raise CosetError(f"{model.path}: nothing to untie: the unembedding is not tied to the embedding")
    architecture = dataclasses.replace(model.architecture, outputs=dataclasses.replace(outputs, tied=False))
    family = FAMILIES[model.family]
    layout, body = _layout(model.checkpoint, family, Config(_described(model.path), model.config))
    table = _resolve(family, family.heads[model.head], layout, body, architecture)
    return dataclasses.replace(model, architecture=architecture, table=table)


def _untied_config(value: Any) -> Any:
    """The config with every tie flag off, nested ones too."""
    if not isinstance(value, dict):
        return value
    return {k: False if k == "tie_word_embeddings" else _untied_config(v) for k, v in value.items()}


def _check_finite(model: Model, layer: int | None) -> None:
    for place in model.table.places:
        if place.layer == layer:
            check_finite(place.stored, model.checkpoint.read(place.stored), model.path)


def _squares(exact: Tensor, cast: Tensor) -> tuple[float, float]:
    """Squared norms of the cast's error and of the exact tensor, piece by piece: embeddings are large."""
    error = size = 0.0
    for a, b in zip(torch.split(exact.reshape(-1), _PIECE), torch.split(cast.reshape(-1), _PIECE), strict=True):
        difference = b.to(a.dtype).sub_(a)
        error += float(difference.dot(difference))
        size += float(a.dot(a))
    return error, size


@dataclass(frozen=True)
class Saved:
    """What :func:`save` wrote.

    Attributes
    ----------
    rounding
        Relative Frobenius error of the one cast to the stored dtypes, over all written tensors.
    left_out
        Files of the source that were not copied, because they hold weights in another format.
    """

    path: Path
    rounding: float
    left_out: tuple[str, ...]


def save(
    path: str | os.PathLike[str],
    model: Model,
    transform: Callable[[int | None, Block], Mapping[str, Tensor]],
    *,
    only: Collection[int | None] | None = None,
    invariant: Callable[[str, Tensor], Tensor] | None = None,
    untied: bool = False,
    metadata: Mapping[str, str] | None = None,
    texts: Mapping[str, str] | None = None,
    overwrite: bool = False,
    dtype: torch.dtype = torch.float64,
    progress: Callable[[int, int], None] | None = None,
) -> Saved:
    """Write a checkpoint whose canonical tensors are `transform`'s, one layer in memory at a time.

    Parameters
    ----------
    transform
        (layer, its canonical tensors in `dtype`) -> its new ones; layer None is the ends, and comes first. May return its argument.
    only
        The blocks that `transform` changes (None in it: the ends); the others are checked for NaN and copied byte for byte.
    invariant
        (name, stored value) -> new value of a known invariant, for operations that are no symmetries, such as a mean of models; None copies
        them byte for byte.
    untied
        Write an unembedding of its own: `transform` then gets (equal to the embedding) and returns ``head`` [stream, vocabulary] too, and
        the config's tie flags are switched off.
    metadata, texts, overwrite
        See :func:`coset.checkpoint.files.write`.
    progress
        Called with (blocks done, blocks in all).

    Raises
    ------
    CosetError
        If the output is not allowed or cannot be written, a transformed tensor has another shape or is not finite in its stored dtype.
    """
    written = untie(model) if untied else model
    present = model.checkpoint.tensors
    home = next(place.stored for place in model.table.places if place.layer is None)
    added = {p.stored: (present[home].dtype, p.shape) for p in written.table.places if p.stored not in present}
    config = {**_untied_config(dict(model.config)), "tie_word_embeddings": False} if untied else None
    squares = [0.0, 0.0]

    def cast(name: str, exact: Tensor) -> tuple[str, Tensor]:
        rounded = exact.to(files.DTYPES[present[name].dtype if name in present else added[name][0]])
        if rounded.dtype != exact.dtype:
            error, size = _squares(exact, rounded)
            if not math.isfinite(error):
                raise CosetError(f"{model.path}: tensor {name} is not finite in {rounded.dtype}: its new values leave the range")
            squares[0] += error
            squares[1] += size
        else:
            check_finite(name, rounded, model.path)
        return name, rounded

    def stored() -> Iterator[tuple[str, Tensor]]:
        layers: list[int | None] = [None, *range(len(model.architecture.layers))]
        for done, layer in enumerate(layers):
            if only is not None and layer not in only:
                _check_finite(model, layer)
            else:
                block = model.ends(dtype) if layer is None else model.block(layer, dtype)
                if untied and layer is None:
                    block["head"] = block["embed.tokens"].mT
                changed = transform(layer, block)
                del block  # before the next one is read
                yield from itertools.starmap(cast, written.table.stored(layer, changed))
                del changed
            if progress is not None:
                progress(done + 1, len(layers))
        if invariant is not None:
            for name in model.invariants:
                yield cast(name, invariant(name, model.checkpoint.read(name)))

    left_out = files.write(
        path, model.checkpoint, stored(), config=config, metadata=metadata, added=added, texts=texts, overwrite=overwrite
    )
    rounding = math.sqrt(squares[0] / squares[1]) if squares[1] else 0.0
    return Saved(Path(path), rounding, left_out)
