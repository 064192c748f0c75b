r"""Many models in one gauge.

Every model gets one transform into the gauge of the first, the reference. The transform from model i to model j goes through that
common gauge, ``g_ij = g_i g_j^{-1}``, so that round trips cancel by construction: ``g_AB g_BC g_CA = 1``. Pairwise alignments do not do
that.

The transforms start as the alignments to the reference. With the weight matcher they are improved by generalised Procrustes rounds,

    minimise  Σ_i ‖g_i·B_i − M‖²,   M = mean_i g_i·B_i,   g of the reference fixed to 1:

every model is matched to the mean of the others, all at once, so the order of the models plays no part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coset.alignment.heads import Solvers
from coset.alignment.matching import DEFAULT_SOLVERS, match
from coset.alignment.pair import Match, Progress, Step
from coset.architecture import Architecture
from coset.errors import CosetError
from coset.normal_form import Gauge, fold, unfold
from coset.parameters import Parameters, blocks, check, tensors
from coset.symmetries import group as symmetry_group
from coset.transform import SPACES, Transform

Matcher = Callable[[Parameters, Parameters], Match]
"""From a reference and another model to the match that brings the other to the reference."""


_EQUAL = 1e-28
"""Squared relative distance below which models are equal to rounding."""


@dataclass(frozen=True)
class Consensus:
    """One transform for each model, all into the gauge of the first.

    Attributes
    ----------
    transforms
        In the order of the models. The first is the identity, bit for bit.
    history
        Total squared distance of the models to their mean, in the gauge of the matching: after aligning every model to the reference, then
        after every round that was kept; it falls. Empty where another matcher than the weights' was given.
    notes
        Degenerate spots, with the number of the model (the reference is model 0).
    """

    transforms: tuple[Transform, ...]
    history: tuple[Step, ...]
    notes: tuple[str, ...]

    def between(self, i: int, j: int) -> Transform:
        """The transform that carries model `i` to model `j`: into the common gauge, and out of it into the gauge of `j`.

        Raises
        ------
        CosetError
            If there is no such model.
        """
        for k in (i, j):
            if not 0 <= k < len(self.transforms):
                raise CosetError(f"consensus: there is no model {k}; they are numbered 0 to {len(self.transforms) - 1}")
        if j == 0:
            return self.transforms[i]
        back = self.transforms[j].inverse()
        return back if i == 0 else self.transforms[i].then(back)

    def aligned(self, models: Sequence[Parameters]) -> tuple[dict[str, Tensor], ...]:
        """The models (those that were aligned, in the same order) in the common gauge, float64."""
        self._count(models)
        return tuple(_apply(transform, model) for transform, model in zip(self.transforms, models, strict=True))

    def mean(self, models: Sequence[Parameters]) -> dict[str, Tensor]:
        """The mean of the models in the common gauge, float64; the order of the models after the first changes no bit of it."""
        self._count(models)
        order = _canonical_order(models)
        out: dict[str, Tensor] = {}
        for names in blocks(self.transforms[0].architecture):
            parts = [self.transforms[i]({name: models[i][name] for name in names}) for i in order]
            out |= _mean(parts)
        return {name: out[name] for name in tensors(self.transforms[0].architecture)}

    def _count(self, models: Sequence[Parameters]) -> None:
        if len(models) != len(self.transforms):
            raise CosetError(f"consensus: it holds {len(self.transforms)} models, got {len(models)}")


def _apply(transform: Transform, model: Parameters) -> dict[str, Tensor]:
    return transform({name: model[name] for name in tensors(transform.architecture)})


def _canonical_order(models: Sequence[Parameters]) -> list[int]:
    """Indices sorted by content: sums in this order give the same bits however the models were listed."""

    def key(model: Parameters) -> bytes:
        digest = hashlib.sha256()
        for name in sorted(model):
            digest.update(name.encode())
            digest.update(model[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.digest()

    keys = [key(model) for model in models]
    return sorted(range(len(models)), key=keys.__getitem__)


def _mean(models: Sequence[Parameters]) -> dict[str, Tensor]:
    """Mean of parameter mappings, summed in the order given."""
    out: dict[str, Tensor] = {}
    for name in models[0]:
        total = torch.zeros_like(models[0][name])
        for model in models:
            total += model[name]
        out[name] = total / len(models)
    return out


def align_many(
    architecture: Architecture,
    models: Sequence[Parameters],
    *,
    matcher: Matcher | None = None,
    spaces: tuple[str, ...] = SPACES,
    solvers: Solvers = DEFAULT_SOLVERS,
    cycles: int = 100,
    rounds: int = 3,
    tolerance: float = 1e-6,
    pinned: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> Consensus:
    r"""Bring many models of one architecture into one gauge, that of the first.

    Minimises ``Σ_i ‖g_i·B_i − M‖²`` with ``M = mean_i g_i·B_i`` over one group element a model, the reference's fixed to the identity. Every
    model is first aligned to the reference; then, in rounds, every model but the reference is matched to the mean of the others, all
    at once. A round that would raise the total is not taken (the same round against the mean of all models, which cannot raise
    it, is tried in its place).

    The order of the models after the first plays no part: the transforms are the same to the bit. The choice of the first does: the
    iteration starts from alignments to it, so it may end in another local minimum, and distances are measured in its gauge, which is
    another metric wherever the group is not compact (changes of basis inside heads, gains). Without rounds, or with another matcher,
    ``g_ij`` is the alignment through the reference.

    Parameters
    ----------
    architecture
        Of all models.
    models
        At least two; the first is the reference, and is left alone.
    matcher
        How a model is matched to another; every model is then matched to the reference, and there are no rounds, which need a distance
        of weights. Default: :func:`coset.alignment.match` with the arguments that follow.
    spaces, solvers, cycles, pinned
        For the default matcher; see there.
    rounds
        Largest number of rounds; each costs a match of every model, and the first few bring nearly all of the gain.
    tolerance
        A round that lowers the total by less than this fraction is the last; also the default matcher's.
    progress
        Called with what is being done, how many models are done, and of how many.

    Returns
    -------
    Consensus

    Raises
    ------
    CosetError
        If there are fewer than two models, if one does not fit the architecture, or if the matcher does not fold the same coordinates
        for every model.
    """
    if len(models) < 2:
        raise CosetError(f"models: expected a reference and at least one other, got {len(models)}")
    for i, model in enumerate(models):
        check(architecture, model, "reference" if i == 0 else f"model {i}")

    def weights(reference: Parameters, other: Parameters) -> Match:
        return match(architecture, reference, other, spaces=spaces, solvers=solvers, cycles=cycles, tolerance=tolerance, pinned=pinned)

    def matched(what: str, targets: Mapping[int, Parameters], others: Sequence[Parameters]) -> dict[int, Match]:
        out = {}
        for done, (i, target) in enumerate(targets.items()):
            if progress is not None:
                progress(what, done, len(targets))
            out[i] = (weights if matcher is None else matcher)(target, others[i])
        return out

    others = range(1, len(models))
    found = matched("alignment to the reference", dict.fromkeys(others, models[0]), models)
    if len({frozenset(m.transform.target) for m in found.values()}) > 1:
        raise CosetError("matcher: its transforms do not fold the same coordinates for every model, so they share no gauge")
    notes = tuple(f"model {i}: {note}" for i, m in found.items() for note in m.notes)
    transforms = (Transform(architecture, {}, {}, {}), *(found[i].transform for i in others))
    if matcher is not None:
        return Consensus(transforms, (), notes)

    problem = _Problem(architecture, models, transforms[1].target, _canonical_order(models), "stream" in transforms[1].element)
    state = problem.state(transforms)
    history = [Step("start", problem.state(_still(transforms)).spread), Step("alignment to the reference", state.spread)]
    size = sum(float(x.square().sum()) for x in state.normal[0].values())
    # Two models are at the minimum already: the mean of the others is the reference.
    for number in range(1, rounds + 1 if len(models) > 2 else 1):
        if state.spread <= _EQUAL * size:
            break
        better = None
        for every in (False, True):
            targets = {i: problem.raw(_mean([state.normal[j] for j in problem.order if every or j != i])) for i in others}
            deltas = matched(f"round {number}", targets, [problem.raw(normal) for normal in state.normal])
            trial = problem.state(_composed(state.transforms, deltas))
            if trial.spread < state.spread:
                better = trial
                break
        if better is None:
            break
        fell, state = state.spread - better.spread, better
        history.append(Step(f"round {number}", state.spread))
        if fell <= tolerance * state.spread:
            break
    return Consensus(state.transforms, tuple(history), notes)


def _still(transforms: Sequence[Transform]) -> tuple[Transform, ...]:
    """The same changes of gauge, and nothing moved."""
    groups = [symmetry_group(transform.folded).factors for transform in transforms]
    return tuple(replace(t, element={key: g[key].identity() for key in t.element}) for t, g in zip(transforms, groups, strict=True))


def _composed(transforms: Sequence[Transform], deltas: Mapping[int, Match]) -> tuple[Transform, ...]:
    """Each transform followed by its step. Steps act on the normal form, so every transform keeps the gauge in which it writes."""
    out = []
    for i, transform in enumerate(transforms):
        if i not in deltas:
            out.append(transform)
            continue
        group, step = symmetry_group(transform.folded).factors, deltas[i].transform.element
        element = {key: group[key].compose(g, step[key]) for key, g in transform.element.items()}
        out.append(Transform(transform.architecture, element, transform.source, transform.target))
    return tuple(out)


@dataclass(frozen=True)
class _State:
    """Where the rounds are: transforms, the normal forms they give, and the total squared distance of these to their mean."""

    transforms: tuple[Transform, ...]
    normal: tuple[dict[str, Tensor], ...]
    spread: float


@dataclass(frozen=True)
class _Problem:
    """What the rounds do not change. Sums over models run in `order`; `turns` says whether the stream moves."""

    architecture: Architecture
    models: Sequence[Parameters]
    gauge: Gauge
    order: list[int]
    turns: bool

    def state(self, transforms: tuple[Transform, ...]) -> _State:
        """Apply the transforms, and measure in the gauge in which :func:`coset.alignment.match` does: gains stay folded where the stream turns."""
        normal = tuple(
            fold(self.architecture, _apply(transform, model), self.gauge)[1]
            for transform, model in zip(transforms, self.models, strict=True)
        )
        kept = {} if self.turns else {name: value for name, value in self.gauge.items() if name.endswith(".gain")}
        views = [unfold(self.architecture, normal[i], kept) for i in self.order]
        mean = _mean(views)
        return _State(transforms, normal, sum(float((view[name] - x).square().sum()) for name, x in mean.items() for view in views))

    def raw(self, normal: Parameters) -> dict[str, Tensor]:
        """A normal form written in the common gauge."""
        return unfold(self.architecture, normal, self.gauge)
