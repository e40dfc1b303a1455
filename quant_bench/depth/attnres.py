"""AttnRes as published by Kimi: one learned query a sublayer, normalized keys, raw sublayer outputs as values."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from quant_bench.depth.router import Pass, Psi, Router, State, wide
from quant_bench.depth.weigher import DepthRule


class AttnResRouter(Router):
    """score_i = query · RMSNorm(v_i), no factor; the query starts at 0, so that all sources weigh the same.

    Attributes:
        query: one vector, whatever the input.
        gain: of the norm, from 1; only its product with the query matters.
        blocks: over how many sums the sublayers are spread; as many as sublayers is the full form.

    Source: Attention Residuals, arXiv 2603.15031, figure 2 and section 5.
    """

    undecayed = ("query", "gain")
    float_because = "scores of depth are one product with a vector; they stay in float"

    def __init__(self, place: int, rule: DepthRule, like: Tensor, *, width: int, blocks: int, epsilon: float) -> None:
        super().__init__(place, rule, like)
        self.query = nn.Parameter(like.new_zeros(width), requires_grad=like.requires_grad)
        self.gain = nn.Parameter(like.new_ones(width), requires_grad=like.requires_grad)
        self.blocks, self.epsilon = blocks, epsilon

    def begin(self, routers: Sequence[Router], embedding: State) -> "AttnResPass":
        return AttnResPass(routers, embedding, self.blocks, self.epsilon)


class AttnResPass(Pass):
    """Finished blocks with their scores for all routers to come, and the sum of the block at hand.

    A finished source is scored once, for every later router in one product: queries do not depend on the input.
    """

    def __init__(self, routers: Sequence[Router], embedding: State, blocks: int, epsilon: float) -> None:
        kinds = [router for router in routers if isinstance(router, AttnResRouter)]
        self.queries = torch.stack([wide(router.query) * wide(router.gain) for router in kinds])
        self.blocks, self.epsilon = min(blocks, len(kinds)), epsilon
        self.size, self.full = len(kinds) // self.blocks, self.blocks == len(kinds)
        self.sources: list[State] = []
        self.scores: list[Float[Tensor, "batch seq router"]] = []
        self.psi: list[Psi] = []
        self.names: list[str] = []
        self.partial: State | None = None
        self.partial_psi: Psi = torch.zeros_like(embedding[..., 0])
        self.count = 0
        self._finish(embedding, self.partial_psi, "embedding", 0)

    def _scored(self, source: State, queries: Float[Tensor, "router width"]) -> Float[Tensor, "batch seq router"]:
        with torch.autocast(source.device.type, enabled=False):
            values = wide(source)
            # the mean of squares without a tensor of squares
            mean = torch.linalg.vector_norm(values, dim=-1, keepdim=True).square() / values.shape[-1]
            return values @ queries.to(values.dtype).T * torch.rsqrt(mean + self.epsilon)

    def _finish(self, source: State, psi: Psi, name: str, place: int) -> None:
        """Take in a source that will not change any more; routers from `place` on read it."""
        later = self._scored(source, self.queries[place:])
        # columns of the routers that are past stay empty
        self.scores.append(functional.pad(later, (place, 0)))
        self.sources.append(source)
        self.psi.append(psi)
        self.names.append(name)

    def read(self, router: Router, state: State, output: State, psi: Psi | None) -> State:
        place = router.place
        self.partial = output if self.partial is None else self.partial + output
        self.count += 1
        if psi is not None:
            # a block's null mass is the mean of its sublayers'
            self.partial_psi = self.partial_psi + (psi - self.partial_psi) / self.count
        sources, names, nulls = self.sources, self.names, self.psi
        number = len(sources)
        name = f"{place // 2}.{('attention', 'mlp')[place % 2]}" if self.full else f"block {number}"
        if self.count == self.size and number < self.blocks:
            self._finish(self.partial, self.partial_psi, name, place)
            scores = [part[..., place] for part in self.scores]
            self.partial, self.count, self.partial_psi = None, 0, torch.zeros_like(self.partial_psi)
        else:
            own = self._scored(self.partial, self.queries[place : place + 1])[..., 0]
            scores = [*(part[..., place] for part in self.scores), own]
            sources, names = [*sources, self.partial], [*names, name]
            nulls = [*nulls, self.partial_psi]
        return router.combine(torch.stack(scores, -1), sources, None if psi is None else nulls, names)
