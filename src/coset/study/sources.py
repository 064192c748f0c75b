"""Reading data that lies on this machine: idx and CIFAR images, text, tables, WordNet. Nothing is downloaded."""

from __future__ import annotations

import csv
import gzip
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from coset.errors import CosetError

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts its files."""
WORDNET = Path("/usr/share/wordnet")
"""Where Debian's package wordnet-base puts its files."""


@dataclass(frozen=True)
class Images:
    """Images [n, height, width, channels] (uint8) and their classes [n] (int64)."""

    images: Tensor
    classes: Tensor


# --- images ---------------------------------------------------------------------------------------------------------

_IDX = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_CIFAR_10 = {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)}
_CIFAR_100 = {"train": ("train.bin",), "test": ("test.bin",)}
_SIDE = 32
_CHANNELS = 3


@dataclass(frozen=True)
class ImageFolder:
    """A folder of idx files (MNIST's names, gzipped or not) or of CIFAR-10 or CIFAR-100 binary files, as published.

    Attributes
    ----------
    files
        Files of the part to train on and of the part to test on.
    labels
        Bytes in front of an image; the last of them is the class. None for idx files.
    """

    files: dict[str, tuple[Path, ...]]
    labels: int | None

    @staticmethod
    def open(folder: Path) -> ImageFolder:
        """Find out what the folder holds.

        Raises
        ------
        CosetError
            If it is neither of the three.
        """
        idx = {part: tuple(_plain_or_gzipped(folder, name) for name in names) for part, names in _IDX.items()}
        if all(path.is_file() for paths in idx.values() for path in paths):
            return ImageFolder(idx, None)
        for names, labels in ((_CIFAR_10, 1), (_CIFAR_100, 2)):
            files = {part: tuple(folder / name for name in each) for part, each in names.items()}
            if all(path.is_file() for paths in files.values() for path in paths):
                return ImageFolder(files, labels)
        raise CosetError(
            f"{folder}: expected idx files ({', '.join(name for names in _IDX.values() for name in names)}, each perhaps with .gz), "
            f"CIFAR-10's data_batch_1.bin to data_batch_5.bin and test_batch.bin, or CIFAR-100's train.bin and test.bin"
        )

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file."""
        return tuple(path for paths in self.files.values() for path in paths)

    def read(self, part: str) -> Images:
        """The images of ``train`` or ``test``.

        Raises
        ------
        CosetError
            If a file is damaged.
        """
        if self.labels is None:
            images, classes = (_read_idx(path) for path in self.files[part])
            if images.dim() != 3 or classes.dim() != 1 or len(images) != len(classes):
                raise CosetError(
                    f"{self.files[part][0]}: expected images [n, height, width] with one label each, "
                    f"got {list(images.shape)} and labels {list(classes.shape)}"
                )
            return Images(images.unsqueeze(-1), classes.to(torch.int64))
        record = self.labels + _CHANNELS * _SIDE * _SIDE
        blocks = []
        for path in self.files[part]:
            raw = np.frombuffer(path.read_bytes(), dtype=np.uint8)
            if raw.size == 0 or raw.size % record:
                raise CosetError(f"{path}: expected records of {record} bytes, got a file of {raw.size} bytes")
            blocks.append(raw.reshape(-1, record))
        rows = torch.from_numpy(np.concatenate(blocks))
        images = rows[:, self.labels :].reshape(-1, _CHANNELS, _SIDE, _SIDE).permute(0, 2, 3, 1).contiguous()
        return Images(images, rows[:, self.labels - 1].to(torch.int64))


def _plain_or_gzipped(folder: Path, name: str) -> Path:
    plain = folder / name
    return plain if plain.is_file() else folder / f"{name}.gz"


def _read_idx(path: Path) -> Tensor:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError) as error:
        raise CosetError(f"{path}: is not a whole gzip file: {error}") from error
    # Two zero bytes, the type (8: unsigned bytes), the number of axes; then one big-endian size for each axis.
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08" or len(raw) < 4 + 4 * raw[3]:
        raise CosetError(f"{path}: expected an idx file of unsigned bytes, got one that starts with {raw[:4].hex()}")
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
    values = np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * raw[3])
    if values.size != int(np.prod(shape)):
        raise CosetError(f"{path}: its header says {shape}, which needs {int(np.prod(shape))} bytes; it has {values.size}")
    return torch.from_numpy(values.copy()).reshape(shape)


# --- text -----------------------------------------------------------------------------------------------------------


def standard_library() -> tuple[Path, ...]:
    """Source files of the running interpreter's standard library, without tests and installed packages, in one order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    # By parts, so that the order does not depend on the separator.
    files = sorted((path.relative_to(root).parts, path) for path in root.rglob("*.py"))
    return tuple(path for parts, path in files if not skipped & set(parts))


