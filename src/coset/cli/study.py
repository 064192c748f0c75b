"""``coset study``: run and report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from coset.cli.options import DEFAULTS, Common
from coset.cli.output import complain, show, show_json

if TYPE_CHECKING:
    from rich.table import Table

study = App(name="study", help="Linear mode connectivity over a matrix of settings: train, align, measure, report.")

_ERROR = 2
_INTERRUPTED = 130


@study.command
def run(
    config: Path,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    workers: int | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    dry_run: bool = False,
    common: Common = DEFAULTS,
) -> int | None:
    """Run the study that a TOML file describes; what is done already is not repeated.

    Parameters
    ----------
    config
        The study: see docs/study.md.
    output
        Folder for results.json and the units. A folder of an earlier run is continued.
    engine
        Processes on this machine, or tasks of a Ray cluster.
    address
        Of a Ray cluster that is there already. Without it, Ray is started on this machine.
    workers
        Processes of one thread each. Default: one for each core.
    device
        Where models are trained and evaluated.
    dry_run
        Print the plan, what it will cost, and what is missing. Exit code 2 if it could not run.
    """
    from coset.study.config import load
    from coset.study.runner import Interrupted, Options, preview
    from coset.study.runner import run as run_study

    options = Options(engine, address, workers, device, common.quiet)
    loaded = load(config)
    if dry_run:
        plan = preview(loaded, output, options)
        if common.json:
            show_json(plan)
        else:
            show(_plan_table(plan), _summary(plan))
        for line in plan["missing"]:
            complain("missing", line)
        return _ERROR if plan["missing"] else None
    try:
        results = run_study(loaded, output, options)
    except Interrupted as stopped:
        complain("error", stopped)
        return _INTERRUPTED
    if common.json:
        show_json(results)
    else:
        show(_results_table(results), f"Written to {output / 'results.json'}")
    for failure in results["failures"]:
        complain("error", f"{failure['setting']}: {failure['unit']} failed: {failure['error']}")
    return _ERROR if results["failures"] else None


@study.command
def report(directory: Path, *, common: Common = DEFAULTS) -> None:
    """Turn the results of a study into a page, tables and figures.

    Parameters
    ----------
    directory
        The folder that ``coset study run`` wrote.
    """
    from coset.study.report import write_report

    files = write_report(directory)
    if common.json:
        show_json({"files": [str(file) for file in files]})
    else:
        show(f"Written to {files[0]} and {len(files) - 1} more files in {directory}")


def _table(title: str, *columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    return table


def _plan_table(plan: dict[str, Any]) -> Table:
    table = _table(f"Study {plan['name']}", "setting", "parameters", "training", "test", "core time")
    for setting in plan["settings"]:
        counts = (setting[key] for key in ("parameters", "train", "test"))
        table.add_row(setting["id"], *(f"{n:,}" for n in counts), _time(setting["core_seconds"]))
    return table


def _summary(plan: dict[str, Any]) -> str:
    units = ", ".join(f"{row['units']} {kind} ({row['done']} done)" for kind, row in plan["units"].items())
    estimate = plan["estimate"]
    return (
        f"{len(plan['settings'])} settings, {plan['models']} models, {plan['pairs']} pairs of models\n"
        f"units: {units}\n"
        f"about {_time(estimate['core_seconds'])} of one {'core' if estimate['device'] == 'cpu' else 'device'}, "
        f"{_time(estimate['wall_seconds'])} with {estimate['workers']}; {plan['disk_bytes'] / 2**20:,.0f} MiB of disk\n"
        "(training and evaluation are measured or counted, alignment is a guess)"
    )


def _time(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _results_table(results: dict[str, Any]) -> Table:
    table = _table(
        f"Study {results['name']}: loss barriers (mean ± standard error over pairs)", "setting", "matcher", "loss barrier", "% left"
    )
    for setting in results["settings"]:
        for i, (matcher, cell) in enumerate(setting["matchers"].items()):
            barrier, left = cell["loss_barrier"], cell["percent_of_naive"]
            error = "" if barrier["standard_error"] is None else f" ± {barrier['standard_error']:.3f}"
            table.add_row(setting["id"] if i == 0 else "", matcher, f"{barrier['mean']:.3f}{error}", "–" if left is None else f"{left:.1f}")
    return table
