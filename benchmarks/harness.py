"""Our lm-eval model against plain lm-eval `hf`: same model, items and dtype, side by side in one process.

    python benchmarks/harness.py --data DIR --items 16 --rounds 5

Time is CPU time of the process, so that other programs on the machine count little; every ratio is the median of the
rounds' ratios, in which the two take turns at going first. `hf` runs with each batch size asked for and its best one
counts. Scores are compared as well: a faster wrong answer is no gain. Our side runs as `quant-bench run` runs it, with
packed float32 linears; `--plain-linears` leaves that part of the gain out.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

from quant_bench.data import DataSource
from quant_bench.harness import HarnessLM
from quant_bench.lm_eval_task import prepare
from quant_bench.lowbit.floats import pack_float_linears_
from quant_bench.lowbit.memory import tune_allocator
from quant_bench.model import LanguageModel
from quant_bench.models import load_model

WANTED = {"hellaswag": 2.3, "gsm8k_cot": 3.0, "lambada_openai": 1.15, "wikitext": 1.0}


def plain_copy(model: LanguageModel) -> torch.nn.Module:
    """Transformers' own attention over the same weights."""
    module = AutoModelForCausalLM.from_config(
        deepcopy(model.config), attn_implementation="sdpa", dtype=next(model.module.parameters()).dtype
    )
    module.load_state_dict(model.module.state_dict(), assign=True)
    module.tie_weights()
    module.generation_config = model.module.generation_config
    return module.eval()


def requests_of(task: str, data: DataSource, items: int) -> list[Instance]:
    """The requests of a task's first documents; of GSM8K only the prompt is processed, for one new token."""
    # a WikiText document has some thousands of tokens
    prepared = prepare(task, {}, data, max(1, items // 8) if task == "wikitext" else items)
    found = [request for asked in prepared.requests.values() for request in asked]
    for request in found:
        if request.request_type == "generate_until":
            request.arguments = (request.args[0], {**request.args[1], "max_gen_toks": 1})
    return found


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    answer = work()
    return time.process_time() - start, answer


def difference(ours: list[Any], theirs: list[Any]) -> str:
    if isinstance(ours[0], str):
        return f"{sum(a != b for a, b in zip(ours, theirs, strict=True))} texts differ"
    pairs = [(a[0], b[0]) if isinstance(a, tuple) else (a, b) for a, b in zip(ours, theirs, strict=True)]
    return f"largest difference {max(abs(a - b) for a, b in pairs):.1e} nats"


def compare(task: str, model: LanguageModel, references: dict[int, HFLM], asked: list[Instance], rounds: int) -> float:
    """The median ratio of the best plain batch size's time to ours."""
    kind = asked[0].request_type
    ratios: dict[int, list[float]] = {batch: [] for batch in references}
    seconds: list[float] = []
    for turn in range(rounds):
        # a fresh one each time: no prefix and no tokens are remembered from the round before
        runs: list[tuple[int, Callable[[], Any]]] = [
            (0, lambda: getattr(HarnessLM(model), kind)(asked, disable_tqdm=True)),
            *((batch, lambda lm=lm: getattr(lm, kind)(asked, disable_tqdm=True)) for batch, lm in references.items()),
        ]
        found = {batch: timed(work) for batch, work in (runs if turn % 2 == 0 else reversed(runs))}
        seconds.append(found[0][0])
        for batch in references:
            ratios[batch].append(found[batch][0] / found[0][0])
    medians = {batch: statistics.median(values) for batch, values in ratios.items()}
    best = min(medians, key=medians.__getitem__)
    shown = ", ".join(f"bs {batch}: {value:.2f}x" for batch, value in medians.items())
    print(
        f"{task:15} {len(asked):4} requests  ours {statistics.median(seconds):7.2f} s  against hf {shown}"
        f"  wanted {WANTED[task]:.2f}x  {'reached' if medians[best] >= WANTED[task] else 'MISSED'}"
        f"  ({difference(found[0][1], found[best][1])})",
        flush=True,
    )
    return medians[best]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", type=Path, help="mirror folder")
    parser.add_argument("--items", type=int, default=16, help="documents of a task (WikiText: an eighth)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--hf-batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--plain-linears", action="store_true", help="do not pack float linears as the engine does")
    parser.add_argument("--tasks", nargs="+", default=list(WANTED), choices=list(WANTED))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # as `quant-bench run` does; both sides of every ratio gain from it
    tune_allocator()
    model, data = load_model(options.model), DataSource(options.data)
    references = {
        batch: HFLM(pretrained=plain_copy(model), tokenizer=model.tokenizer, batch_size=batch)
        for batch in options.hf_batch
    }
    packed = [] if options.plain_linears else pack_float_linears_(model.module)
    load = os.getloadavg()[0]
    print(
        f"{options.model}, float32, {options.threads} threads, load {load:.1f}, torch {torch.__version__}, "
        f"{len(packed)} of our linears packed"
    )
    reached = [
        compare(task, model, references, requests_of(task, data, options.items), options.rounds) >= WANTED[task]
        for task in options.tasks
    ]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
