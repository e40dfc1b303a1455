"""Medians and incoherence against numpy's own."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quant_bench.numerics.spread import Incoherence, absolute_medians, max_median_ratio, weight_incoherence


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("width", [1, 2, 3, 64, 577])
@pytest.mark.parametrize("scale", [1e-42, 1.0, 1e37])
def test_medians_equal_numpy_to_the_last_bit(width: int, scale: float) -> None:
    values = (normal(40, width) * np.float32(scale)).astype(np.float32)
    np.testing.assert_array_equal(absolute_medians(values), np.median(np.abs(values).astype(np.float64), axis=1))


@settings(deadline=None, max_examples=60)
@given(values=st.lists(st.floats(-4, 4, width=16), min_size=1, max_size=12))
def test_medians_of_many_equal_entries_are_right(values: list[float]) -> None:
    row = np.array([values], np.float32)
    assert absolute_medians(row)[0] == np.median(np.abs(row).astype(np.float64))


def test_medians_of_columns_that_are_not_contiguous_are_right() -> None:
    values = normal(30, 50)[::3, ::2]
    np.testing.assert_array_equal(absolute_medians(values), np.median(np.abs(values).astype(np.float64), axis=1))


def test_ratio_of_maximum_and_median_leaves_out_tokens_without_a_median() -> None:
    maxima, medians = np.array([6.0, 5.0, 9.0], np.float32), np.array([2.0, 0.0, 1.0])
    assert max_median_ratio(maxima, medians) == pytest.approx((3 + 9) / 2)
    assert max_median_ratio(maxima[1:2], medians[1:2]) is None


def spread(values: np.ndarray) -> np.ndarray:
    wide = values.astype(np.float64)
    return np.abs(wide).max(1) / np.sqrt((wide**2).mean(1))


def test_incoherence_streams_to_the_mean_and_the_percentile_of_all_tokens() -> None:
    parts = [normal(2000, 64, seed=seed) for seed in range(4)]
    incoherence = Incoherence()
    for part in parts:
        wide = part.astype(np.float64)
        incoherence.add(np.abs(part).max(1), (wide**2).sum(1), 64)
    mu = np.concatenate([spread(part) for part in parts])
    assert incoherence.mean == pytest.approx(mu.mean(), rel=1e-6)
    assert incoherence.percentile(0.999) == pytest.approx(np.quantile(mu, 0.999), rel=0.01)
    assert incoherence.percentile(0.5) == pytest.approx(np.quantile(mu, 0.5), rel=0.005)


def test_incoherence_keeps_to_its_bounds() -> None:
    incoherence = Incoherence()
    assert incoherence.mean == 1.0
    width = 256
    incoherence.add(np.array([0.0, 2.0, 3.0], np.float32), np.array([0.0, 4.0 * width, 9.0]), width)
    # zeros and equal entries are spread evenly, one entry alone gives the root of the width
    assert incoherence.mean == pytest.approx((1 + 1 + 16) / 3)
    assert incoherence.percentile(1.0) == pytest.approx(16.0, rel=0.005)


def test_incoherence_of_weights_keeps_to_its_bounds() -> None:
    assert weight_incoherence(2.0, 2.0) == 1.0
    assert weight_incoherence(5.0, 5.0 / 12**0.5) == pytest.approx(12**0.5)
    assert weight_incoherence(0.0, 0.0) == 1.0
