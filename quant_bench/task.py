"""The contract of a task: questions to a model, answered with scores and the per-item samples behind them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pandas as pd

from quant_bench.errors import SpecError
from quant_bench.model import LanguageModel
from quant_bench.progress import ProgressReport
from quant_bench.score import Metric

if TYPE_CHECKING:
    from quant_bench.data import DataSource
    from quant_bench.probe import Probe


@dataclass(frozen=True)
class Measure:
    """One score to be made from the samples: the engine computes value, standard error, interval and difference.

    Attributes:
        metric: what it means; its `reduction` says how items become the score.
        column: column of the samples with the per-item value (`nll`, `acc`, `kl`).
        weight: column with the per-item weight (`tokens`, `words`), or None for one each.
    """

    metric: Metric
    column: str
    weight: str | None = None


@dataclass(frozen=True)
class Plain:
    """A score that no mean of items gives (a maximum, a count)."""

    metric: Metric
    value: float
    n: int | None = None


@dataclass
class Evaluation:
    """What a task found.

    Attributes:
        measures: scores that follow from `samples`.
        plain: scores that do not.
        samples: one row an item, column `item` (stable, comparable across quantizers) and the measures' columns.
        data_sha256: digest of the text or items asked, so that two cells are compared only on the same questions.
        convention: what must agree before two numbers may stand in one column (`P1 seq=2048 prefix=none`).
        details: anything else worth storing as strict JSON (tables per layer, finish reasons, prompts digest).
        settings: resolved settings that the fields do not show (text used, sequence length in force).
    """

    measures: list[Measure]
    samples: pd.DataFrame
    data_sha256: str
    convention: str
    plain: list[Plain] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Context:
    """What the engine gives a task beside the model.

    Attributes:
        data: where data sets come from (an offline mirror, or the hub).
        cache: folder for what may be thrown away.
        probe: collects next-token distributions of the float model, or compares with them.
        batch_size: sequences (generation) or `auto`; must never change a score.
        seed: of the cell.
        model_memo: lives as long as one float model: requests and tokens built once for all its quantizers.
        pass_memo: lives as long as one quantized model: forward passes that several tasks share.
        progress: called as progress(description, done, total).
    """

    data: "DataSource"
    cache: Path
    probe: "Probe"
    batch_size: int | Literal["auto"] = "auto"
    seed: int = 0
    model_memo: dict[Any, Any] = field(default_factory=dict)
    pass_memo: dict[Any, Any] = field(default_factory=dict)
    progress: ProgressReport = lambda description, done, total: None


@dataclass(frozen=True)
class Task(ABC):
    """A question. A file in `tasks/` holds exactly one frozen dataclass that subclasses this.

    The file name is the name, the class is its CamelCase, the fields are the settings with defaults, the docstring has
    a `Source:`. `version` goes up when results change.

    Attributes:
        limit: take the first so many items (documents; windows for token perplexity and outliers); None for all.
    """

    version: ClassVar[int] = 1
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise SpecError(f"limit must be at least 1, or None for all; got {self.limit!r}")

    def prepare(self, model: LanguageModel, context: Context) -> None:  # noqa: B027 - doing nothing is the default
        """Announce shared work before any task of the cell group runs (default: nothing)."""

    @abstractmethod
    def evaluate(self, model: LanguageModel, context: Context) -> Evaluation:
        """Ask the questions.

        Raises:
            Blocked: data are missing; the message names them and how to supply them.
            NotApplicable: the question makes no sense for this model.
        """
