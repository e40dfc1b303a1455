"""Any task of lm-eval by its name."""

from dataclasses import dataclass

from quant_bench.lm_eval_task import run_lm_eval_task
from quant_bench.model import LanguageModel
from quant_bench.task import Context, Evaluation, Task


@dataclass(frozen=True)
class LmEval(Task):
    """A task of lm-evaluation-harness, with its prompts, filters and metrics.

    Source: Gao et al., lm-evaluation-harness, https://github.com/EleutherAI/lm-evaluation-harness.

    Attributes:
        task: lm-eval's name of the task (`arc_easy`), not of a group.
        num_fewshot: worked examples before each question; None for the task's own number.
    """

    task: str = "arc_easy"
    num_fewshot: int | None = None

    def evaluate(self, model: LanguageModel, context: Context) -> Evaluation:
        overrides = {} if self.num_fewshot is None else {"num_fewshot": self.num_fewshot}
        return run_lm_eval_task(self.task, overrides, model, context, self.limit)
