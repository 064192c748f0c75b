"""The algebraic evidence: in normal form, how far every tensor of the moved model lies from the other's, against the noise of rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from coset.architecture import Architecture, LearnedPositions, RelativeBias, Tokens
from coset.equivalence.sides import LARGE, Lazy, Side
from coset.groups import Element, Group
from coset.normal_form import fold, folded_architecture
from coset.parameters import Parameters, TensorSpec, count, tensors
from coset.symmetries import group as symmetry_group
from coset.transform import move

PEAK = 20.0
"""Largest residual of one entry, in standard deviations of its noise, that rounding may explain."""

SPREAD = 5.0
"""Largest mean square of a large tensor's residual, in variances of its noise, that rounding may explain; times 1 + 10 / √n for one of n entries."""

_SPREAD_OUT = 0.03
_ROWS = 4096


@dataclass(frozen=True)
class Residual:
    """How far one tensor of the moved model lies from the other model's, in normal form.

    Attributes
    ----------
    tensor, layer
        Which; layer None is the ends of the model.
    relative
        Frobenius norm, relative to the tensor's.
    peak
        Largest entry in standard deviations of its noise, in the basis of either model.
    spread
        Mean square in variances of the noise.
    noise
        Standard deviation of the noise relative to the tensor's root mean square.
    row
        For a tensor with a vocabulary or position axis, where on it the peak is.
    """

    tensor: str
    layer: int | None
    relative: float
    peak: float
    spread: float
    noise: float
    entries: int
    row: int | None = None

    @property
    def significant(self) -> bool:
        """Whether it is more than rounding explains."""
        return self.peak > PEAK or self.spread > SPREAD * (1 + 10 / math.sqrt(self.entries))


@dataclass(frozen=True)
class Pair:
    """Both models in normal form, one block at a time."""

    architecture: Architecture
    a: Side
    b: Side
    names: tuple[str, ...]

    @property
    def folded(self) -> Architecture:
        return folded_architecture(self.architecture, self.names)

    @property
    def groups(self) -> Mapping[str, Group]:
        return symmetry_group(self.folded).factors

    def raw(self, parameters: Parameters, index: int | None) -> dict[str, Tensor]:
        """A block as it is stored, in float64."""
        return {n: parameters[n].to(torch.float64) for n, spec in tensors(self.architecture).items() if spec.layer == index}

    def fold(self, raw: Parameters) -> dict[str, Tensor]:
        """The normal form of a block, with what no input reads set to zero."""
        return _readable(self.architecture, fold(self.architecture, raw, self.names)[1])

    def normal(self, parameters: Parameters, index: int | None) -> dict[str, Tensor]:
        """A block in normal form, float64."""
        return self.fold(self.raw(parameters, index))

    def lazy(self, parameters: Parameters, element: Mapping[str, Element] | None = None) -> Lazy:
        """The normal form as a mapping, moved by an element."""

        def make(index: int | None) -> dict[str, Tensor]:
            block = self.normal(parameters, index)
            return block if element is None else move(self.folded, element, block)

        return Lazy(self.folded, make)

    def inverse(self, element: Mapping[str, Element]) -> dict[str, Element]:
        return {key: self.groups[key].inverse(g) for key, g in element.items()}


def _readable(a: Architecture, block: dict[str, Tensor]) -> dict[str, Tensor]:
    """Zero the rows of tables that no input reads: positions before the offset, T5's bucket for "ahead at distance zero"."""
    if isinstance(a.positions, LearnedPositions) and a.positions.offset and "embed.positions" in block:
        table = block["embed.positions"].clone()
        table[: a.positions.offset] = 0
        block["embed.positions"] = table
    for name in block:
        if name.endswith("attention.position_bias") and not a.causal:
            encoding = a.layers[int(name.split(".")[1])].attention.positions
            assert isinstance(encoding, RelativeBias)
            read = torch.arange(encoding.buckets) != encoding.buckets // 2
            table = block[name]
            # A shift of the whole table is invisible, and its mean was taken over the unread row too.
            block[name] = torch.where(read[:, None, None], table - table[read].mean(0), torch.zeros_like(table))
    return block


