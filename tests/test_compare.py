"""`coset compare` and `coset fingerprint` on checkpoints of every family: verdicts, evidence, exit codes, files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint_zoo import CASES, saved
from coset.checkpoint.comparison import compare
from coset.checkpoint.operations import align, apply, scramble
from coset.cli.app import run

KEYS = {"verdict", "residual", "outputs", "first_difference", "reasons", "transform", "condition", "detection_limit"}


def run_json(capsys: pytest.CaptureFixture[str], code: int, *words: object) -> Any:
    capsys.readouterr()  # what transformers wrote while saving
    assert run([*map(str, words), "--json", "--quiet"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def altered(source: Path, target: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a checkpoint with some stored tensors changed."""
    shutil.copytree(source, target)
    stored = {n: x.clone() for n, x in load_file(target / "model.safetensors").items()}
    change(stored)
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize(("family", "case"), CASES)
def test_every_family_recognises_its_scrambled_copy(tmp_path: Path, family: str, case: str) -> None:
    p = saved(tmp_path, family, case)
    scramble(p, tmp_path / "q", seed=3)
    found = compare(p, tmp_path / "q", length=60 if family != "vit" else None)
    assert found.verdict == "equivalent", found.summary()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    p = saved(folder, "llama")
    scramble(p, folder / "q", seed=1)
    return folder


