r"""Matching by activations: both models read the same inputs, and what they compute is compared lane by lane.

The products of the two models' activations take the place of the products of their weights, in the same solvers, in one pass:

* *stream*: the polar factor of Σ Y_BᵀY_A over everything that is read from the stream, behind the norms;
* *heads*: circuits of queries and keys are kernels of logits, and outputs of heads are compared as they reach the stream; then the basis of
  each head minimises ‖q_A − q_B U‖² + ‖k_A − k_B U^{-T}‖², each term relative to its size, and likewise for values and outputs;
* *neurons*: the assignment of largest correlation of hidden activations, from their means.

Nothing here starts from where the other model lies in its orbit, so a second pass finds the same, and so does a scrambled copy (but for local
minima of the bases where the models have little in common).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coset.alignment.features import HeadFeatures, QKBlocks, lane_features, per_query_features
from coset.alignment.heads import Solvers, assign_heads, head_cost, reordered, solve_within
from coset.alignment.matching import DEFAULT_SOLVERS
from coset.alignment.moments import Cross, Moments, run_side_by_side, square_root
from coset.alignment.neurons import solve_scales
from coset.alignment.pair import Match, Pair, Progress, Step
from coset.alignment.stream import StreamProducts
from coset.architecture import Architecture, Experts
from coset.errors import CosetError
from coset.groups import Element, GeneralLinear, Group, Monomial, MonomialElement, Wreath, WreathElement, assignment
from coset.normal_form import fold
from coset.objective import check_inputs
from coset.parameters import Parameters, tensors
from coset.transform import SPACES, move

_TOKENS = 1024
"""Positions in a batch: what bounds the activations held at once."""
_TIE = 1e-3
"""Weight of what neurons write beside the correlation of what they compute: it decides only between neurons that correlate alike."""


class Products:
    """Moments of both models' activations at every site that a pair needs, [A | B] side by side where their own products are needed too."""

    def __init__(self, pair: Pair):
        self.pair = pair
        self.joint: dict[str, Moments] = {}
        self.neurons: dict[str, Cross] = {}
        self.stream: dict[str, Cross] = {}
        # Least squares need the other model's own products as well; an isometry leaves them alone.
        self.grams: dict[str, Moments] = {}

    def visit(self, site: str, x: Tensor, y: Tensor) -> None:
        """Accumulate one batch of a site."""
        if site.endswith(".input"):
            if "stream" in self.pair.groups:
                rows = [z.reshape(-1, z.shape[-1]) for z in (x, y)]
                self.stream.setdefault(site, Cross.zero(x.shape[-1])).add(*rows)
                if isinstance(self.pair.groups["stream"], GeneralLinear):
                    self.grams.setdefault(site, Moments.zero(x.shape[-1])).add(rows[1])
            return
        if not site.startswith("layers."):
            return
        _, layer, part, what = (*site.split("."), "")[:4]
        if what in ("q", "k", "v", "heads") and self.pair.moves(int(layer), "heads"):
            lanes = x.ndim - 2
            both = torch.cat([x.flatten(-lanes), y.flatten(-lanes)], -1)
            self.joint.setdefault(site, Moments.zero(both.shape[-1])).add(both)
        elif what == "hidden" and part == "mlp" and self.pair.moves(int(layer), "neurons"):
            experts = isinstance(self.pair.folded.layers[int(layer)].mlp, Experts)
            rows = [z.flatten(-2) if experts else z for z in (x, y)]
            self.neurons.setdefault(site, Cross.zero(rows[0].shape[-1])).add(*rows)


def _solve_stream(pair: Pair, products: Products) -> tuple[Element, list[Step]]:
    """The stream's element from all sites, each relative to the size of what is read there; and the relative distance before and after.

    What differs early is carried through everything behind it, so a site counts by the cube of how many layers still read it (one for the
    end). Measured: equal weights leave higher barriers, the more so the deeper the model; the power hardly matters (docs/matching.md).
    """
    group, d = pair.groups["stream"], pair.folded.width
    cross, other, sizes = (torch.zeros(*shape, dtype=torch.float64) for shape in ((d, d), (d, d), (2,)))
    for site, found in products.stream.items():
        behind = 1 + (len(pair.folded.layers) - int(site.split(".")[1]) if site.startswith("layers.") else 0)
        size = torch.stack([s.sum() for s in found.squares])
        weight = behind**3 / size.sum().clamp_min(1e-300)
        cross += weight * found.product.mT
        sizes += weight * size
        if site in products.grams:
            other += weight * products.grams[site].square
    if isinstance(group, GeneralLinear):
        element = _least_squares(group, other, cross)
    else:
        sums = StreamProducts.zero(d, group)
        sums.writers += cross
        element = sums.solve(group)[0]

    def gap(g: Element) -> float:
        moved = group.act(g, group.act(g, other).mT).trace() if isinstance(group, GeneralLinear) else sizes[1]
        return float((sizes[0] + moved - 2 * group.act(g, cross.mT).trace()) / sizes[0])

    return element, [Step("start", gap(group.identity())), Step("stream", gap(element))]


