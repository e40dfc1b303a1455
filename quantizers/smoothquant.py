"""SmoothQuant: activation outliers are scaled into the weights before both are rounded."""

from dataclasses import dataclass
from typing import Literal

from quant_bench.errors import SpecError
from quant_bench.model import LanguageModel
from quant_bench.quantization import apply_scheme
from quant_bench.quantization.smoothing import smooth
from quant_bench.quantizer import Calibration, SchemeQuantizer


@dataclass(frozen=True)
class Smoothquant(SchemeQuantizer):
    """Divides each channel of an activation by max|X|^alpha / max|W|^(1-alpha) and multiplies the weights by it.

    Attributes:
        alpha: 0 leaves all difficulty in activations, 1 moves all of it into weights.
        search: choose alpha for each place (0 to 1 in tenths) by the error of its rounded products.
        places: `norms`: behind norms only, as published; `all`: also value -> output and up -> down where exact.

    Source: Xiao et al. 2023, https://arxiv.org/abs/2211.10438.
    """

    alpha: float = 0.5
    search: bool = False
    places: Literal["norms", "all"] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.alpha <= 1.0:
            raise SpecError(f"alpha must lie in [0, 1]; got {self.alpha!r}")

    @property
    def calibration_sequences(self) -> int:
        return 8 * self.calibration_batches

    def quantize(self, model: LanguageModel, calibration: Calibration) -> LanguageModel:
        smooth(model, self, calibration, None if self.search else self.alpha, self.places == "norms")
        return apply_scheme(model, self, calibration)
