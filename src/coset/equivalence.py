r"""Are two models the same function? The decision, with its evidence.

Two models of one architecture are equivalent when an element of the symmetry group carries one to the other. :func:`compare` finds the
element by alignment and then checks it in two independent ways:

* *algebra*: in normal form (gauge folded away) the moved model must be the other one, entry by entry, within what rounding the stored weights
  does. The noise of every entry is not assumed but sampled: both models are rounded once more at random and sent through the same
  element. The comparison is made in the bases of both models, since a change of one weight is one entry in one of them and spread out in
  the other;
* *outputs*: the forward passes of both, in float64 on random inputs, may differ by a small multiple of what the same random rounding does.

A visible difference of the outputs is always proof that the functions differ. The algebra is sharper, but proves a difference only where
the element is unique: for degenerate models, or where the search may have failed, a residual that the outputs do not confirm leaves the
case undecided.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from coset.alignment.features import head_features, neuron_features
from coset.alignment.heads import least_squares_within
from coset.alignment.matching import Progress, match
from coset.alignment.stream import StreamProducts
from coset.architecture import Architecture, Experts, LearnedPositions, RelativeBias, Tokens
from coset.degeneracy import degeneracies
from coset.errors import CosetError
from coset.groups import Element, GeneralLinear, Group, Monomial, MonomialElement, Orthogonal, Wreath, WreathElement
from coset.normal_form import fold, folded_architecture, read_gauge
from coset.parameters import Parameters, TensorSpec, check, count, tensors
from coset.symmetries import group as symmetry_group
from coset.transform import SPACES, Transform, gauge_names, move
from coset.transformer import forward, random_inputs

Verdict = Literal["identical", "equivalent", "equivalent up to rounding", "different", "undecided"]

PEAK = 20.0
"""Largest residual of one entry, in standard deviations of its noise, that rounding may explain."""

SPREAD = 5.0
"""Largest mean square of a large tensor's residual, in variances of its noise, that rounding may explain; times 1 + 10 / √n for one of n entries."""

OUTPUT_FACTOR = 5.0
"""Largest difference of the outputs, in multiples of what one random rounding does to them: of the maxima over positions, and of the medians."""

_SPREAD_OUT = 0.03
_CYCLES = 15
_EXACT = 1e-12
_LARGE = 10_000_000
_ROWS = 4096
_FLOOR = 2.0**-40
_VISIBLE = 0.02
_INNER = ("heads", "qk", "vo", "neurons", "experts")
_UNGAUGED = tuple(s for s in SPACES if s not in ("gains", "stream"))


# --- the two models -------------------------------------------------------------------------------------------------


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

    def rows(self, ids: Tensor) -> Side:
        """The same model over some of its vocabulary."""
        return Side(_Rows(self.parameters, {n: spec.axis("vocabulary") for n, spec in self.specs.items()}, ids), self.dtypes, self.specs)

    def rounded(self, name: str, seed: int) -> Tensor:
        """The tensor in float64 after one more random rounding at its stored precision: each entry moves by up to half a unit in the last place."""
        x = self.parameters[name].to(torch.float64)
        info = torch.finfo(self.dtypes[name])
        unit = max(info.eps / 2, _FLOOR)
        generator = torch.Generator().manual_seed(seed)
        draw = torch.rand(x.shape, generator=generator, dtype=torch.float32).to(torch.float64).mul_(2).sub_(1)
        return x + draw.mul_(x.abs().mul_(unit).clamp_(min=info.smallest_normal * info.eps / 2))


class _Lazy(Mapping[str, Tensor]):
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


class _Rows(Mapping[str, Tensor]):
    """Some rows of every tensor that has a vocabulary axis; the others whole."""

    def __init__(self, parameters: Parameters, axes: Mapping[str, int | None], ids: Tensor):
        self.parameters, self.axes, self.ids = parameters, axes, ids

    def __getitem__(self, name: str) -> Tensor:
        axis = self.axes[name]
        return self.parameters[name] if axis is None else torch.index_select(self.parameters[name], axis, self.ids)

    def __iter__(self) -> Iterator[str]:
        return iter(self.axes)

    def __len__(self) -> int:
        return len(self.axes)


