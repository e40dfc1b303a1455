"""Throughput of `quant-bench train` beside a plain transformers training loop of the same model.

    python benchmarks/training.py --tier micro --rounds 5 --steps 20

Both take the same steps over random tokens: the plain loop is a forward pass with labels, backward, clipping, AdamW and
a scheduler of transformers, on a model with transformers' own SDPA attention. Printed are tokens a second of each and
its speed relative to the plain loop; wanted is at least 0.9. Saving is left out.
"""

import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import side_by_side
import torch
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from quant_bench import registry
from quant_bench.training import loop
from quant_bench.training.building import build, config_of
from quant_bench.training.material import Material
from quant_bench.training.tiers import TIERS, Tier, changed

WANTED = 0.9


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


def ours(tier: Tier, material: Material, arm: str) -> Callable[[int], None]:
    model = build(tier, registry.build("arms", arm), 0, material.tokenizer())

    def run(_: int) -> None:
        model.module.train().requires_grad_(True)
        with tempfile.TemporaryDirectory() as work:
            loop.fit(model, material, tier, 0, Path(work), lambda description, done, total: None)

    return run


def plain(tier: Tier, material: Material) -> Callable[[int], None]:
    module: Any = AutoModelForCausalLM.from_config(config_of(tier, material.tokenizer()), attn_implementation="sdpa")
    module.train()

    def run(_: int) -> None:
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


def main() -> int:
    parser = side_by_side.parser(__doc__)
    parser.add_argument("--tier", default="micro", choices=list(TIERS))
    parser.add_argument("--arm", action="append", help="measured beside the plain loop; softmax by default")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    side_by_side.start(options)
    tier = changed(TIERS[options.tier], steps=options.steps)
    tier = replace(tier, device_batch=tier.batch)
    material = Random(tier)
    # how often a run is saved follows from its length, and is no part of the loop
    loop._SAVED = 1
    runs = {"plain": plain(tier, material)}
    runs |= {arm: ours(tier, material, arm) for arm in options.arm or ["softmax"]}
    times = side_by_side.in_turn(runs, options.rounds)
    print(f"tier {tier.name}, {tier.steps} steps of {tier.tokens_a_step} tokens")
    reached = True
    for name, seconds in times.items():
        speed = side_by_side.ratio(times["plain"], seconds)
        reached &= speed >= WANTED
        rate = tier.tokens / statistics.median(seconds)
        print(f"  {name:<24} {rate:8.0f} tokens a second, {speed:.3f}x the plain loop; wanted at least {WANTED}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
