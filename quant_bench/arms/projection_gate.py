"""Projection gate: reads pass by their component along a learned direction."""

from dataclasses import dataclass

import torch

from quant_bench.arm import Arm, Attended, Reads
from quant_bench.mechanisms import ProjectionGate as Gate
from quant_bench.mechanisms import add_read_gate
from quant_bench.model import LanguageModel


@dataclass(frozen=True)
class ProjectionGate(Arm):
    """sum_j alpha_ij g_j v_j with g_j = sigmoid(w_h·v_j + b_h), w_h learned from 0 and b_h from 4.

    Source: arXiv 2609.22005, projection gate.
    """

    def attach(self, model: LanguageModel) -> LanguageModel:
        return add_read_gate(model, Gate)

    def gated_read(self, a: Attended) -> Reads:
        along = torch.einsum("bhkd,hd->bhk", a.value, a.parameter("gate.weight"))
        return a.value * torch.sigmoid(along + a.parameter("gate.bias")[:, None])[..., None]
