"""The larger check: checkpoints of `transformers`, whole model from different seeds, aligned, and written back in their own format.

    python benchmarks/kjv_models.py DIR          # trains them
    python benchmarks/kjv_matchers.py DIR [--family gpt2|llama] [--matchers two_stage weights self brief learned] [--steps 600]

For every pair of seeds: the loss barrier between the checkpoints on disk (held-out text), in % of the barrier between them as they were. `two_stage`
is the paper's algorithm (heads, qk, vo by weights), `self` is closed form on text that the two models write, `learned` is learned on such text,
`brief` is learned for 40 small steps, to stay below the time of 50 training steps: none of them sees data. Also printed: seconds of matching
beside those of 50 training steps of the same model in the same process, how much the aligned model's own loss moved, and the loss of the merged
checkpoint as `transformers` computes it, beside our value for the midpoint.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
import time
from pathlib import Path
from statistics import fmean, stdev

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from coset.alignment import Learning, Matching
from coset.checkpoint.curves import barrier_between
from coset.checkpoint.operations import align, merge
from kjv_models import BATCH, LENGTH, build

HEADS = ("heads", "qk", "vo")


def fifty_steps(family: str) -> float:
    """Seconds of 50 training steps, as the models were trained."""
    model = build(family, 0).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(256, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    started = time.process_time()
    for _ in range(50):
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
    return time.process_time() - started


def loss_of(folder: Path, tokens: torch.Tensor) -> float:
    """Next-token loss of a checkpoint as transformers computes it."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(tokens).logits.float()
    return float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", nargs="+", default=["gpt2", "llama"])
    parser.add_argument("--matchers", nargs="+", default=["two_stage", "weights", "self", "brief", "learned"])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--points", type=int, default=9)
    parser.add_argument("--samples", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = options.folder / "test.safetensors"
    tokens = load_file(data)["input_ids"][: options.samples]
    how = {
        "two_stage": (Matching("weights"), HEADS),
        "weights": (Matching("weights"), None),
        "self": (Matching("self", length=LENGTH), None),
        "brief": (Matching("learned", source="self", length=LENGTH, samples=128, learning=Learning(steps=40, batch=8)), None),
        "learned": (
            Matching("learned", source="self", length=LENGTH, samples=1024, learning=Learning(steps=options.steps, batch=16)),
            None,
        ),
    }
    for family in options.family:
        models = sorted(p for p in options.folder.glob(f"{family}-*") if p.is_dir())
        train = fifty_steps(family)
        print(f"{family}: {len(models)} models; 50 training steps take {train:.1f} CPU seconds", flush=True)
        left: dict[str, list[float]] = {}
        for a, b in itertools.combinations(models, 2):
            naive = barrier_between(a, b, data, points=options.points, samples=options.samples)
            print(
                f"  {a.name} {b.name}: naive {naive.loss:.3f} nats, ends {naive.curve.loss[0]:.3f} {naive.curve.loss[-1]:.3f}", flush=True
            )
            for name in options.matchers:
                matching, spaces = how[name]
                with tempfile.TemporaryDirectory() as folder:
                    started = time.process_time()
                    align(a, b, Path(folder) / "aligned", how=matching, spaces=spaces)
                    spent = time.process_time() - started
                    found = barrier_between(a, Path(folder) / "aligned", data, points=options.points, samples=options.samples)
                    merge(a, [Path(folder) / "aligned"], Path(folder) / "merged", aligned=False)
                    theirs = loss_of(Path(folder) / "merged", tokens)
                left.setdefault(name, []).append(100 * found.loss / naive.loss)
                moved = abs(found.curve.loss[-1] / naive.curve.loss[-1] - 1)
                print(
                    f"    {name:10} {left[name][-1]:6.1f} % of naive; {spent:.1f} CPU seconds ({spent / train:.2f} of 50 steps);"
                    f" own loss moved by {moved:.1e}; halfway {found.curve.loss[options.points // 2]:.3f}, merged by transformers {theirs:.3f}",
                    flush=True,
                )
        for name, values in left.items():
            error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else float("nan")
            print(f"  {family} {name}: {fmean(values):.1f} ± {error:.1f} % of naive over {len(values)} pairs", flush=True)


if __name__ == "__main__":
    main()
