"""SmoothQuant: outliers of activations move into weights, by a factor a channel."""

import torch
from jaxtyping import Float
from torch import Tensor

from quant_bench.lowbit.activation import ActivationRule, fake_quantize
from quant_bench.lowbit.codes import quantize_weight
from quant_bench.model import LanguageModel
from quant_bench.quantization.float_pass import float_moments
from quant_bench.quantization.folding import Fold, fold, folds_of
from quant_bench.quantization.linears import weight_of
from quant_bench.quantization.moments import Moments
from quant_bench.quantizer import Calibration, SchemeQuantizer

# strengths that a search tries, and tokens of each batch that it measures them on
ALPHAS = tuple(step / 10 for step in range(11))
_ROWS = 128
# factors stay within this, so that a channel that is nearly never used does not overflow
_SMALLEST = 1e-4


def smooth(
    model: LanguageModel, scheme: SchemeQuantizer, calibration: Calibration, alpha: float | None, norms_only: bool
) -> dict[str, float]:
    """Move scales from activations into weights, layer by layer; the float model computes the same.

    Args:
        model: changed in place.
        scheme: bits and granularity, for the search.
        calibration: token batches.
        alpha: share of the difficulty that goes into weights; None searches it for each place.
        norms_only: leave value -> output and up -> down alone, as the paper does.

    Returns:
        Producer's path -> the strength used.

    Raises:
        QuantizationError: no calibration batches, or inputs that are not finite.
    """
    used: dict[str, float] = {}
    for layer, moments in enumerate(float_moments(model, calibration, rows=_ROWS if alpha is None else 0)):
        for place in folds_of(model, layer):
            if norms_only and place.kind != "norm":
                continue
            inputs = moments[place.consumers[0].path]
            chosen = alpha if alpha is not None else best_alpha(model, place, inputs, scheme)
            fold(model, place, smoothing_scale(model, place, inputs, chosen))
            used[place.producer] = chosen
    return used


def smoothing_scale(model: LanguageModel, place: Fold, inputs: Moments, alpha: float) -> Float[Tensor, " channel"]:
    """max|X_j|^alpha / max|W_j|^(1 - alpha) for each channel j, 1 where either is 0.

    Source: Xiao et al. 2023, equation 4, https://arxiv.org/abs/2211.10438.
    """
    weights = torch.stack([weight_of(model.module.get_submodule(s.path)).abs().amax(0) for s in place.consumers])
    activation, weight = place.gather(inputs.largest), place.gather(weights.float().amax(0))
    scale = activation**alpha / weight ** (1.0 - alpha)
    usable = (activation > 0) & (weight > 0)
    return torch.where(usable, scale, 1.0).clamp_(_SMALLEST, 1.0 / _SMALLEST)


def best_alpha(model: LanguageModel, place: Fold, inputs: Moments, scheme: SchemeQuantizer) -> float:
    """The strength with the least squared error of the products that read this place; the smallest of equals.

    Both operands are rounded as the scheme says, over the extremes of the kept tokens (ranges of a static scheme are
    measured later, on the smoothed model).
    """
    errors = [
        sum(
            product_error(
                weight_of(model.module.get_submodule(site.path)).float(),
                inputs.rows,
                place.spread(smoothing_scale(model, place, inputs, alpha)),
                scheme,
            )
            for site in place.consumers
        )
        for alpha in ALPHAS
    ]
    return ALPHAS[errors.index(min(errors))]


def product_error(
    weight: Float[Tensor, "row col"],
    rows: Float[Tensor, "token col"],
    scale: Float[Tensor, " col"],
    scheme: SchemeQuantizer,
) -> float:
    """Squared error of x Wᵀ when x / scale and W · scale are rounded as a scheme says (weights by min-max)."""
    x, w = rows / scale, weight * scale
    if scheme.activation_bits < 16:
        rule = ActivationRule(
            scheme.activation_bits, scheme.activation_granularity, scheme.activation_symmetric, scheme.group_size
        )
        x = fake_quantize(x, rule)
    if scheme.weight_bits < 16:
        codes = quantize_weight(
            w,
            bits=scheme.weight_bits,
            granularity=scheme.weight_granularity,
            symmetric=scheme.weight_symmetric,
            group_size=scheme.group_size,
        )
        w = codes.dequantize()
    return float((x @ w.T - rows @ weight.T).square().sum(dtype=torch.float64))
