"""``coset demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from coset.cli.options import DEFAULTS, Common
from coset.cli.output import show, show_json


def demo(
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("coset-demo"),
    seeds: int = 3,
    seed: int = 0,
    overwrite: bool = False,
    workers: int | None = None,
    common: Common = DEFAULTS,
) -> None:
    """Train small Transformers on handwritten digits, align them, and measure the barriers between them.

    Parameters
    ----------
    output
        Folder for results.json, barriers.png and the trained models.
    seeds
        Models for each encoding and scope, at least 2; every pair of them is measured.
    seed
        Another one gives other models throughout.
    overwrite
        Replace the folder of an earlier demo.
    workers
        Processes that train. Default: one for each core.
    """
    from coset.study.demo import run, table

    results = run(output, seeds=seeds, base_seed=seed, overwrite=overwrite, quiet=common.quiet, workers=workers)
    if common.json:
        show_json(results)
    else:
        show(table(results), f"Written to {output}: results.json, barriers.png, models/")
