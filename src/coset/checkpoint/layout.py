"""The small algebra between stored and canonical tensors.

A family's table says of each stored tensor how it is made of canonical ones: the axes of a canonical tensor have names (their spaces,
`coset.parameters`), and a pattern such as ``"(kv query qk) stream"`` lists the stored axes as products of them. Parts of a fused tensor are
joined along one axis. Every entry resolves to *views* of the stored tensor with axes in canonical order; reading copies out of the view,
writing copies into it, so the two directions are one declaration and exactly inverse.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from coset.errors import CosetError
from coset.parameters import TensorSpec


@dataclass(frozen=True)
class Part:
    """A canonical tensor inside a stored one; `pattern` gives the stored axes as products of canonical axes ("1": an axis of size one)."""

    canonical: str
    pattern: str


@dataclass(frozen=True)
class Entry:
    """One stored tensor.

    Attributes
    ----------
    stored
        Name, with ``{body}`` (the prefix of the model inside its head class), ``{i}`` (layer) and ``{e}`` (expert) as placeholders. With
        ``{e}`` the parts are one expert of their canonical tensors.
    parts
        What it holds, in order, joined along axis `join`.
    merge
        The two leading axes of the joined parts are one stored axis: head-major fused tensors, where parts alternate head by head.
    shape
        Finer stored shape of the last axes, such as the (channel, row, column) of a convolution's patch axis.
    mirror
        A second copy of another entry's tensor, which files may hold or lack: read only to check that the two agree.
    """

    stored: str
    parts: tuple[Part, ...]
    join: int = 0
    merge: bool = False
    shape: tuple[int, ...] = ()
    mirror: bool = False


def one(stored: str, canonical: str, pattern: str) -> Entry:
    """A stored tensor that holds one canonical tensor."""
    return Entry(stored, (Part(canonical, pattern),))


def mirror(stored: str, canonical: str, pattern: str) -> Entry:
    """A stored tensor that repeats a canonical tensor stored elsewhere."""
    return Entry(stored, (Part(canonical, pattern),), mirror=True)


def linear(stored: str, canonical: str, out: str, into: str) -> tuple[Entry, ...]:
    """``nn.Linear``: weight [out, in] and bias [out]."""
    return one(f"{stored}.weight", canonical, f"{out} {into}"), one(f"{stored}.bias", f"{canonical}_bias", out)


def conv1d(stored: str, canonical: str, out: str, into: str) -> tuple[Entry, ...]:
    """GPT-2's ``Conv1D``: weight [in, out] and bias [out]."""
    return one(f"{stored}.weight", canonical, f"{into} {out}"), one(f"{stored}.bias", f"{canonical}_bias", out)


def norm(stored: str, canonical: str, weight: str = "weight", bias: str = "bias") -> tuple[Entry, ...]:
    """Gain and bias of a norm over the stream."""
    return one(f"{stored}.{weight}", f"{canonical}.gain", "stream"), one(f"{stored}.{bias}", f"{canonical}.bias", "stream")


def fused_linear(stored: str, parts: Mapping[str, str], into: str) -> tuple[Entry, ...]:
    """``nn.Linear`` whose outputs are blocks, one after the other: canonical name -> its out axes."""
    return (
        Entry(f"{stored}.weight", tuple(Part(name, f"{out} {into}") for name, out in parts.items())),
        Entry(f"{stored}.bias", tuple(Part(f"{name}_bias", out) for name, out in parts.items())),
    )


def fused_conv1d(stored: str, parts: Mapping[str, str], into: str) -> tuple[Entry, ...]:
    """``Conv1D`` whose outputs are blocks, one after the other: canonical name -> its out axes."""
    return (
        Entry(f"{stored}.weight", tuple(Part(name, f"{into} {out}") for name, out in parts.items()), join=1),
        Entry(f"{stored}.bias", tuple(Part(f"{name}_bias", out) for name, out in parts.items())),
    )


def interleaved_linear(stored: str, parts: Mapping[str, str], outer: str, into: str) -> tuple[Entry, ...]:
    """``nn.Linear`` whose outputs run over `outer` first and over the parts inside of it: head by head its query, key and value."""
    return (
        Entry(f"{stored}.weight", tuple(Part(name, f"{outer} {out} {into}") for name, out in parts.items()), join=1, merge=True),
        Entry(f"{stored}.bias", tuple(Part(f"{name}_bias", f"{outer} {out}") for name, out in parts.items()), join=1, merge=True),
    )


