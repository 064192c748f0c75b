"""The command line. Every verb is a plain function in a module of its own; its docstring is its help."""

from coset.cli.app import main

__all__ = ["main"]
