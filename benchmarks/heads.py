"""Stage 1 at full size, 32 heads in a stream of width 4096: the whole of it against the matrix products alone, in one run.

    python benchmarks/heads.py

Stage 1 is the features of both models from their canonical tensors, the cost of every pair of heads, and the assignment. The products
it cannot do without are those of all pairs of heads: for values and outputs, and for queries and keys, two real products [4096, 4096] by
[4096, 4096] each, or under a rotary encoding two batches of 64 complex ones, [32, 4096] by [4096, 32]. At most twice their time is
asked; exit code 1 where it is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch

from coset.alignment.features import head_features
from coset.alignment.heads import assign_heads, head_cost
from coset.architecture import PE, Architecture, uniform
from coset.groups import Wreath
from coset.symmetries import group

HEADS, WIDTH = 32, 4096
LANES = WIDTH // HEADS


def timed(function: Callable[[], object], repeats: int) -> float:
    """Least wall time of several calls, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def stage_one(pe: PE, dtype: torch.dtype, repeats: int) -> bool:
    architecture: Architecture = uniform(pe=pe, layers=1, width=WIDTH, heads=HEADS, mlp_width=1, vocab=2)
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (WIDTH, HEADS, 1, LANES), "k": (WIDTH, HEADS, LANES), "v": (WIDTH, HEADS, LANES), "o": (HEADS, 1, LANES, WIDTH)}
    a, b = ({f"layers.0.attention.{n}": torch.randn(s, generator=generator, dtype=dtype) for n, s in shapes.items()} for _ in range(2))
    heads = group(architecture).factors["layers.0.heads"]
    assert isinstance(heads, Wreath)

    def ours() -> object:
        features = [head_features(architecture, 0, p, circuits=True) for p in (a, b)]
        return assign_heads(heads, head_cost(heads, *features))

    square = [torch.randn(WIDTH, WIDTH, generator=generator, dtype=dtype) for _ in range(2)]
    complex_dtype = torch.complex64 if dtype == torch.float32 else torch.complex128
    planes = [torch.randn(LANES // 2, WIDTH, HEADS, generator=generator, dtype=complex_dtype) for _ in range(2)]

    def products() -> None:
        for _ in range(2):
            square[0].mT @ square[1]
            if pe == "rope":
                planes[0].mH @ planes[1]
            else:
                square[0].mT @ square[1]

    ours()
    products()
    whole, needed = timed(ours, repeats), timed(products, repeats)
    print(f"{pe:5s} {str(dtype)[6:]}   stage 1 {whole:7.2f} s   its products {needed:7.2f} s   ratio {whole / needed:.2f} (2 asked)")
    return whole <= 2 * needed


def main() -> int:
    parser = argparse.ArgumentParser(description="Stage 1 against the matrix products it needs.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    encodings: tuple[PE, ...] = ("none", "rope")
    fine = [stage_one(pe, getattr(torch, arguments.dtype), arguments.repeats) for pe in encodings]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
