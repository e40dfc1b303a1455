"""Speed of one quantized linear layer against float32, side by side in one run.

    python benchmarks/linear.py --threads 1

float32 is `nn.Linear` (`F.linear`) and the same weight in oneDNN's layout; "x" is speed relative to the first.
"""

import math
import os
import statistics
import sys
from collections.abc import Callable

import numpy as np
import side_by_side
import torch
from torch import nn

from quant_bench.lowbit.activation import ActivationRule
from quant_bench.lowbit.codes import quantize_weight
from quant_bench.lowbit.floats import PackedLinear, packing_works
from quant_bench.lowbit.kernels import int_mm, kernel_report
from quant_bench.lowbit.linear import QuantLinear
from quant_bench.lowbit.threads import compiled, shared
from quant_bench.lowbit.vnni import supported

SHAPES = ((576, 576), (576, 1536), (1536, 576), (576, 192), (2048, 8192))
# name -> least geometric mean, least single ratio
WANTED = {"W8A8 integer": (3.5, 2.8), "W4A4 integer": (3.2, 0.0), "W8A8 simulated": (1 / 1.12, 1 / 1.12)}
Candidates = dict[str, Callable[[torch.Tensor], torch.Tensor]]


def quantized(weight: torch.Tensor) -> Candidates:
    """Our layers."""
    eight, four = (quantize_weight(weight, bits=bits) for bits in (8, 4))
    fine = quantize_weight(weight, bits=4, granularity="group")
    return {
        "W8A8 integer": QuantLinear(eight, None, ActivationRule(8), "integer"),
        "W4A4 integer": QuantLinear(four, None, ActivationRule(4), "integer"),
        "W4A4 g128 integer": QuantLinear(fine, None, ActivationRule(4, "group"), "integer"),
        "W8A8 simulated": QuantLinear(eight, None, ActivationRule(8), "simulated"),
        "W4A4 g128 simulated": QuantLinear(fine, None, ActivationRule(4, "group"), "simulated"),
    }


def foreign(linear: nn.Linear) -> Candidates:
    """Other libraries' int8 layers on the same weight, where they are installed."""
    found: Candidates = {}
    try:
        from optimum.quanto import Calibration, freeze, qint8, quantize

        model = nn.Sequential(nn.Linear(linear.in_features, linear.out_features, bias=False))
        model[0].weight = nn.Parameter(linear.weight.detach().clone())
        quantize(model, weights=qint8, activations=qint8)
        with Calibration(), torch.no_grad():
            model(torch.randn(64, linear.in_features))
        freeze(model)
        found["quanto qint8 static"] = model
    except ImportError:
        pass
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        model = nn.Sequential(nn.Linear(linear.in_features, linear.out_features, bias=False))
        model[0].weight = nn.Parameter(linear.weight.detach().clone())
        quantize_(model, Int8DynamicActivationInt8WeightConfig())
        found["torchao int8 dynamic eager"] = model
        found["torchao int8 dynamic compiled"] = torch.compile(model)
    except ImportError:
        pass
    return found


def candidates(columns: int, rows: int, tokens: int) -> Candidates:
    linear = nn.Linear(columns, rows, bias=False).requires_grad_(False)
    found: Candidates = {"float32 F.linear": linear}
    if packing_works():
        found["float32 packed"] = PackedLinear(linear.weight, None)
    codes = torch.randint(-127, 128, (tokens, columns), dtype=torch.int8)
    weight = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    found["raw torch._int_mm"] = lambda x: int_mm(codes, weight)
    return {**found, **quantized(linear.weight), **foreign(linear)}


