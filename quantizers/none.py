"""The model as it is: the float cell that every other cell is compared with."""

from dataclasses import dataclass

from quant_bench.model import LanguageModel
from quant_bench.quantization import coverage_of
from quant_bench.quantizer import Calibration, Quantizer


@dataclass(frozen=True)
class None_(Quantizer):
    """Leaves the model in float.

    Source: no method; the reference of every comparison.
    """

    def quantize(self, model: LanguageModel, calibration: Calibration) -> LanguageModel:
        model.coverage = coverage_of(model)
        return model
