"""Time of GPTQ on the matrices of one model layer, beside the published loop written plainly.

    python benchmarks/gptq.py [--width 576] [--inner 1536] [--group 128] [--rounds 5]

Both round the same weights with the same second moments to 4 bits, alternately, in one process. The plain loop is
algorithm 1 of Frantar et al. 2022 (https://arxiv.org/abs/2210.17323) as most implementations have it: one column of a
(rows, columns) matrix at a time, blocks of 128, min-max scales of each group. Printed is the processor time of one
thread, median over rounds, and the median of the ratios within a round (ours / plain; wanted is at most 1.5).
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from quant_bench import registry
from quant_bench.quantization.sequential import GptqRule, gptq_encode

BLOCK = 128


def plain(weight: Tensor, second: Tensor, group: int) -> Tensor:
    w, h = weight.clone(), second.clone()
    columns = w.shape[1]
    h.diagonal().add_(0.01 * h.diagonal().mean())
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
    result = torch.zeros_like(w)
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        part, factor = w[:, start:stop].clone(), inverse[start:stop, start:stop]
        errors = torch.zeros_like(part)
        for i in range(stop - start):
            if (start + i) % group == 0:
                scale = w[:, start + i : start + i + group].abs().amax(1) / 7
            column = part[:, i]
            rounded = torch.clamp(torch.round(column / scale), -7, 7) * scale
            result[:, start + i] = rounded
            error = (column - rounded) / factor[i, i]
            part[:, i:] -= error[:, None] @ factor[i, i:][None]
            errors[:, i] = error
        w[:, stop:] -= errors @ inverse[start:stop, stop:]
    return result


def seconds(run: Callable[[], object]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--inner", type=int, default=1536)
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    scheme = registry.build("quantizers", f"gptq:w4a16g{options.group}")
    generator = torch.Generator().manual_seed(0)
    for rows, columns in (
        (options.width, options.width),
        (options.inner, options.width),
        (options.width, options.inner),
    ):
        mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
        x = torch.randn(4 * columns, columns, generator=generator) @ mixing
        weight, second = torch.randn(rows, columns, generator=generator), x.T @ x / len(x)
        ours = [0.0] * options.rounds
        theirs = [0.0] * options.rounds
        for index in range(options.rounds):
            ours[index] = seconds(lambda w=weight, h=second: gptq_encode(w, h, scheme, GptqRule()))
            theirs[index] = seconds(lambda w=weight, h=second: plain(w, h, options.group))
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        times = f"ours {statistics.median(ours):.3f} s, plain {statistics.median(theirs):.3f} s"
        print(f"{rows} x {columns}: {times}, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
