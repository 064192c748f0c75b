"""Transformer weights modulo their symmetries.

``load`` a checkpoint or describe an architecture with ``uniform``; derive its group (``symmetry``), act with it (``act``,
``random_transform``), decide equivalence (``compare``, ``assert_equivalent``), align (``align``), and measure barriers (``barrier``).
Names are imported on first use, so that ``import coset`` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coset.alignment import (
        Alignment,
        Consensus,
        Learning,
        Matching,
        Solvers,
        align,
        align_many,
        balancing_element,
        input_moments,
        sample_text,
    )
    from coset.architecture import Architecture, uniform
    from coset.certificate import Certificate, certify
    from coset.checkpoint import load, save
    from coset.connect import Barrier, Refit, barrier, interpolate, interpolate_circuits, refit
    from coset.equivalence import Comparison, assert_equivalent, compare, invariance_error
    from coset.errors import CosetError
    from coset.invariants import Fingerprint, fingerprint
    from coset.normal_form import fold, unfold
    from coset.symmetries import Symmetry, symmetry
    from coset.transform import Transform, act, random_transform
    from coset.transformer import forward, initialise, random_inputs

_HOME = {
    "alignment": (
        "Alignment",
        "Consensus",
        "Learning",
        "Matching",
        "Solvers",
        "align",
        "align_many",
        "balancing_element",
        "input_moments",
        "sample_text",
    ),
    "architecture": ("Architecture", "uniform"),
    "certificate": ("Certificate", "certify"),
    "checkpoint": ("load", "save"),
    "connect": ("Barrier", "Refit", "barrier", "interpolate", "interpolate_circuits", "refit"),
    "equivalence": ("Comparison", "assert_equivalent", "compare", "invariance_error"),
    "errors": ("CosetError",),
    "normal_form": ("fold", "unfold"),
    "invariants": ("Fingerprint", "fingerprint"),
    "symmetries": ("Symmetry", "symmetry"),
    "transform": ("Transform", "act", "random_transform"),
    "transformer": ("forward", "initialise", "random_inputs"),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [  # noqa: RUF022 - grouped by module
    "Alignment",
    "Consensus",
    "Learning",
    "Matching",
    "Solvers",
    "align",
    "align_many",
    "balancing_element",
    "input_moments",
    "sample_text",
    "Architecture",
    "uniform",
    "Certificate",
    "certify",
    "load",
    "save",
    "Barrier",
    "Refit",
    "barrier",
    "interpolate",
    "interpolate_circuits",
    "refit",
    "Comparison",
    "assert_equivalent",
    "compare",
    "invariance_error",
    "CosetError",
    "fold",
    "unfold",
    "Fingerprint",
    "fingerprint",
    "Symmetry",
    "symmetry",
    "Transform",
    "act",
    "random_transform",
    "forward",
    "initialise",
    "random_inputs",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'coset' has no attribute {name!r}")
    return getattr(import_module(f"coset.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
