"""What verbs write: results to standard output, everything else to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from io import TextIOWrapper
from typing import Any

from rich.console import Console, RenderableType


class Output(Console):
    """A console on standard output that leaves a closed pipe to its caller: rich would exit with code 1, which means "no" here."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show(*parts: RenderableType) -> None:
    """Print tables and text to standard output, at the width of the terminal (80 columns where there is none)."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a question mark for what the terminal cannot show
    # Names of groups hold brackets and colons: they are text, not markup.
    console = Output(markup=False, highlight=False, emoji=False)
    for part in parts:
        console.print(part)


def show_json(document: Mapping[str, Any]) -> None:
    """Print the one JSON document of ``--json``."""
    # Group names are not ASCII; escape them where standard output cannot hold them.
    escape = (sys.stdout.encoding or "utf-8").lower().replace("-", "") != "utf8"
    print(json.dumps(document, indent=2, ensure_ascii=escape, allow_nan=False))


def complain(kind: str, message: object) -> None:
    """Print ``coset: kind: message`` to standard error."""
    print(f"coset: {kind}: {message}", file=sys.stderr)
