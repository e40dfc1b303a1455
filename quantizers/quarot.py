"""QuaRot: Hadamard rotations spread outliers over all channels before anything is rounded."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from quant_bench.model import LanguageModel
from quant_bench.quantization import apply_scheme
from quant_bench.quantization.rotation import Rotation, rotate
from quant_bench.quantization.sequential import GptqRule, gptq_weights
from quant_bench.quantizer import Calibration, SchemeQuantizer


@dataclass(frozen=True)
class Quarot(SchemeQuantizer):
    """Rotates the float model, whose logits stay equal, and rounds the rotated one.

    Attributes:
        weights: rounded to nearest, or by GPTQ on the rotated model, layer after layer.
        residual: rotate the residual stream (folded into weights; the head is untied).
        heads: rotate value heads (folded) and mix them before the output projection (online).
        down: transform the down projection's input (online).
        keys: transform queries and keys (online), where keys are rounded.
        seed: of the residual rotation's signs.

    Source: Ashkboos et al. 2024, https://arxiv.org/abs/2404.00456. Without its clip ratios (0.9 for activations);
    `weight_range=mse` searches those of weights.
    """

    weights: Literal["rtn", "gptq"] = "rtn"
    residual: bool = True
    heads: bool = True
    down: bool = True
    keys: bool = True
    seed: int = 0
    version: ClassVar[int] = 2
    keeps_embeddings: ClassVar[bool] = False

    @property
    def calibration_sequences(self) -> int:
        return 8 * self.calibration_batches if self.weights == "gptq" else super().calibration_sequences

    def quantize(self, model: LanguageModel, calibration: Calibration) -> LanguageModel:
        keys = self.keys and self.kv_bits < 16
        model, notes = rotate(model, Rotation(self.residual, self.heads, self.down, keys, self.seed))
        codes = None
        if self.weights == "gptq" and self.weight_bits < 16:
            codes = gptq_weights(model, self, calibration, GptqRule())
        model = apply_scheme(model, self, calibration, codes)
        model.coverage = replace(model.coverage, notes=(*model.coverage.notes, *notes))
        return model
