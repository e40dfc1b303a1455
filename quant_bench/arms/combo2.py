"""Sink logit and projection gate together: abstention and noise filtering."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quant_bench.arm import Arm, Attended, Reads
from quant_bench.mechanisms import ProjectionGate, add_null, add_read_gate
from quant_bench.model import LanguageModel


@dataclass(frozen=True)
class Combo2(Arm):
    """exp(s_ij) / (exp(b_h) + sum_k exp(s_ik)) on reads gated by a direction; same as `sink_logit+projection_gate`.

    Source: arXiv 2609.22005, sink logit + projection gate.
    """

    def attach(self, model: LanguageModel) -> LanguageModel:
        return add_read_gate(add_null(model, learned=True), ProjectionGate)

    def normalize(self, a: Attended, scores: Tensor) -> Tensor:
        null = a.parameter("null.logit")[None, :, None, None].expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat((scores, null), -1), -1)[..., :-1]

    def gated_read(self, a: Attended) -> Reads:
        along = torch.einsum("bhkd,hd->bhk", a.value, a.parameter("gate.weight"))
        return a.value * torch.sigmoid(along + a.parameter("gate.bias")[:, None])[..., None]
