"""The verbs on checkpoints through the command line: JSON contract, and bad input that ends in one clear line and no output."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from checkpoint_zoo import VOCABULARY, saved
from command_line import refused, run_json
from coset.cli.app import run

SCRIPT = str(Path(sys.executable).with_name("coset"))


@pytest.fixture
def llama(tmp_path):
    return saved(tmp_path, "llama")


# --- what scripts rely on ---------------------------------------------------------------------------------------------


def test_inspect(capsys, llama):
    found = run_json(capsys, "inspect", llama)
    assert found["architecture"]["family"] == "llama"
    assert found["architecture"]["positional_encoding"].startswith("RoPE on 5 planes")
    assert found["symmetry"]["layers"][0]["qk"] == {"group": "(C^×)^5", "copies": 3, "dimension": 30} | {
        "why": found["symmetry"]["layers"][0]["qk"]["why"]
    }
    assert found["files"]["tensors"] == 21
    assert run(["inspect", str(llama)]) == 0
    assert "RoPE on 5 planes" in capsys.readouterr().out


def test_scramble_align_apply_merge_barrier(capsys, tmp_path, llama):
    other, out, g = tmp_path / "other", tmp_path / "out", tmp_path / "g.safetensors"
    found = run_json(capsys, "scramble", llama, "-o", other, "--seed", 7, "--spaces", "heads,qk,vo,neurons", "--transform", g)
    assert (found["output"], found["seed"], found["transform"]) == (str(other), 7, str(g))
    assert found["rounding"] < 1e-7
    found = run_json(capsys, "align", llama, other, "-o", out, "--spaces", "heads,neurons", "--matcher", "weights")
    assert [d["layer"] for d in found["distances"]] == [None, 0, 1]
    assert all(d["after"] < 1e-5 for d in found["distances"])
    assert all(d["before"] > 0.1 for d in found["distances"][1:])
    run_json(capsys, "apply", g, llama, "-o", tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").stat().st_size == (other / "model.safetensors").stat().st_size
    run_json(capsys, "apply", g, other, "-o", tmp_path / "back", "--inverse")
    found = run_json(capsys, "merge", llama, other, tmp_path / "back", "-o", tmp_path / "merged", "--weight", 0.5)
    assert found["weights"] == [0.5, 0.25, 0.25]
    assert found["aligned"] is True

    data = tmp_path / "data.safetensors"
    save_file({"input_ids": torch.randint(6, VOCABULARY, (5, 40), generator=torch.Generator().manual_seed(0))}, data)
    plot = tmp_path / "barrier.png"
    found = run_json(capsys, "barrier", llama, other, "--data", data, "--points", 5, "--plot", plot)
    assert found["points"] == [0, 0.25, 0.5, 0.75, 1]
    assert found["loss_barrier"] > 0.05
    assert found["loss"][0] == pytest.approx(found["loss"][-1], rel=1e-5)
    assert found["definition"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert run_json(capsys, "barrier", llama, out, "--data", data, "--points", 3)["loss_barrier"] < 1e-5
    loss = transformers.LlamaForCausalLM.from_pretrained(llama)(**(batch := load_file(data)), labels=batch["input_ids"]).loss.detach()
    assert found["loss"][0] == pytest.approx(float(loss), rel=1e-5)


def test_tables_and_warnings_for_people(capsys, tmp_path, llama):
    assert run(["scramble", str(llama), "-o", str(tmp_path / "other"), "--spaces", "vo,experts"]) == 0
    out, err = capsys.readouterr()
    assert f"Written to {tmp_path / 'other'}" in out.replace("\n", "")
    assert "coset: warning: experts: nothing to move" in err
    assert run(["align", str(llama), str(tmp_path / "other"), "-o", str(tmp_path / "out"), "--spaces", "vo"]) == 0
    out, _ = capsys.readouterr()
    assert "layer 1" in out
    assert run(["scramble", str(llama), "-o", str(tmp_path / "other"), "--overwrite", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_barrier_reads_text_with_the_tokenizer_of_the_checkpoint(capsys, tmp_path, llama):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(llama / "tokenizer.json"))
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{7 * i % VOCABULARY}" for i in range(100)))
    found = run_json(capsys, "barrier", llama, llama, "--data", text, "--points", 2, "--length", 20)
    ids = torch.tensor([[7 * (20 * j + i) % VOCABULARY for i in range(20)] for j in range(5)])
    loss = transformers.LlamaForCausalLM.from_pretrained(llama)(input_ids=ids, labels=ids).loss.detach()
    assert found["loss"][0] == pytest.approx(float(loss), rel=1e-5)
    message = refused(capsys, tmp_path, "barrier", llama, llama, "--data", text, "--length", 1000)
    assert "length" in message
    assert "too few" in refused(capsys, tmp_path, "barrier", llama, llama, "--data", text, "--length", 150)


def test_barrier_of_classifiers(capsys, tmp_path):
    one, two = (saved(tmp_path / str(seed), "vit", seed=seed) for seed in (0, 1))
    generator = torch.Generator().manual_seed(0)
    data = tmp_path / "data.safetensors"
    inputs, targets = torch.randn(6, 143, 48, generator=generator), torch.randint(0, 5, (6,), generator=generator)
    save_file({"inputs": inputs, "targets": targets}, data)
    found = run_json(capsys, "barrier", one, two, "--data", data, "--points", 3)
    images = torch.nn.functional.fold(inputs.mT, (52, 44), (4, 4), stride=(4, 4))
    logits = transformers.ViTForImageClassification.from_pretrained(one)(images).logits
    assert found["loss"][0] == pytest.approx(float(torch.nn.functional.cross_entropy(logits.detach(), targets)), rel=1e-5)
    assert found["accuracy"][0] == pytest.approx(float((logits.argmax(-1) == targets).double().mean()))


@pytest.mark.parametrize("verb", ["align", "barrier"])
def test_help_says_what_data_look_like(capsys, verb):
    run([verb, "--help"])
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in ("input_ids [n, length]", "inputs [n, patches, features]", "row by row without the class token", "channel"):
        assert words in told


# --- corrupt checkpoints ----------------------------------------------------------------------------------------------


def _header(path):
    blob = path.read_bytes()
    length = int.from_bytes(blob[:8], "little")
    return json.loads(blob[8 : 8 + length]), blob[8 + length :]


def _with_header(path, header, data):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def overlapping(folder):
    header, data = _header(folder / "model.safetensors")
    names = [n for n in header if n != "__metadata__"]
    same = next((a, b) for a in names for b in names if a != b and header[a]["shape"] == header[b]["shape"])
    header[same[1]]["data_offsets"] = header[same[0]]["data_offsets"]
    _with_header(folder / "model.safetensors", header, data)


def out_of_range(folder):
    header, data = _header(folder / "model.safetensors")
    last = max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"][1])
    header[last]["data_offsets"] = [o + 4096 for o in header[last]["data_offsets"]]
    _with_header(folder / "model.safetensors", header, data)


def huge_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes((1 << 60).to_bytes(8, "little") + path.read_bytes()[8:])


def nan(folder):
    _tensors(folder, lambda t: t["model.layers.1.self_attn.v_proj.weight"].__setitem__((2, 3), float("nan")))


def other_heads(folder):
    _config(folder, num_attention_heads=9)


def missing_tensor(folder):
    _tensors(folder, lambda t: t.pop("model.layers.1.mlp.gate_proj.weight"))


def extra_tensor(folder):
    _tensors(folder, lambda t: t.update({"model.layers.0.self_attn.sinks": torch.zeros(6)}))


def unknown_family(folder):
    _config(folder, model_type="mamba")


def not_json(folder):
    (folder / "config.json").write_text("{")


def no_weights(folder):
    (folder / "model.safetensors").unlink()


CORRUPTIONS = [
    (truncated, "truncated", 1),
    (overlapping, "overlap", 1),
    (out_of_range, "gap|range", 1),
    (huge_header, "header length 1152921504606846976", 1),
    (nan, "v_proj.weight holds NaN", 1),
    (other_heads, "q_proj.weight: the config gives shape [90, 54], the file holds [60, 54]", None),
    (missing_tensor, "gate_proj.weight is missing", 2),
    (extra_tensor, "sinks [6] is not accounted for", 2),
    (unknown_family, "'mamba' is not supported (supported: bert, bloom", 1),
    (not_json, "config is not valid JSON", 1),
    (no_weights, "no weights", 1),
]


@pytest.mark.parametrize(("corrupt", "words", "lines"), CORRUPTIONS, ids=[c[0].__name__ for c in CORRUPTIONS])
def test_corrupt_checkpoints(capsys, tmp_path, llama, corrupt, words, lines):
    bad = tmp_path / "bad"
    shutil.copytree(llama, bad)
    corrupt(bad)
    out = tmp_path / "out"
    for command in (["scramble", bad], ["align", llama, bad], ["align", bad, llama], ["merge", llama, bad]):
        message = refused(capsys, tmp_path, *command, "-o", out, lines=lines)
        assert any(part in message for part in words.split("|")), message
        assert "bad" in message


def test_index_and_shards(capsys, tmp_path):
    path = saved(tmp_path, "llama", shards="40KB")
    shard = sorted(path.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.unlink()
    assert f"the index names {shard.name}" in refused(capsys, tmp_path, "scramble", path, "-o", tmp_path / "out")
    shard.write_bytes(content[:-1])
    assert "truncated" in refused(capsys, tmp_path, "scramble", path, "-o", tmp_path / "out")
    shard.write_bytes(content)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    homes = list(index["weight_map"].values())
    index["weight_map"].pop(next(name for name, home in index["weight_map"].items() if homes.count(home) > 1))
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "index and shards disagree" in refused(capsys, tmp_path, "scramble", path, "-o", tmp_path / "out", lines=None)


# --- pairs that cannot be compared --------------------------------------------------------------------------------------


PAIRS = [
    ({"vocab_size": 89}, "inputs.vocabulary: 97 against 89", 2),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}, "RoPE frequencies", 2),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}, "RoPE frequencies", 2),
    ({"num_hidden_layers": 3}, "layers: 2 against 3", 2),
    ({"num_hidden_layers": 3, "intermediate_size": 91}, "every layer: mlp.width", 3),
    # What follows from one field of a config is not repeated.
    ({"hidden_size": 66}, "width: 54 against 66", 2),
    ({"head_dim": 12}, "every layer: attention.head_dim: 10 against 12", 2),
    ({"head_dim": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}, "5 planes against 6", 3),
    ({"rms_norm_eps": 1e-3}, "every layer: attention_norm.eps, mlp_norm.eps; final_norm.eps: ", 2),
    (
        {"attention_bias": True},
        "attention.query_bias, attention.key_bias, attention.value_bias, attention.output_bias: False against True",
        2,
    ),
    ({"hidden_act": "gelu", "vocab_size": 89}, "activation: 'silu' against 'gelu'", 3),
]


@pytest.mark.parametrize(("changes", "words", "lines"), PAIRS)
def test_pairs_that_cannot_be_compared(capsys, tmp_path, llama, changes, words, lines):
    config = transformers.LlamaConfig.from_pretrained(llama)
    for key, value in changes.items():
        setattr(config, key, value)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    for verb in ("align", "merge"):
        message = refused(capsys, tmp_path, verb, llama, tmp_path / "other", "-o", tmp_path / "out", lines=lines)
        assert words in message
        assert "cannot be compared" in message.splitlines()[0]
    save_file({"input_ids": torch.ones(2, 9, dtype=torch.int64)}, tmp_path / "data.safetensors")
    assert words in refused(capsys, tmp_path, "barrier", llama, tmp_path / "other", "--data", tmp_path / "data.safetensors", lines=lines)


def test_other_families_and_tokenizers(capsys, tmp_path, llama):
    other = saved(tmp_path, "qwen2")
    message = refused(capsys, tmp_path, "align", llama, other, "-o", tmp_path / "out", lines=None)
    assert "model_type: 'llama' against 'qwen2'" in message
    copy = tmp_path / "copy"
    shutil.copytree(llama, copy)
    for folder, word in ((llama, "a"), (copy, "b")):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel", "vocab": {word: 0}}, "padding": word}))
    message = refused(capsys, tmp_path, "merge", llama, copy, "-o", tmp_path / "out", lines=2)
    assert "tokenizer.json differs" in message
    (copy / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel", "vocab": {"a": 0}}, "padding": None}))
    assert run(["merge", str(llama), str(copy), "-o", str(tmp_path / "out"), "--quiet"]) == 0


def test_a_tie_has_one_line(capsys, tmp_path, llama):
    tied = saved(tmp_path, "llama", "tied")
    message = refused(capsys, tmp_path, "align", llama, tied, "-o", tmp_path / "out", lines=2)
    assert message.count("(tie_word_embeddings): untie the other as well, or tie both") == 1


def test_grids_of_patches_and_tensors_of_every_layer(capsys, tmp_path):
    one = saved(tmp_path, "vit")
    config = transformers.ViTConfig.from_pretrained(one)
    config.image_size = (52, 48)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "wider")
    message = refused(capsys, tmp_path, "align", one, tmp_path / "wider", "-o", tmp_path / "out", lines=2)
    assert "inputs.grid: (13, 11) against (13, 12)" in message
    gpt2 = saved(tmp_path, "gpt2")
    old = tmp_path / "with buffers"
    shutil.copytree(gpt2, old)
    buffers = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 3, 3, dtype=torch.bool) for i in range(2)}
    _tensors(old, lambda t: t.update(buffers))
    message = refused(capsys, tmp_path, "align", gpt2, old, "-o", tmp_path / "out", lines=2)
    assert "tensor transformer.h.*.attn.bias (2 of them) is in only one of the two" in message


def test_comparing_reads_no_weights(capsys, tmp_path, llama):
    """The refusal comes before weights are read: NaN in them is not what the message is about."""
    other = saved(tmp_path, "qwen2")
    nan(other)
    assert "NaN" not in refused(capsys, tmp_path, "align", llama, other, "-o", tmp_path / "out", lines=None)


# --- outputs ------------------------------------------------------------------------------------------------------------


def test_outputs_that_are_not_allowed(capsys, tmp_path, llama):
    other = tmp_path / "other"
    assert run(["scramble", str(llama), "-o", str(other), "--quiet"]) == 0
    for command in (["scramble", llama], ["align", llama, other], ["merge", llama, other]):
        assert "is the input" in refused(capsys, tmp_path, *command, "-o", llama)
        assert "is the input" in refused(capsys, tmp_path, *command, "-o", llama, "--overwrite")
        assert "inside one another" in refused(capsys, tmp_path, *command, "-o", llama / "out")
        assert "does not exist" in refused(capsys, tmp_path, *command, "-o", tmp_path / "no/out")
        assert "cannot write" in refused(capsys, tmp_path, *command, "-o", "/proc/coset-out")
        (tmp_path / "exists").mkdir()
        (tmp_path / "exists/file").touch()
        assert "already exists" in refused(capsys, tmp_path, *command, "-o", tmp_path / "exists")
        assert "refusing to overwrite" in refused(capsys, tmp_path, *command, "-o", tmp_path / "exists", "--overwrite")
        shutil.rmtree(tmp_path / "exists")
    assert "is the input" in refused(capsys, tmp_path, "align", llama, other, "-o", other, "--overwrite")


def _places(folder, name):
    """Places at which no file can be written, and what is said of them."""
    (folder / "file").touch()
    (folder / f"folder{Path(name).suffix}").mkdir(exist_ok=True)
    (folder / name).touch()
    return (
        (folder / "no" / name, (), "the folder .*no does not exist"),
        (folder / "file" / name, (), "the folder .*file does not exist"),
        (folder / f"folder{Path(name).suffix}", ("--overwrite",), "is a folder; give a file name"),
        (folder / name, (), "already exists"),
        (f"/proc/{name}", (), "cannot write the "),
        (folder / Path(name).suffix.rjust(250, "n"), (), "cannot write the .*: File name too long"),
        (folder / f"{Path(name).stem}.txt", (), f"file, got {Path(name).stem}.txt; name it {Path(name).stem}."),
    )


@pytest.mark.parametrize("verb", ["barrier", "certify", "scramble", "align", "compare"])
def test_files_that_cannot_be_written_are_refused_before_any_work(capsys, tmp_path, monkeypatch, llama, verb):
    for work in (
        "checkpoint.curves.barrier",
        "certificate.certify",
        "checkpoint.operations.find",
        "checkpoint.operations.random_transform",
    ):
        monkeypatch.setattr(f"coset.{work}", None)
    monkeypatch.setattr("coset.checkpoint.comparison.compare_sides", None)
    other, data = saved(tmp_path / "other", "llama", seed=1), tmp_path / "data.safetensors"
    save_file({"input_ids": torch.ones(2, 9, dtype=torch.int64)}, data)
    words, name = {
        "barrier": (("barrier", llama, other, "--data", data, "--plot"), "f.png"),
        "certify": (("certify", "--plot"), "f.svg"),
        "scramble": (("scramble", llama, "-o", tmp_path / "out", "--transform"), "g.safetensors"),
        "align": (("align", llama, other, "-o", tmp_path / "out", "--transform"), "g.safetensors"),
        "compare": (("compare", llama, other, "--transform"), "g.safetensors"),
    }[verb]
    for path, flags, message in _places(tmp_path, name):
        assert re.search(message, refused(capsys, tmp_path, *words, path, *flags))


def test_states_and_folders_that_cannot_be_written_are_refused_before_any_work(capsys, tmp_path, monkeypatch, llama):
    for work in ("find", "find_all", "random_transform"):
        monkeypatch.setattr(f"coset.checkpoint.operations.{work}", None)
    monkeypatch.setattr("coset.checkpoint.curves.find", None)
    data = tmp_path / "data.safetensors"
    save_file({"input_ids": torch.ones(2, 9, dtype=torch.int64)}, data)
    out = ("-o", tmp_path / "out")
    for words in (("align", llama, llama, *out), ("merge", llama, llama, *out), ("barrier", llama, llama, "--data", data)):
        for path, _, message in _places(tmp_path, "state"):
            if "already" not in message and "name it" not in message:  # a state may be there, and be called anything
                assert re.search(message, refused(capsys, tmp_path, *words, "--matcher", "learned", "--state", path))
    for words in (("scramble", llama), ("align", llama, llama), ("merge", llama, llama)):
        for path in ("/proc/out", tmp_path / ("n" * 250)):
            assert "cannot write the output" in refused(capsys, tmp_path, *words, "-o", path)


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_figures_are_what_their_names_say(capsys, tmp_path, llama, suffix, start):
    data, plot = tmp_path / "data.safetensors", tmp_path / f"f{suffix}"
    save_file({"input_ids": torch.ones(2, 9, dtype=torch.int64)}, data)
    content = []
    for _ in range(2):
        run_json(capsys, "barrier", llama, llama, "--data", data, "--points", 2, "--plot", plot, "--overwrite")
        content.append(plot.read_bytes())
    assert content[0].startswith(start)
    assert content[0] == content[1]


def test_elements_and_their_files(capsys, tmp_path, llama):
    g = tmp_path / "g.safetensors"
    assert run(["scramble", str(llama), "-o", str(tmp_path / "other"), "--transform", str(g), "--quiet"]) == 0
    scramble = ("scramble", llama, "-o", tmp_path / "out", "--transform")
    assert "already exists" in refused(capsys, tmp_path, *scramble, g)
    assert "does not exist" in refused(capsys, tmp_path, *scramble, tmp_path / "no/g.safetensors")
    assert "inside a checkpoint folder" in refused(capsys, tmp_path, *scramble, llama / "g.safetensors")
    assert "a folder" in refused(capsys, tmp_path, *scramble, tmp_path, "--overwrite")
    assert "cannot write" in refused(capsys, tmp_path, *scramble, "/proc/coset-g.safetensors")
    qwen = saved(tmp_path, "qwen2")
    apply = ("apply", g, llama, "-o", tmp_path / "out")
    refusal = refused(capsys, tmp_path, "apply", g, qwen, "-o", tmp_path / "out", lines=None)
    assert "another architecture" in refusal
    assert "the checkpoint has" in refusal.splitlines()[1]
    for verb in (("scramble", llama, "-o", tmp_path / "out"), ("align", llama, llama, "-o", tmp_path / "out"), ("compare", llama, llama)):
        assert "is a .safetensors file, got" in refused(capsys, tmp_path, *verb, "--transform", tmp_path / "g.txt")
    # Copies: a file that is cut short under a memory map ends the process.
    content, tensors = g.read_bytes(), {name: tensor.clone() for name, tensor in load_file(g).items()}
    metadata = _header(g)[0]["__metadata__"]
    g.write_bytes(content[: len(content) // 2])
    assert "not a readable safetensors file" in refused(capsys, tmp_path, *apply)
    tensors["element/stream/"] = tensors["element/stream/"] + 0.01
    save_file(tensors, g, metadata)
    assert "does not belong to the symmetry group" in refused(capsys, tmp_path, *apply)


def test_unknown_spaces_and_flags(capsys, tmp_path, llama):
    assert "choose from heads, qk" in refused(capsys, tmp_path, "scramble", llama, "-o", tmp_path / "out", "--spaces", "heads,mlp")
    assert "none given" in refused(capsys, tmp_path, "scramble", llama, "-o", tmp_path / "out", "--spaces", ",")
    assert "nothing can move" in refused(capsys, tmp_path, "scramble", llama, "-o", tmp_path / "out", "--spaces", "shifts")
    assert "weight" in refused(capsys, tmp_path, "merge", llama, llama, "-o", tmp_path / "out", "--weight", 2)
    contradiction = ("merge", llama, llama, "-o", tmp_path / "out", "--no-align", "--spaces", "heads")
    assert "--spaces: it says how to align" in refused(capsys, tmp_path, *contradiction)
    assert "--matcher" in refused(capsys, tmp_path, "align", llama, llama, "-o", tmp_path / "out", "--matcher", "magic")
    data = tmp_path / "data.safetensors"
    save_file({"input_ids": torch.ones(2, 9, dtype=torch.int64)}, data)
    barrier = ("barrier", llama, llama, "--data", data)
    assert "--points: expected an integer from 2 to 100000, got 1" in refused(capsys, tmp_path, *barrier, "--points", 1)
    for flag in ("--points", "--length", "--samples", "--batch"):
        for value in (0, -1, 10**12):
            message = refused(capsys, tmp_path, *barrier, flag, value)
            assert message.startswith(f"coset: error: {flag}: expected an integer from")
    assert "--weight: expected a finite number, got nan" in refused(
        capsys, tmp_path, "merge", llama, llama, "-o", tmp_path / "out", "--weight", "nan"
    )
    assert "--weight: expected a number from 0" in refused(capsys, tmp_path, "merge", llama, llama, "-o", tmp_path / "out", "--weight", 2)
    assert "--spaces: hats; choose from" in refused(capsys, tmp_path, "scramble", llama, "-o", tmp_path / "out", "--spaces", "hats")
    assert "the figure is a .png or .svg or .pdf file" in refused(capsys, tmp_path, *barrier, "--plot", tmp_path / "f.bmp")
    assert "does not exist" in refused(capsys, tmp_path, *barrier, "--plot", tmp_path / "no/f.png")
    assert "--device: 'magic' is not available" in refused(capsys, tmp_path, *barrier, "--device", "magic")
    assert "--device: 'meta' is not available" in refused(capsys, tmp_path, *barrier, "--device", "meta")
    assert "these inputs have a length of their own" in refused(capsys, tmp_path, *barrier, "--length", 5)
    assert "no such data file" in refused(capsys, tmp_path, "barrier", llama, llama, "--data", tmp_path / "none.txt")
    save_file({"input_ids": torch.full((2, 9), VOCABULARY)}, data)
    assert "token ids must lie in 0..96" in refused(capsys, tmp_path, *barrier)


# --- in a process of its own --------------------------------------------------------------------------------------------


def test_disk_full(tmp_path, llama):
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    before = sorted(tmp_path.rglob("*"))
    done = subprocess.run(
        [SCRIPT, "scramble", llama, "-o", tmp_path / "out", "--transform", tmp_path / "g.safetensors", "--spaces", "vo"],
        preexec_fn=small_files,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == f"coset: error: {tmp_path / 'out'}: cannot write the output: File too large\n"
    assert sorted(tmp_path.rglob("*")) == before


def test_interrupt_while_writing(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=256, intermediate_size=1030, num_hidden_layers=24, num_attention_heads=8, head_dim=30
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    before = sorted(tmp_path.rglob("*"))
    process = subprocess.Popen(
        [SCRIPT, "scramble", tmp_path / "model", "-o", tmp_path / "out", "--transform", tmp_path / "g.safetensors"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.coset-*/*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "coset: error: interrupted"
    assert "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before