def _least_squares(group: GeneralLinear, gram: Tensor, cross: Tensor) -> Tensor:
    """The g that minimises E‖x_A − x_B g‖²; where it is not well conditioned, the isometry."""
    eye = torch.eye(group.n, dtype=gram.dtype)
    g = eye + group.tangent(torch.linalg.pinv(gram, hermitian=True) @ cross - eye)
    if float(torch.linalg.cond(g)) < 1e6:
        return g
    u, _, vh = torch.linalg.svd(cross)
    return u @ vh if group.fixed is None else eye


# --- heads ----------------------------------------------------------------------------------------------------------


def _columns(moments: Moments, shape: tuple[int, ...], centred: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Columns [rows, *shape] of A and of B whose inner products are the joint moments."""
    both = None if centred is None else torch.cat([centred.expand(shape).flatten()] * 2)
    factor = square_root(moments.mean(both))
    a, b = torch.split(factor, factor.shape[1] // 2, 1)
    return a.reshape(-1, *shape), b.reshape(-1, *shape)


@dataclass(frozen=True)
class LayerHeads:
    """Features of a layer's heads from activations.

    Attributes
    ----------
    a, b
        Queries, keys and values as they are computed, outputs of every query head as ``heads`` [kv, query, rows, vo], and O from the weights.
    """

    a: HeadFeatures
    b: HeadFeatures


def layer_heads(pair: Pair, products: Products, i: int, a: Parameters, b: Parameters) -> LayerHeads:
    """Features of layer i's heads; `a` and `b` are normal forms with B's stream already turned to A's."""
    attention, prefix = pair.folded.layers[i].attention, f"layers.{i}.attention"
    kv, query = attention.kv_heads, attention.group
    # What is added to every key alike adds a constant along each softmax row: nothing sees it, in lanes that do not turn.
    still = torch.zeros(attention.head_dim, dtype=torch.bool)
    if attention.qk_norm is None:
        still[list(attention.still_lanes)] = True
    sides = []
    q = _columns(products.joint[f"{prefix}.q"], (kv, query, attention.head_dim))
    k = _columns(products.joint[f"{prefix}.k"], (kv, attention.head_dim), still)
    v = _columns(products.joint[f"{prefix}.v"], (kv, attention.value_dim))
    z = _columns(products.joint[f"{prefix}.heads"], (kv, query, attention.value_dim))
    for side, p in enumerate((a, b)):
        sides.append(
            HeadFeatures(
                lane_features(attention, q[side], k[side]),
                v[side].permute(1, 0, 2),
                p[f"{prefix}.o"],
                per_query_features(attention, prefix, p),
                z[side].permute(1, 2, 0, 3),
            )
        )
    return LayerHeads(*sides)


def _relative(a: HeadFeatures, b: HeadFeatures) -> tuple[HeadFeatures, HeadFeatures]:
    """Features in which every KV head's (under a rotary encoding, every block's) queries, keys, values and outputs of A have norm one.

    An error of queries counts by the size of the keys that it meets, and the other way round; so both are measured relative to their size.
    The same factor on both models leaves the element as it is.
    """

    def unit(x: Tensor, axes: tuple[int, ...]) -> Tensor:
        size = x.abs().square().sum(axes, keepdim=True).sqrt()
        return torch.where(size > 0, 1 / torch.where(size > 0, size, torch.ones_like(size)), torch.ones_like(size))

    qk: tuple[list[QKBlocks], list[QKBlocks]] = ([], [])
    for x, y in zip(a.qk, b.qk, strict=True):
        s, t = unit(x.q, (2, 3, 4)), unit(x.k, (2, 3))
        for out, f in zip(qk, (x, y), strict=True):
            out.append(QKBlocks(f.blocks, f.q * s, f.k * t))
    assert a.heads is not None
    v, o, z = unit(a.v, (1, 2)), unit(a.o, (1, 2, 3)), unit(a.heads, (1, 2, 3))
    sides = []
    for side, blocks in zip((a, b), qk, strict=True):
        assert side.heads is not None
        # Values, and what attention makes of them, change basis together: stacked, with equal weight.
        values = torch.cat([side.v * v, (side.heads * z).flatten(1, 2)], 1)
        sides.append(HeadFeatures(tuple(blocks), values, side.o * o, side.per_query))
    return sides[0], sides[1]


def solve_basis(group: Wreath, heads: LayerHeads, order: Tensor, query: Tensor, solvers: Solvers, spaces: tuple[str, ...]) -> WreathElement:
    """The element with this order of KV heads and of queries, and the best basis inside each."""
    a, b = _relative(heads.a, reordered(heads.b, order, query))
    inner, _ = solve_within(group, a, b, solvers, spaces)
    return WreathElement(order, {"query": query, **inner})


def _match_heads(group: Wreath, heads: LayerHeads, solvers: Solvers, spaces: tuple[str, ...]) -> WreathElement:
    identity = group.identity()
    order, query = identity.order, identity.inner["query"]
    if "heads" in spaces:
        order, query = assign_heads(group, head_cost(group, heads.a, heads.b))
    return solve_basis(group, heads, order, query, solvers, spaces)


# --- neurons --------------------------------------------------------------------------------------------------------


def _match_neurons(group: Group, cross: Cross, down: tuple[Tensor, Tensor], spaces: tuple[str, ...]) -> Element:
    """Order of largest correlation; scales from hidden activations and `down` [.., neuron, width] together, each relative to A's size."""
    correlation, covariance, sizes = cross.correlation(), cross.covariance(), cross.variances()
    if not isinstance(group, Wreath):
        return _neurons(group, correlation, covariance, sizes, down)[0]
    n = group.copies
    m = correlation.shape[0] // n
    corr, cov = (x.reshape(n, m, n, m) for x in (correlation, covariance))
    var = [x.reshape(n, m) for x in sizes]
    pairs = {
        (i, j): _neurons(group.inner, corr[i, :, j], cov[i, :, j], (var[0][i], var[1][j]), (down[0][i], down[1][j]))
        for i in range(n)
        for j in range(n)
        if i == j or "experts" in spaces
    }
    order = torch.arange(n)
    if "experts" in spaces:
        order = assignment(torch.stack([torch.stack([pairs[i, j][1] for j in range(n)]) for i in range(n)]))
    if "neurons" not in spaces:
        return WreathElement(order, group.inner.identity((n,)))
    leaves = [group.inner.leaves(pairs[i, int(j)][0]) for i, j in enumerate(order)]
    return WreathElement(order, group.inner.build({key: torch.stack([leaf[key] for leaf in leaves]) for key in leaves[0]}))


def _neurons(
    group: Group, correlation: Tensor, covariance: Tensor, sizes: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]
) -> tuple[Element, Tensor]:
    """The element of one MLP, and the correlation that it reaches."""
    signed = isinstance(group, Monomial) and group.scales in ("sign", "nonzero")
    # Neurons that no input wakes are told apart by what they would write.
    score = correlation + _TIE * (_unit(down[0]) @ _unit(down[1]).mT)
    score = score.abs() if signed else score
    order = assignment(score)
    lanes = torch.arange(len(order))
    reached = score[lanes, order].sum()
    if not isinstance(group, Monomial):
        return order, reached
    if group.scales == "sign":
        return MonomialElement(order, torch.where(correlation[lanes, order] < 0, -1.0, 1.0).to(correlation.dtype)), reached
    a, b = down[0], down[1][order]

    def over(x: Tensor, size: Tensor) -> Tensor:
        """x relative to A's size; nothing where A has none, and no scale brings B closer."""
        return torch.where(size > 0, x / torch.where(size > 0, size, torch.ones_like(size)), torch.zeros_like(size))

    hidden, written = sizes[0], a.square().sum(-1)
    alpha, beta = over(covariance[lanes, order], hidden), over((a * b).sum(-1), written)
    p, q = over(sizes[1][order], hidden), over(b.square().sum(-1), written)
    asleep = correlation[lanes, order] == 0
    # Of a neuron that no input wakes only what it would write can be compared: there the best scale is a ratio of norms.
    still = torch.where(q > 0, q, torch.ones_like(q)).sqrt()
    still = torch.where(beta < 0, -still, still) if signed else still
    solved = solve_scales(alpha, beta, torch.where(asleep, 0.0, p), q, positive=group.scales == "positive")
    return MonomialElement(order, torch.where(asleep, still, solved)), reached


