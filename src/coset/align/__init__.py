"""Alignment of two models: heads and bases (the two-stage algorithm), neurons, stream, and the cycle over all of them."""

from coset.align.balance import balancing_element
from coset.align.features import Metric
from coset.align.heads import Solvers
from coset.align.matching import Alignment, Match, Step, align, match
from coset.align.moments import input_moments, mean_moments

__all__ = ["Alignment", "Match", "Metric", "Solvers", "Step", "align", "balancing_element", "input_moments", "match", "mean_moments"]
