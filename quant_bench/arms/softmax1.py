"""Off-by-one softmax: a query may attend to nothing."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quant_bench.arm import Arm, Attended
from quant_bench.mechanisms import add_null
from quant_bench.model import LanguageModel


@dataclass(frozen=True)
class Softmax1(Arm):
    """exp(s_ij) / (1 + sum_k exp(s_ik)): softmax with one more logit of 0 whose value is zero; no parameters.

    Source: the mechanism of OutEffHop, Hu et al. 2024, https://arxiv.org/abs/2404.03828.
    """

    def attach(self, model: LanguageModel) -> LanguageModel:
        return add_null(model, learned=False)

    def normalize(self, a: Attended, scores: Tensor) -> Tensor:
        return torch.softmax(functional.pad(scores, (0, 1)), -1)[..., :-1]