def _smoothed(square: Tensor, axis: int) -> Tensor:
    """Variance model: the best product of a function of the row and one of the column; vectors are averaged with their mean.

    A part of the mean is added everywhere: the element is only known to rounding, which spreads noise to entries that are zero.
    """
    mean = square.mean()
    if square.ndim < 2 or not bool(mean > 0):
        return (square + mean) / 2
    matrix = square.movedim(axis, 0)
    rows, columns = matrix.flatten(1).mean(1), matrix.mean(0)
    product = rows.reshape(-1, *(1 for _ in columns.shape)) * (columns / mean)
    return product.movedim(0, axis) + _SPREAD_OUT * mean


def _beside_maps(variances: dict[str, Tensor], specs: Mapping[str, TensorSpec]) -> None:
    """Add to the variance of every bias what the rounding of its map does there, on inputs of size one.

    A bias of zero is stored without any rounding, but what a change of basis leaves of it is only known to that of the map.
    """
    for name, variance in variances.items():
        of = name.removesuffix("_bias")
        if of != name and of in variances:
            kept = {label.space for label in specs[name].axes}
            axes = [i for i, label in enumerate(specs[of].axes) if label.space not in kept]
            variances[name] = variance + variances[of].sum(axes)


def residuals(
    pair: Pair, element: Mapping[str, Element], seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> list[Residual]:
    """The residual of every tensor under `element`, in forward order."""
    found: dict[str, Residual] = {}
    back = pair.inverse(element)
    blocks: list[int | None] = [None, *range(len(pair.architecture.layers))]
    for done, index in enumerate(blocks):
        found |= {r.tensor: r for r in _block_residuals(pair, element, back, index, seed)}
        if progress is not None:
            progress(done + 1, len(blocks))
    return [found[name] for name in tensors(pair.folded) if name in found]


def _block_residuals(
    pair: Pair, element: Mapping[str, Element], back: Mapping[str, Element], index: int | None, seed: int
) -> Iterator[Residual]:
    sides = (pair.a, pair.b)
    raw = [pair.raw(side.parameters, index) for side in sides]
    large = _large(pair.architecture) if index is None else None
    sampled = raw if large is None else [side.rows(block, large) for side, block in zip(sides, raw, strict=True)]
    normal = [pair.fold(block) for block in sampled]
    gaps = _gaps(pair, element, back, *normal)
    square = [{name: torch.zeros_like(x) for name, x in gap.items()} for gap in gaps]
    samples = 1 if count(pair.architecture) > LARGE else 3
    for sample in range(samples):
        rounded = [
            pair.fold({name: side.rounded(name, x, 2 * (seed * 3 + sample) + i) for name, x in block.items()})
            for i, (side, block) in enumerate(zip(sides, sampled, strict=True))
        ]
        for total, gap, other in zip(square, gaps, _gaps(pair, element, back, *rounded), strict=True):
            for name, x in total.items():
                step = other[name].sub_(gap[name])
                x.addcmul_(step, step, value=1 / samples)
        del rounded
    specs = tensors(pair.folded)
    variances = [{name: _smoothed(x, specs[name].axis("stream") or 0) for name, x in total.items()} for total in square]
    del square
    for variance in variances:
        _beside_maps(variance, specs)
    whole = normal if large is None else [pair.fold(block) for block in raw]
    for name in [name for name, spec in specs.items() if spec.layer == index]:
        axis = specs[name].axis("vocabulary")
        tested = _Tested(specs[name].axis("position") if axis is None else axis)
        if large is None or axis is None:
            for own, gap, variance, side in zip(reversed(normal), gaps, variances, reversed(sides), strict=True):
                tested.add(gap[name], variance[name], own[name], side.unit(name), moved=side is pair.b)
        else:
            models = (variances[0][name], variances[1][name]), (normal[1][name], normal[0][name])
            _test_rows(tested, pair, element, back, name, axis, whole, *models)
        # What is folded away may leave next to nothing: then the tensor as it is stored says what is small.
        size = max(float(torch.linalg.vector_norm(x[name])) for x in (*whole, *raw) if name in x)
        yield tested.result(name, index, size)


@dataclass
class _Tested:
    """What is accumulated over the pieces of a tensor, in both bases; `axis` is the one along which the peak is located."""

    axis: int | None
    peak: float = 0.0
    row: int | None = None
    total: tuple[float, float] = (0.0, 0.0)
    noise: tuple[float, float] = (0.0, 0.0)
    square: float = 0.0
    entries: int = 0

    def add(self, gap: Tensor, variance: Tensor, own: Tensor, unit: float, *, moved: bool, start: int = 0) -> None:
        """One piece, from row `start` on: its residual, the variance model, and the model in whose basis it is, with its unit of rounding.

        `moved` is B's.
        """
        variance = torch.addcmul(variance, own, own, value=unit**2 / 3)
        square = gap.square()
        z = square / variance.clamp_min(torch.finfo(variance.dtype).tiny)
        peak = float(z.max()) ** 0.5
        if peak > self.peak:
            self.peak = peak
            if self.axis is not None:
                self.row = start + int(z.movedim(self.axis, 0).reshape(z.shape[self.axis], -1).amax(1).argmax())
        at = 0 if moved else 1
        self.total = tuple(t + float(z.sum()) * (k == at) for k, t in enumerate(self.total))  # type: ignore[assignment]
        self.noise = tuple(t + float(variance.sum()) * (k == at) for k, t in enumerate(self.noise))  # type: ignore[assignment]
        if moved:
            self.square += float(square.sum())
            self.entries += gap.numel()

    def result(self, name: str, layer: int | None, size: float) -> Residual:
        """The residual of the whole tensor, of Frobenius norm `size`."""
        spread = max(self.total) / self.entries
        relative, noise = (math.sqrt(x) / size if size else 0.0 for x in (self.square, max(self.noise)))
        return Residual(name, layer, relative, self.peak, spread, noise, self.entries, self.row)


def _test_rows(
    tested: _Tested,
    pair: Pair,
    element: Mapping[str, Element],
    back: Mapping[str, Element],
    name: str,
    axis: int,
    whole: list[dict[str, Tensor]],
    variances: tuple[Tensor, Tensor],
    sampled: tuple[Tensor, Tensor],
) -> None:
    """Test a tensor with a large vocabulary piece by piece; noise was sampled on some of its rows, and grows with the size of a row."""
    a, b = whole[0][name], whole[1][name]
    for start in range(0, a.shape[axis], _ROWS):
        piece = [x.narrow(axis, start, min(_ROWS, x.shape[axis] - start)) for x in (a, b)]
        there = move(pair.folded, element, {name: piece[0]})[name] - piece[1]
        here = move(pair.folded, back, {name: piece[1]})[name] - piece[0]
        for gap, own, variance, some, side in zip((there, here), (piece[1], piece[0]), variances, sampled, (pair.b, pair.a), strict=True):
            columns = variance.mean(axis, keepdim=True)
            if own.ndim > 1:
                other = 1 - axis
                rows = own.square().sum(other, keepdim=True) / some.square().sum(other).mean().clamp_min(torch.finfo(own.dtype).tiny)
                columns = columns * rows + _SPREAD_OUT * columns.mean()
            tested.add(gap, columns.expand_as(gap), own, side.unit(name), moved=side is pair.b, start=start)


def _large(architecture: Architecture) -> Tensor | None:
    """Some ids of a large vocabulary, on which noise is sampled; None for a small one."""
    inputs = architecture.inputs
    if not isinstance(inputs, Tokens) or inputs.vocabulary <= 2 * _ROWS:
        return None
    return torch.randperm(inputs.vocabulary, generator=torch.Generator().manual_seed(0))[: _ROWS // 2]


def _gaps(
    pair: Pair, element: Mapping[str, Element], back: Mapping[str, Element], a: Parameters, b: Parameters
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The moved model less the other, in the other's basis; and the same in the first one's basis."""
    there, here = move(pair.folded, element, a), move(pair.folded, back, b)
    return {n: x - b[n] for n, x in there.items()}, {n: x - a[n] for n, x in here.items()}
