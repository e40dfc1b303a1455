"""What recipes are made of: replacing products, rounding activations, and the account of what was quantized."""

from quant_bench.quantization.coverage import coverage_of, require_coverage
from quant_bench.quantization.linears import bias_of, replace_linears, weight_of
from quant_bench.quantization.saturation import saturation_shares
from quant_bench.quantization.scheme import activation_rules, apply_scheme, nearest

__all__ = [
    "activation_rules",
    "apply_scheme",
    "bias_of",
    "coverage_of",
    "nearest",
    "replace_linears",
    "require_coverage",
    "saturation_shares",
    "weight_of",
]