def peak() -> float | None:
    """8-bit operations a second that this machine's dot-product instruction reaches on operands in the L1 cache."""
    if not supported():
        return None
    from quant_bench.lowbit.vnni import integer_tile

    tokens, columns, rows = 6, 384, 64

    @compiled
    def loop(start, stop, a, panel, sums, out):  # type: ignore[no-untyped-def]
        none = np.int64(0)
        place = (a, np.int64(columns), panel, np.int64(columns // 4), sums)
        rest = (none, none, none, none, none, none, out, np.int64(4 * rows))
        for _ in range(start, stop):
            integer_tile((*place, *rest))

    # tensors start at whole cache lines
    operands = [torch.ones(tokens * columns, dtype=torch.int8), torch.ones(columns * rows, dtype=torch.int8)]
    operands += [torch.ones(tokens, dtype=torch.int32), torch.ones(tokens * rows, dtype=torch.int32)]
    addresses = [tensor.data_ptr() for tensor in operands]
    count, best = 50000, math.inf
    # of a peak the fastest counts
    for _ in range(9):
        start = side_by_side.clock()
        shared(loop, count, count * columns * rows, *addresses)
        best = min(best, side_by_side.clock() - start)
    return 2 * tokens * columns * rows * count / best


def report(tokens: int, times: dict[tuple[int, int], dict[str, list[float]]], top: float | None) -> bool:
    names = list(next(iter(times.values())))
    print(f"\nM = {tokens}; x float32 F.linear, median of rounds; last columns: geometric mean, and that over packed")
    print(f"{'':30}" + "".join(f"{k}x{n}".rjust(12) for k, n in times) + "     geomean  x packed")
    passed = True
    for name in names:
        ratios, packed = [], []
        for found in times.values():
            plain = found["float32 F.linear"]
            ratios.append(side_by_side.ratio(plain, found[name]))
            packed.append(side_by_side.ratio(found.get("float32 packed", plain), found[name]))
        mean = statistics.geometric_mean(ratios)
        line = f"{name:30}" + "".join(f"{ratio:12.2f}" for ratio in ratios)
        line += f"{mean:12.2f}{statistics.geometric_mean(packed):10.2f}"
        wanted = WANTED.get(name) if tokens == 2048 else None
        if wanted:
            good = mean >= wanted[0] and min(ratios) >= wanted[1]
            passed = passed and good
            line += f"   wanted {wanted[0]:.2f}, none below {wanted[1]:.2f}: {'ok' if good else 'MISSED'}"
        if tokens == 1 and name in ("W8A8 integer", "W4A4 integer"):
            good = min(ratios) >= 1
            passed = passed and good
            line += f"   wanted: not slower than F.linear: {'ok' if good else 'MISSED'}"
        print(line)
    if tokens > 1:
        print("\nspeed in 10^9 operations a second, share of the raw integer product and of the instruction's peak")
        for name in ("raw torch._int_mm", "W8A8 integer", "W4A4 integer", "W4A4 g128 integer"):
            cells = []
            for (columns, rows), found in times.items():
                speed = 2 * tokens * columns * rows / statistics.median(found[name])
                share = side_by_side.ratio(found["raw torch._int_mm"], found[name])
                cells.append(f"{speed / 1e9:.0f} {share:4.0%}" + (f" {speed / top:4.0%}" if top else ""))
            print(f"{name:20}" + "".join(cell.rjust(17) for cell in cells))
    return passed


def main() -> int:
    parser = side_by_side.parser(__doc__, rounds=7)
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 1])
    options = parser.parse_args()
    torch.manual_seed(0)
    side_by_side.start(options)
    print(f"kernel {kernel_report()}")
    top = peak()
    if top:
        print(f"peak of the dot-product instruction: {top / 1e9:.0f}e9 operations a second")
    print("an x86 CPU has no 4-bit arithmetic: W4A4 cannot beat W8A8 in the product, it halves the memory")
    passed = True
    with torch.inference_mode():
        for tokens in options.tokens:
            times = {}
            for columns, rows in SHAPES:
                x = torch.randn(tokens, columns)
                calls = {
                    name: lambda _, layer=layer, x=x: layer(x)
                    for name, layer in candidates(columns, rows, tokens).items()
                }
                times[columns, rows] = side_by_side.in_turn(calls, options.rounds, least=0.01)
            passed = report(tokens, times, top) and passed
    print(f"\nload at the end {os.getloadavg()}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
