"""Ternary weights: -1, 0 or 1 times a scale for each output channel."""

from dataclasses import dataclass

import torch
from torch import nn

from quant_bench.lowbit.codes import WeightCodes
from quant_bench.lowbit.linear import QuantLinear
from quant_bench.model import LanguageModel, LinearSite
from quant_bench.quantization import bias_of, coverage_of, replace_linears, weight_of
from quant_bench.quantizer import Calibration, Quantizer


@dataclass(frozen=True)
class Ternary(Quantizer):
    """Weights below `threshold` times their channel's mean magnitude become 0, the others ± one scale.

    Source: Li et al. 2016, Ternary weight networks, section 2.3, https://arxiv.org/abs/1605.04711.

    Attributes:
        threshold: 0.7 is the paper's.
    """

    threshold: float = 0.7

    def quantize(self, model: LanguageModel, calibration: Calibration) -> LanguageModel:
        def make(site: LinearSite, linear: nn.Module) -> nn.Module:
            weight = weight_of(linear).float()
            kept = weight.abs() > self.threshold * weight.abs().mean(1, keepdim=True)
            total = (weight.abs() * kept).sum(1, keepdim=True)
            scale = torch.where(total > 0, total / kept.sum(1, keepdim=True).clamp(min=1), 1.0)
            codes = WeightCodes((weight.sign() * kept).char(), scale, None, bits=2)
            return QuantLinear(codes, bias_of(linear), None, "simulated", site.path)

        model = replace_linears(model, make)
        model.execution = "simulated"
        model.coverage = coverage_of(model)
        return model
