"""Weights that are decided from their inputs: one decoder layer after the other, each after what came before it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from quant_bench.errors import QuantizationError
from quant_bench.lowbit.clip import best_clip
from quant_bench.lowbit.codes import WeightCodes
from quant_bench.model import LanguageModel, LinearSite
from quant_bench.numerics.gptq import gptq_codes
from quant_bench.numerics.integers import Grid, scale_and_zero
from quant_bench.quantization.layerwise import LayerStream
from quant_bench.quantization.linears import weight_of
from quant_bench.quantization.moments import layer_moments
from quant_bench.quantizer import Calibration, SchemeQuantizer

Encode = Callable[[nn.Module, Tensor], WeightCodes]


@dataclass(frozen=True)
class GptqRule:
    """How GPTQ rounds.

    Attributes:
        act_order: columns in falling order of their second moment.
        damping: share of the mean of the diagonal that is added to it.
    """

    act_order: bool = False
    damping: float = 0.01


def gptq_weights(
    model: LanguageModel, scheme: SchemeQuantizer, calibration: Calibration, rule: GptqRule
) -> Callable[[LinearSite, nn.Module], WeightCodes]:
    """Codes of every linear by GPTQ, for `apply_scheme`; the model's float weights become what the codes stand for.

    A layer's second moments are those of inputs that come through the rounded weights of all layers before it, with
    activations in float.

    Args:
        model: changed in place.
        scheme: bits, granularity and range of weights.
        calibration: token batches.
        rule: how to round.

    Raises:
        QuantizationError: no calibration, or second moments that damping does not repair (with the linear's path).
    """

    def encode(linear: nn.Module, second: Tensor) -> WeightCodes:
        return gptq_encode(weight_of(linear), second, scheme, rule)

    codes = sequential_codes(model, calibration, encode)
    return lambda site, linear: codes[site.path]


def sequential_codes(model: LanguageModel, calibration: Calibration, encode: Encode) -> dict[str, WeightCodes]:
    """Codes of every linear from its second moments, layer by layer; rounded weights take the place of float ones.

    Args:
        model: changed in place.
        calibration: token batches.
        encode: linear and second moments of its input -> codes.

    Raises:
        QuantizationError: what `encode` raises of this kind, with the path in front; or there are no batches.
    """
    found: dict[str, WeightCodes] = {}
    with LayerStream(model, calibration) as stream:
        for layer in range(len(model.layout.layers)):
            moments = layer_moments(model, stream, second=True)
            for path in [site.path for site in model.layout.linears if site.layer == layer]:
                linear, second = model.module.get_submodule(path), moments[path].second
                assert second is not None
                try:
                    found[path] = encode(linear, second)
                except QuantizationError as error:
                    raise QuantizationError(f"{path}: {error}") from error
                weight_of(linear).copy_(found[path].dequantize())
            stream.advance()
    return found


def gptq_encode(
    weight: Float[Tensor, "row col"], second: Float[Tensor, "col col"], scheme: SchemeQuantizer, rule: GptqRule
) -> WeightCodes:
    """Codes of one weight matrix by GPTQ.

    Raises:
        QuantizationError: a weight is not finite, or the second moments are not positive definite.
    """
    if not bool(weight.isfinite().all()):
        raise QuantizationError("a weight is not finite: no range covers it")
    grid = Grid(scheme.weight_bits, scheme.weight_symmetric)
    group = scheme.group_size if scheme.weight_granularity == "group" else None

    def find(rows: Tensor) -> tuple[Tensor, Tensor]:
        count = len(rows)
        if scheme.weight_granularity == "tensor":
            rows = rows.reshape(1, -1)
        low, high = rows.amin(1), rows.amax(1)
        if scheme.weight_range == "mse":
            low, high = best_clip(rows.contiguous(), low, high, grid)
        scale, zero = scale_and_zero(low, high, grid)
        return scale.expand(count), zero.expand(count)

    codes, scale, zero = gptq_codes(
        weight, second, grid, find, group=group, act_order=rule.act_order, damping=rule.damping
    )
    return WeightCodes(
        (codes - grid.offset).to(torch.int8),
        scale,
        None if scheme.weight_symmetric else zero - grid.offset,
        bits=scheme.weight_bits,
        group_size=group,
        granularity=scheme.weight_granularity,
    )
