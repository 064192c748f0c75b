"""What is done with checkpoints on disk: scramble, apply, align, merge. Each reads and writes one layer at a time.

Everything is computed in float64 and cast once; the output has the keys, shapes, dtypes, shards and config of its input, and says in its
metadata and in ``COSET.md`` how it was made.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from coset.alignment.matchers import DEFAULT_MATCHING, Matching
from coset.alignment.matching import squared_gap
from coset.alignment.pair import Progress, Step
from coset.architecture import Experts
from coset.checkpoint.compatible import require_comparable
from coset.checkpoint.files import check_output
from coset.checkpoint.matching import (
    Data,
    Disagreement,
    Refitted,
    check_state,
    find,
    find_all,
    heldout,
    read_matching_data,
    record,
    refit_merged,
    whole,
)
from coset.checkpoint.model import Block, Model, Saved, load, save, untie
from coset.checkpoint.outputs import check_file
from coset.errors import CosetError
from coset.groups import Element, Group, MonomialElement, Permutation, Product, Wreath, finite_order
from coset.normal_form import coordinates
from coset.parameters import tensors
from coset.symmetries import head_group, stream_group
from coset.transform import SPACES, Transform, check_spaces, gauge_names, random_transform, restrict

Path_ = str | os.PathLike[str]


class Blocks(Mapping[str, Tensor]):
    """The canonical tensors of a checkpoint, in float64, as a mapping that holds one layer at a time, and of the ends nothing.

    With `untied` there is a tensor ``head``, equal to the token embedding, that the checkpoint does not store.
    """

    def __init__(self, model: Model, *, untied: bool = False):
        self.model, self.untied = model, untied
        self.specs = tensors(untie(model).architecture if untied else model.architecture)
        self._held: tuple[int, Block] | None = None

    def block(self, index: int | None) -> Block:
        """All tensors of a layer, or of the ends (None)."""
        if index is None:
            return {name: self[name] for name, spec in self.specs.items() if spec.layer is None}
        if self._held is None or self._held[0] != index:
            self._held = None  # release the old block before reading the next
            self._held = (index, self.model.block(index))
        return self._held[1]

    def __getitem__(self, name: str) -> Tensor:
        layer = self.specs[name].layer
        if layer is not None:
            return self.block(layer)[name]
        self._held = None  # vocabularies are large
        return self.model.tensor("embed.tokens").mT if self.untied and name == "head" else self.model.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def moved(self, transform: Transform, dtype: torch.dtype) -> dict[str, Tensor]:
        """The whole model after a transform, each block computed in float64 and cast once."""
        out: dict[str, Tensor] = {}
        for layer in (None, *range(len(self.model.architecture.layers))):
            out |= {name: x.to(dtype) for name, x in transform(self.block(layer)).items()}
        return {name: out[name] for name in self.specs}


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
        What was applied; None for a merge.
    rounding
        Relative error of the one cast to the stored dtypes.
    distances
        `align` only: block by block.
    notes
        Degenerate spots, spaces with nothing to move, and files that were left out.
    matching
        How models were matched, in words, as the output's metadata have it; empty if they were not.
    history
        The matcher's own objective, step by step.
    refit
        `merge` with a refit only: disagreement with the ends before and after it.
    """

    path: Path
    transform: Transform | None
    rounding: float
    distances: tuple[Distance, ...] = ()
    notes: tuple[str, ...] = ()
    matching: Mapping[str, str] = field(default_factory=dict)
    history: tuple[Step, ...] = ()
    refit: Disagreement | None = None


# --- spaces ---------------------------------------------------------------------------------------------------------


def _empty(model: Model) -> set[str]:
    """The spaces in which nothing can move in this checkpoint."""
    a = model.architecture
    kinds = {c.space for name, c in coordinates(a).items() if name in gauge_names(a, ("gains", "shifts"), model.pinned)}
    alive = {
        "heads": any(finite_order(head_group(layer.attention)) > 1 for layer in a.layers),
        "experts": any(isinstance(layer.mlp, Experts) and layer.mlp.count > 1 for layer in a.layers),
        "gains": "gains" in kinds,
        "shifts": "shifts" in kinds,
        "stream": stream_group(a) is not None,
    }
    return {space for space, moves in alive.items() if not moves}


