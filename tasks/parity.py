"""Whether the executions of a quantized model agree."""

from dataclasses import dataclass
from typing import Literal

from quant_bench.model import LanguageModel
from quant_bench.parity import parity
from quant_bench.perplexity import TextWindows
from quant_bench.task import Context, Evaluation, Task


@dataclass(frozen=True)
class Parity(Task):
    """Accumulators against int64 bit for bit, simulated against integer, classic fake quantization against both.

    Source: Jacob et al. 2018, https://arxiv.org/abs/1712.05877; see `parity.parity` for what is compared.

    Attributes:
        limit: windows of the text.
        text: which text; the windows are those of convention P1.
        seq_length: tokens a window, at most the model's context.
    """

    limit: int | None = 2
    text: Literal["wikitext2", "python_docs", "wiki40b", "held_out"] = "wikitext2"
    seq_length: int | None = 512

    def evaluate(self, model: LanguageModel, context: Context) -> Evaluation:
        length = None if self.seq_length is None else min(self.seq_length, model.max_length)
        return parity(model, context, TextWindows.p1(self.text, length, self.limit))
