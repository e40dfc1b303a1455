"""LAMBADA: the last word of a passage that needs the whole passage."""

from dataclasses import dataclass
from typing import Literal

from quant_bench.lm_eval_task import run_lm_eval_task
from quant_bench.model import LanguageModel
from quant_bench.task import Context, Evaluation, Task


@dataclass(frozen=True)
class Lambada(Task):
    """Accuracy and perplexity of the last word: lm-eval's `lambada_openai` or `lambada_standard`.

    The two texts differ (the standard one is lower-cased and tokenized), so their scores are not comparable.

    Source: Paperno et al. 2016, https://arxiv.org/abs/1606.06031; task definition of lm-evaluation-harness.

    Attributes:
        variant: `openai` or `standard`.
    """

    variant: Literal["openai", "standard"] = "openai"

    def evaluate(self, model: LanguageModel, context: Context) -> Evaluation:
        return run_lm_eval_task(f"lambada_{self.variant}", {}, model, context, self.limit)
