"""Data from disk: formats, splits and subsamples that depend on the seed alone, and what is said when it is missing or damaged."""

from __future__ import annotations

import gzip
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coset.errors import CosetError
from coset.study import sources
from coset.study.config import Data
from coset.study.data import Dataset, digits, patchify
from coset.study.tasks import TASKS, hashed, request
from study.configs import write_text


def load(folder: Path, task: str, *, seed: int = 0, **options: Any) -> Dataset:
    return TASKS[task].load(request({**Data(task=task).model_dump(), **options}, folder, seed))  # type: ignore[arg-type]


def shape(folder: Path, task: str, **options: Any) -> Any:
    wanted = request({**Data(task=task).model_dump(), **options}, folder, 0)  # type: ignore[arg-type]
    TASKS[task].check(wanted)
    return TASKS[task].shape(wanted, present=True)


def check_agrees(data: Dataset, found: Any) -> None:
    """What the plan expects is what is loaded."""
    assert (len(data.train_inputs), len(data.test_inputs)) == (found.train, found.test)
    if found.grid is None:
        assert data.train_inputs.shape[1] == data.test_inputs.shape[1] == found.context
        assert data.train_inputs.dtype == torch.int64
        assert int(max(data.train_inputs.max(), data.test_inputs.max())) < found.vocabulary
    else:
        assert tuple(data.train_inputs.shape[1:]) == (found.grid[0] * found.grid[1], found.features)
    if found.classes is None:
        assert data.train_targets is None
    else:
        assert data.train_targets is not None
        assert set(data.train_targets.tolist()) <= set(range(found.classes))


def idx(array: Tensor) -> bytes:
    return bytes([0, 0, 8, array.dim()]) + struct.pack(f">{array.dim()}I", *array.shape) + array.numpy().tobytes()


@pytest.fixture
def idx_folder(tmp_path: Path) -> Path:
    """Seven and five images of 6 by 4 pixels; the value of every pixel is the number of its image."""
    folder = tmp_path / "idx"
    folder.mkdir()
    for (images, labels), count in zip(sources._IDX.values(), (7, 5), strict=True):
        pixels = torch.arange(count, dtype=torch.uint8)[:, None, None].expand(count, 6, 4).contiguous()
        (folder / images).write_bytes(idx(pixels))
        with gzip.open(folder / f"{labels}.gz", "wb") as stream:
            stream.write(idx(torch.arange(count, dtype=torch.uint8) % 3))
    return folder


def test_digits_are_those_of_the_demo(tmp_path: Path) -> None:
    ours, theirs = load(tmp_path, "digits", seed=4), digits(seed=4)
    torch.testing.assert_close(ours.train_inputs, theirs.train_inputs, rtol=0, atol=1e-6)
    assert ours.test_targets is not None
    assert theirs.test_targets is not None
    assert torch.equal(ours.test_targets, theirs.test_targets)
    small = load(tmp_path, "digits", train_size=33, test_size=12, patch=4)
    check_agrees(small, shape(tmp_path, "digits", train_size=33, test_size=12, patch=4))


def test_colour_patches_keep_pixels_together() -> None:
    image = torch.arange(2 * 4 * 3).reshape(1, 2, 4, 3)
    assert patchify(image, 2)[0].tolist() == [[0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 16, 17], [6, 7, 8, 9, 10, 11, 18, 19, 20, 21, 22, 23]]


def test_idx_files_plain_and_gzipped(idx_folder: Path) -> None:
    data = load(idx_folder.parent, "images", path="idx", patch=2)
    check_agrees(data, shape(idx_folder.parent, "images", path="idx", patch=2))
    # Standardised by the training part: images 0..6.
    values = data.train_inputs[:, 0, 0].double() * torch.arange(7.0).repeat_interleave(24).double().std() + 3
    assert data.train_targets is not None
    assert torch.equal(values.round().long() % 3, data.train_targets)
    part = load(idx_folder.parent, "images", path="idx", patch=2, train_size=4, test_size=2)
    assert (len(part.train_inputs), len(part.test_inputs)) == (4, 2)


