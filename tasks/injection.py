"""What junk in quiet reads costs."""

from dataclasses import dataclass
from typing import Literal

from quant_bench.diagnostics.attention import Pooling
from quant_bench.diagnostics.injection import InjectionSettings, injection
from quant_bench.diagnostics.junk import Junk
from quant_bench.diagnostics.sequences import of_text
from quant_bench.model import LanguageModel
from quant_bench.perplexity import TextWindows
from quant_bench.task import Context, Evaluation, Task


@dataclass(frozen=True)
class Injection(Task):
    """Loss in nats that junk in a head's quiet reads adds, at four doses of the head's median read norm.

    Windows are those of convention P1. The cell's seed draws the junk: repeat with others for its spread.

    Source: arXiv 2609.22005, injection experiment. What it leaves open is a setting here.

    Attributes:
        limit: windows; the quiet set is pooled over them.
        text: which text; `held_out`: sequences that a model trained here has not seen.
        seq_length: tokens a window; None: 2,048, or the model's context where that is shorter.
        cutoff: reads below this percentile of their head's norms get junk.
        junk: direction of the junk; see `diagnostics.injection.InjectionSettings`.
        position0: whether the first read may get junk.
        pooling: reads over which percentile and median are taken: of all windows, or of each window by itself.
        layer: the one layer that is hit; None for all at once.
        group: windows side by side among which donors are drawn.
    """

    limit: int | None = 64
    text: Literal["wikitext2", "python_docs", "wiki40b", "held_out"] = "wikitext2"
    seq_length: int | None = None
    cutoff: Literal["p50", "p25"] = "p25"
    junk: Junk = "structured"
    position0: Literal["in", "out"] = "in"
    pooling: Pooling = "all"
    layer: int | None = None
    group: int = 8

    def evaluate(self, model: LanguageModel, context: Context) -> Evaluation:
        settings = InjectionSettings(self.cutoff, self.junk, self.position0, self.pooling, self.layer, self.group)
        sequences = of_text(model, context, TextWindows.p1(self.text, self.seq_length, self.limit))
        return injection(model, context, sequences, settings)
