"""Per-item answers behind two records, from the cache: the paired interval of a difference, and the items that flip."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from quant_bench.cell import BASELINE_ARM, Cell
from quant_bench.record import Record
from quant_bench.samples import Samples, SampleStore, key_of
from quant_bench.score import Delta, Metric, Score
from quant_bench.statistics import delta_of

FLIPS: Final = ("item", "text", "first", "second", "first_answer", "second_answer")
# what tells an answer apart, where the samples have it
_ANSWERS: Final = ("response", "choice")


@dataclass(frozen=True)
class Columns:
    """Which columns of the samples a score was made from.

    Attributes:
        metric: what it means.
        column: with the per-item value.
        weight: with the per-item weight, or None for one each.
    """

    metric: Metric
    column: str
    weight: str | None


@dataclass(frozen=True)
class Pair:
    """Samples of two records that answered the same items."""

    first: pd.DataFrame
    second: pd.DataFrame

    def delta(self, columns: Columns, seed: int, reference: str) -> Delta:
        """The paired difference, first minus second, as a record would hold it."""
        return delta_of(columns, self.first, self.second, seed, reference)

    def columns(self, first: Score, second: Score) -> Columns | None:
        """The columns from which both scores follow exactly.

        Samples name their columns and not the metrics made of them. A column of the metric's own name is taken where
        both scores follow from it; else the one choice of column and weight from which they do, and none where several
        different ones would do, or where the two have values of different items.
        """
        found = [
            columns
            for columns in _choices(first.metric, self.first, self.second)
            if _follows(first, self.first, columns) and _follows(second, self.second, columns) and self._same(columns)
        ]
        if not found:
            return None
        named = found[0].column == first.metric.name
        return found[0] if named or all(self._alike(found[0], other) for other in found[1:]) else None

    def _same(self, columns: Columns) -> bool:
        sides = [frame.loc[_usable(*_values(frame, columns)), "item"] for frame in (self.first, self.second)]
        unique = all(frame["item"].is_unique for frame in (self.first, self.second))
        return unique and set(sides[0]) == set(sides[1])

    def _alike(self, columns: Columns, other: Columns) -> bool:
        return all(
            np.array_equal(one, two, equal_nan=True)
            for frame in (self.first, self.second)
            for one, two in zip(_values(frame, columns), _values(frame, other), strict=True)
        )

    def flips(self, columns: Columns) -> pd.DataFrame | None:
        """Items that one answers and the other does not; None where a value is no right or wrong.

        Returns:
            `FLIPS`: the item, how its question starts, both values (1 is right) and both answers; a text is empty where
            the samples have none.
        """
        if columns.metric.better != "higher" or columns.metric.reduction != "mean" or columns.weight is not None:
            return None
        both = self.first.merge(self.second, on="item", suffixes=("_first", "_second"))
        values = both[[f"{columns.column}_first", f"{columns.column}_second"]].to_numpy(dtype="float64")
        if not np.isin(values, (0.0, 1.0)).all():
            return None
        made = pd.DataFrame({"item": both["item"], "text": _texts(both, ("text",), "first")})
        made["first"], made["second"] = values[:, 0].astype(int), values[:, 1].astype(int)
        for side in ("first", "second"):
            made[f"{side}_answer"] = _texts(both, _ANSWERS, side)
        return made[made["first"] != made["second"]].reset_index(drop=True)


def drawn_by(cell: Cell) -> tuple[Any, ...]:
    """Of two cells, the one with the smaller key is that from which the other is subtracted when resamples are drawn.

    Draws of few different items depend on which cell stands first. In one order for both, B minus A has the interval of
    A minus B with its sign turned. What records are compared with comes last, as in records.
    """
    return cell.model, cell.arm == BASELINE_ARM, cell.arm, cell.quantizer == "none", cell.quantizer


def pair_of(first: Record, second: Record, store: SampleStore) -> Pair | str:
    """The samples of two records, or why they cannot be had."""
    found = []
    for record in (first, second):
        samples = _kept(record, store)
        if samples is None:
            return "the cache does not have the answers of both"
        if not _of(record, samples):
            return "the answers in the cache are to other questions than those of the records"
        found.append(samples)
    if not found[0].same_items(found[1]):
        return "the answers in the cache are to different questions"
    return Pair(found[0].frame, found[1].frame)


def answers(record: Record, store: SampleStore) -> Samples | None:
    """The samples of a record; None where the cache has none, or they are answers to other questions."""
    samples = _kept(record, store)
    return samples if samples is not None and _of(record, samples) else None


def _kept(record: Record, store: SampleStore) -> Samples | None:
    calibration = record.identity.get("calibration_sha256")
    return store.read(key_of(vars(record.cell), record.identity, record.versions, calibration))


def _of(record: Record, samples: Samples) -> bool:
    convention = samples.convention in (None, record.convention)
    return convention and samples.data_sha256 == record.identity["data_sha256"] and "item" in samples.frame


def _choices(metric: Metric, first: pd.DataFrame, second: pd.DataFrame) -> Iterator[Columns]:
    numbers = [name for name in first.select_dtypes("number").columns if name != "item" and name in second.columns]
    for column in sorted(numbers, key=lambda name: name != metric.name):
        yield Columns(metric, column, None)
        yield from (Columns(metric, column, weight) for weight in numbers if weight != column)


def _values(frame: pd.DataFrame, columns: Columns) -> tuple[Any, Any]:
    value = frame[columns.column].to_numpy(dtype="float64", na_value=np.nan)
    if columns.weight is None:
        return value, np.ones_like(value)
    return value, frame[columns.weight].to_numpy(dtype="float64", na_value=np.nan)


def _usable(value: Any, weight: Any) -> Any:
    return ~np.isnan(value) & ~np.isnan(weight)


def _follows(score: Score, frame: pd.DataFrame, columns: Columns) -> bool:
    value, weight = _values(frame, columns)
    usable = _usable(value, weight)
    total = weight[usable].sum()
    if usable.sum() != score.n or not 0 < total < math.inf:
        return False
    mean = value[usable].sum() / total
    if score.metric.reduction == "exp":
        # beyond it there is no finite perplexity that it could be
        mean = math.exp(mean) if mean < 709 else math.inf
    return math.isclose(mean, score.value, rel_tol=1e-9, abs_tol=1e-12)


def _texts(both: pd.DataFrame, names: tuple[str, ...], side: str) -> "pd.Series[str]":
    """The first column of the names that the samples of one side have, as text."""
    for name in names:
        for column in (f"{name}_{side}", name):
            if column in both:
                return both[column].astype(str)
    return pd.Series("", index=both.index)
