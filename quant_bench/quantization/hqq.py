"""Weights with real zero points, as HQQ chooses them."""

import torch
from jaxtyping import Float
from torch import Tensor

from quant_bench.lowbit.codes import WeightCodes, quantize_weight
from quant_bench.numerics.hqq import HalfQuadratic, real_zeros
from quant_bench.numerics.integers import Grid
from quant_bench.quantizer import SchemeQuantizer


def hqq_codes(weight: Float[Tensor, "row col"], scheme: SchemeQuantizer, rule: HalfQuadratic) -> WeightCodes:
    """Codes of a weight matrix with real zero points; scales are those of asymmetric rounding to nearest.

    Args:
        weight: finite weights.
        scheme: bits, granularity, range and group size.
        rule: the solver's constants.

    Raises:
        QuantizationError: a weight is not finite.
    """
    start = quantize_weight(
        weight,
        bits=scheme.weight_bits,
        granularity=scheme.weight_granularity,
        symmetric=False,
        search=scheme.weight_range,
        group_size=scheme.group_size,
    )
    grid = Grid(scheme.weight_bits, symmetric=False)
    assert start.zero_point is not None
    scale, zero = start.scale, (start.zero_point + grid.offset).float()
    values = weight.detach().float()
    shape = values.shape
    if scheme.weight_granularity == "tensor":
        values, scale, zero = values.reshape(1, -1), scale[:1], zero[:1]
    size = start.group_size or values.shape[1]
    whole = values.shape[1] // size * size
    codes, zeros = [], []
    # a shorter last group is solved on its own: filled up, zeros would count as weights
    for columns, groups, width in (
        (slice(0, whole), slice(0, whole // size), size),
        (slice(whole, None), slice(whole // size, None), values.shape[1] - whole),
    ):
        if width and scale[:, groups].numel():
            found, best = real_zeros(
                values[:, columns].reshape(-1, width),
                scale[:, groups].reshape(-1, 1),
                zero[:, groups].reshape(-1, 1),
                grid,
                rule,
            )
            codes.append(found.reshape(len(values), -1))
            zeros.append(best.reshape(len(values), -1))
    stored = torch.cat(codes, 1).reshape(shape).sub_(grid.offset).to(torch.int8)
    return WeightCodes(
        stored,
        start.scale,
        (torch.cat(zeros, 1) - grid.offset).expand(start.scale.shape),
        bits=scheme.weight_bits,
        group_size=start.group_size,
        granularity=scheme.weight_granularity,
    )
