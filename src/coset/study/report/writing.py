"""Writing the report: everything is computed before the first file is replaced, and every file appears whole."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from coset.errors import CosetError
from coset.study.report.figures import figures
from coset.study.report.page import page
from coset.study.report.results import read
from coset.study.report.tables import as_csv, as_json, markdown, tables


def write_report(directory: Path) -> list[Path]:
    """Turn ``directory/results.json`` into a page, tables and figures; equal results give equal bytes.

    Parameters
    ----------
    directory
        Where `coset study run` left its results. Written into it: ``report.html`` (self-contained), ``summary.md``,
        ``tables/*.csv``, ``tables/tables.json``, ``figures/*.png`` and ``figures/*.svg``.

    Returns
    -------
    list of Path
        The files that were written, the page first.

    Raises
    ------
    CosetError
        If the results are missing, damaged or hold no setting (nothing is written), or if a file cannot be written.
    """
    study = read(directory)
    found = tables(study)
    files = {"report.html": page(study).encode(), "summary.md": markdown(study).encode()}
    files |= {f"tables/{name}.csv": as_csv(rows) for name, rows in found.items()}
    files["tables/tables.json"] = as_json(found)
    files |= {f"figures/{name}": content for name, content in figures(study).items()}
    return [_write(directory / name, content) for name, content in files.items()]


def _write(path: Path, content: bytes) -> Path:
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(exist_ok=True)
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CosetError(
            f"{path}: cannot be written ({error.strerror}); make room or choose another directory, and report again"
        ) from error
    return path
