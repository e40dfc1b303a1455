"""apply_scheme: the body that all recipes over integer codes share."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from quant_bench.calibrate import RangeRule, RangeWatch, static_ranges
from quant_bench.errors import NotApplicable
from quant_bench.lowbit.activation import ActivationRule
from quant_bench.lowbit.codes import WeightCodes, quantize_weight
from quant_bench.lowbit.linear import QuantLinear
from quant_bench.model import LanguageModel, LinearSite
from quant_bench.numerics.integers import Grid, scale_and_zero
from quant_bench.numerics.tails import Range
from quant_bench.quantization import full
from quant_bench.quantization.coverage import coverage_of, require_coverage
from quant_bench.quantization.fingerprint import fingerprint
from quant_bench.quantization.keyvalue import key_value_notes, round_key_values
from quant_bench.quantization.linears import RoundedLinear, bias_of, replace_linears, weight_of
from quant_bench.quantization.rounding import DynamicRounding, StaticRounding
from quant_bench.quantizer import Calibration, SchemeQuantizer

Weights = Callable[[LinearSite, nn.Module], WeightCodes]


def apply_scheme(
    model: LanguageModel, scheme: SchemeQuantizer, calibration: Calibration, weights: Weights | None = None
) -> LanguageModel:
    """Quantize a model as a scheme says; a recipe adds how weights become codes.

    Args:
        model: given away.
        scheme: what is rounded, how finely, over which range, and how it is executed.
        calibration: token batches, needed where ranges are static.
        weights: codes of a linear; None rounds each weight to the nearest.

    Raises:
        QuantizationError: a product of the layers was not reached, a value is not finite, calibration is missing.
        NotApplicable: integer execution of float weights was asked for.
    """
    if scheme.execution == "integer" and scheme.weight_bits == 16 and scheme.activation_bits < 16:
        raise NotApplicable("integer execution needs integer weights; weight_bits=16 leaves them in float")
    sites = full.full_sites(model) if scheme.scope == "full" else None
    ranges = _static_ranges(model, scheme, calibration, sites)
    rules = activation_rules(model, scheme, ranges)
    encode = weights or (lambda site, linear: nearest(weight_of(linear), scheme))

    def make(site: LinearSite, linear: nn.Module) -> nn.Module:
        rule = rules.get(site.path)
        if scheme.weight_bits < 16:
            return QuantLinear(encode(site, linear), bias_of(linear), rule, scheme.execution, site.path)
        if rule is None:
            return linear
        rounding = StaticRounding(ranges[f"{site.path}:input"], rule.grid) if rule.static else DynamicRounding(rule)
        text = f"W16 (float) x {rule.describe()}; float product: weights are not quantized"
        return RoundedLinear(linear, rounding, text)

    model = replace_linears(model, make)
    if sites is not None:
        full.round_full(model, scheme, sites, ranges)
    if scheme.kv_bits < 16:
        round_key_values(model, scheme.kv_bits)
    quantized = min(scheme.weight_bits, scheme.activation_bits, scheme.kv_bits) < 16
    model.execution = scheme.execution if quantized else "float"
    model.token_independent = all(rule.static or rule.granularity != "tensor" for rule in rules.values())
    model.coverage = coverage_of(model, _notes(scheme))
    if min(scheme.weight_bits, scheme.activation_bits) < 16:
        require_coverage(model, model.coverage)
    return model


def activation_rules(
    model: LanguageModel, scheme: SchemeQuantizer, ranges: dict[str, Range]
) -> dict[str, ActivationRule]:
    """How the input of each linear is rounded, by path; empty where activations stay in float.

    Args:
        model: for its layout.
        scheme: granularity and bits.
        ranges: static ranges, `path:input` for each linear; ignored by dynamic schemes.
    """
    if scheme.activation_bits == 16:
        return {}
    rules: dict[str, ActivationRule] = {}
    for site in model.layout.linears:
        scale = zero = None
        if scheme.activation_static:
            span = ranges[f"{site.path}:input"]
            grid = Grid(scheme.activation_bits, scheme.activation_symmetric)
            scale, zero = scale_and_zero(torch.tensor(span.low), torch.tensor(span.high), grid)
            scale, zero = scale.to(model.device), zero.to(model.device)
        rules[site.path] = ActivationRule(
            bits=scheme.activation_bits,
            granularity=scheme.activation_granularity,
            symmetric=scheme.activation_symmetric,
            group_size=scheme.group_size,
            scale=scale,
            zero_point=zero,
        )
    return rules


def _static_ranges(
    model: LanguageModel, scheme: SchemeQuantizer, calibration: Calibration, sites: full.FullSites | None
) -> dict[str, Range]:
    """Ranges of the float model over the scheme's calibration batches; empty for a dynamic scheme."""
    if not scheme.activation_static or scheme.activation_bits == 16:
        return {}

    def extra(watch: RangeWatch) -> None:
        if sites is not None:
            full.watch_full(watch, sites)

    rule = RangeRule(scheme.activation_range, scheme.percentile, scheme.momentum)
    batches = calibration.batches[: scheme.calibration_batches]
    weights = fingerprint(model)
    key = (weights, calibration.sha256, len(batches), rule, sites)
    if key in _ranges:
        return _ranges[key]
    inputs = [site.path for site in model.layout.linears]
    found = static_ranges(model, batches, rule, inputs=inputs, extra=extra)
    if weights is not None and calibration.sha256 is not None:
        # for the other executions of the scheme; older models do not come back
        if len(_ranges) >= _KEPT:
            _ranges.clear()
        _ranges[key] = found
    return found


_KEPT = 8
_ranges: dict[object, dict[str, Range]] = {}


def forget_ranges() -> None:
    """Drop the ranges that are kept for the next quantization of the same float model."""
    _ranges.clear()


def nearest(weight: Float[Tensor, "row col"], scheme: SchemeQuantizer, bits: int | None = None) -> WeightCodes:
    """Codes of a weight matrix by rounding to the nearest, over the scheme's range, in its bits or in others.

    Raises:
        QuantizationError: a weight is not finite.
    """
    return quantize_weight(
        weight,
        bits=scheme.weight_bits if bits is None else bits,
        granularity=scheme.weight_granularity,
        symmetric=scheme.weight_symmetric,
        search=scheme.weight_range,
        group_size=scheme.group_size,
    )


def _notes(scheme: SchemeQuantizer) -> tuple[str, ...]:
    notes = key_value_notes(scheme.kv_bits)
    # scope full rounds the products' operands itself
    return (full.ATTENTION_NOTE, full.SITES_NOTE, *notes[1:]) if scheme.scope == "full" else notes
