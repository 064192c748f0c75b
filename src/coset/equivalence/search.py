"""The recovery of the element that carries one model to the other, by alignment or layer by layer from the input tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from coset.alignment.features import head_features, neuron_features
from coset.alignment.heads import least_squares_within
from coset.alignment.matching import match
from coset.alignment.pair import Progress
from coset.alignment.stream import StreamProducts
from coset.architecture import Architecture
from coset.equivalence.residual import PEAK, SPREAD, Pair, Residual, residuals
from coset.equivalence.sides import Side
from coset.errors import CosetError
from coset.groups import Element, GeneralLinear, Monomial, MonomialElement, Orthogonal, Wreath, WreathElement
from coset.normal_form import compatible_gauge, read_gauge
from coset.parameters import tensors
from coset.transform import SPACES, Transform, gauge_names, move

_CYCLES = 15
_CLEAR = 5.0
_INNER = ("heads", "qk", "vo", "neurons", "experts")
_UNGAUGED = tuple(s for s in SPACES if s not in ("gains", "stream"))


@dataclass(frozen=True)
class Found:
    """An element, and the residuals under it."""

    pair: Pair
    transform: Transform
    residuals: list[Residual]

    @property
    def exact(self) -> bool:
        return not any(r.significant for r in self.residuals)

    @property
    def local(self) -> bool:
        """Whether what rounding does not explain lies in one block (a layer, or the ends) and is clearly more than rounding.

        All other blocks are then explained, and with them the stream: only this block's own heads and neurons could fit better.
        """
        parted = [r for r in self.residuals if r.significant]
        return len({r.layer for r in parted}) == 1 and any(r.peak > _CLEAR * PEAK or r.spread > _CLEAR**2 * SPREAD for r in parted)


@dataclass
class Search:
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

    @cached_property
    def as_they_are(self) -> Found | None:
        """The identity, with bases fitted in the layer that differs, for models that agree to rounding as they are stored but for one block.

        None for all other models, and where a gauge cannot be folded.
        """
        apart: set[int | None] = set()
        for name, spec in tensors(self.architecture).items():
            x, y = (side.parameters[name].to(torch.float64) for side in (self.a, self.b))
            unit = self.a.unit(name) + self.b.unit(name)
            if spec.layer not in apart and float(torch.dist(x, y)) > 2 * unit * float(torch.linalg.vector_norm(y)):
                apart.add(spec.layer)
            if len(apart) > 1:
                return None
        pair = Pair(self.architecture, self.a, self.b, gauge_names(self.architecture, SPACES, self.pinned))
        try:
            identity: dict[str, Element] = {key: group.identity() for key, group in pair.groups.items()}
            return self._found(pair, _refitted(pair, identity, [i for i in apart if i is not None]))
        except CosetError as error:
            self._narrowed(error)
            return None

    def matched(self, cycles: int = _CYCLES) -> Found | None:
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
                pair = Pair(self.architecture, self.a, self.b, tuple(transform.target))
                return Found(pair, transform, residuals(pair, transform.element, self.seed, self._step))
            except CosetError as error:
                self._narrowed(error)
        return None

    @cached_property
    def from_the_ends(self) -> Found | None:
        """Layer by layer, with the stream taken from the input tables alone, so that no layer can spoil those in front of it.

        None where the tables do not determine the stream, or a gauge cannot be folded.
        """
        pair = Pair(self.architecture, self.a, self.b, gauge_names(self.architecture, SPACES, self.pinned))
        start: dict[str, Element] = {}
        try:
            if "stream" in pair.groups:
                g = _stream_of_inputs(pair)
                if g is None:
                    return None
                start["stream"] = g
            other, reference = pair.lazy(pair.a.parameters, start), pair.lazy(pair.b.parameters)
            inner = match(pair.folded, reference, other, spaces=_INNER, progress=self.progress).transform.element
            return self._found(pair, _refitted(pair, {**start, **inner}, range(len(self.architecture.layers))))
        except CosetError as error:
            self._narrowed(error)
            return None

    def _found(self, pair: Pair, element: Mapping[str, Element]) -> Found:
        """An element between normal forms as a transform from A's gauge to B's, with its residuals."""
        source, target = (read_gauge(self.architecture, side.parameters, pair.names) for side in (self.a, self.b))
        transform = Transform(self.architecture, element, source, compatible_gauge(target, source)[0])
        return Found(pair, transform, residuals(pair, element, self.seed, self._step))

    def _narrowed(self, error: CosetError) -> None:
        reason = f"degenerate gauge: {error}"
        if reason not in self.reasons:
            self.reasons.append(reason)


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


def _stream_of_inputs(pair: Pair) -> Element | None:
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


def _refitted(pair: Pair, element: Mapping[str, Element], layers: Iterable[int]) -> dict[str, Element]:
    """The element with some layers' bases inside heads and scales of neurons solved once more as linear equations.

    Those do not mind factors that vanish.
    """
    out = dict(element)
    for i in layers:
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
