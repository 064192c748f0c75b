"""Whether two checkpoints on disk are the same function; and the fingerprint of one. Both read a layer at a time."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from importlib.metadata import version
from typing import Literal

import torch

from coset.alignment.pair import Progress
from coset.checkpoint.compatible import require_comparable, tied_beside_untied
from coset.checkpoint.files import DTYPES, raw
from coset.checkpoint.layout import check_finite
from coset.checkpoint.model import Model, load, untie
from coset.checkpoint.operations import Blocks, check_transform_file
from coset.equivalence import Comparison, Side, compare_sides
from coset.invariants import Fingerprint, fingerprint


def _side(model: Model, untied: bool) -> Side:
    """A checkpoint to compare: its canonical tensors, read when asked for, and the stored dtype of each; `untied` is as for `Blocks`."""
    stored = model.checkpoint.tensors
    found = {slot.canonical: DTYPES[stored[p.stored].dtype] for p in model.table.places if not p.mirror for slot in p.slots}
    if untied:
        found["head"] = found["embed.tokens"]
    specs = untie(model).table.specs if untied else model.table.specs
    return Side(Blocks(model, untied=untied), {name: found[name] for name in specs}, specs)


def _same_files(a: Model, b: Model) -> bool:
    """Whether both hold the same tensors, bit for bit; raise if one that they share holds NaN or infinity."""
    mine, theirs = a.checkpoint.tensors, b.checkpoint.tensors
    if mine.keys() != theirs.keys() or any((s.dtype, s.shape) != (theirs[n].dtype, theirs[n].shape) for n, s in mine.items()):
        return False
    for name in mine:
        x, y = a.checkpoint.read(name), b.checkpoint.read(name)
        check_finite(name, x, a.path)
        check_finite(name, y, b.path)
        if raw(x) != raw(y):
            return False
    return True


def _invariant_differences(a: Model, b: Model) -> Iterator[str]:
    """Tensors outside the architecture that differ by more than the rounding of their stored dtypes."""
    for name in a.invariants:
        x, y = a.checkpoint.read(name), b.checkpoint.read(name)
        if x.shape != y.shape:
            yield name
        elif not x.is_floating_point() or not y.is_floating_point():
            if not torch.equal(x, y):
                yield name
        else:
            eps = max(torch.finfo(t.dtype).eps for t in (x, y))
            small = max(torch.finfo(t.dtype).smallest_normal * torch.finfo(t.dtype).eps for t in (x, y))
            exact, other = x.to(torch.float64), y.to(torch.float64)
            if bool(((exact - other).abs() > eps * exact.abs() + small).any()):
                yield name


def compare(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    outputs: Literal["logits", "probabilities"] | None = None,
    transform: str | os.PathLike[str] | None = None,
    length: int | None = None,
    seed: int = 0,
    overwrite: bool = False,
    legacy: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Decide whether two checkpoints are the same function; see :func:`coset.equivalence.compare`.

    Parameters
    ----------
    first, second
        Folders. If one is tied and the other is not (``coset align --untie``), the tied one is read as an untied one.
    outputs
        What must agree; default what the architecture says (logits).
    transform
        Where to save the element that carries `first` to `second`, if one is found.
    length, seed
        Tokens of the random inputs, and their seed.
    overwrite
        Replace an existing transform file.
    legacy
        Accept pytorch_model.bin.
    progress
        Called with what is being done, how many blocks are done, and of how many.

    Raises
    ------
    CosetError
        If the two cannot be compared (every difference that matters, one per line), a tensor holds NaN or infinity, or the transform file
        cannot be written.
    """
    a, b = load(first, legacy), load(second, legacy)
    apart = tied_beside_untied((a, b))
    seen = [untie(model) if alone else model for model, alone in zip((a, b), apart, strict=True)]
    require_comparable(*seen)
    if transform is not None:
        check_transform_file(transform, (a.path, b.path), overwrite)
    architecture = seen[0].architecture
    if outputs is not None:
        architecture = dataclasses.replace(architecture, probabilities=outputs == "probabilities")
    if _same_files(a, b):
        return Comparison("identical")
    sides = [_side(model, alone) for model, alone in zip((a, b), apart, strict=True)]
    pinned = tuple(dict.fromkeys((*a.pinned, *b.pinned)))
    found = compare_sides(architecture, *sides, pinned=pinned, length=length, seed=seed, progress=progress)
    found = _with_invariants(found, list(_invariant_differences(a, b)))
    if transform is not None and found.transform is not None and found.equivalent:
        facts = {"coset_verb": "compare", "coset_version": version("coset"), "coset_input": a.path.name, "coset_reference": b.path.name}
        facts["coset_untied"] = str(apart[0]).lower()
        found.transform.save(transform, facts)
    return found


def _with_invariants(found: Comparison, differing: list[str]) -> Comparison:
    """The verdict with what lies outside the architecture taken into account."""
    if not differing:
        # The same function in other files: the tensors of the architecture are equal, names or mirrors are not.
        return dataclasses.replace(found, verdict="equivalent") if found.verdict == "identical" else found
    reason = f"tensors outside the architecture, which no symmetry moves, differ: {', '.join(differing)}"
    first = found.first_difference or (None, differing[0])
    return dataclasses.replace(found, verdict="different", first_difference=first, transform=None, reasons=(*found.reasons, reason))


def fingerprint_of(checkpoint: str | os.PathLike[str], *, legacy: bool = False) -> Fingerprint:
    """The fingerprint of a checkpoint on disk; see :func:`coset.fingerprint.fingerprint`.

    Raises
    ------
    CosetError
        If the checkpoint cannot be read, or a tensor holds NaN or infinity.
    """
    model = load(checkpoint, legacy)
    coarsest = max(_side(model, False).dtypes.values(), key=lambda d: torch.finfo(d).eps)
    return fingerprint(model.architecture, Blocks(model), stored=coarsest)
