"""Sigmoid attention: every key is judged alone, a row of weights sums to anything."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quant_bench.arm import Arm, Attended
from quant_bench.mechanisms import set_normalizer
from quant_bench.model import LanguageModel


@dataclass(frozen=True)
class SigmoidAttention(Arm):
    """sigmoid(s_ij - log n), n the model's longest context.

    Source: Ramapuram et al. 2024, https://arxiv.org/abs/2409.04431.
    """

    def attach(self, model: LanguageModel) -> LanguageModel:
        shift = math.log(model.max_length)
        return set_normalizer(model, lambda scores, null: torch.sigmoid(scores - shift))

    def normalize(self, a: Attended, scores: Tensor) -> Tensor:
        return 1 / (1 + a.length * torch.exp(-scores))
