"""Scores with their uncertainty, against independent references."""

import math
import statistics
import tracemalloc
from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd
import pytest
from scipy.stats import bootstrap

from quant_bench.errors import DataError, QuantizationError
from quant_bench.score import Metric
from quant_bench.statistics import Resampled, Spread, delta_of, score_of, spread_of

ACC = Metric("acc", "share", "higher", "mean", 0.25)
NATS = Metric("nats", "nats/token", "lower", "mean")
PERPLEXITY = Metric("token_perplexity", "1", "lower", "exp")


@dataclass(frozen=True)
class Asked:
    """Stands for a task's Measure."""

    metric: Metric
    column: str
    weight: str | None = None


def frame(n: int, seed: int = 0) -> pd.DataFrame:
    generator = np.random.default_rng(seed)
    tokens = generator.integers(20, 200, n)
    nll = tokens * generator.gamma(9.0, 0.33, n)
    return pd.DataFrame({"item": range(n), "nll": nll, "tokens": tokens, "acc": generator.integers(0, 2, n)})


def test_mean_and_its_error_are_those_of_lm_eval() -> None:
    samples = frame(101)
    score = score_of(Asked(ACC, "acc"), samples, 0)
    mean = sum(samples["acc"]) / 101
    assert score.value == pytest.approx(mean, rel=1e-14)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in samples["acc"]) / 100)
    assert score.stderr == pytest.approx(deviation / math.sqrt(101), rel=1e-12)
    assert score.n == 101


def test_a_perplexity_weighs_items_by_their_tokens() -> None:
    samples = pd.DataFrame({"item": ["a", "b"], "nll": [30.0, 1.0], "tokens": [10, 1]})
    assert score_of(Asked(PERPLEXITY, "nll", "tokens"), samples, 0).value == pytest.approx(math.exp(31 / 11), rel=1e-14)


def test_the_error_of_a_perplexity_is_the_delta_methods() -> None:
    samples = frame(400)
    nats = score_of(Asked(NATS, "nll", "tokens"), samples, 0)
    perplexity = score_of(Asked(PERPLEXITY, "nll", "tokens"), samples, 0)
    assert nats.stderr is not None
    assert perplexity.value == pytest.approx(math.exp(nats.value), rel=1e-14)
    assert perplexity.stderr == pytest.approx(perplexity.value * nats.stderr, rel=1e-12)


def test_the_error_of_a_ratio_agrees_with_the_jackknife() -> None:
    samples = frame(300)
    value, weight = samples["nll"].to_numpy(), samples["tokens"].to_numpy()
    left_out = (value.sum() - value) / (weight.sum() - weight)
    jackknife = math.sqrt(299 / 300 * ((left_out - left_out.mean()) ** 2).sum())
    # both are first-order: they differ by terms of relative size 1 / n
    assert score_of(Asked(NATS, "nll", "tokens"), samples, 0).stderr == pytest.approx(jackknife, rel=0.02)


@pytest.mark.parametrize(("metric", "weight"), [(NATS, None), (NATS, "tokens"), (PERPLEXITY, "tokens")])
def test_the_interval_is_that_of_scipys_bootstrap(metric: Metric, weight: str | None) -> None:
    samples = frame(200)
    value = samples["nll"].to_numpy() / (1 if weight else 50)
    samples["nll"] = value
    weights = samples[weight].to_numpy() if weight else np.ones(200)

    def statistic(v: np.ndarray, w: np.ndarray, axis: int) -> np.ndarray:
        ratio = v.sum(axis) / w.sum(axis)
        return np.exp(ratio) if metric.reduction == "exp" else ratio

    reference = bootstrap(
        (value, weights), statistic, paired=True, vectorized=True, n_resamples=10_000, method="percentile", rng=7
    ).confidence_interval
    score = score_of(Asked(metric, "nll", weight), samples, 0)
    assert score.ci95 is not None
    # ends of two sets of 10,000 resamples differ by a few percent of the interval's width
    width = reference.high - reference.low
    assert score.ci95 == pytest.approx((reference.low, reference.high), abs=0.05 * width)


def test_the_interval_of_right_and_wrong_items_is_that_of_resampling_them_one_by_one() -> None:
    samples = frame(60)
    reference = np.random.default_rng(5).choice(samples["acc"].to_numpy(), (100_000, 60)).mean(1)
    score = score_of(Asked(ACC, "acc"), samples, 0)
    # quantiles of a lattice with steps of 1 / 60
    assert score.ci95 == pytest.approx(tuple(np.percentile(reference, [2.5, 97.5])), abs=1 / 60)


