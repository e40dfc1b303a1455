"""A model's scores as the `model-index` of a Hugging Face model card."""

from typing import Any, Final

import pandas as pd

from quant_bench.errors import RecordError
from quant_bench.report.frame import plain_rows
from quant_bench.report.rows import Row, parted
from quant_bench.report.text import visible

# data sets of the hub by the task that asks them: name, configuration, split
_DATASETS: Final = {
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1", "test"),
    "hellaswag": ("Rowan/hellaswag", None, "validation"),
    "gsm8k": ("openai/gsm8k", "main", "test"),
}
_QUESTION: Final = ("task", "task_version", "convention", "data_sha256")
_EXPLAINED: Final = (
    *("quantizer", "execution", "arm", "seed", "weights_sha256", "dtype", "n", "stderr", "low", "high"),
    *("delta", "delta_low", "delta_high"),
)


def model_index(frame: pd.DataFrame, model: str) -> str:
    """YAML of a model card: every score of a model that is a mean of items and has a better direction.

    What a card has no field for (quantizer, convention, item count, interval, difference to float) stands in the
    arguments of data set and metric, so that no number is without it. Each question has an entry of its own; the hub's
    library, which writes one a data set with the first one's arguments, finds it in those of each metric, too. Numbers
    that the leaderboard never ranks, because of an old plugin or another item count, are left out.

    Source: https://huggingface.co/docs/hub/model-cards, metadata `model-index`.

    Args:
        frame: from `long_frame`.
        model: as its records name it.

    Raises:
        RecordError: there is no such score.
    """
    from huggingface_hub import CardData

    chosen = [row for row in plain_rows(frame[frame["model"] == model]) if _told(row)]
    if not chosen:
        raise RecordError(f"there is no score of {model!r} for a model card; records are of {models_of(frame)}")
    results = [_result(rows) for rows in parted(chosen, lambda row: row["group"]).values()]
    card: dict[str, Any] = {"model-index": [{"name": visible(model), "results": results}]}
    return f"{CardData(**card).to_yaml()}\n"


def models_of(frame: pd.DataFrame) -> str:
    """Names of the models that there are, for a message."""
    return ", ".join(sorted(set(frame["model"]))) or "none"


def _told(row: Row) -> bool:
    directed = row["better"] in ("higher", "lower") and row["reduction"] in ("mean", "exp")
    return directed and not row["outdated"] and not row["other_items"]


def _result(rows: list[Row]) -> dict[str, Any]:
    """One question with all its metrics."""
    task = rows[0]["task"].partition("(")[0]
    name, configuration, split = _DATASETS.get(task, (task, None, None))
    question = _present(rows[0], _QUESTION)
    dataset = {"name": visible(rows[0]["task"]), "type": name, "config": configuration, "split": split}
    return {
        "task": {"type": "text-generation"},
        "dataset": {key: value for key, value in dataset.items() if value is not None} | {"args": question},
        "metrics": [_metric(row, question) for row in rows],
    }


def _metric(row: Row, question: dict[str, Any]) -> dict[str, Any]:
    explained = question | _present(row, _EXPLAINED) | ({"uninformative": True} if row["uninformative"] else {})
    # the hub's name of a metric, where it has one
    known = {"acc": "accuracy", "token_perplexity": "perplexity", "word_perplexity": "perplexity"}
    return {
        "type": known.get(row["metric"], visible(row["metric"])),
        "value": row["value"],
        "name": visible(f"{row['metric']} ({row['label']})"),
        "args": explained,
    }


def _present(row: Row, names: tuple[str, ...]) -> dict[str, Any]:
    found = {name: row[name] for name in names if row[name] is not None}
    return {name: visible(value) if isinstance(value, str) else value for name, value in found.items()}
