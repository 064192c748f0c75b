"""Checkpoint folders: hostile input gives one distinct clear error and no output; writing is deterministic and leaves nothing behind."""

import contextlib
import errno
import filecmp
import json
import os
import shutil
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from checkpoint_zoo import build, saved
from coset.checkpoint import Checkpoint, check_output, files, load, save, write
from coset.checkpoint.files import read_header
from coset.errors import CosetError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = saved(tmp_path_factory.mktemp("one"), "llama")
    (path / "tokenizer.json").write_text('{"a": 1}')
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text("{}")
    (path / "pytorch_model.bin").write_bytes(b"stale")
    return path


@pytest.fixture(scope="module")
def sharded_original(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("many"), "llama", shards="40KB")


@pytest.fixture
def single(original, tmp_path):
    return shutil.copytree(original, tmp_path / "in")


@pytest.fixture
def sharded(sharded_original, tmp_path):
    return shutil.copytree(sharded_original, tmp_path / "in")


def _file(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _tensor(begin, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _rewrite(path, change):
    """Change the header of a file, keeping its data."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    _file(path, header, data[8 + length :])


# --- (a) corrupt files ------------------------------------------------------------------------------------------------

A = _tensor(0, 16, [4])


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": A}, 12, "expected .* bytes by its header, got .*truncated"),
        ({"a": A}, 20, "trailing bytes"),
        ({"a": A, "b": _tensor(8, 24, [4])}, 24, "tensor b: its offsets .8, 24. overlap"),
        ({"a": A, "b": _tensor(20, 36, [4])}, 36, "tensor b: .* leave a gap behind byte 16"),
        ({"a": _tensor(4, 20, [4])}, 20, "leave a gap behind byte 0"),
        ({"a": _tensor(0, 2**60, [2**58])}, 16, "truncated"),
        ({"a": _tensor(0, 12, [4])}, 12, "F32 of shape .4. takes 16 bytes, its offsets give 12"),
        ({"a": _tensor(16, 0, [4])}, 16, "data_offsets must be"),
        ({"a": _tensor(-16, 0, [4])}, 16, "data_offsets must be"),
        ({"a": _tensor(0, 16, [-4])}, 16, "shape must be a list of sizes"),
        ({"a": _tensor(0, 16, [True, 4])}, 16, "shape must be a list of sizes"),
        ({"a": _tensor(0, 16, [4.0])}, 16, "shape must be a list of sizes"),
        ({"a": _tensor(0, 16, [4], "F33")}, 16, "unknown dtype 'F33'"),
        ({"a": _tensor(0, 16, [4], ["F32"])}, 16, "unknown dtype"),
        ({"a": {"dtype": "F32", "shape": [4]}}, 16, "expected the fields"),
        ({"a": 3}, 16, "expected the fields"),
        ({"a": A, "__metadata__": {"x": 1}}, 16, "__metadata__ must map text to text"),
        ([1, 2], 0, "must be a JSON object, got list"),
        (b"not json", 0, "not valid JSON"),
        (b'{"a":1,"a":2}', 0, "key 'a' occurs twice"),
        (b"\xff\xfe{}", 0, "not valid JSON"),
        (b"[" * 100_000, 0, "not valid JSON"),
    ],
)
def test_corrupt_header(tmp_path, header, data, message):
    path = tmp_path / SINGLE
    _file(path, header, bytes(data))
    with pytest.raises(CosetError, match=message) as caught:
        read_header(path)
    assert str(caught.value).startswith(f"{path}: corrupt file: ")


@pytest.mark.parametrize("content", [b"", b"123", struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 2**64 - 1) + b"{}"])
def test_header_length_beyond_the_file(tmp_path, content):
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(CosetError, match="corrupt file"):
        read_header(tmp_path / SINGLE)


@given(st.binary(max_size=64), st.integers(0, 80))
def test_any_bytes_give_a_coset_error_or_a_header(tmp_path_factory, text, length):
    path = tmp_path_factory.mktemp("fuzz") / SINGLE
    path.write_bytes(struct.pack("<Q", length) + text)
    with contextlib.suppress(CosetError):
        assert read_header(path).tensors == ()


def test_truncated_shard(sharded):
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:-5])
    with pytest.raises(CosetError, match=f"{victim.name}: corrupt file: expected .*truncated"):
        load(sharded)


def test_file_that_shrinks_after_it_was_opened(single):
    checkpoint = Checkpoint.open(single)
    (single / SINGLE).write_bytes((single / SINGLE).read_bytes()[:2000])
    with pytest.raises(CosetError, match="became shorter while it was read"):
        checkpoint.read("model.norm.weight")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(single, tmp_path, value):
    tensors = load_file(single / SINGLE)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(tensors, single / SINGLE, {"format": "pt"})
    message = "tensor model.layers.1.mlp.up_proj.weight holds NaN or infinity"
    for only in (None, [0]):
        with pytest.raises(CosetError, match=message):
            save(tmp_path / "out", load(single), lambda layer, block: block, only=only)
    assert os.listdir(tmp_path) == ["in"]


# --- (b) index and shards ---------------------------------------------------------------------------------------------


def _index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"], sorted(p.name for p in folder.glob("*.safetensors")))
    (folder / INDEX).write_text(json.dumps(index))


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, s: m.update({NORM: "model-00009-of-00009.safetensors"}), "names model-00009-of-00009.safetensors, which is not there"),
        (lambda m, s: m.pop(NORM), f"tensor {NORM} of .* is not in the index"),
        (lambda m, s: m.update({"ghost": s[0]}), "tensor ghost: the index says .*, which does not hold it"),
        (lambda m, s: m.update({NORM: next(n for n in s if n != m[NORM])}), f"tensor {NORM}: the index says .*, it is in"),
    ],
)
def test_index_and_shards_disagree(sharded, change, message):
    _index(sharded, change)
    with pytest.raises(CosetError, match=message) as caught:
        load(sharded)
    assert "index and shards disagree" in str(caught.value)


def test_tensor_in_two_shards(sharded):
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    save_file(load_file(first) | load_file(second), second, {"format": "pt"})
    with pytest.raises(CosetError, match=f"is in both {first.name} and {second.name}"):
        load(sharded)


@pytest.mark.parametrize("name", ["../in/model.safetensors", "/etc/passwd", "..", "a/b", "", 3, None])
def test_index_that_leaves_the_folder(sharded, name):
    _index(sharded, lambda m, s: m.update({NORM: name}))
    with pytest.raises(CosetError, match="expected a plain file name"):
        load(sharded)


def test_both_single_file_and_index(sharded):
    shutil.copyfile(next(sharded.glob("*.safetensors")), sharded / SINGLE)
    with pytest.raises(CosetError, match="found both"):
        load(sharded)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_index_that_is_no_index(sharded, text):
    (sharded / INDEX).write_text(text)
    with pytest.raises(CosetError, match=f"{INDEX}: corrupt file"):
        load(sharded)


# --- (c) tensors against the architecture -----------------------------------------------------------------------------


def test_missing_and_extra_tensor(single):
    def rename(header):
        header["stranger"] = header.pop(NORM)

    _rewrite(single / SINGLE, rename)
    with pytest.raises(CosetError) as caught:
        load(single)
    lines = str(caught.value).splitlines()
    assert lines == [
        f"{single}: the tensors are not those of the architecture",
        f"tensor {NORM} is missing (expected shape [54])",
        "tensor stranger [54] is not accounted for",
    ]


def test_quantised_tensor(single):
    tensors = load_file(single / SINGLE)
    tensors[NORM] = tensors[NORM].to(torch.int8)
    save_file(tensors, single / SINGLE)
    with pytest.raises(CosetError, match=f"{NORM}: expected one of F16, BF16, F32, F64, got I8"):
        load(single)


# --- folders ----------------------------------------------------------------------------------------------------------


def test_folders_that_are_no_checkpoints(tmp_path, single):
    with pytest.raises(CosetError, match="expected a checkpoint folder, got nothing"):
        load(tmp_path / "absent")
    with pytest.raises(CosetError, match="expected a checkpoint folder, got a file"):
        load(single / "config.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CosetError, match=r"config.json is missing"):
        load(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(CosetError, match="no weights"):
        load(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{")
    with pytest.raises(CosetError, match="not valid JSON"):
        load(tmp_path / "empty")


# --- pickled files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_weights_need_a_flag(tmp_path, single, zipped):
    tensors = load_file(single / SINGLE)
    (single / SINGLE).unlink()
    torch.save(tensors, single / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CosetError, match="pickled weights only"):
        load(single)
    model = load(single, legacy=True)
    save(tmp_path / "out", model, lambda layer, block: block)
    again = load_file(tmp_path / "out" / SINGLE)
    assert list(again) == sorted(tensors)
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


def test_pickled_shards(tmp_path, sharded):
    tensors = {}
    names = {}
    for file in sorted(sharded.glob("*.safetensors")):
        part = load_file(file)
        name = file.name.replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
        torch.save(part, sharded / name)
        tensors |= part
        names |= dict.fromkeys(part, name)
        file.unlink()
    (sharded / INDEX).unlink()
    (sharded / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    save(tmp_path / "out", load(sharded, legacy=True), lambda layer, block: block)
    again = load(tmp_path / "out").checkpoint
    assert set(again.tensors) == set(tensors)
    assert all(torch.equal(again.read(name), tensors[name]) for name in tensors)


def test_pickle_with_code_is_refused(single):
    class Payload:
        def __reduce__(self):
            return os.system, ("false",)

    (single / SINGLE).unlink()
    torch.save({"a": Payload()}, single / "pytorch_model.bin")
    with pytest.raises(CosetError, match=r"torch.load\(weights_only=True\) refuses it"):
        load(single, legacy=True)


# --- writing ----------------------------------------------------------------------------------------------------------


def test_copy_keeps_everything_but_stale_weights(single, tmp_path):
    left_out = write(tmp_path / "out", Checkpoint.open(single))
    assert left_out == ("pytorch_model.bin",)
    for name in (SINGLE, "config.json", "generation_config.json", "tokenizer.json", "1_Pooling/config.json"):
        assert filecmp.cmp(single / name, tmp_path / "out" / name, shallow=False), name
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


def test_metadata_and_texts_are_added(sharded, tmp_path):
    write(tmp_path / "out", Checkpoint.open(sharded), metadata={"coset": "1"}, texts={"README.md": "card"})
    for file in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(file, "pt") as opened, safe_open(sharded / file.name, "pt") as before:
            assert opened.metadata() == {"format": "pt", "coset": "1"}
            assert opened.keys() == before.keys()
    assert (tmp_path / "out" / "README.md").read_text() == "card"
    assert load_file(file).keys() == load_file(sharded / file.name).keys()


def test_same_input_gives_the_same_bytes(sharded, tmp_path):
    for name in ("one", "two"):
        save(tmp_path / name, load(sharded), lambda layer, block: {k: 1.1 * v for k, v in block.items()}, metadata={"seed": "3"})
    names = os.listdir(tmp_path / "one")
    assert filecmp.cmpfiles(tmp_path / "one", tmp_path / "two", names, shallow=False)[0] == names


def test_only_some_blocks_change(sharded, tmp_path):
    seen = []

    def transform(layer, block):
        seen.append(layer)
        return {name: -tensor for name, tensor in block.items()}

    progress = []
    save(tmp_path / "out", load(sharded), transform, only=[1], progress=lambda done, of: progress.append((done, of)))
    before, after = Checkpoint.open(sharded), Checkpoint.open(tmp_path / "out")
    assert seen == [1]
    assert progress == [(1, 3), (2, 3), (3, 3)]
    for name in before.tensors:
        sign = -1 if ".layers.1." in name else 1
        assert torch.equal(after.read(name), sign * before.read(name))


def test_invariants_can_be_averaged(tmp_path):
    path = saved(tmp_path, "bert", "classes")
    model = load(path)
    save(tmp_path / "out", model, lambda layer, block: block, invariant=lambda name, value: 0.5 * value.double())
    before, after = load_file(path / SINGLE), load_file(tmp_path / "out" / SINGLE)
    assert "classifier.weight" in model.invariants
    assert all(torch.equal(after[n], before[n] * (0.5 if n in model.invariants else 1)) for n in before)


def test_rounding_is_reported(tmp_path):
    path = saved(tmp_path, "llama", dtype=torch.bfloat16)
    done = save(tmp_path / "out", load(path), lambda layer, block: {k: v * 1.0001 for k, v in block.items()})
    assert 5e-5 < done.rounding < 4e-3


def test_values_that_leave_the_range_of_the_stored_dtype(tmp_path):
    path = saved(tmp_path, "llama", dtype=torch.float16)
    with pytest.raises(CosetError, match=r"is not finite in torch.float16"):
        save(tmp_path / "out", load(path), lambda layer, block: {k: v * 1e6 for k, v in block.items()})
    assert os.listdir(tmp_path) == [path.name]


def test_unfit_tensors_are_refused(single, tmp_path):
    source = Checkpoint.open(single)
    good = source.read(NORM)
    for tensors, message in [
        ([(NORM, good.double())], f"tensor {NORM} must be F32 of shape"),
        ([(NORM, good[:3])], f"tensor {NORM} must be F32 of shape"),
        ([(NORM, good), (NORM, good)], f"tensor {NORM} was given twice"),
        ([("ghost", good)], "tensor ghost has no place"),
    ]:
        with pytest.raises(CosetError, match=message):
            write(tmp_path / "out", source, tensors)
        assert os.listdir(tmp_path) == ["in"]
    with pytest.raises(CosetError, match=r"canonical tensor layers.0.attention_norm.gain must have shape \[54\], it is missing"):
        save(tmp_path / "out", load(single), lambda layer, block: block if layer is None else {})


def test_output_that_is_not_allowed(single, tmp_path):
    inside, link = single / "sub", tmp_path / "link"
    link.symlink_to(single)
    for out, message in [
        (single, "the output is the input"),
        (link, "the output is the input"),
        (inside, "inside one another"),
        (tmp_path, "inside one another"),
        (tmp_path / "no" / "out", "does not exist; create it first"),
    ]:
        with pytest.raises(CosetError, match=message):
            check_output(out, [single], overwrite=True)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(CosetError, match="already exists; give another name, or --overwrite"):
        write(out, Checkpoint.open(single))
    (out / "thesis.txt").write_text("precious")
    with pytest.raises(CosetError, match="refusing to overwrite"):
        write(out, Checkpoint.open(single), overwrite=True)
    assert os.listdir(out) == ["thesis.txt"]


def test_overwrite_replaces_a_checkpoint(single, tmp_path):
    out = tmp_path / "out"
    write(out, Checkpoint.open(single), texts={"old.txt": "old"})
    write(out, Checkpoint.open(single), overwrite=True)
    assert not (out / "old.txt").exists()
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def _failing(error):
    def transform(layer, block):
        if layer == 1:
            raise error
        return block

    return transform


@pytest.mark.parametrize("error", [KeyboardInterrupt(), CosetError("no"), RuntimeError("bug")], ids=lambda e: type(e).__name__)
def test_interruption_leaves_no_trace(single, tmp_path, error):
    with pytest.raises(type(error)):
        save(tmp_path / "out", load(single), _failing(error))
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), CosetError("no")], ids=lambda e: type(e).__name__)
def test_interrupted_overwrite_keeps_the_old_output(single, tmp_path, error):
    out = tmp_path / "out"
    write(out, Checkpoint.open(single), texts={"old.txt": "old"})
    with pytest.raises(type(error)):
        save(out, load(single), _failing(error), overwrite=True)
    assert (out / "old.txt").exists()
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_failed_rename_brings_the_old_output_back(single, tmp_path, monkeypatch):
    out = tmp_path / "out"
    write(out, Checkpoint.open(single), texts={"old.txt": "old"})
    rename = files.Path.rename

    def broken(self, target):
        if target == out and not self.name.endswith(".old"):
            raise OSError(errno.EACCES, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(files.Path, "rename", broken)
    with pytest.raises(CosetError, match="cannot write the output: Permission denied"):
        write(out, Checkpoint.open(single), overwrite=True)
    assert (out / "old.txt").exists()
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


@pytest.mark.parametrize("call", ["posix_fallocate", "fsync"])
def test_full_disk_is_one_line(single, tmp_path, monkeypatch, call):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, call, full)
    with pytest.raises(CosetError, match="cannot write the output: No space left on device") as caught:
        save(tmp_path / "out", load(single), lambda layer, block: block)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["in"]


def test_output_has_ordinary_permissions(single, tmp_path):
    (tmp_path / "plain").mkdir()
    write(tmp_path / "out", Checkpoint.open(single))
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_headers_only_on_loading(single, monkeypatch):
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: pytest.fail(f"read {name}"))
    assert len(load(single).architecture.layers) == 2


def test_what_is_written_loads_in_transformers(single, tmp_path):
    save(tmp_path / "out", load(single), lambda layer, block: block, metadata={"coset": "x"})
    hf = build("llama")
    again = type(hf).from_pretrained(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(hf.parameters(), again.parameters(), strict=True))
