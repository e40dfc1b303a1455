"""Moments against closed forms and float64 references written here."""

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant_bench.numerics import moments as module
from quant_bench.numerics.moments import Channels, Moments, count_beyond, measure


def reference(values: np.ndarray) -> tuple[float, float, float, float]:
    wide = values.astype(np.float64).ravel()
    centred = wide - wide.mean()
    return wide.mean(), (centred**2).sum(), (centred**3).sum(), (centred**4).sum()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_gaussian_kurtosis_is_three_within_four_standard_errors() -> None:
    values = normal(1000, 1000)
    # the standard error of a Gaussian's sample kurtosis is √(24 / n)
    assert measure(values).moments.kurtosis == pytest.approx(3.0, abs=4 * (24 / 1e6) ** 0.5)


def test_two_equally_likely_values_have_kurtosis_one() -> None:
    values = torch.tensor([[2.0, -7.0] * 8] * 5)
    found = measure(values)
    assert found.moments.kurtosis == pytest.approx(1.0, abs=1e-12)
    assert found.token_kurtosis == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("constant", [0.0, 0.1, -3e4, 1e-42, 3e38])
def test_constant_data_have_kurtosis_one(constant: float) -> None:
    found = measure(torch.full((7, 577), constant))
    assert found.moments.kurtosis == pytest.approx(1.0)
    assert found.token_kurtosis == pytest.approx(1.0)
    assert found.moments.kurtosis_published == pytest.approx(0.0, abs=1e-6)


def test_no_values_have_the_kurtosis_of_constant_ones() -> None:
    assert Moments().kurtosis == 1.0
    assert Moments().deviation == 0.0


def test_spread_of_one_in_ten_thousand_around_a_large_mean_keeps_its_kurtosis() -> None:
    noise = normal(64, 96).double()
    values = (1000.0 + noise * 0.1).float()
    wanted = scipy.stats.kurtosis(values.double().numpy().ravel(), fisher=False)
    assert measure(values).moments.kurtosis == pytest.approx(wanted, rel=1e-9)


def test_one_outlier_in_half_precision_is_neither_lost_nor_infinite() -> None:
    values = normal(33, 63).half()
    values[5, 7] = 6e4
    wanted = scipy.stats.kurtosis(values.double().numpy().ravel(), fisher=False)
    found = measure(values)
    assert found.finite
    assert found.moments.kurtosis == pytest.approx(wanted, rel=1e-12)
    assert found.absmax[5] == np.float32(torch.tensor(6e4).half())


@pytest.mark.parametrize("shape", [(1, 1), (1, 63), (63, 1), (17, 65)])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_one_pass_equals_the_two_pass_reference_in_float64(shape: tuple[int, int], scale: float) -> None:
    values = (normal(*shape, seed=3) + 0.5) * scale
    channels = Channels(shape[1])
    found, array = measure(values, channels=channels), values.double().numpy()
    mean, m2, m3, m4 = reference(array)
    moments = found.moments
    assert moments.count == array.size
    assert moments.mean == pytest.approx(mean, rel=1e-12, abs=0)
    spread = max(m2, 1e-80)
    assert moments.m2 == pytest.approx(m2, rel=1e-12, abs=1e-24 * array.size * scale**2)
    assert moments.m3 == pytest.approx(m3, rel=1e-9, abs=1e-12 * spread**1.5)
    assert moments.m4 == pytest.approx(m4, rel=1e-12, abs=1e-48 * array.size * scale**4)
    np.testing.assert_allclose(found.squares, (array**2).sum(1), rtol=1e-12)
    np.testing.assert_allclose(channels.squares, (array**2).sum(0), rtol=1e-12)
    np.testing.assert_array_equal(found.absmax, np.abs(array).max(1).astype(np.float32))
    np.testing.assert_array_equal(channels.absmax, np.abs(array).max(0).astype(np.float32))


def test_token_kurtosis_is_the_mean_over_tokens() -> None:
    values = normal(19, 64) * torch.arange(1, 20)[:, None]
    wanted = scipy.stats.kurtosis(values.double().numpy(), axis=1, fisher=False).mean()
    assert measure(values).token_kurtosis == pytest.approx(wanted, rel=1e-10)


