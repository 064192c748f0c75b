"""The tasks of a study: where their data lies, what it prescribes for a model, and how it is split.

Splits and subsamples depend on one seed alone. A task whose data is not on this machine says how to get it.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from coset.errors import CosetError
from coset.study import sources
from coset.study.data import DIGITS_CLASSES, Dataset, digit_images, patchify

Kind = Literal["images", "text", "labelled"]


@dataclass(frozen=True)
class Shape:
    """What data prescribes for a model, and how much of it there is.

    Attributes
    ----------
    grid, features
        Patches along height and width, and numbers in a patch; None for text.
    vocabulary, context
        Ids and length of a sequence; None for images.
    classes
        None for next-token prediction.
    train, test
        Samples in the two parts. An estimate for token-level text, which is only split when it is prepared.
    """

    grid: tuple[int, ...] | None
    features: int | None
    vocabulary: int | None
    context: int | None
    classes: int | None
    train: int
    test: int

    @property
    def length(self) -> int:
        """Positions of a sample."""
        if self.context is not None:
            return self.context
        assert self.grid is not None
        return self.grid[0] * self.grid[1]

    def model_part(self) -> dict[str, Any]:
        """The part that decides the architecture, as plain data."""
        grid = None if self.grid is None else list(self.grid)
        return {"grid": grid, "features": self.features, "vocabulary": self.vocabulary, "context": self.context, "classes": self.classes}


@dataclass(frozen=True)
class Request:
    """A task with its options: the keys of `coset.study.config.Data`, paths absolute, and the seed of the split."""

    options: Mapping[str, Any]
    seed: int

    @property
    def task(self) -> str:
        return str(self.options["task"])

    def path(self, key: str = "path") -> Path:
        value = self.options[key]
        if value is None:
            raise CosetError(f"task {self.task}: {key}: missing; it names the data's file or folder")
        return Path(value)

    def number(self, key: str, default: int) -> int:
        value = self.options[key]
        return default if value is None else int(value)


class Task(ABC):
    """A kind of data.

    Attributes
    ----------
    kind
        What models can learn it.
    keys
        Options that it takes beside ``train_size`` and ``test_size``.
    """

    kind: Kind
    keys: frozenset[str]

    @abstractmethod
    def check(self, request: Request) -> None:
        """Raise :class:`CosetError`, with what to do, if the data is not on this machine."""

    @abstractmethod
    def fingerprint(self, request: Request) -> str:
        """A hash of the source's contents, without its place."""

    @abstractmethod
    def shape(self, request: Request, *, present: bool) -> Shape:
        """What the data prescribes; if it is not `present`, a typical size for the estimate of cost."""

    @abstractmethod
    def load(self, request: Request) -> Dataset:
        """Read, split, subsample."""


def _hash(parts: Iterable[bytes | Path]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            with part.open("rb") as stream:
                inner = hashlib.file_digest(stream, "sha256").digest()
        else:
            inner = hashlib.sha256(part).digest()
        digest.update(inner)
    return digest.hexdigest()


def _drawn(count: int, wanted: int, seed: int, what: str) -> Tensor:
    """`wanted` of `count` indices in random order."""
    if wanted > count:
        raise CosetError(f"{what}: {wanted} samples asked for, there are {count}")
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:wanted]


def _wanted(request: Request, train: int, test: int) -> tuple[int, int]:
    """Sizes of the two parts, by default all that there is."""
    return request.number("train_size", train), request.number("test_size", test)


def _sizes(request: Request, train: int, test: int) -> tuple[int, int]:
    """How many samples of either part are used, of those that there are."""
    wanted = _wanted(request, train, test)
    for key, size, count in zip(("train_size", "test_size"), wanted, (train, test), strict=True):
        if size > count:
            raise CosetError(f"task {request.task}: {key}: {size} samples asked for, there are {count}")
    return wanted


