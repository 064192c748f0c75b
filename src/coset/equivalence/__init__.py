r"""Are two models the same function? The decision, with its evidence.

Two models of one architecture are equivalent when an element of the symmetry group carries one to the other. :func:`compare` finds the
element by alignment and then checks it in two independent ways:

* *algebra*: in normal form (gauge folded away) the moved model must be the other one, entry by entry, within what rounding the stored weights
  does. The noise of every entry is not assumed but sampled: both models are rounded once more at random and sent through the same
  element. The comparison is made in the bases of both models, since a change of one weight is one entry in one of them and spread out in
  the other;
* *outputs*: the forward passes of both, in float64 on random inputs, may differ by a small multiple of what the same random rounding does.

A visible difference of the outputs is always proof that the functions differ. The algebra is sharper, but proves a difference only where
the element is unique: for degenerate models, or where the search may have failed, a residual that the outputs do not confirm leaves the
case undecided.
"""

from coset.equivalence.outputs import Outputs, invariance_error
from coset.equivalence.residual import Residual, residuals
from coset.equivalence.search import condition
from coset.equivalence.sides import Side
from coset.equivalence.verdict import Comparison, assert_equivalent, compare, compare_sides

__all__ = [
    "Comparison",
    "Outputs",
    "Residual",
    "Side",
    "assert_equivalent",
    "compare",
    "compare_sides",
    "condition",
    "invariance_error",
    "residuals",
]
