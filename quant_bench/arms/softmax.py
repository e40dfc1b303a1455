"""Softmax attention: the model as it is."""

from dataclasses import dataclass

from quant_bench.arm import Arm
from quant_bench.model import LanguageModel


@dataclass(frozen=True)
class Softmax(Arm):
    """Scaled dot-product attention, unchanged.

    Source: Vaswani et al. 2017, section 3.2.1, https://arxiv.org/abs/1706.03762.
    """

    def attach(self, model: LanguageModel) -> LanguageModel:
        return model
