"""HQQ: zero points of weights are real numbers, chosen without data for few large errors."""

from dataclasses import dataclass

from torch import nn

from quant_bench.errors import SpecError
from quant_bench.lowbit.codes import WeightCodes
from quant_bench.model import LanguageModel, LinearSite
from quant_bench.numerics.hqq import HalfQuadratic
from quant_bench.quantization import apply_scheme, weight_of
from quant_bench.quantization.hqq import hqq_codes
from quant_bench.quantizer import Calibration, SchemeQuantizer


@dataclass(frozen=True)
class Hqq(SchemeQuantizer):
    """Weights have real zero points by half-quadratic splitting; activations are rounded to nearest.

    Weights always have zero points, so `weight_symmetric` stays as it is (embeddings under scope `full` have none).

    Attributes:
        norm: p of the error norm that zero points minimize, above 0 and below 1 or 1 itself.
        steps: updates of the zero points; each range keeps its best.

    Source: Badri & Shaji 2023, https://mobiusml.github.io/hqq_blog/ (p = 0.7 and 20 steps as published; every range
    contains 0, as all ranges of the suite do).
    """

    norm: float = 0.7
    steps: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.norm <= 1.0 or self.steps < 0:
            raise SpecError(f"norm must lie in (0, 1] and steps be at least 0; got {self.norm!r} and {self.steps!r}")
        if not self.weight_symmetric:
            raise SpecError("weights of hqq always have zero points: drop weight_symmetric")

    def quantize(self, model: LanguageModel, calibration: Calibration) -> LanguageModel:
        def weights(site: LinearSite, linear: nn.Module) -> WeightCodes:
            return hqq_codes(weight_of(linear), self, HalfQuadratic(self.norm, steps=self.steps))

        return apply_scheme(model, self, calibration, weights)
