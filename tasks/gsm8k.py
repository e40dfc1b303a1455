"""GSM8K: grade-school word problems, answered in text."""

from dataclasses import dataclass
from typing import Literal

from quant_bench.lm_eval_task import run_lm_eval_task
from quant_bench.model import LanguageModel
from quant_bench.task import Context, Evaluation, Task


@dataclass(frozen=True)
class Gsm8k(Task):
    """Exact match of the final number: lm-eval's `gsm8k` (`5shot`) or `gsm8k_cot` (`cot`, eight fixed examples).

    `strict_match` wants the examples' form of answer, `flexible_extract` takes the last number of the text.

    Source: Cobbe et al. 2021, https://arxiv.org/abs/2110.14168; Wei et al. 2022 for the eight chains of thought,
    https://arxiv.org/abs/2201.11903; task definitions of lm-evaluation-harness.

    Attributes:
        variant: `5shot` or `cot`.
        num_fewshot: worked examples; None for the task's own 5 or 8.
    """

    variant: Literal["5shot", "cot"] = "5shot"
    num_fewshot: int | None = None

    def evaluate(self, model: LanguageModel, context: Context) -> Evaluation:
        name = {"5shot": "gsm8k", "cot": "gsm8k_cot"}[self.variant]
        overrides = {} if self.num_fewshot is None else {"num_fewshot": self.num_fewshot}
        return run_lm_eval_task(name, overrides, model, context, self.limit)
