"""Linear mode connectivity: paths between models, barriers on them, statistics and figures."""

from coset.connect.barriers import DEFINITION, Barrier, Curve, barrier, barrier_of, evaluate, percent_of_naive, summarise
from coset.connect.figures import Panel, draw, save
from coset.connect.objective import Score, score
from coset.connect.paths import interpolate

__all__ = [
    "DEFINITION",
    "Barrier",
    "Curve",
    "Panel",
    "Score",
    "barrier",
    "barrier_of",
    "draw",
    "evaluate",
    "interpolate",
    "percent_of_naive",
    "save",
    "score",
    "summarise",
]
