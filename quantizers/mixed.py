"""Mixed precision: matrices that the model feels most get more bits, under a budget."""

from dataclasses import dataclass

from quant_bench.errors import SpecError
from quant_bench.model import LanguageModel
from quant_bench.quantization import apply_scheme
from quant_bench.quantization.mixed import MixedRule, apply_mixed
from quant_bench.quantization.sensitivity import widths_of
from quant_bench.quantizer import Calibration, SchemeQuantizer


@dataclass(frozen=True)
class Mixed(SchemeQuantizer):
    """Gives each matrix the bits with the least summed divergence from the float model, measured one by one.

    `weight_bits` is the budget: bits a weight on average.

    Attributes:
        budget: a fractional budget, between `weight_bits` and `weight_bits` + 1; None: `weight_bits`.
        choices: the bits that a matrix may get, a digit each, rising.
        sequences: calibration sequences that sensitivity is measured on.
        tokens: tokens of each.

    Source: Dong et al. 2019, HAWQ, https://arxiv.org/abs/1905.03696 (bits by measured sensitivity); Hubara et al. 2020,
    https://arxiv.org/abs/2006.10518, section 3.3 (summed single losses under a budget).
    """

    budget: float | None = None
    choices: int = 2348
    sequences: int = 4
    tokens: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        widths = self.rule.choices
        if min(self.sequences, self.tokens) < 1:
            raise SpecError("sequences and tokens must be at least 1")
        if self.budget is not None and not self.weight_bits < self.budget < self.weight_bits + 1:
            whole = int(self.budget)
            raise SpecError(f"budget={self.budget:g} goes with weight_bits={whole}: mixed:w{whole}a16(budget=…)")
        if self.rule.budget < min(widths):
            raise SpecError(f"a budget of {self.rule.budget:g} bits is below all choices: {widths}")

    @property
    def rule(self) -> MixedRule:
        budget = self.budget or float(self.weight_bits)
        return MixedRule(budget, widths_of(self.choices), self.sequences, self.tokens)

    @property
    def calibration_sequences(self) -> int:
        return max(super().calibration_sequences, self.sequences)

    def quantize(self, model: LanguageModel, calibration: Calibration) -> LanguageModel:
        if self.weight_bits == 16:
            return apply_scheme(model, self, calibration)
        return apply_mixed(model, self, calibration, self.rule)
