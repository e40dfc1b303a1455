"""LLM.int8(): columns with outliers are multiplied in float, all others in integers."""

from dataclasses import dataclass

from torch import Tensor, nn

from quant_bench.errors import NotApplicable, SpecError
from quant_bench.lowbit.codes import WeightCodes
from quant_bench.model import LanguageModel, LinearSite
from quant_bench.quantization import apply_scheme, nearest, weight_of
from quant_bench.quantization.outlier_columns import keep_outliers
from quant_bench.quantizer import Calibration, SchemeQuantizer


@dataclass(frozen=True)
class LlmInt8(SchemeQuantizer):
    """Rounds to nearest, but keeps input columns with a large entry, and their weights, in float.

    Attributes:
        threshold: absolute value from which an entry makes its column an outlier.

    Source: Dettmers et al. 2022, https://arxiv.org/abs/2208.07339, section 3.2 (float weights of outlier columns as in
    the paper; bitsandbytes takes them from the codes).
    """

    threshold: float = 6.0

    def quantize(self, model: LanguageModel, calibration: Calibration) -> LanguageModel:
        if self.threshold < 0.0:
            raise SpecError(f"threshold must not be negative; got {self.threshold!r}")
        if self.scope == "full":
            raise NotApplicable("llm_int8 splits products, and scope=full would round the halves before they are added")
        if self.weight_bits == 16 and self.activation_bits < 16:
            raise NotApplicable("llm_int8 keeps outlier columns beside integer weights, and weight_bits=16 has none")
        kept: dict[str, Tensor] = {}

        def weights(site: LinearSite, linear: nn.Module) -> WeightCodes:
            weight = kept[site.path] = weight_of(linear)
            return nearest(weight, self)

        model = apply_scheme(model, self, calibration, weights)
        return keep_outliers(model, kept, self.threshold) if self.weight_bits < 16 else model
