"""Alignment of two models: heads and bases (the two-stage algorithm), neurons, stream, and the cycle over all of them."""

from coset.alignment.balance import balancing_element
from coset.alignment.features import Metric
from coset.alignment.heads import Solvers
from coset.alignment.matching import align, match
from coset.alignment.moments import input_moments, mean_moments
from coset.alignment.pair import Alignment, Match, Pair, Progress, Step

__all__ = [
    "Alignment",
    "Match",
    "Metric",
    "Pair",
    "Progress",
    "Solvers",
    "Step",
    "align",
    "balancing_element",
    "input_moments",
    "match",
    "mean_moments",
]
