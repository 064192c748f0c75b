r"""Learned alignment: the group element of lowest loss between the models, found by gradients inside the group.

    minimise  Σ_t L( (1 - t) g_A·A + t g_B·B )   over elements g_A, g_B of the continuous part of the group, and the gains of B,

where t runs over a few places of the segment, and L is the task's loss, or without labels the cross-entropy to the mean of the two models'
probabilities. Orders of heads and neurons stay as a closed-form matching left them. Every step takes the gradient at the identity, in the Lie
algebra, and multiplies exp(step) onto the element, so both ends stay *exactly* what they were as functions. The stream, which is compact, moves
by orthogonalised momentum; what is not compact by Adam.

The result is one element: (1 - t) g_A·A + t g_B·B and (1 - t) A + t g_B g_A^{-1}·B are the same function, because the group acts linearly on the
normal form. So the reference is never rewritten. Gains do not act linearly: with γ_B = r γ_A lane by lane, what reads the norm is, halfway,
¼ diag(γ_A) ((1 + r) W_A + (1 + 1/r) W_B). Neither end sees r, yet the sum of weights is above one unless r = 1: where the models differ their mean
is too small, and r makes up for it. Gains live in the reference's own lanes, so only the other model's stream turns.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from coset.alignment.balance import balancing_element
from coset.alignment.pair import Match, Pair, Progress, Step
from coset.architecture import Architecture
from coset.errors import CosetError, require_whole
from coset.groups import Element, Group, Orthogonal
from coset.groups.composite import map_leaves
from coset.normal_form import coordinates, stored_exactly, unfold
from coset.objective import Agreement, Task
from coset.parameters import Parameters, tensors
from coset.transform import Transform, move


@dataclass(frozen=True)
class Learning:
    """How to learn.

    Attributes
    ----------
    steps
        Gradient steps; rates decline linearly to zero after a warm-up over the first `warmup` of them.
    batch
        Inputs a step.
    stream_rate, rate, gain_rate
        Step of the stream (radians in every plane that turns); of bases inside heads and scales of neurons, and of logarithms of gains, by Adam.
    momentum
        Of the stream.
    validation
        Fraction of the inputs that is held out, to choose the best state.
    every
        Steps between looks at the held-out inputs.
    patience
        Looks without improvement after which learning stops; None: never.
    keep_reference
        Move bases and scales of the other model alone; of stream and gains it is always the other model's that move.
    places
        Where on the segment the loss is lowered, one place a step, in turn; a look takes the mean over them. Halfway alone may leave a barrier
        beside the middle.
    """

    steps: int = 600
    batch: int = 32
    stream_rate: float = 6e-2
    rate: float = 2e-2
    gain_rate: float = 1e-1
    momentum: float = 0.9
    warmup: float = 0.05
    validation: float = 0.1
    every: int = 25
    patience: int | None = None
    keep_reference: bool = False
    places: tuple[float, ...] = (0.25, 0.5, 0.75)

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "every", *(() if self.patience is None else ("patience",))):
            require_whole(f"learning: {name}", getattr(self, name), least=1)
        for name in ("stream_rate", "rate", "gain_rate"):
            if not (_number(getattr(self, name)) and 0 <= getattr(self, name) < math.inf):
                raise CosetError(f"learning: {name} must be a number that is not negative, got {getattr(self, name)}")
        if not self.places or not all(_number(t) and 0 < t < 1 for t in self.places):
            raise CosetError(f"learning: places must lie inside the segment, between 0 and 1, got {self.places}")
        for name in ("momentum", "warmup", "validation"):
            if not (_number(getattr(self, name)) and 0 <= getattr(self, name) < 1):
                raise CosetError(f"learning: {name} must lie in [0, 1), got {getattr(self, name)}")


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


DEFAULT_LEARNING = Learning()

_GAIN = 1e-6
"""A state must be better by this fraction to replace another: between models that are the same function there is only rounding to gain."""
_WIDEST = math.log(100)
"""Gains stay within this factor of the reference's, so that weights of 16 bits keep their range."""
_HELD_OUT = 256
"""No more inputs than these are held out: every look runs all of them."""


