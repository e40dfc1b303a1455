"""Perplexity of WikiText-2."""

from dataclasses import dataclass, replace
from typing import Literal

from quant_bench.errors import SpecError
from quant_bench.model import LanguageModel
from quant_bench.perplexity import TextWindows, perplexity
from quant_bench.stream import Prefix
from quant_bench.task import Context, Evaluation, Task
from quant_bench.windows import WindowSettings


@dataclass(frozen=True)
class Wikitext2(Task):
    """Perplexity of the test split of WikiText-2 (raw) under a named convention.

    `p1`, the default, is what most quantization tables print: `token_perplexity` over windows of 2,048 tokens beside
    each other. `p2` strides, `p3` scores second halves, `p5` takes blocks of 512; see `windows.WindowSettings`. `p4` is
    lm-eval's task `wikitext`: whole documents, `word_perplexity`. Numbers of different conventions are not comparable.

    Source: Merity et al. 2016, https://arxiv.org/abs/1609.07843.

    Attributes:
        convention: p1 to p5.
        seq_length: tokens a window; None: as the convention has it, or the model's context where that is shorter.
        stride: of p2, in tokens; None: 512.
        prefix: what stands before the text; `default` is what the tokenizer does by itself.
    """

    convention: Literal["p1", "p2", "p3", "p4", "p5"] = "p1"
    seq_length: int | None = None
    stride: int | None = None
    prefix: Prefix = "default"

    def __post_init__(self) -> None:
        super().__post_init__()
        # settings that contradict each other are found before anything runs
        self._windows()

    def _windows(self) -> WindowSettings | None:
        """How the text is cut; None for p4, whose windows are lm-eval's."""
        if self.convention != "p4":
            return WindowSettings(self.convention, self.seq_length, self.stride, self.prefix)
        if (self.seq_length, self.stride, self.prefix) != (None, None, "default"):
            raise SpecError("convention=p4 is lm-eval's: it has no seq_length, stride or prefix to choose")
        return None

    def evaluate(self, model: LanguageModel, context: Context) -> Evaluation:
        windows = self._windows()
        if windows is None:
            # lm-eval takes seconds to import, and only this convention needs it
            from quant_bench.lm_eval_task import run_lm_eval_task

            found = run_lm_eval_task("wikitext", {}, model, context, self.limit)
            return replace(found, convention=f"P4 {found.convention}")
        return perplexity(model, context, TextWindows("wikitext2", "test", windows, self.limit))
