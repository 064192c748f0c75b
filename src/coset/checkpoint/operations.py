"""What is done with checkpoints on disk: scramble, apply, align, merge. Each reads and writes one layer at a time.

Everything is computed in float64 and cast once; the output has the keys, shapes, dtypes, shards and config of its input, and says in its
metadata and in ``COSET.md`` how it was made.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from coset.align.matching import Match, Progress, match
from coset.checkpoint.compatible import require_comparable
from coset.checkpoint.files import check_output
from coset.checkpoint.model import Block, Model, Saved, load, save, untie
from coset.errors import CosetError
from coset.parameters import tensors
from coset.transform import SPACES, Transform, random_transform

Path_ = str | os.PathLike[str]


class Blocks(Mapping[str, Tensor]):
    """The canonical tensors of a checkpoint as a mapping that holds one block at a time.

    With `untied` there is a tensor ``head``, equal to the token embedding, that the checkpoint does not store.
    """

    def __init__(self, model: Model, *, untied: bool = False):
        self.model, self.untied = model, untied
        self.specs = tensors(untie(model).architecture if untied else model.architecture)
        self._held: tuple[int | None, Block] | None = None

    def block(self, index: int | None) -> Block:
        """All tensors of a layer, or of the ends (None)."""
        if self._held is None or self._held[0] != index:
            self._held = None  # release the old block before reading the next
            found = self.model.ends() if index is None else self.model.block(index)
            if self.untied and index is None:
                found["head"] = found["embed.tokens"].mT.clone()
            self._held = (index, found)
        return self._held[1]

    def __getitem__(self, name: str) -> Tensor:
        return self.block(self.specs[name].layer)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


@dataclass(frozen=True)
class Distance:
    """Relative Frobenius distance of one block from the reference's, before and after; `layer` None is the two ends."""

    layer: int | None
    before: float
    after: float


@dataclass(frozen=True)
class Written:
    """What an operation did.

    Attributes
    ----------
    path
        The output.
    transform
        What was applied.
    rounding
        Relative error of the one cast to the stored dtypes.
    distances
        `align` only: block by block.
    notes
        Degenerate spots, and files that were left out.
    """

    path: Path
    transform: Transform | None
    rounding: float
    distances: tuple[Distance, ...] = ()
    notes: tuple[str, ...] = ()


def _card(title: str, facts: Mapping[str, str]) -> dict[str, str]:
    lines = [f"# {title}", "", *(f"- {key}: {value}" for key, value in facts.items()), ""]
    return {"COSET.md": "\n".join(lines)}


def _facts(verb: str, **more: str) -> dict[str, str]:
    return {"coset_verb": verb, "coset_version": version("coset"), **{f"coset_{key}": value for key, value in more.items()}}


def _left_out(saved: Saved) -> tuple[str, ...]:
    return tuple(f"{name}: not copied, it holds weights in another format" for name in saved.left_out)


def _touched(transform: Transform) -> set[int | None]:
    """Blocks that a transform changes."""
    if "stream" in transform.element:
        return {None, *range(len(transform.architecture.layers))}
    found: set[int | None] = {int(key.split(".")[1]) for key in transform.element if key.startswith("layers.")}
    for name in transform.target:
        found.add(int(name.split(".")[1]) if name.startswith("layers.") else None)
    return found


def _check_transform_output(transform: Path_ | None, out: Path_, inputs: Sequence[Path], overwrite: bool) -> None:
    """Refuse before any work a transform file that cannot be written."""
    if transform is None:
        return
    path = Path(transform)
    if path.exists() and not overwrite:
        raise CosetError(f"{path}: the transform file already exists; give another name, or --overwrite")
    if not path.parent.is_dir():
        raise CosetError(f"{path}: the folder {path.parent} does not exist; create it first")
    if any(source.resolve() in path.resolve().parents for source in inputs) or Path(out).resolve() in path.resolve().parents:
        raise CosetError(f"{path}: the transform file lies inside a checkpoint folder; choose a place beside it")


