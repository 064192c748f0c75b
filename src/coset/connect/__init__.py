"""Linear mode connectivity: paths between models, barriers on them, statistics and figures."""

from coset.connect.barriers import DEFINITION, Barrier, Curve, barrier, barrier_of, evaluate, percent_of_naive, summarise
from coset.connect.circuits import interpolate_circuits
from coset.connect.figures import SUFFIXES, Panel, draw, render, save
from coset.connect.paths import Path, interpolate, segment
from coset.connect.refitting import Refit, refit
from coset.objective import Score, score

__all__ = [
    "DEFINITION",
    "SUFFIXES",
    "Barrier",
    "Curve",
    "Panel",
    "Path",
    "Refit",
    "Score",
    "barrier",
    "barrier_of",
    "draw",
    "evaluate",
    "interpolate",
    "interpolate_circuits",
    "percent_of_naive",
    "refit",
    "render",
    "save",
    "score",
    "segment",
    "summarise",
]
