"""Acting with group elements, and the transforms that carry one checkpoint to another.

:func:`move` is the group action on the normal form: for every tensor, for every axis, apply the element of the axis's space. A
:class:`Transform` adds the gauge on both sides, so that it goes from raw weights to raw weights and can be inverted, composed, saved and
loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from coset.architecture import Architecture
from coset.errors import CosetError
from coset.groups import Element, Group, Product, Wreath
from coset.groups.composite import WreathElement
from coset.groups.monomial import reorder
from coset.normal_form import Gauge, coordinates, fold, folded_architecture, random_gauge, read_gauge, unfold
from coset.parameters import Parameters, TensorSpec, tensors
from coset.symmetries import group as symmetry_group

SPACES = ("heads", "qk", "vo", "neurons", "experts", "gains", "shifts", "stream")
"""What a user can choose to move."""


def _on_axis(group: Group, g: Element, x: Tensor, axis: int, batch_axes: tuple[int, ...], variance: int) -> Tensor:
    """Act on one axis of x; the element's batch dimensions run along `batch_axes`."""
    lead = tuple(range(len(batch_axes)))
    moved = torch.movedim(x, (*batch_axes, axis), (*lead, -1))
    return torch.movedim(group.act(g, moved, variance), (*lead, -1), (*batch_axes, axis))


def _heads(group: Wreath, g: WreathElement, spec: TensorSpec, x: Tensor) -> Tensor:
    kv, query = spec.axis("kv"), spec.axis("query")
    if kv is None:
        return x
    assert isinstance(group.inner, Product)
    if query is None:
        x = reorder(x, g.order, kv)
    else:
        # Both orders in one pass over the memory: the two axes are neighbours everywhere.
        both, count = x.flatten(kv, query), x.shape[query]
        x = reorder(both, (g.order[:, None] * count + g.inner["query"]).flatten(), kv).reshape(x.shape)
    for space in ("qk", "vo"):
        axis = spec.axis(space)
        if axis is not None:
            x = _on_axis(group.inner.factors[space], g.inner[space], x, axis, (kv,), spec.axes[axis].variance)
    return x


def _neurons(group: Group, g: Element, spec: TensorSpec, x: Tensor) -> Tensor:
    batch: tuple[int, ...] = ()
    if isinstance(group, Wreath):
        expert = spec.axis("expert")
        if expert is None:
            return x
        x = reorder(x, g.order, expert)
        group, g, batch = group.inner, g.inner, (expert,)
    axis = spec.axis("neuron")
    return x if axis is None else _on_axis(group, g, x, axis, batch, spec.axes[axis].variance)


def move(architecture: Architecture, element: Mapping[str, Element], parameters: Parameters) -> dict[str, Tensor]:
    """Apply a group element to parameters in normal form.

    Parameters
    ----------
    architecture
        Of the parameters. Where its norms keep their gains, the stream's element may only reorder and flip signs: fold the gains first.
    element
        One element a space (``stream``, ``layers.i.heads``, ``layers.i.neurons``); a space that is missing stays as it is.
    parameters
        Canonical tensors, or any subset of them.

    Returns
    -------
    dict
        New tensors; those that no space touches are the same objects.
    """
    groups = symmetry_group(architecture).factors
    unknown = element.keys() - groups.keys()
    if unknown:
        raise CosetError(f"element: this architecture has no space {', '.join(sorted(unknown))}; it has {', '.join(groups)}")
    out = {}
    for name, spec in tensors(architecture).items():
        if name not in parameters:
            continue
        x = parameters[name]
        if spec.layer is not None:
            for kind, function in ((f"layers.{spec.layer}.heads", _heads), (f"layers.{spec.layer}.neurons", _neurons)):
                if kind in element:
                    x = function(groups[kind], element[kind], spec, x)  # type: ignore[arg-type]
        if "stream" in element:
            for axis, label in enumerate(spec.axes):
                if label.space == "stream":
                    x = _on_axis(groups["stream"], element["stream"], x, axis, (), label.variance)
        out[name] = x
    return out


