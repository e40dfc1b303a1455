"""Integer grids: which codes there are, and the scale and zero point that map a real range onto them.

Rounding is half to even everywhere, and values are divided by the scale: multiplying by its reciprocal flips ties.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from quant_bench.errors import SpecError


@dataclass(frozen=True)
class Grid:
    """The codes of one quantizer: consecutive integers from `low` to `high`.

    Attributes:
        bits: 2 to 8.
        symmetric: codes around 0 and no zero point; else 0 to 2^bits - 1 with a zero point.
        restricted: symmetric only: leave out -2^(bits-1), so that negation never leaves the grid.
    """

    bits: int
    symmetric: bool
    restricted: bool = True

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise SpecError(f"codes have 2 to 8 bits; got {self.bits!r}")

    @property
    def low(self) -> int:
        """Smallest code."""
        if not self.symmetric:
            return 0
        return -(1 << (self.bits - 1)) + int(self.restricted)

    @property
    def high(self) -> int:
        """Largest code."""
        return (1 << (self.bits - int(self.symmetric))) - 1

    @property
    def offset(self) -> int:
        """What is subtracted from a code before it is stored in a signed integer: 0, or 2^(bits-1) if asymmetric."""
        return 0 if self.symmetric else 1 << (self.bits - 1)


def scale_and_zero(
    low: Float[Tensor, "*shape"], high: Float[Tensor, "*shape"], grid: Grid
) -> tuple[Float[Tensor, "*shape"], Int32[Tensor, "*shape"]]:
    """Scale and zero point of the grid that covers a real range.

    Symmetric: scale = max(|low|, |high|) / grid.high and zero = 0. Asymmetric: the range is first widened to contain 0,
    so that 0 has a code; scale = (high - low) / (2^bits - 1), zero = round(-low / scale).

    Source: Jacob et al. 2018, section 2.1, https://arxiv.org/abs/1712.05877.

    Args:
        low: smallest value of each range, float32.
        high: largest value of each range, float32.
        grid: codes to map onto.

    Returns:
        Scale (float32) and zero point on the grid (int32, before `grid.offset`). An all-zero range, or one so small
        that its scale underflows, has scale 1 and zero point 0: all its codes mean 0. A range that is not finite has
        scale NaN, so that nothing made with it passes for a number.
    """
    low, high = low.float(), high.float()
    if grid.symmetric:
        scale = torch.maximum(low.abs(), high.abs()) / grid.high
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = (high - low) / grid.high
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    scale = torch.where(scale.isfinite(), scale, torch.full_like(scale, torch.nan))
    if grid.symmetric:
        return scale, torch.zeros_like(scale, dtype=torch.int32)
    zero = (-low / scale).nan_to_num_(0.0).round_().clamp_(grid.low, grid.high)
    return scale, zero.to(torch.int32)


def round_to_grid(
    values: Float[Tensor, "*shape"], scale: Float[Tensor, "..."], zero: Int32[Tensor, "..."], grid: Grid
) -> Float[Tensor, "*shape"]:
    """Codes as integer-valued float32: clamp(round(values / scale) + zero, grid.low, grid.high).

    Args:
        values: any finite numbers; NaN gets the code of 0.
        scale: broadcastable to values.
        zero: broadcastable to values; all 0 for a symmetric grid.
        grid: codes to round to.
    """
    codes = torch.div(values.float(), scale).round_()
    if not grid.symmetric:
        codes = codes.add_(zero)
    # NaN has no code; the scale of a dynamic range says that it was there
    return torch.where(codes.isnan(), zero.to(codes.dtype), codes).clamp_(grid.low, grid.high)
