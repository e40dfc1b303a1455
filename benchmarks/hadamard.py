"""The online Hadamard transform against the float32 linear that it precedes: CPU time of one thread.

    python benchmarks/hadamard.py --rounds 9

Wanted: at most 10 % of the linear. The two take turns; the ratio is that of the fastest rounds.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch.nn import functional

from quant_bench.numerics.hadamard import factors, transform

WANTED = 0.10
# name, width, order of the transform, outputs of the linear
CASES = (
    ("SmolLM2 output, all features", 576, 576, 576),
    ("SmolLM2 down", 1536, 1536, 576),
    ("12 heads of 64, output", 768, 12, 768),
    ("Llama-3.2-1B down", 8192, 8192, 2048),
    ("4096 output, 32 heads of 128", 4096, 32, 4096),
)


def seconds(work: Callable[[], torch.Tensor]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{options.tokens} tokens, 1 thread, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    reached = True
    for name, width, size, outputs in CASES:
        x, weight = torch.randn(options.tokens, width), torch.randn(outputs, width)
        ours: list[float] = []
        linear: list[float] = []
        # the first of each compiles and warms up
        for _ in range(options.rounds + 1):
            ours.append(seconds(lambda x=x, size=size: transform(x, size)))
            linear.append(seconds(lambda x=x, weight=weight: functional.linear(x, weight)))
        ratio = min(ours[1:]) / min(linear[1:])
        reached &= ratio <= WANTED
        print(
            f"{name:30} {tuple(factors(size))!s:14} {1e3 * min(ours[1:]):7.2f} ms of {1e3 * min(linear[1:]):7.2f} ms: "
            f"{100 * ratio:5.1f} %  {'reached' if ratio <= WANTED else 'MISSED'}",
            flush=True,
        )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
