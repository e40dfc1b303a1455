"""AWQ: weights that meet large activations are rounded more finely, by scales and clips searched on calibration."""

from dataclasses import dataclass

from quant_bench.model import LanguageModel
from quant_bench.quantization import apply_scheme
from quant_bench.quantization.awq import awq_weights
from quant_bench.quantizer import Calibration, SchemeQuantizer


@dataclass(frozen=True)
class Awq(SchemeQuantizer):
    """Scales each input channel by mean|X|^ratio, and clips the range of each group of weights, both searched.

    Attributes:
        scales: search the scales.
        clip: search the clips (not of queries and keys); takes the place of `weight_range` there.

    Source: Lin et al. 2023, https://arxiv.org/abs/2306.00978.
    """

    scales: bool = True
    clip: bool = True

    @property
    def calibration_sequences(self) -> int:
        return 8 * self.calibration_batches

    def quantize(self, model: LanguageModel, calibration: Calibration) -> LanguageModel:
        if self.weight_bits == 16:
            return apply_scheme(model, self, calibration)
        weights = awq_weights(model, self, calibration, scales=self.scales, clip=self.clip)
        return apply_scheme(model, self, calibration, weights)
