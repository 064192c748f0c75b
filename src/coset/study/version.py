"""A fingerprint of code: which source a result was computed with."""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def code_version(module: str) -> str:
    """A hash of the source of `module` and of every module of this package that it imports, directly or not.

    Comments, docstrings and layout do not count: two versions with the same hash compute the same.
    """
    package = module.partition(".")[0]
    digest = hashlib.sha256()
    for name, source in sorted(_closure(module, package).items()):
        digest.update(f"{name}\n{_plain(source)}\n".encode())
    return digest.hexdigest()


def _closure(module: str, package: str) -> dict[str, str]:
    found: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _file(name)
        if name in found or path is None:
            continue
        found[name] = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(found[name])):
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names if alias.name.startswith(f"{package}.")]
            elif isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == package:
                # `from package import name`: the name may be a module of its own.
                waiting += [*([node.module] if node.module != package else []), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def _file(module: str) -> Path | None:
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:
        # A name inside a module that is no package.
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _plain(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)
