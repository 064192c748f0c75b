"""Seconds and memory of `coset scramble` and `coset align` on a Llama-shaped checkpoint of 1.1 billion parameters, sharded, in bfloat16.

Beside each whole stand, from the same run, the seconds of its parts alone: reading and writing the same bytes, the matrix products, scipy's
assignments. The checkpoint (random weights) is made in a temporary folder. Every operation runs in a process of its own, whose peak of
resident memory is reported::

    python benchmarks/checkpoint.py [--layers 22] [--threads 2] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from scipy.optimize import linear_sum_assignment

WIDTH, HEADS, KV_HEADS, HEAD, NEURONS, VOCABULARY = 2048, 32, 4, 64, 5632, 32_000
LIMIT_GB, LIMIT_RATIO = 3.0, 2.0
SAMPLES = 3


def build(folder: Path, layers: int, seed: int) -> Path:
    """A checkpoint as transformers would save it, one shard for the embedding, one for the head, and one for every two layers."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return (0.02 * torch.randn(shape, generator=generator)).to(torch.bfloat16)

    def layer(i: int) -> dict[str, torch.Tensor]:
        p = f"model.layers.{i}"
        return {
            f"{p}.input_layernorm.weight": 1 + normal(WIDTH),
            f"{p}.self_attn.q_proj.weight": normal(HEADS * HEAD, WIDTH),
            f"{p}.self_attn.k_proj.weight": normal(KV_HEADS * HEAD, WIDTH),
            f"{p}.self_attn.v_proj.weight": normal(KV_HEADS * HEAD, WIDTH),
            f"{p}.self_attn.o_proj.weight": normal(WIDTH, HEADS * HEAD),
            f"{p}.post_attention_layernorm.weight": 1 + normal(WIDTH),
            f"{p}.mlp.gate_proj.weight": normal(NEURONS, WIDTH),
            f"{p}.mlp.up_proj.weight": normal(NEURONS, WIDTH),
            f"{p}.mlp.down_proj.weight": normal(WIDTH, NEURONS),
        }

    folder.mkdir()
    groups: list[Callable[[], dict[str, torch.Tensor]]] = [lambda: {"model.embed_tokens.weight": normal(VOCABULARY, WIDTH)}]
    groups += [lambda i=i: {k: v for j in range(i, min(i + 2, layers)) for k, v in layer(j).items()} for i in range(0, layers, 2)]
    groups += [lambda: {"model.norm.weight": 1 + normal(WIDTH), "lm_head.weight": normal(VOCABULARY, WIDTH)}]
    names: dict[str, str] = {}
    for at, group in enumerate(groups, 1):
        file = f"model-{at:05d}-of-{len(groups):05d}.safetensors"
        content = group()
        save_file(content, folder / file, {"format": "pt"})
        names |= dict.fromkeys(content, file)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": names}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": NEURONS,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# --- the whole, in a process of its own ---------------------------------------------------------------------------------


def child(arguments: list[str]) -> None:
    """Run one operation and print its seconds, its peak of memory, and how far the output is from the reference."""
    from coset.checkpoint.operations import align, scramble

    verb, threads, spaces, *paths = arguments
    torch.set_num_threads(int(threads))
    chosen = None if spaces == "all" else tuple(spaces.split(","))
    start, busy = time.perf_counter(), time.process_time()
    written = scramble(*paths, spaces=chosen, seed=1) if verb == "scramble" else align(*paths, spaces=chosen)
    seconds, cpu = time.perf_counter() - start, time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    layers = [d for d in written.distances if d.layer is not None]
    means = {name: sum(getattr(d, name) for d in layers) / len(layers) for name in ("before", "after") if layers}
    print(json.dumps({"seconds": seconds, "cpu": cpu, "peak_gb": peak / 1e9, "rounding": written.rounding, **means}))


