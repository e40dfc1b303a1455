"""Clipped off-by-one softmax: attends to nothing, and reaches exact zeros."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quant_bench.arm import Arm, Attended
from quant_bench.errors import SpecError
from quant_bench.mechanisms import add_null, set_normalizer
from quant_bench.mechanisms.normalizers import safe_softmax, stretched
from quant_bench.model import LanguageModel


@dataclass(frozen=True)
class ClippedSoftmax1(Arm):
    """clip((zeta - gamma) softmax1(s) + gamma, 0, 1).

    Attributes:
        gamma: lower end of the stretch, at most 0.
        zeta: upper end, at least 1.

    Source: a variant in the code of OutEffHop, Hu et al. 2024, https://arxiv.org/abs/2404.03828.
    """

    gamma: float = -0.025
    zeta: float = 1.0

    def __post_init__(self) -> None:
        if self.gamma > 0 or self.zeta < 1:
            raise SpecError("clipped softmax needs gamma at most 0 and zeta at least 1")

    def attach(self, model: LanguageModel) -> LanguageModel:
        def weights(scores: Tensor, null: Tensor | None) -> Tensor:
            return stretched(safe_softmax(scores, null), self.gamma, self.zeta)

        return set_normalizer(add_null(model, learned=False), weights, null=True)

    def normalize(self, a: Attended, scores: Tensor) -> Tensor:
        weights = torch.softmax(functional.pad(scores, (0, 1)), -1)[..., :-1]
        return ((self.zeta - self.gamma) * weights + self.gamma).clamp(0, 1).masked_fill(scores == -torch.inf, 0.0)