def test_damaged_idx_files(idx_folder: Path) -> None:
    images = idx_folder / "train-images-idx3-ubyte"
    whole = images.read_bytes()
    for damaged, message in ((whole[:-1], "needs 168 bytes; it has 167"), (b"PNG" + whole[3:], "expected an idx file of unsigned bytes")):
        images.write_bytes(damaged)
        with pytest.raises(CosetError, match=message):
            load(idx_folder.parent, "images", path="idx", patch=2)
    images.write_bytes(whole)
    labels = idx_folder / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(labels.read_bytes()[:-9])
    with pytest.raises(CosetError, match="not a whole gzip file"):
        load(idx_folder.parent, "images", path="idx", patch=2)
    labels.unlink()
    with pytest.raises(CosetError, match="expected idx files"):
        shape(idx_folder.parent, "images", path="idx")


@pytest.mark.parametrize(("names", "labels"), [(sources._CIFAR_10, 1), (sources._CIFAR_100, 2)])
def test_cifar_binaries(tmp_path: Path, names: dict[str, tuple[str, ...]], labels: int) -> None:
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (3, 3, 32, 32), generator=draw, dtype=torch.uint8)
    for part in names.values():
        for name in part:
            rows = [bytes([9] * (labels - 1) + [i]) + pixels[i].numpy().tobytes() for i in range(3)]
            (tmp_path / name).write_bytes(b"".join(rows))
    folder = sources.ImageFolder.open(tmp_path)
    read = folder.read("train")
    assert read.images.shape == (3 * len(names["train"]), 32, 32, 3)
    assert torch.equal(read.images[1].permute(2, 0, 1), pixels[1])
    assert read.classes[:3].tolist() == [0, 1, 2]
    check_agrees(load(tmp_path, "images", path=".", patch=8), shape(tmp_path, "images", path=".", patch=8))
    (tmp_path / names["test"][0]).write_bytes(b"12345")
    with pytest.raises(CosetError, match="expected records of"):
        load(tmp_path, "images", path=".")


def test_text_is_held_out_in_blocks(tmp_path: Path) -> None:
    # Every window is of one block, and its first byte says which.
    blocks = [bytes([i]) * 60 for i in range(50)]
    (tmp_path / "text").write_bytes(b"".join(blocks))
    data = load(tmp_path, "text", path="text", context=12, seed=3)
    parts = [set(x.flatten().tolist()) for x in (data.train_inputs, data.test_inputs)]
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == set(range(50))
    assert len(parts[1]) == 5
    again, other = (load(tmp_path, "text", path="text", context=12, seed=seed) for seed in (3, 4))
    assert torch.equal(data.train_inputs, again.train_inputs)
    assert set(other.test_inputs.flatten().tolist()) != parts[1]
    part = load(tmp_path, "text", path="text", context=12, seed=3, train_size=20, test_size=3)
    check_agrees(part, shape(tmp_path, "text", path="text", context=12, train_size=20, test_size=3))


def test_the_standard_library_is_split_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = sources.standard_library()
    names = {path.name for path in files}
    assert {"ast.py", "json", "decoder.py"} - names == {"json"}
    assert not any("site-packages" in path.parts or "test" in path.parts for path in files)
    assert list(files) == list(sources.standard_library())
    paths = []
    for i in range(20):
        paths.append(tmp_path / f"{i}.py")
        paths[-1].write_bytes(bytes([i]) * 100)
    monkeypatch.setattr(sources, "standard_library", lambda: tuple(paths))
    data = load(tmp_path, "stdlib", context=10)
    assert not set(data.train_inputs.flatten().tolist()) & set(data.test_inputs.flatten().tolist())
    assert (len(data.train_inputs), len(data.test_inputs)) == (180, 20)


@pytest.mark.skipif(shutil.which("bible") is None, reason="needs Debian's bible-kjv")
def test_the_king_james_bible() -> None:
    verses = sources.king_james().decode().splitlines()
    assert len(verses) == 31102
    assert verses[0] == "In the beginning God created the heaven and the earth."
    assert verses[-1] == "The grace of our Lord Jesus Christ be with you all. Amen."


