"""Attention residuals, Kimi's form: each sublayer reads a weighted average of all earlier sublayers' outputs."""

from dataclasses import dataclass
from typing import Literal

from quant_bench.depth import AttnResRouter, DepthArm, Shape, install
from quant_bench.errors import SpecError
from quant_bench.model import LanguageModel


@dataclass(frozen=True)
class Attnres(DepthArm):
    """h = sum_i a_i v_i with a = softmax_i(query · RMSNorm(v_i)), v_0 the embedding; no residual sum anywhere.

    Read behind every sublayer: by the next sublayer, at last by the final norm. The first attention reads the
    embedding. Queries start at 0, so a model begins with equal weights. A source that is a block's sum has the mean
    of its sublayers' null masses.

    Attributes:
        form: `full`: every output is a source. `block`: outputs are summed within blocks, and sources are the blocks.
        blocks: of the block form; the last takes the remainder, and a model with fewer sublayers has the full form.

    Source: arXiv 2603.15031; coupling and null: arXiv 2605.17887.
    """

    form: Literal["full", "block"] = "full"
    blocks: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blocks < 1:
            raise SpecError(f"blocks must be at least 1; got {self.blocks!r}")

    def attach(self, model: LanguageModel) -> LanguageModel:
        blocks = 2 * len(model.layout.layers) if self.form == "full" else self.blocks

        def router(place: int, shape: Shape) -> AttnResRouter:
            epsilon = float(model.config.rms_norm_eps)
            return AttnResRouter(place, self.rule(), shape.like, width=shape.width, blocks=blocks, epsilon=epsilon)

        return install(model, router, self.coupled)
