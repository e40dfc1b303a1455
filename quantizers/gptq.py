"""GPTQ: weights are rounded column by column, and the columns to come make up for the error."""

from dataclasses import dataclass

from quant_bench.errors import SpecError
from quant_bench.model import LanguageModel
from quant_bench.quantization import apply_scheme
from quant_bench.quantization.sequential import GptqRule, gptq_weights
from quant_bench.quantizer import Calibration, SchemeQuantizer


@dataclass(frozen=True)
class Gptq(SchemeQuantizer):
    """Rounds weights so that the products with calibration inputs keep their values, layer after layer.

    Attributes:
        act_order: round columns in falling order of their inputs' second moment; groups stay neighbours.
        damping: share of the mean second moment that is added to each; more where Cholesky fails.

    Source: Frantar et al. 2022, https://arxiv.org/abs/2210.17323.
    """

    act_order: bool = False
    damping: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.damping < 1.0:
            raise SpecError(f"damping must lie in [0, 1); got {self.damping!r}")

    @property
    def calibration_sequences(self) -> int:
        return 8 * self.calibration_batches

    def quantize(self, model: LanguageModel, calibration: Calibration) -> LanguageModel:
        if self.weight_bits == 16:
            return apply_scheme(model, self, calibration)
        weights = gptq_weights(model, self, calibration, GptqRule(self.act_order, self.damping))
        return apply_scheme(model, self, calibration, weights)
