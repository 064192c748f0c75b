"""Where units run: worker processes on this machine, or a Ray cluster that shares the study's folder."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from coset.errors import CosetError
from coset.study.execute import Outcome, execute
from coset.study.store import Unit

ATTEMPTS = 3
"""How often a unit is started whose worker dies."""


class Engine(Protocol):
    """Runs units that are ready to run."""

    slots: int
    """Units that can be under way."""

    def submit(self, unit: Unit) -> None:
        """Start a unit whose inputs are on disk."""

    def wait(self) -> list[Outcome]:
        """Block until a unit that was submitted ends."""

    def close(self) -> None:
        """Stop all workers, whatever they do."""


def cores() -> int:
    """Processor cores that this process may use: a container often has fewer than the machine."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


# --- local ------------------------------------------------------------------------------------------------------------


def _work(connection: Connection, folder: Path) -> None:
    """A worker's life: units in, outcomes out, until the other end is closed."""
    while True:
        try:
            connection.send(execute(folder, connection.recv()))
        except (EOFError, BrokenPipeError):
            return


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    unit: Unit | None = None


@dataclass
class Local:
    """Processes of one thread each. A worker that dies is replaced, and its unit started again, :data:`ATTEMPTS` times in all."""

    folder: Path
    slots: int
    _workers: list[_Worker] = field(default_factory=list)
    _deaths: dict[str, int] = field(default_factory=dict)

    def submit(self, unit: Unit) -> None:
        worker = next((w for w in self._workers if w.unit is None), None)
        if worker is None:
            assert len(self._workers) < self.slots, "more units submitted than there are slots"
            worker = self._start()
            self._workers.append(worker)
        worker.unit = unit
        # A worker that died while idle is noticed by `wait`.
        with suppress(BrokenPipeError):
            worker.connection.send(unit)

    def wait(self) -> list[Outcome]:
        while True:
            busy = {w.connection: w for w in self._workers if w.unit is not None}
            outcomes = []
            for connection in multiprocessing.connection.wait(list(busy)):
                worker = busy[connection]  # type: ignore[index]
                try:
                    outcomes.append(worker.connection.recv())
                    worker.unit = None
                except (EOFError, ConnectionResetError):
                    outcomes += self._died(worker)
            if outcomes:
                return outcomes

    def _died(self, worker: _Worker) -> list[Outcome]:
        self._workers.remove(worker)
        worker.connection.close()
        worker.process.join()
        unit = worker.unit
        assert unit is not None
        self._deaths[unit.key] = self._deaths.get(unit.key, 0) + 1
        if self._deaths[unit.key] < ATTEMPTS:
            self.submit(unit)
            return []
        code = worker.process.exitcode
        return [
            Outcome(unit.key, f"its worker process died {ATTEMPTS} times (exit code {code}), perhaps for lack of memory; try fewer workers")
        ]

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()

    def _start(self) -> _Worker:
        # Spawned, not forked: a forked child inherits torch's thread pools in whatever state they are.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, self.folder), daemon=True, name="coset study worker")
        with _without_interrupts():
            process.start()
        theirs.close()
        return _Worker(process, ours)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C reaches the whole group of processes; children started here ignore it, and are stopped by their parent."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# --- Ray --------------------------------------------------------------------------------------------------------------


class Ray:
    """Tasks of a Ray cluster. Ray itself starts a task again whose worker died.

    Parameters
    ----------
    folder
        The store, in a place that every machine of the cluster sees under the same name.
    address
        Of the cluster; None starts one on this machine.
    workers
        Cores of the cluster that is started here.
    device
        ``cuda`` asks for one accelerator a task.

    Raises
    ------
    CosetError
        If Ray is not installed, or there is no cluster at the address.
    """

    def __init__(self, folder: Path, *, address: str | None, workers: int, device: str):
        try:
            import ray
        except ImportError as error:
            raise CosetError("engine ray: Ray is not installed; try: pip install 'coset[ray]', or --engine local") from error
        self._ray: Any = ray
        own = {"num_cpus": workers, "include_dashboard": False} if address is None else {"address": address}
        try:
            self._ray.init(**own, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
        except ConnectionError as error:
            raise CosetError(f"engine ray: there is no cluster at {address}: {error}") from error
        self._folder = folder
        self._task = self._ray.remote(num_cpus=1, num_gpus=1 if device == "cuda" else 0, max_retries=ATTEMPTS - 1)(execute)
        self._running: dict[Any, Unit] = {}
        # More than there are cores, so that a cluster that grows finds work.
        self.slots = 2 * max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def submit(self, unit: Unit) -> None:
        self._running[self._task.remote(self._folder, unit)] = unit

    def wait(self) -> list[Outcome]:
        finished, _ = self._ray.wait(list(self._running), num_returns=1)
        outcomes = []
        for reference in finished:
            unit = self._running.pop(reference)
            try:
                outcomes.append(self._ray.get(reference))
            except self._ray.exceptions.RayError as error:
                outcomes.append(Outcome(unit.key, f"Ray gave up on it: {str(error).splitlines()[0]}"))
        return outcomes

    def close(self) -> None:
        self._ray.shutdown()