def _file(path: Path, request: Request, how: str) -> None:
    if not path.is_file():
        raise CosetError(f"task {request.task}: {path}: there is no such file; {how}")


# --- images -----------------------------------------------------------------------------------------------------------


def _image_data(train: sources.Images, test: sources.Images, patch: int) -> Dataset:
    """Both parts shifted and scaled by the training part's mean and deviation in every channel, and cut into patches."""
    pixels = train.images.to(torch.float64)
    mean, deviation = pixels.mean((0, 1, 2)), pixels.std((0, 1, 2))

    def patches(images: Tensor) -> Tensor:
        return patchify(((images.to(torch.float64) - mean) / deviation).to(torch.float32), patch)

    return Dataset(patches(train.images), train.classes, patches(test.images), test.classes)


def _grid(request: Request, height: int, width: int, patch: int) -> tuple[int, int]:
    if height % patch or width % patch:
        raise CosetError(f"task {request.task}: patch: {patch} does not divide images of {height} by {width} pixels")
    return height // patch, width // patch


class _Digits(Task):
    kind: Kind = "images"
    keys = frozenset({"patch"})
    _total = 1797

    def check(self, request: Request) -> None:
        digit_images()

    def fingerprint(self, request: Request) -> str:
        images, classes = digit_images()
        return _hash([images.numpy().tobytes(), classes.numpy().tobytes()])

    def _counts(self, request: Request) -> tuple[int, int]:
        test = request.number("test_size", 360)
        return _sizes(request, self._total - test, test)

    def shape(self, request: Request, *, present: bool) -> Shape:
        patch = request.number("patch", 2)
        train, test = self._counts(request)
        return Shape(_grid(request, 8, 8, patch), patch * patch, None, None, DIGITS_CLASSES, train, test)

    def load(self, request: Request) -> Dataset:
        images, classes = digit_images()
        train, test = self._counts(request)
        order = _drawn(self._total, self._total, request.seed, "digits")
        parts = [sources.Images(images[rows].unsqueeze(-1), classes[rows]) for rows in (order[test : test + train], order[:test])]
        return _image_data(parts[0], parts[1], request.number("patch", 2))


class _ImageFiles(Task):
    kind: Kind = "images"
    keys = frozenset({"path", "patch"})

    def __init__(self, home: Path | None, how: str):
        self._home, self._how = home, how

    def _folder(self, request: Request) -> Path:
        return self._home if self._home is not None and request.options["path"] is None else request.path()

    def check(self, request: Request) -> None:
        folder = self._folder(request)
        if not folder.is_dir():
            raise CosetError(f"task {request.task}: {folder}: there is no such folder; {self._how}")
        sources.ImageFolder.open(folder)

    def fingerprint(self, request: Request) -> str:
        return _hash(sources.ImageFolder.open(self._folder(request)).paths)

    def shape(self, request: Request, *, present: bool) -> Shape:
        patch = request.number("patch", 4)
        if not present:
            # CIFAR-10.
            return Shape(_grid(request, 32, 32, patch), 3 * patch * patch, None, None, 10, *_wanted(request, 50_000, 10_000))
        folder = sources.ImageFolder.open(self._folder(request))
        train, test = folder.read("train"), folder.read("test")
        _, height, width, channels = train.images.shape
        classes = int(max(train.classes.max(), test.classes.max())) + 1
        counts = _sizes(request, len(train.images), len(test.images))
        return Shape(_grid(request, height, width, patch), channels * patch * patch, None, None, classes, *counts)

    def load(self, request: Request) -> Dataset:
        folder = sources.ImageFolder.open(self._folder(request))
        parts = [folder.read("train"), folder.read("test")]
        counts = _sizes(request, len(parts[0].images), len(parts[1].images))
        for i, count in enumerate(counts):
            rows = _drawn(len(parts[i].images), count, request.seed + i, request.task)
            parts[i] = sources.Images(parts[i].images[rows], parts[i].classes[rows])
        return _image_data(parts[0], parts[1], request.number("patch", 4))


