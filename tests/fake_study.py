"""Made-up results of a study, in the shape that `coset study run` writes: several tasks, encodings, scopes and matchers, sweeps, ablations."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean, stdev
from typing import Any

TASKS = (("digits", "vit"), ("stdlib_bytes", "gpt"), ("glosses <script>alert(1)</script> & $co$t | pipe", "bert"))
ENCODINGS = ("sinusoidal", "learned", "rope")
SCOPES = ("first-attention", "all-attention", "first-layer", "whole")
LEFT = {
    "two_stage": {"first-attention": 0.08, "all-attention": 0.55, "first-layer": 0.35, "whole": 0.97},
    "activations": {"first-attention": 0.06, "all-attention": 0.3, "first-layer": 0.2, "whole": 0.4},
    "learned": {"first-attention": 0.01, "all-attention": 0.06, "first-layer": 0.03, "whole": 0.08},
}
CLOSER = {"two_stage": 0.6, "activations": 0.8, "learned": 0.9}
POINTS = [i / 24 for i in range(25)]


def summary(values: list[float]) -> dict[str, float | None]:
    return {"mean": fmean(values), "standard_error": stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None}


def pair(draw: random.Random, seeds: tuple[int, int], height: float, distance: float) -> dict[str, Any]:
    ends = [0.2 + 0.05 * draw.random() for _ in range(2)]
    loss = [(1 - t) * ends[0] + t * ends[1] + height * math.sin(math.pi * t) ** 2 for t in POINTS]
    accuracy = [0.97 - 0.8 * (1 - math.exp(-(x - 0.2))) for x in loss]
    return {
        "seeds": list(seeds),
        "loss_barrier": height,
        "accuracy_barrier": max(0.0, (accuracy[0] + accuracy[-1]) / 2 - accuracy[12]),
        "loss_area": height / 2,
        "distance": distance,
        "points": POINTS,
        "loss": loss,
        "accuracy": accuracy,
    }


def setting(
    number: int, task: str, model: str, pe: str, scope: str, *, width: int = 64, seeds: int = 3, naive: float = 2.5, ablated: bool = False
) -> dict[str, Any]:
    draw = random.Random(f"{task} {pe} {scope} {width}")
    combinations = list(itertools.combinations(range(seeds), 2))
    heights = [naive * (0.8 + 0.4 * draw.random()) for _ in combinations]
    matchers: dict[str, Any] = {}
    for name in ("naive", *LEFT):
        factor = 1.0 if name == "naive" else LEFT[name][scope] * (1.5 if pe == "rope" else 1.0) * (64 / width) ** 0.5
        found = [
            pair(
                draw,
                seeds,
                h * (1.0 if name == "naive" else min(factor * (0.9 + 0.2 * draw.random()), 1.3)),
                CLOSER.get(name, 1.0) * (0.9 + 0.2 * draw.random()),
            )
            for seeds, h in zip(combinations, heights, strict=True)
        ]
        barriers = [p["loss_barrier"] for p in found]
        percent = 100 * fmean(barriers) / fmean(heights) if naive else None
        error = 100 * stdev(barriers) / math.sqrt(len(found)) / fmean(heights) if naive and len(found) > 1 else None
        matchers[name] = {
            **{key: summary([p[key] for p in found]) for key in ("loss_barrier", "accuracy_barrier", "loss_area", "distance")},
            "percent_of_naive": percent,
            "percent_standard_error": error,
            "pairs": found,
        }
    stages = {"none": 75.3, "orthogonal": 13.2, "full": 9.1}
    ablations = {
        "permutation_rank": {"mean": 1.33, "standard_error": 0.33, "of": 24},
        "l_hat": {"mean": 2.7, "standard_error": 1.9},
        "stage_two": {
            name: {"loss_barrier": {"mean": p / 40, "standard_error": 0.01}, "percent_of_naive": p, "percent_standard_error": None}
            for name, p in stages.items()
        },
    }
    steps = list(range(0, 201, 20))
    return {
        "id": f"s{number:03d}",
        "task": task,
        "model": model,
        "pe": pe,
        "scope": scope,
        "layers": 2,
        "width": width,
        "heads": 4,
        "kv_heads": 4,
        "rope_base": 10000.0 if pe == "rope" else None,
        "freeze": False,
        "parameters": 12 * width * width * 2,
        "symmetry": {
            "attention_dimension": 2 * (1088 if pe == "rope" else 2048) * width // 64,
            "total_dimension": 2 * (1088 if pe == "rope" else 2048) * width // 64 + 2017,
            "stream": {"group": f"O({width}) × R_{{>0}}", "dimension": width * (width - 1) // 2 + 1},
        },
        "data": {"grid": [4, 4], "classes": 10, "context": None, "train": 1437, "test": 360},
        "base": {"loss": 0.21, "accuracy": 0.961},
        "models": [
            {
                "seed": seed,
                "loss": 0.2 + 0.01 * seed,
                "accuracy": 0.96 - 0.003 * seed,
                "training": {"steps": steps, "loss": [2.3 * math.exp(-s / 50) + 0.05 * draw.random() for s in steps]},
            }
            for seed in range(seeds)
        ],
        "matchers": matchers,
        "ablations": ablations if ablated else None,
        "timing": {"train": 12.5},
    }


def study() -> dict[str, Any]:
    """36 settings of the matrix, four more widths of one cell, one that lost a matcher to a failed unit, one with a naive barrier of 0."""
    numbers = itertools.count()
    settings = [
        setting(next(numbers), task, model, pe, scope, ablated=task == "digits" and scope == "first-attention")
        for (task, model), pe, scope in itertools.product(TASKS, ENCODINGS, SCOPES)
    ]
    settings += [setting(next(numbers), "digits", "vit", pe, "whole", width=w) for pe in ("sinusoidal", "rope") for w in (32, 128)]
    settings.append(setting(next(numbers), "stdlib_bytes", "gpt", "learned", "first-layer", width=32, seeds=2, naive=0.0))
    del settings[16]["matchers"]["learned"]
    return {
        "name": "fake study <b>bold</b>",
        "coset_version": "0.1.0",
        "definition": "largest excess over the chord between the ends: loss max_t [L(t) - (1-t) L(0) - t L(1)]",
        "config": {
            "name": "fake",
            "seeds": 3,
            "points": 25,
            "matchers": ["naive", *LEFT],
            "setting": [{"task": [task for task, _ in TASKS], "rope_base": None}],
        },
        "environment": {"python": "3.11.9", "torch": "2.13.0", "processor": "x86_64 & more", "threads": 1},
        "settings": settings,
        "failures": [{"unit": "align/s016/learned/0-1", "setting": "s016", "error": "the loss is not finite <img src=x onerror=alert(2)>"}],
        "timing": {"total_seconds": 4321.0, "engine": "local"},
    }
