"""Our lm-eval model against plain lm-eval `hf`: same model, items and dtype, side by side in one process.

    python benchmarks/harness.py --data DIR --items 16 --rounds 5

`hf` runs with each batch size asked for and its best one counts. Scores are compared as well: a faster wrong answer is
no gain. Our side runs as `quant-bench run` runs it, with packed float32 linears; `--plain-linears` leaves that part of
the gain out.
"""

import statistics
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import side_by_side
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

from quant_bench.data import DataSource
from quant_bench.harness import HarnessLM
from quant_bench.lm_eval_task import prepare
from quant_bench.lowbit.floats import pack_float_linears_
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


def difference(ours: list[Any], theirs: list[Any]) -> str:
    if isinstance(ours[0], str):
        return f"{sum(a != b for a, b in zip(ours, theirs, strict=True))} texts differ"
    pairs = [(a[0], b[0]) if isinstance(a, tuple) else (a, b) for a, b in zip(ours, theirs, strict=True)]
    return f"largest difference {max(abs(a - b) for a, b in pairs):.1e} nats"


def compare(task: str, model: LanguageModel, references: dict[int, HFLM], asked: list[Instance], rounds: int) -> bool:
    """Whether the best plain batch size's time over ours is what is wanted."""
    answers: dict[str, list[Any]] = {}

    def asking(name: str, get: Callable[[], Any]) -> Callable[[int], None]:
        def call(_: int) -> None:
            answers[name] = getattr(get(), asked[0].request_type)(asked, disable_tqdm=True)

        return call

    # of ours a fresh one each time: no prefix and no tokens are remembered from the round before
    calls = {"ours": asking("ours", lambda: HarnessLM(model))}
    for batch, reference in references.items():
        calls[f"bs {batch}"] = asking(f"bs {batch}", lambda lm=reference: lm)
    times = side_by_side.in_turn(calls, rounds)
    ratios = {name: side_by_side.ratio(times[name], times["ours"]) for name in calls if name != "ours"}
    best = min(ratios, key=ratios.__getitem__)
    reached = ratios[best] >= WANTED[task]
    shown = ", ".join(f"{name}: {value:.2f}x" for name, value in ratios.items())
    print(
        f"{task:15} {len(asked):4} requests  ours {statistics.median(times['ours']):7.2f} s  against hf {shown}"
        f"  wanted {WANTED[task]:.2f}x  {'reached' if reached else 'MISSED'}"
        f"  ({difference(answers['ours'], answers[best])})",
        flush=True,
    )
    return reached


def main() -> int:
    parser = side_by_side.parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", type=Path, help="mirror folder")
    parser.add_argument("--items", type=int, default=16, help="documents of a task (WikiText: an eighth)")
    parser.add_argument("--hf-batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--plain-linears", action="store_true", help="do not pack float linears as the engine does")
    parser.add_argument("--tasks", nargs="+", default=list(WANTED), choices=list(WANTED))
    options = parser.parse_args()
    side_by_side.start(options)
    model, data = load_model(options.model), DataSource(options.data)
    references = {
        batch: HFLM(pretrained=plain_copy(model), tokenizer=model.tokenizer, batch_size=batch)
        for batch in options.hf_batch
    }
    packed = [] if options.plain_linears else pack_float_linears_(model.module)
    print(f"{options.model}, float32, {len(packed)} of our linears packed")
    reached = [
        compare(task, model, references, requests_of(task, data, options.items), options.rounds)
        for task in options.tasks
    ]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
