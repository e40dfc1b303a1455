"""A model's scores as the `model-index` of a Hugging Face model card."""

from typing import Any, Final

import pandas as pd

from quant_bench.errors import RecordError
from quant_bench.report.frame import plain_rows
from quant_bench.report.rows import Row
from quant_bench.report.text import visible

# data sets of the hub by the task that asks them: name, configuration, split
_DATASETS: Final = {
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1", "test"),
    "hellaswag": ("Rowan/hellaswag", None, "validation"),
    "gsm8k": ("openai/gsm8k", "main", "test"),
}
_EXPLAINED: Final = ("execution", "arm", "seed", "n", "stderr", "low", "high", "delta", "delta_low", "delta_high")


def model_index(frame: pd.DataFrame, model: str) -> str:
    """YAML of a model card: every score of a model that is a mean of items and has a better direction.

    What a card has no field for (quantizer, convention, item count, interval, difference to float) stands in the
    arguments of data set and metric, so that no number is without it. Numbers that the leaderboard never ranks, because
    of an old plugin or another item count, are left out.

    Source: https://huggingface.co/docs/hub/model-cards, metadata `model-index`.

    Args:
        frame: from `long_frame`.
        model: as its records name it.

    Raises:
        RecordError: there is no such score.
    """
    from huggingface_hub import ModelCardData

    chosen = [row for row in plain_rows(frame[frame["model"] == model]) if _told(row)]
    if not chosen:
        known = ", ".join(sorted(set(frame["model"]))) or "none"
        raise RecordError(f"there is no score of {model!r} for a model card; records are of {known}")
    card = ModelCardData(model_name=visible(model), eval_results=[_result(row) for row in chosen])
    text: str = card.to_yaml()
    return text + "\n"


def _told(row: Row) -> bool:
    directed = row["better"] in ("higher", "lower") and row["reduction"] in ("mean", "exp")
    return directed and not row["outdated"] and not row["other_items"]


def _result(row: Row) -> Any:
    from huggingface_hub import EvalResult

    task = row["task"].partition("(")[0]
    dataset, configuration, split = _DATASETS.get(task, (task, None, None))
    explained = {name: row[name] for name in _EXPLAINED if row[name] is not None}
    if row["uninformative"]:
        explained["uninformative"] = True
    return EvalResult(
        task_type="text-generation",
        dataset_type=dataset,
        dataset_name=visible(row["task"]),
        dataset_config=configuration,
        dataset_split=split,
        dataset_args={"convention": visible(row["convention"]), "data_sha256": visible(row["data_sha256"])},
        metric_type=_metric(row["metric"]),
        metric_name=visible(f"{row['metric']} ({row['label']})"),
        metric_value=row["value"],
        metric_args={"quantizer": visible(row["quantizer"]), **_plain(explained)},
    )


def _metric(name: str) -> str:
    """The hub's name of a metric, where it has one."""
    known = {"acc": "accuracy", "token_perplexity": "perplexity", "word_perplexity": "perplexity"}
    return known.get(name, visible(name))


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {key: visible(value) if isinstance(value, str) else value for key, value in values.items()}
