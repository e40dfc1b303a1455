"""The online Hadamard transform against the float32 linear that it precedes.

    python benchmarks/hadamard.py --tokens 512 --rounds 9

Wanted: at most 10 % of the linear.
"""

import statistics
import sys

import side_by_side
import torch
from torch.nn import functional

from quant_bench.numerics.hadamard import factors, transform

WANTED = 0.10
# name, width, order of the transform, outputs of the linear
CASES = (
    ("SmolLM2 output, all features", 576, 576, 576),
    ("SmolLM2 down", 1536, 1536, 576),
    ("Qwen3-0.6B down", 3072, 3072, 1024),
    ("12 heads of 64, output", 768, 12, 768),
    ("Llama-3.2-1B down", 8192, 8192, 2048),
    ("4096 output, 32 heads of 128", 4096, 32, 4096),
)


def main() -> int:
    parser = side_by_side.parser(__doc__, rounds=9)
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    side_by_side.start(options)
    reached = True
    for name, width, size, outputs in CASES:
        x, weight = torch.randn(options.tokens, width), torch.randn(outputs, width)
        calls = {
            "ours": lambda _, x=x, size=size: transform(x, size),
            "linear": lambda _, x=x, weight=weight: functional.linear(x, weight),
        }
        times = side_by_side.in_turn(calls, options.rounds)
        share = side_by_side.ratio(times["ours"], times["linear"])
        reached &= share <= WANTED
        ours, linear = (1e3 * statistics.median(times[side]) for side in ("ours", "linear"))
        print(
            f"{name:30} {tuple(factors(size))!s:14} {ours:7.2f} ms of {linear:7.2f} ms: {share:6.1%}  "
            f"{'reached' if share <= WANTED else 'MISSED'}",
            flush=True,
        )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
