"""From per-item samples to a score with its uncertainty, to paired differences, and over seeds; knows no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from quant_bench.errors import DataError, QuantizationError
from quant_bench.score import Delta, Metric, Score

RESAMPLES: Final = 10_000
# item draws held at once: 8 million indices and values stay below 200 MB
_DRAWS: Final = 8_000_000
# up to so many different items their counts are drawn at once: the same distribution, a thousand times faster for 0/1
_FEW: Final = 32

Items = NDArray[np.float64]


@runtime_checkable
class ItemMeasure(Protocol):
    """What a score needs of a task's `Measure`."""

    @property
    def metric(self) -> Metric:
        """What the number means."""
        ...

    @property
    def column(self) -> str:
        """Column of the samples with the per-item value."""
        ...

    @property
    def weight(self) -> str | None:
        """Column with the per-item weight, or None for one each."""
        ...


def score_of(measure: ItemMeasure, samples: pd.DataFrame, seed: int) -> Score:
    """Score of a measure with standard error and 95 % percentile bootstrap interval over items.

    The score is r = Σ value / Σ weight, or exp(r). Its standard error is that of a ratio by linearization,
    s_r² = n / (n - 1) · Σ (value - r weight)² / (Σ weight)², which is the sample deviation over √n when every weight
    is 1 (lm-eval's number); for exp(r) it is exp(r) s_r (delta method). One item has neither error nor interval.

    Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, sections 13.3 and 8.3; Cochran 1977, Sampling
    Techniques, equation 6.13 (ratio).

    Args:
        measure: which columns, and how items become the score.
        samples: one row an item; items whose value is NaN do not count.
        seed: of the resamples.

    Raises:
        QuantizationError: no item is left, or a value is infinite.
        DataError: a column is missing, or an item stands twice.
    """
    value, weight = _columns(measure, _usable(measure, samples))
    items = np.stack([value, weight], 1)
    estimate = float(_reduced(measure.metric, *items.sum(0, keepdims=True).T)[0])
    n = len(value)
    if not np.isfinite(estimate):
        raise QuantizationError(f"{measure.metric.name} is {estimate}: the mean of {measure.column} is too large")
    if n == 1:
        return Score(measure.metric, estimate, n=1)
    ratio = value.sum() / weight.sum()
    stderr = float(np.sqrt(n / (n - 1) * np.square(value - ratio * weight).sum()) / weight.sum())
    stderr *= estimate if measure.metric.reduction == "exp" else 1.0
    ci95 = _interval(_reduced(measure.metric, *_resampled(items, seed).T))
    return Score(measure.metric, estimate, stderr=stderr, ci95=ci95, n=n)


def delta_of(
    measure: ItemMeasure, samples: pd.DataFrame, reference_samples: pd.DataFrame, seed: int, reference: str
) -> Delta:
    """Difference of a measure on the items that both cells have: samples minus reference.

    The interval is a paired percentile bootstrap: both cells are resampled with the same items, so that what they share
    (a hard document is hard for both) cancels. Items that are right or wrong (0 or 1) also get the exact McNemar test:
    a two-sided binomial test of the items on which the two disagree.

    Source: Efron and Tibshirani 1993, section 13.3; McNemar 1947, Psychometrika 12, exact form.

    Args:
        measure: which columns, and how items become the score.
        samples: of this cell.
        reference_samples: of the reference, paired on column `item`.
        seed: of the resamples.
        reference: canonical quantizer or arm of the reference cell.

    Raises:
        QuantizationError: no item is common, or a value is infinite.
        DataError: a column is missing, or an item stands twice.
    """
    ours, theirs = _usable(measure, samples), _usable(measure, reference_samples)
    common = ours.index.intersection(theirs.index)
    if common.empty:
        raise QuantizationError(f"{measure.metric.name}: no item is common to the cell and its reference {reference}")
    items = np.stack([*_columns(measure, ours.loc[common]), *_columns(measure, theirs.loc[common])], 1)
    return _delta(measure, items, lambda: _resampled(items, seed), reference)


class Resampled:
    """A cell's items with their resamples, which are drawn once for its differences to many others.

    The differences have the digits of `delta_of`.

    Args:
        measure: which columns, and how items become the score.
        samples: one row an item.
        seed: of the resamples.

    Raises:
        QuantizationError: no item is left, or a value is infinite.
        DataError: a column is missing, or an item stands twice.
    """

    def __init__(self, measure: ItemMeasure, samples: pd.DataFrame, seed: int) -> None:
        frame = _usable(measure, samples)
        self._measure, self._seed, self._index = measure, seed, frame.index
        self._items = np.stack(_columns(measure, frame), 1)
        self._sums: Items | None = None

    def minus(self, other: "Resampled", reference: str) -> Delta:
        """The paired difference to another cell of the same items in the same order.

        Raises:
            DataError: its items are others, or in another order.
        """
        if not self._index.equals(other._index):
            raise DataError(f"{self._measure.metric.name}: items of the two cells are others, or in another order")
        items = np.concatenate([self._items, other._items], 1)

        def resampled() -> Items:
            counted = _counted(items, self._seed)
            return np.concatenate([self._drawn(), other._drawn()], 1) if counted is None else counted

        return _delta(self._measure, items, resampled, reference)

    def _drawn(self) -> Items:
        if self._sums is None:
            self._sums = _drawn(self._items, self._seed)
        return self._sums


