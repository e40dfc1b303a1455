"""lm-eval's tasks as ours: its prompts, filters and metrics, our model and data, one row of samples a document."""

import contextlib
import hashlib
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lm_eval.tasks
import pandas as pd
from lm_eval.api import metrics as lm_metrics
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from quant_bench.data import DataSource, hub_access
from quant_bench.errors import Blocked, NotApplicable, SpecError
from quant_bench.harness import HarnessLM
from quant_bench.model import LanguageModel
from quant_bench.score import Metric
from quant_bench.task import Context, Evaluation, Measure, Plain

if TYPE_CHECKING:
    from lm_eval.api.task import Task as LmEvalTask

# lm-eval's own default seed of the few-shot examples: prompts are the same for every model, quantizer and seed
FEWSHOT_SEED = 1234
INVALID = "[invalid]"

_UNITS = {"bits_per_byte": "bits/byte"}
_WEIGHTS = {"word_perplexity": "words", "byte_perplexity": "bytes", "bits_per_byte": "bytes"}


@dataclass
class Prepared:
    """A task with its requests, built once for all quantizers of a model.

    Attributes:
        task: lm-eval's.
        requests: of each document, in order.
        origin: where the data came from, with what a reader must know about them.
        data_sha256: digest of the documents.
        prompts_sha256: digest of the requests' texts and generation settings.
    """

    task: "LmEvalTask"
    requests: dict[int, list[Instance]]
    origin: str
    data_sha256: str
    prompts_sha256: str


def run_lm_eval_task(
    name: str, overrides: Mapping[str, Any], model: LanguageModel, context: Context, limit: int | None
) -> Evaluation:
    """Evaluate one of lm-eval's tasks.

    Metrics have lm-eval's names; one behind a filter carries the filter's (`exact_match_strict_match`). Samples have
    one column a metric, `nll` and `words` or `bytes` where the metric is a perplexity, and what was written.

    Source: Gao et al., lm-evaluation-harness, https://github.com/EleutherAI/lm-evaluation-harness.

    Args:
        name: of the task, not of a group.
        overrides: of its configuration (`num_fewshot`, `dataset_path`, …).
        model: float or quantized.
        context: data, memos, probe.
        limit: take the first so many documents; None for all.

    Raises:
        Blocked: data are missing.
        SpecError: there is no such task, or it is a group.
        NotApplicable: the task needs sampling, images, or running generated code.
    """
    key = ("lm_eval", name, json.dumps(dict(overrides), sort_keys=True), limit)
    if key not in context.model_memo:
        context.model_memo[key] = prepare(name, overrides, context.data, limit)
    prepared: Prepared = context.model_memo[key]
    lm = HarnessLM(model, context)
    _ask(lm, prepared)
    evaluation = _Tally(prepared).evaluation()
    _add_generations(evaluation, lm, prepared)
    task, config = prepared.task, prepared.task.config
    kind = str(task.OUTPUT_TYPE)
    evaluation.data_sha256 = prepared.data_sha256
    evaluation.convention = (
        f"lm-eval {version('lm_eval')} {name} v{task.VERSION} num_fewshot={config.num_fewshot}"
        + (f" fewshot_seed={FEWSHOT_SEED}" if config.num_fewshot else "")
        + "".join(f" {key}={value}" for key, value in sorted(overrides.items()) if key != "num_fewshot")
    )
    evaluation.details |= {"prompts_sha256": prepared.prompts_sha256, "documents": len(prepared.requests)}
    evaluation.settings |= {"data": prepared.origin, "output_type": kind, "max_length": lm.max_length}
    return evaluation


@cache
def _index(folder: str | None) -> TaskManager:
    """lm-eval's index of one folder of tasks (milliseconds), or of all (seconds)."""
    if folder is None:
        return TaskManager()
    return TaskManager(include_defaults=False, include_path=Path(lm_eval.tasks.__file__).parent / folder)


def _manager(name: str) -> TaskManager:
    """An index that knows the task: of the folder called after it where there is one."""
    home = Path(lm_eval.tasks.__file__).parent
    folders = [folder for folder in (name, name.split("_")[0]) if folder and (home / folder).is_dir()]
    for folder in (*folders, None):
        found = _index(folder)
        if name in found.all_subtasks:
            return found
        if name in found.all_tasks:
            raise SpecError(f"{name!r} is a group of lm-eval tasks: name one of its tasks")
    raise SpecError(f"lm-eval {version('lm_eval')} has no task {name!r}")


