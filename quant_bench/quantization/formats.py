"""apply_formats: a model's products in floating-point formats."""

from torch import nn

from quant_bench.lowbit.formats import FormatLinear, FormatWeight
from quant_bench.model import LanguageModel, LinearSite
from quant_bench.numerics.formats import FormatName, OuterScale
from quant_bench.quantization.coverage import coverage_of, require_coverage
from quant_bench.quantization.keyvalue import key_value_notes, round_key_values
from quant_bench.quantization.linears import bias_of, replace_linears, weight_of


def apply_formats(
    model: LanguageModel, weights: FormatName, activations: FormatName | None, outer: OuterScale, kv_bits: int
) -> LanguageModel:
    """Put weights and inputs of every product of the layers into formats; head and embeddings stay in float.

    Args:
        model: given away.
        weights: their format.
        activations: the format of inputs; None leaves them in float.
        outer: whether the float32 scale of an input belongs to a token (`row`) or to the tensor at hand.
        kv_bits: integer bits of keys and values, 16 for float.

    Raises:
        QuantizationError: a product of the layers was not reached, or a weight is not finite.
    """

    def make(site: LinearSite, linear: nn.Module) -> nn.Module:
        return FormatLinear(FormatWeight.of(weight_of(linear), weights), bias_of(linear), activations, outer)

    model = replace_linears(model, make)
    if kv_bits < 16:
        round_key_values(model, kv_bits)
    model.execution = "simulated"
    model.token_independent = activations is None or outer == "row"
    model.coverage = coverage_of(model, key_value_notes(kv_bits))
    require_coverage(model, model.coverage)
    return model