def _unit(rows: Tensor) -> Tensor:
    """Rows at norm one; zero rows stay."""
    size = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return rows / torch.where(size > 0, size, torch.ones_like(size))


# --- the pass -------------------------------------------------------------------------------------------------------


def gather(pair: Pair, a: Parameters, b: Parameters, inputs: Tensor, dtype: torch.dtype, progress: Progress | None = None) -> Products:
    """Products of both models' activations on `inputs`; `a` and `b` are normal forms (float64), run in `dtype`."""
    check_inputs(pair.folded, inputs)
    products = Products(pair)
    sides = [{name: x.to(dtype) for name, x in p.items()} for p in (a, b)]
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    positions = inputs.shape[1]
    run_side_by_side(
        pair.folded,
        sides[0],
        sides[1],
        inputs,
        products.visit,
        batch=max(1, _TOKENS // positions),
        progress=None if progress is None else lambda done, total: progress("activations", done, total),
    )
    sums = {site: c.product for part in (products.stream, products.neurons) for site, c in part.items()}
    for site, total in (sums | {site: m.square for site, m in products.joint.items()}).items():
        if not bool(torch.isfinite(total).all()):
            raise CosetError(
                f"activations: what the models compute at {site} leaves the range of {dtype}; the matcher weights does not run them"
            )
    return products


def match_activations(
    architecture: Architecture,
    reference: Parameters,
    other: Parameters,
    inputs: Tensor,
    *,
    spaces: tuple[str, ...] = SPACES,
    layers: tuple[int, ...] | None = None,
    solvers: Solvers = DEFAULT_SOLVERS,
    pinned: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> Match:
    """Find the transform that brings `other` to `reference` from what both compute on `inputs`, in closed form and one pass.

    Parameters
    ----------
    inputs
        Token ids [samples, length] (int64) or patches [samples, patches, features]; no labels. See `coset.alignment.sources` for inputs that need
        no data.
    spaces, layers, solvers, pinned, progress
        As for :func:`coset.alignment.match`.

    Returns
    -------
    Match
        Its history is the squared distance of what is read from the stream, relative to the reference's, before and after the stream moves.

    Raises
    ------
    CosetError
        If spaces are unknown, nothing can move, or the inputs do not fit the architecture or are none.
    """
    pair = Pair(architecture, reference, other, spaces=spaces, layers=layers, pinned=pinned)
    dtype = next(iter(reference.values())).dtype
    dtype = dtype if dtype == torch.float64 else torch.float32
    # Normal forms are float64: never more than one whole at a time.
    sides = [{name: x.to(dtype) for name, x in pair.normal(p).items()} for p in (reference, other)]
    products = gather(pair, sides[0], sides[1], inputs, dtype, progress)
    del sides
    element, steps = _element(pair, products, solvers)
    return Match(pair.transform(element), tuple(steps), tuple(pair.notes))


def _normal_layer(pair: Pair, parameters: Parameters, i: int) -> dict[str, Tensor]:
    """The tensors of one layer of a model in normal form, float64."""
    whole = {name: parameters[name].to(torch.float64) for name, spec in tensors(pair.architecture).items() if spec.layer == i}
    return fold(pair.architecture, whole, pair.names)[1]


def _element(pair: Pair, products: Products, solvers: Solvers) -> tuple[dict[str, Element], list[Step]]:
    element: dict[str, Element] = {}
    steps: list[Step] = []
    if "stream" in pair.groups:
        element["stream"], steps = _solve_stream(pair, products)
    stream = dict(element)
    for i in pair.layers:
        a, turned = _normal_layer(pair, pair.reference, i), move(pair.folded, stream, _normal_layer(pair, pair.other, i))
        if pair.moves(i, "heads"):
            group = pair.groups[f"layers.{i}.heads"]
            assert isinstance(group, Wreath)
            element[f"layers.{i}.heads"] = _match_heads(group, layer_heads(pair, products, i, a, turned), solvers, pair.spaces)
        if pair.moves(i, "neurons"):
            down = f"layers.{i}.mlp.down"
            cross = products.neurons[f"layers.{i}.mlp.hidden"]
            element[f"layers.{i}.neurons"] = _match_neurons(pair.groups[f"layers.{i}.neurons"], cross, (a[down], turned[down]), pair.spaces)
    return element, steps


__all__ = ["LayerHeads", "Products", "gather", "layer_heads", "match_activations", "solve_basis"]
