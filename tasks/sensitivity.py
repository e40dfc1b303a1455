"""Which matrices a model feels most when their weights are rounded."""

from dataclasses import dataclass
from typing import Literal

from quant_bench.diagnostics.sensitivity import Widths, sensitivity
from quant_bench.diagnostics.sequences import of_text
from quant_bench.errors import SpecError
from quant_bench.model import LanguageModel
from quant_bench.perplexity import TextWindows
from quant_bench.quantization.sensitivity import widths_of
from quant_bench.task import Context, Evaluation, Task


@dataclass(frozen=True)
class Sensitivity(Task):
    """KL of next-token distributions, float against one matrix rounded to nearest, for each matrix of the layers.

    Source: Kullback and Leibler 1951, https://doi.org/10.1214/aoms/1177729694; Dong et al. 2019,
    https://arxiv.org/abs/1905.03696 (sensitivity of single layers).

    Attributes:
        limit: windows of the text.
        bits: widths to try, a digit each, rising.
        weight_granularity: one scale for a matrix, each output channel, or each `group_size` inputs of one.
        group_size: of granularity `group`.
        text: which text; the windows are those of convention P1.
        seq_length: tokens a window, at most the model's context.
    """

    limit: int | None = 4
    bits: int = 2348
    weight_granularity: Literal["tensor", "channel", "group"] = "group"
    group_size: int = 128
    text: Literal["wikitext2", "python_docs", "wiki40b", "held_out"] = "wikitext2"
    seq_length: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size != Sensitivity.group_size and self.weight_granularity != "group":
            raise SpecError(f"group_size={self.group_size} needs weight_granularity=group")
        self.widths()

    def widths(self) -> Widths:
        return Widths(widths_of(self.bits), self.weight_granularity, self.group_size)

    def evaluate(self, model: LanguageModel, context: Context) -> Evaluation:
        length = min(self.seq_length, model.max_length)
        sequences = of_text(model, context, TextWindows.p1(self.text, length, self.limit))
        return sensitivity(model, context, sequences, self.widths())