def _delta(measure: ItemMeasure, items: Items, resampled: Callable[[], Items], reference: str) -> Delta:
    """Difference of value and weight in the first two columns to those in the last two."""

    def difference(sums: Items) -> Items:
        return _reduced(measure.metric, sums[:, 0], sums[:, 1]) - _reduced(measure.metric, sums[:, 2], sums[:, 3])

    estimate = float(difference(items.sum(0, keepdims=True))[0])
    if not np.isfinite(estimate):
        raise QuantizationError(f"the difference of {measure.metric.name} is {estimate}")
    ci95 = _interval(difference(resampled())) if len(items) > 1 else None
    binary = measure.metric.reduction == "mean" and measure.weight is None
    binary = binary and bool(np.isin(items[:, [0, 2]], (0.0, 1.0)).all())
    return Delta(estimate, ci95, reference, _mcnemar(items[:, 0], items[:, 2]) if binary else None)


@dataclass(frozen=True)
class Spread:
    """Numbers of several seeds.

    Attributes:
        mean: of them.
        deviation: their sample standard deviation; None for one seed.
        ci95: 95 % interval of the mean; None for one seed.
        n: how many seeds.
    """

    mean: float
    deviation: float | None
    ci95: tuple[float, float] | None
    n: int


def spread_of(values: Sequence[float]) -> Spread:
    """Mean, standard deviation and 95 % Student interval: mean ± t(0.975, n - 1) · s / √n over n seeds.

    Seeds are few, so the interval is Student's and not a bootstrap's, which is far too narrow for three numbers. It
    holds for seeds whose numbers are about normal, and says nothing about items.

    Source: Student 1908, The Probable Error of a Mean, Biometrika 6.

    Args:
        values: one number a seed; for a paired difference, the differences.

    Raises:
        QuantizationError: there is no value, or one is not finite.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.size == 0 or not np.isfinite(numbers).all():
        raise QuantizationError(f"a mean over seeds needs finite numbers; got {list(values)!r}")
    mean, n = float(numbers.mean()), len(numbers)
    if n == 1:
        return Spread(mean, None, None, 1)
    deviation = float(numbers.std(ddof=1))
    # imported where it is needed: it takes a third of the time in which the command line starts
    from scipy.special import stdtrit

    half = float(stdtrit(n - 1, 0.975)) * deviation / n**0.5
    return Spread(mean, deviation, (mean - half, mean + half), n)


def _mcnemar(value: Items, other: Items) -> float:
    # half a second to import, which reports have no use for
    from scipy.stats import binomtest

    gained, lost = int((value > other).sum()), int((value < other).sum())
    return 1.0 if gained + lost == 0 else float(binomtest(gained, gained + lost, 0.5).pvalue)


def _usable(measure: ItemMeasure, samples: pd.DataFrame) -> pd.DataFrame:
    """The measure's columns by item, without items whose value is NaN."""
    if measure.metric.reduction == "none":
        raise DataError(f"{measure.metric.name} is no mean of items; it is a plain score")
    columns = [measure.column] if measure.weight is None else [measure.column, measure.weight]
    missing = sorted({"item", *columns} - set(samples.columns))
    if missing:
        raise DataError(f"samples of {measure.metric.name} lack the columns {', '.join(missing)}")
    if not samples["item"].is_unique:
        raise DataError(f"samples of {measure.metric.name} have an item twice")
    frame = samples.set_index("item")[columns].astype("float64").dropna()
    if frame.empty:
        raise QuantizationError(f"{measure.metric.name}: none of {len(samples)} items has a value (all are NaN)")
    if not np.isfinite(frame.to_numpy()).all():
        raise QuantizationError(f"{measure.metric.name}: an item's {' or '.join(columns)} is infinite")
    if measure.weight is not None and float(frame[measure.weight].sum()) <= 0:
        raise QuantizationError(f"{measure.metric.name}: the weights of its items sum to nothing")
    return frame


def _columns(measure: ItemMeasure, frame: pd.DataFrame) -> tuple[Items, Items]:
    value = frame[measure.column].to_numpy(dtype=np.float64)
    weight = np.ones_like(value) if measure.weight is None else frame[measure.weight].to_numpy(dtype=np.float64)
    return value, weight


def _reduced(metric: Metric, value: Items, weight: Items) -> Items:
    # a ratio above 709 overflows and weights may sum to nothing in a resample: the callers look for what is not finite
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        return np.exp(value / weight) if metric.reduction == "exp" else value / weight


def _resampled(items: NDArray[np.float64], seed: int) -> Items:
    """Sums of every column over items drawn with replacement, one row a resample."""
    counted = _counted(items, seed)
    return _drawn(items, seed) if counted is None else counted


def _counted(items: Items, seed: int) -> Items | None:
    """The same where few items differ: how often each is drawn is drawn at once."""
    distinct, counts = np.unique(items, axis=0, return_counts=True)
    if len(distinct) > _FEW:
        return None
    return np.random.default_rng(seed).multinomial(len(items), counts / len(items), RESAMPLES) @ distinct


def _drawn(items: Items, seed: int) -> Items:
    """The same item by item; a column's sums do not depend on which columns stand beside it."""
    generator = np.random.default_rng(seed)
    n, width = items.shape
    sums = np.empty((RESAMPLES, width))
    rows = max(1, _DRAWS // n)
    for start in range(0, RESAMPLES, rows):
        part = sums[start : start + rows]
        drawn = generator.integers(0, n, (len(part), n), dtype=np.int32)
        for column in range(width):
            part[:, column] = items[drawn, column].sum(1)
    return sums


def _interval(resampled: Items) -> tuple[float, float] | None:
    # a resample whose weights sum to nothing, or whose perplexity overflows, has no value, and so no interval has one
    if not np.isfinite(resampled).all():
        return None
    low, high = np.percentile(resampled, [2.5, 97.5])
    return float(low), float(high)
