"""Two models and the freedom between them: which gauge is folded, which group acts on what is left, and which gauge the result is written in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from coset.architecture import Architecture
from coset.errors import CosetError
from coset.groups import Element, Group, Wreath
from coset.normal_form import compatible_gauge, fold, folded_architecture, read_gauge
from coset.parameters import Parameters, tensors
from coset.symmetries import group as symmetry_group
from coset.transform import Transform, check_spaces, gauge_names

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many parts are done, and of how many."""


@dataclass(frozen=True)
class Step:
    """The objective after one step of the matching."""

    name: str
    objective: float


@dataclass(frozen=True)
class Match:
    """What was found.

    Attributes
    ----------
    transform
        Carries the other model to the reference, into the reference's gauge; learned gains differ from the reference's.
    history
        The matcher's own objective at the start and after every step: squared distance in the gauge of the matching (weights), relative
        squared distance of activations, or the loss between the models.
    notes
        Degenerate spots and how they were handled.
    """

    transform: Transform
    history: tuple[Step, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Alignment(Match):
    """A match together with the aligned parameters (float64): the other model's function, next to the reference."""

    parameters: dict[str, Tensor]


class Pair:
    """Two models of one architecture, and the spaces in which the other one may move.

    Shifts are folded away on both sides; gains are folded too where the stream turns.

    Attributes
    ----------
    names
        The folded gauge coordinates.
    folded
        Architecture of the normal form; `groups` act on it, one group a space.
    source, target
        Gauge of the other model, and gauge in which the result is written: the reference's, but for gains too small to divide by.
    layers
        The layers whose heads and neurons may move.
    """

    def __init__(
        self,
        architecture: Architecture,
        reference: Parameters,
        other: Parameters,
        *,
        spaces: tuple[str, ...],
        layers: tuple[int, ...] | None,
        pinned: tuple[str, ...],
    ):
        check_spaces(spaces)
        self.architecture, self.reference, self.other, self.spaces = architecture, reference, other, spaces
        self.names = gauge_names(architecture, spaces, pinned)
        self.folded = folded_architecture(architecture, self.names)
        self.groups: dict[str, Group] = {
            key: g
            for key, g in symmetry_group(self.folded).factors.items()
            if (key == "stream" and "stream" in spaces)
            or (key.endswith(".heads") and {"heads", "qk", "vo"} & set(spaces))
            or (key.endswith(".neurons") and ("neurons" in spaces or ("experts" in spaces and isinstance(g, Wreath))))
        }
        if not self.groups and not self.names:
            raise CosetError(f"spaces: this architecture has nothing to move in {', '.join(spaces)}")
        self.layers = tuple(range(len(architecture.layers))) if layers is None else layers
        wrong = [i for i in self.layers if not 0 <= i < len(architecture.layers)]
        if wrong:
            raise CosetError(f"layers: {wrong} of {len(architecture.layers)} layers do not exist; count from 0")
        self.source = read_gauge(architecture, other, self.names)
        self.target, self.notes = compatible_gauge(read_gauge(architecture, reference, self.names), self.source)
        self.notes += [
            f"{name}: the other model's gain is zero on {int((value == 0).sum())} lanes; what reads it there is not seen and not kept, "
            "so the transform has no inverse"
            for name, value in self.source.items()
            if name.endswith(".gain") and bool((value == 0).any())
        ]

    def normal(self, parameters: Parameters) -> dict[str, Tensor]:
        """All tensors of a model in normal form, float64."""
        whole = {name: parameters[name].to(torch.float64) for name in tensors(self.architecture)}
        return fold(self.architecture, whole, self.names)[1]

    def moves(self, layer: int, part: str) -> bool:
        """Whether the ``heads`` or ``neurons`` of a layer may move."""
        return layer in self.layers and f"layers.{layer}.{part}" in self.groups

    def transform(self, element: Mapping[str, Element]) -> Transform:
        """The transform of the other model with this element, the identity in the spaces that it leaves out."""
        whole = {key: element[key] if key in element else g.identity() for key, g in self.groups.items()}
        return Transform(self.architecture, whole, self.source, self.target)