def check_finite(name: str, stored: Tensor, owner: object) -> None:
    """Raise if a floating-point tensor holds NaN or infinity."""
    # The extremes of a tensor with a NaN are NaN; this reads the tensor once and allocates nothing.
    if stored.numel() and stored.is_floating_point() and not all(math.isfinite(extreme) for extreme in torch.aminmax(stored)):
        raise CosetError(f"{owner}: tensor {name} holds NaN or infinity; a checkpoint like that cannot be transformed or compared")


# --- resolved against the sizes of an architecture --------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """Where a canonical tensor, or one expert of it, lies in the joined axes of a stored tensor."""

    canonical: str
    expert: int | None
    start: int
    length: int
    factors: tuple[int, ...]
    order: tuple[int, ...]

    def joined(self, canonical: Tensor) -> Tensor:
        """The canonical tensor with its axes in stored order: the inverse of the view that :meth:`Place.views` takes."""
        return canonical.permute(sorted(range(len(self.order)), key=self.order.__getitem__))


@dataclass(frozen=True)
class Place:
    """A stored tensor resolved: its shape, the shape in which its parts are joined, and its slots."""

    stored: str
    shape: tuple[int, ...]
    joined: tuple[int, ...]
    join: int
    slots: tuple[Slot, ...]
    layer: int | None
    mirror: bool

    def views(self, stored: Tensor) -> Iterator[tuple[Slot, Tensor]]:
        """Every slot with its view of the stored tensor, axes in canonical order."""
        joined = stored.view(self.joined)
        for slot in self.slots:
            yield slot, joined.narrow(self.join, slot.start, slot.length).view(slot.factors).permute(slot.order)


def _groups(pattern: str) -> list[list[str]]:
    found = re.findall(r"\(([^()]*)\)|(\S+)", pattern)
    return [[] if single == "1" else (several or single).split() for several, single in found]


def _place(entry: Entry, specs: Mapping[str, TensorSpec], names: Mapping[str, str], expert: int | None) -> Place:
    slots: list[Slot] = []
    joined: list[int] = []
    at = 0
    for part in entry.parts:
        spec = specs[part.canonical.format_map(names)]
        sizes = {axis.space: axis.size for axis in spec.axes if expert is None or axis.space != "expert"}
        groups = _groups(part.pattern)
        flat = [space for group in groups for space in group]
        if sorted(flat) != sorted(sizes):
            raise ValueError(f"pattern {part.pattern!r} does not name the axes {list(sizes)} of {spec.name}")
        shape = [math.prod(sizes[s] for s in group) for group in groups]
        length = shape[entry.join]
        if joined and [n for a, n in enumerate(shape) if a != entry.join] != [n for a, n in enumerate(joined) if a != entry.join]:
            raise ValueError(f"the parts of {entry.stored} do not join along axis {entry.join}")
        slots.append(Slot(spec.name, expert, at, length, tuple(sizes[s] for s in flat), tuple(flat.index(s) for s in sizes)))
        at += length
        joined = shape
    joined[entry.join] = at
    stored = [joined[0] * joined[1], *joined[2:]] if entry.merge else list(joined)
    if entry.shape:
        stored = [*stored[:-1], *entry.shape]
    layer = specs[slots[0].canonical].layer
    return Place(entry.stored.format_map(names), tuple(stored), tuple(joined), entry.join, tuple(slots), layer, entry.mirror)


def _indices(name: str, layers: int, experts: int) -> Iterator[tuple[dict[str, str], int | None]]:
    """Values of the placeholders of a name: over layers, experts, both, or neither."""
    for i in range(layers) if "{i}" in name else [0]:
        for e in range(experts) if "{e}" in name else [None]:
            yield {"i": str(i), "e": str(e)}, e


def expand(name: str, body: str, layers: int, experts: int = 0) -> tuple[str, ...]:
    """All the stored names that a name with placeholders stands for."""
    return tuple(name.format_map({"body": body, **names}) for names, _ in _indices(name, layers, experts))


