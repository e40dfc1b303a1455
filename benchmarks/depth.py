"""What depth routing costs: forward passes of a 12-layer model against the plain one, side by side in one run.

    python benchmarks/depth.py --length 512 --rounds 5

A Llama of width 768 (12 layers, 12 heads, a vocabulary of 512: embeddings say nothing here). `full`: one sequence;
`token`: one more token behind a cache of that length; `step`: forward and backward. Ratios are to the plain model.
"""

import sys
from collections.abc import Callable
from typing import Any

import side_by_side
import torch

from quant_bench.model import LanguageModel

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
    return side_by_side.random_llama(
        arm,
        vocab_size=512,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=12,
        max_position_embeddings=2 * length,
    )


def full_call(model: LanguageModel, length: int) -> Callable[[int], Any]:
    ids = torch.randint(512, (1, length), generator=torch.Generator().manual_seed(0))
    body: Any = model.body
    return torch.inference_mode()(lambda _: body(input_ids=ids, use_cache=False))


def token_call(model: LanguageModel, length: int) -> Callable[[int], Any]:
    ids = torch.randint(512, (1, length), generator=torch.Generator().manual_seed(0))
    body: Any = model.body
    with torch.inference_mode():
        cache = body(input_ids=ids, use_cache=True).past_key_values

    def call(_: int) -> None:
        body(input_ids=ids[:, :1], cache=cache, use_cache=True)
        cache.crop(-1)

    return torch.inference_mode()(call)


def step_call(model: LanguageModel, length: int) -> Callable[[int], Any]:
    ids = torch.randint(512, (1, length), generator=torch.Generator().manual_seed(0))
    module: Any = model.module
    module.requires_grad_(True)

    def call(_: int) -> None:
        module(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        module.zero_grad(set_to_none=True)

    return call


PARTS = {"full": full_call, "token": token_call, "step": step_call}


def main() -> int:
    parser = side_by_side.parser(__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--part", nargs="+", choices=sorted(PARTS), default=list(PARTS))
    options = parser.parse_args()
    side_by_side.start(options)
    found = {}
    for part in options.part:
        calls = {arm: PARTS[part](built(arm, options.layers, options.length), options.length) for arm in ARMS}
        times = side_by_side.in_turn(calls, options.rounds)
        found[part] = {arm: side_by_side.ratio(times[arm], times["softmax"]) for arm in ARMS}
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
