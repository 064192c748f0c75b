"""Reading config.json: every field by name, typed, with the class's default; what an architecture cannot express is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coset.architecture import Activation
from coset.errors import CosetError

_MISSING = object()

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "quick_gelu": "quick_gelu",
}


@dataclass(frozen=True)
class Config:
    """A config.json with typed access. A field may have several names (transformers' attribute map); the first present one counts.

    Every reader raises `CosetError` that names file and field where a required field is missing, a value has another type, or two
    names of one field disagree. ``null`` counts as missing except in the ``optional_*`` readers.
    """

    path: str
    values: Mapping[str, Any]

    def fault(self, field: str, problem: str) -> CosetError:
        """An error about one field."""
        return CosetError(f"{self.path}: field {field}: {problem}")

    def _find(self, names: tuple[str, ...]) -> tuple[str, Any]:
        present = [(name, self.values[name]) for name in names if name in self.values]
        if not present:
            return names[0], _MISSING
        name, value = present[0]
        for other, again in present[1:]:
            if again != value:
                raise self.fault(other, f"contradicts {name}: {again!r} and {value!r} are names of the same field")
        return name, value

    def _typed(self, names: tuple[str, ...], kinds: tuple[type, ...], what: str, default: Any) -> Any:
        name, value = self._find(names)
        if value is _MISSING or value is None:
            if default is None:
                raise self.fault(" or ".join(names), f"is missing; expected {what}")
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.fault(name, f"expected {what}, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.fault(name, f"expected a finite number, got {value!r}")
        return value

    def integer(self, *names: str, default: int | None = None) -> int:
        """A positive integer; without a default the field is required."""
        value: int = self._typed(names, (int,), "a positive integer", default)
        if value <= 0:
            raise self.fault(names[0], f"expected a positive integer, got {value}")
        return value

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """A positive integer or null; `default` where the field is absent."""
        return default if name not in self.values else None if self.values[name] is None else self.integer(name)

    def number(self, name: str, default: float) -> float:
        """A finite number."""
        return float(self._typed((name,), (int, float), "a number", default))

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        return bool(self._typed((name,), (bool,), "true or false", default))

    def text(self, name: str, default: str | None = None) -> str:
        """A string; without a default the field is required."""
        return str(self._typed((name,), (str,), "text", default))

    def pair(self, name: str, default: int) -> tuple[int, int]:
        """A positive integer, or two of them (rows, columns)."""
        _, value = self._find((name,))
        if not isinstance(value, list):
            return (self.integer(name, default=default),) * 2
        if len(value) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in value):
            raise self.fault(name, f"expected a positive integer or two of them, got {value!r}")
        return value[0], value[1]

    def activation(self, *names: str, default: str) -> Activation:
        """The MLP's nonlinearity under transformers' names."""
        name = next((n for n in names if self.values.get(n) is not None), names[0])
        value = self.text(name, default)
        if value not in _ACTIVATIONS:
            raise self.fault(name, f"activation {value!r} is not supported (supported: {', '.join(_ACTIVATIONS)})")
        return _ACTIVATIONS[value]

    def labels(self) -> int:
        """Number of classes: of ``id2label``, else ``num_labels``, else 2."""
        names = self.values.get("id2label")
        return len(names) if isinstance(names, dict) and names else self.integer("num_labels", default=2)

    def head_dim(self, width: int, heads: int, default: int | None = None) -> int:
        """``head_dim``, else `default`, else width / heads, which must divide."""
        given = self.optional_integer("head_dim", default)
        if given is not None:
            return given
        if width % heads:
            raise self.fault("num_attention_heads", f"{heads} heads do not divide the width {width}, and there is no head_dim")
        return width // heads

    def refuse(self, name: str, *harmless: Any) -> None:
        """Raise where the field is present with a value that changes the function beyond what an architecture expresses."""
        value = self.values.get(name)
        if value is not None and value not in harmless:
            raise self.fault(name, f"{value!r} changes what the model computes in a way that is not supported")

    def layer_windows(self, layers: int, window: int | None, first: int | None = None) -> tuple[int | None, ...]:
        """The attention window of each layer: by ``layer_types`` where given, else `window` from layer `first` on (None: nowhere)."""
        kinds = self.values.get("layer_types")
        if kinds is None:
            return tuple(window if first is not None and i >= first else None for i in range(layers))
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise self.fault("layer_types", f"expected a list of {layers} layer types, got {kinds!r}")
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise self.fault("layer_types", f"layer type {kind!r} is not supported (supported: full_attention, sliding_attention)")
        if "sliding_attention" in kinds and window is None:
            raise self.fault("layer_types", "names sliding_attention, but there is no sliding_window")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def refuse_everywhere(config: Config) -> None:
    """Fields of no supported class that would change the function of any of them."""
    config.refuse("quantization_config")
    config.refuse("compression_config")
    config.refuse("attn_logit_softcapping")
    config.refuse("final_logit_softcapping")
    config.refuse("add_cross_attention", False)
    config.refuse("cross_attention_hidden_size")
    config.refuse("is_encoder_decoder", False)
    config.refuse("pruned_heads", {})
