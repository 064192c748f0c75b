"""What every matcher leaves of the barrier on the standard pairs, how near it brings the weights, and what it costs.

    python benchmarks/matchers.py DIR [--task stdlib digits fashion-mnist] [--pe sinusoidal rope learned none] [--scope whole first-attention]
                                      [--matchers NAME ...] [--workers N]

Trains the pairs of studies/matchers.toml, or takes those that are in DIR already, runs every matcher on them, and prints loss and accuracy
barriers (mean ± standard error over pairs), % of naive, relative distance of the weights, and CPU seconds relative to training one model, all of
one run. `circuits` is the path of "Generalized Linear Mode Connectivity" (NeurIPS 2025): products inside heads are interpolated, not factors.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from statistics import fmean

from coset.study.config import parse
from coset.study.plan import Cell, make
from coset.study.runner import Options, run
from coset.study.store import Store

PRESET = Path(__file__).parent.parent / "studies" / "matchers.toml"


def seconds(cell: Cell, store: Store) -> tuple[float, dict[str, float]]:
    """CPU seconds of training one model of the cell from scratch, and of every matcher on one pair, its curve included."""
    training = store.record(cell.base)["timing"]["cpu_seconds"]
    spent: dict[str, list[float]] = {}
    for units in cell.pairs.values():
        for matcher, unit in units.items():
            if store.done(unit):
                spent.setdefault(matcher, []).append(store.record(unit)["timing"]["cpu_seconds"])
    naive = fmean(spent["naive"])
    # What the curve costs is in every unit alike.
    return training, {matcher: max(0.0, fmean(values) - naive) for matcher, values in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for key in ("task", "pe", "scope", "matchers"):
        parser.add_argument(f"--{key}", nargs="+")
    parser.add_argument("--workers", type=int)
    chosen = parser.parse_args()
    document = tomllib.loads(PRESET.read_text())
    tables = [t for t in document["setting"] if chosen.task is None or t["task"] in chosen.task]
    for table in tables:
        for key in ("pe", "scope"):
            wanted = getattr(chosen, key)
            table[key] = [value for value in table[key] if wanted is None or value in wanted]
    if chosen.matchers is not None:
        document["matchers"] = ["naive", *(m for m in chosen.matchers if m != "naive")]
    study = parse({**document, "setting": tables}, owner=str(PRESET), folder=PRESET.parent)
    results = run(study, chosen.folder, Options(workers=chosen.workers))
    store = Store(chosen.folder.absolute() / "units")
    cells = {cell.id: cell for cell in make(study).cells}
    for setting in results["settings"]:
        training, spent = seconds(cells[setting["id"]], store)
        pairs = len(setting["matchers"]["naive"]["pairs"])
        print(f"\n{setting['id']}: {pairs} pairs, training one model {training:.0f} CPU seconds")
        print(f"{'matcher':18} {'loss barrier':>17} {'accuracy barrier':>17} {'% of naive':>12} {'distance':>9} {'seconds/training':>17}")
        for name, found in setting["matchers"].items():
            loss, accuracy = (f"{found[m]['mean']:.3f} ± {found[m]['standard_error']:.3f}" for m in ("loss_barrier", "accuracy_barrier"))
            left = f"{found['percent_of_naive']:.1f} ± {found['percent_standard_error']:.1f}"
            print(f"{name:18} {loss:>17} {accuracy:>17} {left:>12} {found['distance']['mean']:9.3f} {spent[name] / training:17.2f}")


if __name__ == "__main__":
    main()
