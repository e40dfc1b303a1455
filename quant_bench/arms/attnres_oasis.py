"""Attention residuals of the OASIS experiments: behind each sublayer a router over the states of all layers before."""

from dataclasses import dataclass
from typing import Literal

from quant_bench.depth import DepthArm, OasisRouter, Shape, install
from quant_bench.model import LanguageModel


@dataclass(frozen=True)
class AttnresOasis(DepthArm):
    """out = sum_i a_i y_i over the states y behind each layer, with scores (Wq y_now · Wk y_i) / sqrt(a) + recency.

    The residual sum stays inside each state, and the router's output replaces it. Not the form of `attnres`.

    Attributes:
        recency: `ramp`: rho i/(n-1), as published. `last`: rho for the current state alone.
        rho: its start: 0 in the published Llama code, 8 in that of Qwen3 and Phi-4.
        draw: start of Wq and Wk: `uniform` (Llama), `normal` with deviation 0.02/sqrt(a) (Qwen3), or `zero_query`.
            `recency=last, rho=12, draw=zero_query` leaves a pretrained model's function (nearly) as it is at the start.

    Source: arXiv 2605.17887 and its code.
    """

    recency: Literal["ramp", "last"] = "ramp"
    rho: float = 0.0
    draw: Literal["uniform", "normal", "zero_query"] = "uniform"

    def attach(self, model: LanguageModel) -> LanguageModel:
        recency = self.recency, self.rho

        def router(place: int, shape: Shape) -> OasisRouter:
            return OasisRouter(place, self.rule(), shape.like, width=shape.width, recency=recency, draw=self.draw)

        return install(model, router, self.coupled)
