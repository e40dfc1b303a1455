"""Sink logit: each head learns how readily it attends to nothing."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quant_bench.arm import Arm, Attended
from quant_bench.mechanisms import add_null
from quant_bench.model import LanguageModel


@dataclass(frozen=True)
class SinkLogit(Arm):
    """exp(s_ij) / (exp(b_h) + sum_k exp(s_ik)), b_h learned for each head from 0 (where it equals `softmax1`).

    Source: arXiv 2609.22005, sink logit; gpt-oss, https://arxiv.org/abs/2508.10925.
    """

    def attach(self, model: LanguageModel) -> LanguageModel:
        return add_null(model, learned=True)

    def normalize(self, a: Attended, scores: Tensor) -> Tensor:
        null = a.parameter("null.logit")[None, :, None, None].expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat((scores, null), -1), -1)[..., :-1]
