"""Sink logit and norm gate together: abstention and noise filtering."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quant_bench.arm import Arm, Attended, Reads
from quant_bench.mechanisms import NormGate, add_null, add_read_gate
from quant_bench.model import LanguageModel


@dataclass(frozen=True)
class Combo(Arm):
    """exp(s_ij) / (exp(b_h) + sum_k exp(s_ik)) on reads gated by their norm; the same as `sink_logit+norm_gate`.

    Source: arXiv 2609.22005, sink logit + norm gate.
    """

    def attach(self, model: LanguageModel) -> LanguageModel:
        return add_read_gate(add_null(model, learned=True), NormGate)

    def normalize(self, a: Attended, scores: Tensor) -> Tensor:
        null = a.parameter("null.logit")[None, :, None, None].expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat((scores, null), -1), -1)[..., :-1]

    def gated_read(self, a: Attended) -> Reads:
        size = a.value.square().mean(-1, keepdim=True).sqrt()
        return a.value * torch.sigmoid(8 * (size - a.parameter("gate.threshold")[:, None, None]))
