"""One quantizer and one task without quant-bench, whose data source alone is used; `pipeline.py` starts it.

python benchmarks/pipeline_plain.py plain '{"out": "FILE", ...}'
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

# ours: quanto's weights and activations that stand for it
QUANTIZERS: dict[str, tuple[str | None, str | None]] = {
    "none": (None, None),
    "w8a8-integer": ("qint8", "qint8"),
    "w4a4-integer": ("qint4", None),
    "w4a4g128-integer": ("qint4", None),
    "w8a16": ("qint8", None),
}
LM_EVAL = {"lambada": "lambada_openai", "hellaswag": "hellaswag"}
# the same number of resamplings as ours; lm-eval's own default is ten times that
RESAMPLINGS = 10_000


def warm(asked: dict[str, Any]) -> dict[str, Any]:
    """What happens once a machine and not once a process: quanto compiles its 4-bit unpacking."""
    import torch
    from optimum import quanto

    with torch.no_grad():
        module = torch.nn.Sequential(torch.nn.Linear(256, 128))
        quanto.quantize(module, weights="qint4")
        quanto.freeze(module)
        module(torch.randn(4, 256))
    return {}


def plain(asked: dict[str, Any]) -> dict[str, Any]:
    """One quantizer and one task without quant-bench."""
    import torch

    if asked["task"] == "outliers":
        from transformers import AutoModelForCausalLM, AutoTokenizer

        start = time.process_time()
        module = AutoModelForCausalLM.from_pretrained(asked["folder"], dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(asked["folder"])
    else:
        from lm_eval.models.huggingface import HFLM

        start = time.process_time()
        lm = HFLM(pretrained=asked["folder"], dtype="float32", device="cpu", batch_size=asked["hf_batch"])
        module, tokenizer = lm.model, lm.tokenizer
    seconds, mark = {"start": start, "load": time.process_time() - start}, time.process_time()
    # not inference mode: quanto's qint4 weights cannot be multiplied in it
    with torch.no_grad():
        quantize_plainly(module, tokenizer, asked)
        seconds["quantize"], mark = time.process_time() - mark, time.process_time()
        if asked["task"] in LM_EVAL:
            scores = plain_lm_eval(lm, asked)
        else:
            from quant_bench.data import DataSource

            rows = DataSource(None).text(asked["text"]).rows
            ids = tokenizer("\n\n".join(rows), verbose=False)["input_ids"]
            size, count = asked["seq_length"], asked["windows"]
            cuts = [ids[first : first + size] for first in range(0, size * count, size)]
            if asked["task"] == "outliers":
                scores = plain_outliers(module, cuts)
            else:
                found = lm._loglikelihood_tokens([(("", ""), cut[:1], cut[1:]) for cut in cuts], disable_tqdm=True)
                loss = -sum(total for total, _ in found) / (count * (size - 1))
                scores = {"token_perplexity": math.exp(loss)}
    return {"seconds": seconds | {"ask": time.process_time() - mark}, "scores": scores}


def quantize_plainly(module: Any, tokenizer: Any, asked: dict[str, Any]) -> None:
    weights, activations = QUANTIZERS[asked["quantizer"]]
    if weights is None:
        return
    import torch
    from optimum import quanto

    quanto.quantize(module, weights=weights, activations=activations, exclude="lm_head")
    if activations is not None:
        from quant_bench.data import DataSource

        text = "\n\n".join(DataSource(None).calibration_text().rows[:400])
        with quanto.Calibration():
            module(torch.tensor([tokenizer(text, verbose=False)["input_ids"][: asked["seq_length"]]]))
    quanto.freeze(module)


def plain_lm_eval(lm: Any, asked: dict[str, Any]) -> dict[str, float]:
    """lm-eval's own evaluation; only the data come from the mirror, and of its index only the task's folder is read."""
    import lm_eval
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager

    from quant_bench.data import DataSource

    name, source = LM_EVAL[asked["task"]], DataSource(None)

    class Mirrored(ConfigurableTask):
        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__(config={key: value for key, value in config.items() if key != "class"})

        def download(self, *_: Any, **__: Any) -> None:
            self.dataset = source.dataset(str(self.DATASET_PATH), self.DATASET_NAME)

    folder = Path(lm_eval.tasks.__file__).parent / asked["task"]
    manager = TaskManager(include_defaults=False, include_path=folder)
    tasks = manager.load({"group": "plain", "task": [{"task": name, "class": Mirrored}]})
    limit = asked["limits"][asked["task"]]
    found = lm_eval.evaluate(lm=lm, task_dict=tasks, limit=limit, bootstrap_iters=RESAMPLINGS, log_samples=False)
    return {key.partition(",")[0]: value for key, value in found["results"][name].items() if key.endswith(",none")}


def plain_outliers(module: Any, cuts: list[list[int]]) -> dict[str, float]:
    """The statistics of our task `outliers` by forward hooks and torch operations."""
    import torch

    found: dict[str, list[dict[str, Any]]] = {}

    def look(name: str, x: Any) -> None:
        x = x[0] if isinstance(x, tuple) else x
        x = x.reshape(-1, x.shape[-1])
        row: dict[str, Any] = {}
        absolute = x.abs()
        if not name.endswith(" input"):
            centred = x - x.mean()
            variance = centred.square().mean()
            token = x - x.mean(-1, keepdim=True)
            row["inf_norm"] = absolute.max()
            row["kurtosis"] = centred.pow(4).mean() / variance.square()
            row["token_kurtosis"] = (token.pow(4).mean(-1) / token.square().mean(-1).square()).mean()
            row["beyond"] = (centred.abs() > 6 * variance.sqrt()).float().mean()
            row["massive"] = ((absolute > 100) & (absolute >= 1000 * absolute[::64].median())).sum()
        if name.endswith(" input") or "norm" in name:
            row["absmax"], row["squares"] = absolute.amax(0), x.square().sum(0)
            row["incoherence"] = (absolute.amax(-1) * x.shape[-1] ** 0.5 / x.norm(dim=-1)).mean()
            row["max_median"] = (absolute[::64].amax(-1) / absolute[::64].median(-1).values).mean()
        found.setdefault(name, []).append(row)

    endings = ("layernorm", "o_proj", "mlp", "norm", *(f"layers.{index}" for index in range(99)))
    for path, child in module.named_modules():
        if path.endswith(endings):
            child.register_forward_hook(lambda _, __, out, path=path: look(path, out))
        if path.endswith(("o_proj", "down_proj")):
            child.register_forward_pre_hook(lambda _, given, path=path: look(f"{path} input", given[0]))
    for cut in cuts:
        module(torch.tensor([cut]), logits_to_keep=1, use_cache=False)
    kurtosis = [sum(row["kurtosis"] for row in rows) / len(rows) for rows in found.values() if "kurtosis" in rows[0]]
    return {"avg_kurtosis": float(sum(kurtosis) / len(kurtosis))}


if __name__ == "__main__":
    order = json.loads(sys.argv[2])
    side = {"plain": plain, "warm": warm}[sys.argv[1]]
    Path(order["out"]).write_text(json.dumps(side(order)), encoding="ascii")
