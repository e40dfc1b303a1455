"""1.5-entmax attention: sparse like sparsemax, smooth like softmax."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quant_bench.arm import Arm, Attended
from quant_bench.mechanisms import set_normalizer
from quant_bench.mechanisms.normalizers import entmax15
from quant_bench.model import LanguageModel


@dataclass(frozen=True)
class Entmax15(Arm):
    """relu(s/2 - tau)^2 with tau such that a row sums to 1.

    Source: Peters, Niculae and Martins 2019, https://arxiv.org/abs/1905.05702.
    """

    def attach(self, model: LanguageModel) -> LanguageModel:
        return set_normalizer(model, lambda scores, null: entmax15(scores))

    def normalize(self, a: Attended, scores: Tensor) -> Tensor:
        # tau lies between half the largest score minus 1 and half the largest score: halved until it is exact
        high = scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0) / 2
        low = high - 1
        for _ in range(60):
            tau = (low + high) / 2
            too_low = torch.relu(scores / 2 - tau).square().sum(-1, keepdim=True) > 1
            low, high = torch.where(too_low, tau, low), torch.where(too_low, high, tau)
        # a step of Newton's method changes nothing but gives tau its gradient
        tau = ((low + high) / 2).detach()
        above = torch.relu(scores / 2 - tau)
        slope = 2 * above.detach().sum(-1, keepdim=True)
        step = (above.square().sum(-1, keepdim=True) - 1) / torch.where(slope > 0, slope, 1.0)
        return torch.relu(scores / 2 - tau - step).square()
