"""Attention with its scores, probabilities and context rounded (or watched), in tiles that stay in the cache."""

from functools import partial
from typing import Any

from jaxtyping import Bool
from torch import Tensor, nn

from quant_bench.attention import Key, Query, causal_mask, core_of, replace_core, sdpa
from quant_bench.calibrate import RangeWatch
from quant_bench.mechanisms.core import attention_in_tiles, normalizer_of
from quant_bench.mechanisms.tiles import Scores
from quant_bench.quantization.rounding import StaticRounding
from quant_bench.rebuild import rebuildable


@rebuildable()
class RoundedAttention(nn.Module):
    """An `AttentionCore` that rounds scores before the mask, probabilities, and context to static ranges.

    Both products run in float32 on rounded operands. Queries and keys were rounded as outputs of their projections,
    before position encoding, which the protocol leaves in float. `arm` is the core that an arm has set, or None.

    Source: the quantized attention of Bondarenko et al. 2023, https://arxiv.org/abs/2306.12929.
    """

    def __init__(
        self, scores: StaticRounding, probabilities: StaticRounding, context: StaticRounding, arm: Any
    ) -> None:
        super().__init__()
        self.scores, self.probabilities, self.context = scores, probabilities, context
        self.arm = arm

    @property
    def core(self) -> Any:
        """The mechanism whose parts are rounded."""
        return sdpa if self.arm is None else self.arm

    def forward(
        self,
        module: nn.Module,
        query: Query,
        key: Key,
        value: Key,
        *,
        mask: Bool[Tensor, "..."] | None,
        scaling: float,
    ) -> Query:
        steps = self.scores.round_, self.probabilities.round_
        mixed = attention_in_tiles(self.core, module, (query, key, value), mask, scaling, steps)
        return self.context.round_(mixed).to(query.dtype)


def watch_attention(watch: RangeWatch, path: str) -> None:
    """Watch `path:scores`, `path:probabilities` and `path:context` of an attention module while the watch lasts."""
    module = watch.module.get_submodule(path)
    inner = core_of(module)
    # an arm whose probabilities nobody can see is refused here, before anything runs
    normalizer_of(inner, module)

    def core(
        module: nn.Module,
        query: Query,
        key: Key,
        value: Key,
        *,
        mask: Bool[Tensor, "..."] | None,
        scaling: float,
    ) -> Query:
        if mask is None:
            # an explicit mask, because the ranges are those of whole score matrices, the unseen future included
            mask = causal_mask(query.shape[-2], key.shape[-2], None, query.device)
        total = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]

        def seen(name: str, values: Scores) -> Scores:
            watch.observe(f"{path}:{name}", values, total)
            return values

        steps = partial(seen, "scores"), partial(seen, "probabilities")
        mixed = attention_in_tiles(inner, module, (query, key, value), mask, scaling, steps)
        watch.observe(f"{path}:context", mixed)
        return mixed.to(query.dtype)

    watch.on_exit(replace_core(module, core))
