"""OmniQuant: clips of weights and factors between channels are learned, layer after layer, before rounding."""

from dataclasses import dataclass, replace
from typing import ClassVar

from quant_bench.errors import SpecError
from quant_bench.model import LanguageModel
from quant_bench.quantization import apply_scheme
from quant_bench.quantization.omniquant import OmniquantRule, omniquant
from quant_bench.quantizer import Calibration, SchemeQuantizer


@dataclass(frozen=True)
class Omniquant(SchemeQuantizer):
    """Trains clips and factors with AdamW against the output of each float layer, then rounds to nearest.

    Attributes:
        clip: learn the clip of each weight range; takes the place of `weight_range`.
        transform: learn the factors, from SmoothQuant's on.
        epochs: passes over the calibration sequences.
        alpha: of SmoothQuant's factors.
        clip_rate: learning rate of clips.
        transform_rate: learning rate of factors.

    Source: Shao et al. 2023, https://arxiv.org/abs/2308.13137 (its W4A4 has asymmetric weights and activations and 128
    sequences: `omniquant:w4a4-kv4(weight_symmetric=False,activation_symmetric=False,calibration_batches=16)`).
    """

    version: ClassVar[int] = 2

    clip: bool = True
    transform: bool = True
    epochs: int = 20
    alpha: float = 0.5
    clip_rate: float = 1e-2
    transform_rate: float = 5e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs < 0 or not 0.0 <= self.alpha <= 1.0 or min(self.clip_rate, self.transform_rate) < 0.0:
            raise SpecError("epochs and learning rates must not be negative, and alpha must lie in [0, 1]")

    @property
    def calibration_sequences(self) -> int:
        return 8 * self.calibration_batches

    def quantize(self, model: LanguageModel, calibration: Calibration) -> LanguageModel:
        rates = (self.clip_rate, self.transform_rate)
        rule = OmniquantRule(self.clip, self.transform, self.epochs, self.alpha, *rates)
        learned = omniquant(model, self, calibration, rule)
        model = apply_scheme(model, self, calibration, lambda site, linear: learned.codes[site.path])
        model.coverage = replace(model.coverage, notes=(*model.coverage.notes, *learned.notes))
        return model
