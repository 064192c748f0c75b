r"""Search over the order of heads: the one with the lowest loss halfway between the models, by a proxy that needs no labels.

Stage 1 chooses an order by a distance; what is wanted is a low barrier. The proxy is the cross-entropy of the model halfway to the mean of both
models' probabilities on a few inputs. For every order that is tried, the bases inside the heads are solved anew (closed form).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from coset.alignment.activations import LayerHeads, gather, layer_heads, solve_basis
from coset.alignment.heads import Solvers
from coset.alignment.matching import DEFAULT_SOLVERS
from coset.alignment.pair import Match, Pair, Progress, Step
from coset.architecture import Architecture
from coset.errors import CosetError
from coset.groups import Element, Product, Wreath, WreathElement, finite_order
from coset.objective import Agreement
from coset.parameters import Parameters
from coset.transform import Transform, move

_EXHAUSTIVE = 120
"""Up to this many orders of a layer's heads all are tried; beyond, exchanges of two."""


def require_heads(spaces: tuple[str, ...]) -> None:
    """Raise unless heads may move."""
    if "heads" not in spaces:
        raise CosetError(f"search: it reorders heads, but the spaces that may move are {', '.join(spaces)}; add heads")


def search_heads(
    architecture: Architecture,
    reference: Parameters,
    other: Parameters,
    start: Match,
    inputs: Tensor,
    *,
    spaces: tuple[str, ...],
    layers: tuple[int, ...] | None = None,
    solvers: Solvers = DEFAULT_SOLVERS,
    pinned: tuple[str, ...] = (),
    samples: int = 200,
    rounds: int = 3,
    progress: Progress | None = None,
) -> Match:
    """Improve a match by another order of heads, layer after layer, wherever the proxy falls.

    Parameters
    ----------
    start
        What a closed-form matcher found in the same `spaces`; its stream and neurons are kept.
    inputs
        Where bases are solved; the first `samples` of them also measure the proxy. No labels.
    spaces, layers, solvers, pinned, progress
        As for :func:`coset.alignment.match`; `spaces` must hold ``heads``.
    rounds
        Passes over all layers; a pass without improvement is the last.

    Returns
    -------
    Match
        Never with a higher proxy than the start's. History: the proxy at the start and after every improvement.

    Raises
    ------
    CosetError
        If heads may not move, or inputs do not fit.
    """
    require_heads(spaces)
    pair = Pair(architecture, reference, other, spaces=spaces, layers=layers, pinned=pinned)
    a, b = pair.normal(reference), pair.normal(other)
    dtype = next(iter(reference.values())).dtype
    dtype = dtype if dtype == torch.float64 else torch.float32
    products = gather(pair, a, b, inputs, dtype, progress)
    element = dict(start.transform.element)
    turned = move(pair.folded, {key: g for key, g in element.items() if key == "stream"}, b)
    ends = [{name: x.to(dtype) for name, x in p.items()} for p in (a, move(pair.folded, element, b))]
    few = inputs[:samples].to(dtype) if inputs.is_floating_point() else inputs[:samples]
    proxy = _Proxy(pair, Agreement(pair.folded, ends, few), ends, turned)
    best = proxy.loss({}, element)
    steps = [Step("start", best)]
    heads = {i: layer_heads(pair, products, i, a, turned) for i in pair.layers if pair.moves(i, "heads")}
    for round_ in range(rounds):
        before = best
        for i, features in heads.items():
            key = f"layers.{i}.heads"
            found, best = _improve_layer(pair, proxy, key, features, element, best, solvers)
            if found is not None:
                element[key] = found
                steps.append(Step(f"layer {i}", best))
            if progress is not None:
                progress(f"search, round {round_ + 1}, proxy {best:.4g}", i + 1, len(architecture.layers))
        if best >= before:
            break
    return Match(Transform(architecture, element, pair.source, pair.target), tuple(steps), tuple(pair.notes))


