"""Alignment of two models: heads and bases (the two-stage algorithm), neurons and stream, by weights, by activations, or learned."""

from coset.alignment.activations import match_activations
from coset.alignment.balance import balancing_element
from coset.alignment.features import Metric
from coset.alignment.heads import Solvers
from coset.alignment.learned import Learning, learn
from coset.alignment.many import Consensus, align_many
from coset.alignment.matchers import MATCHERS, Matching, align, find_match
from coset.alignment.matching import match
from coset.alignment.moments import input_moments, mean_moments
from coset.alignment.pair import Alignment, Match, Pair, Progress, Step
from coset.alignment.search import search_heads
from coset.alignment.sources import probe_inputs, sample_text

__all__ = [
    "MATCHERS",
    "Alignment",
    "Consensus",
    "Learning",
    "Match",
    "Matching",
    "Metric",
    "Pair",
    "Progress",
    "Solvers",
    "Step",
    "align",
    "align_many",
    "balancing_element",
    "find_match",
    "input_moments",
    "learn",
    "match",
    "match_activations",
    "mean_moments",
    "probe_inputs",
    "sample_text",
    "search_heads",
]
