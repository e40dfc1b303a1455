"""Time and peak memory of quantizing one decoder layer of SmolLM2-135M's shape, or a whole model, by every recipe.

    python benchmarks/recipes.py [--sequences 8] [--model NAME] [--recipe gptq:w4a16 ...]

A layer has random weights and reads random tokens in sequences of 512; what a recipe costs does not depend on either.
Each recipe gets a fresh model and finds nothing that another one left; loading is not counted. Memory is what the
process grew by. A recipe that trains takes `epochs` times as long as with one. With `--model` each recipe runs once.
"""

import statistics
import sys

import side_by_side
import torch

from quant_bench import models, registry
from quant_bench.environment import PeakMemory
from quant_bench.lowbit.memory import release_memory
from quant_bench.model import LanguageModel
from quant_bench.quantization.float_pass import forget_moments
from quant_bench.quantization.scheme import forget_ranges
from quant_bench.quantizer import Calibration, Quantizer

RECIPES = (
    *("rtn:w4a16", "hqq:w4a16", "smoothquant:w8a8", "awq:w4a16", "gptq:w4a16", "gptq:w4a16(act_order=True)"),
    *("quarot:w4a4", "quarot:w4a4(weights=gptq)", "omniquant:w4a4(epochs=1)"),
)
VOCABULARY, LENGTH = 1024, 512


def one_layer() -> LanguageModel:
    return side_by_side.random_llama(
        "softmax",
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=1,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )


def measured(model: LanguageModel, quantizer: Quantizer, sequences: int) -> tuple[float, float]:
    """Seconds and megabytes of one quantization."""
    size = int(model.config.vocab_size)
    ids = torch.randint(size, (sequences, LENGTH), generator=torch.Generator().manual_seed(0))
    calibration = Calibration.of(ids, "random", sequences)
    forget_moments()
    forget_ranges()
    release_memory()
    memory = PeakMemory()
    memory.reset()
    before, start = memory.bytes() or 0, side_by_side.clock()
    quantizer.quantize(model, calibration)
    return side_by_side.clock() - start, ((memory.bytes() or 0) - before) / 1e6


def main() -> int:
    parser = side_by_side.parser(__doc__)
    parser.add_argument("--sequences", type=int, default=8, help="of 512 tokens")
    parser.add_argument("--model", help="a whole model instead of one layer")
    parser.add_argument("--recipe", action="append", help="any number of times; else all")
    options = parser.parse_args()
    side_by_side.start(options)
    print(f"{options.model or 'one layer of 576 and 1536'}, {options.sequences} sequences of {LENGTH} tokens")
    for text in options.recipe or RECIPES:
        quantizer = registry.build("quantizers", text)
        found = []
        # of one layer the first round compiles and warms up
        for _ in range(1 if options.model else options.rounds + 1):
            model = models.load_model(options.model) if options.model else one_layer()
            found.append(measured(model, quantizer, options.sequences))
        seconds, megabytes = (statistics.median(values) for values in zip(*found[-options.rounds :], strict=True))
        print(f"{text:32} {seconds:8.2f} s  {megabytes:8.0f} MB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
