"""Softpick attention: rectified softmax, in which nothing has to be attended to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quant_bench.arm import Arm, Attended
from quant_bench.mechanisms import set_normalizer
from quant_bench.mechanisms.normalizers import softpick
from quant_bench.model import LanguageModel


@dataclass(frozen=True)
class Softpick(Arm):
    """relu(exp(s) - 1) / sum |exp(s) - 1|.

    Source: Zuhri et al. 2025, https://arxiv.org/abs/2504.20966.
    """

    def attach(self, model: LanguageModel) -> LanguageModel:
        return set_normalizer(model, lambda scores, null: softpick(scores))

    def normalize(self, a: Attended, scores: Tensor) -> Tensor:
        wide = scores.double()
        largest = wide.amax(-1, keepdim=True).clamp_min(0)
        raised = torch.exp(wide - largest) - torch.exp(-largest)
        raised = raised.masked_fill(scores == -torch.inf, 0.0)
        return (torch.relu(raised) / (raised.abs().sum(-1, keepdim=True) + 1e-6)).to(scores.dtype)
