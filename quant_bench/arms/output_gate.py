"""Output gate: attention outputs are multiplied by a gate of the layer's input."""

from dataclasses import dataclass
from typing import Literal

import torch

from quant_bench.arm import Arm, Attended, Heads
from quant_bench.mechanisms import OutputGate as Gate
from quant_bench.mechanisms import add_output_gate
from quant_bench.model import LanguageModel


@dataclass(frozen=True)
class OutputGate(Arm):
    """sigmoid(x W) times the attention output, before the output projection; W starts like any other matrix.

    Attributes:
        kind: one factor for each head and token, or one for each of the head's features.

    Source: G1 of Qiu et al. 2025, https://arxiv.org/abs/2505.06708.
    """

    kind: Literal["headwise", "elementwise"] = "elementwise"

    def attach(self, model: LanguageModel) -> LanguageModel:
        deviation = float(getattr(model.config, "initializer_range", 0.02))
        return add_output_gate(
            model, lambda s: Gate(s.heads, 1 if self.kind == "headwise" else s.dim, s.width, s.like, deviation)
        )

    def gated_output(self, a: Attended, mixed: Heads) -> Heads:
        gate = torch.sigmoid(a.hidden @ a.parameter("output_gate.projection.weight").T)
        return mixed * gate.view(*gate.shape[:-1], mixed.shape[1], -1).transpose(1, 2)
