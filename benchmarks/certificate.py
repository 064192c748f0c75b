"""Certify every combination of the architecture's parts: predicted against measured dimension of the group.

    python benchmarks/certificate.py [--processes 2] [--every 1] [--seed 0] [--json FILE]

All 2592 one-layer pre-norm combinations of positional encoding, norm, biases, KV heads, QK-norm, MLP and tying. Prints every disagreement
and a summary; the exit code is 1 if there is any disagreement.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from coset.architecture import Architecture, uniform
from coset.certificate import certify

ENCODINGS: dict[str, dict[str, Any]] = {
    "none": {"pe": "none"},
    "sinusoidal": {"pe": "sinusoidal", "positions": 9},
    "learned": {"pe": "learned", "positions": 7},
    "rope": {"pe": "rope", "frequencies": [1.0, 0.4]},
    "partial rope": {"pe": "rope", "frequencies": [1.0]},
    "repeated rope": {"pe": "rope", "frequencies": [1.0, 1.0]},
    "alibi": {"pe": "alibi"},
    "t5": {"pe": "t5"},
}
HEADS = {"all": (2, 2), "fewer": (4, 2), "one": (2, 1)}
AXES: dict[str, tuple[Any, ...]] = {
    "pe": tuple(ENCODINGS),
    "norm": ("none", "rms", "layer"),
    "bias": ("none", "all", "qkv"),
    "kv": tuple(HEADS),
    "qk_norm": (False, True),
    "mlp": ("gelu", "relu", "swiglu"),
    "tied": (False, True),
}


def combinations() -> Iterator[dict[str, Any]]:
    for values in itertools.product(*AXES.values()):
        yield dict(zip(AXES, values, strict=True))


def architecture(combination: dict[str, Any]) -> Architecture:
    heads, kv_heads = HEADS[combination["kv"]]
    return uniform(
        **ENCODINGS[combination["pe"]],
        layers=1,
        width=6,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=4,
        norm=combination["norm"],
        bias=combination["bias"],
        qk_norm=combination["qk_norm"],
        mlp=combination["mlp"],
        mlp_width=7,
        tied=combination["tied"],
        vocab=11,
    )


def measure(job: tuple[dict[str, Any], int]) -> dict[str, Any]:
    combination, seed = job
    certificate = certify(architecture(combination), seed=seed, context=None)
    attention, model = certificate.attention[0], certificate.model
    return {
        **combination,
        "attention": {"predicted": attention.predicted, "measured": attention.measured, "gap": attention.gap},
        "model": {"predicted": model.predicted, "measured": model.measured, "gap": model.gap},
        "agrees": certificate.agrees,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="take every n-th combination")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every row there")
    options = parser.parse_args()
    jobs = [(combination, options.seed) for combination in combinations()][:: options.every]
    start, rows = time.perf_counter(), []
    with multiprocessing.get_context("spawn").Pool(options.processes, torch.set_num_threads, (1,)) as pool:
        for row in pool.imap_unordered(measure, jobs, chunksize=8):
            rows.append(row)
            if not row["agrees"]:
                print("disagrees:", json.dumps(row), flush=True)
            if len(rows) % 200 == 0:
                print(f"{len(rows)}/{len(jobs)} after {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    agree = sum(row["agrees"] for row in rows)
    for part in ("attention", "model"):
        gaps = sorted(row[part]["gap"] for row in rows)
        print(f"{part}: smallest gap {gaps[0]:.1e}, median {gaps[len(gaps) // 2]:.1e}")
    print(f"{agree} of {len(rows)} combinations agree, {time.perf_counter() - start:.0f} s")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0 if agree == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
