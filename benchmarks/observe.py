"""What outlier statistics cost on top of the forward pass they ride on, and that their memory does not grow.

    python benchmarks/observe.py --model smollm2-135m-instruct --tokens 1024 --rounds 5

A round is one plain and one observed pass over the same window (body, head and loss). The same is measured under
integer W8A8, whose forward pass is shorter.
"""

import pickle
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import side_by_side

from quant_bench.data import DataSource
from quant_bench.lowbit.floats import pack_float_linears_
from quant_bench.model import LanguageModel
from quant_bench.models import load_model
from quant_bench.observe import Observer
from quant_bench.quantizer import Calibration
from quant_bench.registry import build
from quant_bench.scoring import final_hidden, target_log_probs
from quant_bench.windows import Windows, WindowSettings, cut

LIMIT = 1.05


def passes(model: LanguageModel, windows: Windows) -> dict[str, Callable[[int], object]]:
    """A plain and an observed pass over the window of a round, as a perplexity task runs it."""
    observer = Observer(model)

    def plain(turn: int) -> None:
        index = turn % len(windows.spans)
        hidden = final_hidden(model, windows.ids(index))[0, :-1]
        target_log_probs(model, hidden, windows.targets(index))

    def observed(turn: int) -> None:
        with observer:
            plain(turn)

    return {"plain": plain, "observed": observed}


def sizes(model: LanguageModel, windows: Windows) -> tuple[int, int]:
    """Bytes of the statistics, serialized, after two batches and after twelve."""
    found = []
    with Observer(model) as observer:
        for index in range(12):
            final_hidden(model, windows.ids(index % len(windows.spans))[:, :128])
            found.append(len(pickle.dumps(observer.statistics)))
    return found[1], found[-1]


def main() -> int:
    parser = side_by_side.parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--text", default="python_docs")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--quantizers", nargs="*", default=["none", "w8a8-integer"])
    options = parser.parse_args()
    side_by_side.start(options)
    rows = DataSource(options.data).text(options.text).rows
    worst = 0.0
    for name in options.quantizers:
        model = build("quantizers", name).quantize(load_model(options.model), Calibration())
        pack_float_linears_(model.module)
        windows = cut(rows, model, WindowSettings(seq_length=options.tokens))
        print(f"{name}: {options.tokens} tokens a window, {len(Observer(model).statistics)} tensors observed")
        times = side_by_side.in_turn(passes(model, windows), options.rounds)
        cost = side_by_side.ratio(times["observed"], times["plain"])
        worst = max(worst, cost)
        after_two, after_twelve = sizes(model, windows)
        plain = statistics.median(times["plain"])
        print(f"  plain {plain:.2f} s, observed {cost:.4f}x; wanted at most {LIMIT}")
        print(f"  statistics hold {after_two} bytes after 2 batches, {after_twelve} after 12")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