@dataclass(frozen=True)
class Transform:
    """A function-preserving change of weights: fold the gauge, act, write in the target gauge.

    Attributes
    ----------
    architecture
        Of what it applies to.
    element
        What acts on the normal form, one element a space.
    source, target
        Gauges (the same coordinates in both) of what it was found on and of what it produces. `source` is only needed for the inverse.
    """

    architecture: Architecture
    element: Mapping[str, Element]
    source: Gauge
    target: Gauge

    def __post_init__(self) -> None:
        if self.source.keys() != self.target.keys():
            raise CosetError("transform: source and target gauge must hold the same coordinates")

    @property
    def folded(self) -> Architecture:
        """Architecture of the normal form on which the element acts."""
        return folded_architecture(self.architecture, self.target)

    def groups(self) -> Mapping[str, Group]:
        """The group of every space, of which the element holds one element each."""
        return symmetry_group(self.folded).factors

    def __call__(self, parameters: Parameters, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """Apply to all canonical tensors, or to whole blocks of them; computed in `dtype` and returned in it."""
        cast = {name: tensor.to(dtype) for name, tensor in parameters.items()}
        folded, normal, _ = fold(self.architecture, cast, self.target)
        normal = move(folded, self.element, normal)  # frees what was folded
        return unfold(self.architecture, normal, self.target)

    def inverse(self) -> Transform:
        """The transform that undoes this one."""
        group = symmetry_group(self.folded).factors
        return Transform(self.architecture, {key: group[key].inverse(g) for key, g in self.element.items()}, self.target, self.source)

    def then(self, other: Transform) -> Transform:
        """This transform followed by `other`; both must fold the same coordinates."""
        if other.architecture != self.architecture or other.target.keys() != self.target.keys():
            raise CosetError("transforms: only those of one architecture that fold the same coordinates can be composed")
        group = symmetry_group(self.folded).factors
        element = {}
        for key in [k for k in group if k in self.element or k in other.element]:
            identity = group[key].identity()
            element[key] = group[key].compose(self.element.get(key, identity), other.element.get(key, identity))
        return Transform(self.architecture, element, self.source, other.target)

    def belongs(self, tolerance: float | None = None) -> bool:
        """Whether every part is an element of the architecture's group, and both gauges have the right shapes."""
        group = symmetry_group(self.folded).factors
        if not all(key in group and group[key].belongs(g, tolerance) for key, g in self.element.items()):
            return False
        available = coordinates(self.architecture)
        return all(
            name in available and tuple(value.shape) == available[name].shape and bool(torch.isfinite(value).all())
            for gauge in (self.source, self.target)
            for name, value in gauge.items()
        )

    def save(self, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
        """Write one ``.safetensors`` file: the element's and gauges' tensors, with JSON metadata. Never pickle.

        The file carries the sizes of every tensor of the architecture, so that :meth:`load` can refuse another one.
        """
        group = symmetry_group(self.folded).factors
        out = {f"element/{key}/{name}": leaf for key, g in self.element.items() for name, leaf in group[key].leaves(g).items()}
        out |= {f"source/{name}": value for name, value in self.source.items()}
        out |= {f"target/{name}": value for name, value in self.target.items()}
        described = {"coset": "transform", "signature": json.dumps(signature(self.architecture))} | dict(metadata or {})
        path = Path(path)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            temporary.write_bytes(_serialised(out, described))
            temporary.replace(path)
        except OSError as error:
            raise CosetError(f"{path}: cannot write the transform: {error}") from None
        finally:
            temporary.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | os.PathLike[str], architecture: Architecture) -> Transform:
        """Read a transform and check that it belongs to `architecture`.

        Raises
        ------
        CosetError
            If the file is not a transform, is for another architecture, or holds something outside the group.
        """
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        except FileNotFoundError:
            raise CosetError(f"{path}: no such transform file") from None
        except (OSError, SafetensorError) as error:
            raise CosetError(f"{path}: not a readable safetensors file: {error}") from None
        if metadata.get("coset") != "transform":
            raise CosetError(f"{path}: not a transform written by coset (its metadata says {metadata.get('coset')!r})")
        if metadata.get("signature") != json.dumps(signature(architecture)):
            lines = _signature_differences(metadata.get("signature", ""), signature(architecture))
            raise CosetError(
                "\n".join([f"{path}: this transform was written for another architecture than that of the checkpoint", *lines])
            )
        gauges: dict[str, dict[str, Tensor]] = {"source": {}, "target": {}}
        leaves: dict[str, dict[str, Tensor]] = {}
        for name, tensor in stored.items():
            kind, _, rest = name.partition("/")
            if kind in gauges:
                gauges[kind][rest] = tensor
            elif kind == "element":
                space, _, leaf = rest.partition("/")
                leaves.setdefault(space, {})[leaf] = tensor
            else:
                raise CosetError(f"{path}: tensor {name} does not belong in a transform file")
        folded = folded_architecture(architecture, gauges["target"])
        group = symmetry_group(folded).factors
        try:
            element = {space: group[space].build(own) for space, own in leaves.items()}
            transform = Transform(architecture, element, gauges["source"], gauges["target"])
        except KeyError as error:
            raise CosetError(f"{path}: the transform lacks or misnames {error}") from None
        if not transform.belongs():
            raise CosetError(f"{path}: holds an element that does not belong to the symmetry group {symmetry_group(folded).name}")
        return transform


def _serialised(content: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file whose bytes depend on nothing but its content: the library writes metadata in the order of a hash table."""
    blob = save({name: value.detach().contiguous().cpu() for name, value in content.items()}, dict(metadata))
    length = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + length])
    header["__metadata__"] = dict(sorted(metadata.items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + blob[8 + length :]


def act(element: Transform | Mapping[str, Element], parameters: Parameters, architecture: Architecture | None = None) -> dict[str, Tensor]:
    """Act on raw parameters: other weights, same function.

    Parameters
    ----------
    element
        A :class:`Transform`, or an element of ``symmetry(architecture).group`` (or part of it), which then acts in the parameters' own gauge: where
        the stream turns, norm gains come back as they were.
    parameters
        Canonical tensors by name; any floating dtype.
    architecture
        Of the parameters; needed for a bare element.

    Returns
    -------
    dict
        New tensors in float64.

    Raises
    ------
    CosetError
        If a bare element comes without an architecture, or has a space that the architecture lacks.
    """
    if isinstance(element, Transform):
        return element(parameters)
    if architecture is None:
        raise CosetError("act: a bare group element does not know its architecture; give it as the third argument")
    names = [n for n in gauge_names(architecture, ("stream",)) if "stream" in element]
    own = read_gauge(architecture, parameters, names)
    return Transform(architecture, element, own, own)(parameters)


def signature(architecture: Architecture) -> dict[str, Any]:
    """What a transform file remembers of its architecture: layers, width and, per layer, head counts and rotary planes."""
    layers = []
    for layer in architecture.layers:
        a = layer.attention
        layers.append([a.heads, a.kv_heads, a.head_dim, a.value_dim, [list(p) for p in a.planes], [list(f) for f in a.plane_frequencies]])
    shapes = {name: list(spec.shape) for name, spec in tensors(architecture).items()}
    summary = f"{len(layers)} layers of width {architecture.width}, {layers[0][0]} heads on {layers[0][1]} KV heads of width {layers[0][2]}"
    return {"summary": summary, "layers": layers, "shapes": shapes}


def _signature_differences(stored: str, expected: Mapping[str, Any]) -> list[str]:
    """In what a transform file's signature is not the one of a checkpoint's architecture, a line each."""
    try:
        found = json.loads(stored)
        layers, shapes = list(found["layers"]), dict(found["shapes"])
    except (ValueError, KeyError, TypeError):
        return ["the file does not say for which"]
    lines = []
    if len(layers) != len(expected["layers"]):
        lines.append(f"layers: the checkpoint has {len(expected['layers'])}, the transform {len(layers)}")
    fields = ("heads", "KV heads", "head width", "value width", "rotary planes", "rotary frequencies")
    for i, (own, other) in enumerate(zip(expected["layers"], layers, strict=False)):
        for field, x, y in zip(fields, own, other, strict=True):
            if x != y:
                shown = (x, y) if field[0] != "r" else (f"{len(x)} planes", f"{len(y)} planes" if len(x) != len(y) else "other ones")
                lines.append(f"layer {i}, {field}: the checkpoint has {shown[0]}, the transform {shown[1]}")
    # Counts of layers and heads decide about the shapes of tensors, which then say nothing new.
    for name in () if lines else dict.fromkeys((*expected["shapes"], *shapes)):
        x, y = (s.get(name, "no such tensor") for s in (expected["shapes"], shapes))
        if x != y:
            lines.append(f"tensor {name}: the checkpoint has {x}, the transform {y}")
    most = 12
    return lines[:most] + ([f"... and {len(lines) - most} more"] if len(lines) > most else [])


def gauge_names(architecture: Architecture, spaces: tuple[str, ...], pinned: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The gauge coordinates that the chosen spaces move: gains, shifts, and every gain when the stream turns; none that changes a `pinned` tensor.

    What LayerNorm's readers are blind to is a fixed direction only once their gains are folded, so those shifts need the gains too.
    """
    available = coordinates(architecture)
    names = []
    for name, c in available.items():
        if set(c.changes) & set(pinned):
            continue
        if c.space == "gains":
            norm_gain = name.endswith(".gain")
            if "gains" in spaces or (norm_gain and "stream" in spaces):
                names.append(name)
        elif "shifts" in spaces:
            names.append(name)
    return tuple(name for name in names if set(available[name].needs) <= set(names))


def check_spaces(spaces: tuple[str, ...]) -> None:
    """Raise unless every name is one of :data:`SPACES`."""
    unknown = [s for s in spaces if s not in SPACES]
    if unknown or not spaces:
        raise CosetError(f"spaces: {', '.join(unknown) or 'none given'}; choose from {', '.join(SPACES)}")


def restrict(group: Group, g: Element, key: str, spaces: tuple[str, ...]) -> Element:
    """The part of an element of one factor that the chosen spaces allow to move; the rest becomes the identity."""
    if key == "stream":
        return g if "stream" in spaces else group.identity()
    if key.endswith(".heads"):
        identity = group.identity()
        inner = {
            "query": g.inner["query"] if "heads" in spaces else identity.inner["query"],
            "qk": g.inner["qk"] if "qk" in spaces else identity.inner["qk"],
            "vo": g.inner["vo"] if "vo" in spaces else identity.inner["vo"],
        }
        return WreathElement(g.order if "heads" in spaces else identity.order, inner)
    if isinstance(group, Wreath):
        identity = group.identity()
        return WreathElement(g.order if "experts" in spaces else identity.order, g.inner if "neurons" in spaces else identity.inner)
    return g if "neurons" in spaces else group.identity()


def random_transform(
    architecture: Architecture, parameters: Parameters, *, spaces: tuple[str, ...] = SPACES, seed: int = 0, pinned: tuple[str, ...] = ()
) -> Transform:
    """A random transform of these parameters, in every chosen space that the architecture has.

    Parameters
    ----------
    parameters
        The tensors to be transformed: their own gauge is what the inverse returns to, and sets the size of random shifts.
    spaces
        Of :data:`SPACES`.
    seed
        Same seed, same bytes.
    pinned
        Tensors that must stay as they are, because something outside the architecture reads them too.
    """
    check_spaces(spaces)
    generator = torch.Generator().manual_seed(seed)
    names = gauge_names(architecture, spaces, pinned)
    folded, own = folded_architecture(architecture, names), read_gauge(architecture, parameters, names)
    wanted = {"heads": {"heads", "qk", "vo"}, "neurons": {"neurons", "experts"}, "stream": {"stream"}}
    element = {
        key: restrict(group, group.random(generator), key, spaces)
        for key, group in symmetry_group(folded).factors.items()
        if wanted[key.rsplit(".", 1)[-1]] & set(spaces)
    }
    space = {name: c.space for name, c in coordinates(architecture).items()}
    moved = random_gauge(architecture, own, generator)
    # Gains folded only because the stream turns come back as they were.
    target = {name: value if space[name] in spaces else own[name] for name, value in moved.items()}
    return Transform(architecture, element, own, target)
