"""Whether an output can be written: asked before any work, and answered by trying."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from coset.errors import CosetError


def check_file(
    path: str | os.PathLike[str],
    what: str,
    *,
    suffixes: tuple[str, ...] = (),
    outside: Iterable[Path] = (),
    apart: Iterable[str | os.PathLike[str] | None] = (),
    overwrite: bool = False,
) -> Path:
    """Refuse a file that could not be written when the work is done; nothing is left at its place.

    Parameters
    ----------
    what
        What the file is, in words: "transform file".
    suffixes
        What its name may end in; empty: anything.
    outside
        Checkpoint folders in which it must not lie.
    apart
        Other files that the same command writes; None: one that it does not.
    overwrite
        Whether it may be there already.

    Raises
    ------
    CosetError
        If it is a folder, is there already, has another suffix, lies in one of the folders or is one of the other files, or if a file beside
        it cannot be made.
    """
    path = Path(path)
    if path.is_dir():
        raise CosetError(f"{path}: the {what} is a folder; give a file name")
    if os.path.lexists(path) and not overwrite:
        raise CosetError(f"{path}: the {what} already exists; give another name, or --overwrite")
    if suffixes and path.suffix not in suffixes:
        raise CosetError(
            f"{path}: the {what} is a {' or '.join(suffixes)} file, got {path.name}; name it {path.stem.rstrip('.')}{suffixes[0]}"
        )
    if any(folder.resolve() in (path.resolve(), *path.resolve().parents) for folder in outside):
        raise CosetError(f"{path}: the {what} lies inside a checkpoint folder; choose a place beside it")
    if any(Path(other).resolve() == path.resolve() for other in apart if other is not None):
        raise CosetError(f"{path}: the {what} is another output of the same command as well; give it a name of its own")
    check_place(path, what)
    return path


def check_place(path: Path, what: str) -> None:
    """Refuse a path beside which nothing can be made, under a name as long as that of a temporary file.

    Raises
    ------
    CosetError
        If its folder does not exist or cannot be written to, or the name is too long.
    """
    if not path.parent.is_dir():
        raise CosetError(f"{path}: the folder {path.parent} does not exist; create it first")
    whole = Path(os.path.abspath(path))  # not resolved: a link is replaced, not followed
    trial = whole.with_name(f".{whole.name}.coset-{secrets.token_hex(4)}")
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        raise CosetError(f"{path}: cannot write the {what}: {error.strerror}; choose another place") from None
