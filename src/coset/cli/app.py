"""The verbs together, and what holds for all of them: exit codes, errors on one line, warnings on standard error.

A new verb is a function in a module beside this one, added to `VERBS`. It takes ``common: Common``, prints with `coset.cli.output`, and
returns its exit code (None is 0). Modules of verbs import torch and whatever needs it inside the function, so that ``coset --help`` is
quick.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from inspect import BoundArguments, Parameter
from itertools import pairwise
from typing import Any, TextIO

import cyclopts
from cyclopts import App, CycloptsError

from coset.cli.certify import certify
from coset.cli.checkpoints import align, apply, barrier, inspect, merge, scramble
from coset.cli.compare import compare, fingerprint
from coset.cli.demo import demo
from coset.cli.options import DEFAULTS, Common, typed
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
"""Largest integer of a flag, unless said otherwise."""

RANGES: Mapping[str, tuple[int, int]] = {
    "seed": (0, LARGEST),
    "match_samples": (1, sys.maxsize),  # what is too much depends on the memory
    "match_length": (1, sys.maxsize),
    "points": (2, 100_000),
    "seeds": (2, 1_000),
    "workers": (1, 1_024),
}
"""Smallest and largest integer of the flags that do not go from 1 to `LARGEST`."""

DONE = 0
ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
CLOSED = 141  # 128 + SIGPIPE


app = App(
    name="coset",
    help="Transformer weights modulo their symmetries.",
    version=lambda: version("coset"),
    default_parameter=cyclopts.Parameter(negative=()),
    console=Output(),
)
for _verb in VERBS:
    app.command(_verb)
app.command(study)


def main() -> None:
    """Run the command line and exit. To be terminated is to be interrupted: what is half-written goes away."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
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
    common, flags = DEFAULTS, dict[str, Any]()
    try:
        _check_empty(arguments)
        verb, bound, _ = app.parse_args(arguments, print_error=False, exit_on_error=False)
        flags = _flags(bound)
        _check_numbers(flags)
        _check_whole(arguments, flags)
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
        complain("error", _message(error, flags))
        if common.debug:
            traceback.print_exc()
        return ERROR
    return DONE if code is None else code


def _flags(bound: BoundArguments) -> dict[str, Any]:
    """The flags that were given, by their names in Python, with their values; a group of flags brings its defaults along."""
    flags: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if is_dataclass(value) and not isinstance(value, type):
            flags |= {field.name: getattr(value, field.name) for field in fields(value)}
        elif bound.signature.parameters[name].kind is Parameter.KEYWORD_ONLY:
            flags[name] = value
    return flags


def _check_empty(arguments: Sequence[str]) -> None:
    """Refuse empty words: a path of nothing would be the current folder."""
    for previous, word in pairwise(["", *arguments]):
        if not word or (word.startswith("--") and word.endswith("=")):
            flag = word.rstrip("=") or previous
            name = flag if flag.startswith("-") else "arguments"
            raise CosetError(f"{name}: expected a value, got nothing; is a variable of the shell not set?")


def _check_numbers(flags: Mapping[str, Any]) -> None:
    """Refuse numbers that no flag means, sizes of zero and NaN among them, before a library fails on one."""
    for name, value in flags.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise CosetError(f"{typed(name)}: expected a finite number, got {value}")
        least, most = RANGES.get(name, (1, LARGEST))
        if isinstance(value, int) and not isinstance(value, bool) and not least <= value <= most:
            raise CosetError(f"{typed(name)}: expected an integer from {least} to {most}, got {value}")


def _check_whole(arguments: Sequence[str], flags: Mapping[str, Any]) -> None:
    """Refuse numbers with a fraction for integers, which the parser would round."""
    for word, after in pairwise([*arguments, ""]):
        flag, equals, value = word.partition("=")
        given = flags.get(flag.removeprefix("--").replace("-", "_")) if flag.startswith("--") else None
        text = value if equals else after
        if isinstance(given, int) and not isinstance(given, bool) and "." in text:
            raise CosetError(f"{flag}: expected an integer, got {text}")


def _message(error: Exception, flags: Mapping[str, Any]) -> str:
    """What is wrong. The library begins with the name of an option at fault; whoever typed a flag for it reads that flag."""
    if isinstance(error, CosetError | CycloptsError):
        name, colon, rest = str(error).partition(":")
        return f"{typed(name)}:{rest}" if colon and name in flags else str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return f"out of memory: {error}; try fewer or shorter inputs, or a smaller batch"
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