def _task_class(data: DataSource, origin: list[str]) -> type[ConfigurableTask]:
    """lm-eval's task class, with data from the mirror where it has them, else from the hub."""

    class Mirrored(ConfigurableTask):  # type: ignore[misc]
        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__(config={key: value for key, value in config.items() if key != "class"})

        def download(self, dataset_kwargs: dict[str, Any] | None = None, **options: Any) -> None:
            path, part = str(self.DATASET_PATH), self.DATASET_NAME
            found = None if callable(self.config.custom_dataset) else data.dataset(path, part)
            if found is not None:
                self.dataset = found
                origin.append(data.note(path, part) or "mirror")
                return
            if not data.allow_hub:
                raise Blocked(data.wanted(path, part))
            try:
                with hub_access():
                    super().download(dataset_kwargs, **options)
            except Exception as error:
                # `datasets` raises a dozen kinds here, from its own and from three network libraries
                raise Blocked(data.wanted(path, part)) from error
            origin.append("hub")

    return Mirrored


def prepare(name: str, overrides: Mapping[str, Any], data: DataSource, limit: int | None) -> Prepared:
    """A task of lm-eval with its requests; errors as in `run_lm_eval_task`."""
    manager, origin = _manager(name), list[str]()
    spec = {"task": name, **overrides}
    if "class" not in (manager.task_index[name].cfg or {}):
        spec["class"] = _task_class(data, origin)
    # lm-eval draws progress bars of its own
    with contextlib.redirect_stderr(io.StringIO()):
        # a group of one is lm-eval's public way to override the configuration of a task that it knows by name
        task = manager.load({"group": "quant_bench", "task": [spec]})["tasks"][name]
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise NotApplicable(f"{name} runs generated code or shows images, which is not supported")
        if task.config.num_fewshot is None:
            task.set_config(key="num_fewshot", value=0)
        if task.config.num_fewshot and not task.sampler.df:
            raise Blocked(f"{name} with num_fewshot={task.config.num_fewshot}: the split of the examples is missing")
        task.set_fewshot_seed(FEWSHOT_SEED)
        task.build_all_requests(limit=limit)
    requests: dict[int, list[Instance]] = {}
    for request in task.instances:
        requests.setdefault(int(request.doc_id), []).append(request)
    documents = [asked[0].doc for asked in requests.values()]
    prompts = [list(request.args) for asked in requests.values() for request in asked]
    return Prepared(task, requests, " ".join(origin) or "hub", _digest(documents), _digest(prompts))


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _ask(lm: HarnessLM, prepared: Prepared) -> None:
    """Run all requests, each as often as the task repeats it, and apply the task's filters."""
    requests = [request for asked in prepared.requests.values() for request in asked]
    for request in requests:
        # the memo outlives a model: nothing of the one before may stay
        request.resps, request.filtered_resps = [], {}
    for kind in dict.fromkeys(request.request_type for request in requests):
        chosen = [request for request in requests if request.request_type == kind]
        answers = getattr(lm, kind)(chosen)
        for request, answer in zip(chosen, answers, strict=True):
            # greedy and exact, so a repetition would say the same
            request.resps = [answer] * int(request.repeats or 1)
    prepared.task.apply_filters()


