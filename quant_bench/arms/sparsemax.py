"""Sparsemax attention: weights are the scores' projection onto the simplex, most of them exact zeros."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quant_bench.arm import Arm, Attended
from quant_bench.mechanisms import set_normalizer
from quant_bench.mechanisms.normalizers import sparsemax
from quant_bench.model import LanguageModel


@dataclass(frozen=True)
class Sparsemax(Arm):
    """relu(s - tau) with tau such that a row sums to 1.

    Source: Martins and Astudillo 2016, https://arxiv.org/abs/1602.02068.
    """

    def attach(self, model: LanguageModel) -> LanguageModel:
        return set_normalizer(model, lambda scores, null: sparsemax(scores))

    def normalize(self, a: Attended, scores: Tensor) -> Tensor:
        # tau lies between the largest score minus 1 and the largest score: halved until it is exact
        high = scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        low = high - 1
        for _ in range(60):
            tau = (low + high) / 2
            too_low = torch.relu(scores - tau).sum(-1, keepdim=True) > 1
            low, high = torch.where(too_low, tau, low), torch.where(too_low, high, tau)
        # a step of Newton's method changes nothing but gives tau its gradient
        tau = ((low + high) / 2).detach()
        above = torch.relu(scores - tau)
        step = (above.sum(-1, keepdim=True) - 1) / (above > 0).sum(-1, keepdim=True).clamp_min(1)
        return torch.relu(scores - tau - step)
