"""How often `compare` and `fingerprint` are wrong: random scrambles, near misses, and the detection limit.

    python benchmarks/compare.py [--trials 500] [--seed 0] [--json FILE]

Tiny generic models of every architecture in tests/architecture_zoo.py, in every stored dtype. Every error is printed with what it was.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from architecture_zoo import grid, model, special
from coset.architecture import Architecture
from coset.equivalence import Comparison, compare
from coset.errors import CosetError
from coset.invariants import fingerprint
from coset.parameters import tensors
from coset.transform import SPACES, random_transform
from near_misses import KINDS

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SUBTLE = ("one weight", "fine-tuned", "gain changed")
"""Near misses that may be smaller than the rounding of half precision."""

Model = dict[str, Tensor]


def architectures() -> list[tuple[str, Architecture]]:
    return list((special() | grid(24)).items())


def cast(p: Model, dtype: torch.dtype) -> Model:
    return {name: x.to(dtype) for name, x in p.items()}


def scrambled(a: Architecture, p: Model, draw: random.Random, seed: int) -> Model:
    """In all spaces, or in some."""
    spaces = SPACES if draw.random() < 0.5 else tuple(sorted(draw.sample(SPACES, draw.randint(1, 4))))
    try:
        return random_transform(a, p, spaces=spaces, seed=seed)(p)
    except CosetError:
        return random_transform(a, p, seed=seed)(p)


def short(a: Architecture) -> int | None:
    return 96 if a.length is None else None


def scrambles(trials: int, seed: int) -> Iterator[tuple[str, bool, str, Comparison]]:
    """(what, right, architecture, found) for scrambled copies, rounded or not."""
    zoo = architectures()
    for t in range(seed, seed + trials):
        draw = random.Random(t)
        name, a = zoo[t % len(zoo)]
        dtype = DTYPES[(t // len(zoo) + t) % len(DTYPES)]
        original = cast(model(a, t), draw.choice((torch.float64, torch.float32, dtype)))
        copy = cast(scrambled(a, original, draw, t), dtype)
        pair = (original, copy) if draw.random() < 0.5 else (copy, original)
        found = compare(a, *pair, length=short(a), seed=t)
        coarse = any(x.dtype in (torch.bfloat16, torch.float16) for p in pair for x in p.values())
        wanted = ("equivalent up to rounding",) if coarse else ("equivalent",)
        yield str(dtype).removeprefix("torch."), found.verdict in (*wanted, "identical"), name, found


def near_misses(trials: int, seed: int) -> Iterator[tuple[str, bool, str, Comparison]]:
    """The same for models that are almost the same function."""
    zoo, kinds = architectures(), list(KINDS)
    done, t = 0, seed
    while done < trials:
        t += 1
        draw = random.Random(t)
        name, a = zoo[t % len(zoo)]
        kind = kinds[(t // len(zoo) + t) % len(kinds)]
        dtype = draw.choice(DTYPES[:2] if kind in SUBTLE else DTYPES)
        original = cast(model(a, t), dtype)
        wrong = KINDS[kind](a, original, draw)
        if wrong is None:
            continue
        done += 1
        copy = cast(scrambled(a, wrong, draw, t), dtype)
        pair = (original, copy) if draw.random() < 0.5 else (copy, original)
        found = compare(a, *pair, length=short(a), seed=t)
        yield kind, found.verdict == "different", name, found


def fingerprints(models: int, copies: int, seed: int) -> Iterator[tuple[str, bool, str, float]]:
    """Copies share the fingerprint, near misses do not: (what, right, architecture, distance)."""
    zoo = architectures()
    for t in range(seed, seed + models):
        name, a = zoo[t % len(zoo)]
        draw = random.Random(t)
        original = cast(model(a, t), torch.float32)
        try:
            own = fingerprint(a, original)
        except CosetError:
            continue
        for k in range(copies):
            other = fingerprint(a, cast(random_transform(a, original, seed=1000 * t + k)(original), torch.float32))
            yield "copy, float32", other.hash == own.hash, name, own.distance(other)
        for kind in ("fine-tuned", "other seed"):
            wrong = KINDS[kind](a, original, draw)
            assert wrong is not None
            other = fingerprint(a, cast(random_transform(a, wrong, seed=t)(wrong), torch.float32))
            yield kind, other.hash != own.hash, name, own.distance(other)
        for dtype in (torch.float16, torch.bfloat16):
            rounded = cast(original, dtype)
            base = fingerprint(a, rounded)
            other = fingerprint(a, cast(random_transform(a, rounded, seed=t)(rounded), dtype))
            yield f"copy, {str(dtype).removeprefix('torch.')}", other.hash == base.hash, name, base.distance(other)
            wrong = KINDS["other seed"](a, rounded, draw)
            assert wrong is not None
            other = fingerprint(a, wrong)
            yield f"other seed, {str(dtype).removeprefix('torch.')}", other.hash != base.hash, name, base.distance(other)


def detection(trials: int, seed: int) -> dict[str, dict[str, float]]:
    """Smallest relative change that was found in 95 % of trials: of one weight of typical size, and of one tensor at random."""
    zoo = architectures()
    out: dict[str, dict[str, float]] = {}
    for dtype in DTYPES:
        limits = {}
        for what in ("weight", "tensor"):
            low, high = torch.finfo(dtype).eps / 16, 3.0
            if dtype == torch.float64:
                low = 1e-13
            for _ in range(7):
                middle = (low * high) ** 0.5
                seen = sum(_detects(zoo[(seed + 7 * t) % len(zoo)][1], dtype, what, middle, seed + t) for t in range(trials))
                low, high = (low, middle) if seen >= 0.95 * trials else (middle, high)
            limits[what] = high
        out[str(dtype).removeprefix("torch.")] = limits
    return out


def _detects(a: Architecture, dtype: torch.dtype, what: str, size: float, seed: int) -> bool:
    generator = torch.Generator().manual_seed(seed)
    original = model(a, seed)
    copy = random_transform(a, original, seed=seed)(original)
    names = [n for n, spec in tensors(a).items() if len(spec.axes) > 1 and n.startswith("layers.") and "bias" not in n]
    name = names[seed % len(names)]
    x = copy[name]
    if what == "tensor":
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        copy[name] = x + noise * (size * x.norm() / noise.norm())
    else:
        at = int((x.abs() - x.square().mean().sqrt()).abs().argmin())
        changed = x.clone().flatten()
        changed[at] *= 1 + size
        copy[name] = changed.reshape(x.shape)
    return compare(a, cast(original, dtype), cast(copy, dtype), length=short(a), seed=seed).verdict == "different"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--detection", type=int, default=20, help="trials for each step of the search for the detection limit; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for label, trials in (("scrambles", scrambles), ("near misses", near_misses)):
        start, right, total = time.perf_counter(), Counter[str](), Counter[str]()
        worst = 0.0
        for what, good, name, found in trials(arguments.trials, arguments.seed):
            total[what] += 1
            right[what] += good
            worst = max([worst, *(r.peak for r in found.residuals)]) if label == "scrambles" else worst
            if not good:
                print(f"WRONG: {label}, {what}, {name}: {found.summary()}", flush=True)
        counts = {what: [right[what], n] for what, n in total.items()}
        results[label] = {"right": counts, "errors": sum(total.values()) - sum(right.values()), "timing": time.perf_counter() - start}
        if label == "scrambles":
            results[label]["largest peak"] = worst
        print(label, results[label], flush=True)
    right, total = Counter[str](), Counter[str]()
    for what, good, name, distance in fingerprints(max(1, arguments.trials // 10), 10, arguments.seed):
        total[what] += 1
        right[what] += good
        if not good:
            print(f"fingerprint: {what}, {name}: distance {distance:.2g}", flush=True)
    results["fingerprints"] = {what: [right[what], n] for what, n in total.items()}
    print("fingerprints", results["fingerprints"], flush=True)
    if arguments.detection:
        results["detection"] = detection(arguments.detection, arguments.seed)
        print("detection", results["detection"], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
