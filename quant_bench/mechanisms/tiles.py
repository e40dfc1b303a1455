"""Attention with its scores and weights at hand, in tiles that stay in the cache."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from quant_bench.attention import Key, Query

# values of one tile of scores: 2 MiB of float32 stay in a core's cache, and are enough work for two threads
TILE = 1 << 19

Scores = Float[Tensor, "slab group query key"]
Value = Float[Tensor, "batch kv_head key out"]
HeadIndex = Int[Tensor, "slab group"]
Change = Callable[[Scores], Scores]
Normalizer = Callable[[Scores, HeadIndex], Scores]


def softmax(scores: Scores, heads: HeadIndex | None = None) -> Scores:
    """Probabilities over the last axis, the same for every head."""
    return torch.softmax(scores, dim=-1)


def tiled_attention(
    operands: tuple[Query, Key, Value],
    mask: Bool[Tensor, "..."] | None,
    scaling: float,
    *,
    mechanism: Normalizer,
    at_scores: Change | None = None,
    at_probabilities: Change | None = None,
) -> Float[Tensor, "batch head query out"]:
    """Attention by tiles of queries and heads, in float32 or wider (under autocast too), never all scores at once.

    Args:
        operands: query, key and value as an `AttentionCore` gets them.
        mask: as an `AttentionCore` gets it.
        scaling: factor on the scores.
        mechanism: scores, -inf where not allowed, and the query heads that they belong to, to probabilities.
        at_scores: sees the scaled scores before the mask, may change them in place.
        at_probabilities: sees the probabilities, may change them in place.
    """
    wide = torch.promote_types(operands[0].dtype, torch.float32)
    query, key, value = (part.to(wide) for part in operands)
    batch, heads, queries, _ = query.shape
    slabs = batch * key.shape[1]
    flat_value = value.reshape(slabs, *value.shape[2:])
    out = query.new_empty(slabs, batch * heads // slabs, queries, value.shape[-1])
    # scores in bfloat16 would do: not for exp(s) - 1, nor for a threshold that rows must sum to 1 behind
    with torch.autocast(query.device.type, enabled=False):
        for tile in score_tiles(query, key, mask, scaling, at_scores):
            probabilities = mechanism(tile.scores, tile.heads)
            if mask is not None:
                # a query without an allowed key has no probabilities: its row is 0
                probabilities = probabilities.nan_to_num(0.0)
            if at_probabilities is not None:
                probabilities = at_probabilities(probabilities)
            mixed = torch.bmm(probabilities.flatten(1, 2), flat_value[tile.slabs, : tile.end])
            out[tile.slabs, :, tile.rows] = mixed.view(*probabilities.shape[:3], -1)
    return out.view(batch, heads, queries, -1)


class Tile(NamedTuple):
    """Masked scores of some queries and some key/value heads of some sequences.

    Attributes:
        slabs: place in (batch · kv_head).
        rows: place in queries.
        end: keys that the scores are of, from the first on.
        heads: query heads that they belong to.
        scores: -inf where not allowed.
    """

    slabs: slice
    rows: slice
    end: int
    heads: HeadIndex
    scores: Scores


def score_tiles(
    query: Query, key: Key, mask: Bool[Tensor, "..."] | None, scaling: float, at_scores: Change | None
) -> Iterator[Tile]:
    """Scores of all queries, a tile at a time.

    Args:
        query: queries; they are the last of the key positions.
        key: keys; `kv_head` divides `head`.
        mask: True where a query may attend; None (causal) leaves out the tiles that no query of theirs may see.
        scaling: factor on the scores.
        at_scores: sees the scaled scores before the mask, may change them in place.
    """
    batch, heads, queries, width = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    group, slabs = heads // kv_heads, batch * kv_heads
    flat_query = query.reshape(slabs, group, queries, width)
    flat_key = key.reshape(slabs, keys, width).transpose(1, 2)
    rows = min(queries, max(1, TILE // (group * keys)))
    together = max(1, TILE // (group * rows * keys))
    unused = query.new_zeros(1, 1, 1)
    future = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu_(1)
    heads_of = torch.arange(heads, device=query.device).view(kv_heads, group)
    for slab in range(0, slabs, together):
        part = slice(slab, min(slab + together, slabs))
        owners = heads_of[torch.arange(part.start, part.stop, device=query.device) % kv_heads]
        for start in range(0, queries, rows):
            stop = min(start + rows, queries)
            end = keys - queries + stop if mask is None else keys
            tile = flat_query[part, :, start:stop]
            scores = torch.baddbmm(unused, tile.flatten(1, 2), flat_key[part, :, :end], beta=0, alpha=scaling)
            scores = scores.view(*tile.shape[:3], end)
            if at_scores is not None:
                scores = at_scores(scores)
            if mask is None:
                # earlier keys are all allowed: only the square at the end has a future
                count = stop - start
                scores[..., end - count :].masked_fill_(future[:count, :count], -torch.inf)
            else:
                scores.masked_fill_(~_allowed(mask, part, start, stop, kv_heads), -torch.inf)
            yield Tile(part, slice(start, stop), end, owners, scores)


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
