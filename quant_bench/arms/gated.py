"""Gated attention: each head decides from its token whether it speaks."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quant_bench.arm import Arm, Attended, Heads
from quant_bench.errors import SpecError
from quant_bench.mechanisms import HeadGate, add_output_gate
from quant_bench.model import LanguageModel


@dataclass(frozen=True)
class Gated(Arm):
    """sigmoid(G_h(x_t)) times the head's output, conditional on the token.

    Attributes:
        kind: G: one linear unit a head on its slice of x (`linear`), an MLP on it, or a linear unit on `all_features`.
        probability: of an open gate at the start (biases; as published of `linear` alone, but in fine-tuning mode).
        fine_tuning: start near the identity, for a pretrained model: small weights, output divided by `probability`.

    Source: Bondarenko et al. 2023, section 4.2, https://arxiv.org/abs/2306.12929.
    """

    kind: Literal["linear", "mlp", "all_features"] = "linear"
    probability: float = 0.25
    fine_tuning: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1:
            raise SpecError(f"probability must lie between 0 and 1; got {self.probability!r}")

    def attach(self, model: LanguageModel) -> LanguageModel:
        return add_output_gate(
            model, lambda s: HeadGate(s.heads, s.width, s.like, self.kind, self.probability, self.fine_tuning)
        )

    def gated_output(self, a: Attended, mixed: Heads) -> Heads:
        heads = mixed.shape[1]
        x = a.hidden if self.kind == "all_features" else a.hidden.view(*a.hidden.shape[:2], heads, -1)
        logit = self._layer(a, 0, x)
        if self.kind == "mlp":
            logit = self._layer(a, 1, torch.relu(logit))
        gate = torch.sigmoid(logit.reshape(*a.hidden.shape[:2], heads)).transpose(1, 2)[..., None]
        return mixed * gate / (self.probability if self.fine_tuning else 1.0)

    def _layer(self, a: Attended, index: int, x: Tensor) -> Tensor:
        return (a.parameter(f"weights.{index}") @ x[..., None])[..., 0] + a.parameter(f"biases.{index}")