def test_leaving_parts_out_does_not_change_the_others() -> None:
    values = normal(30, 40)
    channels, alone = Channels(40), Channels(40)
    whole = measure(values, channels=channels)
    only_moments, only_channels = measure(values), measure(values, moments=False, channels=alone)
    assert only_moments.moments == whole.moments
    assert only_moments.token_kurtosis == whole.token_kurtosis
    assert only_channels.moments == Moments()
    np.testing.assert_array_equal(alone.squares, channels.squares)
    np.testing.assert_array_equal(alone.absmax, channels.absmax)
    for part in (only_moments, only_channels):
        np.testing.assert_array_equal(part.absmax, whole.absmax)
        np.testing.assert_allclose(part.squares, whole.squares, rtol=1e-14)


def test_channels_add_up_over_tensors() -> None:
    parts = [normal(size, 24, seed=size) for size in (5, 1, 30)]
    channels = Channels(24)
    for part in parts:
        measure(part, channels=channels)
    whole = torch.cat(parts).double().numpy()
    np.testing.assert_array_equal(channels.absmax, np.abs(whole).max(0).astype(np.float32))
    np.testing.assert_allclose(channels.squares, (whole**2).sum(0), rtol=1e-13)


def test_views_with_strides_give_the_same_as_their_copy() -> None:
    base = normal(40, 48)
    assert measure(base[::3, 5:]).moments == measure(base[::3, 5:].clone()).moments


@settings(deadline=None, max_examples=30)
@given(scale=st.floats(1e-25, 1e25), seed=st.integers(0, 1000))
def test_kurtosis_does_not_change_with_scale(scale: float, seed: int) -> None:
    values = normal(5, 33, seed=seed) + 0.3
    # a power of two scales floats without rounding, so the kurtosis may differ in float64's last digits only
    factor = 2.0 ** round(np.log2(scale))
    plain, scaled = measure(values), measure(values * factor)
    assert scaled.moments.kurtosis == pytest.approx(plain.moments.kurtosis, rel=1e-12)
    assert scaled.token_kurtosis == pytest.approx(plain.token_kurtosis, rel=1e-12)


@settings(deadline=None, max_examples=30)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6), shift=st.floats(-100, 100))
def test_merging_parts_gives_the_moments_of_the_whole(sizes: list[int], shift: float) -> None:
    parts = [normal(size, 8, seed=size) + shift * index for index, size in enumerate(sizes)]
    merged = Moments()
    for part in parts:
        merged = merged.merge(measure(part).moments)
    mean, m2, m3, m4 = reference(torch.cat(parts).numpy())
    assert merged.count == 8 * sum(sizes)
    assert merged.mean == pytest.approx(mean, abs=1e-9)
    assert merged.m2 == pytest.approx(m2, rel=1e-9)
    assert merged.m3 == pytest.approx(m3, rel=1e-7, abs=1e-9 * m2**1.5)
    assert merged.m4 == pytest.approx(m4, rel=1e-9)


def test_torch_path_for_other_devices_equals_the_compiled_one() -> None:
    values = normal(31, 65) * 5 - 2
    left, right = Channels(65), Channels(65)
    compiled, plain = module._measure_cpu(module.host(values), True, left), module._measure_torch(values, right)
    for one, other in zip((*compiled, *vars(left).values()), (*plain, *vars(right).values()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_entries_that_are_not_finite_are_noticed(value: float, dtype: torch.dtype) -> None:
    values = normal(8, 16).to(dtype)
    assert measure(values).finite
    values[3, 4] = value
    assert not measure(values).finite


@pytest.mark.parametrize("inclusive", [False, True])
def test_counting_beyond_a_radius_equals_counting_all_entries(inclusive: bool) -> None:
    values = (normal(50, 40) * 4).round()
    absmax = values.abs().amax(1).numpy()
    for centre, radius in ((0.0, 6.0), (0.5, 6.5), (-1.0, 3.0), (0.0, 100.0)):
        distance = (values.double() - centre).abs()
        wanted = (distance >= radius) if inclusive else (distance > radius)
        assert count_beyond(values, absmax, centre, radius, inclusive=inclusive) == int(wanted.sum())


def test_published_kurtosis_adds_its_epsilon_to_the_unbiased_variance_squared() -> None:
    values = normal(20, 30) * 0.05
    array = values.double().numpy().ravel()
    wanted = ((array - array.mean()) ** 4).mean() / (array.std(ddof=1) ** 4 + 1e-6)
    found = measure(values).moments
    assert found.kurtosis_published == pytest.approx(wanted, rel=1e-10)
    assert found.kurtosis_published < 0.95 * found.kurtosis
