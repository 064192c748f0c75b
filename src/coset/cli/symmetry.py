"""``coset symmetry``: the account of an architecture's group, as a table or as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from coset.architecture import Architecture
from coset.cli.options import DEFAULTS, ArchitectureFlags, Common
from coset.cli.output import show, show_json
from coset.errors import CosetError

if TYPE_CHECKING:
    from coset.symmetry import Entry, LayerAccount, Symmetry


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
    from coset.symmetry import headline
    from coset.symmetry import symmetry as derive

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
        raise CosetError(f"{checkpoint}: a checkpoint fixes the architecture; give the folder or flags, not both")
    from coset.checkpoint import load

    return load(checkpoint).architecture


def spaces(account: Symmetry) -> Table:
    """One line for every space; layers that are alike share their lines."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("space", min_width=9)
    table.add_column("group", min_width=14)
    table.add_column("per layer", justify="right", no_wrap=True)
    table.add_column("dimension", justify="right", no_wrap=True)
    table.add_column("why")
    for indices, layer in alike(account.layers):
        table.add_row(Text(layers_label(indices), style="bold"))
        for entry in layer_entries(layer):
            table.add_row(f"  {entry.space}", group_label(entry), f"{entry.dimension:,}", f"{entry.dimension * len(indices):,}", entry.why)
    table.add_row(Text("model", style="bold"))
    for indices, entry in alike_entries([account.stream, *_moving([account.gains]), *account.shifts]):
        name = f"{layers_label(indices)}: {entry.space}" if indices else entry.space
        per_layer = f"{entry.dimension:,}" if indices else ""
        table.add_row(f"  {name}", group_label(entry), per_layer, f"{entry.dimension * max(1, len(indices)):,}", entry.why)
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


def layer_entries(layer: LayerAccount) -> Iterator[Entry]:
    """The spaces of one layer, gains only where there are any."""
    yield from (layer.heads, layer.qk, layer.vo, *layer.shifts, layer.neurons)
    yield from _moving([layer.gains])


def _moving(entries: Iterable[Entry]) -> Iterator[Entry]:
    return (entry for entry in entries if entry.dimension)


def group_label(entry: Entry) -> str:
    """The group of all copies."""
    from coset.groups.base import power

    return power(entry.group, entry.copies)


def alike(layers: Sequence[LayerAccount]) -> list[tuple[list[int], LayerAccount]]:
    """Layers with the same account, in the order of the first of each kind."""
    kinds: dict[LayerAccount, list[int]] = {}
    for i, layer in enumerate(layers):
        kinds.setdefault(layer, []).append(i)
    return [(indices, layer) for layer, indices in kinds.items()]


def alike_entries(entries: Sequence[Entry]) -> list[tuple[list[int], Entry]]:
    """Entries that differ in their layer alone, with the layers' indices; entries that belong to no layer have none."""
    kinds: dict[Entry, list[int]] = {}
    for entry in entries:
        found = re.fullmatch(r"layers\.(\d+)[. ](.+)", entry.space)
        key, index = (replace(entry, space=found[2]), [int(found[1])]) if found else (entry, [])
        kinds.setdefault(key, []).extend(index)
    return [(indices, entry) for entry, indices in kinds.items()]


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
