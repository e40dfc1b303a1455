"""AWQ: scales and clips of weights, searched for by the error of products with the inputs seen in calibration."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from quant_bench.errors import QuantizationError
from quant_bench.lowbit.codes import WeightCodes
from quant_bench.model import LanguageModel, LinearSite
from quant_bench.numerics.integers import Grid, round_to_grid, scale_and_zero
from quant_bench.quantization.float_pass import float_moments
from quant_bench.quantization.folding import Fold, fold, folds_of
from quant_bench.quantization.linears import weight_of
from quant_bench.quantization.moments import Moments
from quant_bench.quantization.scheme import nearest
from quant_bench.quantizer import Calibration, SchemeQuantizer

# of the published code: exponents 0 to 0.95, and clips down to 0.55 of the range, in steps of a twentieth
RATIOS = tuple(step / 20 for step in range(20))
CLIPS = tuple(1 - step / 20 for step in range(10))
# clipped queries and keys change scores more than their own error says
_UNCLIPPED = ("query", "key", "query_key_value")
_SMALLEST = 1e-4


def awq_weights(
    model: LanguageModel, scheme: SchemeQuantizer, calibration: Calibration, *, scales: bool, clip: bool
) -> Callable[[LinearSite, nn.Module], WeightCodes]:
    """Fold the best scales into the model, which computes the same, and choose the codes of every linear.

    Both searches go by the second moments of the float model's inputs, so they weigh every calibration token. They
    look at the rounding of weights alone. The published code measures the output of the whole block that reads an
    input, and clips on a sample of tokens; ours measures the products themselves.

    Args:
        model: changed in place.
        scheme: how weights are rounded.
        calibration: token batches.
        scales: whether scales are searched.
        clip: whether clips are; else the scheme's own range counts.

    Raises:
        QuantizationError: no calibration batches, or a value that is not finite.

    Source: Lin et al. 2023, section 3.2 and its code (auto_scale, auto_clip), https://arxiv.org/abs/2306.00978.
    """
    codes: dict[str, WeightCodes] = {}
    for layer, moments in enumerate(float_moments(model, calibration, second=True)):
        for place in folds_of(model, layer) if scales else ():
            inputs = moments[place.consumers[0].path]
            scale = best_scale(model, place, inputs, scheme)
            fold(model, place, scale)
            scaled = inputs.divided(place.spread(scale))
            moments |= {site.path: scaled for site in place.consumers}
        for site in (site for site in model.layout.linears if site.layer == layer):
            weight, second = weight_of(model.module.get_submodule(site.path)), moments[site.path].second
            assert second is not None
            if not bool(weight.isfinite().all()):
                raise QuantizationError(f"{site.path}: a weight is not finite: no range covers it")
            searched = clip and site.role not in _UNCLIPPED
            codes[site.path] = clipped_codes(weight, second, scheme) if searched else nearest(weight, scheme)
    return lambda site, linear: codes[site.path]


def best_scale(
    model: LanguageModel, place: Fold, inputs: Moments, scheme: SchemeQuantizer
) -> Float[Tensor, " channel"]:
    """mean|X_j|^ratio, centred between its extremes, with the ratio of least squared error of the products."""
    weights = [weight_of(model.module.get_submodule(site.path)).float() for site in place.consumers]
    size = place.gather(inputs.mean).clamp(min=_SMALLEST)
    assert inputs.second is not None
    best, least = torch.ones_like(size), float("inf")
    for ratio in RATIOS:
        scale = size**ratio
        scale = scale / (scale.amax() * scale.amin()).sqrt()
        columns, error = place.spread(scale), 0.0
        for weight in weights:
            left = nearest(weight * columns, scheme).dequantize() / columns - weight
            error += float((left @ inputs.second * left).sum(dtype=torch.float64))
        if error < least:
            best, least = scale, error
    return best


def clipped_codes(
    weight: Float[Tensor, "row col"], second: Float[Tensor, "col col"], scheme: SchemeQuantizer
) -> WeightCodes:
    """Round to nearest in ranges that are each clipped by the ratio of least squared error of the products.

    Products of one group's columns are weighed on their own, as published: sum over tokens of (x_g · error_g)².
    """
    rows, columns = weight.shape
    grid = Grid(scheme.weight_bits, scheme.weight_symmetric)
    group = scheme.group_size if scheme.weight_granularity == "group" else None
    size = group or columns
    missing = -columns % size
    blocks = functional.pad(weight.float(), (0, missing)).view(rows, -1, size)
    count = blocks.shape[1]
    padded = functional.pad(second.float(), (0, missing, 0, missing)).view(count, size, count, size)
    inside = padded[torch.arange(count), :, torch.arange(count)]
    low, high = blocks.amin(-1), blocks.amax(-1)
    if scheme.weight_granularity == "tensor":
        low, high = low.amin().expand_as(low), high.amax().expand_as(high)
    best = torch.ones_like(low)
    least = torch.full_like(low, torch.inf)
    for ratio in CLIPS:
        scale, zero = scale_and_zero(low * ratio, high * ratio, grid)
        codes = round_to_grid(blocks, scale[..., None], zero[..., None], grid)
        left = ((codes - zero[..., None]) * scale[..., None] - blocks).transpose(0, 1)
        error = (left @ inside * left).sum(-1).T
        if scheme.weight_granularity == "tensor":
            error = error.sum().expand_as(error)
        better = error < least
        best, least = torch.where(better, ratio, best), torch.where(better, error, least)
    scale, zero = scale_and_zero(low * best, high * best, grid)
    codes = round_to_grid(blocks, scale[..., None], zero[..., None], grid).sub_(grid.offset).to(torch.int8)
    return WeightCodes(
        codes.reshape(rows, -1)[:, :columns].contiguous(),
        scale.contiguous(),
        None if scheme.weight_symmetric else zero - grid.offset,
        bits=scheme.weight_bits,
        group_size=group,
        granularity=scheme.weight_granularity,
    )
