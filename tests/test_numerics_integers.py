"""Integer grids: scales, zero points and rounding, against numbers worked out by hand."""

import pytest
import torch

from quant_bench.errors import SpecError
from quant_bench.numerics.integers import Grid, round_to_grid, scale_and_zero


def one(value: float) -> torch.Tensor:
    return torch.tensor([value])


@pytest.mark.parametrize(
    ("bits", "symmetric", "restricted", "low", "high", "offset"),
    [
        (8, True, True, -127, 127, 0),
        (8, True, False, -128, 127, 0),
        (4, True, True, -7, 7, 0),
        (2, False, True, 0, 3, 2),
    ],
)
def test_grid_has_the_codes_of_its_bits(bits, symmetric, restricted, low, high, offset):
    grid = Grid(bits, symmetric, restricted)
    assert (grid.low, grid.high, grid.offset) == (low, high, offset)


@pytest.mark.parametrize("bits", [1, 9, 16])
def test_other_bit_widths_are_refused(bits):
    with pytest.raises(SpecError, match="2 to 8"):
        Grid(bits, True)


def test_symmetric_scale_is_the_largest_magnitude_over_the_largest_code():
    scale, zero = scale_and_zero(one(-12.7), one(3.0), Grid(8, True))
    assert scale.item() == torch.tensor(12.7).div(127).item()
    assert zero.item() == 0


def test_asymmetric_range_is_widened_to_contain_zero():
    scale, zero = scale_and_zero(one(2.0), one(5.1), Grid(8, False))
    assert scale.item() == torch.tensor(5.1).div(255).item()
    assert zero.item() == 0
    scale, zero = scale_and_zero(one(-5.1), one(-2.0), Grid(8, False))
    assert (scale.item(), zero.item()) == (torch.tensor(5.1).div(255).item(), 255)


def test_zero_has_a_code_of_its_own_on_an_asymmetric_grid():
    scale, zero = scale_and_zero(one(-1.3), one(2.9), Grid(4, False))
    code = round_to_grid(one(0.0), scale, zero, Grid(4, False))
    assert ((code - zero) * scale).item() == 0.0


@pytest.mark.parametrize("extreme", [0.0, 1e-45])
def test_a_range_without_width_has_scale_one(extreme):
    for symmetric in (True, False):
        scale, zero = scale_and_zero(one(0.0), one(extreme), Grid(8, symmetric))
        assert (scale.item(), zero.item()) == (1.0, 0)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_range_that_is_not_finite_has_scale_nan(broken):
    for symmetric in (True, False):
        scale, _ = scale_and_zero(one(0.0), one(broken), Grid(8, symmetric))
        assert scale.isnan().all()


def test_rounding_is_half_to_even():
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    codes = round_to_grid(values, one(1.0), torch.tensor([0], dtype=torch.int32), Grid(8, True))
    assert codes.tolist() == [0.0, 2.0, 2.0, 0.0, -2.0, -2.0]


def test_values_are_divided_and_not_multiplied_by_a_reciprocal():
    # 4.5 · scale is representable here: dividing gives the tie 4.5 exactly, the reciprocal misses it
    generator = torch.Generator().manual_seed(0)
    scales = torch.rand(20000, generator=generator) + 0.5
    values = scales * 4.5
    tie = (values / scales == 4.5) & (values * (1 / scales) > 4.5)
    assert tie.any()
    codes = round_to_grid(values[tie], scales[tie], torch.zeros(1, dtype=torch.int32), Grid(8, True))
    assert (codes == 4).all()


def test_values_outside_the_range_are_clamped():
    zero = torch.tensor([3], dtype=torch.int32)
    codes = round_to_grid(torch.tensor([-100.0, 100.0]), one(1.0), zero, Grid(4, False))
    assert codes.tolist() == [0.0, 15.0]
