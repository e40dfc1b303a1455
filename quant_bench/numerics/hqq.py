"""HQQ: zero points of integer grids as real numbers, found by half-quadratic splitting without any data."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from quant_bench.numerics.integers import Grid


@dataclass(frozen=True)
class HalfQuadratic:
    """The published solver's constants.

    Attributes:
        norm: p of the error norm Σ|w - ŵ|^p, in (0, 1].
        penalty: first weight of the quadratic term, for weights as they are; larger lets smaller errors through.
        growth: factor of the penalty from one step to the next.
        steps: updates of the zero points.
    """

    norm: float = 0.7
    penalty: float = 10.0
    growth: float = 1.01
    steps: int = 20


# blocks that are solved together: about half a megabyte, which stays in the cache for all steps
_TOGETHER = 1 << 17


def shrink(error: Float[Tensor, "..."], norm: float, penalty: float) -> Float[Tensor, "..."]:
    """Generalized soft threshold: sign(x) · max(|x| - |x|^(p-1) / penalty, 0).

    Source: Badri & Shaji 2023, equation of the proximal step, https://mobiusml.github.io/hqq_blog/.
    """
    size = error.abs()
    # 0^(p-1) is infinite: no error stays no error
    return (size - size.pow(norm - 1) / penalty).clamp_(min=0).copysign_(error)


def real_zeros(
    blocks: Float[Tensor, "block size"],
    scale: Float[Tensor, "block 1"],
    zero: Float[Tensor, "block 1"],
    grid: Grid,
    rule: HalfQuadratic,
) -> tuple[Float[Tensor, "block size"], Float[Tensor, "block 1"]]:
    """Codes and real zero points with a small Σ|w - (code - zero) · scale|^p of each block; scales stay.

    In turn: codes of the nearest values; e = shrink(w - ŵ), the errors that are let stand; zero = mean(code - (w - e) /
    scale). Each block keeps the best zero point that came up, the first one included, so none gets worse (the published
    code stops all blocks as soon as their mean error rises, and keeps the last).

    Args:
        blocks: weights that share a scale, one block a row.
        scale: positive.
        zero: zero points to start from, on the grid.
        grid: an asymmetric one.
        rule: the solver's constants.

    Source: Badri & Shaji 2023, Half-Quadratic Quantization, https://mobiusml.github.io/hqq_blog/.
    """
    step = max(1, _TOGETHER // blocks.shape[1])
    parts = zip(torch.split(blocks, step), torch.split(scale, step), torch.split(zero, step), strict=True)
    codes, zeros = zip(*(_solve(*part, grid, rule) for part in parts), strict=True)
    return torch.cat(codes), torch.cat(zeros)


def _solve(
    blocks: Float[Tensor, "block size"],
    scale: Float[Tensor, "block 1"],
    zero: Float[Tensor, "block 1"],
    grid: Grid,
    rule: HalfQuadratic,
) -> tuple[Float[Tensor, "block size"], Float[Tensor, "block 1"]]:
    quotients = blocks / scale
    best, least = zero, torch.full_like(zero, torch.inf)
    penalty = rule.penalty
    for step in range(rule.steps + 1):
        codes = (quotients + zero).round_().clamp_(grid.low, grid.high)
        error = blocks - (codes - zero) * scale
        found = error.abs().pow_(rule.norm).sum(1, keepdim=True)
        better = found < least
        best, least = torch.where(better, zero, best), torch.where(better, found, least)
        if step < rule.steps:
            zero = (codes - (blocks - shrink(error, rule.norm, penalty)) / scale).mean(1, keepdim=True)
            penalty *= rule.growth
    return (quotients + best).round_().clamp_(grid.low, grid.high), best
