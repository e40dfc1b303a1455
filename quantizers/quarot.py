"""QuaRot: Hadamard rotations spread outliers over all channels before anything is rounded."""

from dataclasses import dataclass, replace
from typing import ClassVar

from quant_bench.model import LanguageModel
from quant_bench.quantization import apply_scheme
from quant_bench.quantization.rotation import Rotation, rotate
from quant_bench.quantizer import Calibration, SchemeQuantizer


@dataclass(frozen=True)
class Quarot(SchemeQuantizer):
    """Rotates the float model, whose logits stay equal, and rounds the rotated one to nearest.

    Attributes:
        residual: rotate the residual stream (folded into weights; the head is untied).
        heads: rotate value heads (folded) and mix them before the output projection (online).
        down: transform the down projection's input (online).
        seed: of the residual rotation's signs.

    Source: Ashkboos et al. 2024, https://arxiv.org/abs/2404.00456, with weights rounded to nearest. Without its clip
    ratios (0.9 for activations) and without rotated keys, which matter for a 4-bit key cache only.
    """

    residual: bool = True
    heads: bool = True
    down: bool = True
    seed: int = 0
    keeps_embeddings: ClassVar[bool] = False

    def quantize(self, model: LanguageModel, calibration: Calibration) -> LanguageModel:
        model, notes = rotate(model, Rotation(self.residual, self.heads, self.down, self.seed))
        # the seam for other weights: a function from a site and its rotated linear to codes, as apply_scheme takes it
        model = apply_scheme(model, self, calibration)
        model.coverage = replace(model.coverage, notes=(*model.coverage.notes, *notes))
        return model
