"""Loss on the held-out sequences of a model that was trained here."""

from dataclasses import dataclass
from typing import ClassVar

from quant_bench.model import LanguageModel
from quant_bench.task import Context, Evaluation, Task
from quant_bench.validation import validation


@dataclass(frozen=True)
class Validation(Task):
    """Loss in nats on sequences that no arm of the model's tier has seen; for the toy tiers also its two parts.

    The sequences are the same for all arms and seeds, so arms can be compared sequence by sequence. Only for models
    that `quant-bench train` made.

    Source: Guo et al. 2024, https://arxiv.org/abs/2410.13835, for the parts of the toy's loss.
    """

    # 2: the probe of `kl` looks at other positions
    version: ClassVar[int] = 2

    def evaluate(self, model: LanguageModel, context: Context) -> Evaluation:
        return validation(model, context, self.limit)
