"""What depth routing costs: forward passes of a 12-layer model against the plain one, side by side in one run.

    python benchmarks/depth.py --length 512 --rounds 5

A Llama of width 768 (12 layers, 12 heads, a vocabulary of 512: embeddings say nothing here). `full`: one sequence;
`token`: one more token behind a cache of that length; `step`: forward and backward. Ratios are medians of the rounds'
ratios of CPU time to the plain model, candidates in another order each round; one thread.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from quant_bench import models
from quant_bench.lowbit.memory import tune_allocator
from quant_bench.model import LanguageModel
from quant_bench.tiny import tiny_tokenizer

# of a forward pass, as the project promises them
LIMITS = {"attnres": 1.10, "attnres(form=block)": 1.05}
ARMS = (
    "softmax",
    "attnres",
    "attnres(form=block)",
    "attnres_oasis",
    "softmax1",
    "attnres_oasis(coupled=True,depth=softmax1)+softmax1",
)


def built(arm: str, layers: int, length: int) -> LanguageModel:
    """The model with the arm."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=12,
        max_position_embeddings=2 * length,
    )
    model = models.from_module(AutoModelForCausalLM.from_config(config), tiny_tokenizer(), name="depth")
    return models.attach(model, arm)


def full_call(model: LanguageModel, length: int) -> Callable[[], Any]:
    ids = torch.randint(512, (1, length), generator=torch.Generator().manual_seed(0))
    body: Any = model.body
    return torch.inference_mode()(lambda: body(input_ids=ids, use_cache=False))


def token_call(model: LanguageModel, length: int) -> Callable[[], Any]:
    ids = torch.randint(512, (1, length), generator=torch.Generator().manual_seed(0))
    body: Any = model.body
    with torch.inference_mode():
        cache = body(input_ids=ids, use_cache=True).past_key_values

    def call() -> None:
        body(input_ids=ids[:, :1], cache=cache, use_cache=True)
        cache.crop(-1)

    return torch.inference_mode()(call)


def step_call(model: LanguageModel, length: int) -> Callable[[], Any]:
    ids = torch.randint(512, (1, length), generator=torch.Generator().manual_seed(0))
    module: Any = model.module
    module.requires_grad_(True)

    def call() -> None:
        module(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        module.zero_grad(set_to_none=True)

    return call


PARTS = {"full": full_call, "token": token_call, "step": step_call}


def ratios(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median ratio of CPU time to the plain model."""
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for call in calls.values():
        call()
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.thread_time()
            calls[name]()
            seconds[name].append(time.thread_time() - start)
    base = seconds["softmax"]
    return {name: statistics.median(a / b for a, b in zip(found, base, strict=True)) for name, found in seconds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", nargs="+", choices=sorted(PARTS), default=list(PARTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    tune_allocator()
    print(f"torch {torch.__version__}, 1 thread, load {os.getloadavg()[0]:.1f}, {options.rounds} rounds")
    found = {}
    for part in options.part:
        calls = {arm: PARTS[part](built(arm, options.layers, options.length), options.length) for arm in ARMS}
        found[part] = ratios(calls, options.rounds)
    print(f"{'arm':<54}" + "".join(f"{part:>9}" for part in found))
    missed = []
    for arm in ARMS:
        print(f"{arm:<54}" + "".join(f"{found[part][arm]:>8.3f}x" for part in found))
        if found.get("full", {}).get(arm, 0.0) > LIMITS.get(arm, float("inf")):
            missed.append(f"{arm}: {found['full'][arm]:.3f}x, wanted {LIMITS[arm]}x")
    print("\n".join(missed) if missed else "every promised ratio is kept")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
