"""The models of a study: each name and positional encoding as an :class:`~coset.architecture.Architecture`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from coset.architecture import Architecture, Patches, Rotary, uniform
from coset.errors import CosetError


@dataclass(frozen=True)
class _Style:
    """What a name stands for."""

    kind: Literal["images", "text", "labelled"]
    norm: Literal["layer", "rms"]
    mlp: Literal["gelu", "swiglu"]
    bias: Literal["all", "none"]
    rope_base: float


STYLES: Mapping[str, _Style] = {
    "vit": _Style("images", "layer", "gelu", "all", 100.0),
    "gpt2": _Style("text", "layer", "gelu", "all", 10_000.0),
    "llama": _Style("text", "rms", "swiglu", "none", 10_000.0),
    "bert": _Style("labelled", "layer", "gelu", "all", 10_000.0),
}
"""Norm, MLP and biases by name of model; ``vit`` turns with rows and columns of patches, hence its smaller rotary base."""


def architecture(options: Mapping[str, Any], shape: Mapping[str, Any]) -> Architecture:
    """The architecture of a setting.

    Parameters
    ----------
    options
        The keys of `coset.study.config.Model`.
    shape
        What the data prescribes: `coset.study.tasks.Shape.model_part`.

    Raises
    ------
    CosetError
        If sizes do not divide.
    """
    style, pe = STYLES[options["model"]], options["pe"]
    head_dim = options["width"] // options["heads"]
    base = rope_base(options)
    grid = shape["grid"]
    frequencies = (
        Rotary.axial(head_dim, style.rope_base if base is None else base).frequencies if pe == "rope" and grid is not None else None
    )
    return uniform(
        pe=pe,
        layers=options["layers"],
        width=options["width"],
        heads=options["heads"],
        kv_heads=options["kv_heads"],
        mlp_width=options["mlp_width"],
        rope_base=10_000.0 if base is None else base,
        frequencies=frequencies,
        norm=options["norm"] or style.norm,
        post_norm=options["post_norm"],
        mlp=style.mlp,
        bias=style.bias,
        inputs=None if grid is None else Patches(shape["features"], tuple(grid)),
        vocab=shape["vocabulary"] or 2,
        positions=shape["context"] if grid is None else grid[0] * grid[1],
        classes=shape["classes"],
        causal=style.kind == "text",
        # Part of the weights, so that a rotation of the stream takes it along; never trained.
        stored_table=True,
    )


def rope_base(options: Mapping[str, Any]) -> float | None:
    """The base of the rotary frequencies that a model gets; None without a rotary encoding."""
    if options["pe"] != "rope":
        return None
    given = options["rope_base"]
    return STYLES[options["model"]].rope_base if given is None else float(given)


def check_fit(model: str, task: str, kind: str) -> None:
    """Raise unless a model of this name can learn a task of this kind.

    Raises
    ------
    CosetError
        With the models that can.
    """
    wanted = STYLES[model].kind
    if wanted != kind:
        words = {"images": "images", "text": "next tokens", "labelled": "classes of texts"}
        fitting = ", ".join(name for name, style in STYLES.items() if style.kind == kind)
        raise CosetError(f"model: {model} learns {words[wanted]}, and the task {task} has {words[kind]}; try: {fitting}")
