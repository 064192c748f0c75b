"""``coset symmetry``: the account of an architecture's group, as a table or as JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from coset.architecture import Architecture
from coset.cli.options import DEFAULTS, ArchitectureFlags, Common
from coset.cli.output import show, show_json
from coset.errors import CosetError

if TYPE_CHECKING:
    from coset.symmetries import Entry, Symmetry


def symmetry(
    checkpoint: Path | None = None,
    /,
    *,
    flags: ArchitectureFlags | None = None,
    common: Common = DEFAULTS,
) -> None:
    """Derive the symmetry group of an architecture: one line for every space, with its group and dimension.

    Parameters
    ----------
    checkpoint
        Folder of a checkpoint whose architecture to take, instead of flags.
    """
    from coset.symmetries import headline
    from coset.symmetries import symmetry as derive

    architecture = described(checkpoint, flags)
    account = derive(architecture)
    if common.json:
        show_json({**account.to_json(), "headline": headline(architecture)})
        return
    show(spaces(account), totals(account))
    show(*(f"Note: {note}." for note in account.notes), Text(headline(architecture), style="bold"))


def described(checkpoint: Path | None, flags: ArchitectureFlags | None) -> Architecture:
    """The architecture of a checkpoint folder, or else the one that flags describe.

    Raises
    ------
    CosetError
        If both are given, or either does not describe an architecture.
    """
    if checkpoint is None:
        return (flags or ArchitectureFlags()).architecture()
    if flags is not None:
        raise _both(checkpoint, flags)
    from coset.checkpoint import load

    return load(checkpoint).architecture


def _both(checkpoint: Path, flags: ArchitectureFlags) -> CosetError:
    """Why a checkpoint and flags do not go together, and what to do."""
    given = ", ".join(flags.given()) or "flags"
    message = f"{given}: a checkpoint fixes the architecture, and {checkpoint} is taken as one; give the folder or flags, not both"
    if flags.outputs == "probabilities":
        message += "; to count what leaves only probabilities unchanged, describe the model by flags (coset inspect shows its sizes)"
    return CosetError(message)


def spaces(account: Symmetry) -> Table:
    """One line for every space; layers that are alike share their lines."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("space")
    table.add_column("group", min_width=14)
    table.add_column("per layer", justify="right", no_wrap=True)
    table.add_column("dimension", justify="right", no_wrap=True)
    table.add_column("why")

    def add(entry: Entry, layers: int | None) -> None:
        each = "" if layers is None else f"{entry.dimension:,}"
        name = Padding(entry.space.replace("_", " "), (0, 0, 0, 2))
        table.add_row(name, group_label(entry), each, f"{entry.dimension * (layers or 1):,}", entry.why)

    for indices, entries in layer_sections(account):
        table.add_row(Text(layers_label(indices), style="bold"))
        for entry in entries:
            add(entry, len(indices))
    table.add_row(Text("model", style="bold"))
    for entry in (account.stream, *_moving(account.gains), *(s for s in account.shifts if _layer_of(s) is None)):
        add(entry, None)
    return table


def totals(account: Symmetry) -> Table:
    """Dimensions by part of the model."""
    whole = account.to_json()
    parts = {
        "attention": account.attention_dimension,
        "MLP": sum(layer.neurons.dimension for layer in account.layers),
        "norms": sum(layer.gains.dimension for layer in account.layers) + account.gains.dimension,
        "stream": account.stream.dimension,
        "shifts outside attention": sum(entry.dimension for entry in account.shifts),
    }
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_footer=True)
    table.add_column("totals", footer="all")
    table.add_column("dimension", justify="right", footer=f"{account.total_dimension:,}")
    share = account.total_dimension / whole["parameters"]
    table.add_column("", footer=f"of {whole['parameters']:,} parameters ({share:.2%})")
    for name, dimension in parts.items():
        table.add_row(name, f"{dimension:,}")
    return table


def layer_sections(account: Symmetry) -> list[tuple[list[int], tuple[Entry, ...]]]:
    """The spaces of every layer, gains only where there are any; layers with the same ones together, in the order of the first."""
    kinds: dict[tuple[Entry, ...], list[int]] = {}
    for i, layer in enumerate(account.layers):
        prefix = f"layers.{i}"
        own = (replace(s, space=s.space.removeprefix(prefix)[1:]) for s in account.shifts if _layer_of(s) == i)
        entries = (layer.heads, layer.qk, layer.vo, *layer.shifts, layer.neurons, *_moving(layer.gains), *own)
        kinds.setdefault(entries, []).append(i)
    return [(indices, entries) for entries, indices in kinds.items()]


def _layer_of(shift: Entry) -> int | None:
    """The layer whose norm or router a shift belongs to, named ``layers.i...``."""
    found = re.match(r"layers\.(\d+)\b", shift.space)
    return int(found[1]) if found else None


def _moving(entry: Entry) -> tuple[Entry, ...]:
    return (entry,) if entry.dimension else ()


def group_label(entry: Entry) -> str:
    """The group of all copies."""
    from coset.groups.base import power

    return power(entry.group, entry.copies)


def layers_label(indices: Sequence[int]) -> str:
    """``layer 3``, ``layers 0-4, 6``."""
    runs: list[list[int]] = []
    for i in indices:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    named = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"layer {named}" if len(indices) == 1 else f"layers {named}"