# --- text -------------------------------------------------------------------------------------------------------------

_BLOCKS = 50
"""Parts of a text that one file holds; one in ten is held out."""


def _held_out(count: int, seed: int) -> tuple[list[int], list[int]]:
    """Indices to train on and to test on, in order: one in ten is held out, at least one."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    held = max(1, round(0.1 * count))
    return sorted(order[held:]), sorted(order[:held])


def _windows(documents: Sequence[Tensor], length: int) -> Tensor:
    """Consecutive windows [n, length] of all documents joined; a rest shorter than a window is left out."""
    joined = torch.cat(list(documents))
    count = len(joined) // length
    return joined[: count * length].reshape(count, length).to(torch.int64)


def _blocks(ids: Tensor) -> list[Tensor]:
    return list(torch.tensor_split(ids, _BLOCKS))


class _Text(Task):
    """Next-token prediction on windows of a text that comes as documents; documents, not windows, are held out."""

    kind: Kind = "text"
    keys = frozenset({"context"})

    @abstractmethod
    def documents(self, request: Request) -> list[Tensor]:
        """Ids of every document."""

    @abstractmethod
    def vocabulary(self, request: Request, *, present: bool) -> int:
        """Number of different ids."""

    def length(self, request: Request, *, present: bool) -> int:
        """How many ids there are, at least roughly."""
        return sum(len(ids) for ids in self.documents(request)) if present else 10**8

    def shape(self, request: Request, *, present: bool) -> Shape:
        context = request.number("context", 64)
        windows = self.length(request, present=present) // context
        if windows < 2 * _BLOCKS:
            raise CosetError(f"task {request.task}: context: the text has {windows} windows of {context}; expected at least {2 * _BLOCKS}")
        train, test = (request.number(key, share) for key, share in (("train_size", windows * 9 // 10), ("test_size", windows // 10)))
        if train + test > windows:
            raise CosetError(f"task {request.task}: train_size, test_size: {train} and {test} samples asked for, there are {windows}")
        return Shape(None, None, self.vocabulary(request, present=present), context, None, train, test)

    def load(self, request: Request) -> Dataset:
        documents, context = self.documents(request), request.number("context", 64)
        parts = [_windows([documents[i] for i in rows], context) for rows in _held_out(len(documents), request.seed)]
        counts = _sizes(request, len(parts[0]), len(parts[1]))
        for i, count in enumerate(counts):
            parts[i] = parts[i][_drawn(len(parts[i]), count, request.seed + i, request.task)]
        return Dataset(parts[0], None, parts[1], None)


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class _Bytes(_Text):
    """Byte-level text."""

    @abstractmethod
    def texts(self, request: Request) -> list[bytes]:
        """The documents."""

    def documents(self, request: Request) -> list[Tensor]:
        return [_bytes(text) for text in self.texts(request) if text]

    def vocabulary(self, request: Request, *, present: bool) -> int:
        return 256

    def fingerprint(self, request: Request) -> str:
        return _hash(self.texts(request))


class _StandardLibrary(_Bytes):
    def check(self, request: Request) -> None:
        if not sources.standard_library():
            raise CosetError("task stdlib: this Python has no source files of its standard library; use one that is not frozen")

    def texts(self, request: Request) -> list[bytes]:
        return [path.read_bytes() for path in sources.standard_library()]


class _OneText(_Bytes):
    """A text in one piece, held out in blocks."""

    @abstractmethod
    def text(self, request: Request) -> bytes:
        """The whole text."""

    def texts(self, request: Request) -> list[bytes]:
        return [self.text(request)]

    def documents(self, request: Request) -> list[Tensor]:
        return _blocks(_bytes(self.text(request)))


class _KingJames(_OneText):
    def check(self, request: Request) -> None:
        sources.king_james()

    def text(self, request: Request) -> bytes:
        return sources.king_james()


class _TextFile(_OneText):
    keys = frozenset({"path", "context"})

    def check(self, request: Request) -> None:
        _file(request.path(), request, "path names any file to read byte by byte, such as enwik8")

    def text(self, request: Request) -> bytes:
        return request.path().read_bytes()


class _Tokens(_Text):
    keys = frozenset({"path", "tokenizer", "context"})

    def check(self, request: Request) -> None:
        _file(request.path(), request, "path names a UTF-8 text, such as WikiText-103's wiki.train.tokens")
        _file(request.path("tokenizer"), request, "tokenizer names a tokenizer.json, such as the one in a checkpoint's folder")
        self._tokenizer(request)

    def _tokenizer(self, request: Request) -> Any:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise CosetError("task tokens: the library tokenizers is not installed; try: pip install tokenizers") from error
        try:
            return Tokenizer.from_file(str(request.path("tokenizer")))
        except Exception as error:  # the library raises Exception itself
            raise CosetError(f"task tokens: {request.path('tokenizer')}: is not a tokenizer: {error}") from error

    def fingerprint(self, request: Request) -> str:
        return _hash([request.path(), request.path("tokenizer")])

    def vocabulary(self, request: Request, *, present: bool) -> int:
        # GPT-2's where there is none to ask.
        return int(self._tokenizer(request).get_vocab_size()) if present else 50_257

    def length(self, request: Request, *, present: bool) -> int:
        # Four bytes a token is typical of English.
        return request.path().stat().st_size // 4 if present else super().length(request, present=False)

    def documents(self, request: Request) -> list[Tensor]:
        tokenizer = self._tokenizer(request)
        text = request.path().read_text(encoding="utf-8").splitlines(keepends=True)
        encoded = tokenizer.encode_batch(text, add_special_tokens=False)
        return _blocks(torch.cat([torch.tensor(line.ids, dtype=torch.int32) for line in encoded]))


# --- labelled text ----------------------------------------------------------------------------------------------------

_Pairs = list[tuple[str, str]]
_WORDS = 4096
_LENGTH = 32


class _Labelled(Task):
    """Classes of texts, read word by word; the vocabulary comes from the training part."""

    kind: Kind = "labelled"
    keys = frozenset({"context", "vocabulary"})

    @abstractmethod
    def parts(self, request: Request) -> tuple[_Pairs, _Pairs]:
        """Pairs (label, text) to train on and to test on; the second list is empty if the source has one part only."""

    def classes(self, request: Request, *, present: bool) -> int:
        """Number of labels."""
        return len({label for pairs in self.parts(request) for label, _ in pairs}) if present else 4

    def _counts(self, request: Request, train: int, test: int) -> tuple[int, int]:
        if test:
            return _sizes(request, train, test)
        held = request.number("test_size", train // 10)
        return _sizes(request, train - held, held)

    def shape(self, request: Request, *, present: bool) -> Shape:
        classes = self.classes(request, present=present)
        if classes < 2:
            raise CosetError(f"task {request.task}: expected at least two different labels, got {classes}")
        if present:
            train, test = self.parts(request)
            counts = self._counts(request, len(train), len(test))
        else:
            # AG News.
            counts = _wanted(request, 120_000, 7_600)
        return Shape(None, None, request.number("vocabulary", _WORDS), request.number("context", _LENGTH), classes, *counts)

    def load(self, request: Request) -> Dataset:
        train, test = self.parts(request)
        counts = self._counts(request, len(train), len(test))
        labels = {label: i for i, label in enumerate(sorted({label for pairs in (train, test) for label, _ in pairs}))}
        if test:
            rows = [
                _drawn(len(pairs), count, request.seed + i, request.task)
                for i, (pairs, count) in enumerate(zip((train, test), counts, strict=True))
            ]
        else:
            order, test = _drawn(len(train), sum(counts), request.seed, request.task), train
            rows = [order[counts[1] :], order[: counts[1]]]
        chosen = [[pairs[i] for i in part.tolist()] for pairs, part in zip((train, test), rows, strict=True)]
        vocabulary = sources.most_common_words((text for _, text in chosen[0]), request.number("vocabulary", _WORDS))
        ids = [sources.word_ids(vocabulary, (text for _, text in pairs), request.number("context", _LENGTH)) for pairs in chosen]
        targets = [torch.tensor([labels[label] for label, _ in pairs]) for pairs in chosen]
        return Dataset(ids[0], targets[0], ids[1], targets[1])


class _Table(_Labelled):
    keys = frozenset({"path", "context", "vocabulary", "label_column", "text_column"})
    _how = "path names a CSV or TSV file, or a folder with train.csv and test.csv (AG News, DBPedia), or train.tsv and test.tsv"

    def _files(self, request: Request) -> tuple[Path, ...]:
        path = request.path()
        for suffix in (".csv", ".tsv"):
            pair = (path / f"train{suffix}", path / f"test{suffix}")
            if all(file.is_file() for file in pair):
                return pair
        _file(path, request, self._how)
        return (path,)

    def check(self, request: Request) -> None:
        self._files(request)

    def fingerprint(self, request: Request) -> str:
        return _hash(self._files(request))

    def parts(self, request: Request) -> tuple[_Pairs, _Pairs]:
        label, text = request.options["label_column"], request.options["text_column"]
        found = [list(sources.read_table(file, 0 if label is None else label, text)) for file in self._files(request)]
        return found[0], found[1] if len(found) > 1 else []


class _WordNet(_Labelled):
    keys = frozenset({"path", "context", "vocabulary"})

    def _folder(self, request: Request) -> Path:
        return sources.WORDNET if request.options["path"] is None else request.path()

    def check(self, request: Request) -> None:
        for name in sources.WORDNET_FILES:
            _file(self._folder(request) / name, request, "try: apt install wordnet-base, or give the database's folder as path")

    def fingerprint(self, request: Request) -> str:
        return _hash(self._folder(request) / name for name in sources.WORDNET_FILES)

    def parts(self, request: Request) -> tuple[_Pairs, _Pairs]:
        return list(sources.read_wordnet(self._folder(request))), []


TASKS: Mapping[str, Task] = {
    "digits": _Digits(),
    "fashion-mnist": _ImageFiles(
        sources.FASHION_MNIST, "try: apt install dataset-fashion-mnist, or give the folder of its idx files as path"
    ),
    "images": _ImageFiles(None, "path names a folder of idx files (MNIST's names) or of CIFAR-10's or CIFAR-100's binary files"),
    "text": _TextFile(),
    "stdlib": _StandardLibrary(),
    "kjv": _KingJames(),
    "tokens": _Tokens(),
    "classify": _Table(),
    "wordnet": _WordNet(),
}
"""Every task by its name in a configuration."""

OPTIONS = frozenset(key for task in TASKS.values() for key in task.keys)
"""Options that some tasks take and others do not."""


def request(options: Mapping[str, Any], folder: Path, seed: int) -> Request:
    """A request with paths made absolute from `folder`, and without the options that its task does not take."""
    known = TASKS[options["task"]].keys
    kept: dict[str, Any] = {key: value if key in known or key not in OPTIONS else None for key, value in options.items()}
    for key in ("path", "tokenizer"):
        value = kept[key]
        if value is not None:
            kept[key] = os.path.normpath(folder / Path(value).expanduser())
    return Request(kept, seed)


def hashed(wanted: Request) -> dict[str, Any]:
    """What a data set depends on: the options, with the contents of the files in place of their names."""
    options = {key: value for key, value in wanted.options.items() if key not in ("path", "tokenizer")}
    return {**options, "seed": wanted.seed, "source": TASKS[wanted.task].fingerprint(wanted)}
