"""Attention with its scores, probabilities and context rounded (or watched), in tiles that stay in the cache."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from quant_bench.attention import Key, Query, causal_mask, core_of, sdpa
from quant_bench.calibrate import RangeWatch
from quant_bench.errors import NotApplicable
from quant_bench.quantization.rounding import StaticRounding

# values of one tile of scores: 2 MiB of float32 stay in a core's cache, and are enough work for two threads
TILE = 1 << 19

Scores = Float[Tensor, "slab group query key"]
Change = Callable[[Scores], Scores]


def softmax(scores: Scores) -> Scores:
    """Probabilities over the last axis."""
    return torch.softmax(scores, dim=-1)


def mechanism_of(module: nn.Module) -> Change:
    """How an attention module turns scores (disallowed ones are -inf) into probabilities.

    Plain softmax, or the method `probabilities(module, scores)` of the core that an arm has set.

    Raises:
        NotApplicable: the arm's core has no such method, so its probabilities cannot be rounded.
    """
    core: Any = core_of(module)
    if core is sdpa:
        return softmax
    if not hasattr(core, "probabilities"):
        raise NotApplicable(f"scope=full rounds attention probabilities, and {core!r} has no method `probabilities`")
    return lambda scores: core.probabilities(module, scores)


def tiled_attention(
    operands: tuple[Query, Key, Key],
    mask: Bool[Tensor, "..."] | None,
    scaling: float,
    *,
    at_scores: Change,
    mechanism: Change,
    at_probabilities: Change,
) -> Query:
    """Attention by tiles of queries and heads, float32, never all heads' scores at once.

    Args:
        operands: query, key and value as an `AttentionCore` gets them.
        mask: as an `AttentionCore` gets it; None (causal) leaves out the tiles that no query of theirs may see.
        scaling: factor on the scores.
        at_scores: sees the scaled scores before the mask, may change them in place.
        mechanism: scores, -inf where not allowed, to probabilities.
        at_probabilities: sees the probabilities, may change them in place.
    """
    query, key, value = operands
    batch, heads, queries, width = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    group, slabs = heads // kv_heads, batch * kv_heads
    flat_query = query.float().reshape(slabs, group, queries, width)
    flat_key = key.float().reshape(slabs, keys, width).transpose(1, 2)
    flat_value = value.float().reshape(slabs, keys, value.shape[-1])
    out = flat_query.new_empty(slabs, group, queries, value.shape[-1])
    rows = min(queries, max(1, TILE // (group * keys)))
    together = max(1, TILE // (group * rows * keys))
    unused = flat_query.new_zeros(1, 1, 1)
    future = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu_(1)
    for slab in range(0, slabs, together):
        part = slice(slab, min(slab + together, slabs))
        for start in range(0, queries, rows):
            stop = min(start + rows, queries)
            end = keys - queries + stop if mask is None else keys
            tile = flat_query[part, :, start:stop]
            scores = torch.baddbmm(unused, tile.flatten(1, 2), flat_key[part, :, :end], beta=0, alpha=scaling)
            scores = at_scores(scores.view(*tile.shape[:3], end))
            if mask is None:
                # earlier keys are all allowed: only the square at the end has a future
                count = stop - start
                scores[..., end - count :].masked_fill_(future[:count, :count], -torch.inf)
                probabilities = mechanism(scores)
            else:
                scores.masked_fill_(~_allowed(mask, part, start, stop, kv_heads), -torch.inf)
                # a query without an allowed key has no probabilities: its row is 0
                probabilities = mechanism(scores).nan_to_num_(0.0)
            probabilities = at_probabilities(probabilities)
            mixed = torch.bmm(probabilities.flatten(1, 2), flat_value[part, :end])
            out[part, :, start:stop] = mixed.view(*tile.shape[:3], -1)
    return out.view(batch, heads, queries, value.shape[-1])


def _allowed(
    mask: Bool[Tensor, "..."], part: slice, start: int, stop: int, kv_heads: int
) -> Bool[Tensor, "slab group query key"]:
    """The part of a broadcast mask that belongs to some (batch, kv head) slabs and queries."""
    full = mask[(None,) * (4 - mask.dim())]
    if full.shape[2] > 1:
        full = full[:, :, start:stop]
    slab = torch.arange(part.start, part.stop, device=mask.device)
    batch = slab // kv_heads if full.shape[0] > 1 else torch.zeros_like(slab)
    if full.shape[1] == 1:
        # one mask for all heads: where the batch has one too, it is a view
        return full if full.shape[0] == 1 else full[batch]
    return full.view(full.shape[0], kv_heads, -1, *full.shape[2:])[batch, slab % kv_heads]


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
        arm = self.arm
        mixed = tiled_attention(
            (query, key, value),
            mask,
            scaling,
            at_scores=self.scores.round_,
            mechanism=softmax if arm is None else lambda scores: arm.probabilities(module, scores),
            at_probabilities=self.probabilities.round_,
        )
        return self.context.round_(mixed).to(query.dtype)


def watch_attention(watch: RangeWatch, path: str) -> None:
    """Watch `path:scores`, `path:probabilities` and `path:context` of an attention module while the watch lasts."""
    module: Any = watch.module.get_submodule(path)
    mechanism = mechanism_of(module)
    own = "attention_core" in module.__dict__ or "attention_core" in module._modules
    before = getattr(module, "attention_core", None)

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

        mixed = tiled_attention(
            (query, key, value),
            mask,
            scaling,
            at_scores=lambda scores: seen("scores", scores),
            mechanism=mechanism,
            at_probabilities=lambda probabilities: seen("probabilities", probabilities),
        )
        watch.observe(f"{path}:context", mixed)
        return mixed.to(query.dtype)

    def restore() -> None:
        del module.attention_core
        if own:
            module.attention_core = before

    if own:
        del module.attention_core
    module.attention_core = core
    watch.on_exit(restore)