@dataclass(frozen=True)
class Table:
    """A family's entries resolved for one architecture: every stored tensor that carries canonical ones."""

    specs: Mapping[str, TensorSpec]
    places: tuple[Place, ...]

    @staticmethod
    def resolve(entries: Iterable[Entry], body: str, specs: Mapping[str, TensorSpec], layers: int, experts: int) -> Table:
        """Resolve the entries whose canonical tensors the architecture has; the others (biases it lacks, another head) are not stored.

        Raises
        ------
        ValueError
            If the table is wrong: it misses or repeats a canonical tensor, or a pattern does not fit (an error in the family's file).
        """
        places = []
        for entry in entries:
            for names, expert in _indices(entry.stored, layers, experts):
                names["body"] = body
                present = [part.canonical.format_map(names) in specs for part in entry.parts]
                if all(present):
                    places.append(_place(entry, specs, names, expert))
                elif any(present):
                    raise ValueError(f"{entry.stored}: the architecture has only some of its parts")
        covered = [(slot.canonical, slot.expert) for place in places if not place.mirror for slot in place.slots]
        if len(set(covered)) != len(covered) or {name for name, _ in covered} != set(specs):
            wrong = sorted(set(specs) ^ {name for name, _ in covered}) or sorted({n for n, e in covered if covered.count((n, e)) > 1})
            raise ValueError(f"the table does not store exactly once: {', '.join(wrong)}")
        held = {place.stored for place in places if not place.mirror}
        mirrors = [place for place in places if place.mirror and place.stored not in held]
        # Mirrors come last: they are compared with what the others have filled in.
        return Table(specs, (*(place for place in places if not place.mirror), *mirrors))

    def without(self, names: Iterable[str]) -> Table:
        """The table less some mirrors."""
        dropped = set(names)
        return Table(self.specs, tuple(place for place in self.places if place.stored not in dropped))

    def canonical(
        self, layer: int | None, read: Callable[[str], Tensor], dtype: torch.dtype, owner: object, only: str | None = None
    ) -> dict[str, Tensor]:
        """The canonical tensors of one layer (None: of the two ends), or `only` one of them, cast to `dtype`, in canonical order.

        Errors name the `owner`.

        They keep the memory order of the stored tensors, so most are not contiguous: transposing large tensors twice would cost more than
        the cast.

        Raises
        ------
        CosetError
            If a mirror differs from the tensor that it repeats, or a tensor holds NaN or infinity.
        """
        out: dict[str, Tensor] = {}
        for place in self.places:
            if place.layer != layer or (only is not None and all(slot.canonical != only for slot in place.slots)):
                continue
            stored = read(place.stored)
            check_finite(place.stored, stored, owner)
            for slot, view in place.views(stored.contiguous()):
                if place.mirror:
                    self._check_mirror(place, slot, out, view.to(dtype), owner)
                elif slot.expert is None:
                    out[slot.canonical] = view.to(dtype, copy=True)
                else:
                    if slot.canonical not in out:
                        out[slot.canonical] = self._stack(slot, dtype)
                    self._target(out, slot).copy_(view)
        return {name: out[name] for name, spec in self.specs.items() if spec.layer == layer and (only is None or name == only)}

    def _stack(self, slot: Slot, dtype: torch.dtype) -> Tensor:
        """An empty tensor for all experts, in the memory order of one."""
        spec = self.specs[slot.canonical]
        axis = spec.axis("expert") or 0
        stacked = torch.empty((spec.shape[axis], *slot.factors), dtype=dtype)
        return stacked.permute(0, *(1 + o for o in slot.order)).movedim(0, axis)

    def _check_mirror(self, place: Place, slot: Slot, out: Mapping[str, Tensor], repeated: Tensor, owner: object) -> None:
        if not torch.equal(self._target(out, slot), repeated):
            raise CosetError(
                f"{owner}: tensor {place.stored} differs from {self._holder(slot.canonical)}, while the config ties them: "
                "transformers would load them untied; set tie_word_embeddings to false, or remove one of the two"
            )

    def stored(self, layer: int | None, canonical: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors of one layer (None: of the ends), one at a time, in the dtype of `canonical`, which they may share memory with.

        Raises
        ------
        CosetError
            If a canonical tensor is missing or of another shape.
        """
        for name, spec in self.specs.items():
            if spec.layer == layer and (name not in canonical or tuple(canonical[name].shape) != spec.shape):
                got = f"got {list(canonical[name].shape)}" if name in canonical else "it is missing"
                raise CosetError(f"canonical tensor {name} must have shape {list(spec.shape)}, {got}")
        for place in self.places:
            if place.layer == layer:
                if len(place.slots) == 1:
                    stored = place.slots[0].joined(self._target(canonical, place.slots[0])).reshape(place.shape)
                else:
                    stored = torch.empty(place.shape, dtype=canonical[place.slots[0].canonical].dtype)
                    for slot, view in place.views(stored):
                        view.copy_(self._target(canonical, slot))
                yield place.stored, stored

    def _target(self, tensors: Mapping[str, Tensor], slot: Slot) -> Tensor:
        whole = tensors[slot.canonical]
        axis = self.specs[slot.canonical].axis("expert")
        return whole if slot.expert is None or axis is None else whole.select(axis, slot.expert)

    def _holder(self, canonical: str) -> str:
        return next(p.stored for p in self.places if not p.mirror and any(s.canonical == canonical for s in p.slots))