def test_the_element_is_saved_and_does_what_it_says(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    p, q, g = llama / "llama-plain", llama / "q", tmp_path / "g.safetensors"
    found = run_json(capsys, 0, "compare", p, q, "--transform", g)
    assert found.keys() >= KEYS
    assert found["verdict"] == "equivalent"
    assert found["transform"] == str(g)
    assert 0 < found["residual"]["max"] < 1e-6
    assert found["residual"]["tensor"] is not None
    assert found["outputs"]["max_relative_difference"] < 1e-4
    assert found["outputs"]["positions"] >= 128
    with safe_open(g, "pt") as file:
        assert file.metadata()["coset_verb"] == "compare"
    apply(g, p, tmp_path / "again")
    expected, again = load_file(q / "model.safetensors"), load_file(tmp_path / "again/model.safetensors")
    assert all(torch.allclose(again[n], x, atol=1e-5) for n, x in expected.items())
    assert run(["compare", str(p), str(q), "--transform", str(g)]) == 2
    assert "already exists; give another name, or --overwrite" in capsys.readouterr().err
    assert run(["compare", str(p), str(q), "--transform", str(g), "--overwrite"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("equivalent\n")
    assert "detection limit" in out


def test_identical_and_no_element(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    p = llama / "llama-plain"
    shutil.copytree(p, tmp_path / "p")
    found = run_json(capsys, 0, "compare", p, tmp_path / "p", "--transform", tmp_path / "g.safetensors")
    assert (found["verdict"], found["transform"], found["residual"]["max"]) == ("identical", None, 0.0)
    assert not (tmp_path / "g.safetensors").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_rounded_to_half_precision(tmp_path: Path, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    p = saved(tmp_path, "qwen3", dtype=dtype)
    scramble(p, tmp_path / "q", seed=1)
    found = run_json(capsys, 0, "compare", p, tmp_path / "q")
    assert found["verdict"] == "equivalent up to rounding"
    assert found["detection_limit"]["weight"] > 1e-3


def test_different_says_where(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def one_weight(stored: dict[str, Tensor]) -> None:
        stored["model.layers.1.self_attn.o_proj.weight"][3, 4] *= 1.001

    q = altered(llama / "q", tmp_path / "q", one_weight)
    found = run_json(capsys, 1, "compare", llama / "llama-plain", q)
    assert found["verdict"] == "different"
    assert found["first_difference"] == {"layer": 1, "tensor": "layers.1.attention.o"}
    assert found["transform"] is None
    assert run(["compare", str(llama / "llama-plain"), str(q), "--quiet"]) == 1
    assert "first difference" in capsys.readouterr().out


def test_undecided_says_why(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A head that writes nothing may read anything."""
    name = "model.layers.0.self_attn.{}_proj.weight"

    def dead(stored: dict[str, Tensor]) -> None:
        stored[name.format("v")][:10] = 0

    def other_queries(stored: dict[str, Tensor]) -> None:
        dead(stored)
        stored[name.format("q")][:20] = torch.randn(20, 54, generator=torch.Generator().manual_seed(0))

    p = altered(llama / "llama-plain", tmp_path / "p", dead)
    q = altered(llama / "llama-plain", tmp_path / "q", other_queries)
    found = run_json(capsys, 3, "compare", p, q)
    assert found["verdict"] == "undecided"
    assert any("layer 0: values of KV head 0 are zero" in reason for reason in found["reasons"])
    assert run(["compare", str(p), str(q), "--quiet"]) == 3
    assert "- layer 0: values of KV head 0 are zero" in capsys.readouterr().out


def test_what_cannot_be_compared(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = saved(tmp_path, "llama", "linear")
    capsys.readouterr()  # what transformers wrote while saving
    assert run(["compare", str(llama / "llama-plain"), str(other)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("coset: error: ")
    assert "RoPE frequencies" in err
    assert "Traceback" not in err

    def broken(stored: dict[str, Tensor]) -> None:
        stored["model.norm.weight"][0] = torch.nan

    q = altered(llama / "q", tmp_path / "q", broken)
    assert run(["compare", str(llama / "llama-plain"), str(q), "--quiet"]) == 2
    assert "model.norm.weight holds NaN" in capsys.readouterr().err


def test_tensors_outside_the_architecture_count(tmp_path: Path) -> None:
    p = saved(tmp_path, "bert", "base")
    scramble(p, tmp_path / "q", seed=1)

    def pooler(stored: dict[str, Tensor]) -> None:
        name = next(n for n in stored if n.endswith("pooler.dense.weight"))
        stored[name][0, 0] += 0.1

    found = compare(p, altered(tmp_path / "q", tmp_path / "r", pooler))
    assert found.verdict == "different"
    assert found.first_difference is not None
    assert "pooler" in found.first_difference[1]
    assert "outside the architecture" in found.reasons[-1]


@pytest.mark.parametrize(
    ("length", "message"),
    [(0, "--length: expected an integer from 1"), (-3, "--length: expected an integer from 1"), (4_000_000_000, "at most 32,768 tokens")],
)
def test_lengths_that_are_none(llama: Path, capsys: pytest.CaptureFixture[str], length: int, message: str) -> None:
    assert run(["compare", str(llama / "llama-plain"), str(llama / "q"), "--length", str(length)]) == 2
    assert message in capsys.readouterr().err


def test_outputs_as_probabilities(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    p = saved(tmp_path, "llama")

    def shift(stored: dict[str, Tensor]) -> None:
        stored["lm_head.weight"] += torch.randn(54, generator=torch.Generator().manual_seed(0))

    q = altered(p, tmp_path / "q", shift)
    assert run_json(capsys, 1, "compare", p, q)["first_difference"] == {"layer": None, "tensor": "head"}
    assert run_json(capsys, 0, "compare", p, q, "--outputs", "probabilities")["verdict"] == "equivalent"


def test_fingerprint(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    p, q = llama / "llama-plain", llama / "q"
    own, copy = (run_json(capsys, 0, "fingerprint", path) for path in (p, q))
    assert own.keys() >= {"fingerprint", "precision", "layers"}
    assert len(own["layers"]) == 2
    assert len(own["layers"][0]["qk_planes"]) == 5
    assert len(own["layers"][0]["vo_largest"]) == 6
    assert own["fingerprint"] == copy["fingerprint"]
    for layer, other in zip(own["layers"], copy["layers"], strict=True):
        for name, value in layer.items():
            assert other[name] == pytest.approx(value, rel=1e-5)

    def tuned(stored: dict[str, Tensor]) -> None:
        for k, x in enumerate(stored.values()):
            x += 3e-3 * x.square().mean().sqrt() * torch.randn(x.shape, generator=torch.Generator().manual_seed(k))

    assert run_json(capsys, 0, "fingerprint", altered(q, tmp_path / "t", tuned))["fingerprint"] != own["fingerprint"]
    assert run(["fingerprint", str(p)]) == 0
    assert own["fingerprint"] in capsys.readouterr().out


def zero_biases(stored: dict[str, Tensor]) -> None:
    for name, x in stored.items():
        if name.endswith(".bias") and "ln_" not in name:
            x.zero_()


def test_biases_of_zero_come_back_to_rounding(tmp_path: Path) -> None:
    """Zero is stored exactly, but a change of basis and its inverse leave rounding of the maps there; a small bias is still seen."""
    p = altered(saved(tmp_path, "gpt2"), tmp_path / "p", zero_biases)
    scramble(p, tmp_path / "q", seed=3, spaces=("heads", "qk", "vo", "neurons", "shifts"))
    align(p, tmp_path / "q", tmp_path / "back")
    back = load_file(tmp_path / "back/model.safetensors")
    biases = [x for name, x in back.items() if name.endswith("c_attn.bias")]
    assert all(float(x.abs().max()) > 0 for x in biases)
    assert compare(p, tmp_path / "back").verdict == "equivalent"

    def small(stored: dict[str, Tensor]) -> None:
        next(x for name, x in stored.items() if name.endswith("c_fc.bias"))[2] = 1e-5

    assert compare(p, altered(p, tmp_path / "r", small)).verdict == "different"


def test_a_tied_model_beside_an_untied_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    p = saved(tmp_path, "gpt2")
    scramble(p, tmp_path / "q", seed=3, spaces=("heads", "qk", "vo", "neurons"))
    align(p, tmp_path / "q", tmp_path / "untied", untied=True)
    g, again = tmp_path / "g.safetensors", tmp_path / "again"
    assert run_json(capsys, 0, "compare", p, tmp_path / "untied", "--transform", g)["verdict"] == "equivalent"
    assert run(["apply", str(g), str(p), "-o", str(again), "--quiet"]) == 0
    assert compare(again, tmp_path / "untied").verdict == "equivalent"
    assert compare(tmp_path / "untied", p).verdict == "equivalent"

    def change(stored: dict[str, Tensor]) -> None:
        stored["lm_head.weight"][3, 4] *= 1.01

    assert compare(p, altered(tmp_path / "untied", tmp_path / "other", change)).verdict == "different"
    ids = tmp_path / "ids.safetensors"
    save_file({"input_ids": torch.randint(50, (8, 20), generator=torch.Generator().manual_seed(0))}, ids)
    line = run_json(capsys, 0, "barrier", p, tmp_path / "untied", "--data", ids, "--points", 3)
    assert line["loss_barrier"] < 1e-5
    assert line["loss"][0] == pytest.approx(line["loss"][2], rel=1e-5)
    assert run(["merge", str(p), str(tmp_path / "untied"), "-o", str(tmp_path / "m"), "--no-align"]) == 2
    assert "only one of them has an unembedding of its own" in capsys.readouterr().err
