"""The verbs together, and what holds for all of them: exit codes, errors on one line, warnings on standard error.

A new verb is a function in a module beside this one, added to `VERBS`. It takes ``common: Common``, prints with `coset.cli.output`, and
returns its exit code (None is 0). Modules of verbs import torch and whatever needs it inside the function, so that ``coset --help`` is
quick.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from importlib.metadata import version
from typing import Any, TextIO

from cyclopts import App, CycloptsError, Parameter

from coset.cli.certify import certify
from coset.cli.checkpoints import align, apply, barrier, inspect, merge, scramble
from coset.cli.compare import compare, fingerprint
from coset.cli.demo import demo
from coset.cli.options import DEFAULTS, Common
from coset.cli.output import Output, complain
from coset.cli.study import study
from coset.cli.symmetry import symmetry
from coset.errors import CosetError

VERBS: tuple[Callable[..., int | None], ...] = (
    symmetry,
    certify,
    inspect,
    scramble,
    apply,
    align,
    merge,
    barrier,
    compare,
    fingerprint,
    demo,
)

LARGEST = 2**32 - 1
"""Largest integer of any flag."""

DONE = 0
ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
CLOSED = 141  # 128 + SIGPIPE


app = App(
    name="coset",
    help="Transformer weights modulo their symmetries.",
    version=lambda: version("coset"),
    default_parameter=Parameter(negative=()),
    console=Output(),
)
for _verb in VERBS:
    app.command(_verb)
app.command(study)


def main() -> None:
    """Run the command line and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one verb.

    Parameters
    ----------
    arguments
        The words after ``coset``.

    Returns
    -------
    int
        Exit code: what the verb returns, 0 by default; 2 after an error, which is then the first line on standard error.
    """
    common = DEFAULTS
    try:
        verb, bound, _ = app.parse_args(arguments, print_error=False, exit_on_error=False)
        _check_integers(bound.arguments)
        common = next((value for value in bound.arguments.values() if isinstance(value, Common)), common)
        with _plain_warnings(common.quiet):
            code = verb(*bound.args, **bound.kwargs)
        sys.stdout.flush()
    except KeyboardInterrupt:
        complain("error", "interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left. Python flushes once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED
    except Exception as error:
        complain("error", _message(error))
        if common.debug:
            traceback.print_exc()
        return ERROR
    return DONE if code is None else code


def _check_integers(arguments: Mapping[str, Any]) -> None:
    """Refuse integers that no flag means, seeds below zero among them, before a library fails on one."""
    flags: dict[str, Any] = dict(arguments)
    for value in arguments.values():
        if is_dataclass(value) and not isinstance(value, type):
            flags |= asdict(value)
    for name, value in flags.items():
        if not isinstance(value, int):
            continue
        least = 0 if name == "seed" else -LARGEST
        if not least <= value <= LARGEST:
            raise CosetError(f"--{name.replace('_', '-')}: expected an integer from {least} to {LARGEST}, got {value}")


def _message(error: Exception) -> str:
    if isinstance(error, CosetError | CycloptsError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"unexpected {type(error).__name__}: {error}; --debug shows where"


@contextmanager
def _plain_warnings(quiet: bool) -> Iterator[None]:
    """Warnings as one line each on standard error, without the place in the code; none if `quiet`."""

    def line(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
    ) -> None:
        complain("warning", message)

    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore")
        warnings.showwarning = line
        yield
