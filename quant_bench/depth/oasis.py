"""The "AttentionResidual" of the OASIS experiments: queries from the current state, cumulative states as sources."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from quant_bench.depth.router import Pass, Psi, Router, State, wide
from quant_bench.depth.weigher import DepthRule

Recency = Literal["ramp", "last"]
Draw = Literal["uniform", "normal", "zero_query"]


class OasisRouter(Router):
    """score_i = (Wq y_current · Wk y_i) / sqrt(a) + recency_i, with a = max(width / 4, 64) and low-rank Wq, Wk.

    recency_i = rho · i / (n - 1) over the n sources (`ramp`), or rho for the last source and 0 for the others (`last`);
    rho is learned. Both projections are matrix products like any other, and quantized.

    Source: `AttentionResidual` in the code of arXiv 2605.17887; `last` and its use on pretrained models: the bias on
    the last source of github.com/wdlctc/open-attention-residuals.
    """

    def __init__(
        self,
        place: int,
        rule: DepthRule,
        like: Tensor,
        *,
        width: int,
        recency: tuple[Recency, float],
        draw: Draw,
    ) -> None:
        super().__init__(place, rule, like)
        # kept here: what a recipe puts in the place of a projection need not know its sizes
        self.inner = inner = max(width // 4, 64)
        self.recency, start = recency
        options: dict[str, Any] = {"bias": False, "device": like.device, "dtype": like.dtype}
        self.query_projection = nn.Linear(width, inner, **options).requires_grad_(like.requires_grad)
        self.key_projection = nn.Linear(width, inner, **options).requires_grad_(like.requires_grad)
        if draw != "uniform":
            # the published Qwen3 code's; with both at zero neither would have a gradient
            for projection in (self.query_projection, self.key_projection):
                nn.init.normal_(projection.weight, 0.0, 0.02 / math.sqrt(inner))
        if draw == "zero_query":
            nn.init.zeros_(self.query_projection.weight)
        # for coverage: a key of each source, which are the embedding, a state a layer, and two within the layer at most
        self.calls_a_token = {"key_projection": place // 2 + 2 + place % 2}
        self.rho = nn.Parameter(like.new_full((), start), requires_grad=like.requires_grad)

    def begin(self, routers: Sequence[Router], embedding: State) -> "OasisPass":
        return OasisPass(embedding)

    def scores(self, sources: Sequence[State]) -> Float[Tensor, "batch seq source"]:
        """Scores of the sources, the last of which is the current state."""
        query, key = self.query_projection, self.key_projection
        asked = query(sources[-1])
        if _plain(key):
            # q · (Wk y) = (q Wk) · y: one product instead of one a source, while nobody rounds or watches the keys
            asked = asked @ key.weight
            products = [torch.linalg.vecdot(wide(asked), wide(source)) for source in sources]
            scores = torch.stack(products, -1)
        else:
            keys = key(torch.stack(list(sources), 2))
            scores = torch.einsum("btsa,bta->bts", wide(keys), wide(asked))
        count = len(sources)
        ramp = torch.arange(count, device=scores.device, dtype=scores.dtype) / (count - 1)
        return scores / math.sqrt(self.inner) + self.rho * (ramp if self.recency == "ramp" else ramp.floor())


def _plain(linear: nn.Module) -> bool:
    """Whether a product is x Wᵀ and nothing else: an engine may keep the module and put a weight of its own in it."""
    untouched = type(linear) is nn.Linear and type(linear.weight) is nn.Parameter
    return untouched and not linear._forward_hooks and not linear._forward_pre_hooks


class OasisPass(Pass):
    """States after each finished layer, and what the layer at hand has read so far."""

    def __init__(self, embedding: State) -> None:
        self.sources: list[State] = [embedding]
        self.psi: list[Psi] = [torch.zeros_like(embedding[..., 0])]
        self.names: list[str] = ["embedding"]
        self.attended: State | None = None

    def read(self, router: Router, state: State, output: State, psi: Psi | None) -> State:
        assert isinstance(router, OasisRouter)
        layer, of_mlp = divmod(router.place, 2)
        candidates, names = [*self.sources], [*self.names]
        if of_mlp:
            assert self.attended is not None
            candidates.append(self.attended)
            names.append(f"{layer}.attention")
        current = state + output
        candidates.append(current)
        names.append(f"{layer}.{'mlp' if of_mlp else 'attention'}")
        # every state of a layer has the null mass of the layer's attention
        nulls = None if psi is None else [*self.psi, *[psi] * (len(candidates) - len(self.psi))]
        read = router.combine(router.scores(candidates), candidates, nulls, names)
        self.attended = None if of_mlp else current
        if of_mlp:
            self.sources.append(read)
            self.names.append(f"{layer}.layer")
            if psi is not None:
                self.psi.append(psi)
        return read
