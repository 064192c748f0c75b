"""``coset certify``: is the account of the symmetry group complete?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.box import SIMPLE_HEAD
from rich.table import Table

from coset.cli.options import DEFAULTS, ArchitectureFlags, Common
from coset.cli.output import complain, show, show_json
from coset.cli.symmetry import described
from coset.errors import CosetError

if TYPE_CHECKING:
    from coset.certificate import Certificate


def certify(
    checkpoint: Path | None = None,
    /,
    *,
    flags: ArchitectureFlags | None = None,
    family: Annotated[str | None, Parameter(name="--family")] = None,
    plot: Path | None = None,
    seed: int = 0,
    overwrite: bool = False,
    common: Common = DEFAULTS,
) -> int:
    """Measure the dimension of the symmetry group on a tiny instance and compare it with the account.

    The nullity of the Jacobian of the outputs is counted, for each layer's attention and for the whole model. Exit code 0: measured and
    predicted agree; 1: they do not, and the tensors in which the difference lives are printed.

    Parameters
    ----------
    checkpoint
        Folder of a checkpoint whose architecture to take, instead of flags.
    family
        A model family (gpt2, llama, ...) in its usual form, instead of flags.
    plot
        Figure of the spectrum to write (.png, .svg or .pdf).
    seed
        Of the instance and its inputs.
    overwrite
        Replace an existing figure.
    """
    from coset.certificate import certify as measure
    from coset.certificate import plot_spectrum
    from coset.checkpoint.outputs import check_file
    from coset.connect import SUFFIXES, save

    if plot is not None:
        check_file(plot, "figure", suffixes=SUFFIXES, overwrite=overwrite)
    if family is not None and (flags is not None or checkpoint is not None):
        other = str(checkpoint) if checkpoint is not None else ", ".join(flags.given() if flags else ()) or "flags"
        raise CosetError(f"--family {family}: a family fixes the architecture, so {other} cannot go with it; leave one of them out")
    if family is None:
        architecture = described(checkpoint, flags)
    else:
        from coset.checkpoint.families.typical import typical

        architecture = typical(family)
    found = measure(architecture, seed=seed)
    if plot is not None:
        save(plot_spectrum(found), plot)
    if common.json:
        show_json(found.to_json())
    else:
        _print(found)
    if not found.agrees and not common.quiet:
        complain("warning", "measured and predicted dimensions disagree, or the spectrum has no clear gap")
    return 0 if found.agrees else 1


def _print(found: Certificate) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("part", "predicted", "measured", "gap", ""):
        table.add_column(name, justify="left" if name in ("part", "") else "right")
    for m in (*found.attention, found.model):
        table.add_row(m.scope, str(m.predicted), str(m.measured), f"{m.gap:.1e}", "agrees" if m.agrees else "DISAGREES")
    show(table)
    for m in (*found.attention, found.model):
        for name, share in sorted(m.null_shares.items(), key=lambda item: -item[1]):
            if share > 0.01:
                show(f"  {m.scope}: {share:.0%} of the null space lies in {name}")
    for a in found.approximate:
        tensors = ", ".join(f"{name} {share:.0%}" for name, share in sorted(a.shares.items(), key=lambda item: -item[1])[:4])
        values = json.dumps([float(f"{v:.1e}") for v in a.singular_values[:6]])
        show(f"Approximate: {len(a.singular_values)} directions of {a.scope} hardly matter, mostly in {tensors}.")
        show(f"  Singular values {values}; the others lie above {a.below:.1e}.")