def test_tasks_whose_program_or_files_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CosetError, match="apt install bible-kjv"):
        shape(tmp_path, "kjv")
    monkeypatch.setattr(TASKS["fashion-mnist"], "_home", tmp_path / "nowhere")
    with pytest.raises(CosetError, match="apt install dataset-fashion-mnist"):
        shape(tmp_path, "fashion-mnist")
    monkeypatch.setattr(sources, "WORDNET", tmp_path / "nowhere")
    with pytest.raises(CosetError, match="apt install wordnet-base"):
        shape(tmp_path, "wordnet")
    with pytest.raises(CosetError, match=r"tokens: .*there is no such file"):
        shape(tmp_path, "tokens", path="a", tokenizer="b")


def test_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    write_text(tmp_path / "words.txt", 30000)
    vocabulary = {"<unk>": 0, "the": 1, "cat": 2, "sat": 3, "on": 4, "mat": 5}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    options = {"path": "words.txt", "tokenizer": "tokenizer.json", "context": 8, "train_size": 300, "test_size": 40}
    data = load(tmp_path, "tokens", **options)
    check_agrees(data, shape(tmp_path, "tokens", **options))
    assert data.train_inputs.unique().tolist() == [0, 1, 2, 3, 4, 5]
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CosetError, match=r"tokenizer.json: is not a tokenizer"):
        shape(tmp_path, "tokens", **options)


ROWS = [("Sports", "A match, and a win"), ("World", "Talks fail"), ("Sports", "Another match"), ("World", "Talks go on")]


def test_labelled_text_without_a_header(tmp_path: Path) -> None:
    """AG News and DBPedia: the label first, then a title and a text."""
    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_text("".join(f'"{label}","title","{text}"\n' for label, text in ROWS))
    data = load(tmp_path, "classify", path=".", context=5, vocabulary=6)
    check_agrees(data, shape(tmp_path, "classify", path=".", context=5, vocabulary=6))
    # Most common first, then by alphabet: title, a, match, talks; everything else is unknown.
    assert {tuple(row) for row in data.test_inputs.tolist()} == {(2, 3, 4, 1, 1), (2, 5, 1, 0, 0), (2, 1, 4, 0, 0), (2, 5, 1, 1, 0)}


def test_labelled_text_with_a_header_in_one_file(tmp_path: Path) -> None:
    """IMDB: columns by name, no test part."""
    (tmp_path / "reviews.tsv").write_text(
        "review\tsentiment\n" + "".join(f"{text} {i}\t{label}\n" for i, (label, text) in enumerate(ROWS * 5))
    )
    options = {"path": "reviews.tsv", "label_column": "sentiment", "text_column": "review", "test_size": 7, "context": 4}
    data = load(tmp_path, "classify", **options)
    check_agrees(data, shape(tmp_path, "classify", **options))
    assert (len(data.train_inputs), len(data.test_inputs)) == (13, 7)
    with pytest.raises(CosetError, match=r"no column 'stars'; the first row is review, sentiment"):
        shape(tmp_path, "classify", **{**options, "label_column": "stars"})
    (tmp_path / "reviews.tsv").write_text("review\tsentiment\ngood\n")
    with pytest.raises(CosetError, match="line 2: expected a label in column 1"):
        shape(tmp_path, "classify", **options)


def test_wordnet_glosses(tmp_path: Path) -> None:
    for number, name in enumerate(sources.WORDNET_FILES):
        lines = [f'{i:08d} {number:02d} n 01 word 0 000 | gloss {i} of file {number}; "an example | with a bar"  \n' for i in range(10)]
        (tmp_path / name).write_text("  1 a licence | 99 not a gloss\n" + "".join(lines))
    data = load(tmp_path, "wordnet", path=".", test_size=9, context=6, vocabulary=20)
    check_agrees(data, shape(tmp_path, "wordnet", path=".", test_size=9, context=6, vocabulary=20))
    assert (len(data.train_inputs), len(data.test_inputs)) == (31, 9)
    assert list(sources.read_wordnet(tmp_path))[3] == ("00", 'gloss 3 of file 0; "an example | with a bar"')


def test_the_hash_is_of_contents_not_places(tmp_path: Path) -> None:
    def key(name: str, **more: Any) -> dict[str, Any]:
        return hashed(request({**Data(task="text").model_dump(), "path": name, **more}, tmp_path, 0))

    for name in ("a", "b"):
        write_text(tmp_path / name)
    assert key("a") == key("b")
    assert key("a") != key("a", context=5)
    (tmp_path / "b").write_text("other")
    assert key("a") != key("b")
