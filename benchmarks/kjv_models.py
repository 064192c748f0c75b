"""Train the checkpoints of the larger check: GPT-2 (learned positions) and Llama (RoPE, 4 heads on 2 KV heads) on the bytes of the KJV Bible.

    python benchmarks/kjv_models.py DIR [--family gpt2|llama] [--seeds 3] [--steps 1000]

4 layers, width 128, written by `transformers` itself to DIR/FAMILY-SEED; what is there already is kept. About 8 minutes a model on one core.
The text comes from Debian's packages bible-kjv and bible-kjv-text; DIR/test.safetensors holds the held-out `input_ids` of the last tenth.
"""

from __future__ import annotations

import argparse
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

LENGTH, BATCH = 128, 32


def text() -> bytes:
    """The whole Bible, one verse a line."""
    if shutil.which("bible") is None:
        sys.exit("benchmark: the text comes with Debian's packages: apt-get install bible-kjv bible-kjv-text")
    return subprocess.run(["bible", "-f", "gen1:1-rev22:21"], check=True, capture_output=True).stdout


def build(family: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    if family == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
                tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=LENGTH, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def train(family: str, seed: int, data: Tensor, steps: int) -> PreTrainedModel:
    """AdamW, 5 % warm-up and cosine decay to zero; the seed decides the start and the order of the data."""
    model = build(family, seed).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.05)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda s: (s + 1) / warm if s < warm else 0.5 * (1 + math.cos(math.pi * (s - warm) / (steps - warm)))
    )
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(LENGTH + 1)
    for step in range(steps):
        starts = torch.randint(len(data) - LENGTH - 1, (BATCH, 1), generator=generator)
        window = data[starts + offsets]
        loss = torch.nn.functional.cross_entropy(model(window[:, :-1]).logits.flatten(0, 1), window[:, 1:].flatten())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 100 == 99:
            print(f"{family} seed {seed} step {step + 1} loss {loss.item():.3f}", flush=True)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=("gpt2", "llama"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    data = torch.frombuffer(bytearray(text()), dtype=torch.uint8).long()
    cut = len(data) * 9 // 10
    held = options.folder / "test.safetensors"
    if not held.exists():
        rows = data[cut : cut + 512 * LENGTH].reshape(512, LENGTH)
        save_file({"input_ids": rows.contiguous()}, held)
    for seed in range(options.seeds):
        for family in ("gpt2", "llama") if options.family is None else (options.family,):
            out = options.folder / f"{family}-{seed}"
            if out.exists():
                continue
            started = time.perf_counter()
            model = train(family, seed, data[:cut], options.steps)
            temporary = options.folder / f".{family}-{seed}"
            model.save_pretrained(temporary)
            seconds = time.perf_counter() - started
            (temporary / "seconds.txt").write_text(f"{seconds:.1f}\n")
            temporary.rename(out)
            print(f"{out}: {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
