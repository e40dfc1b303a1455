"""The contract of tasks, executable: `check_task` raises AssertionError with what is broken."""

import json
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from quant_bench import registry
from quant_bench.data import DataSource
from quant_bench.model import LanguageModel
from quant_bench.probe import Probe
from quant_bench.statistics import score_of
from quant_bench.task import Context, Evaluation, Task
from quant_bench.testing import promises
from quant_bench.testing.promises import Finding, Named, Promise
from quant_bench.tiny import tiny_model

# sums of another order, where other rows share a matrix product
_NOISE = 1e-4


def check_task(task: Task, model: LanguageModel | None = None, data: DataSource | None = None) -> Evaluation:
    """Hold a task to `PROMISES` on a tiny random model; takes as long as asking it three times.

    Args:
        task: an instance with any settings; give it a small `limit`.
        model: whom to ask; a tiny Llama when None.
        data: where its data come from; the mirror of `QUANT_BENCH_DATA` or the hub when None.

    Returns:
        What the task found.

    Raises:
        AssertionError: what is broken.
        Blocked, NotApplicable: what the task itself raises.
    """
    promises.require(promises.findings(promises.IDENTITY, [Named("tasks", task)]))
    case = Case(task, model, data)
    promises.require(promises.findings(PROMISES, [case]))
    return case.first


def findings(task: Task, model: LanguageModel | None = None, data: DataSource | None = None) -> Iterator[Finding]:
    """What a look at every promise finds."""
    return promises.findings(PROMISES, [Case(task, model, data)])


class Case:
    """A task and whom it asks."""

    def __init__(self, task: Task, model: LanguageModel | None = None, data: DataSource | None = None) -> None:
        self.task = task
        self.model = model or tiny_model("llama")
        self.data = data or DataSource()

    def __str__(self) -> str:
        return registry.canonical("tasks", self.task)

    @cached_property
    def first(self) -> Evaluation:
        """What the task finds, one item at a time."""
        return self.asked(1)

    def asked(self, batch_size: int) -> Evaluation:
        """What the task finds."""
        with tempfile.TemporaryDirectory() as folder:
            context = Context(data=self.data, cache=Path(folder), probe=Probe.off(), batch_size=batch_size)
            self.task.prepare(self.model, context)
            return self.task.evaluate(self.model, context)


def _answers(case: Case) -> None:
    assert isinstance(case.first, Evaluation), f"{case}: evaluate returned {type(case.first).__name__}"
    assert case.first.measures or case.first.plain, f"{case}: no scores"


def _names_data(case: Case) -> None:
    assert case.first.data_sha256, f"{case}: no digest of the data"
    assert case.first.convention, f"{case}: no convention"


def _is_json(case: Case) -> None:
    try:
        json.dumps([case.first.details, case.first.settings], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{case}: details or settings are not strict JSON: {error}") from error


def _has_columns(case: Case) -> None:
    measures, samples = case.first.measures, case.first.samples
    if measures:
        assert "item" in samples.columns, f"{case}: samples have no column `item`"
        assert samples["item"].is_unique, f"{case}: an item is named twice"
    for measure in measures:
        for column in filter(None, (measure.column, measure.weight)):
            assert column in samples.columns, f"{case}: samples have no column {column!r}"
            assert samples[column].dtype.kind in "biuf", f"{case}: column {column!r} is not numeric"
        score_of(measure, samples, 0)


def _repeats(case: Case) -> None:
    for batch in (1, 4):
        again = case.asked(batch)
        assert again.data_sha256 == case.first.data_sha256, f"{case}: asks other questions the second time"
        for measure in case.first.measures:
            got, wanted = (found.samples[measure.column].to_numpy(float) for found in (again, case.first))
            allowed = 0.0 if batch == 1 else _NOISE
            same = got.shape == wanted.shape and np.allclose(got, wanted, rtol=allowed, atol=allowed, equal_nan=True)
            assert same, f"{case}: {measure.column} changes from one time to the next (batch size {batch}, then 1)"


PROMISES = (
    Promise(
        "the task answers with scores",
        "an Evaluation with a measure or a plain score",
        "`evaluate` returns Evaluation(measures=[Measure(metric, column)], samples=frame, …)",
        _answers,
        opening=True,
    ),
    Promise(
        "data digest and convention are stated",
        "data_sha256 and convention name all that must agree before two numbers are compared",
        "digest the questions that were asked, and name every setting that changes a number",
        _names_data,
    ),
    Promise(
        "details and settings are strict JSON",
        "numbers, texts, lists and dicts; no NaN and no infinity",
        "turn numpy and torch numbers into float or int, and NaN into None",
        _is_json,
    ),
    Promise(
        "every measure names a numeric column of the samples",
        "a column `item` without repetitions, and numeric columns for values and weights",
        "samples have one row an item",
        _has_columns,
    ),
    Promise(
        "the same questions get the same answers, whatever the batch size",
        f"equal samples a second time, and within {_NOISE:g} at batch size 4",
        "ask through quant_bench.scoring, whose packed rows have no padding, and draw nothing without a seed",
        _repeats,
    ),
)
