"""Alignment: bring one model to another, space by space, until the distance stops falling.

    minimise  Σ_tensors ‖A − g·B‖²   over the group elements g of the chosen spaces.

Each step is exact for its space, given the others: heads (stage 1 and stage 2), neurons, stream. Layers are read one at a time, so a
pair of checkpoints need never be in memory whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from coset.alignment.features import Metric, NeuronFeatures, head_features, metric_factor, neuron_features, stacked
from coset.alignment.heads import Solvers, match_heads
from coset.alignment.neurons import invariants, match_neurons, order_by_invariants, rescale
from coset.alignment.pair import Match, Pair, Progress, Step
from coset.alignment.stream import StreamProducts
from coset.architecture import Architecture
from coset.errors import CosetError
from coset.groups import Element, Group, Monomial, MonomialElement, Permutation, Wreath
from coset.normal_form import coordinates, fold, folded_architecture, unfold
from coset.parameters import Parameters, tensors
from coset.symmetries import group as symmetry_group
from coset.transform import SPACES, move

DEFAULT_SOLVERS = Solvers()
_PIECE = 1 << 18

_CLOSE = 1e-5
"""Squared distance at which no other start of the stream is tried, relative to that of unrelated models: above what rounding to bf16 does."""

Proposal = Callable[[], tuple[Element, list[str]]]
"""An element that may bring a layer closer, and notes."""


def _block(architecture: Architecture, index: int | None) -> list[str]:
    return [name for name, spec in tensors(architecture).items() if spec.layer == index]


class _Problem(Pair):
    """A pair in the gauge of the matching, read one block at a time.

    Where the stream stays, both sides get the reference's gains, so that distances are those of the weights that will be interpolated.
    """

    def __init__(
        self,
        architecture: Architecture,
        reference: Parameters,
        other: Parameters,
        *,
        spaces: tuple[str, ...],
        layers: tuple[int, ...] | None,
        metric: Metric | None,
        pinned: tuple[str, ...],
    ):
        super().__init__(architecture, reference, other, spaces=spaces, layers=layers, pinned=pinned)
        self.metric = metric
        # The scale between query and key gains travels with the heads, so it stays folded while heads are matched.
        self.kept = () if "stream" in self.groups else tuple(n for n in self.names if n.endswith(".gain"))
        self.working = folded_architecture(architecture, [n for n in self.names if n not in self.kept])
        self.blocks: list[int | None] = [None, *range(len(architecture.layers))]
        self._factors: dict[str, Tensor] = {}

    def _read(self, p: Parameters, index: int | None) -> dict[str, Tensor]:
        return {name: p[name].to(torch.float64) for name in _block(self.architecture, index)}

    def _view(self, normal: Parameters) -> dict[str, Tensor]:
        return unfold(self.architecture, normal, {n: self.target[n] for n in self.kept}) if self.kept else dict(normal)

    def a(self, index: int | None) -> dict[str, Tensor]:
        """Block of the reference."""
        return self._view(fold(self.architecture, self._read(self.reference, index), self.names)[1])

    def b(self, index: int | None, element: Mapping[str, Element]) -> dict[str, Tensor]:
        """Block of the other model after `element`."""
        return self.moved(element, self.given(index))

    def given(self, index: int | None) -> dict[str, Tensor]:
        """Block of the other model in normal form, where nothing has moved."""
        return fold(self.architecture, self._read(self.other, index), self.names)[1]

    def moved(self, element: Mapping[str, Element], normal: Parameters) -> dict[str, Tensor]:
        """A block in normal form after `element`."""
        return self._view(move(self.folded, element, normal))

    def factor(self, site: str) -> Tensor | None:
        """Factor of the metric at a site, in the gauge of the matching. The two latest are kept: those of one layer."""
        if self.metric is None:
            return None
        if site not in self._factors:
            while len(self._factors) > 1:
                del self._factors[next(iter(self._factors))]
            self._factors[site] = metric_factor(self.metric, site, self.architecture.width + 1, torch.float64)
        return self._factors[site]

    def untouched(self, index: int | None) -> bool:
        """Whether nothing that is moved or folded reaches the block, so that its distance stays what it is."""
        owners = {c.layer for name, c in coordinates(self.architecture).items() if name in self.names}
        return index is None and "stream" not in self.groups and None not in owners

    def gaps(self, a: Parameters, b: Parameters, names: Iterable[str]) -> dict[str, float]:
        """Squared distances of tensors of two blocks. Where there is a metric, readers inside layers are measured in it, each with its bias."""
        if self.metric is None:
            return {name: squared_gap(a[name], b[name]) for name in names}
        gap, specs = {name: a[name] - b[name] for name in names}, tensors(self.working)
        out = {}
        for name in list(gap):
            spec, axis = specs[name], specs[name].axis("stream")
            if spec.layer is None or axis is None or spec.axes[axis].variance != -1:
                continue
            part = "attention" if ".attention." in name else "mlp"
            reader, bias = gap.pop(name).movedim(axis, 0), gap.pop(f"{name}_bias", None)
            out[name] = float(stacked(reader, bias, self.factor(f"layers.{spec.layer}.{part}.input")).square().sum())
        return out | {name: float(x.square().sum()) for name, x in gap.items()}


def squared_gap(x: Tensor, y: Tensor) -> float:
    """``‖x − y‖²``, piece by piece along the slowest axis, so that differences never leave the cache."""
    if x.numel() <= _PIECE:
        return float(torch.dist(x, y)) ** 2
    axis = max(range(x.ndim), key=x.stride)
    rows = max(1, _PIECE * x.shape[axis] // x.numel())
    return sum(float(torch.dist(p, q)) ** 2 for p, q in zip(torch.split(x, rows, axis), torch.split(y, rows, axis), strict=True))


def _improve(
    problem: _Problem,
    key: str,
    a: Parameters,
    b: Parameters,
    gaps: dict[str, float],
    element: dict[str, Element],
    proposals: list[Proposal],
) -> tuple[Parameters, float, list[str]]:
    """Take the first proposal that does not raise the distance; keep what is there if none does.

    Updates `gaps` and `element`. Returns the moved block, how far the distance fell, and the last proposal's notes.
    """
    notes: list[str] = []
    for propose in proposals:
        delta, notes = propose()
        moved = move(problem.working, {key: delta}, b)
        after = problem.gaps(a, moved, [name for name, x in moved.items() if x is not b[name]])
        fell = sum(gaps[name] for name in after) - sum(after.values())
        if fell >= -1e-12 * sum(gaps[name] for name in after):
            element[key] = problem.groups[key].compose(element[key], delta) if key in element else delta
            gaps |= after
            return moved, max(0.0, fell), notes
    return b, 0.0, notes


def _improve_heads(
    problem: _Problem,
    i: int,
    a: Parameters,
    b: Parameters,
    gaps: dict[str, float],
    element: dict[str, Element],
    solvers: Solvers,
    spaces: tuple[str, ...],
) -> tuple[Parameters, float, list[str]]:
    """One step over the heads of layer i; see `_improve`."""
    w, key = problem.working, f"layers.{i}.heads"
    group = problem.groups[key]
    assert isinstance(group, Wreath)
    factor = problem.factor(f"layers.{i}.attention.input")
    sides = [head_features(w, i, p, factor) for p in (a, b)]
    circuits = (head_features(w, i, a, factor, circuits=True), head_features(w, i, b, factor, circuits=True))
    proposals: list[Proposal] = [
        lambda: match_heads(group, sides[0], sides[1], circuits, solvers, spaces),
        lambda: match_heads(group, sides[0], sides[1], circuits, solvers, spaces, permute="keep"),
    ]
    b, fell, notes = _improve(problem, key, a, b, gaps, element, proposals)
    return b, fell, [f"layer {i}: {n}" for n in notes]


def _improve_neurons(
    problem: _Problem, i: int, a: Parameters, b: Parameters, gaps: dict[str, float], element: dict[str, Element], spaces: tuple[str, ...]
) -> tuple[Parameters, float]:
    """One step over the neurons of layer i; see `_improve`."""
    key = f"layers.{i}.neurons"
    group = problem.groups[key]
    factor = problem.factor(f"layers.{i}.mlp.input")
    f_a, f_b = (neuron_features(problem.working, i, p, factor) for p in (a, b))
    proposals: list[Proposal] = [lambda: (match_neurons(group, f_a, f_b, spaces), [])]
    if isinstance(group, Monomial):
        proposals.append(lambda: (rescale(group, f_a, f_b), []))
    b, fell, _ = _improve(problem, key, a, b, gaps, element, proposals)
    return b, fell


@dataclass(frozen=True)
class _Run:
    """What cycles over all spaces gave.

    Attributes
    ----------
    element, steps, notes
        The element, the objective step by step, and notes of the last pass.
    given
        Squared distance of the models as they are given: before the start, too.
    size
        Squared norm of the reference; zero where the stream stays.
    """

    element: dict[str, Element]
    steps: list[Step]
    notes: list[str]
    given: float
    size: float

    @property
    def reached(self) -> float:
        return self.steps[-1].objective


def _run(
    problem: _Problem,
    element: dict[str, Element],
    *,
    solvers: Solvers,
    cycles: int,
    tolerance: float,
    progress: Progress | None,
) -> _Run:
    """Cycle over all spaces from a start."""
    element, spaces = dict(element), problem.spaces
    steps: list[Step] = []
    notes: list[str] = []
    moves_stream = "stream" in problem.groups
    previous, given, size = math.inf, 0.0, 0.0
    for cycle in range(cycles):
        notes = []
        products = StreamProducts.zero(problem.architecture.width, problem.groups["stream"]) if moves_stream else None
        total, size = 0.0, 0.0
        falls: list[tuple[str, float]] = []
        for done, index in enumerate(problem.blocks):
            if progress is not None:
                progress(f"cycle {cycle + 1}", done, len(problem.blocks))
            if problem.untouched(index):
                # A tensor at a time: vocabularies are large.
                total += sum(squared_gap(problem.reference[name], problem.other[name]) for name in _block(problem.architecture, index))
                continue
            a: Parameters = problem.a(index)
            normal = problem.given(index)
            if moves_stream and cycle == 0:
                given += sum(problem.gaps(a, normal, a).values())
            b: Parameters = problem.moved(element, normal)
            del normal
            gaps = problem.gaps(a, b, a)
            total += sum(gaps.values())
            size += sum(float(torch.linalg.vector_norm(x)) ** 2 for x in a.values()) if moves_stream else 0.0
            if index is not None and problem.moves(index, "heads"):
                b, fell, found = _improve_heads(problem, index, a, b, gaps, element, solvers, spaces)
                falls.append((f"layer {index} heads", fell))
                notes += found
            if index is not None and problem.moves(index, "neurons"):
                b, fell = _improve_neurons(problem, index, a, b, gaps, element, spaces)
                falls.append((f"layer {index} neurons", fell))
            if products is not None:
                products.add(problem.working, a, b)
        started = total
        if cycle == 0:
            steps.append(Step("start", total))
        for name, fell in falls:
            total = max(0.0, total - fell)
            steps.append(Step(name, min(total, steps[-1].objective)))
        if products is None:
            break
        group = problem.groups["stream"]
        delta, fell = products.solve(group)
        if fell > -1e-13 * size:  # to rounding; close to an exact fit the last digits are gained so
            element["stream"] = group.compose(element["stream"], delta) if "stream" in element else delta
            total = max(0.0, total - fell)
        steps.append(Step("stream", min(total, steps[-1].objective)))
        if previous - started <= tolerance * started or started <= 1e-28 * size:
            break
        previous = started
    return _Run(element, steps, notes, given if moves_stream else steps[0].objective, size)


def _stream_starts(problem: _Problem) -> Iterator[tuple[str, Element]]:
    """Where to start the stream: from the ends of the model; from neurons, matched by what no rotation changes; and as it is."""
    group, width = problem.groups["stream"], problem.architecture.width
    products = StreamProducts.zero(width, group)
    products.add(problem.working, problem.a(None), problem.b(None, {}))
    yield "ends", products.solve(group)[0]
    neurons = [symmetry_group(problem.working).factors[f"layers.{i}.neurons"] for i in range(len(problem.architecture.layers))]
    if not any(isinstance(g, Wreath) for g in neurons):
        for i, own in enumerate(neurons):
            _add_neurons(problem, i, own, problem.a(i), problem.b(i, {}), products)
        yield "neurons", products.solve(group)[0]
    yield "as it is", group.identity()


def _add_neurons(problem: _Problem, i: int, group: Group, a: Parameters, b: Parameters, products: StreamProducts) -> None:
    """Accumulate what layer i's MLP says of the stream, its neurons put in order by invariants."""
    f_a, f_b = (neuron_features(problem.working, i, p) for p in (a, b))
    order = order_by_invariants(invariants(group, f_a), invariants(group, f_b))
    delta: Element = order if isinstance(group, Permutation) else MonomialElement(order, torch.ones(len(order), dtype=torch.float64))
    moved: Parameters = move(problem.working, {f"layers.{i}.neurons": delta}, b)
    names = [n for n in a if ".mlp." in n]
    if isinstance(group, Monomial) and group.scales in ("sign", "nonzero"):
        # The sign of a neuron is not known yet; a gate has none, and finds the stream by itself.
        names = [n for n in names if n.endswith((".gate", ".gate_bias"))]
    elif isinstance(group, Monomial):
        f_b = neuron_features(problem.working, i, moved)
        moved = move(problem.working, {f"layers.{i}.neurons": _balanced(group, f_a, f_b)}, moved)
    products.add(problem.working, {n: a[n] for n in names}, {n: moved[n] for n in names})