class _Tally:
    """Metrics of every document by lm-eval's own `process_results`, and what makes scores of them."""

    def __init__(self, prepared: Prepared) -> None:
        self.task = prepared.task
        self.requests = prepared.requests
        self.aggregation: Mapping[str, Callable[[Sequence[Any]], float]] = self.task.aggregation()
        self.higher: Mapping[str, bool] = self.task.higher_is_better()
        # how each question starts, so that an item can be told by more than its number
        starts = [str(self.task.doc_to_text(asked[0].doc)).strip()[:80] for asked in self.requests.values()]
        self.columns: dict[str, list[Any]] = {"item": list(self.requests), "text": starts}
        self.measures: list[Measure] = []
        self.plain: list[Plain] = []
        self.details: dict[str, Any] = {}

    def evaluation(self) -> Evaluation:
        first = next(iter(self.requests.values()))[0]
        for name in first.filtered_resps:
            answers = {item: [r.filtered_resps[name] for r in asked] for item, asked in self.requests.items()}
            found = [self.task.process_results(asked[0].doc, answers[item]) for item, asked in self.requests.items()]
            suffix = "" if name == "none" else "_" + name.replace("-", "_")
            for metric in dict.fromkeys(key for row in found for key in row):
                self._add(metric, suffix, [row.get(metric, math.nan) for row in found])
            if self.task.OUTPUT_TYPE == "generate_until" and suffix:
                self._failures(suffix, [answers[item][0] == INVALID for item in self.requests])
        if self.task.OUTPUT_TYPE in ("loglikelihood", "multiple_choice"):
            totals = [[r.resps[0][0] for r in asked] for asked in self.requests.values()]
            if self.task.OUTPUT_TYPE == "multiple_choice":
                self.columns["choice"] = [max(range(len(row)), key=row.__getitem__) for row in totals]
            else:
                self.columns["nll"] = [-row[0] for row in totals]
        samples = pd.DataFrame(self.columns)
        return Evaluation(self.measures, samples, "", "", plain=self.plain, details=self.details)

    def _metric(self, name: str, suffix: str, reduction: Any) -> Metric:
        better: Any = "higher" if self.higher.get(name, True) else "lower"
        unit = "share" if name.startswith(("acc", "exact_match")) else _UNITS.get(name, "1")
        return Metric(name + suffix, unit, better, reduction, self._chance(name))

    def _chance(self, name: str) -> float | None:
        """Accuracy of a guess; nothing is written or said right by chance where any text may be."""
        if self.task.OUTPUT_TYPE == "multiple_choice":
            if not name.startswith("acc"):
                return None
            choices = [len(self.task.doc_to_choice(asked[0].doc)) for asked in self.requests.values()]
            return sum(1 / count for count in choices) / len(choices)
        return 0.0 if name in ("acc", "exact_match") else None

    def _add(self, name: str, suffix: str, values: list[Any]) -> None:
        aggregate = self.aggregation.get(name, lm_metrics.mean)
        pairs = all(isinstance(value, tuple) and len(value) == 2 for value in values)
        if aggregate is lm_metrics.perplexity:
            self.columns["nll" + suffix] = [-float(value) for value in values]
            self.measures.append(Measure(self._metric(name, suffix, "exp"), "nll" + suffix))
        elif pairs and aggregate in (lm_metrics.weighted_perplexity, lm_metrics.bits_per_byte):
            bits = aggregate is lm_metrics.bits_per_byte
            column, weight = ("bits" if bits else "nll") + suffix, _WEIGHTS.get(name, f"{name}_weight")
            self.columns[column] = [-float(total) / (math.log(2) if bits else 1.0) for total, _ in values]
            self.columns[weight] = [float(count) for _, count in values]
            self.measures.append(Measure(self._metric(name, suffix, "mean" if bits else "exp"), column, weight))
        elif aggregate in (lm_metrics.mean, lm_metrics.nanmean) and not any(
            isinstance(v, tuple | list) for v in values
        ):
            self.columns[name + suffix] = [float(value) for value in values]
            self.measures.append(Measure(self._metric(name, suffix, "mean"), name + suffix))
        else:
            self.plain.append(Plain(self._metric(name, suffix, "none"), float(aggregate(values)), len(values)))

    def _failures(self, suffix: str, failed: list[bool]) -> None:
        """Share of texts from which the filter could take no answer."""
        column = "extraction_failed" + suffix
        self.columns[column] = [float(value) for value in failed]
        self.measures.append(Measure(Metric("extraction_failures" + suffix, "share", "neither", "mean"), column))
        shares = self.details.setdefault("extraction_failures", {})
        shares[suffix.lstrip("_")] = sum(failed) / len(failed)


def _add_generations(evaluation: Evaluation, lm: HarnessLM, prepared: Prepared) -> None:
    """What was written, why it ended and how long it is."""
    if prepared.task.OUTPUT_TYPE != "generate_until":
        return
    found = lm.generations
    evaluation.samples["response"] = [generation.text for generation in found]
    evaluation.samples["finish_reason"] = [generation.reason for generation in found]
    evaluation.samples["new_tokens"] = [generation.tokens for generation in found]
    evaluation.details["finish_reasons"] = dict(Counter(generation.reason for generation in found))
