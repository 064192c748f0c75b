"""``coset compare`` and ``coset fingerprint``: are two checkpoints the same function, and which function is one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from coset.cli.checkpoints import _progress
from coset.cli.options import DEFAULTS, Common
from coset.cli.output import complain, show, show_json

if TYPE_CHECKING:
    from coset.equivalence import Comparison

_EXIT = {"identical": 0, "equivalent": 0, "equivalent up to rounding": 0, "different": 1, "undecided": 3}


def compare(
    first: Path,
    second: Path,
    /,
    *,
    transform: Path | None = None,
    outputs: Literal["logits", "probabilities"] | None = None,
    length: int | None = None,
    seed: int = 0,
    overwrite: bool = False,
    legacy: bool = False,
    common: Common = DEFAULTS,
) -> int:
    """Decide whether two checkpoints are the same function, and show the evidence.

    Exit code 0: identical, equivalent, or equivalent up to rounding; 1: different; 3: undecided; 2: they cannot be compared.

    Parameters
    ----------
    first, second
        Folders of the checkpoints.
    transform
        File (.safetensors) to save the group element that carries FIRST to SECOND in, if there is one.
    outputs
        What must agree; probabilities forget a uniform shift of the logits. Default: logits.
    length
        Tokens of the random inputs. Default: 512, or all of the position table if it has fewer. A model without one (RoPE, ALiBi) takes
        up to 32,768.
    seed
        Of the random inputs and roundings.
    overwrite
        Replace an existing transform file.
    legacy
        Accept pytorch_model.bin.
    """
    from coset.checkpoint import comparison

    with _progress(common, "") as (working, _):
        found = comparison.compare(
            first,
            second,
            outputs=outputs,
            transform=transform,
            length=length,
            seed=seed,
            overwrite=overwrite,
            legacy=legacy,
            progress=working,
        )
    saved = str(transform) if transform is not None and found.transform is not None and found.equivalent else None
    if common.json:
        show_json(found.to_json(saved))
        return _EXIT[found.verdict]
    if transform is not None and saved is None and not common.quiet:
        why = "they are bit for bit the same" if found.verdict == "identical" else "no element was found"
        complain("warning", f"{transform}: not written, {why}")
    show(Text(found.verdict, style="bold"), _evidence(found))
    show(*(f"- {reason}" for reason in found.reasons))
    if saved is not None:
        show(f"The element is in {saved}.")
    return _EXIT[found.verdict]


def _evidence(found: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    if found.residual is not None:
        clear = max(found.residuals, key=lambda r: r.peak)
        table.add_row("largest residual", f"{found.residual.relative:.3g} in {found.residual.tensor} (relative Frobenius norm)")
        table.add_row("clearest residual", f"{clear.peak:.3g} standard deviations of rounding noise in {clear.tensor}")
    if found.outputs is not None:
        out = found.outputs
        table.add_row(
            "outputs",
            f"differ by at most {out.difference:.3g} at positions 0 to {out.positions - 1}; one rounding of the weights does {out.noise:.3g}",
        )
    if found.first_difference is not None:
        layer, tensor = found.first_difference
        table.add_row("first difference", f"{'ends of the model' if layer is None else f'layer {layer}'}, {tensor}")
    if found.condition:
        table.add_row("condition numbers", ", ".join(f"{space} {value:.3g}" for space, value in found.condition.items()))
    if found.detection_limit:
        limit = found.detection_limit
        table.add_row("detection limit", f"relative change of one weight {limit['weight']:.2g}, of a whole tensor {limit['tensor']:.2g}")
    return table


def fingerprint(checkpoint: Path, /, *, legacy: bool = False, common: Common = DEFAULTS) -> None:
    """Numbers of a checkpoint that no symmetry changes, and a hash of them that functionally equivalent copies share.

    Parameters
    ----------
    checkpoint
        Folder of the checkpoint.
    legacy
        Accept pytorch_model.bin.
    """
    from coset.checkpoint.comparison import fingerprint_of

    found = fingerprint_of(checkpoint, legacy=legacy)
    if common.json:
        show_json(found.to_json())
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("layer", "QK circuits", "largest", "VO circuits", "largest", "neurons read", "write"):
        table.add_column(name, justify="right")
    for i, layer in enumerate(found.layers):
        norms = [sum(x * x for x in layer[f"{part}_norms"]) ** 0.5 for part in ("qk", "vo")]
        cells = (
            norms[0],
            layer["qk_largest"][-1],
            norms[1],
            layer["vo_largest"][-1],
            layer.get("neuron_read", 0.0),
            layer.get("neuron_write", 0.0),
        )
        table.add_row(str(i), *(f"{x:.5g}" for x in cells))
    show(table, *(f"{name}: {value:.6g}" for name, value in found.ends.items()))
    show(Text(found.hash, style="bold"), f"Stable for weights stored in {found.precision}.")
