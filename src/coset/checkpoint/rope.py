"""Rotary frequencies from config.json, for every scaling type, computed in float32 as transformers computes them.

What decides the symmetry group is which lanes pair up and which planes share a frequency; the values matter for evaluating the model
and for telling checkpoints apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from coset.architecture import Rotary
from coset.checkpoint.config import Config
from coset.errors import CosetError

TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


class _Scaling:
    """The rope dictionary of a config: ``rope_parameters`` (transformers 5) or ``rope_scaling`` beside ``rope_theta`` (before)."""

    def __init__(self, config: Config, original: int | None):
        self.config = config
        self.original = original
        self.name = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
        values = config.values.get(self.name) or {}
        if not isinstance(values, dict) or any(isinstance(v, dict) for v in values.values()):
            raise config.fault(self.name, f"expected one flat set of rope parameters for all layers, got {values!r}")
        self.values: Mapping[str, Any] = values

    def fault(self, key: str, problem: str) -> CosetError:
        return self.config.fault(f"{self.name}.{key}", problem)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.fault(key, f"expected a positive number, got {value!r}")
        return float(value)

    def maybe(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def factors(self, key: str, planes: int) -> Tensor:
        value = self.values.get(key)
        if (
            not isinstance(value, list)
            or len(value) != planes
            or not all(isinstance(f, int | float) and not isinstance(f, bool) and math.isfinite(f) and f > 0 for f in value)
        ):
            raise self.fault(key, f"expected {planes} positive numbers, one a plane, got {value!r}")
        return torch.tensor(value, dtype=torch.float32)

    @property
    def kind(self) -> str:
        return str(self.values.get("rope_type", self.values.get("type")) or "default")

    def original_length(self) -> float:
        """Length of pretraining: a field of the config itself comes first, as in transformers."""
        if self.original is not None or self.config.values.get("original_max_position_embeddings") is not None:
            return float(self.config.integer("original_max_position_embeddings", default=self.original))
        given = self.maybe("original_max_position_embeddings")
        return float(self.config.integer("max_position_embeddings")) if given is None else given


def _standard(base: float, dim: int) -> Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _llama3(scaling: _Scaling, base: float, dim: int) -> Tensor:
    plain = _standard(base, dim)
    factor, low, high = (scaling.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    length = scaling.original_length()
    if low >= high:
        raise scaling.fault("high_freq_factor", f"must exceed low_freq_factor {low:g}, got {high:g}")
    wavelength = 2 * math.pi / plain
    slowed = torch.where(wavelength > length / low, plain / factor, plain)
    smooth = (length / wavelength - low) / (high - low)
    between = ~(wavelength < length / high) & ~(wavelength > length / low)
    return torch.where(between, (1 - smooth) * slowed / factor + smooth * slowed, slowed)


def _yarn(scaling: _Scaling, base: float, dim: int) -> tuple[Tensor, float]:
    length = scaling.original_length()
    if "factor" not in scaling.values:  # null, in contrast, asks for the ratio of the two lengths
        raise scaling.fault("factor", "is missing; yarn needs one")
    factor = scaling.maybe("factor")
    if factor is None:
        factor = scaling.config.integer("max_position_embeddings") / length

    def mscale(scale: float, slope: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * slope * math.log(scale) + 1.0

    def turns_at(rotations: float) -> float:
        return (dim * math.log(length / (rotations * 2 * math.pi))) / (2 * math.log(base))

    magnitude, above, below = (scaling.maybe(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if magnitude is None:
        magnitude = mscale(factor, above) / mscale(factor, below) if above and below else mscale(factor)
    low, high = turns_at(scaling.number("beta_fast", 32.0)), turns_at(scaling.number("beta_slow", 1.0))
    if scaling.values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    plain = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kept = 1 - ramp
    return 1.0 / (factor * plain) * (1 - kept) + 1.0 / plain * kept, magnitude


def _longrope(scaling: _Scaling, base: float, dim: int) -> tuple[Tensor, float]:
    plain = base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    short, long = (1.0 / (scaling.factors(key, len(plain)) * plain) for key in ("short_factor", "long_factor"))
    # Beyond the length of pretraining the long factors hold. One architecture speaks for both, so the same planes must share frequencies.
    if not torch.equal(short[:, None] == short, long[:, None] == long):
        raise scaling.fault("long_factor", "makes other planes coincide in frequency than short_factor does; that is not supported")
    length = scaling.original_length()
    factor, magnitude = scaling.maybe("factor"), scaling.maybe("attention_factor")
    if factor is None:
        factor = scaling.config.integer("max_position_embeddings") / length
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    return short, magnitude


def rotary(
    config: Config,
    head_dim: int,
    *,
    theta: float = 10_000.0,
    theta_name: str = "rope_theta",
    fraction: float = 1.0,
    fraction_name: str = "partial_rotary_factor",
    aliases: Mapping[str, str] | None = None,
    types: tuple[str, ...] = TYPES,
    original: int | None = None,
    pairing: Literal["half", "interleaved"] = "half",
) -> Rotary:
    """The rotary encoding that a config describes.

    Parameters
    ----------
    theta, theta_name, fraction, fraction_name
        Defaults, and names outside the rope dictionary, of the base and of the rotated fraction of the lanes.
    aliases
        Older names of scaling types of this family.
    types
        Scaling types that the family's class computes.
    original
        The class's default of ``original_max_position_embeddings``, where it has one.

    Returns
    -------
    Rotary
        For ``dynamic`` and ``longrope`` the frequencies up to the length of pretraining; beyond it they change together.

    Raises
    ------
    CosetError
        If the type is unknown, a parameter is missing or out of range, or no lane would rotate.
    """
    scaling = _Scaling(config, original)
    kind = (aliases or {}).get(scaling.kind, scaling.kind)
    if kind not in types:
        raise scaling.fault("rope_type", f"{kind!r} is not supported here (supported: {', '.join(types)})")
    base = scaling.number("rope_theta", config.number(theta_name, theta))
    share = scaling.number("partial_rotary_factor", config.number(fraction_name, fraction))
    dim = int(head_dim * share)
    if dim < 1:
        raise scaling.fault("partial_rotary_factor", f"{share:g} of {head_dim} lanes leaves none to turn")
    if base <= 1:
        raise scaling.fault("rope_theta", f"expected a base above 1, got {base:g}")
    magnitude = 1.0
    if kind == "linear":
        frequencies = _standard(base, dim) / scaling.number("factor")
    elif kind == "llama3":
        frequencies = _llama3(scaling, base, dim)
    elif kind == "yarn":
        frequencies, magnitude = _yarn(scaling, base, dim)
    elif kind == "longrope":
        frequencies, magnitude = _longrope(scaling, base, dim)
    else:
        if kind == "dynamic":
            scaling.number("factor")
        frequencies = _standard(base, dim)
    return Rotary(tuple((float(f),) for f in frequencies), pairing, magnitude)
