"""Floating-point formats of 4 and 8 bits: FP8, MXFP4 and NVFP4, simulated."""

from dataclasses import dataclass
from typing import Literal

from quant_bench.errors import NotApplicable, SpecError
from quant_bench.model import LanguageModel
from quant_bench.quantization.formats import apply_formats
from quant_bench.quantizer import Calibration, Quantizer


@dataclass(frozen=True)
class Fp(Quantizer):
    """Rounds weights and inputs of the layers' products to the nearest number of a floating-point format.

    Attributes:
        weights: format of weights.
        activations: format of inputs; `float` leaves them.
        activation_scale: whether the float32 scale of inputs (fp8, nvfp4) belongs to a token or to the tensor at hand.
        kv_bits: of the key/value cache, integers per token and head; 16 leaves it in float.
        execution: `simulated`; `integer` is not applicable.

    Source: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433 (FP8); OCP Microscaling Formats v1.0 (MXFP4);
    NVIDIA 2025, https://arxiv.org/abs/2509.25149 (NVFP4).
    """

    weights: Literal["fp8", "mxfp4", "nvfp4"] = "fp8"
    activations: Literal["fp8", "mxfp4", "nvfp4", "float"] = "fp8"
    activation_scale: Literal["token", "tensor"] = "token"
    kv_bits: int = 16
    execution: Literal["simulated", "integer"] = "simulated"

    def __post_init__(self) -> None:
        if self.kv_bits != 16 and not 2 <= self.kv_bits <= 8:
            raise SpecError(f"kv_bits must be 2 to 8, or 16 for float; got {self.kv_bits!r}")
        if self.activation_scale == "tensor" and self.activations in ("float", "mxfp4"):
            raise SpecError(f"activation_scale=tensor: activations={self.activations} have no float32 scale")

    def quantize(self, model: LanguageModel, calibration: Calibration) -> LanguageModel:
        if self.execution == "integer":
            raise NotApplicable(
                "elements of fp8, mxfp4 and nvfp4 are floating-point numbers: no integer product exists"
            )
        activations = None if self.activations == "float" else self.activations
        outer: Literal["row", "tensor"] = "row" if self.activation_scale == "token" else "tensor"
        return apply_formats(model, self.weights, activations, outer, self.kv_bits)
