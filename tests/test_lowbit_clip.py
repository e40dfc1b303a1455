"""The clip search against a plain search in float64."""

import pytest
import torch

from quant_bench.lowbit.clip import STEPS, best_clip
from quant_bench.numerics.integers import Grid


def reference(block: torch.Tensor, bits: int, symmetric: bool) -> float:
    """Least mean squared rounding error over the candidate clips, in float64."""
    x = block.double()
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    errors = []
    for step in range(STEPS):
        ratio = 1 - step / STEPS
        if symmetric:
            top = 2 ** (bits - 1) - 1
            scale, zero, bottom = x.abs().max() * ratio / top, torch.tensor(0.0), -top
        else:
            top, bottom = 2**bits - 1, 0
            scale = (high - low) * ratio / top
            zero = (-low * ratio / scale).round()
        codes = ((x / scale).round() + zero).clamp(bottom, top)
        errors.append((((codes - zero) * scale - x) ** 2).sum())
    return float(torch.stack(errors).min())


def error_of(block: torch.Tensor, low: float, high: float, bits: int, symmetric: bool) -> float:
    x = block.double()
    if symmetric:
        top = 2 ** (bits - 1) - 1
        scale, zero, bottom = max(-low, high) / top, 0.0, -top
    else:
        top, bottom = 2**bits - 1, 0
        low, high = min(low, 0.0), max(high, 0.0)
        scale = (high - low) / top
        zero = round(-low / scale)
    codes = ((x / scale).round() + zero).clamp(bottom, top)
    return float((((codes - zero) * scale - x) ** 2).sum())


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_clip_found_has_the_least_error(bits: int, symmetric: bool) -> None:
    torch.manual_seed(bits)
    blocks = torch.randn(3, 5000) ** 3 + 0.3
    lows, highs = best_clip(blocks, blocks.amin(1), blocks.amax(1), Grid(bits, symmetric))
    for block, low, high in zip(blocks, lows.tolist(), highs.tolist(), strict=True):
        found = error_of(block, low, high, bits, symmetric)
        assert found == pytest.approx(reference(block, bits, symmetric), rel=1e-4)


def test_an_outlier_is_clipped_at_four_bits_and_values_on_the_grid_are_not() -> None:
    heavy = torch.cat([torch.randn(4000, generator=torch.Generator().manual_seed(0)), torch.tensor([40.0])])[None]
    on_grid = torch.tensor([[-7.0, -3.0, 0.0, 1.0, 7.0]]) * 0.125
    _, high = best_clip(heavy, heavy.amin(1), heavy.amax(1), Grid(4, True))
    assert float(high) < 20
    low, high = best_clip(on_grid, on_grid.amin(1), on_grid.amax(1), Grid(4, True))
    assert (float(low), float(high)) == (-0.875, 0.875)


def test_an_all_zero_block_keeps_a_usable_range() -> None:
    low, high = best_clip(torch.zeros(1, 8), torch.zeros(1), torch.zeros(1), Grid(8, True))
    assert (float(low), float(high)) == (0.0, 0.0)
