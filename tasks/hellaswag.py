"""HellaSwag: which of four endings continues a description."""

from dataclasses import dataclass
from typing import Literal

from quant_bench.data import DERIVED_HELLASWAG
from quant_bench.lm_eval_task import run_lm_eval_task
from quant_bench.model import LanguageModel
from quant_bench.task import Context, Evaluation, Task


@dataclass(frozen=True)
class Hellaswag(Task):
    """Accuracy, and accuracy by log-likelihood per character, over four endings: lm-eval's `hellaswag`.

    Source: Zellers et al. 2019, https://arxiv.org/abs/1905.07830; task definition of lm-evaluation-harness.

    Attributes:
        rows: `official` rows, or `derived` ones of a mirror, whose white space differs in some endings.
        num_fewshot: worked examples before each question.
    """

    rows: Literal["official", "derived"] = "official"
    num_fewshot: int = 0

    def evaluate(self, model: LanguageModel, context: Context) -> Evaluation:
        overrides = {"num_fewshot": self.num_fewshot}
        path = {"dataset_path": DERIVED_HELLASWAG} if self.rows == "derived" else {}
        return run_lm_eval_task("hellaswag", overrides | path, model, context, self.limit)