def orthogonalised(x: Tensor, iterations: int = 6) -> Tensor:
    """The polar factor of x [n, n], nearly: Newton-Schulz steps of the fifth order, which bring every singular value close to one.

    The polynomial is odd, so a skew matrix stays skew.
    """
    y = x / torch.linalg.matrix_norm(x).clamp_min(torch.finfo(x.dtype).tiny)
    for _ in range(iterations):
        s = y @ y.mT
        y = 3.4445 * y + (-4.7750 * s + 2.0315 * s @ s) @ y
    return y


class _Leaf:
    """One learnable tensor of directions, and the state of its optimiser: orthogonalised momentum if there is a momentum, else Adam."""

    def __init__(self, shape: torch.Size, rate: float, momentum: float | None = None):
        self.rate, self.momentum = rate, momentum
        self.first = torch.zeros(shape, dtype=torch.float64)
        self.second = torch.zeros(shape, dtype=torch.float64)

    def step(self, gradient: Tensor, count: int, factor: float) -> Tensor:
        """The direction to move in, given the gradient where it is."""
        if self.momentum is not None:
            self.first = self.momentum * self.first + gradient
            return -self.rate * factor * orthogonalised(gradient + self.momentum * self.first)
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.99 * self.second + 0.01 * gradient.square()
        scale = (self.second / (1 - 0.99**count)).sqrt() + 1e-12
        return -self.rate * factor * (self.first / (1 - 0.9**count)) / scale


class _End:
    """One end of the segment: its normal form, the element found so far, and the optimiser."""

    def __init__(self, pair: Pair, normal: Parameters, keys: tuple[str, ...], how: Learning):
        self.pair, self.normal = pair, dict(normal)
        self.groups: dict[str, Group] = {key: pair.groups[key] for key in keys}
        self.element: dict[str, Element] = {key: g.identity() for key, g in self.groups.items()}
        self.best = dict(self.element)
        self.leaves = {
            f"{key}/{name}": _Leaf(leaf.shape, how.stream_rate, how.momentum) if isinstance(g, Orthogonal) else _Leaf(leaf.shape, how.rate)
            for key, g in self.groups.items()
            for name, leaf in _free_leaves(pair, key).items()
        }

    def weights(self, element: Mapping[str, Element], dtype: torch.dtype) -> dict[str, Tensor]:
        """The end's weights after an element."""
        return {name: x.to(dtype) for name, x in move(self.pair.folded, element, self.normal).items()}

    def gradient(self, weights: Parameters, upstream: Parameters) -> dict[str, Tensor]:
        """Gradient of ``Σ ⟨upstream, g·weights⟩`` with respect to g, at the identity."""
        dtype = next(iter(weights.values())).dtype
        held: dict[str, Tensor] = {}
        element = {}
        for key, group in self.groups.items():
            parts = group.leaves(group.identity(dtype=dtype))
            for name in parts:
                if f"{key}/{name}" in self.leaves:
                    held[f"{key}/{name}"] = parts[name] = parts[name].requires_grad_()
            element[key] = group.build(parts)
        if not held:
            return {}
        moved = move(self.pair.folded, element, weights)
        total = torch.stack([(x * upstream[name]).sum() for name, x in moved.items() if x is not weights[name]]).sum()
        found = torch.autograd.grad(total, list(held.values()))
        return {name: g.to(torch.float64) for name, g in zip(held, found, strict=True)}

    def advance(self, gradient: Mapping[str, Tensor], count: int, factor: float) -> None:
        """One step of the optimiser, multiplied onto the element."""
        for key, group in self.groups.items():
            zero = map_leaves(lambda leaf: torch.zeros_like(leaf) if leaf.is_floating_point() else leaf, group.identity())

            def inside(values: Mapping[str, Tensor], key: str = key, group: Group = group, zero: Element = zero) -> Element:
                return group.tangent(group.build({n: values.get(f"{key}/{n}", leaf) for n, leaf in group.leaves(zero).items()}))

            projected = group.leaves(inside(gradient))
            steps = {
                name: leaf.step(projected[name.partition("/")[2]], count, factor)
                for name, leaf in self.leaves.items()
                if name.startswith(f"{key}/")
            }
            # Adam's division is lane by lane, so its step is projected again.
            self.element[key] = group.compose(self.element[key], group.exponential(inside(steps)))


