"""The contract of tasks, executable: `check_task` raises AssertionError with what is broken."""

import json
import tempfile
from pathlib import Path

import numpy as np

from quant_bench import registry
from quant_bench.data import DataSource
from quant_bench.model import LanguageModel
from quant_bench.probe import Probe
from quant_bench.statistics import score_of
from quant_bench.task import Context, Evaluation, Task
from quant_bench.tiny import tiny_model

# sums of another order, where other rows share a matrix product
_NOISE = 1e-4


def check_task(task: Task, model: LanguageModel | None = None, data: DataSource | None = None) -> Evaluation:
    """Hold a task to its contract on a tiny random model; takes as long as asking it three times.

    - the same questions get the same samples each time, and but for float32 noise whatever the batch size;
    - every measure names a numeric column of the samples, and items are named once;
    - scores are finite, or samples say why not; details and settings are strict JSON;
    - data digest and convention are stated;
    - the settings survive being written as text; the docstring has a `Source:`.

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
    assert "Source:" in (type(task).__doc__ or ""), f"{type(task).__name__}: the docstring has no `Source:`"
    text = registry.canonical("tasks", task)
    assert registry.build("tasks", text) == task, f"{text!r} does not give the same settings back"
    model = model or tiny_model("llama")
    data = data or DataSource()
    first = _asked(task, model, data, 1)
    assert first.data_sha256, f"{text}: no digest of the data"
    assert first.convention, f"{text}: no convention"
    assert first.measures or first.plain, f"{text}: no scores"
    json.dumps([first.details, first.settings], allow_nan=False)
    if first.measures:
        assert "item" in first.samples.columns, f"{text}: samples have no column `item`"
        assert first.samples["item"].is_unique, f"{text}: an item is named twice"
    for measure in first.measures:
        for column in filter(None, (measure.column, measure.weight)):
            assert column in first.samples.columns, f"{text}: samples have no column {column!r}"
            kind = first.samples[column].dtype.kind
            assert kind in "biuf", f"{text}: column {column!r} is not numeric"
        score_of(measure, first.samples, 0)
    for batch in (1, 4):
        again = _asked(task, model, data, batch)
        assert again.data_sha256 == first.data_sha256, f"{text}: asks other questions the second time"
        for measure in first.measures:
            got, wanted = (found.samples[measure.column].to_numpy(float) for found in (again, first))
            allowed = 0.0 if batch == 1 else _NOISE
            same = got.shape == wanted.shape and np.allclose(got, wanted, rtol=allowed, atol=allowed, equal_nan=True)
            assert same, f"{text}: {measure.column} changes from one time to the next (batch size {batch}, then 1)"
    return first


def _asked(task: Task, model: LanguageModel, data: DataSource, batch_size: int) -> Evaluation:
    with tempfile.TemporaryDirectory() as folder:
        context = Context(data=data, cache=Path(folder), probe=Probe.off(), batch_size=batch_size)
        task.prepare(model, context)
        return task.evaluate(model, context)
