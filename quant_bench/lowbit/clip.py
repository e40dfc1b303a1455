"""The clip search: squared rounding errors of many candidate ranges, compiled, since it is 100 passes over a tensor."""

# numba infers the types of compiled loops at each call
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
import inspect

import numba
import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from quant_bench.lowbit.threads import compiled, shared
from quant_bench.numerics.integers import Grid, round_to_grid, scale_and_zero

# ranges tried, from the whole one down in equal steps
STEPS = 100
# a run of errors that is summed in float32 before it joins the float64 total
_RUN = 2048
# rounds a float32 half to even, as vector code
_ROUND = np.float32(12582912.0)


def _sum(errors):
    total = np.float32(0.0)
    for k in range(errors.shape[0]):
        total += errors[k]
    return total


# this one sum may be reordered: it decides between candidates, and which of two equal ones hardly matters
_sum = numba.njit(fastmath={"reassoc", "nsz"}, nogil=True)(inspect.unwrap(_sum))


@compiled
def _square_errors(values, scale, zero, lowest, highest, errors):
    for k in range(values.shape[0]):
        code = ((values[k] / scale + _ROUND) - _ROUND) + zero
        code = min(max(code, lowest), highest)
        error = (code - zero) * scale - values[k]
        errors[k] = error * error


@compiled
def _candidate_errors(start, stop, blocks, scales, zeros, lowest, highest, found):
    errors = np.empty(_RUN, np.float32)
    for candidate in range(start, stop):
        for block in range(blocks.shape[0]):
            total = 0.0
            for first in range(0, blocks.shape[1], _RUN):
                run = blocks[block, first : first + _RUN]
                part = errors[: run.shape[0]]
                _square_errors(run, scales[candidate, block], zeros[candidate, block], lowest, highest, part)
                total += np.float64(_sum(part))
            found[candidate, block] = total


def best_clip(
    blocks: Float[Tensor, "block size"], low: Float[Tensor, " block"], high: Float[Tensor, " block"], grid: Grid
) -> tuple[Float[Tensor, " block"], Float[Tensor, " block"]]:
    """Range of each block, shrunk by the ratio that minimizes the squared rounding error (the widest of equals).

    Source: Choukroun et al. 2019, section 3, https://arxiv.org/abs/1902.06822 (minimum mean squared error); the even
    grid of 100 candidates is that of Bondarenko et al. 2023, https://arxiv.org/abs/2306.12929.
    """
    ratios = 1 - torch.arange(STEPS, dtype=torch.float64, device=low.device) / STEPS
    ranges = [(low * float(ratio), high * float(ratio)) for ratio in ratios]
    scales, zeros = (torch.stack(part) for part in zip(*(scale_and_zero(*pair, grid) for pair in ranges), strict=True))
    if blocks.device.type == "cpu":
        found = np.empty((STEPS, len(blocks)), np.float64)
        values = blocks.contiguous().numpy()
        shared(
            _candidate_errors,
            STEPS,
            blocks.numel() * STEPS,
            values,
            scales.numpy(),
            zeros.float().numpy(),
            np.float32(grid.low),
            np.float32(grid.high),
            found,
        )
        errors: Float64[Tensor, "step block"] = torch.from_numpy(found)
    else:
        errors = torch.stack([_plain_errors(blocks, *pair, grid) for pair in zip(scales, zeros, strict=True)])
    # the first of equal minima is the widest range
    best = ratios.to(low.dtype)[errors.argmin(0)]
    return low * best, high * best


def _plain_errors(
    blocks: Float[Tensor, "block size"], scale: Float[Tensor, " block"], zero: Float[Tensor, " block"], grid: Grid
) -> Float64[Tensor, " block"]:
    """The same in plain torch, for other devices."""
    codes = round_to_grid(blocks, scale[:, None], zero[:, None], grid)
    return codes.sub_(zero[:, None]).mul_(scale[:, None]).sub_(blocks).square_().sum(-1, dtype=torch.float64)
