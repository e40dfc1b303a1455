"""optimum-quanto: another library's codes, ranges and execution, as its users run it."""

from dataclasses import dataclass

from quant_bench.errors import SpecError
from quant_bench.model import LanguageModel
from quant_bench.quantization.engines import QuantoActivations, QuantoWeights, quanto_linears
from quant_bench.quantizer import Calibration, Quantizer


@dataclass(frozen=True)
class Quanto(Quantizer):
    """Products executed by optimum-quanto: no integer or simulated twin, and no parity.

    Attributes:
        weights: quanto's type of weights, one scale for each output channel (4 and 2 bits: also groups).
        activations: quanto's type of inputs, one static scale a tensor; `none` leaves them in float.
        calibration_batches: for those scales.

    Source: https://github.com/huggingface/optimum-quanto.
    """

    weights: QuantoWeights = "qint8"
    activations: QuantoActivations = "qint8"
    calibration_batches: int = 4

    def __post_init__(self) -> None:
        if self.calibration_batches < 1:
            raise SpecError("calibration_batches must be at least 1")

    @property
    def calibration_sequences(self) -> int:
        return 0 if self.activations == "none" else 8 * self.calibration_batches

    def quantize(self, model: LanguageModel, calibration: Calibration) -> LanguageModel:
        return quanto_linears(model, tuple(calibration.batches), self.weights, self.activations)