def test_the_paired_difference_is_that_of_scipys_paired_bootstrap() -> None:
    ours, theirs = frame(250), frame(250)
    ours["nll"] *= 1.01 + 0.02 * np.random.default_rng(1).standard_normal(250)
    shuffled = ours.sample(frac=1.0, random_state=0)

    def statistic(v: np.ndarray, o: np.ndarray, w: np.ndarray, axis: int) -> np.ndarray:
        return np.exp(v.sum(axis) / w.sum(axis)) - np.exp(o.sum(axis) / w.sum(axis))

    columns = (ours["nll"].to_numpy(), theirs["nll"].to_numpy(), ours["tokens"].to_numpy())
    reference = bootstrap(
        columns, statistic, paired=True, vectorized=True, n_resamples=10_000, method="percentile", rng=7
    ).confidence_interval
    delta = delta_of(Asked(PERPLEXITY, "nll", "tokens"), shuffled, theirs, 0, "none")
    assert delta.value == pytest.approx(float(statistic(*columns, axis=0)), rel=1e-12)
    assert delta.ci95 is not None
    assert delta.ci95 == pytest.approx((reference.low, reference.high), abs=0.05 * (reference.high - reference.low))
    assert delta.reference == "none"
    assert delta.p_value is None


@pytest.mark.parametrize("asked", [Asked(PERPLEXITY, "nll", "tokens"), Asked(NATS, "nll"), Asked(ACC, "acc")])
def test_resamples_drawn_once_give_the_digits_of_each_difference(asked: Asked) -> None:
    frames = [frame(250, seed) for seed in range(3)]
    drawn = [Resampled(asked, one, 7) for one in frames]
    for first, second in product(range(3), repeat=2):
        single = delta_of(asked, frames[first], frames[second], 7, "other")
        assert drawn[first].minus(drawn[second], "other") == single


def test_resamples_of_other_items_are_not_subtracted() -> None:
    asked, ours = Asked(ACC, "acc"), frame(50)
    for theirs in (ours.iloc[::-1], ours.iloc[1:], ours.assign(item=ours["item"] + 1)):
        with pytest.raises(DataError, match="another order"):
            Resampled(asked, ours, 0).minus(Resampled(asked, theirs, 0), "other")


def test_pairing_makes_the_interval_narrower() -> None:
    ours, theirs = frame(250), frame(250)
    ours["nll"] *= 1.01
    paired = delta_of(Asked(NATS, "nll", "tokens"), ours, theirs, 0, "none")
    single = score_of(Asked(NATS, "nll", "tokens"), ours, 0)
    assert paired.ci95 is not None
    assert single.ci95 is not None
    assert paired.ci95[1] - paired.ci95[0] < 0.1 * (single.ci95[1] - single.ci95[0])


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (3, 9), (8, 8), (0, 12), (20, 5)])
def test_mcnemar_equals_the_sum_over_the_binomial(gained: int, lost: int) -> None:
    pairs = [(1, 0)] * gained + [(0, 1)] * lost + [(1, 1)] * 10 + [(0, 0)] * 5
    ours = pd.DataFrame({"item": range(len(pairs)), "acc": [pair[0] for pair in pairs]})
    theirs = pd.DataFrame({"item": range(len(pairs)), "acc": [float(pair[1]) for pair in pairs]})
    n, extreme = gained + lost, min(gained, lost)
    tail = sum(math.comb(n, k) for k in range(extreme + 1)) / 2**n
    delta = delta_of(Asked(ACC, "acc"), ours, theirs, 0, "none")
    assert delta.p_value == pytest.approx(min(1.0, 2 * tail), rel=1e-12)
    assert delta.value == pytest.approx((gained - lost) / len(pairs), abs=1e-15)


def test_only_right_or_wrong_items_get_mcnemar() -> None:
    ours = frame(50)
    assert delta_of(Asked(NATS, "nll"), ours, ours, 0, "none").p_value is None


def test_items_are_paired_by_name_and_only_common_ones_count() -> None:
    ours = pd.DataFrame({"item": ["c", "a", "x"], "acc": [1.0, 0.0, 1.0]})
    theirs = pd.DataFrame({"item": ["a", "b", "c"], "acc": [0.0, 1.0, 0.0]})
    assert delta_of(Asked(ACC, "acc"), ours, theirs, 0, "none").value == pytest.approx(0.5)


def test_equal_seeds_give_equal_intervals_and_other_seeds_others() -> None:
    samples = frame(100)
    asked = Asked(PERPLEXITY, "nll", "tokens")
    assert score_of(asked, samples, 3) == score_of(asked, samples, 3)
    assert score_of(asked, samples, 3).ci95 != score_of(asked, samples, 4).ci95


def test_identical_cells_differ_by_nothing() -> None:
    samples = frame(50)
    for asked in (Asked(ACC, "acc"), Asked(PERPLEXITY, "nll", "tokens")):
        delta = delta_of(asked, samples, samples.copy(), 0, "none")
        assert (delta.value, delta.ci95) == (0.0, (0.0, 0.0))


def test_identical_items_have_no_spread() -> None:
    samples = pd.DataFrame({"item": range(9), "acc": [1.0] * 9})
    score = score_of(Asked(ACC, "acc"), samples, 0)
    assert (score.value, score.stderr, score.ci95) == (1.0, 0.0, (1.0, 1.0))


