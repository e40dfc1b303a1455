"""Routing-slot control: a gate decides where a head looks, not how much it reads."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quant_bench.arm import Arm, Attended
from quant_bench.mechanisms import GateBias, NormGate, ProjectionGate, add_key_bias
from quant_bench.model import LanguageModel


@dataclass(frozen=True)
class Renorm(Arm):
    """g_j exp(s_ij) / sum_k g_k exp(s_ik), values ungated: log g_j is added to the logit of key j.

    The cache holds plain values; g is computed from them at each step, which costs no more than the average does.

    Attributes:
        gate: `norm` as in arm norm_gate, or `projection` as in projection_gate.

    Source: arXiv 2609.22005, routing-slot control.
    """

    gate: Literal["norm", "projection"] = "norm"

    def attach(self, model: LanguageModel) -> LanguageModel:
        make = NormGate if self.gate == "norm" else ProjectionGate
        return add_key_bias(model, lambda shape: GateBias(make(shape.kv_heads, shape.dim, shape.like)))

    def key_bias(self, a: Attended) -> Tensor:
        if self.gate == "norm":
            size = a.value.square().mean(-1).sqrt()
            return torch.log(torch.sigmoid(8 * (size - a.parameter("gate.threshold")[:, None])))
        along = torch.einsum("bhkd,hd->bhk", a.value, a.parameter("gate.weight"))
        return torch.log(torch.sigmoid(along + a.parameter("gate.bias")[:, None]))
