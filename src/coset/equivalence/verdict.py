"""The verdict on two models, from the element found, its residuals and the outputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from coset.alignment.pair import Progress
from coset.architecture import Architecture
from coset.degeneracy import degeneracies
from coset.equivalence.outputs import EXACT, OUTPUT_FACTOR, Outputs, Probe, distances, measure, sizes, with_outputs
from coset.equivalence.residual import PEAK, SPREAD, Pair, Residual
from coset.equivalence.search import Found, Search, condition
from coset.equivalence.sides import Doubled, Lazy, Side, same_bits
from coset.normal_form import fold, read_gauge
from coset.parameters import Parameters, check, tensors
from coset.transform import Transform, move

Verdict = Literal["identical", "equivalent", "equivalent up to rounding", "different", "undecided"]

_VISIBLE = 0.02
_STRETCHED = 1e-5
_FEW = 2
_NEAR = 128


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
    chosen = with_outputs(architecture, outputs)
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
    if all(a.dtypes[n] == b.dtypes[n] and same_bits(a.parameters[n], b.parameters[n]) for n in tensors(architecture)):
        return Comparison("identical")
    usual = sizes(architecture)
    probe = Probe.random(architecture, usual[0], usual[1] if length is None else length, seed)
    out = measure(probe, a, b, seed)
    if progress is not None:
        progress("outputs", 1, 1)
    search = Search(architecture, a, b, pinned, seed, progress)
    reasons: list[str] = search.reasons
    agree: Verdict = "equivalent up to rounding" if a.coarse or b.coarse else "equivalent"

    def settled(verdict: Verdict, by: Found | None, first: tuple[int | None, str] | None = None) -> Comparison:
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
        # The outputs are the proof; an element only serves to name the first difference.
        found = search.from_the_ends or search.matched(_FEW)
        if found is not None and found.exact and (a.coarse or b.coarse):
            # Weights that agree to a coarse rounding: a model that amplifies rounding explains the outputs as well as a difference does.
            reasons.append("the weights agree to rounding while the outputs do not: the model amplifies the rounding of its stored weights")
            return settled("undecided", found)
        return settled("different", found, None if found is None else _first_difference(found))
    # The outputs agree, so an element that is not exact was not searched for well enough, or does not exist. One pass settles most cases.
    near = probe.short(_NEAR)
    found, kind = None, None
    read, seen = near, out
    attempts: tuple[Callable[[], Found | None], ...] = (
        lambda: search.as_they_are,
        lambda: search.matched(1),
        lambda: search.from_the_ends,
        search.matched,
    )
    for attempt in attempts:
        latest = attempt()
        if latest is None:
            continue
        found, kind = latest, None
        if found.exact:
            return settled(agree, found)
        # A row of an input table that the inputs do not read shows nothing in the outputs, however much it differs.
        read = _reading(near, found)
        seen = out if read is near else measure(read, a, b, seed)
        if seen.significant:
            out = seen
            return settled("different", found, _first_difference(found))
        # All but one block is explained: if the rest is a visible change, and the block has no freedom of its own, no better element is there
        # to be found.
        if found.local and not reasons:
            kind = _hidden(read, found, seen)
            if kind == "small" and not _free(found, a, b):
                return settled("different", found, _first_difference(found))
    if found is None:
        reasons += _spots(architecture, a, b, None)
        return settled("undecided", None)
    reasons += _spots(architecture, a, b, found.pair)
    kind = _hidden(read, found, seen) if kind is None else kind
    if kind == "small" and not reasons:
        return settled("different", found, _first_difference(search.from_the_ends or found))
    reasons.append(_WHY[kind])
    return settled("undecided", found)


_WHY = {
    "small": "a residual beyond rounding remains, too small to show in the outputs; in a degenerate model that does not prove a difference",
    "invisible": "the residual lies in directions that the outputs do not see: a freedom of this model that is not searched",
    "large": "the outputs agree, but no element that explains it was found: the search may have failed",
}


def _spacing(*sides: Side) -> float:
    """Relative spacing of the coarsest numbers stored."""
    return max(torch.finfo(d).eps for side in sides for d in side.dtypes.values())


def _spots(architecture: Architecture, a: Side, b: Side, pair: Pair | None) -> list[str]:
    eps = _spacing(a, b)
    if pair is None:
        return list(degeneracies(architecture, Doubled(b.parameters), eps))
    found = list(degeneracies(pair.folded, pair.lazy(b.parameters), eps))
    return found + [text for side in (a, b) for text in _zeros(read_gauge(architecture, side.parameters, pair.names))]


def _zeros(gauge: Mapping[str, Tensor]) -> Iterator[str]:
    for name, value in gauge.items():
        if name.endswith("norm.gain") and bool((value == 0).any()):
            yield f"{name} is zero on {int((value == 0).sum())} lanes: what is read there is invisible"


def _free(found: Found, a: Side, b: Side) -> bool:
    """Whether the one layer in which a local difference lies is degenerate, or it and the ends of the model leave the stream free.

    Degenerate spots of other layers cannot hide it: what they leave free acts inside those layers.
    """
    pair = found.pair
    index = next(r.layer for r in found.residuals if r.significant)
    if index is None:
        return bool(_spots(pair.architecture, a, b, pair))
    if any(any(_zeros(fold(pair.architecture, pair.raw(side.parameters, index), pair.names)[2])) for side in (a, b)):
        return True
    alone = dataclasses.replace(pair.folded, layers=(pair.folded.layers[index],))
    own = {f"layers.0.{name.split('.', 2)[2]}": x for name, x in pair.normal(b.parameters, index).items()}
    return any(degeneracies(alone, pair.normal(b.parameters, None) | own, _spacing(a, b)))


def _limits(found: list[Residual]) -> dict[str, float]:
    noise = torch.tensor([r.noise for r in found if r.noise > 0], dtype=torch.float64)
    if not len(noise):
        return {}
    middle = float(noise.median())
    return {"weight": PEAK * middle, "tensor": math.sqrt(SPREAD) * middle}


def _first_difference(found: Found) -> tuple[int | None, str] | None:
    """The first layer, in forward order, with a residual that rounding does not explain, and the clearest such tensor in it."""
    parted = [r for r in found.residuals if r.significant]
    if not parted:
        return None
    # A head or neuron that is matched across a difference spreads it over its layer.
    worst = max((r for r in parted if r.layer == parted[0].layer), key=lambda r: r.peak)
    return worst.layer, worst.tensor


def _reading(probe: Probe, found: Found) -> Probe:
    """The inputs, changed so that they read the row of an input table in which the models clearly differ, if there is one."""
    for r in found.residuals:
        if r.significant and r.row is not None:
            probe = probe.reading(r.tensor, r.row)
    return probe


def _hidden(near: Probe, found: Found, out: Outputs) -> Literal["small", "invisible", "large"]:
    """What a significant residual means that the outputs, which are `out` on the inputs `near`, do not show.

    The moved model has the function of A exactly, so going from B a multiple s of the residual must change the outputs s times as much as
    they differ now, if the residual is small and visible. It is ``invisible`` if it changes them far less than a random change of the
    same tensors of equal size (the multiple is so small that an element off by a little, along which the function only changes to second
    order, counts as invisible); ``large`` if far more than s times the difference: then the straight line is not what connects the two.
    """
    pair, element = found.pair, found.transform.element
    changed = {r.tensor for r in found.residuals if r.significant}
    size = max(r.relative for r in found.residuals if r.tensor in changed)
    stretch = max(1.0, _STRETCHED / max(size, 1e-15))
    base = near(pair.lazy(pair.b.parameters), pair.folded)

    def moved(random: bool) -> Tensor:
        def make(index: int | None) -> dict[str, Tensor]:
            b = pair.normal(pair.b.parameters, index)
            if changed.isdisjoint(b):
                return b
            a = move(pair.folded, element, pair.normal(pair.a.parameters, index))
            for number, name in enumerate(b):
                if name in changed:
                    step = a[name] - b[name]
                    if random:
                        noise = torch.randn(step.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
                        step = noise * (step.norm() / noise.norm())
                    b[name] = b[name] + stretch * step
            return b

        return near(Lazy(pair.folded, make), pair.folded)

    along = float(distances(moved(False), base).mean())
    across = float(distances(moved(True), base).mean())
    if along < _VISIBLE * across:
        return "invisible"
    return "small" if along <= stretch * OUTPUT_FACTOR * (out.noise + EXACT) else "large"


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