def choose_spaces(model: Model, spaces: Sequence[str] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The spaces to move in a checkpoint (default: all it has), and a note for each asked one with nothing to move.

    Raises
    ------
    CosetError
        If a name is unknown or nothing at all can move.
    """
    asked = SPACES if spaces is None else tuple(dict.fromkeys(spaces))
    check_spaces(asked)
    empty = _empty(model)
    moving = tuple(s for s in asked if s not in empty)
    if not moving:
        raise CosetError(f"{model.path}: nothing can move in {', '.join(asked)}: this architecture has no freedom there")
    return moving, () if spaces is None else tuple(f"{s}: nothing to move there in this architecture" for s in asked if s in empty)


def for_alignment(spaces: Sequence[str] | None) -> tuple[str, ...] | None:
    """In alignment ``heads`` stands for the whole two-stage algorithm: heads, qk, vo."""
    return None if spaces is None else tuple(part for s in spaces for part in (("heads", "qk", "vo") if s == "heads" else (s,)))


# --- writing --------------------------------------------------------------------------------------------------------


def _facts(verb: str, **more: str) -> dict[str, str]:
    return {"coset_verb": verb, "coset_version": version("coset"), **{f"coset_{key}": value for key, value in more.items()}}


def _card(title: str, facts: Mapping[str, str]) -> dict[str, str]:
    lines = [f"# {title}", "", *(f"- {key.removeprefix('coset_')}: {value}" for key, value in facts.items()), ""]
    return {"COSET.md": "\n".join(lines)}


def _left_out(saved: Saved) -> tuple[str, ...]:
    return tuple(f"{name}: not copied, it holds weights in another format" for name in saved.left_out)


def _touched(transform: Transform) -> set[int | None]:
    """Blocks that a transform changes."""
    if "stream" in transform.element:
        return {None, *range(len(transform.architecture.layers))}
    owner = {name: c.layer for name, c in coordinates(transform.architecture).items()}
    return {int(key.split(".")[1]) for key in transform.element} | {owner[name] for name in transform.target}


def check_transform_file(path: Path_, outside: Sequence[Path], overwrite: bool) -> None:
    """Refuse before any work a transform file that could not be written, or lies in one of the folders `outside`."""
    check_file(path, "transform", suffixes=(".safetensors",), outside=outside, overwrite=overwrite)


def _write(
    model: Model,
    transform: Transform,
    out: Path_,
    facts: Mapping[str, str],
    title: str,
    *,
    keep: Path_ | None = None,
    change: Callable[[int | None, Block], Mapping[str, Tensor]] | None = None,
    untied: bool = False,
    overwrite: bool,
    progress: Callable[[int, int], None] | None,
) -> Saved:
    """Write the model transformed (by `change`, if that does more than the transform), and the transform itself to `keep`."""
    fresh = keep is not None and not Path(keep).exists()
    if keep is not None:
        transform.save(keep, facts)
    try:
        return save(
            out,
            model,
            change or (lambda _, block: transform(block)),
            only=None if untied else _touched(transform),
            untied=untied,
            metadata=facts,
            texts=_card(title, facts),
            overwrite=overwrite,
            progress=progress,
        )
    except BaseException:
        if keep is not None and fresh:
            Path(keep).unlink()
        raise


def _stands(group: Group, g: Element, key: str, spaces: tuple[str, ...]) -> bool:
    """Whether a permutation of the element, in a space that is to move, came out as the identity although there are others."""

    def same(order: Tensor) -> bool:
        return bool((order == torch.arange(order.shape[-1])).all())

    if key.endswith(".heads"):
        assert isinstance(group, Wreath)
        assert isinstance(group.inner, Product)
        if "heads" not in spaces:
            return False
        if finite_order(group.top) > 1:
            return same(g.order)
        return finite_order(group.inner.factors["query"]) > 1 and same(g.inner["query"])
    if isinstance(group, Wreath):
        experts = "experts" in spaces and finite_order(group.top) > 1 and same(g.order)
        return experts or _stands(group.inner, g.inner, key, spaces)
    if key != "stream" and "neurons" not in spaces:
        return False
    order = g.order if isinstance(g, MonomialElement) else g if isinstance(group, Permutation) else None
    return order is not None and order.shape[-1] > 1 and same(order)


def _moving(transform: Transform, spaces: tuple[str, ...], seed: int) -> Transform:
    """The transform with everything drawn again that happens to stay where it is: with two heads, every other random order does."""
    groups, element = transform.groups(), dict(transform.element)
    generator = torch.Generator().manual_seed(seed)
    for key, g in element.items():
        while _stands(groups[key], g, key, spaces):
            g = restrict(groups[key], groups[key].random(generator), key, spaces)
        element[key] = g
    return replace(transform, element=element)


# --- the operations -------------------------------------------------------------------------------------------------


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
    overwrite
        Replace what is at `out` and `transform`.
    legacy
        Accept pytorch_model.bin.
    progress
        Called with (blocks written, blocks in all).

    Raises
    ------
    CosetError
        For bad input of any kind, before anything is written.
    """
    model = load(checkpoint, legacy)
    check_output(out, [model.path], overwrite)
    if transform is not None:
        check_transform_file(transform, [model.path, Path(out)], overwrite)
    chosen, notes = choose_spaces(model, spaces)
    found = random_transform(model.architecture, Blocks(model), spaces=chosen, seed=seed, pinned=model.pinned)
    found = _moving(found, chosen, seed)
    facts = _facts("scramble", input=model.path.name, seed=str(seed), spaces=",".join(chosen))
    saved = _write(model, found, out, facts, "Scrambled copy", keep=transform, overwrite=overwrite, progress=progress)
    return Written(saved.path, found, saved.rounding, notes=(*notes, *_left_out(saved)))


def _is_untied(transform: Path_) -> bool:
    """Whether a transform file was written by an alignment that untied its model."""
    try:
        with safe_open(str(transform), framework="pt") as file:
            return (file.metadata() or {}).get("coset_untied") == "true"
    except (OSError, SafetensorError):
        return False  # reading it in earnest says what is wrong


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
    """Apply a saved transform in the direction in which it was written, or its inverse.

    Parameters
    ----------
    transform
        File that :func:`scramble`, :func:`align` or :meth:`coset.transform.Transform.save` wrote.
    checkpoint, out, overwrite, legacy, progress
        As for :func:`scramble`. A tied checkpoint is untied if the transform was found so.
    inverse
        The other direction.

    Raises
    ------
    CosetError
        If the file holds anything but an element of this architecture's group, and for bad input of any kind.
    """
    model = load(checkpoint, legacy)
    check_output(out, [model.path], overwrite)
    untied = model.architecture.tied and _is_untied(transform)
    found = Transform.load(transform, untie(model).architecture if untied else model.architecture)
    found = found.inverse() if inverse else found
    available = coordinates(found.architecture)
    blocked = sorted({name for c in found.target for name in available[c].changes} & set(model.pinned))
    if blocked:
        raise CosetError(f"{transform}: it changes {', '.join(blocked)}, which a head outside the architecture reads too")
    facts = _facts("apply", input=model.path.name, transform=Path(transform).name, inverse=str(inverse).lower())
    saved = _write(model, found, out, facts, "Transformed copy", untied=untied, overwrite=overwrite, progress=progress)
    return Written(saved.path, found, saved.rounding, notes=_left_out(saved))


def _distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor], names: Iterable[str]) -> float:
    """Relative Frobenius distance of b from a, a tensor at a time."""
    gap = size = 0.0
    for name in names:
        x = a[name]
        gap += squared_gap(x, b[name])
        size += float(torch.linalg.vector_norm(x)) ** 2
    return math.sqrt(gap / size) if size else math.sqrt(gap)