def whole(verb: str, spaces: str, threads: int, *paths: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", verb, str(threads), spaces, *map(str, paths)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    return json.loads(done.stdout)


# --- its parts ----------------------------------------------------------------------------------------------------------


class Timer:
    """Adds up wall-clock and processor seconds of what runs inside it."""

    def __init__(self) -> None:
        self.seconds = self.cpu = 0.0

    def __enter__(self) -> Timer:
        self._start = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start[0]
        self.cpu += time.process_time() - self._start[1]

    def scaled(self, factor: float) -> Timer:
        self.seconds, self.cpu = self.seconds * factor, self.cpu * factor
        return self


def read_and_write(inputs: list[Path], scratch: Path) -> Timer:
    """Read every byte of the inputs and write those of the last one to new files, synced."""
    scratch.mkdir()
    with Timer() as timer:
        for folder in inputs:
            for file in sorted(folder.glob("*.safetensors")):
                content = file.read_bytes()
                if folder == inputs[-1]:
                    with open(scratch / file.name, "wb") as out:
                        out.write(content)
                        out.flush()
                        os.fsync(out.fileno())
    shutil.rmtree(scratch)
    return timer


def products(reference: Path, other: Path, layers: int) -> tuple[Timer, Timer]:
    """The matrix products, and scipy's assignments of the neurons on the same scores, for all layers: measured on a few and scaled."""
    from coset.alignment.features import neuron_features
    from coset.alignment.neurons import scores
    from coset.checkpoint.model import load
    from coset.symmetries import mlp_group

    models = [load(folder) for folder in (reference, other)]
    multiply, assign = Timer(), Timer()
    sample = sorted({round(i * (layers - 1) / (SAMPLES - 1)) for i in range(SAMPLES)})
    architecture = models[0].architecture
    for i in sample:
        blocks = [m.block(i) for m in models]
        a, b = ({k.split(".", 2)[2]: v for k, v in block.items()} for block in blocks)
        with multiply:
            _heads(a, b)
            for name in ("mlp.up", "mlp.gate"):
                a[name].mT @ b[name]
            a["mlp.down"] @ b["mlp.down"].mT
        sides = [neuron_features(architecture, i, block) for block in blocks]
        score = scores(mlp_group(architecture.layers[i].mlp), *sides).numpy()
        with assign:
            linear_sum_assignment(score, maximize=True)
    return multiply.scaled(layers / len(sample)), assign.scaled(layers / len(sample))


def _heads(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Cross products of all pairs of heads, and the changes of basis of queries, keys, values and outputs."""
    for name in ("q", "k", "v"):
        x, y = (p[f"attention.{name}"].reshape(WIDTH, -1) for p in (a, b))
        x.mT @ y
        y.reshape(WIDTH, KV_HEADS, -1, HEAD).movedim(1, 0).reshape(KV_HEADS, -1, HEAD) @ torch.eye(HEAD, dtype=torch.float64)
    x, y = (p["attention.o"].reshape(-1, WIDTH) for p in (a, b))
    x @ y.mT
    torch.eye(HEAD, dtype=torch.float64) @ y.reshape(HEADS, HEAD, WIDTH)


def bases(folder: Path, layers: int) -> Timer:
    """The changes of basis that scramble makes, for all layers."""
    from coset.checkpoint.model import load

    block = {k.split(".", 2)[2]: v for k, v in load(folder).block(0).items()}
    change = torch.eye(HEAD, dtype=torch.float64).expand(KV_HEADS, HEAD, HEAD)
    with Timer() as timer:
        for name in ("q", "k", "v"):
            block[f"attention.{name}"].reshape(WIDTH, KV_HEADS, -1, HEAD).movedim(1, 0).reshape(KV_HEADS, -1, HEAD) @ change
        change.mT @ block["attention.o"].reshape(KV_HEADS, -1, HEAD, WIDTH).movedim(1, 0).reshape(KV_HEADS, HEAD, -1)
    return timer.scaled(layers)


# --- report -------------------------------------------------------------------------------------------------------------


def report(name: str, found: dict[str, float], parts: dict[str, Timer]) -> bool:
    total, cpu = sum(p.seconds for p in parts.values()), sum(p.cpu for p in parts.values())
    ratio, peak = found["seconds"] / total, found["peak_gb"]
    print(
        f"{name}: {found['seconds']:.1f} s ({found['cpu']:.1f} s of processor time), peak {peak:.2f} GB, rounding {found['rounding']:.2g}"
    )
    if "before" in found:
        print(f"    mean distance of a layer {found['before']:.3g} before, {found['after']:.3g} after")
    print(
        "    parts: "
        + ", ".join(f"{part} {p.seconds:.1f} s ({p.cpu:.1f})" for part, p in parts.items())
        + f"; {total:.1f} s ({cpu:.1f}) in all"
    )
    good = ratio <= LIMIT_RATIO and peak <= LIMIT_GB
    print(
        f"    whole / parts {ratio:.2f}, of processor time {found['cpu'] / cpu:.2f} (limit {LIMIT_RATIO}), memory limit {LIMIT_GB} GB: "
        f"{'met' if good else 'NOT MET'}",
        flush=True,
    )
    return good


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, help="where to make the temporary folder (12 GB at 22 layers)")
    parser.add_argument("--all-spaces", action="store_true", help="also scramble in every space, the stream included")
    options = parser.parse_args()
    layers, threads = options.layers, options.threads
    torch.set_num_threads(threads)
    spaces = "heads,qk,vo,neurons"
    good = []
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="coset-benchmark-") as name:
        work = Path(name)
        original, independent = build(work / "original", layers, 0), build(work / "independent", layers, 1)
        size = sum(file.stat().st_size for file in original.glob("*.safetensors"))
        print(
            f"{size / 2e9:.2f} billion parameters, {size / 1e9:.2f} GB in {len(list(original.glob('*.safetensors')))} shards, {threads} threads"
        )
        scrambled = work / "scrambled"
        found = whole("scramble", spaces, threads, original, scrambled)
        parts = {"reading and writing": read_and_write([original], work / "scratch"), "matrix products": bases(original, layers)}
        good.append(report(f"scramble ({spaces})", found, parts))
        if options.all_spaces:
            found = whole("scramble", "all", threads, original, work / "everything")
            print(f"scramble (all spaces): {found['seconds']:.1f} s, peak {found['peak_gb']:.2f} GB", flush=True)
            shutil.rmtree(work / "everything")
        for label, other in (("scrambled", scrambled), ("independent", independent)):
            found = whole("align", "heads,neurons", threads, original, other, work / "aligned")
            shutil.rmtree(work / "aligned")
            multiply, assign = products(original, other, layers)
            parts = {
                "reading and writing": read_and_write([original, other], work / "scratch"),
                "matrix products": multiply,
                "assignments": assign,
            }
            good.append(report(f"align, {label} pair (heads, neurons)", found, parts))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
