"""A checkpoint folder on disk: config.json, one or many safetensors files, an index; validated, read lazily, written safely.

Headers are parsed here, not by a library, because they cannot be trusted: every offset is checked before any tensor is touched.
Tensors are read with plain reads instead of a memory map: mapped pages stay resident for as long as the map lives, so that two
checkpoints side by side would cost their whole size in memory, and a file cut short behind a map ends the process with a signal.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from io import RawIOBase
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from coset.checkpoint.outputs import check_place
from coset.errors import CosetError

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""Stored dtype names of safetensors and the torch dtypes they mean."""

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LEGACY_SINGLE = "pytorch_model.bin"
LEGACY_INDEX = "pytorch_model.bin.index.json"

_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".gguf",
    ".ggml",
    ".ot",
    ".tflite",
    ".mlmodel",
)
_HEADER_LIMIT = 100_000_000
_CHUNK = 1 << 23


def _corrupt(path: Path, problem: str) -> CosetError:
    return CosetError(f"{path}: corrupt file: {problem}; fetch or save the file again")


@dataclass(frozen=True)
class Stored:
    """Place of one tensor: its file, dtype name, shape, and byte range [begin, end) behind the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class Shard:
    """One file of tensors, in the order of its header; `start` is the offset of its first data byte."""

    name: str
    path: Path
    start: int
    tensors: tuple[Stored, ...]
    metadata: Mapping[str, str]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} occurs twice")
    return found


def _json(path: Path, text: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, f"{what} is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise _corrupt(path, f"{what} must be a JSON object, got {type(value).__name__}")
    return value


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _entry(path: Path, name: str, value: object) -> Stored:
    fields = ("dtype", "shape", "data_offsets")
    if not isinstance(value, dict) or set(value) != set(fields):
        raise _corrupt(path, f"tensor {name}: expected the fields {', '.join(fields)}")
    dtype, shape, offsets = (value[f] for f in fields)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _corrupt(path, f"tensor {name}: unknown dtype {dtype!r} (known: {', '.join(DTYPES)})")
    if not isinstance(shape, list) or not all(_whole(n) for n in shape):
        raise _corrupt(path, f"tensor {name}: shape must be a list of sizes, got {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_whole(n) for n in offsets) or offsets[0] > offsets[1]:
        raise _corrupt(path, f"tensor {name}: data_offsets must be [begin, end], got {offsets!r}")
    need = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != need:
        raise _corrupt(path, f"tensor {name}: {dtype} of shape {shape} takes {need} bytes, its offsets give {offsets[1] - offsets[0]}")
    return Stored(name, dtype, tuple(shape), offsets[0], offsets[1])


def read_header(path: Path) -> Shard:
    """Parse and validate the header of one safetensors file.

    Raises
    ------
    CosetError
        Where the file cannot be read, its header is not sane, a dtype is unknown, offsets overlap, leave gaps or lie out
        of range, or the file is not exactly as long as the header says.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise _corrupt(path, f"expected at least 8 bytes, got {size}")
            length = int.from_bytes(file.read(8), "little")
            if length > _HEADER_LIMIT or length + 8 > size:
                raise _corrupt(path, f"header length {length} exceeds what a file of {size} bytes can hold")
            text = file.read(length)
    except OSError as error:
        raise CosetError(f"{path}: cannot read: {error.strerror}") from None
    header = _json(path, text, "header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _corrupt(path, "__metadata__ must map text to text")
    tensors = tuple(_entry(path, name, value) for name, value in header.items())
    at = 0
    for tensor in sorted(tensors, key=lambda t: (t.begin, t.end)):
        if tensor.begin != at:
            fault = "overlap those of another tensor" if tensor.begin < at else f"leave a gap behind byte {at}"
            raise _corrupt(path, f"tensor {tensor.name}: its offsets [{tensor.begin}, {tensor.end}] {fault}")
        at = tensor.end
    expected = 8 + length + at
    if size != expected:
        raise _corrupt(
            path, f"expected {expected} bytes by its header, got {size} ({'truncated' if size < expected else 'trailing bytes'})"
        )
    return Shard(path.name, path, 8 + length, tensors, metadata)


def _member(folder: Path, name: object) -> Path:
    if not isinstance(name, str) or name in ("", ".", "..") or any(c in name for c in "/\\\0"):
        raise _corrupt(folder, f"the index names the file {name!r}, expected a plain file name in the same folder")
    path = folder / name
    if not path.is_file():
        raise CosetError(f"{folder}: index and shards disagree: the index names {name}, which is not there; fetch the missing file")
    return path


def _weight_map(path: Path) -> dict[str, str]:
    try:
        index = _json(path, path.read_bytes(), "index")
    except OSError as error:
        raise CosetError(f"{path}: cannot read: {error.strerror}") from None
    names = index.get("weight_map")
    if not isinstance(names, dict) or not names:
        raise _corrupt(path, "expected a non-empty weight_map")
    return names


def _against_index(folder: Path, names: Mapping[str, str], shards: Iterable[Shard]) -> None:
    faults: list[str] = []
    at: dict[str, str] = {}
    for shard in shards:
        for tensor in shard.tensors:
            if tensor.name in at:
                faults.append(f"tensor {tensor.name} is in both {at[tensor.name]} and {shard.name}")
            elif tensor.name not in names:
                faults.append(f"tensor {tensor.name} of {shard.name} is not in the index")
            elif names[tensor.name] != shard.name:
                faults.append(f"tensor {tensor.name}: the index says {names[tensor.name]}, it is in {shard.name}")
            at.setdefault(tensor.name, shard.name)
    faults += [f"tensor {name}: the index says {file}, which does not hold it" for name, file in names.items() if name not in at]
    if faults:
        raise CosetError("\n".join([f"{folder}: index and shards disagree; save or fetch the checkpoint again", *faults]))


def _unpickle(path: Path) -> dict[str, Tensor]:
    try:
        # Files of torch before 1.6 are no zip archives and cannot be mapped.
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        raise _corrupt(path, f"torch.load(weights_only=True) refuses it ({str(error).splitlines()[0]})") from None
    if not isinstance(loaded, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in loaded.items()):
        raise _corrupt(path, "expected a dictionary of tensors by name")
    return loaded


def _legacy(path: Path, name: str) -> tuple[Shard, dict[str, Tensor]]:
    loaded = _unpickle(path)
    codes = {dtype: code for code, dtype in DTYPES.items()}
    tensors, at = [], 0
    for key, tensor in loaded.items():
        if tensor.dtype not in codes:
            raise _corrupt(path, f"tensor {key}: unknown dtype {tensor.dtype} (known: {', '.join(DTYPES)})")
        end = at + tensor.numel() * tensor.itemsize
        tensors.append(Stored(key, codes[tensor.dtype], tuple(tensor.shape), at, end))
        at = end
    return Shard(name, path, 0, tuple(tensors), {"format": "pt"}), loaded


@dataclass(frozen=True)
class Checkpoint:
    """A validated checkpoint folder. Holds headers only; tensors are read one at a time.

    Attributes
    ----------
    config
        Contents of config.json.
    shards
        The files of tensors, in name order.
    indexed
        Whether there is an index beside the shards.
    """

    path: Path
    config: Mapping[str, Any]
    shards: tuple[Shard, ...]
    indexed: bool
    _unpickled: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def open(path: str | os.PathLike[str], legacy: bool = False) -> Checkpoint:
        """Validate the folder at `path`: config, index, and every header; no tensor is read.

        Parameters
        ----------
        legacy
            Accept pytorch_model.bin where there is no safetensors file, read with ``torch.load(weights_only=True)``.

        Raises
        ------
        CosetError
            With ``corrupt file`` or ``index and shards disagree`` in its message, or where files are missing or unreadable.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise CosetError(f"{folder}: expected a checkpoint folder, got {'a file' if folder.exists() else 'nothing'}")
        if not (folder / CONFIG).is_file():
            raise CosetError(f"{folder}: {CONFIG} is missing; expected a folder as transformers' save_pretrained writes it")
        try:
            config = _json(folder / CONFIG, (folder / CONFIG).read_bytes(), "config")
        except OSError as error:
            raise CosetError(f"{folder / CONFIG}: cannot read: {error.strerror}") from None
        single, index = (folder / SINGLE).is_file(), (folder / INDEX).is_file()
        if single and index:
            raise CosetError(f"{folder}: found both {SINGLE} and {INDEX}; remove the one that is stale")
        if single:
            return Checkpoint(folder, config, (read_header(folder / SINGLE),), False)
        if index:
            names = _weight_map(folder / INDEX)
            files = {_member(folder, name) for name in names.values()}
            shards = tuple(read_header(file) for file in sorted(files))
            _against_index(folder, names, shards)
            return Checkpoint(folder, config, shards, True)
        return Checkpoint._pickled(folder, config, legacy)

    @staticmethod
    def _pickled(folder: Path, config: Mapping[str, Any], legacy: bool) -> Checkpoint:
        indexed = (folder / LEGACY_INDEX).is_file()
        if not indexed and not (folder / LEGACY_SINGLE).is_file():
            raise CosetError(f"{folder}: no weights: expected {SINGLE}, or {INDEX} and its shards")
        if not legacy:
            raise CosetError(
                f"{folder}: holds pickled weights only ({LEGACY_SINGLE}); allow legacy files explicitly, or convert to safetensors"
            )
        names = _weight_map(folder / LEGACY_INDEX) if indexed else {}
        files = sorted({_member(folder, name) for name in names.values()}) if indexed else [folder / LEGACY_SINGLE]
        pairs = [_legacy(file, file.name) for file in files]
        if indexed:
            _against_index(folder, names, [shard for shard, _ in pairs])
        # Output is safetensors: shards keep their numbering under transformers' names for that format.
        shards = tuple(
            Shard(s.name.replace("pytorch_model", "model").removesuffix(".bin") + ".safetensors", s.path, 0, s.tensors, s.metadata)
            for s, _ in pairs
        )
        return Checkpoint(folder, config, shards, indexed, {k: v for _, loaded in pairs for k, v in loaded.items()})

    @cached_property
    def _where(self) -> dict[str, tuple[Shard, Stored]]:
        return {tensor.name: (shard, tensor) for shard in self.shards for tensor in shard.tensors}

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        """Every stored tensor by name, shard by shard."""
        return {name: tensor for name, (_, tensor) in self._where.items()}

    def owner(self, name: str) -> Shard:
        """The shard that holds the named tensor."""
        return self._where[name][0]

    def read(self, name: str) -> Tensor:
        """The named tensor, in its stored dtype and shape.

        Raises
        ------
        CosetError
            If there is no such tensor, or the file changed since it was opened.
        """
        if name not in self._where:
            raise CosetError(f"{self.path}: there is no tensor {name}")
        if name in self._unpickled:
            return self._unpickled[name].detach()
        shard, tensor = self._where[name]
        buffer = torch.empty(tensor.end - tensor.begin, dtype=torch.uint8)
        try:
            with open(shard.path, "rb", buffering=0) as file:
                file.seek(shard.start + tensor.begin)
                _fill(file, buffer.numpy().data, shard.path)
        except OSError as error:
            raise CosetError(f"{shard.path}: cannot read: {error.strerror}") from None
        return buffer.view(tensor.torch_dtype).reshape(tensor.shape)


def _fill(file: RawIOBase, target: memoryview, path: Path) -> None:
    done = 0
    while done < len(target):
        count = file.readinto(target[done : done + (1 << 30)])
        if not count:
            raise _corrupt(path, "it became shorter while it was read")
        done += count


# --- writing --------------------------------------------------------------------------------------------------------


def check_output(path: str | os.PathLike[str], inputs: Iterable[Path], overwrite: bool = False) -> None:
    """Raise where `path` cannot take an output folder: it is an input or lies inside one (or around), exists without `overwrite`, or nothing
    can be made there.

    An existing folder that holds files but no config.json is never replaced: it is not a checkpoint, whatever the flag says.
    """
    out = Path(path)
    target = out.resolve()
    for source in inputs:
        origin = source.resolve()
        if target == origin:
            raise CosetError(f"{out}: the output is the input {source}; choose another output folder")
        if origin in target.parents or target in origin.parents:
            raise CosetError(f"{out}: the output and the input {source} lie inside one another; choose an output folder beside it")
    if os.path.lexists(out):
        if not overwrite:
            raise CosetError(f"{out}: the output already exists; give another name, or --overwrite")
        if out.is_symlink() or not out.is_dir() or (any(out.iterdir()) and not (out / CONFIG).is_file()):
            raise CosetError(f"{out}: refusing to overwrite: expected a checkpoint folder (with {CONFIG}) or an empty one")
    check_place(out, "output")


def _header(shard: Shard, metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    entries |= {t.name: {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.begin, t.end]} for t in shard.tensors}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _extended(shards: tuple[Shard, ...], added: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[Shard, ...]:
    """The shards with `added` tensors (dtype name, shape) at the end of the last."""
    if not added:
        return shards
    last = shards[-1]
    tensors, at = list(last.tensors), max((t.end for t in last.tensors), default=0)
    for name, (dtype, shape) in added.items():
        end = at + math.prod(shape) * DTYPES[dtype].itemsize
        tensors.append(Stored(name, dtype, shape, at, end))
        at = end
    return (*shards[:-1], Shard(last.name, last.path, last.start, tuple(tensors), last.metadata))


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, row-major."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _index(source: Checkpoint, shards: tuple[Shard, ...], added: bool) -> str:
    index: dict[str, Any] = {}
    if (source.path / INDEX).is_file():
        index = _json(source.path / INDEX, (source.path / INDEX).read_bytes(), "index")
    if added or not index:
        stored = [t for shard in shards for t in shard.tensors]
        facts = index.get("metadata")
        facts = dict(facts) if isinstance(facts, dict) else {}
        facts["total_size"] = sum(t.end - t.begin for t in stored)
        if "total_parameters" in facts:
            facts["total_parameters"] = sum(math.prod(t.shape) for t in stored)
        index = {"metadata": facts, "weight_map": {t.name: shard.name for shard in shards for t in shard.tensors}}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def _others(source: Checkpoint) -> Iterator[tuple[Path, bool]]:
    """Every other file, relative to the folder, and whether it is copied (False: weights in another format, which would be stale)."""
    ours = {CONFIG, INDEX, LEGACY_INDEX} | {shard.path.name for shard in source.shards}
    for path in sorted(source.path.rglob("*")):
        name = path.relative_to(source.path)
        if path.is_file() and str(name) not in ours and not any(part.startswith(".") for part in name.parts):
            yield name, not path.name.endswith((*_WEIGHTS, ".index.json"))


class _Files:
    """The files of one output, open until `close`: a tensor may be put in its place at any time, so each is computed once."""

    def __init__(self, folder: Path, shards: tuple[Shard, ...], metadata: Mapping[str, str], stack: ExitStack):
        self.places: dict[str, tuple[IO[bytes], int, Stored]] = {}
        self.open: list[IO[bytes]] = []
        for shard in shards:
            head = _header(shard, {**shard.metadata, **metadata})
            file = stack.enter_context((folder / shard.name).open("w+b"))
            size = len(head) + max((t.end for t in shard.tensors), default=0)
            if sys.platform == "linux":
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk shows before the work, not after it
            else:
                file.truncate(size)
            file.write(head)
            self.open.append(file)
            self.places |= {t.name: (file, len(head), t) for t in shard.tensors}

    def put(self, name: str, chunks: Iterable[memoryview | bytes]) -> None:
        file, start, place = self.places.pop(name)
        file.seek(start + place.begin)
        for chunk in chunks:
            file.write(chunk)

    def finish(self) -> None:
        for file in self.open:
            file.flush()
            os.fsync(file.fileno())


def _unchanged(source: Checkpoint, name: str) -> Iterator[memoryview | bytes]:
    shard = source.owner(name)
    if shard.start == 0:
        yield raw(source.read(name))
        return
    place = source.tensors[name]
    with open(shard.path, "rb") as file:
        file.seek(shard.start + place.begin)
        left = place.end - place.begin
        while left:
            chunk = file.read(min(left, _CHUNK))
            if not chunk:
                raise _corrupt(shard.path, "it became shorter while it was read")
            left -= len(chunk)
            yield chunk


def _swap(made: Path, path: Path) -> None:
    """Move the finished folder into place; an old one is set aside first and comes back if that fails."""
    if not path.exists():
        made.rename(path)
        return
    aside = made.with_name(made.name + ".old")
    path.rename(aside)
    try:
        made.rename(path)
    except BaseException:
        aside.rename(path)
        raise
    shutil.rmtree(aside)


def write(
    path: str | os.PathLike[str],
    source: Checkpoint,
    tensors: Iterable[tuple[str, Tensor]] = (),
    *,
    config: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
    added: Mapping[str, tuple[str, tuple[int, ...]]] | None = None,
    texts: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> tuple[str, ...]:
    """Write a checkpoint like `source` with some tensors replaced.

    Keys, order, shapes, dtypes, file names and shard layout are those of `source`. The folder is made beside `path` under a temporary
    name, synced, and renamed at the end; whatever goes wrong before that, Ctrl-C included, leaves nothing behind. The same input gives
    the same bytes. Memory: one tensor at a time, as `tensors` yields them.

    Parameters
    ----------
    tensors
        New values by stored name, in any order, of the stored dtype and shape. Tensors not given are copied byte for byte.
    config
        New config.json; None copies the source's.
    metadata
        Text added to the metadata of every safetensors file.
    added
        Tensors that `source` lacks: name -> (dtype name, shape). They go to the end of the last shard and must be among `tensors`.
    texts
        Text files to write beside, such as a model card; they replace the source's files of that name.

    Returns
    -------
    tuple of str
        Files of the source that were left out because they hold weights in another format.

    Raises
    ------
    CosetError
        If the output is not allowed (:func:`check_output`), cannot be written, or a tensor does not fit its place.
    """
    out = Path(path)
    check_output(out, [source.path], overwrite)
    shards = _extended(source.shards, added or {})
    temporary = out.resolve().with_name(f".{out.resolve().name}.coset-{secrets.token_hex(4)}")
    try:
        temporary.mkdir()
        with ExitStack() as stack:
            files = _Files(temporary, shards, metadata or {}, stack)
            for name, tensor in tensors:
                _check_fit(source, files, name, tensor)
                files.put(name, [raw(tensor)])
            missing = [name for name in files.places if name in (added or {})]
            if missing:
                raise CosetError(f"{out}: no value was given for the added tensor {missing[0]}")
            for name in list(files.places):
                files.put(name, _unchanged(source, name))
            files.finish()
        left_out = _companions(temporary, source, shards, config, bool(added), texts or {})
        _swap(temporary, out)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CosetError(f"{out}: cannot write the output: {error.strerror or error}") from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return left_out


def _check_fit(source: Checkpoint, files: _Files, name: str, tensor: Tensor) -> None:
    if name not in files.places:
        known = any(t.name == name for shard in source.shards for t in shard.tensors)
        raise CosetError(f"{source.path}: tensor {name} {'was given twice' if known else 'has no place in this checkpoint'}")
    place = files.places[name][2]
    if tensor.dtype != place.torch_dtype or tuple(tensor.shape) != place.shape:
        raise CosetError(
            f"{source.path}: tensor {name} must be {place.dtype} of shape {list(place.shape)}, got {tensor.dtype} of shape {list(tensor.shape)}"
        )


def _companions(
    folder: Path, source: Checkpoint, shards: tuple[Shard, ...], config: Mapping[str, Any] | None, added: bool, texts: Mapping[str, str]
) -> tuple[str, ...]:
    left_out = []
    if config is None:
        shutil.copyfile(source.path / CONFIG, folder / CONFIG)
    else:
        (folder / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if source.indexed and not added and (source.path / INDEX).is_file():
        shutil.copyfile(source.path / INDEX, folder / INDEX)
    elif source.indexed:
        (folder / INDEX).write_text(_index(source, shards, added), encoding="utf-8")
    for name, copied in _others(source):
        if copied:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.path / name, folder / name)
        else:
            left_out.append(str(name))
    for title, text in texts.items():
        (folder / title).write_text(text, encoding="utf-8")
    return tuple(left_out)
