"""The two models to compare: their canonical tensors, lazily, and what one more rounding of them gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from coset.architecture import Architecture
from coset.parameters import Parameters, TensorSpec, tensors

LARGE = 10_000_000
"""Parameters from which on evidence is sampled more sparsely."""

_FLOOR = 2.0**-40


@dataclass(frozen=True)
class Side:
    """A model to compare: its canonical tensors (any mapping, also a lazy one), and the dtype in which each is stored."""

    parameters: Parameters
    dtypes: Mapping[str, torch.dtype]
    specs: Mapping[str, TensorSpec]

    @staticmethod
    def of(architecture: Architecture, parameters: Parameters) -> Side:
        """Tensors that are stored as they are."""
        specs = tensors(architecture)
        return Side(parameters, {name: parameters[name].dtype for name in specs}, specs)

    @property
    def coarse(self) -> bool:
        """Whether some tensor is stored in less than float32."""
        return any(torch.finfo(d).eps > torch.finfo(torch.float32).eps for d in self.dtypes.values())

    def unit(self, name: str) -> float:
        """Half a unit in the last place of the tensor's stored dtype, relative to a number of size one."""
        return max(torch.finfo(self.dtypes[name]).eps / 2, _FLOOR)

    def rounded(self, name: str, exact: Tensor, seed: int) -> Tensor:
        """The tensor, given in float64, after a random rounding: each entry moves by up to half a unit in the last place of its stored dtype."""
        info = torch.finfo(self.dtypes[name])
        generator = torch.Generator().manual_seed(seed * 1_000_003 + self.order[name])
        draw = torch.rand(exact.shape, generator=generator, dtype=torch.float32).to(torch.float64).mul_(2).sub_(1)
        # What is zero or nearly so moves by half the smallest number instead.
        moved = torch.addcmul(exact, exact, draw, value=self.unit(name))
        return moved.add_(draw, alpha=info.smallest_normal * info.eps / 2)

    @cached_property
    def order(self) -> Mapping[str, int]:
        """The place of every tensor in forward order."""
        return {name: i for i, name in enumerate(self.dtypes)}

    def rows(self, block: Parameters, ids: Tensor) -> dict[str, Tensor]:
        """Tensors of the model over some of its vocabulary."""
        out = {}
        for name, x in block.items():
            axis = self.specs[name].axis("vocabulary")
            out[name] = x if axis is None else torch.index_select(x, axis, ids)
        return out


class Lazy(Mapping[str, Tensor]):
    """Tensors of an architecture, made block by block on demand; one layer and the ends are held."""

    def __init__(self, architecture: Architecture, make: Callable[[int | None], Mapping[str, Tensor]]):
        self.specs, self.make = tensors(architecture), make
        self._held: dict[bool, tuple[int | None, Mapping[str, Tensor]]] = {}

    def __getitem__(self, name: str) -> Tensor:
        layer = self.specs[name].layer
        slot = layer is None
        if slot not in self._held or self._held[slot][0] != layer:
            self._held.pop(slot, None)  # release the old block before making the next
            self._held[slot] = (layer, self.make(layer))
        return self._held[slot][1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


class Rounded(Mapping[str, Tensor]):
    """A side after one random rounding of all its tensors, tensor by tensor."""

    def __init__(self, side: Side, seed: int):
        self.side, self.seed = side, seed

    def __getitem__(self, name: str) -> Tensor:
        return self.side.rounded(name, self.side.parameters[name].to(torch.float64), self.seed)

    def __iter__(self) -> Iterator[str]:
        return iter(self.side.order)

    def __len__(self) -> int:
        return len(self.side.order)


class Doubled(Mapping[str, Tensor]):
    """Parameters in float64, cast as they are read; those outside the layers are kept, because a tied embedding is read twice."""

    def __init__(self, parameters: Parameters):
        self.parameters = parameters
        self._ends: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name in self._ends:
            return self._ends[name]
        found = self.parameters[name].to(torch.float64)
        if not name.startswith("layers."):
            self._ends[name] = found
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have one dtype and shape, and the same bits."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    return bool(torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))) if x.ndim else bool(x == y)
