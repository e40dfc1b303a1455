"""Rounding that gradients pass, for recipes that learn what they round with; never part of a quantized model."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from quant_bench.lowbit.codes import weight_blocks
from quant_bench.numerics.integers import Grid, scale_and_zero
from quant_bench.quantizer import SchemeQuantizer


def input_rounding(scheme: SchemeQuantizer) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """A forward pre-hook that rounds the first argument of linears."""
    last: list[tuple[Tensor, Tensor]] = []

    def before(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x = arguments[0]
        # query, key and value read one tensor
        if not last or last[0][0] is not x:
            last[:] = [(x, rounded_activation(x, scheme))]
        return (last[0][1], *arguments[1:])

    return before


def rounded_activation(x: Float[Tensor, "*batch col"], scheme: SchemeQuantizer) -> Float[Tensor, "*batch col"]:
    """An input as a dynamic scheme rounds it; gradients pass."""
    values = x.reshape(-1, x.shape[-1]).float()
    granularity = "channel" if scheme.activation_granularity == "token" else scheme.activation_granularity
    blocks = weight_blocks(values, granularity, scheme.group_size)
    grid = Grid(scheme.activation_bits, scheme.activation_symmetric)
    rounded = straight_through(blocks, blocks.amin(-1), blocks.amax(-1), grid)
    return rounded.reshape(len(values), -1)[:, : values.shape[1]].reshape(x.shape).to(x.dtype)


def straight_through(
    blocks: Float[Tensor, "block size"], low: Float[Tensor, " block"], high: Float[Tensor, " block"], grid: Grid
) -> Float[Tensor, "block size"]:
    """Values on the grid of each block's range; rounding has the gradient of the identity, the scale its own."""
    scale, zero = scale_and_zero(low, high, grid)
    scale, zero = scale[:, None], zero[:, None]
    codes: Tensor = _Round.apply(blocks / scale)  # type: ignore[no-untyped-call]
    return ((codes + zero).clamp(grid.low, grid.high) - zero) * scale


class _Round(torch.autograd.Function):
    """Round half to even, with the gradient of the identity."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values.round()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient
