"""Time of GPTQ on the matrices of one model layer, beside the published loop written plainly.

    python benchmarks/gptq.py [--width 576] [--inner 1536] [--group 128] [--rounds 5]

Both round the same weights with the same second moments to 4 bits. The plain loop is algorithm 1 of Frantar et al. 2022
(https://arxiv.org/abs/2210.17323) as most implementations have it: one column of a (rows, columns) matrix at a time,
blocks of 128, min-max scales of each group. Wanted is a ratio of at most 1.5. Where llmcompressor is installed
(`pip install --no-deps llmcompressor loguru compressed-tensors`), its GPTQ of one matrix takes part: scales of groups
are found at first there.
"""

import contextlib
import statistics
import sys

import side_by_side
import torch
from torch import Tensor

from quant_bench import registry
from quant_bench.quantization.sequential import GptqRule, gptq_encode

BLOCK = 128
WANTED = 1.5


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


def llmcompressor(weight: Tensor, second: Tensor, group: int) -> Tensor:
    """The same by llmcompressor's own function, which changes what it is given.

    Raises:
        ImportError: it is not installed.
    """
    from compressed_tensors.quantization import QuantizationArgs
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

    arguments = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
    scale = torch.stack([part.abs().amax(1) for part in torch.split(weight, group, 1)], 1) / 7.5
    found, *_ = quantize_weight(
        weight[None].clone(), second[None].clone(), scale[None], torch.zeros_like(scale)[None], None, arguments
    )
    return found[0]


def main() -> int:
    parser = side_by_side.parser(__doc__)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--inner", type=int, default=1536)
    parser.add_argument("--group", type=int, default=128)
    options = parser.parse_args()
    side_by_side.start(options)
    scheme = registry.build("quantizers", f"gptq:w4a16g{options.group}")
    generator = torch.Generator().manual_seed(0)
    width, inner = options.width, options.inner
    reached = True
    for rows, columns in ((width, width), (inner, width), (width, inner)):
        mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
        x = torch.randn(4 * columns, columns, generator=generator) @ mixing
        weight, second = torch.randn(rows, columns, generator=generator), x.T @ x / len(x)
        calls = {
            "ours": lambda _, w=weight, h=second: gptq_encode(w, h, scheme, GptqRule()),
            "plain": lambda _, w=weight, h=second: plain(w, h, options.group),
        }
        with contextlib.suppress(ImportError):
            llmcompressor(weight, second, options.group)
            calls["llmcompressor"] = lambda _, w=weight, h=second: llmcompressor(w, h, options.group)
        times = side_by_side.in_turn(calls, options.rounds)
        ratio = side_by_side.ratio(times["ours"], times["plain"])
        reached &= ratio <= WANTED
        shown = ", ".join(f"{side} {statistics.median(seconds):.3f} s" for side, seconds in times.items())
        others = (side for side in calls if side != "ours")
        ratios = ", ".join(f"{side_by_side.ratio(times['ours'], times[side]):.2f} of {side}" for side in others)
        print(f"{rows} x {columns}: {shown}; ours takes {ratios}", flush=True)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
