"""The matchers by name, and their options in one place.

``weights``
    Distance of weights: the two-stage algorithm, neurons and stream, in cycles. Needs no inputs.
``probes``, ``self``, ``activations``
    Closed-form matching by activations on random inputs, on text that the models write, on the user's data.
``search``
    The same, then orders of heads chosen by the loss halfway between the models.
``learned``
    The same, then gradients inside the group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor

from coset.alignment.activations import match_activations
from coset.alignment.features import Metric
from coset.alignment.heads import Solvers
from coset.alignment.learned import DEFAULT_LEARNING, Learning, learn, learnable, read_state
from coset.alignment.matching import DEFAULT_SOLVERS, match
from coset.alignment.pair import Alignment, Match, Pair, Progress
from coset.alignment.search import require_heads, search_heads
from coset.alignment.sources import check_size, default_samples, probe_inputs, sample_text, surest_inputs
from coset.architecture import Architecture, Classifier, LanguageModel, Patches
from coset.errors import CosetError, require_whole
from coset.objective import check_inputs, check_targets
from coset.parameters import Parameters, check, tensors
from coset.transform import SPACES
from coset.transformer import require_no_length

Matcher = Literal["weights", "probes", "self", "activations", "search", "learned"]
MATCHERS: tuple[Matcher, ...] = get_args(Matcher)
Source = Literal["probes", "self", "activations"]
SOURCES: tuple[Source, ...] = get_args(Source)

_CLOSED_FORM, _LEARNED = 1 << 14, 1 << 17
"""Positions that a source makes: enough for moments, and enough to learn on without repeating itself often."""
_DRAWS = 10
"""Probes drawn for every one on which classifiers learn."""


@dataclass(frozen=True)
class Matching:
    """How to match.

    Attributes
    ----------
    matcher
        One of :data:`MATCHERS`.
    source
        Inputs of ``search`` and ``learned``; None: the user's data if there are any, text of their own for language models, else probes.
    samples, length
        Inputs that ``probes`` and ``self`` make; None: as many as make some ten thousand positions (a hundred thousand to learn on), and the
        longest that the architecture allows, at most 64.
    seed
        Of everything random.
    task
        ``learned`` lowers the loss of the task (next token, or the user's targets) instead of the disagreement with both models.
    learning
        Lengths and rates of ``learned``.
    solvers
        How bases inside heads are solved.
    cycles, tolerance
        Of ``weights``.
    """

    matcher: Matcher = "weights"
    source: Source | None = None
    samples: int | None = None
    length: int | None = None
    seed: int = 0
    task: bool = False
    learning: Learning = DEFAULT_LEARNING
    solvers: Solvers = DEFAULT_SOLVERS
    cycles: int = 100
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        if self.matcher not in MATCHERS:
            raise CosetError(f"matcher: expected one of {', '.join(MATCHERS)}, got {self.matcher!r}")
        if self.source is not None and self.source not in SOURCES:
            raise CosetError(f"source: expected one of {', '.join(SOURCES)}, got {self.source!r}")
        if self.source is not None and self.matcher not in ("search", "learned"):
            raise CosetError(
                f"source: only search and learned choose their inputs; matcher {self.matcher} fixes them; leave the source out"
            )
        for name in ("samples", "length", "seed", "cycles"):
            value = getattr(self, name)
            if value is not None:
                require_whole(name, value, least=0 if name == "seed" else 1)

    def resolved_source(self, architecture: Architecture, has_data: bool) -> Source | None:
        """Where the inputs come from: None for ``weights``.

        Raises
        ------
        CosetError
            If it is the user's data and there are none.
        """
        source: Source | None
        if self.matcher == "weights":
            return None
        if self.matcher in ("search", "learned"):
            writes = (
                isinstance(architecture.outputs, LanguageModel) and architecture.causal and not isinstance(architecture.inputs, Patches)
            )
            source = self.source or ("activations" if has_data else "self" if writes else "probes")
        else:
            source = self.matcher  # type: ignore[assignment]
        if source == "activations" and not has_data:
            raise CosetError(
                "activations: this matcher compares the models on your data, and there are none; give some, or use self or probes"
            )
        return source


DEFAULT_MATCHING = Matching()


def made_sizes(architecture: Architecture, how: Matching) -> tuple[int, int]:
    """How many inputs ``probes`` and ``self`` make, and how long they are.

    Raises
    ------
    CosetError
        If they are longer than the architecture allows, or need more memory than there is.
    """
    if isinstance(architecture.inputs, Patches):
        require_no_length(architecture.inputs, how.length)
    longest = 64 if architecture.length is None else architecture.length
    length = longest if isinstance(architecture.inputs, Patches) else how.length or min(64, longest)
    if length > longest and architecture.length is not None:
        raise CosetError(f"inputs of {length:,} tokens are longer than the model's context of {longest:,}; ask for shorter ones")
    learns = how.matcher == "learned"
    samples = how.samples or default_samples(architecture, length, _LEARNED if learns else _CLOSED_FORM)
    check_size(architecture, samples, length, together=how.learning.batch if learns else 1)
    return samples, length


def _selects(architecture: Architecture, how: Matching) -> bool:
    """Whether probes are chosen by what the models say of them: to agree between classifiers, learning needs inputs that mean something to them."""
    return how.matcher == "learned" and isinstance(architecture.outputs, Classifier)


def make_inputs(
    architecture: Architecture, models: Sequence[Parameters], how: Matching, source: Source, progress: Progress | None = None
) -> Tensor:
    """The inputs that ``probes`` and ``self`` make for models: text is written by all of them, in equal shares.

    Probes on which classifiers learn are those that the models together are surest of (`coset.alignment.sources.surest_inputs`).
    """
    samples, length = made_sizes(architecture, how)
    if source == "probes":
        given = None if isinstance(architecture.inputs, Patches) else length

        def draw(seed: int) -> Tensor:
            return probe_inputs(architecture, samples, length=given, seed=seed)

        if not _selects(architecture, how):
            return draw(how.seed)
        told = None if progress is None else lambda done, total: progress("choosing probes", done, total)
        return surest_inputs(architecture, models, draw, samples, rounds=_DRAWS, seed=how.seed, progress=told)
    report = None if progress is None else lambda done, total: progress("writing text", done, total)
    return sample_text(architecture, models, samples, length=length, seed=how.seed, progress=report)


def find_match(
    architecture: Architecture,
    reference: Parameters,
    other: Parameters,
    how: Matching = DEFAULT_MATCHING,
    *,
    inputs: Tensor | None = None,
    targets: Tensor | None = None,
    metric: Metric | None = None,
    spaces: tuple[str, ...] = SPACES,
    layers: tuple[int, ...] | None = None,
    pinned: tuple[str, ...] = (),
    state: Path | None = None,
    progress: Progress | None = None,
) -> Match:
    """Find the transform that brings `other` to `reference` with the chosen matcher.

    Parameters
    ----------
    architecture, reference, other
        Two models; all tensors are held in memory unless the matcher is ``weights``.
    how
        The matcher and its options.
    inputs, targets
        The user's data, for ``activations`` and what builds on it; see :func:`coset.objective.check_data`. Checked even if nothing reads them.
    metric
        For ``weights`` alone; see :func:`coset.alignment.match`.
    spaces, layers, pinned, progress
        As for :func:`coset.alignment.match`.
    state
        File from which an interrupted ``learned`` continues.

    Raises
    ------
    CosetError
        If the matcher needs data that are not there, or for bad input of any kind.
    """
    if inputs is not None:
        check_inputs(architecture, inputs)
        if targets is not None:
            check_targets(architecture, inputs, targets)
    source = how.resolved_source(architecture, inputs is not None)
    if source is None:
        return match(
            architecture,
            reference,
            other,
            spaces=spaces,
            layers=layers,
            metric=metric,
            solvers=how.solvers,
            cycles=how.cycles,
            tolerance=how.tolerance,
            pinned=pinned,
            progress=progress,
        )
    if metric is not None:
        raise CosetError(f"metric: it belongs to the matcher weights; {how.matcher} compares activations themselves")
    a, b = ({name: p[name] for name in tensors(architecture)} for p in (reference, other))
    # What comes after the closed form is refused before it.
    if how.matcher == "search":
        require_heads(spaces)
    if how.matcher == "learned":
        learnable(Pair(architecture, a, b, spaces=spaces, layers=layers, pinned=pinned))
        if state is not None and state.exists():
            read_state(state)
    if source == "activations":
        assert inputs is not None
        made, aims = inputs, targets
    else:
        made, aims = make_inputs(architecture, (a, b), how, source, progress), None
    closed = made[: default_samples(architecture, made.shape[1], _CLOSED_FORM)] if how.matcher in ("search", "learned") else made
    found = match_activations(
        architecture, a, b, closed, spaces=spaces, layers=layers, solvers=how.solvers, pinned=pinned, progress=progress
    )
    if how.matcher == "search":
        return search_heads(
            architecture, a, b, found, closed, spaces=spaces, layers=layers, solvers=how.solvers, pinned=pinned, progress=progress
        )
    if how.matcher == "learned":
        return learn(
            architecture,
            a,
            b,
            found,
            made,
            aims,
            task=how.task,
            how=how.learning,
            spaces=spaces,
            layers=layers,
            pinned=pinned,
            seed=how.seed,
            state=state,
            progress=progress,
        )
    return found


def align(
    architecture: Architecture,
    reference: Parameters,
    other: Parameters,
    how: Matching = DEFAULT_MATCHING,
    *,
    inputs: Tensor | None = None,
    targets: Tensor | None = None,
    metric: Metric | None = None,
    spaces: tuple[str, ...] = SPACES,
    layers: tuple[int, ...] | None = None,
    state: Path | None = None,
    progress: Progress | None = None,
) -> Alignment:
    """Express `other` as close to `reference` as the symmetries allow: same function as `other`, in the reference's gauge.

    The reference is not touched. ``learned`` leaves the result gains of its own, where they are among the `spaces`. See :func:`find_match` for the
    parameters; both models are checked tensor by tensor first.

    Examples
    --------
    >>> from coset.architecture import uniform
    >>> from coset.transformer import initialise
    >>> architecture = uniform(pe="rope", layers=1, width=8, heads=2, vocab=11)
    >>> model = initialise(architecture, seed=0)
    >>> round(align(architecture, model, model).history[-1].objective, 6)
    0.0
    """
    check(architecture, reference, "reference")
    check(architecture, other, "other")
    found = find_match(
        architecture,
        reference,
        other,
        how,
        inputs=inputs,
        targets=targets,
        metric=metric,
        spaces=spaces,
        layers=layers,
        state=state,
        progress=progress,
    )
    return Alignment(found.transform, found.history, found.notes, found.transform({name: other[name] for name in tensors(architecture)}))


def describe(how: Matching, architecture: Architecture, has_data: bool) -> Mapping[str, str]:
    """The options in words, for a record of what was done."""
    out: dict[str, str] = {"matcher": how.matcher}
    source = how.resolved_source(architecture, has_data)
    if source is not None:
        out |= {"source": source, "seed": str(how.seed)}
    if source in ("probes", "self"):
        samples, length = made_sizes(architecture, how)
        out |= {"samples": str(samples), "length": str(length)}
    if source == "probes" and _selects(architecture, how):
        out["chosen"] = f"the models are surest of these among {_DRAWS} times as many"
    if how.matcher == "learned":
        out |= {"loss": "task" if how.task else "agreement", "steps": str(how.learning.steps)}
    return out


__all__ = [
    "DEFAULT_MATCHING",
    "MATCHERS",
    "SOURCES",
    "Matcher",
    "Matching",
    "Source",
    "align",
    "describe",
    "find_match",
    "made_sizes",
    "make_inputs",
]