def align(
    reference: Path_,
    other: Path_,
    out: Path_,
    *,
    spaces: Sequence[str] | None = None,
    untied: bool = False,
    how: Matching = DEFAULT_MATCHING,
    data: Path_ | None = None,
    state: Path_ | None = None,
    transform: Path_ | None = None,
    overwrite: bool = False,
    legacy: bool = False,
    matching: Progress | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Write `other`, function unchanged, as close to `reference` as the symmetries allow, in the reference's gauge (``learned``: but for gains).

    Parameters
    ----------
    reference, other, out
        Folders.
    spaces
        What may move; ``heads`` stands for heads, qk and vo. Default: everything the architecture has.
    untied
        Give the output an unembedding of its own, so that the stream of a tied model can turn freely.
    how
        The matcher and its options. By ``weights`` (the default) neither model is ever in memory whole; by every other matcher both are, in
        float32.
    data
        File of the user's inputs, for ``activations`` and what builds on it; see :func:`coset.checkpoint.data.read_data`.
    state
        File from which an interrupted ``learned`` continues.
    transform
        Where to save the element that leads from `other` to `out`.
    overwrite, legacy
        As for :func:`scramble`.
    matching, progress
        Called while matching with (what, blocks done, blocks in all), and while writing.

    Raises
    ------
    CosetError
        If the two cannot be compared (every difference that matters, one per line), before reading weights; if the matcher lacks data or
        there are data that it does not use; and for bad input.
    """
    models = [load(path, legacy) for path in (reference, other)]
    require_comparable(*models)
    check_output(out, [m.path for m in models], overwrite)
    if transform is not None:
        check_transform_file(transform, [*(m.path for m in models), Path(out)], overwrite)
    kept = check_state(state, how, [*(m.path for m in models), out], transform)
    target = untie(models[1]) if untied else models[1]
    chosen, notes = choose_spaces(target, for_alignment(spaces))
    own = read_matching_data(data, target, how)
    mine, theirs = (Blocks(m, untied=untied) for m in models)
    found = find(how, models, (mine, theirs), spaces=chosen, untied=untied, data=own, state=kept, progress=matching)
    matched = record(how, target.architecture, own, heldout(how, [found]))
    distances: dict[int | None, Distance] = {}

    def change(layer: int | None, block: Block) -> Mapping[str, Tensor]:
        before = _distance(mine, block, block)
        moved = found.transform(block)
        distances[layer] = Distance(layer, before, _distance(mine, moved, moved))
        return moved

    names = {"reference": models[0].path.name, "input": models[1].path.name}
    facts = _facts("align", **names, spaces=",".join(chosen), untied=str(untied).lower(), **matched)
    saved = _write(
        models[1],
        found.transform,
        out,
        facts,
        "Aligned copy",
        keep=transform,
        change=change,
        untied=untied,
        overwrite=overwrite,
        progress=progress,
    )
    ordered = []
    for layer in (None, *range(len(target.architecture.layers))):
        if layer not in distances:  # copied as it is
            same = _distance(mine, theirs, [name for name, spec in theirs.specs.items() if spec.layer == layer])
            distances[layer] = Distance(layer, same, same)
        ordered.append(distances[layer])
    more = (*notes, *found.notes, *_left_out(saved))
    return Written(saved.path, found.transform, saved.rounding, tuple(ordered), more, matched, found.history)


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
    how: Matching = DEFAULT_MATCHING,
    data: Path_ | None = None,
    state: Path_ | None = None,
    refit: bool = False,
    overwrite: bool = False,
    legacy: bool = False,
    matching: Progress | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Write the weighted mean of the reference and the others, in the reference's gauge unless `aligned` is False.

    More than two models are brought into one gauge together (:func:`coset.alignment.align_many`), all in memory.
    The output has the reference's files and config and loads as it is. Known invariants (a pooler, a task head) are averaged too where they
    are floating point.

    Parameters
    ----------
    reference, others, out
        Folders.
    weight
        Total weight of the others, in [0, 1], shared out evenly; default: every model counts the same.
    aligned, spaces, how, data, state
        Whether to align first, what may then move, and how; see :func:`align`.
    refit
        Then solve for every linear map, so that it gives the mean of what the ends' maps give; on `data` if there are any, else on inputs as the
        matcher makes them. All models are held in memory. The output is then no point of the line between the models, and says so; see
        :func:`coset.connect.refit`.
    overwrite, legacy, matching, progress
        As for :func:`align`.

    Raises
    ------
    CosetError
        If the models cannot be compared, the weight is outside [0, 1], a refit is asked for with other than equal weights or without
        alignment, or for bad input.
    """
    if not others:
        raise CosetError("merge: expected at least one other checkpoint")
    share = weights(len(others), weight)
    models = [load(path, legacy) for path in (reference, *others)]
    for other in models[1:]:
        require_comparable(models[0], other)
    check_output(out, [m.path for m in models], overwrite)
    architecture, folders = models[0].architecture, [*(m.path for m in models), Path(out)]
    if refit and (weight is not None or not aligned):
        raise CosetError("refit: it aims at the plain mean of models in one gauge; leave out the weight, and align")
    if not aligned and (data is not None or state is not None):
        raise CosetError("merge: data and state serve alignment, which is left out; leave them out too")
    kept = check_state(state, how, folders)
    chosen, notes = choose_spaces(models[0], for_alignment(spaces)) if aligned else ((), ())
    own = read_matching_data(data, models[0], how, refitted=refit) if aligned else None
    sides = [Blocks(m) for m in models]
    found = find_all(how, models, sides, spaces=chosen, data=own, state=kept, progress=matching) if aligned else None
    transforms: Sequence[Transform | None] = (None,) * len(others) if found is None else found.transforms
    matched = {} if found is None else record(how, architecture, own, found.heldout)

    def mean(layer: int | None, block: Block) -> Mapping[str, Tensor]:
        total = {name: share[0] * x for name, x in block.items()}
        for part, side, one in zip(share[1:], sides[1:], transforms, strict=True):
            moved = side.block(layer)
            moved = moved if one is None else one(moved)
            total = {name: x + part * moved[name] for name, x in total.items()}
        return total

    def invariant(name: str, value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        parts = [m.checkpoint.read(name).to(torch.float64) for m in models]
        return sum((s * x for s, x in zip(share, parts, strict=True)), torch.zeros_like(parts[0]))

    fitted = None
    if refit:
        assert found is not None
        fitted = _refit(how, models, sides, found.transforms, mean, own, matching)
        matched |= _refit_record(fitted)

    def refitted(layer: int | None, block: Block) -> Mapping[str, Tensor]:
        assert fitted is not None
        return {name: fitted.parameters[name].to(x.dtype) for name, x in block.items()}

    names = ", ".join(m.path.name for m in models)
    facts = _facts(
        "merge",
        weights=",".join(f"{s:.6g}" for s in share),
        aligned=str(aligned).lower(),
        spaces=",".join(chosen),
        models=names,
        **matched,
    )
    saved = save(
        out,
        models[0],
        mean if fitted is None else refitted,
        invariant=invariant,
        metadata=facts,
        texts=_card("Merged model" if fitted is None else "Refitted model", facts),
        overwrite=overwrite,
        progress=progress,
    )
    more = (*notes, *(() if found is None else found.notes), *(() if fitted is None else fitted.notes), *_left_out(saved))
    history = () if found is None else found.history
    quality = None if fitted is None else fitted.disagreement
    return Written(saved.path, None, saved.rounding, notes=more, matching=matched, history=history, refit=quality)


def _refit(
    how: Matching,
    models: Sequence[Model],
    sides: Sequence[Blocks],
    transforms: Sequence[Transform],
    mean: Callable[[int | None, Block], Mapping[str, Tensor]],
    data: Data | None,
    progress: Progress | None,
) -> Refitted:
    """Refit the mean of models, all of them in memory."""
    reference = whole(models[0])
    dtype = next(iter(reference.values())).dtype
    ends = [reference, *(side.moved(transform, dtype) for side, transform in zip(sides[1:], transforms, strict=True))]
    merged: dict[str, Tensor] = {}
    for layer in (None, *range(len(models[0].architecture.layers))):
        merged |= {name: x.to(dtype) for name, x in mean(layer, sides[0].block(layer)).items()}
    return refit_merged(how, models[0].architecture, {name: merged[name] for name in reference}, ends, data, progress)


def _refit_record(fitted: Refitted) -> dict[str, str]:
    quality = fitted.disagreement
    return {
        "refit": "every linear map was solved for, so this model is NOT on the line between the models and says nothing about its barrier",
        "refit_source": fitted.source,
        "refit_samples": str(fitted.samples),
        "refit_disagreement_before": f"{quality.before:.6g}",
        "refit_disagreement_after": f"{quality.after:.6g}",
        **({"refit_warning": "this model is WORSE than the mean that it was refitted from"} if quality.worse else {}),
    }