def king_james() -> bytes:
    """The King James Bible, one verse a line without its reference, as the command ``bible`` of Debian's bible-kjv prints it.

    Raises
    ------
    CosetError
        If the command is missing or prints no text.
    """
    command = shutil.which("bible")
    if command is None:
        raise CosetError("task kjv: the command bible is not installed; try: apt install bible-kjv")
    # -f switches pretty-printing off: "Ge1:1 In the beginning ...".
    done = subprocess.run([command, "-f", "gen1:1-rev22:21"], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    verses = re.findall(rb"^\S+ (.*)$", done.stdout, flags=re.MULTILINE)
    if done.returncode != 0 or len(verses) < 31_000:
        raise CosetError(f"task kjv: expected {command} to print 31,102 verses, got {len(verses)}; try: apt install bible-kjv")
    return b"\n".join(verses) + b"\n"


# --- labelled text --------------------------------------------------------------------------------------------------

Column = int | str
"""A column by number (from 0, a file without a header) or by name (from the first row)."""


def read_table(path: Path, label: Column, text: Column | None) -> Iterator[tuple[str, str]]:
    """Pairs (label, text) from a CSV file, or a TSV one by its suffix.

    Parameters
    ----------
    label, text
        Columns; if either is a name, the first row is a header. Without `text`, all columns but the label's, joined by spaces.

    Raises
    ------
    CosetError
        If a column is missing, with the row.
    """
    with path.open(encoding="utf-8", newline="") as stream:
        rows = csv.reader(stream, delimiter="\t" if path.suffix == ".tsv" else ",")
        header = next(rows, []) if isinstance(label, str) or isinstance(text, str) else None

        def place(column: Column) -> int:
            if isinstance(column, int):
                return column
            if header is None or column not in header:
                raise CosetError(f"{path}: there is no column {column!r}; the first row is {', '.join(header or [])[:200]}")
            return header.index(column)

        at, where = place(label), None if text is None else place(text)
        for row in rows:
            if not row:
                continue
            if len(row) <= max(at, where or 0, 1):
                raise CosetError(f"{path}, line {rows.line_num}: expected a label in column {at} and a text, got {len(row)} columns")
            yield row[at], " ".join(x for i, x in enumerate(row) if i != at) if where is None else row[where]


def read_wordnet(folder: Path) -> Iterator[tuple[str, str]]:
    """Pairs (number of the lexicographer file, gloss) of all synsets of a WordNet database."""
    for name in WORDNET_FILES:
        for line in (folder / name).read_text(encoding="utf-8").splitlines():
            # Lines of the licence start with blanks.
            if not line.startswith("  "):
                yield line.split(" ", 2)[1], line.partition(" | ")[2].strip()


WORDNET_FILES = ("data.noun", "data.verb", "data.adj", "data.adv")


# --- words ----------------------------------------------------------------------------------------------------------

PADDING, UNKNOWN = 0, 1
_WORD = re.compile(r"\w+|[^\w\s]")


def words(text: str) -> list[str]:
    """Lower-case words and punctuation marks."""
    return _WORD.findall(text.lower())


def word_ids(vocabulary: Sequence[str], texts: Iterable[str], length: int) -> Tensor:
    """Ids [n, length] of the first words of every text; :data:`UNKNOWN` for words outside the vocabulary, then :data:`PADDING`."""
    number = {word: i for i, word in enumerate(vocabulary, start=2)}
    rows = []
    for text in texts:
        ids = [number.get(word, UNKNOWN) for word in words(text)[:length]]
        rows.append(ids + [PADDING] * (length - len(ids)))
    return torch.tensor(rows, dtype=torch.int64)


def most_common_words(texts: Iterable[str], size: int) -> list[str]:
    """The vocabulary of `size` ids, two of which are padding and unknown: by falling count, then by alphabet."""
    counts = Counter(word for text in texts for word in words(text))
    return [word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))][: size - 2]