class _Gains:
    """Logarithms of the gains in which the other end is written, over the reference's, and their optimiser."""

    def __init__(self, pair: Pair, how: Learning):
        available = coordinates(pair.architecture)
        self.pair = pair
        # Everything that is folded is written back at rest: shifts at zero, gains at one.
        self.rest: dict[str, Tensor] = {
            name: (torch.ones_like if available[name].space == "gains" else torch.zeros_like)(value) for name, value in pair.target.items()
        }
        self.log = {name: torch.zeros_like(self.rest[name]) for name in free_gains(pair)}
        self.best = dict(self.log)
        self.leaves = {name: _Leaf(log.shape, how.gain_rate) for name, log in self.log.items()}

    def write(self, normal: Parameters, ratios: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A normal form as a model of the whole architecture, its gains `ratios` times those at rest; differentiable in both."""
        return unfold(self.pair.architecture, normal, self.rest | dict(ratios))

    def advance(self, gradient: Mapping[str, Tensor], count: int, factor: float) -> None:
        """One step of the optimiser."""
        moved = {name: x + self.leaves[name].step(gradient[name], count, factor) for name, x in self.log.items()}
        self.log = {name: x.clamp(-_WIDEST, _WIDEST) for name, x in moved.items()}

    def target(self, log: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gauge in which the other model is written: gains that moved, at values that are stored without rounding."""
        own = self.pair.target
        exact = stored_exactly(self.pair.architecture, own | {name: own[name] * x.exp() for name, x in log.items()}, own)
        return own | {name: torch.where(x == 0, own[name], exact[name]) for name, x in log.items()}

    def ratios(self) -> dict[str, Tensor]:
        """The gains in which the other model would be written now, over the reference's."""
        target = self.target(self.log)
        return {name: target[name] / self.pair.target[name] for name in self.log}


def free_gains(pair: Pair) -> tuple[str, ...]:
    """The gauge coordinates of a pair whose gains may be learned."""
    available, layers = coordinates(pair.architecture), range(len(pair.architecture.layers))
    inside = {*pair.layers, *((None,) if set(pair.layers) == set(layers) else ())}
    return tuple(
        name for name in pair.names if "gains" in pair.spaces and available[name].space == "gains" and available[name].layer in inside
    )


def _free_leaves(pair: Pair, key: str) -> dict[str, Tensor]:
    """The tensors of a space's identity that may move in the chosen spaces."""
    group = pair.groups[key]
    leaves = {name: leaf for name, leaf in group.leaves(group.identity()).items() if leaf.is_floating_point()}
    if not key.endswith(".heads"):
        return leaves
    return {name: leaf for name, leaf in leaves.items() if name.rpartition(".")[2] in pair.spaces}


def learnable(pair: Pair) -> tuple[str, ...]:
    """The spaces of a pair in which an element can move continuously.

    Raises
    ------
    CosetError
        If there is none, and no gain is free either.
    """
    keys = tuple(
        key
        for key, g in pair.groups.items()
        if g.dimension > 0 and (key == "stream" or int(key.split(".")[1]) in pair.layers) and _free_leaves(pair, key)
    )
    if not keys and not free_gains(pair):
        raise CosetError(f"learning: this architecture has no continuous freedom in {', '.join(pair.spaces)}")
    return keys


def read_state(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """What `learn` wrote to continue from: facts about the run, and tensors.

    Raises
    ------
    CosetError
        If the file cannot be read, or is no state of learning.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            facts = file.metadata() or {}
            content = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError) as error:
        raise CosetError(f"{path}: not a readable state of learning: {error}; give another name") from None
    if facts.get("coset") != "learning":
        raise CosetError(f"{path}: not a state of learning; give another name")
    if facts.get("digest") != _digest(facts, content):
        raise CosetError(f"{path}: this state of learning is not as it was written; give another name")
    return facts, content


def _digest(facts: Mapping[str, str], content: Mapping[str, Tensor]) -> str:
    """A hash of all that a state holds."""
    digest = hashlib.sha256(json.dumps(sorted(item for item in facts.items() if item[0] != "digest")).encode())
    for name, x in sorted(content.items()):
        digest.update(f"{name} {x.dtype} {list(x.shape)}".encode() + x.contiguous().numpy().tobytes())
    return digest.hexdigest()


def learn(
    architecture: Architecture,
    reference: Parameters,
    other: Parameters,
    start: Match,
    inputs: Tensor,
    targets: Tensor | None = None,
    *,
    task: bool = False,
    how: Learning = DEFAULT_LEARNING,
    spaces: tuple[str, ...],
    layers: tuple[int, ...] | None = None,
    pinned: tuple[str, ...] = (),
    seed: int = 0,
    state: Path | None = None,
    progress: Progress | None = None,
) -> Match:
    """Improve a match by gradients inside the group.

    Parameters
    ----------
    start
        What a closed-form matcher found, in the same `spaces`; its orders of heads and neurons are kept.
    inputs, targets
        What to learn on: token ids [samples, length] or patches [samples, patches, features]; targets as for `coset.barrier`.
    task
        Lower the task's loss (cross-entropy to `targets`, or to the next token). Otherwise no labels are used: the loss is the cross-entropy
        to the mean of the two models' probabilities.
    how
        Rates and lengths.
    spaces, layers, pinned
        As for :func:`coset.alignment.match`.
    seed
        Chooses the held-out inputs and the batches.
    state
        File to which the state is written at every look at the held-out inputs, and from which an interrupted run of the same models, start
        and settings continues; removed at the end.
    progress
        Called with the held-out loss between the models, in words, and steps done and in all.

    Returns
    -------
    Match
        The best state seen on held-out inputs, the start included. History: the held-out loss at the start and at every look. A note says if
        nothing better than the start was found, or if the loss stopped being finite.

    Raises
    ------
    CosetError
        If nothing continuous can move, inputs or targets do not fit, there are fewer than two inputs, or `state` belongs to another run.
    """
    pair = Pair(architecture, reference, other, spaces=spaces, layers=layers, pinned=pinned)
    keys = learnable(pair)
    if len(inputs) < 2:
        raise CosetError(f"learning: expected at least two inputs, one of them to hold out, got {len(inputs)}")
    dtype = next(iter(reference.values())).dtype
    dtype = dtype if dtype == torch.float64 else torch.float32
    a, b = pair.normal(reference), move(pair.folded, start.transform.element, pair.normal(other))
    # The same change of basis on both ends leaves the segment as it is; the optimiser works best where the bases are balanced.
    balance = {key: g for key, g in balancing_element(pair.folded, a).items() if key in keys}
    inner = () if how.keep_reference else tuple(key for key in keys if key != "stream")
    ends = [_End(pair, move(pair.folded, balance, p), moving, how) for p, moving in ((a, inner), (b, keys))]
    gains = _Gains(pair, how)
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    plain = [{name: p[name].to(dtype) for name in tensors(architecture)} for p in (reference, other)]
    goal = Task(architecture, inputs, targets) if task else Agreement(architecture, plain, inputs)
    identity = _identity_of(start, inputs, targets, [asdict(how), seed, task, sorted(spaces), pair.layers])
    run = _Run(ends, gains, goal, how, seed, dtype, state, identity)
    history, notes = run.go(progress)
    element = {}
    for key in pair.groups:
        g = start.transform.element[key]
        if key in keys:
            group, turn = pair.groups[key], balance.get(key, pair.groups[key].identity())
            back = [group.inverse(ends[0].best[key])] if key in inner else []
            for factor in (turn, ends[1].best[key], *back, group.inverse(turn)):
                g = group.compose(g, factor)
            if isinstance(group, Orthogonal):
                # Hundreds of products leave it orthogonal to rounding only.
                g = group.best(g)
        element[key] = g
    return Match(Transform(architecture, element, pair.source, gains.target(gains.best)), tuple(history), (*pair.notes, *notes))


def _identity_of(start: Match, inputs: Tensor, targets: Tensor | None, settings: Sequence[Any]) -> str:
    """What a saved state belongs to."""
    digest = hashlib.sha256(json.dumps(settings).encode())
    groups = start.transform.groups()
    for key, g in sorted(start.transform.element.items()):
        for name, leaf in sorted(groups[key].leaves(g).items()):
            digest.update(f"{key}/{name}".encode() + leaf.contiguous().numpy().tobytes())
    for data in (inputs, targets):
        digest.update(b"" if data is None else data.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _between(ends: Sequence[Parameters], t: float) -> dict[str, Tensor]:
    """The model at t of the segment."""
    return {name: (1 - t) * x + t * ends[1][name] for name, x in ends[0].items()}


class _Run:
    """The loop: batches, steps, looks at held-out inputs, best state, and the file to resume from."""

    def __init__(
        self,
        ends: list[_End],
        gains: _Gains,
        goal: Agreement | Task,
        how: Learning,
        seed: int,
        dtype: torch.dtype,
        state: Path | None,
        identity: str,
    ):
        self.ends, self.gains, self.goal, self.how, self.seed, self.dtype = ends, gains, goal, how, seed, dtype
        self.state, self.identity = state, identity
        order = torch.randperm(len(goal.inputs), generator=torch.Generator().manual_seed(seed))
        held = min(max(1, round(how.validation * len(order))), _HELD_OUT)
        self.held, self.train = order[:held], order[held:]
        self.losses: list[tuple[int, float]] = []
        self.best = math.inf

    def ends_now(self) -> list[dict[str, Tensor]]:
        """Normal forms of both ends."""
        return [end.weights(end.element, self.dtype) for end in self.ends]

    def written(self, sides: Sequence[Parameters], ratios: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Both ends as models of the whole architecture."""
        return [self.gains.write(sides[0], {}), self.gains.write(sides[1], ratios)]

    def look(self) -> float:
        """Loss on the held-out inputs, mean over the places."""
        total = 0.0
        with torch.no_grad():
            ends = self.written(self.ends_now(), self.gains.ratios())
            for t in self.how.places:
                between = _between(ends, t)
                parts = torch.split(self.held, max(1, self.how.batch))
                total += sum(float(self.goal.loss(between, rows)) * len(rows) for rows in parts) / len(self.held)
        return total / len(self.how.places)

    def step(self, count: int) -> bool:
        """One gradient step; False if the loss is not finite."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + count)
        rows = self.train[torch.randint(len(self.train), (min(self.how.batch, len(self.train)),), generator=generator)]
        sides, t = self.ends_now(), self.how.places[(count - 1) % len(self.how.places)]
        held = [{name: x.detach().requires_grad_() for name, x in p.items()} for p in (*sides, self.gains.log)]
        ends = self.written(held[:2], {name: x.exp() for name, x in held[2].items()})
        loss = self.goal.loss(_between(ends, t), rows)
        if not bool(torch.isfinite(loss)):
            return False
        found = iter(torch.autograd.grad(loss, [x for p in held for x in p.values()], allow_unused=True))
        gradients = [{name: torch.zeros_like(x) if (g := next(found)) is None else g for name, x in p.items()} for p in held]
        if not all(bool(torch.isfinite(g).all()) for p in gradients for g in p.values()):
            return False
        warm = max(1, round(self.how.warmup * self.how.steps))
        factor = count / warm if count <= warm else (self.how.steps - count) / max(1, self.how.steps - warm)
        for end, weights, upstream in zip(self.ends, sides, gradients[:2], strict=True):
            end.advance(end.gradient(weights, upstream), count, factor)
        self.gains.advance(gradients[2], count, factor)
        return True

    def go(self, progress: Progress | None) -> tuple[list[Step], list[str]]:
        """Run to the end; the best elements are left in the ends."""
        notes: list[str] = []
        done = self.restore()
        if not self.losses:
            self.losses = [(0, self.look())]
        self.best = self.losses[0][1]
        for _, loss in self.losses:
            self.best = loss if loss < self.best - _GAIN * abs(self.best) else self.best
        waited = 0
        while done < self.how.steps:
            done += 1
            try:
                fine = self.step(done)
                if fine and done % self.how.every and done != self.how.steps:
                    continue
                loss = self.look() if fine else math.nan
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                # Too long a step has left an element without an inverse.
                loss = math.nan
            if not math.isfinite(loss):
                notes.append(f"learning: the loss stopped being finite at step {done}; the best state before is kept; try lower rates")
                break
            better = loss < self.best - _GAIN * abs(self.best)
            self.losses.append((done, loss))
            waited = 0 if better else waited + 1
            if better:
                self.best = loss
                for end in self.ends:
                    end.best = dict(end.element)
                self.gains.best = dict(self.gains.log)
            if progress is not None:
                progress(f"loss between {loss:.4g} (start {self.losses[0][1]:.4g})", done, self.how.steps)
            if self.how.patience is not None and waited >= self.how.patience:
                break
            self.save(done)
        if self.best == self.losses[0][1]:
            notes.append("learning: nothing better than the start was found; the start is returned")
        if self.state is not None:
            self.state.unlink(missing_ok=True)
        return [Step("start" if at == 0 else f"step {at}", loss) for at, loss in self.losses], notes

    def save(self, done: int) -> None:
        """Write the state, whole or not at all."""
        if self.state is None:
            return
        content: dict[str, Tensor] = {}
        for side, end in enumerate(self.ends):
            for key, group in end.groups.items():
                for kind, g in (("now", end.element[key]), ("best", end.best[key])):
                    content |= {f"{side}/{kind}/{key}/{name}": leaf.clone() for name, leaf in group.leaves(g).items()}
            for name, leaf in end.leaves.items():
                content |= {f"{side}/first/{name}": leaf.first, f"{side}/second/{name}": leaf.second}
        for name, leaf in self.gains.leaves.items():
            content |= {f"gains/now/{name}": self.gains.log[name].clone(), f"gains/best/{name}": self.gains.best[name].clone()}
            content |= {f"gains/first/{name}": leaf.first, f"gains/second/{name}": leaf.second}
        facts = {"coset": "learning", "identity": self.identity, "done": str(done), "losses": json.dumps(self.losses)}
        facts["digest"] = _digest(facts, content)
        temporary = self.state.with_name(f".{self.state.name}.tmp")
        try:
            save_file(content, temporary, facts)
            temporary.replace(self.state)
        except (OSError, SafetensorError) as error:
            raise CosetError(f"{self.state}: cannot write the state of learning: {error}") from None
        finally:
            temporary.unlink(missing_ok=True)

    def restore(self) -> int:
        """Continue from a saved state, if there is one; the number of steps done."""
        if self.state is None or not self.state.exists():
            return 0
        facts, content = read_state(self.state)
        if facts.get("identity") != self.identity:
            raise CosetError(
                f"{self.state}: belongs to another run (other models, inputs or settings); give another name, or delete it to start afresh"
            )
        self.losses = [(int(at), float(loss)) for at, loss in json.loads(facts["losses"])]
        for side, end in enumerate(self.ends):
            for key, group in end.groups.items():
                for kind, into in (("now", end.element), ("best", end.best)):
                    lead = f"{side}/{kind}/{key}/"
                    into[key] = group.build({name[len(lead) :]: leaf for name, leaf in content.items() if name.startswith(lead)})
            for name, leaf in end.leaves.items():
                leaf.first, leaf.second = content[f"{side}/first/{name}"], content[f"{side}/second/{name}"]
        for name, leaf in self.gains.leaves.items():
            self.gains.log[name], self.gains.best[name] = content[f"gains/now/{name}"], content[f"gains/best/{name}"]
            leaf.first, leaf.second = content[f"gains/first/{name}"], content[f"gains/second/{name}"]
        return int(facts["done"])