class _Proxy:
    """The loss halfway, when one layer's heads change."""

    def __init__(self, pair: Pair, goal: Agreement, ends: list[dict[str, Tensor]], turned: Parameters):
        self.pair, self.goal, self.ends, self.turned = pair, goal, ends, turned

    def loss(self, change: dict[str, Element], element: dict[str, Element]) -> float:
        """Of the model halfway under `element` with `change` in place of its parts."""
        whole = {key: g for key, g in (element | change).items() if key != "stream"}
        moved = move(self.pair.folded, whole, self.turned)
        middle = {name: (x + moved[name].to(x.dtype)) / 2 for name, x in self.ends[0].items()}
        rows = torch.arange(len(self.goal.inputs))
        with torch.no_grad():
            return sum(float(self.goal.loss(middle, part)) * len(part) for part in torch.split(rows, 64)) / len(rows)


class _Bases:
    """Elements of a layer for any order of its heads; the basis for a pair of KV heads and an order of queries is solved once."""

    def __init__(self, pair: Pair, group: Wreath, features: LayerHeads, solvers: Solvers):
        self.pair, self.group, self.features, self.solvers = pair, group, features, solvers
        self.solved: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def element(self, order: Tensor, query: Tensor) -> WreathElement:
        """The element with this order of KV heads [kv] and of the query heads in each [kv, query]."""
        keys = [(i, int(j), *map(int, row)) for i, (j, row) in enumerate(zip(order, query, strict=True))]
        if any(key not in self.solved for key in keys):
            inner = solve_basis(self.group, self.features, order, query, self.solvers, self.pair.spaces).inner
            self.solved |= {key: (inner["qk"][i], inner["vo"][i]) for i, key in enumerate(keys)}
        qk, vo = (torch.stack(part) for part in zip(*(self.solved[key] for key in keys), strict=True))
        return WreathElement(order, {"query": query, "qk": qk, "vo": vo})


def _improve_layer(
    pair: Pair, proxy: _Proxy, key: str, features: LayerHeads, element: dict[str, Element], best: float, solvers: Solvers
) -> tuple[WreathElement | None, float]:
    """The best order of one layer's heads, or None if none beats `best`."""
    group = pair.groups[key]
    assert isinstance(group, Wreath)
    bases = _Bases(pair, group, features, solvers)
    found: WreathElement | None = None
    everything = finite_order(group) <= _EXHAUSTIVE
    while True:
        here = element[key] if found is None else found
        candidates = _orders(group) if everything else _exchanges(group, here.order, here.inner["query"])
        improved = False
        for order, query in candidates:
            trial = bases.element(order, query)
            loss = proxy.loss({key: trial}, element)
            if loss < best:
                found, best, improved = trial, loss, True
                if not everything:
                    break
        if everything or not improved:
            return found, best


def _query(group: Wreath) -> Wreath:
    """Orders alone: query heads inside KV heads, and KV heads."""
    assert isinstance(group.inner, Product)
    return Wreath(group.inner.factors["query"], group.copies, group.classes)


def _orders(group: Wreath) -> Iterator[tuple[Tensor, Tensor]]:
    """Every order of the KV heads, with every order of the query heads inside each."""
    orders = _query(group)
    size = orders.inner.n  # type: ignore[attr-defined]
    inside = [torch.tensor(p) for p in itertools.permutations(range(size))]
    inside = [p for p in inside if orders.inner.belongs(p)]
    for top in itertools.permutations(range(group.copies)):
        if group.top.belongs(torch.tensor(top)):
            for rest in itertools.product(inside, repeat=group.copies):
                yield torch.tensor(top), torch.stack(rest)


def _exchanges(group: Wreath, order: Tensor, query: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Every order that differs by an exchange of two KV heads, or of two query heads of one."""
    orders = _query(group)
    for i, j in itertools.combinations(range(len(order)), 2):
        swapped, inner = order.clone(), query.clone()
        swapped[[i, j]], inner[[i, j]] = order[[j, i]], query[[j, i]]
        if group.top.belongs(swapped):
            yield swapped, inner
    for kv in range(query.shape[0]):
        for i, j in itertools.combinations(range(query.shape[1]), 2):
            inner = query.clone()
            inner[kv, [i, j]] = query[kv, [j, i]]
            if orders.inner.belongs(inner):
                yield order, inner