class _Rounded(Mapping[str, Tensor]):
    """A side after one random rounding of all its tensors, tensor by tensor."""

    def __init__(self, side: Side, seed: int):
        self.side, self.seed = side, seed
        self.order = {name: i for i, name in enumerate(side.dtypes)}

    def __getitem__(self, name: str) -> Tensor:
        return self.side.rounded(name, self.seed * 1_000_003 + self.order[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


def _same_bits(x: Tensor, y: Tensor) -> bool:
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    return bool(torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))) if x.ndim else bool(x == y)


# --- algebra: the residual of every tensor --------------------------------------------------------------------------


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
    """

    tensor: str
    layer: int | None
    relative: float
    peak: float
    spread: float
    noise: float
    entries: int

    @property
    def significant(self) -> bool:
        """Whether it is more than rounding explains."""
        return self.peak > PEAK or self.spread > SPREAD * (1 + 10 / math.sqrt(self.entries))


@dataclass(frozen=True)
class _Pair:
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

    def normal(self, parameters: Parameters, index: int | None) -> dict[str, Tensor]:
        """A block in normal form, float64, with what no input reads set to zero."""
        own = {n: parameters[n].to(torch.float64) for n, spec in tensors(self.architecture).items() if spec.layer == index}
        return _readable(self.architecture, fold(self.architecture, own, self.names)[1])

    def lazy(self, parameters: Parameters, element: Mapping[str, Element] | None = None) -> _Lazy:
        """The normal form as a mapping, moved by an element."""

        def make(index: int | None) -> dict[str, Tensor]:
            block = self.normal(parameters, index)
            return block if element is None else move(self.folded, element, block)

        return _Lazy(self.folded, make)

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


def residuals(
    pair: _Pair, element: Mapping[str, Element], seed: int = 0, progress: Callable[[int, int], None] | None = None
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
    pair: _Pair, element: Mapping[str, Element], back: Mapping[str, Element], index: int | None, seed: int
) -> Iterator[Residual]:
    large = _large(pair.architecture) if index is None else None
    sampled = pair if large is None else dataclasses.replace(pair, a=pair.a.rows(large), b=pair.b.rows(large))
    normal = [sampled.normal(side.parameters, index) for side in (sampled.a, sampled.b)]
    gaps = _gaps(pair, element, back, *normal)
    square = [{name: torch.zeros_like(x) for name, x in gap.items()} for gap in gaps]
    samples = 1 if count(pair.architecture) > _LARGE else 3
    for sample in range(samples):
        rounded = [sampled.normal(_Rounded(side, 2 * (seed * 3 + sample) + i), index) for i, side in enumerate((sampled.a, sampled.b))]
        for total, gap, other in zip(square, gaps, _gaps(pair, element, back, *rounded), strict=True):
            for name, x in total.items():
                x += (other[name] - gap[name]).square_() / samples
        del rounded
    variances = [{name: _smoothed(x, tensors(pair.folded)[name].axis("stream") or 0) for name, x in total.items()} for total in square]
    whole = normal if large is None else [pair.normal(side.parameters, index) for side in (pair.a, pair.b)]
    for name, spec in tensors(pair.folded).items():
        if spec.layer == index:
            axis = spec.axis("vocabulary")
            tested = _Tested()
            if large is None or axis is None:
                for own, gap, variance, side in zip(reversed(normal), gaps, variances, (pair.b, pair.a), strict=True):
                    tested.add(gap[name], variance[name], own[name] * _unit(side, name), moved=side is pair.b)
            else:
                models = (variances[0][name], variances[1][name]), (normal[1][name], normal[0][name])
                _test_rows(tested, pair, element, back, name, axis, whole, *models)
            size = max(float(torch.linalg.vector_norm(x[name])) for x in whole)
            yield tested.result(name, spec.layer, max(size, _raw_size(pair, name)))


@dataclass
class _Tested:
    """What is accumulated over the pieces of a tensor, in both bases."""

    peak: float = 0.0
    total: tuple[float, float] = (0.0, 0.0)
    noise: tuple[float, float] = (0.0, 0.0)
    square: float = 0.0
    entries: int = 0

    def add(self, gap: Tensor, variance: Tensor, unit: Tensor, *, moved: bool) -> None:
        """One piece: its residual, the variance model, and half a unit in the last place of the model in whose basis it is; `moved` is B's."""
        variance = variance + unit.square() / 3
        square = gap.square()
        z = torch.where(gap == 0, 0.0, square / variance)
        self.peak = max(self.peak, float(z.max()) ** 0.5)
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
        return Residual(name, layer, relative, self.peak, spread, noise, self.entries)


