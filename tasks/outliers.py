"""Outlier statistics of activations and weights."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from quant_bench.errors import SpecError
from quant_bench.model import LanguageModel
from quant_bench.perplexity import TextWindows, outliers
from quant_bench.task import Context, Evaluation, Task


@dataclass(frozen=True)
class Outliers(Task):
    """How far single activations and channels stand out, which is what integer grids cannot take.

    All statistics come from one forward pass over the windows of convention P1 of a text, which a perplexity task on
    the same windows shares. Values depend on the window's length: compare only equal ones. Do not rank models by a
    maximum alone: a lower one has gone with a higher kurtosis and worse integers. `outliers.summarize` has every
    definition.

    Source: Bondarenko et al. 2023, https://arxiv.org/abs/2306.12929.

    Attributes:
        text: which text.
        seq_length: tokens a window; None: 2,048, or the model's context where that is shorter.
    """

    text: Literal["wikitext2", "python_docs", "wiki40b", "held_out"] = "wikitext2"
    seq_length: int | None = None

    def prepare(self, model: LanguageModel, context: Context) -> None:
        # settings that do not fit the model are reported when the task is asked
        with suppress(SpecError):
            self._windows().announce(model, context)

    def evaluate(self, model: LanguageModel, context: Context) -> Evaluation:
        return outliers(model, context, self._windows())

    def _windows(self) -> TextWindows:
        return TextWindows.p1(self.text, self.seq_length, self.limit)
