"""Where attention goes: sinks, the null, quiet reads and gates."""

from dataclasses import dataclass
from typing import Literal

from quant_bench.diagnostics.attention import AttentionSettings, Pooling, Typical, attention
from quant_bench.diagnostics.sequences import of_text
from quant_bench.model import LanguageModel
from quant_bench.perplexity import TextWindows
from quant_bench.task import Context, Evaluation, Task


@dataclass(frozen=True)
class Attention(Task):
    """Attention mass on the null, on position 0 and on quiet reads; read norms, sink rate and gate statistics.

    The windows are those of convention P1, as for `outliers`. Values depend on their length: compare only equal ones.

    Source: arXiv 2609.22005 (masses, read-norm ratio, exposure); Gu et al. 2024, https://arxiv.org/abs/2410.10781
    (sink rate). What they leave open is a setting here.

    Attributes:
        text: which text; `held_out`: sequences that a model trained here has not seen.
        seq_length: tokens a window; None: 2,048, or the model's context where that is shorter.
        quiet: percentile of a head's read norms below which a read is quiet.
        pooling: reads over which it is taken: of all windows, or of each window by itself.
        typical: what the first read's norm is divided by.
        sink_threshold: mass on position 0 above which a head is a sink.
        sink_length: queries over which `sink_rate` takes the mean; `sink_rate_context` takes all.
    """

    text: Literal["wikitext2", "python_docs", "wiki40b", "held_out"] = "wikitext2"
    seq_length: int | None = None
    quiet: float = 25.0
    pooling: Pooling = "all"
    typical: Typical = "median"
    sink_threshold: float = 0.3
    sink_length: int = 64

    def evaluate(self, model: LanguageModel, context: Context) -> Evaluation:
        settings = AttentionSettings(self.quiet, self.pooling, self.typical, self.sink_threshold, self.sink_length)
        sequences = of_text(model, context, TextWindows.p1(self.text, self.seq_length, self.limit))
        return attention(model, context, sequences, settings)
