"""Norm-aware attention: routing by distance, so that long keys have no advantage."""

from dataclasses import dataclass

from torch import Tensor

from quant_bench.arm import Arm, Attended
from quant_bench.mechanisms import KeyLengthBias, add_key_bias
from quant_bench.model import LanguageModel


@dataclass(frozen=True)
class NormAware(Arm):
    """softmax_j(q·k_j / sqrt(d) - |k_j|^2 / (2 sqrt(d))), which is softmax_j(-|q - k_j|^2 / (2 sqrt(d))).

    Source: the distance form of arXiv 2606.22325.
    """

    def attach(self, model: LanguageModel) -> LanguageModel:
        return add_key_bias(model, lambda shape: KeyLengthBias())

    def key_bias(self, a: Attended) -> Tensor:
        return -a.scaling * a.key.square().sum(-1) / 2
