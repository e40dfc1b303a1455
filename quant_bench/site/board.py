"""The board: rows of models, arms and quantizers, and a column for each question and metric."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import pandas as pd

from quant_bench.record import Record
from quant_bench.report.compare import command_for
from quant_bench.report.rows import Together

# tasks whose numbers say why a model is good or bad, and tasks that check the suite
CAUSES: Final = ("outliers", "attention", "depth", "injection", "sensitivity")
CHECKS: Final = ("parity",)
_FORBIDDEN: Final = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True)
class Model:
    """A model with one set of weights in one precision; `weights` says of which digest they are."""

    name: str
    weights: str
    dtype: str
    note: str

    @property
    def title(self) -> str:
        """What tells it from others."""
        return " · ".join(part for part in (self.name, self.weights, self.dtype) if part)


@dataclass(frozen=True)
class Column:
    """One metric of one question; numbers of other conventions, data or item counts stand in other columns.

    Attributes:
        key: short name that stays the same as long as question and metric do.
        task: the task's name without settings.
        items: of the question, as its first metric counts them; 0 where no cell has a score.
        question: task with settings, convention, items, version and data.
        metric: its name, or `state` where no cell has a score.
        heading: name, unit and direction.
        better, unit, reduction, chance: of the metric.
        headline: whether it ranks the question.
    """

    key: str
    task: str
    items: int
    question: str
    metric: str
    heading: str
    better: str
    unit: str
    reduction: str
    chance: float | None
    headline: bool


@dataclass(frozen=True)
class Number:
    """A cell of the board: a score of all its seeds, or the state that stands in its place.

    Attributes:
        value: with its interval; None where the cell has no score.
        delta: difference to the float model.
        arm_delta: difference to softmax.
        rank: within model and column.
        marks: uninformative, better than float, not ranked.
        n: number of items.
        state: `measured` or why there is no score.
        reason: of that.
        paths: records behind it.
        lost: seeds that are not part of it, for a reason.
        best: whether intervals say that no other of its model and column is as good.
    """

    value: Together | None
    delta: Together | None
    arm_delta: Together | None
    rank: float | None
    marks: str
    n: int | None
    state: str
    reason: str
    paths: tuple[str, ...]
    lost: int = 0
    best: bool = False


@dataclass
class Row:
    """A model with an arm under a quantizer in one execution.

    Attributes:
        key: short name that stays the same as long as these do.
        model: index of the model.
        arm, quantizer, execution: canonical specs; the quantizer is without its execution.
        label: the quantizer for people.
        bits: of weights, activations and cache.
        seeds: that any of its numbers has.
        numbers: by index of the column.
    """

    key: str
    model: int
    arm: str
    quantizer: str
    execution: str
    label: str
    bits: str
    seeds: set[int] = field(default_factory=set)
    numbers: dict[int, Number] = field(default_factory=dict)


@dataclass(frozen=True)
class Board:
    """Everything that the leaderboard shows; `records` by their path, with `commands` that measure them again."""

    models: list[Model]
    columns: list[Column]
    rows: list[Row]
    records: Mapping[str, Record]
    frame: pd.DataFrame

    def command(self, path: str) -> str:
        """The command that measures a record's cell again."""
        record = self.records[path]
        return command_for(record, [record.cell.arm])


def short(*parts: object) -> str:
    """Twelve hexadecimal digits that stand for some texts."""
    return hashlib.sha256("\x00".join(map(str, parts)).encode("utf-8", "surrogatepass")).hexdigest()[:12]


def page_name(name: str) -> str:
    """File name for a model or an arm: safe whatever the name is, and different for different names."""
    readable = _FORBIDDEN.sub("-", name.lower()).strip("-")[:60].strip("-")
    return f"{readable or 'unnamed'}-{short(name)}.html"


def ranks(column: Column) -> bool:
    """Whether a column says how good a model is: a mean of items with a better direction."""
    return column.better != "neither" and column.reduction != "none"
