"""Round to nearest: every scheme that scales, zero points and rounding alone can express."""

from dataclasses import dataclass

from quant_bench.model import LanguageModel
from quant_bench.quantization import apply_scheme
from quant_bench.quantizer import Calibration, SchemeQuantizer


@dataclass(frozen=True)
class Rtn(SchemeQuantizer):
    """Rounds weights and activations to the nearest code.

    Source: Jacob et al. 2018, https://arxiv.org/abs/1712.05877 (affine codes, integer products); Bondarenko et al.
    2023, https://arxiv.org/abs/2306.12929 (scope `full` with static ranges); Zhao et al. 2024, Atom, section 4,
    https://arxiv.org/abs/2310.19102 (groups of weights and activations).
    """

    def quantize(self, model: LanguageModel, calibration: Calibration) -> LanguageModel:
        return apply_scheme(model, self, calibration)
