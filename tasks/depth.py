"""Depth routing: what sublayers read, and how large states are."""

from dataclasses import dataclass
from typing import Literal

from quant_bench.diagnostics.depth import DepthSettings, depth
from quant_bench.diagnostics.sequences import of_text
from quant_bench.model import LanguageModel
from quant_bench.perplexity import TextWindows
from quant_bench.task import Context, Evaluation, Task


@dataclass(frozen=True)
class Depth(Task):
    """Weights of sources, top weight against even weights, depth null, psi, beta, entropy, collapse; sizes of states.

    Weights exist in models with the arms attnres and attnres_oasis; others have the sizes of their states alone.
    The windows are those of convention P1, as for `outliers`.

    Source: arXiv 2603.15031 (weights over depth, growth of states), arXiv 2605.17887 (null masses, coupling).

    Attributes:
        text: which text; `held_out`: sequences that a model trained here has not seen.
        seq_length: tokens a window; None: 2,048, or the model's context where that is shorter.
        collapsed: mean weight on one source above which a router counts as collapsed.
    """

    text: Literal["wikitext2", "python_docs", "wiki40b", "held_out"] = "wikitext2"
    seq_length: int | None = None
    collapsed: float = 0.9

    def evaluate(self, model: LanguageModel, context: Context) -> Evaluation:
        sequences = of_text(model, context, TextWindows.p1(self.text, self.seq_length, self.limit))
        return depth(model, context, sequences, DepthSettings(self.collapsed))