def test_one_item_has_neither_error_nor_interval() -> None:
    samples = frame(1)
    score = score_of(Asked(PERPLEXITY, "nll", "tokens"), samples, 0)
    assert (score.stderr, score.ci95, score.n) == (None, None, 1)
    assert delta_of(Asked(ACC, "acc"), samples, samples, 0, "none").ci95 is None


def test_items_without_a_value_do_not_count() -> None:
    samples = frame(20)
    holed = pd.concat([samples, pd.DataFrame({"item": [99], "nll": [np.nan], "tokens": [5], "acc": [np.nan]})])
    asked = Asked(PERPLEXITY, "nll", "tokens")
    assert score_of(asked, holed, 0) == score_of(asked, samples, 0)
    assert delta_of(asked, holed, samples, 0, "none").value == 0.0


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([np.nan, np.nan], QuantizationError, "none of 2 items"),
        ([np.inf, 1.0], QuantizationError, "infinite"),
        ([1e6, 1e6], QuantizationError, "too large"),
        ([], QuantizationError, "none of 0 items"),
    ],
)
def test_what_gives_no_number_is_an_error(values: list[float], error: type[Exception], message: str) -> None:
    samples = pd.DataFrame({"item": range(len(values)), "nll": values}, dtype="float64")
    with pytest.raises(error, match=message):
        score_of(Asked(PERPLEXITY, "nll"), samples, 0)


def test_wrong_samples_are_named() -> None:
    samples = frame(3)
    with pytest.raises(DataError, match="lack the columns words"):
        score_of(Asked(NATS, "nll", "words"), samples, 0)
    with pytest.raises(DataError, match="an item twice"):
        score_of(Asked(NATS, "nll"), pd.concat([samples, samples]), 0)
    with pytest.raises(DataError, match="plain score"):
        score_of(Asked(Metric("max", "1", "lower"), "nll"), samples, 0)
    with pytest.raises(QuantizationError, match="no item is common"):
        delta_of(Asked(NATS, "nll"), samples, samples.assign(item=samples["item"] + 10), 0, "none")


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    covered = 0
    for seed in range(200):
        samples = pd.DataFrame({"item": range(80), "v": np.random.default_rng(seed).normal(1.0, 2.0, 80)})
        low, high = score_of(Asked(NATS, "v"), samples.round({"v": 1}), seed).ci95 or (math.nan, math.nan)
        covered += low <= 1.0 <= high
    # 95 % of 200, less four standard errors and the percentile method's own few percent
    assert 170 <= covered <= 199


def test_ten_thousand_items_stay_within_bounded_memory() -> None:
    samples = frame(10_000)
    tracemalloc.start()
    score_of(Asked(PERPLEXITY, "nll", "tokens"), samples, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # all draws at once would be 10,000 x 10,000 x 12 bytes = 1.2 GB
    assert peak < 250e6


def test_few_distinct_items_are_resampled_with_their_probabilities() -> None:
    """Against the exact distribution of the mean of three items, each drawn with replacement."""
    samples = pd.DataFrame({"item": range(3), "v": [0.0, 1.0, 5.0]})
    means = sorted(sum(draw) / 3 for draw in product([0.0, 1.0, 5.0], repeat=3))
    low, high = np.percentile(means * 1000, [2.5, 97.5])
    assert score_of(Asked(NATS, "v"), samples, 0).ci95 == pytest.approx((low, high), abs=1e-9)


@pytest.mark.parametrize(
    "values", [(3.1, 3.4, 3.2), (0.0052, 0.0013), (1.0, 1.0, 1.0, 1.0), tuple(i / 7 for i in range(31))]
)
def test_the_spread_over_seeds_is_students(values: tuple[float, ...]) -> None:
    # upper 2.5 % points by degrees of freedom, from a printed table
    t = {1: 12.7062, 2: 4.30265, 3: 3.18245, 30: 2.04227}[len(values) - 1]
    found = spread_of(values)
    deviation = statistics.stdev(values)
    assert found.n == len(values)
    assert found.mean == pytest.approx(statistics.fmean(values))
    assert found.deviation == pytest.approx(deviation)
    assert found.ci95 is not None
    assert found.ci95[1] - found.ci95[0] == pytest.approx(2 * t * deviation / len(values) ** 0.5, rel=1e-5)
    assert sum(found.ci95) / 2 == pytest.approx(found.mean)


def test_students_interval_covers_the_truth_in_95_of_100_experiments() -> None:
    drawn = np.random.default_rng(0).normal(2.0, 3.0, (4000, 3))
    covered = [interval[0] <= 2.0 <= interval[1] for row in drawn if (interval := spread_of(row.tolist()).ci95)]
    # four standard errors of a share of 4,000
    assert np.mean(covered) == pytest.approx(0.95, abs=4 * (0.95 * 0.05 / 4000) ** 0.5)


def test_one_seed_has_no_spread_and_none_has_no_mean() -> None:
    assert spread_of([0.25]) == Spread(0.25, None, None, 1)
    for values in ([], [1.0, float("nan")], [float("inf")]):
        with pytest.raises(QuantizationError, match="finite"):
            spread_of(values)
