"""The command line. Every verb is a plain function in a module of its own; its docstring is its help."""

import os

# Threads of torch wait for each other at the end of every small operation. On a busy machine spinning there costs several times the work itself;
# sleeping costs next to nothing on an idle one. OpenMP reads this when torch is first imported, which no module here does while it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from coset.cli.app import main

__all__ = ["main"]
