"""Perplexity of Wiki-40B (English)."""

from dataclasses import dataclass

from quant_bench.model import LanguageModel
from quant_bench.perplexity import TextWindows, perplexity
from quant_bench.stream import Prefix
from quant_bench.task import Context, Evaluation, Task
from quant_bench.windows import Convention, WindowSettings


@dataclass(frozen=True)
class Wiki40b(Task):
    """Perplexity of the validation split of Wiki-40B (English).

    Source: Guo et al. 2020, https://aclanthology.org/2020.lrec-1.297. The outlier papers use its validation split
    with `p5`.

    Attributes:
        convention: p1, p2, p3 or p5; see `windows.WindowSettings`.
        seq_length: tokens a window; None: as the convention has it, or the model's context where that is shorter.
        stride: of p2, in tokens; None: 512.
        prefix: what stands before the text; `default` is what the tokenizer does by itself.
    """

    convention: Convention = "p1"
    seq_length: int | None = None
    stride: int | None = None
    prefix: Prefix = "default"

    def __post_init__(self) -> None:
        super().__post_init__()
        # settings that contradict each other are found before anything runs
        self._windows()

    def _windows(self) -> WindowSettings:
        return WindowSettings(self.convention, self.seq_length, self.stride, self.prefix)

    def evaluate(self, model: LanguageModel, context: Context) -> Evaluation:
        return perplexity(model, context, TextWindows("wiki40b", "validation", self._windows(), self.limit))