def _balanced(group: Monomial, f_a: NeuronFeatures, f_b: NeuronFeatures) -> MonomialElement:
    """Positive scales that give B's neurons the same ratio of norms, read to written, as A's."""
    ratio = []
    for f in (f_a, f_b):
        up, down = f.covariant.square().sum(-2), f.dual.square().sum(-2)
        fine = (up > 0) & (down > 0)
        ratio.append(torch.where(fine, up / torch.where(fine, down, torch.ones_like(down)), torch.ones_like(up)).pow(0.25))
    return MonomialElement(torch.arange(group.n), ratio[0] / ratio[1])


def match(
    architecture: Architecture,
    reference: Parameters,
    other: Parameters,
    *,
    spaces: tuple[str, ...] = SPACES,
    layers: tuple[int, ...] | None = None,
    metric: Metric | None = None,
    solvers: Solvers = DEFAULT_SOLVERS,
    cycles: int = 100,
    tolerance: float = 1e-6,
    pinned: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> Match:
    """Find the transform that brings `other` to `reference`, without applying it, and without checking every tensor first.

    Parameters
    ----------
    architecture
        Of both models.
    reference, other
        Canonical tensors by name. Any mapping will do; tensors are asked for block by block, so that a lazy one keeps memory at a layer.
    spaces
        What may move, of ``heads, qk, vo, neurons, experts, gains, shifts, stream``. The paper's two-stage algorithm is ``("heads", "qk", "vo")``.
    layers
        Layers whose heads and neurons are matched; default all.
    metric
        Second moments of the layers' inputs (`input_moments`), which replace the identity in the inner products of everything that reads
        the stream. Needs the stream in place: not together with the space ``stream``.
    solvers
        How stage 2 is solved.
    cycles, tolerance
        With the stream, the cycle over all spaces ends when a pass lowers the objective by less than this fraction.
    pinned
        Tensors that must stay as they are, because something outside the architecture reads them too.
    progress
        Called with what is being done, how many blocks are done, and of how many.

    Returns
    -------
    Match

    Raises
    ------
    CosetError
        If spaces are unknown, nothing can move, or the metric does not fit.
    """
    if metric is not None and "stream" in spaces:
        raise CosetError(
            "metric: it is tied to the basis of the stream, so it cannot be used while the space stream moves; leave one of them out"
        )
    problem = _Problem(architecture, reference, other, spaces=spaces, layers=layers, metric=metric, pinned=pinned)

    def run(first: dict[str, Element], passes: int) -> _Run:
        return _run(problem, first, solvers=solvers, cycles=passes, tolerance=tolerance, progress=progress)

    if "stream" not in problem.groups:
        best = run({}, 1)
        history = best.steps
    else:
        tried: list[tuple[str, _Run]] = []
        for name, g in _stream_starts(problem):
            latest = run({"stream": g}, 1)
            tried.append((name, latest))
            # Models that are near each other as they are given start near, so the distance counts against two unrelated ones' as well.
            if latest.reached <= _CLOSE * max(latest.given, 2 * latest.size):
                break  # the models are equivalent, or nearly so: no other start can matter
        name, best = min(tried, key=lambda t: t[1].reached)
        start = best.given
        history = [Step("start", start), Step(f"first pass (stream started {name})", min(best.reached, start))]
        if cycles > 1:
            best = run(best.element, cycles - 1)
            history += [Step(s.name, min(s.objective, history[-1].objective)) for s in best.steps[1:]]
    return Match(problem.transform(best.element), tuple(history), (*problem.notes, *best.notes))
