"""Speed of one quantized linear layer against float32, side by side in one run.

Every round runs all candidates one after the other; a ratio is taken within its round, and the median over the rounds
is printed. float32 is `nn.Linear` (`F.linear`) and the same weight in oneDNN's layout; "x" is speed relative to the
first. With one thread the clock is that thread's CPU time, which does not count what other processes take.

    python benchmarks/linear.py --threads 1
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from torch import nn

from quant_bench.lowbit.activation import ActivationRule
from quant_bench.lowbit.codes import quantize_weight
from quant_bench.lowbit.floats import PackedLinear, packing_works
from quant_bench.lowbit.kernels import int_mm, kernel_report
from quant_bench.lowbit.linear import QuantLinear
from quant_bench.lowbit.memory import tune_allocator
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


def measure(found: Candidates, x: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds a call of each candidate, round by round."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    repeat: dict[str, int] = {}
    times: dict[str, list[float]] = {name: [] for name in found}
    for name, call in found.items():
        call(x)
        start = clock()
        call(x)
        repeat[name] = max(1, min(200, int(0.01 / max(clock() - start, 1e-6))))
    for _ in range(rounds):
        for name, call in found.items():
            start = clock()
            for _ in range(repeat[name]):
                call(x)
            times[name].append((clock() - start) / repeat[name])
    return times


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
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for _ in range(9):
        start = clock()
        shared(loop, count, count * columns * rows, *addresses)
        best = min(best, clock() - start)
    return 2 * tokens * columns * rows * count / best


def report(tokens: int, times: dict[tuple[int, int], dict[str, list[float]]], top: float | None) -> bool:
    names = list(next(iter(times.values())))
    print(f"\nM = {tokens}; x float32 F.linear, median of rounds; last columns: geometric mean, and that over packed")
    print(f"{'':30}" + "".join(f"{k}x{n}".rjust(12) for k, n in times) + "     geomean  x packed")
    passed = True
    for name in names:
        ratios, packed = [], []
        for found in times.values():
            ratios.append(statistics.median(a / b for a, b in zip(found["float32 F.linear"], found[name], strict=True)))
            base = found.get("float32 packed", found["float32 F.linear"])
            packed.append(statistics.median(a / b for a, b in zip(base, found[name], strict=True)))
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
                share = statistics.median(a / b for a, b in zip(found["raw torch._int_mm"], found[name], strict=True))
                cells.append(f"{speed / 1e9:.0f} {share:4.0%}" + (f" {speed / top:4.0%}" if top else ""))
            print(f"{name:20}" + "".join(cell.rjust(17) for cell in cells))
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 1])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"threads {torch.get_num_threads()}, clock {'thread CPU time' if arguments.threads == 1 else 'wall time'}")
    print(f"load {os.getloadavg()}, rounds {max(5, arguments.rounds)}, torch {torch.__version__}")
    print(f"allocator tuned {tune_allocator()}, kernel {kernel_report()}")
    top = peak()
    if top:
        print(f"peak of the dot-product instruction: {top / 1e9:.0f}e9 operations a second")
    print("an x86 CPU has no 4-bit arithmetic: W4A4 cannot beat W8A8 in the product, it halves the memory")
    passed = True
    with torch.inference_mode():
        for tokens in arguments.tokens:
            times = {}
            for columns, rows in SHAPES:
                found = candidates(columns, rows, tokens)
                times[columns, rows] = measure(found, torch.randn(tokens, columns), max(5, arguments.rounds))
            passed = report(tokens, times, top) and passed
    print(f"\nload at the end {os.getloadavg()}")
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
