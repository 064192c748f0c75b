"""A scrambled and noised copy of a trained model, brought back: how the recovery degrades with the noise, for every closed-form matcher.

    python benchmarks/noise.py [--noise 0 0.01 0.05 0.2] [--trials 3]

A ViT on digits (2 layers, width 64, RoPE) is trained; to a copy Gaussian noise of a fraction of every tensor's own size is added, and a random
element of every space is applied. Printed: the relative distance of the weights that is left, over the distance that the noise alone makes
(1 is perfect: the element is found); and the loss barrier between the two, relative to that of the scrambled copy as it is.
"""

from __future__ import annotations

import argparse
from statistics import fmean

import torch

from coset.alignment import Matching, align
from coset.connect import barrier
from coset.study.data import digits
from coset.study.demo import architecture
from coset.study.training import Recipe, train
from coset.transform import random_transform
from coset.transformer import initialise


def gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    top = sum(float((x - b[name]).square().sum()) for name, x in a.items())
    return (top / sum(float(x.square().sum()) for x in a.values())) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0, 0.01, 0.05, 0.2])
    parser.add_argument("--trials", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    arch, data = architecture("rope"), digits()
    model = train(arch, initialise(arch, seed=0), data, Recipe(epochs=20, learning_rate=3e-3, weight_decay=1.0), seed=0)
    model = {name: x.double() for name, x in model.items()}
    test = data.test_inputs.double(), data.test_targets
    matchers = {name: Matching(name) for name in ("weights", "probes", "activations")}  # type: ignore[arg-type]
    print(f"{'noise':>6} " + " ".join(f"{f'{m}: distance':>22} {'barrier left':>12}" for m in matchers))
    for noise in options.noise:
        rows: dict[str, list[tuple[float, float]]] = {m: [] for m in matchers}
        for trial in range(options.trials):
            generator = torch.Generator().manual_seed(trial)
            noisy = {
                n: x + noise * x.square().mean().sqrt() * torch.randn(x.shape, generator=generator, dtype=x.dtype) for n, x in model.items()
            }
            moved = random_transform(arch, noisy, seed=trial)(noisy)
            before = barrier(arch, model, moved, *test, points=9).loss
            for name, how in matchers.items():
                back = align(arch, model, moved, how, inputs=data.train_inputs if name == "activations" else None).parameters
                left = gap(model, back) / gap(model, noisy) if noise else gap(model, back)
                rows[name].append((left, barrier(arch, model, back, *test, points=9).loss / before))
        means = [(fmean(x for x, _ in r), fmean(y for _, y in r)) for r in rows.values()]
        print(f"{noise:6.2f} " + " ".join(f"{left:22.3g} {share:12.2%}" for left, share in means), flush=True)


if __name__ == "__main__":
    main()