def _raw_size(pair: _Pair, name: str) -> float:
    """Norm of the tensor as it is stored, where it is one: what is folded away may leave next to nothing."""
    return max((float(torch.linalg.vector_norm(s.parameters[name])) for s in (pair.a, pair.b) if name in s.dtypes), default=0.0)


def _test_rows(
    tested: _Tested,
    pair: _Pair,
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
            tested.add(gap, columns.expand_as(gap), own * _unit(side, name), moved=side is pair.b)


def _large(architecture: Architecture) -> Tensor | None:
    """Some ids of a large vocabulary, on which noise is sampled; None for a small one."""
    inputs = architecture.inputs
    if not isinstance(inputs, Tokens) or inputs.vocabulary <= 2 * _ROWS:
        return None
    return torch.randperm(inputs.vocabulary, generator=torch.Generator().manual_seed(0))[: _ROWS // 2]


def _unit(side: Side, name: str) -> float:
    return max(torch.finfo(side.dtypes[name]).eps / 2, _FLOOR)


def _gaps(
    pair: _Pair, element: Mapping[str, Element], back: Mapping[str, Element], a: Parameters, b: Parameters
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The moved model less the other, in the other's basis; and the same in the first one's basis."""
    there, here = move(pair.folded, element, a), move(pair.folded, back, b)
    return {n: x - b[n] for n, x in there.items()}, {n: x - a[n] for n, x in here.items()}


# --- outputs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outputs:
    """The outputs of both models on random inputs.

    Attributes
    ----------
    difference
        Largest over positions of ‖y_A − y_B‖ / ‖y_B‖.
    typical
        Median over positions of the same.
    noise, typical_noise
        The same of one random rounding of a model, the larger of the two models'.
    positions
        How far into the context the inputs reach: positions 0 to `positions` − 1.
    tipped
        For a mixture of experts, the share of positions that differ by ten times the median noise or more: of the two models, and of one model
        after a rounding. There the chosen experts may change.
    """

    difference: float
    typical: float
    noise: float
    typical_noise: float
    positions: int
    tipped: tuple[float, float] | None = None

    @property
    def significant(self) -> bool:
        """Whether rounding does not explain the difference. Where a router chooses, single positions may tip over: then their number decides."""
        if self.typical > OUTPUT_FACTOR * self.typical_noise + _EXACT:
            return True
        if self.tipped is not None:
            return self.tipped[0] > 5 * self.tipped[1] + 0.02
        return self.difference > OUTPUT_FACTOR * self.noise + _EXACT


@dataclass(frozen=True)
class _Probe:
    """Random inputs, and the function of a model on them: logits, or log-probabilities where only those count."""

    architecture: Architecture
    inputs: Tensor
    types: Tensor | None

    @staticmethod
    def random(architecture: Architecture, samples: int, length: int | None, seed: int) -> _Probe:
        tokens = isinstance(architecture.inputs, Tokens)
        inputs = random_inputs(architecture, samples, length=length if tokens else None, seed=seed, dtype=torch.float64)
        types = None
        if isinstance(architecture.inputs, Tokens) and architecture.inputs.types:
            types = torch.randint(architecture.inputs.types, inputs.shape, generator=torch.Generator().manual_seed(seed + 1))
        return _Probe(architecture, inputs, types)

    def short(self, length: int) -> _Probe:
        """The first positions only, where the architecture lets inputs be shortened."""
        if not isinstance(self.architecture.inputs, Tokens):
            return self
        return _Probe(self.architecture, self.inputs[:, :length], None if self.types is None else self.types[:, :length])

    def __call__(self, parameters: Parameters, architecture: Architecture | None = None) -> Tensor:
        """[points, classes or width]; parameters of any dtype, computed in float64."""
        a = self.architecture if architecture is None else architecture
        out = forward(a, _Doubled(parameters), self.inputs, types=self.types)
        return (out.log_softmax(-1) if a.probabilities else out).flatten(0, -2)


class _Doubled(Mapping[str, Tensor]):
    """Parameters in float64, cast as they are read."""

    def __init__(self, parameters: Parameters):
        self.parameters = parameters

    def __getitem__(self, name: str) -> Tensor:
        return self.parameters[name].to(torch.float64)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)


def _apart(x: Tensor, y: Tensor) -> Tensor:
    """Relative distance point by point; points of tiny output count by the typical size."""
    size = y.norm(dim=-1)
    return (x - y).norm(dim=-1) / torch.maximum(size, size.square().mean().sqrt() * 1e-3).clamp_min(torch.finfo(x.dtype).tiny)


def _sizes(architecture: Architecture) -> tuple[int, int]:
    """Samples and length of the inputs: far into the context for small models, an affordable way for large ones."""
    longest = architecture.length or 512
    if count(architecture) > _LARGE:
        return 1, min(longest, 512)
    return 2, min(longest, 512)


def _outputs(probe: _Probe, a: Side, b: Side, seed: int) -> Outputs:
    apart = probe(a.parameters)
    y_b = probe(b.parameters)
    apart = _apart(apart, y_b)
    near = probe.short(64 if count(probe.architecture) > _LARGE else 128)
    roundings = []
    for i, side in enumerate((a, b)):
        plain = y_b if i == 1 and near is probe else near(side.parameters)
        roundings.append(_apart(near(_Rounded(side, 7919 + 2 * seed + i)), plain))
    noise, typical = (max(float(value) for value in values) for values in zip(*((x.max(), x.median()) for x in roundings), strict=True))
    tipped = None
    if any(isinstance(layer.mlp, Experts) for layer in probe.architecture.layers):
        limit = 10 * typical + _EXACT
        tipped = float((apart > limit).double().mean()), max(float((x > limit).double().mean()) for x in roundings)
    return Outputs(float(apart.max()), float(apart.median()), noise, typical, probe.inputs.shape[1], tipped)


def invariance_error(
    architecture: Architecture,
    a: Parameters,
    b: Parameters,
    *,
    outputs: Literal["logits", "probabilities"] | None = None,
    samples: int | None = None,
    length: int | None = None,
    seed: int = 0,
) -> float:
    """Relative Frobenius distance of the outputs of two models on the same random inputs, computed in float64.

    Parameters
    ----------
    architecture
        Of both.
    a, b
        Canonical tensors by name, of any floating dtype.
    outputs
        Compare logits, or log-probabilities; default what the architecture says.
    samples, length
        Inputs, and tokens in each; by default few samples that reach far into the context.
    seed
        Of the inputs.

    Raises
    ------
    CosetError
        If the tensors are not those of the architecture, or `length` is not possible.

    Examples
    --------
    >>> from coset.architecture import uniform
    >>> from coset.transformer import initialise
    >>> architecture = uniform(pe="rope", layers=1, width=8, heads=2, vocab=11)
    >>> model = initialise(architecture, seed=0)
    >>> invariance_error(architecture, model, model)
    0.0
    """
    architecture = _with_outputs(architecture, outputs)
    check(architecture, a, "a")
    check(architecture, b, "b")
    usual = _sizes(architecture)
    probe = _Probe.random(architecture, usual[0] if samples is None else samples, usual[1] if length is None else length, seed)
    y_a, y_b = probe(a), probe(b)
    return float((y_a - y_b).norm() / y_b.norm())


def _with_outputs(architecture: Architecture, outputs: Literal["logits", "probabilities"] | None) -> Architecture:
    return architecture if outputs is None else dataclasses.replace(architecture, probabilities=outputs == "probabilities")


# --- the verdict ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A verdict with its evidence.

    Attributes
    ----------
    verdict
        ``identical`` bit for bit; ``equivalent`` by the element found; ``equivalent up to rounding``, the same for weights stored in less
        than float32; ``different``; or ``undecided``.
    residuals
        Of every tensor, in forward order, under the element found; empty if models are identical or no element could be sought.
    outputs
        None if the models are identical.
    first_difference
        For different models, the first layer (None: the ends) and tensor, in forward order, at which they part.
    reasons
        Why a case is undecided, and degenerate spots that were met.
    transform
        Carries A to B; None if no element was found.
    condition
        Largest condition number of the found element in every space, and the largest ratio of gains that it changes.
    detection_limit
        Smallest relative change that this comparison could tell from rounding: of ``weight``, one weight of typical size, and of
        ``tensor``, all entries of one tensor at random; at the median tensor.
    """

    verdict: Verdict
    residuals: tuple[Residual, ...] = ()
    outputs: Outputs | None = None
    first_difference: tuple[int | None, str] | None = None
    reasons: tuple[str, ...] = ()
    transform: Transform | None = None
    condition: Mapping[str, float] = dataclasses.field(default_factory=dict)
    detection_limit: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def equivalent(self) -> bool:
        """Whether the two are the same function, possibly up to the rounding of the stored weights."""
        return self.verdict in ("identical", "equivalent", "equivalent up to rounding")

    @property
    def residual(self) -> Residual | None:
        """The tensor with the largest relative residual."""
        return max(self.residuals, key=lambda r: r.relative, default=None)

    def to_json(self, transform: str | None = None) -> dict[str, Any]:
        """Plain data with the keys that scripts rely on; `transform` is where the element was saved."""
        worst, out = self.residual, self.outputs
        clear = max(self.residuals, key=lambda r: r.peak, default=None)
        return {
            "verdict": self.verdict,
            "residual": {
                "max": worst.relative if worst else (0.0 if self.verdict == "identical" else None),
                "tensor": worst.tensor if worst else None,
                "peak": None if clear is None else {"deviations": clear.peak, "tensor": clear.tensor},
                "significant": [r.tensor for r in self.residuals if r.significant],
            },
            "outputs": {
                "max_relative_difference": out.difference if out else 0.0,
                "positions": out.positions if out else 0,
                "median_relative_difference": out.typical if out else 0.0,
                "noise": out.noise if out else 0.0,
            },
            "first_difference": None
            if self.first_difference is None
            else dict(zip(("layer", "tensor"), self.first_difference, strict=True)),
            "reasons": list(self.reasons),
            "transform": transform,
            "condition": dict(self.condition),
            "detection_limit": dict(self.detection_limit),
        }

    def summary(self) -> str:
        """The evidence in a few lines."""
        lines: list[str] = [self.verdict]
        if self.residual is not None:
            lines.append(f"largest residual {self.residual.relative:.3g} (relative Frobenius norm) in {self.residual.tensor}")
        if self.outputs is not None:
            lines.append(
                f"outputs differ by at most {self.outputs.difference:.3g} over positions 0 to {self.outputs.positions - 1}; "
                f"rounding alone does {self.outputs.noise:.3g}"
            )
        if self.first_difference is not None:
            layer, tensor = self.first_difference
            lines.append(f"first difference: {'ends' if layer is None else f'layer {layer}'}, {tensor}")
        return "\n".join([*lines, *self.reasons])


@dataclass(frozen=True)
class _Found:
    pair: _Pair
    transform: Transform
    residuals: list[Residual]

    @property
    def exact(self) -> bool:
        return not any(r.significant for r in self.residuals)


def compare(
    architecture: Architecture,
    a: Parameters,
    b: Parameters,
    *,
    outputs: Literal["logits", "probabilities"] | None = None,
    length: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Comparison:
    """Decide whether two models are the same function.

    Parameters
    ----------
    architecture
        Of both.
    a, b
        Canonical tensors by name. Their dtypes count as the precision in which they are stored, and decide how much rounding explains.
    outputs
        What must agree: ``logits``, or ``probabilities``, which forget a uniform shift of the logits. Default what the architecture says.
    length
        Tokens of the random inputs. Default: 512, or the longest context.
    seed
        Of the random inputs and roundings.
    progress
        Called with what is being done, how many blocks are done, and of how many.

    Returns
    -------
    Comparison

    Raises
    ------
    CosetError
        If the tensors are not those of the architecture, or hold NaN or infinity.

    Examples
    --------
    >>> from coset.architecture import uniform
    >>> from coset.transform import random_transform
    >>> from coset.transformer import initialise
    >>> architecture = uniform(pe="rope", layers=1, width=8, heads=2, vocab=11, eps=0.0)
    >>> model = initialise(architecture, seed=0)
    >>> scrambled = random_transform(architecture, model, seed=1)(model)
    >>> compare(architecture, model, scrambled).verdict
    'equivalent'
    >>> scrambled["layers.0.attention.q"][0, 0, 0, 0] *= 1.001
    >>> compare(architecture, model, scrambled).first_difference
    (0, 'layers.0.attention.q')
    """
    check(architecture, a, "a")
    check(architecture, b, "b")
    chosen = _with_outputs(architecture, outputs)
    return compare_sides(chosen, Side.of(chosen, a), Side.of(chosen, b), length=length, seed=seed, progress=progress)


def compare_sides(
    architecture: Architecture,
    a: Side,
    b: Side,
    *,
    pinned: tuple[str, ...] = (),
    length: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Comparison:
    """:func:`compare` for models that may be lazy and stored in other dtypes than they are read in; not checked tensor by tensor.

    Parameters
    ----------
    pinned
        Tensors that must stay as they are, because something outside the architecture reads them too.
    """
    if all(a.dtypes[n] == b.dtypes[n] and _same_bits(a.parameters[n], b.parameters[n]) for n in tensors(architecture)):
        return Comparison("identical")
    usual = _sizes(architecture)
    probe = _Probe.random(architecture, usual[0], usual[1] if length is None else length, seed)
    out = _outputs(probe, a, b, seed)
    if progress is not None:
        progress("outputs", 1, 1)
    search = _Search(architecture, a, b, pinned, seed, progress)
    reasons: list[str] = search.reasons
    agree: Verdict = "equivalent up to rounding" if a.coarse or b.coarse else "equivalent"

    def settled(verdict: Verdict, by: _Found | None, first: tuple[int | None, str] | None = None) -> Comparison:
        kept = by.transform if by is not None and verdict == agree else None
        return Comparison(
            verdict,
            () if by is None else tuple(by.residuals),
            out,
            first,
            tuple(dict.fromkeys(reasons)),
            kept,
            {} if by is None else condition(by.transform),
            {} if by is None else _limits(by.residuals),
        )

    if out.significant:
        found = search.from_the_ends() or search.matched()
        if found is not None and found.exact and (a.coarse or b.coarse):
            # Weights that agree to a coarse rounding: a model that amplifies rounding explains the outputs as well as a difference does.
            reasons.append("the weights agree to rounding while the outputs do not: the model amplifies the rounding of its stored weights")
            return settled("undecided", found)
        return settled("different", found, None if found is None else _first_difference(found))
    # The outputs agree, so an element that is not exact was not searched for well enough, or does not exist. One pass settles most cases.
    found = None
    attempts: tuple[Callable[[], _Found | None], ...] = (lambda: search.matched(1), search.from_the_ends, search.matched)
    for attempt in attempts:
        found = attempt() or found
        if found is not None and found.exact:
            return settled(agree, found)
    if found is None:
        reasons += _spots(architecture, a, b, None)
        return settled("undecided", None)
    reasons += _spots(architecture, a, b, found.pair)
    kind = _hidden(probe, found, out)
    if kind == "small" and not reasons:
        return settled("different", found, _first_difference(search.from_the_ends() or found))
    reasons.append(_WHY[kind])
    return settled("undecided", found)


_WHY = {
    "small": "a residual beyond rounding remains, too small to show in the outputs; in a degenerate model that does not prove a difference",
    "invisible": "the residual lies in directions that the outputs do not see: a freedom of this model that is not searched",
    "large": "the outputs agree, but no element that explains it was found: the search may have failed",
}


@dataclass
class _Search:
    """The search for an element between two models, and why it was narrowed."""

    architecture: Architecture
    a: Side
    b: Side
    pinned: tuple[str, ...]
    seed: int
    progress: Progress | None
    reasons: list[str] = dataclasses.field(default_factory=list)

    def _step(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress("residuals", done, total)

    def matched(self, cycles: int = _CYCLES) -> _Found | None:
        """By alignment of the whole model; with fewer spaces where the gauge of a model cannot be folded."""
        for spaces in (SPACES, _UNGAUGED):
            try:
                transform = match(
                    self.architecture,
                    self.b.parameters,
                    self.a.parameters,
                    spaces=spaces,
                    cycles=cycles,
                    pinned=self.pinned,
                    progress=self.progress,
                ).transform
                pair = _Pair(self.architecture, self.a, self.b, tuple(transform.target))
                return _Found(pair, transform, residuals(pair, transform.element, self.seed, self._step))
            except CosetError as error:
                self._narrowed(error)
        return None

    def from_the_ends(self) -> _Found | None:
        """Layer by layer, with the stream taken from the input tables alone, so that no layer can spoil those in front of it.

        None where the tables do not determine the stream, or a gauge cannot be folded.
        """
        pair = _Pair(self.architecture, self.a, self.b, gauge_names(self.architecture, SPACES, self.pinned))
        start: dict[str, Element] = {}
        try:
            if "stream" in pair.groups:
                g = _stream_of_inputs(pair)
                if g is None:
                    return None
                start["stream"] = g
            other, reference = pair.lazy(pair.a.parameters, start), pair.lazy(pair.b.parameters)
            inner = match(pair.folded, reference, other, spaces=_INNER, progress=self.progress).transform.element
            element = _refitted(pair, {**start, **inner})
            source, target = (read_gauge(self.architecture, side.parameters, pair.names) for side in (self.a, self.b))
            transform = Transform(self.architecture, element, source, target)
            return _Found(pair, transform, residuals(pair, element, self.seed, self._step))
        except CosetError as error:
            self._narrowed(error)
            return None

    def _narrowed(self, error: CosetError) -> None:
        reason = f"degenerate gauge: {error}"
        if reason not in self.reasons:
            self.reasons.append(reason)


def _spots(architecture: Architecture, a: Side, b: Side, pair: _Pair | None) -> list[str]:
    eps = max(torch.finfo(d).eps for side in (a, b) for d in side.dtypes.values())
    if pair is None:
        return list(degeneracies(architecture, _Doubled(b.parameters), eps))
    found = list(degeneracies(pair.folded, pair.lazy(b.parameters), eps))
    for side in (a, b):
        for name, value in read_gauge(architecture, side.parameters, pair.names).items():
            if name.endswith("norm.gain") and bool((value == 0).any()):
                found.append(f"{name} is zero on {int((value == 0).sum())} lanes: what is read there is invisible")
    return found


def _limits(found: list[Residual]) -> dict[str, float]:
    noise = torch.tensor([r.noise for r in found if r.noise > 0], dtype=torch.float64)
    if not len(noise):
        return {}
    middle = float(noise.median())
    return {"weight": PEAK * middle, "tensor": math.sqrt(SPREAD) * middle}


def condition(transform: Transform) -> dict[str, float]:
    """Largest condition number of an element's matrices and scales, by space, and the largest ratio of gains that it changes."""
    out = {"stream": 1.0, "qk": 1.0, "vo": 1.0, "neurons": 1.0, "gains": 1.0}

    def raise_to(space: str, value: float) -> None:
        out[space] = max(out[space], value)

    def of(space: str, g: Element) -> None:
        if isinstance(g, MonomialElement):
            size = g.scale.abs()
            raise_to(space, float((size.amax(-1) / size.amin(-1)).max()))
        elif isinstance(g, Tensor) and g.is_floating_point() and g.ndim >= 2 and g.shape[-1] == g.shape[-2]:
            raise_to(space, float(torch.linalg.cond(g).max()))

    for key, g in transform.element.items():
        if key == "stream":
            of("stream", g)
        elif key.endswith(".heads"):
            if transform.architecture.layers[int(key.split(".")[1])].attention.qk_norm is None:
                of("qk", g.inner["qk"])  # else signs
            of("vo", g.inner["vo"])
        else:
            of("neurons", getattr(g, "inner", g))
    for name, value in transform.target.items():
        if name.endswith("norm.gain"):
            ratio = (transform.source[name] / value).abs()
            alive = ratio[torch.isfinite(ratio) & (ratio > 0)]
            if len(alive):
                raise_to("gains", float(alive.max() / alive.min()))
    return out


# --- harder cases ---------------------------------------------------------------------------------------------------


def _stream_of_inputs(pair: _Pair) -> Element | None:
    """The stream's element from what is added at the input alone, where that determines it; no later layer can spoil it."""
    group = pair.groups["stream"]
    a, b = ({n: x for n, x in pair.normal(s.parameters, None).items() if n.startswith("embed.")} for s in (pair.a, pair.b))
    products = StreamProducts.zero(pair.architecture.width, group)
    products.add(pair.folded, b, a)
    free = pair.architecture.width
    if isinstance(group, GeneralLinear):
        if group.fixed is not None or products.grams is None:
            return None
        gram = products.grams["q"]
        values = torch.linalg.eigvalsh(gram)
        return torch.linalg.solve(gram, products.writers) if bool(values[0] > 1e-10 * values[-1]) else None
    if isinstance(group, Orthogonal):
        values = torch.linalg.svdvals(products.writers)
        fixed = 0 if group.fixed is None else len(group.fixed)
        if not bool(values[free - fixed - 1] > 1e-10 * values[0]):
            return None
    return products.solve(group)[0]


def _refitted(pair: _Pair, element: Mapping[str, Element]) -> dict[str, Element]:
    """The element with bases inside heads and scales of neurons solved once more as linear equations, which do not mind factors that vanish."""
    out = dict(element)
    for i in range(len(pair.architecture.layers)):
        a = move(pair.folded, element, pair.normal(pair.a.parameters, i))
        b = pair.normal(pair.b.parameters, i)
        key = f"layers.{i}.heads"
        heads = pair.groups[key]
        assert isinstance(heads, Wreath)
        sides = [head_features(pair.folded, i, p) for p in (b, a)]
        delta = WreathElement(heads.top.identity(), {**heads.identity().inner, **least_squares_within(heads, *sides)})
        out[key] = heads.compose(element[key], delta)
        key = f"layers.{i}.neurons"
        scaled = pair.groups[key].inner if isinstance(pair.groups[key], Wreath) else pair.groups[key]  # type: ignore[attr-defined]
        if isinstance(scaled, Monomial) and scaled.scales != "sign":
            f_b, f_a = (neuron_features(pair.folded, i, p) for p in (b, a))
            top = (f_a.covariant * f_b.covariant).sum(-2) + (f_a.dual * f_b.dual).sum(-2)
            size = f_a.covariant.square().sum(-2) + f_b.dual.square().sum(-2)
            fine = (size > 0) & ((top > 0) | ((top < 0) & (scaled.scales == "nonzero")))
            c = MonomialElement(torch.arange(scaled.n).expand(top.shape), torch.where(fine, top / torch.where(fine, size, 1.0), 1.0))
            group = pair.groups[key]
            if isinstance(group, Wreath):
                out[key] = group.compose(element[key], WreathElement(group.top.identity(), c))
            else:
                out[key] = group.compose(element[key], c)
    return out


def _first_difference(found: _Found) -> tuple[int | None, str] | None:
    """The first layer, in forward order, with a residual that rounding does not explain, and the clearest such tensor in it."""
    parted = [r for r in found.residuals if r.significant]
    if not parted:
        return None
    # A head or neuron that is matched across a difference spreads it over its layer.
    worst = max((r for r in parted if r.layer == parted[0].layer), key=lambda r: r.peak)
    return worst.layer, worst.tensor


def _hidden(probe: _Probe, found: _Found, out: Outputs) -> Literal["small", "invisible", "large"]:
    """What a significant residual means that the outputs do not show.

    The moved model has the function of A exactly, so going from B a multiple s of the residual must change the outputs s times as much as
    they differ now, if the residual is small and visible. It is ``invisible`` if it changes them far less than a random change of the
    same tensors of equal size; ``large`` if far more than s times the difference: then the straight line is not what connects the two.
    """
    pair, element = found.pair, found.transform.element
    changed = {r.tensor for r in found.residuals if r.significant}
    size = max(r.relative for r in found.residuals if r.tensor in changed)
    stretch = max(1.0, 0.05 / max(size, 1e-15))
    near = probe.short(128)
    base = near(pair.lazy(pair.b.parameters), pair.folded)

    def moved(random: bool) -> Tensor:
        def make(index: int | None) -> dict[str, Tensor]:
            b = pair.normal(pair.b.parameters, index)
            a = move(pair.folded, element, pair.normal(pair.a.parameters, index))
            for number, name in enumerate(b):
                if name in changed:
                    step = a[name] - b[name]
                    if random:
                        noise = torch.randn(step.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
                        step = noise * (step.norm() / noise.norm())
                    b[name] = b[name] + stretch * step
            return b

        return near(_Lazy(pair.folded, make), pair.folded)

    along = float(_apart(moved(False), base).mean())
    across = float(_apart(moved(True), base).mean())
    if along < _VISIBLE * across:
        return "invisible"
    return "small" if along <= stretch * OUTPUT_FACTOR * (out.noise + _EXACT) else "large"


def assert_equivalent(
    architecture: Architecture,
    a: Parameters,
    b: Parameters,
    *,
    outputs: Literal["logits", "probabilities"] | None = None,
    length: int | None = None,
    seed: int = 0,
) -> Comparison:
    """Raise unless two models are the same function: for test suites, of checkpoint converters for instance.

    Parameters
    ----------
    architecture, a, b, outputs, length, seed
        See :func:`compare`.

    Returns
    -------
    Comparison

    Raises
    ------
    AssertionError
        If they are different or the case is undecided, with the evidence.
    CosetError
        If the tensors are not those of the architecture.
    """
    found = compare(architecture, a, b, outputs=outputs, length=length, seed=seed)
    if not found.equivalent:
        raise AssertionError(f"the two models are not known to be the same function: {found.summary()}")
    return found


__all__ = [
    "Comparison",
    "Outputs",
    "Residual",
    "Side",
    "assert_equivalent",
    "compare",
    "compare_sides",
    "condition",
    "invariance_error",
    "residuals",
]
