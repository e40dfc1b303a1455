"""What each arm costs against softmax attention: forward pass and training step, side by side in one run.

    python benchmarks/arms.py --length 1024 2048 --rounds 7

`core`: the attention of one layer (9 heads of 64, batch 1, causal), read gates included. `layer`: a decoder layer of
SmolLM2-135M's shape, which is what a user waits for. `step`: forward and backward of that layer. Ratios are to softmax.
"""

import sys
from collections.abc import Callable
from typing import Any

import side_by_side
import torch

from quant_bench import registry
from quant_bench.attention import core_of
from quant_bench.mechanisms.gates import GatedProjection
from quant_bench.model import LanguageModel

# forward, as the project promises it; arms without an entry may be as slow as they are
LIMITS = dict.fromkeys(
    ("softmax1", "sink_logit", "norm_gate", "projection_gate", "combo", "combo2", "output_gate"), 1.15
)
LIMITS["renorm"] = 1.5
STEP_LIMIT = 1.2
OUTSIDE_LAYERS = ("softmax", "sink_token", "attnres", "attnres_oasis")


def built(arm: str) -> LanguageModel:
    """One decoder layer with the arm."""
    return side_by_side.random_llama(
        arm,
        vocab_size=97,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=1,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
    )


def core_call(model: LanguageModel, length: int) -> Callable[[int], Any]:
    """The attention of the layer on given queries, keys and reads; all heads have keys and values of their own."""
    module: Any = model.module.get_submodule(model.layout.attentions[0])
    query, key, value = (torch.randn(1, heads, length, 64) for heads in (9, 3, 3))
    projection: Any = module.v_proj
    hidden = torch.randn(1, length, 576)

    def call(_: int) -> Any:
        read = value
        if isinstance(projection, GatedProjection):
            read = projection.gate(value.transpose(1, 2)).transpose(1, 2)
        mixed = core_of(module)(module, query, key, read, mask=None, scaling=0.125)
        gate = getattr(module, "output_gate", None)
        return mixed if gate is None else mixed * gate(hidden)

    return torch.inference_mode()(call)


def layer_call(model: LanguageModel, length: int) -> Callable[[int], Any]:
    hidden = torch.randn(1, length, 576)
    body: Any = model.body
    positions = body.rotary_emb(hidden, torch.arange(length)[None])
    layer = body.layers[0]
    return torch.inference_mode()(lambda _: layer(hidden, position_embeddings=positions, attention_mask=None))


def step_call(model: LanguageModel, length: int) -> Callable[[int], Any]:
    hidden = torch.randn(1, length, 576)
    body: Any = model.body
    model.module.requires_grad_(True)
    positions = body.rotary_emb(hidden, torch.arange(length)[None])
    layer = body.layers[0]

    def call(_: int) -> None:
        out = layer(hidden, position_embeddings=positions, attention_mask=None)
        (out[0] if isinstance(out, tuple) else out).square().mean().backward()
        model.module.zero_grad(set_to_none=True)

    return call


PARTS = {"core": core_call, "layer": layer_call, "step": step_call}


def main() -> int:
    parser = side_by_side.parser(__doc__, rounds=7)
    parser.add_argument("--length", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--arm", action="append", help="default: every arm that runs inside a layer")
    options = parser.parse_args()
    side_by_side.start(options)
    # the sink token lengthens the sequence by one and leaves the layer as it is; depth.py measures depth routing
    chosen = options.arm or [name for name in registry.names("arms") if name not in OUTSIDE_LAYERS]
    arms = ["softmax", *chosen]
    table: dict[str, list[float]] = {arm: [] for arm in arms}
    heads = []
    for length in options.length:
        for part, make in PARTS.items():
            heads.append(f"{part} {length}")
            times = side_by_side.in_turn({arm: make(built(arm), length) for arm in arms}, options.rounds)
            for arm in arms:
                table[arm].append(side_by_side.ratio(times[arm], times["softmax"]))
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
