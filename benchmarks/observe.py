"""What outlier statistics cost on top of the forward pass they ride on, and that their memory does not grow.

    python benchmarks/observe.py --model smollm2-135m-instruct --tokens 1024 --rounds 5

A round is one plain and one observed pass over the same window (body, head and loss), which take turns at going first;
the cost is the median of the rounds' ratios of CPU time, so that other programs on the machine count little. The same
is measured under integer W8A8, whose forward pass is shorter.
"""

import argparse
import os
import pickle
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from quant_bench.data import DataSource
from quant_bench.lowbit.floats import pack_float_linears_
from quant_bench.lowbit.memory import tune_allocator
from quant_bench.model import LanguageModel
from quant_bench.models import load_model
from quant_bench.observe import Observer
from quant_bench.quantizer import Calibration
from quant_bench.registry import build
from quant_bench.scoring import final_hidden, target_log_probs
from quant_bench.windows import Windows, WindowSettings, cut

LIMIT = 1.05


def score(model: LanguageModel, windows: Windows, index: int) -> float:
    """One window as a perplexity task runs it; CPU seconds."""
    start = time.process_time()
    hidden = final_hidden(model, windows.ids(index))[0, :-1]
    target_log_probs(model, hidden, windows.targets(index))
    return time.process_time() - start


def observed(model: LanguageModel, windows: Windows, index: int, observer: Observer) -> float:
    with observer:
        return score(model, windows, index)


def cost(model: LanguageModel, windows: Windows, rounds: int) -> list[float]:
    """Ratio of an observed to a plain pass, one a round."""
    ratios = []
    observer = Observer(model)
    for index in (0, 1):
        observed(model, windows, index, observer)
    for turn in range(rounds):
        index = turn % len(windows.spans)
        if turn % 2:
            plain, with_hooks = score(model, windows, index), observed(model, windows, index, observer)
        else:
            with_hooks, plain = observed(model, windows, index, observer), score(model, windows, index)
        ratios.append(with_hooks / plain)
        print(f"  round {turn}: plain {plain:.2f} s, observed {with_hooks:.2f} s, ratio {ratios[-1]:.4f}")
    return ratios


def sizes(model: LanguageModel, windows: Windows) -> tuple[int, int]:
    """Bytes of the statistics, serialized, after two batches and after twelve."""
    found = []
    with Observer(model) as observer:
        for index in range(12):
            final_hidden(model, windows.ids(index % len(windows.spans))[:, :128])
            found.append(len(pickle.dumps(observer.statistics)))
    return found[1], found[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--text", default="python_docs")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--quantizers", nargs="*", default=["none", "w8a8-integer"])
    options = parser.parse_args()
    tune_allocator()
    rows = DataSource(options.data).text(options.text).rows
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.2f}")
    worst = 0.0
    for name in options.quantizers:
        model = build("quantizers", name).quantize(load_model(options.model), Calibration())
        pack_float_linears_(model.module)
        windows = cut(rows, model, WindowSettings(seq_length=options.tokens))
        print(f"{name}: {options.tokens} tokens a window, {len(Observer(model).statistics)} tensors observed")
        ratios = cost(model, windows, options.rounds)
        median = statistics.median(ratios)
        worst = max(worst, median)
        after_two, after_twelve = sizes(model, windows)
        print(f"  median {median:.4f} (least {min(ratios):.4f}, most {max(ratios):.4f}); wanted at most {LIMIT}")
        print(f"  statistics hold {after_two} bytes after 2 batches, {after_twelve} after 12")
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()
