"""What the attention diagnosis costs: a watched against a plain forward pass, side by side.

    python benchmarks/diagnostics.py --tokens 1024 --rounds 7 --arms softmax sink_logit combo2

Models are random: the shape of SmolLM2-135M (30 layers, 9 heads on 3) and a small one of the size of tier `micro`,
whose attention is a larger part of its pass. A round is one plain and one watched pass of the body over the same tokens
(no head, which would make the ratio smaller).
"""

import statistics
import sys
from collections.abc import Callable

import side_by_side
import torch
from jaxtyping import Int64
from torch import Tensor

from quant_bench.diagnostics.watch import AttentionWatch
from quant_bench.lowbit.floats import pack_float_linears_
from quant_bench.model import LanguageModel
from quant_bench.quantizer import Calibration
from quant_bench.registry import build
from quant_bench.scoring import final_hidden

LIMIT = 2.0
SHAPES = {
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "micro": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
}


def model_of(shape: str, arm: str, quantizer: str) -> LanguageModel:
    model = side_by_side.random_llama(
        arm, **SHAPES[shape], vocab_size=97, max_position_embeddings=4096, tie_word_embeddings=True
    )
    model = build("quantizers", quantizer).quantize(model, Calibration())
    pack_float_linears_(model.module)
    return model


def passes(model: LanguageModel, tokens: int) -> dict[str, Callable[[int], object]]:
    """A plain and a watched pass over the tokens of a round."""

    def ids(turn: int) -> Int64[Tensor, " seq"]:
        return torch.randint(3, 97, (tokens,), generator=torch.Generator().manual_seed(turn))

    def watched(turn: int) -> None:
        with AttentionWatch(model) as watch:
            watch.read(ids(turn))

    return {"plain": lambda turn: final_hidden(model, ids(turn)[None]), "watched": watched}


def main() -> int:
    parser = side_by_side.parser(__doc__, rounds=7)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--arms", nargs="+", default=["softmax", "sink_logit", "combo2", "renorm", "clipped_softmax"])
    parser.add_argument("--quantizers", nargs="+", default=["none"])
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    side_by_side.start(options)
    reached = True
    for shape in options.shapes:
        for arm in options.arms:
            for quantizer in options.quantizers:
                calls = passes(model_of(shape, arm, quantizer), options.tokens)
                times = side_by_side.in_turn(calls, options.rounds)
                cost = side_by_side.ratio(times["watched"], times["plain"])
                reached &= cost <= LIMIT
                plain = 1000 * statistics.median(times["plain"])
                print(
                    f"{shape:14} {arm:16} {quantizer:12} {options.tokens} tokens, plain {plain:7.1f} ms, "
                    f"watched {cost:.2f}x; wanted at most {LIMIT:.0f}x",
                    flush=True,
                )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
