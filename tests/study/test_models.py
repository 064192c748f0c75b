"""Every model with every encoding: what it is, and that it learns."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from coset.architecture import Alibi, Classifier, LanguageModel, Rotary, Sinusoidal
from coset.connect import score
from coset.study.config import ModelName, Pe
from coset.study.data import Dataset
from coset.study.models import STYLES, architecture, rope_base
from coset.study.training import Recipe, learnable, train
from coset.symmetries import symmetry
from coset.transformer import initialise, random_inputs

IMAGES = {"grid": [3, 2], "features": 5, "vocabulary": None, "context": None, "classes": 3}
TEXT = {"grid": None, "features": None, "vocabulary": 11, "context": 7, "classes": None}
LABELLED = {**TEXT, "classes": 3}
SHAPES = {"images": IMAGES, "text": TEXT, "labelled": LABELLED}


def options(model: str, pe: str, **more: Any) -> dict[str, Any]:
    return {
        "model": model, "pe": pe, "layers": 1, "width": 24, "heads": 6, "kv_heads": 3, "mlp_width": 5, "rope_base": None, "norm": None,
        "post_norm": False, **more,
    }  # fmt: skip


@pytest.mark.parametrize("pe", get_args(Pe))
@pytest.mark.parametrize("model", get_args(ModelName))
def test_every_model_learns_with_every_encoding(model: str, pe: str) -> None:
    style = STYLES[model]
    arch = architecture(options(model, pe), SHAPES[style.kind])
    layer = arch.layers[0]
    assert (layer.attention.heads, layer.attention.kv_heads, layer.mlp.width) == (6, 3, 5)
    assert arch.causal == (style.kind == "text")
    assert isinstance(arch.outputs, LanguageModel if style.kind == "text" else Classifier)
    assert (layer.mlp.gated, layer.attention_norm.kind, layer.attention.output_bias) == (
        (True, "rms", False) if model == "llama" else (False, "layer", True)
    )
    assert isinstance(layer.attention.positions, Rotary) == (pe == "rope")
    assert isinstance(layer.attention.positions, Alibi) == (pe == "alibi")
    inputs = random_inputs(arch, 12, seed=3, **({} if style.kind == "images" else {"length": 7}))
    targets = None if style.kind == "text" else torch.arange(12) % 3
    start = initialise(arch, seed=1)
    end = train(arch, start, Dataset(inputs, targets, inputs, targets), Recipe(1e-2, steps=30, batch=12), seed=2)
    assert score(arch, end, inputs, targets).loss < 0.8 * score(arch, start, inputs, targets).loss
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    assert moved == set(learnable(arch))


def test_a_sinusoidal_table_is_stored_and_leaves_the_stream_its_freedom() -> None:
    arch = architecture(options("llama", "sinusoidal"), TEXT)
    assert isinstance(arch.positions, Sinusoidal)
    assert arch.positions.stored
    assert symmetry(arch).stream.dimension == symmetry(architecture(options("llama", "none"), TEXT)).stream.dimension > 0


def test_post_norm_and_norms_are_options() -> None:
    assert architecture(options("bert", "learned", post_norm=True), LABELLED).layers[0].arrangement == "post"
    assert architecture(options("bert", "learned"), LABELLED).layers[0].arrangement == "pre"
    assert architecture(options("vit", "learned", norm="rms"), IMAGES).layers[0].attention_norm.kind == "rms"


def test_the_rotary_base() -> None:
    assert rope_base(options("vit", "rope")) == 100.0
    assert rope_base(options("llama", "rope")) == 10_000.0
    assert rope_base(options("llama", "rope", rope_base=7.0)) == 7.0
    assert rope_base(options("llama", "learned", rope_base=7.0)) is None
    frequencies = set(architecture(options("vit", "rope", rope_base=7.0, heads=3), IMAGES).layers[0].attention.plane_frequencies)
    assert len(frequencies) == 4
    assert {axis for f in frequencies for axis, x in enumerate(f) if x} == {0, 1}
