"""Groups on plain arrays: their elements, laws and actions. No Transformer in sight."""

from coset.groups.base import Element, Group
from coset.groups.composite import Product, Wreath, WreathElement, finite_order, heads, map_leaves
from coset.groups.linear import GeneralLinear, MatrixGroup, Mirrored, Orthogonal, polar, random_orthogonal
from coset.groups.monomial import Monomial, MonomialElement, Permutation, Scaling, SignedPermutation, assignment
from coset.groups.rotary import Block, PlanePhases, RotaryCommutant

__all__ = [
    "Block",
    "Element",
    "GeneralLinear",
    "Group",
    "MatrixGroup",
    "Mirrored",
    "Monomial",
    "MonomialElement",
    "Orthogonal",
    "Permutation",
    "PlanePhases",
    "Product",
    "RotaryCommutant",
    "Scaling",
    "SignedPermutation",
    "Wreath",
    "WreathElement",
    "assignment",
    "finite_order",
    "heads",
    "map_leaves",
    "polar",
    "random_orthogonal",
]
