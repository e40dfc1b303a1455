"""Norm gate: quiet reads are damped before they are averaged."""

from dataclasses import dataclass

import torch

from quant_bench.arm import Arm, Attended, Reads
from quant_bench.mechanisms import NormGate as Gate
from quant_bench.mechanisms import add_read_gate
from quant_bench.model import LanguageModel


@dataclass(frozen=True)
class NormGate(Arm):
    """sum_j alpha_ij g_j v_j with g_j = sigmoid(8 (|v_j| / sqrt(d) - tau_h)), tau_h learned from -0.5.

    Source: arXiv 2609.22005, norm gate.
    """

    def attach(self, model: LanguageModel) -> LanguageModel:
        return add_read_gate(model, Gate)

    def gated_read(self, a: Attended) -> Reads:
        size = a.value.square().mean(-1, keepdim=True).sqrt()
        return a.value * torch.sigmoid(8 * (size - a.parameter("gate.threshold")[:, None, None]))
