"""What each arm costs against softmax attention: forward pass and training step, side by side in one run.

    python benchmarks/arms.py --length 1024 2048 --rounds 7

`core`: the attention of one layer (9 heads of 64, batch 1, causal), read gates included. `layer`: a decoder layer of
SmolLM2-135M's shape, which is what a user waits for. `step`: forward and backward of that layer. Ratios are medians of
the rounds' ratios of CPU time to softmax, candidates in another order each round; one thread, so that other programs
count little.
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

from quant_bench import models, registry
from quant_bench.attention import core_of
from quant_bench.lowbit.memory import tune_allocator
from quant_bench.mechanisms.gates import GatedProjection
from quant_bench.model import LanguageModel
from quant_bench.tiny import tiny_tokenizer

# forward, as the project promises it; arms without an entry may be as slow as they are
LIMITS = dict.fromkeys(
    ("softmax1", "sink_logit", "norm_gate", "projection_gate", "combo", "combo2", "output_gate"), 1.15
)
LIMITS["renorm"] = 1.5
STEP_LIMIT = 1.2
OUTSIDE_LAYERS = ("softmax", "sink_token", "attnres", "attnres_oasis")


def built(arm: str) -> LanguageModel:
    """One decoder layer with the arm."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=1,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
    )
    model = models.from_module(AutoModelForCausalLM.from_config(config), tiny_tokenizer(), name="layer")
    return models.attach(model, arm)


def core_call(model: LanguageModel, length: int) -> Callable[[], Any]:
    """The attention of the layer on given queries, keys and reads; all heads have keys and values of their own."""
    module: Any = model.module.get_submodule(model.layout.attentions[0])
    query, key, value = (torch.randn(1, heads, length, 64) for heads in (9, 3, 3))
    projection: Any = module.v_proj
    hidden = torch.randn(1, length, 576)

    def call() -> Any:
        read = value
        if isinstance(projection, GatedProjection):
            read = projection.gate(value.transpose(1, 2)).transpose(1, 2)
        mixed = core_of(module)(module, query, key, read, mask=None, scaling=0.125)
        gate = getattr(module, "output_gate", None)
        return mixed if gate is None else mixed * gate(hidden)

    return torch.inference_mode()(call)


def layer_call(model: LanguageModel, length: int) -> Callable[[], Any]:
    hidden = torch.randn(1, length, 576)
    body: Any = model.body
    positions = body.rotary_emb(hidden, torch.arange(length)[None])
    layer = body.layers[0]
    return torch.inference_mode()(lambda: layer(hidden, position_embeddings=positions, attention_mask=None))


def step_call(model: LanguageModel, length: int) -> Callable[[], Any]:
    hidden = torch.randn(1, length, 576)
    body: Any = model.body
    model.module.requires_grad_(True)
    positions = body.rotary_emb(hidden, torch.arange(length)[None])
    layer = body.layers[0]

    def call() -> None:
        out = layer(hidden, position_embeddings=positions, attention_mask=None)
        (out[0] if isinstance(out, tuple) else out).square().mean().backward()
        model.module.zero_grad(set_to_none=True)

    return call


PARTS = {"core": core_call, "layer": layer_call, "step": step_call}


def ratios(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median ratio of CPU time to softmax."""
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
    parser.add_argument("--length", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--arm", action="append", help="default: every arm that runs inside a layer")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tune_allocator()
    # the sink token lengthens the sequence by one and leaves the layer as it is; depth.py measures depth routing
    chosen = options.arm or [name for name in registry.names("arms") if name not in OUTSIDE_LAYERS]
    arms = ["softmax", *chosen]
    print(f"torch {torch.__version__}, 1 thread, load {os.getloadavg()[0]:.1f}, {options.rounds} rounds")
    table: dict[str, list[float]] = {arm: [] for arm in arms}
    heads = []
    for length in options.length:
        for part, make in PARTS.items():
            heads.append(f"{part} {length}")
            found = ratios({arm: make(built(arm), length) for arm in arms}, options.rounds)
            for arm, ratio in found.items():
                table[arm].append(ratio)
    print(f"{'arm':<18}" + "".join(f"{head:>12}" for head in heads))
    missed = []
    for arm, row in table.items():
        print(f"{arm:<18}" + "".join(f"{ratio:>11.2f}x" for ratio in row))
        for head, ratio in zip(heads, row, strict=True):
            limit = STEP_LIMIT if head.startswith("step") else LIMITS.get(arm, float("inf"))
            if arm in LIMITS and not head.startswith("core") and ratio > limit:
                missed.append(f"{arm} {head}: {ratio:.2f}x, wanted {limit}x")
    print("\n".join(missed) if missed else "every promised ratio is kept")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