def _movable(model: Model, spaces: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The chosen spaces split into those that this architecture has, and those with nothing to move."""
    from coset.normal_form import coordinates
    from coset.symmetry import stream_group
    from coset.transform import check_spaces, gauge_names

    check_spaces(spaces)
    a = model.architecture
    kinds = {c.space for name, c in coordinates(a).items() if name in gauge_names(a, ("gains", "shifts"), model.pinned)}
    experts = any(type(layer.mlp).__name__ == "Experts" for layer in a.layers)
    empty = {"gains": "gains" not in kinds, "shifts": "shifts" not in kinds, "experts": not experts, "stream": stream_group(a) is None}
    return [s for s in spaces if not empty.get(s, False)], [s for s in spaces if empty.get(s, False)]


def choose_spaces(model: Model, spaces: Sequence[str] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The spaces to move in a checkpoint (default: all it has), and a note for each asked one with nothing to move.

    Raises
    ------
    CosetError
        If a name is unknown or nothing at all can move.
    """
    moving, empty = _movable(model, SPACES if spaces is None else tuple(spaces))
    if not moving:
        raise CosetError(f"{model.path}: nothing can move in {', '.join(empty)}: this architecture has no freedom there")
    return tuple(moving), () if spaces is None else tuple(f"{s}: nothing to move there in this architecture" for s in empty)


def scramble(
    checkpoint: Path_,
    out: Path_,
    *,
    spaces: Sequence[str] | None = None,
    seed: int = 0,
    transform: Path_ | None = None,
    overwrite: bool = False,
    legacy: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Write a random checkpoint with the same function.

    Parameters
    ----------
    checkpoint, out
        Folders; `out` must not exist unless `overwrite`.
    spaces
        Of :data:`coset.transform.SPACES`; default all that the architecture has.
    seed
        Same seed, same bytes.
    transform
        Where to save the element that leads from `checkpoint` to `out`.

    Raises
    ------
    CosetError
        For bad input of any kind, before anything is written.
    """
    model = load(checkpoint, legacy)
    check_output(out, [model.path], overwrite)
    _check_transform_output(transform, out, [model.path], overwrite)
    chosen, notes = choose_spaces(model, spaces)
    found = random_transform(model.architecture, Blocks(model), spaces=chosen, seed=seed, pinned=model.pinned)
    facts = _facts("scramble", seed=str(seed), spaces=",".join(chosen))
    saved = _write(model, found, out, facts, "Scrambled copy", {"Made from": model.path.name}, overwrite, progress)
    if transform is not None:
        found.save(transform, facts)
    return Written(saved.path, found, saved.rounding, notes=(*notes, *_left_out(saved)))


def _write(
    model: Model,
    transform: Transform,
    out: Path_,
    facts: Mapping[str, str],
    title: str,
    card: Mapping[str, str],
    overwrite: bool,
    progress: Callable[[int, int], None] | None,
    change: Callable[[int | None, Block], Mapping[str, Tensor]] | None = None,
    untied: bool = False,
) -> Saved:
    described = {**card, "Same function as": card.get("Made from", "its input"), **{k.removeprefix("coset_"): v for k, v in facts.items()}}
    return save(
        out,
        model,
        change or (lambda _, block: transform(block)),
        only=None if untied or change is not None else _touched(transform),
        untied=untied,
        metadata=facts,
        texts=_card(title, described),
        overwrite=overwrite,
        progress=progress,
    )


def apply(
    transform: Path_,
    checkpoint: Path_,
    out: Path_,
    *,
    inverse: bool = False,
    overwrite: bool = False,
    legacy: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Apply a saved transform in the direction in which it was written, or its inverse. The file is checked to belong to the group."""
    model = load(checkpoint, legacy)
    check_output(out, [model.path], overwrite)
    found = Transform.load(transform, model.architecture)
    found = found.inverse() if inverse else found
    if model.pinned and any(name in model.pinned for name in _moved_ends(found)):
        raise CosetError(f"{transform}: it changes {', '.join(model.pinned)}, which a head outside the architecture reads too")
    facts = _facts("apply", transform=Path(transform).name, inverse=str(inverse).lower())
    saved = _write(model, found, out, facts, "Transformed copy", {"Made from": model.path.name}, overwrite, progress)
    return Written(saved.path, found, saved.rounding, notes=_left_out(saved))


def _moved_ends(transform: Transform) -> set[str]:
    from coset.normal_form import coordinates

    available = coordinates(transform.architecture)
    return {name for coordinate in transform.target for name in available[coordinate].changes}


def _squared(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    return sum(float((a[name].to(torch.float64) - b[name].to(torch.float64)).square().sum()) for name in a)


def align(
    reference: Path_,
    other: Path_,
    out: Path_,
    *,
    spaces: Sequence[str] | None = None,
    untied: bool = False,
    transform: Path_ | None = None,
    overwrite: bool = False,
    legacy: bool = False,
    matching: Progress | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Write `other`, function unchanged, as close to `reference` as the symmetries allow, in the reference's gauge.

    Parameters
    ----------
    spaces
        What may move; ``heads`` stands for heads, qk and vo. Default: everything the architecture has.
    untied
        Give the output an unembedding of its own, so that the stream of a tied model can turn freely.
    transform
        Where to save the element that leads from `other` to `out`.
    matching, progress
        Called while matching and while writing.

    Raises
    ------
    CosetError
        If the two cannot be compared (every difference that matters, one per line), before reading weights; and for bad input.
    """
    models = [load(path, legacy) for path in (reference, other)]
    require_comparable(*models)
    check_output(out, [m.path for m in models], overwrite)
    _check_transform_output(transform, out, [m.path for m in models], overwrite)
    asked = (
        None
        if spaces is None
        else tuple(dict.fromkeys(s for name in spaces for s in (("heads", "qk", "vo") if name == "heads" else (name,))))
    )
    target = untie(models[1]) if untied else models[1]
    chosen, notes = choose_spaces(target, asked)
    sides = [Blocks(m, untied=untied) for m in models]
    found = match(target.architecture, sides[0], sides[1], spaces=chosen, pinned=models[1].pinned, progress=matching)
    distances: list[Distance] = []

    def change(layer: int | None, block: Block) -> Mapping[str, Tensor]:
        mine = sides[0].block(layer)
        raw = {**block, "head": block["embed.tokens"].mT.clone()} if untied and layer is None else block
        moved = found.transform(raw)
        size = math.sqrt(sum(float(x.square().sum()) for x in mine.values())) or 1.0
        distances.append(Distance(layer, math.sqrt(_squared(mine, raw)) / size, math.sqrt(_squared(mine, moved)) / size))
        return moved

    facts = _facts("align", reference=models[0].path.name, spaces=",".join(chosen))
    card = {"Made from": models[1].path.name, "Aligned to": models[0].path.name}
    saved = _write(models[1], found.transform, out, facts, "Aligned copy", card, overwrite, progress, change, untied)
    if transform is not None:
        found.transform.save(transform, facts)
    return Written(saved.path, found.transform, saved.rounding, tuple(distances), (*notes, *found.notes, *_left_out(saved)))


def weights(others: int, weight: float | None) -> tuple[float, ...]:
    """Weights of the reference and of `others` more models: equal by default, else `weight` shared out among the others."""
    if weight is None:
        return (1 / (others + 1),) * (others + 1)
    if not 0 <= weight <= 1:
        raise CosetError(f"weight: expected a number from 0 (the reference) to 1 (the others), got {weight}")
    return (1 - weight, *(weight / others,) * others)


def merge(
    reference: Path_,
    others: Sequence[Path_],
    out: Path_,
    *,
    weight: float | None = None,
    aligned: bool = True,
    spaces: Sequence[str] | None = None,
    overwrite: bool = False,
    legacy: bool = False,
    matching: Progress | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Write the weighted mean of the reference and the others, each aligned to the reference first unless `aligned` is False.

    The output has the reference's files and config and loads as it is. Known invariants (a pooler, a task head) are averaged too where they
    are floating point.

    Raises
    ------
    CosetError
        If the models cannot be compared, the weight is outside [0, 1], or for bad input.
    """
    if not others:
        raise CosetError("merge: expected at least one other checkpoint")
    share = weights(len(others), weight)
    models = [load(path, legacy) for path in (reference, *others)]
    for other in models[1:]:
        require_comparable(models[0], other)
    check_output(out, [m.path for m in models], overwrite)
    asked = (
        None
        if spaces is None
        else tuple(dict.fromkeys(s for name in spaces for s in (("heads", "qk", "vo") if name == "heads" else (name,))))
    )
    chosen, notes = choose_spaces(models[0], asked) if aligned else ((), ())
    sides = [Blocks(m) for m in models]
    found: list[Match | None] = [
        match(models[0].architecture, sides[0], side, spaces=chosen, pinned=models[0].pinned, progress=matching) if aligned else None
        for side in sides[1:]
    ]

    def mean(layer: int | None, block: Block) -> Mapping[str, Tensor]:
        total = {name: share[0] * x for name, x in block.items()}
        for part, side, one in zip(share[1:], sides[1:], found, strict=True):
            own = side.block(layer)
            own = own if one is None else one.transform(own)
            total = {name: x + part * own[name] for name, x in total.items()}
        return total

    def invariant(name: str, value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        parts = [m.checkpoint.read(name).to(torch.float64) for m in models]
        return sum((s * x for s, x in zip(share, parts, strict=True)), torch.zeros_like(parts[0]))

    names = ", ".join(m.path.name for m in models)
    facts = _facts(
        "merge", weights=",".join(f"{s:.6g}" for s in share), aligned=str(aligned).lower(), spaces=",".join(chosen), models=names
    )
    saved = save(
        out,
        models[0],
        mean,
        invariant=invariant,
        metadata=facts,
        texts=_card("Merged model", {"Weighted mean of": names, **{k.removeprefix("coset_"): v for k, v in facts.items()}}),
        overwrite=overwrite,
        progress=progress,
    )
    more = tuple(f"{m.path.name}: {n}" for m, one in zip(models[1:], found, strict=True) if one is not None for n in one.notes)
    return Written(saved.path, None, saved.rounding, notes=(*notes, *more, *_left_out(saved)))
