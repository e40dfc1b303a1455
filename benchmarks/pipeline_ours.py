"""What runs on our side, each in a process of its own that `pipeline.py` starts: the run, and two comparisons.

python benchmarks/pipeline_ours.py KIND '{"out": "FILE", ...}'
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any


class Timers:
    """CPU seconds by label; what a timed call spends in another timed call counts there alone."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.quantizer = ""
        self._inner = [0.0]

    def wrap(self, owner: Any, name: str, label: Callable[..., str]) -> None:
        original = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            key, start = label(*arguments), time.process_time()
            self._inner.append(0.0)
            try:
                return original(*arguments, **named)
            finally:
                took = time.process_time() - start
                self.seconds[key] += took - self._inner.pop()
                self._inner[-1] += took

        setattr(owner, name, timed)


def ours(asked: dict[str, Any]) -> dict[str, Any]:
    """`quant-bench run` with timers around its stages, in this process."""
    from quant_bench import cli, environment, harness, lm_eval_task, models, perplexity, windows
    from quant_bench.registry import build, canonical

    # the package's attribute of that name is the function
    run = import_module("quant_bench.runner")
    timers, peak = Timers(), [0]
    names = {canonical("quantizers", build("quantizers", name)): name for name in asked["quantizers"]}

    def starting(planned: Any, *_: Any) -> str:
        timers.quantizer = names[planned.cell.quantizer]
        return "quantize"

    def before_reset(memory: Any) -> None:
        peak[0] = max(peak[0], memory.bytes() or 0)
        reset(memory)

    def first_find(*arguments: Any) -> Any:
        timers.seconds.setdefault("start", time.process_time())
        return find(*arguments)

    reset, environment.PeakMemory.reset = environment.PeakMemory.reset, before_reset
    find, models.find = models.find, first_find
    timers.wrap(models, "load_model", lambda *_: "load")
    timers.wrap(run, "_quantized", starting)
    timers.wrap(lm_eval_task, "prepare", lambda *_: "requests")
    timers.wrap(perplexity, "cut", lambda *_: "requests")
    timers.wrap(harness.HarnessLM, "_once", lambda *_: "requests")
    timers.wrap(lm_eval_task, "_ask", lambda _, prepared: f"ask {timers.quantizer} {prepared.task.config.task}")
    timers.wrap(windows, "_run", lambda *_: f"ask {timers.quantizer} windows")
    cli.main(["run", *asked["arguments"]], standalone_mode=False)
    # a stage that has another name by now would pass for one that costs nothing
    for stage in ("start", "load", "quantize", "requests", *(f"ask {name} windows" for name in asked["quantizers"])):
        if not timers.seconds[stage]:
            raise RuntimeError(f"no timer saw {stage!r}: {dict(timers.seconds)}")
    return {"seconds": timers.seconds, "peak": max(peak[0], environment.PeakMemory().bytes() or 0)}


def engine(name: str, model_name: str, packed: bool = True) -> Any:
    """A model as `quant-bench run` makes it."""
    from quant_bench.lowbit.floats import pack_float_linears_
    from quant_bench.lowbit.memory import tune_allocator
    from quant_bench.models import load_model
    from quant_bench.quantizer import Calibration
    from quant_bench.registry import build

    tune_allocator()
    model = build("quantizers", name).quantize(load_model(model_name), Calibration())
    if packed:
        pack_float_linears_(model.module)
    return model


def windows_of(asked: dict[str, Any], model: Any, size: int) -> Any:
    from quant_bench.data import DataSource
    from quant_bench.windows import WindowSettings, cut

    return cut(DataSource(None).text(asked["text"]).rows, model, WindowSettings(seq_length=size))


def our_nll(model: Any, windows: Any, index: int) -> float:
    from quant_bench.scoring import final_hidden, target_log_probs

    hidden = final_hidden(model, windows.ids(index))[0, :-1]
    return -float(target_log_probs(model, hidden, windows.targets(index)).log_probs.mean())


def all_nll(model: Any, windows: Any, count: int) -> list[float]:
    return [our_nll(model, windows, index) for index in range(count)]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    answer = work()
    return time.process_time() - start, answer


def perplexity(asked: dict[str, Any]) -> dict[str, Any]:
    """Rounds in which the three take turns over the same window."""
    import torch
    from transformers import AutoModelForCausalLM

    float_model, integer = engine("none", asked["model"]), engine("w8a8-integer", asked["model"])
    module = AutoModelForCausalLM.from_pretrained(asked["folder"], dtype=torch.float32).eval()

    @torch.inference_mode()
    def reference(ids: Any) -> float:
        return float(module(ids, labels=ids, use_cache=False).loss)

    result = {}
    for size in asked["sizes"]:
        windows = windows_of(asked, float_model, size)
        sides: dict[str, Callable[[int], float]] = {
            "transformers float32": lambda index, windows=windows: reference(windows.ids(index)),
            "packed float32": partial(our_nll, float_model, windows),
            "integer W8A8": partial(our_nll, integer, windows),
        }
        result[str(size)] = in_turn(sides, len(windows.spans), asked["rounds"])
    return result


def in_turn(sides: dict[str, Callable[[int], float]], windows: int, rounds: int) -> dict[str, Any]:
    """Seconds and mean losses of each side, a window a round."""
    import side_by_side

    losses: dict[str, list[float]] = {name: [] for name in sides}

    def call(turn: int, name: str) -> None:
        losses[name].append(sides[name](turn % windows))

    seconds = side_by_side.in_turn({name: partial(call, name=name) for name in sides}, rounds)
    # the warm-up counts in neither
    return {"seconds": seconds, "losses": {name: found[1:] for name, found in losses.items()}}


def parts(asked: dict[str, Any]) -> dict[str, Any]:
    """Each quantizer with a part switched on and off, side by side; and the bytes of its weights."""
    from quant_bench.data import DataSource
    from quant_bench.harness import HarnessLM
    from quant_bench.lm_eval_task import prepare
    from quant_bench.lowbit.floats import pack_float_linears_
    from quant_bench.lowbit.linear import QuantLinear

    result: dict[str, Any] = {}
    for name in asked["quantizers"]:
        model = engine(name, asked["model"], packed=False)
        windows = windows_of(asked, model, asked["seq_length"])
        one_pass = partial(all_nll, model, windows, asked["windows"])
        # each time the second one counts
        found = {"unpacked": min(timed(one_pass)[0] for _ in range(2))}
        pack_float_linears_(model.module)
        found["pass"] = min(timed(one_pass)[0] for _ in range(2))
        if "hellaswag" in asked["limits"]:
            prepared = prepare("hellaswag", {}, DataSource(None), asked["limits"]["hellaswag"])
            requests = [request for group in prepared.requests.values() for request in group]
            for key, share in (("alone", False), ("shared", True)):
                found[key] = timed(partial(HarnessLM(model, share=share).loglikelihood, requests, True))[0]
        layers = [layer.weight for layer in model.module.modules() if isinstance(layer, QuantLinear)]
        found["bytes"] = sum(layer.nbytes for layer in layers)
        found["float_bytes"] = sum(4 * layer.rows * layer.columns for layer in layers)
        result[name] = found
    return result


if __name__ == "__main__":
    order = json.loads(sys.argv[2])
    side = {"ours": ours, "perplexity": perplexity, "parts": parts}[sys.argv[1]]
    Path(order["out"]).write_text(json.dumps(side(order)), encoding="ascii")
