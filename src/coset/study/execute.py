"""Do one unit. The same function runs in a local worker and on a cluster, so the results cannot differ."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from coset.errors import CosetError
from coset.study.store import Store, Unit, write_record
from coset.study.training import one_thread


@dataclass(frozen=True)
class Outcome:
    """How a unit ended: `error` is None if its results are on disk."""

    key: str
    error: str | None = None


def execute(folder: Path, unit: Unit) -> Outcome:
    """Read the inputs of `unit` from the store in `folder`, do it on one thread, and write its results; errors are returned."""
    store = Store(folder)
    if store.done(unit):
        return Outcome(unit.key)
    began, worked = time.perf_counter(), time.process_time()
    try:
        work = import_module(f"coset.study.units.{unit.kind}")
        with one_thread(), store.writing(unit) as partial:
            inputs = {role: store.place(source) for role, source in unit.inputs.items()}
            record = work.run(unit.config, unit.place, inputs, partial)
            timing = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - worked}
            write_record(partial, {**record, "timing": timing})
    except CosetError as error:
        return Outcome(unit.key, str(error))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(unit.key, f"{type(error).__name__}: {error} ({Path(where.filename).name}, line {where.lineno})")
    return Outcome(unit.key)
