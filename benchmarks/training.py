"""Throughput of `quant-bench train` beside a plain transformers training loop of the same model.

    python benchmarks/training.py [--tier micro] [--rounds 5] [--steps 20]

Both take the same steps over random tokens, alternately, in one process: the plain loop is a forward pass with labels,
backward, clipping, AdamW and a scheduler of transformers, on a model with transformers' own SDPA attention. Printed are
tokens a second of each (the median over rounds) and the median of the ratios within a round; wanted is at least 0.9.
Processor time of one thread is counted, which another busy process disturbs less than wall time; without saving.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from quant_bench import registry
from quant_bench.training import loop
from quant_bench.training.building import build, config_of
from quant_bench.training.material import Material
from quant_bench.training.tiers import TIERS, Tier, changed


class Random(Material):
    """Random tokens: speed does not depend on what they say."""

    sha256, note = "", {}

    def __init__(self, tier: Tier) -> None:
        self.rows = np.random.default_rng(0).integers(0, tier.vocabulary, (1024, tier.context))

    def row(self, seed: int, index: int) -> np.ndarray:
        return self.rows[index % len(self.rows)]

    def held_out(self) -> np.ndarray:
        return self.rows

    def tokenizer(self) -> Any:
        class Marks:
            bos_token_id = eos_token_id = 0

            def get_vocab(self) -> dict[str, int]:
                return {}

        return Marks()


def ours(tier: Tier, material: Material, arm: str) -> Callable[[], None]:
    model = build(tier, registry.build("arms", arm), 0, material.tokenizer())

    def run() -> None:
        model.module.train().requires_grad_(True)
        with tempfile.TemporaryDirectory() as work:
            loop.fit(model, material, tier, 0, Path(work), lambda description, done, total: None)

    return run


def plain(tier: Tier, material: Material) -> Callable[[], None]:
    module: Any = AutoModelForCausalLM.from_config(config_of(tier, material.tokenizer()), attn_implementation="sdpa")
    module.train()

    def run() -> None:
        matrices = [p for p in module.parameters() if p.dim() >= 2]
        others = [p for p in module.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": tier.weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=tier.learning_rate, betas=loop.BETAS)
        scheduler = get_cosine_schedule_with_warmup(optimizer, tier.warmup_steps, tier.steps)
        for step in range(tier.steps):
            rows = [torch.from_numpy(material.row(0, step * tier.batch + place)) for place in range(tier.batch)]
            ids = torch.stack(rows)
            module(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), loop.CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return run


def seconds(run: Callable[[], None]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", default="micro", choices=list(TIERS))
    parser.add_argument("--arm", action="append", help="measured beside the plain loop; softmax by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tier = changed(TIERS[options.tier], steps=options.steps)
    tier = replace(tier, device_batch=tier.batch)
    material = Random(tier)
    # how often a run is saved follows from its length, and is no part of the loop
    loop._SAVED = 1
    runs = {"plain": plain(tier, material)}
    runs |= {arm: ours(tier, material, arm) for arm in options.arm or ["softmax"]}
    for run in runs.values():
        run()
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            found[name].append(seconds(run))
    print(f"tier {tier.name}, {tier.steps} steps of {tier.tokens_a_step} tokens, {options.rounds} rounds, one thread")
    for name, took in found.items():
        ratio = statistics.median(base / own for base, own in zip(found["plain"], took, strict=True))
        rate = tier.tokens / statistics.median(took)
        print(f"  {name:<24} {rate:8.0f} tokens a second   x{ratio:.3f} of the plain loop")


if __name__ == "__main__":
    main()
