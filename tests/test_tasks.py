"""Tasks: the contract for each, on a tiny model; those whose data are not here are skipped."""

from dataclasses import dataclass

import pandas as pd
import pytest

from quant_bench import registry
from quant_bench.errors import Blocked, NotApplicable
from quant_bench.model import LanguageModel
from quant_bench.score import Metric
from quant_bench.task import Context, Evaluation, Measure, Task
from quant_bench.testing import check_task

SMALL = {
    "gsm8k": "gsm8k(limit=1)",
    "lm_eval": "lm_eval(task=lambada_openai,limit=2)",
    "python_docs": "python_docs(limit=2,seq_length=32)",
    "parity": "parity(limit=1)",
}


@pytest.mark.parametrize("name", registry.names("tasks"))
def test_task_keeps_its_contract(name: str) -> None:
    try:
        check_task(registry.build("tasks", SMALL.get(name, f"{name}(limit=2)")))
    except (Blocked, NotApplicable) as reason:
        pytest.skip(str(reason))


@dataclass(frozen=True)
class Fickle(Task):
    """Answers something else each time.

    Source: this test.
    """

    def evaluate(self, model: LanguageModel, context: Context) -> Evaluation:
        Fickle.asked = getattr(Fickle, "asked", 0) + 1
        samples = pd.DataFrame({"item": [0, 1], "nll": [1.0, float(Fickle.asked)]})
        metric = Metric("loss", "nats", "lower", reduction="mean")
        return Evaluation([Measure(metric, "nll")], samples, data_sha256="0" * 64, convention="none")


def test_a_task_that_changes_its_answers_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "canonical", lambda kind, task: "fickle")
    monkeypatch.setattr(registry, "build", lambda kind, text: Fickle())
    with pytest.raises(AssertionError, match="changes from one time"):
        check_task(Fickle())
