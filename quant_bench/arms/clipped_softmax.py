"""Clipped softmax: probabilities stretched and clipped, so that a head can reach exact zeros with finite scores."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quant_bench.arm import Arm, Attended
from quant_bench.errors import SpecError
from quant_bench.mechanisms import set_normalizer
from quant_bench.mechanisms.normalizers import safe_softmax, stretched
from quant_bench.model import LanguageModel


@dataclass(frozen=True)
class ClippedSoftmax(Arm):
    """clip((zeta - gamma) softmax(s) + gamma, 0, 1); rows need not sum to 1.

    Attributes:
        gamma: lower end of the stretch, at most 0; the paper's value for BERT.
        zeta: upper end, at least 1.
        alpha: where given, gamma is -alpha / (longest context); the paper's OPT has 12.

    Source: Bondarenko et al. 2023, equation 4, https://arxiv.org/abs/2306.12929.
    """

    gamma: float = -0.025
    zeta: float = 1.0
    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.gamma > 0 or self.zeta < 1 or (self.alpha is not None and self.alpha < 0):
            raise SpecError("clipped softmax needs gamma at most 0, zeta at least 1, alpha (if given) at least 0")

    def lower_end(self, length: int) -> float:
        """Gamma in force for a longest context of `length` tokens."""
        return self.gamma if self.alpha is None else -self.alpha / length

    def attach(self, model: LanguageModel) -> LanguageModel:
        gamma = self.lower_end(model.max_length)
        return set_normalizer(model, lambda scores, null: stretched(safe_softmax(scores), gamma, self.zeta))

    def normalize(self, a: Attended, scores: Tensor) -> Tensor:
        gamma = self.lower_end(a.length)
        weights = (self.zeta - gamma) * torch.softmax(scores, -1).nan_to_num(0.0) + gamma
        return weights.clamp(0, 1).masked_fill(scores == -torch.inf, 0.0)
