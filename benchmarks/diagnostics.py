"""What the attention diagnosis costs: a watched against a plain forward pass, side by side.

    python benchmarks/diagnostics.py --tokens 1024 --rounds 7 --arms softmax sink_logit combo2

Models are random: the shape of SmolLM2-135M (30 layers, 9 heads on 3) and a small one of the size of tier `micro`,
whose attention is a larger part of its pass. A round is one plain and one watched pass of the body over the same tokens
(no head, which would make the ratio smaller), taking turns at going first; the cost is the median of the rounds' ratios
of CPU time, so that other programs on the machine count little.
"""

import argparse
import os
import statistics
import sys
import time

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from quant_bench.diagnostics.watch import AttentionWatch
from quant_bench.lowbit.floats import pack_float_linears_
from quant_bench.lowbit.memory import tune_allocator
from quant_bench.model import LanguageModel
from quant_bench.models import from_module
from quant_bench.quantizer import Calibration
from quant_bench.registry import build
from quant_bench.scoring import final_hidden
from quant_bench.tiny import tiny_tokenizer

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
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], vocab_size=97, max_position_embeddings=4096, tie_word_embeddings=True)
    model = from_module(AutoModelForCausalLM.from_config(config), tiny_tokenizer(), name=shape)
    model = build("quantizers", quantizer).quantize(build("arms", arm).attach(model), Calibration())
    pack_float_linears_(model.module)
    return model


def plain(model: LanguageModel, ids: Int64[Tensor, " seq"]) -> float:
    start = time.process_time()
    final_hidden(model, ids[None])
    return time.process_time() - start


def watched(model: LanguageModel, ids: Int64[Tensor, " seq"]) -> float:
    with AttentionWatch(model) as watch:
        start = time.process_time()
        watch.read(ids)
        return time.process_time() - start


def cost(model: LanguageModel, tokens: int, rounds: int) -> tuple[float, list[float]]:
    """Median seconds of a plain pass, and the ratio of a watched to a plain one, one a round."""
    ratios, seconds = [], []
    for turn in range(rounds + 1):
        ids = torch.randint(3, 97, (tokens,), generator=torch.Generator().manual_seed(turn))
        if turn % 2:
            without, with_watch = plain(model, ids), watched(model, ids)
        else:
            with_watch, without = watched(model, ids), plain(model, ids)
        # the first round warms up
        if turn:
            ratios.append(with_watch / without)
            seconds.append(without)
    return statistics.median(seconds), ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--arms", nargs="+", default=["softmax", "sink_logit", "combo2", "renorm", "clipped_softmax"])
    parser.add_argument("--quantizers", nargs="+", default=["none"])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    tune_allocator()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.2f}")
    reached = True
    for shape in options.shapes:
        for arm in options.arms:
            for quantizer in options.quantizers:
                seconds, ratios = cost(model_of(shape, arm, quantizer), options.tokens, options.rounds)
                median = statistics.median(ratios)
                reached &= median <= LIMIT
                print(
                    f"{shape:14} {arm:16} {quantizer:12} {options.tokens} tokens, plain {1000 * seconds:7.1f} ms, "
                    f"watched {median:.2f}x ({min(ratios):.2f} to {max(ratios):.2f}); wanted at most {LIMIT:.0f}x",
                    flush=True,
                )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
