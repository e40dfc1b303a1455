"""Where attention weights go: sums over queries, from tiles of the mechanism's own weights; no T × T matrix is kept."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from quant_bench.attention import Key, Query, core_of
from quant_bench.mechanisms.core import Mechanism, normalizer_of, operands_of
from quant_bench.mechanisms.normalizers import safe_softmax
from quant_bench.mechanisms.tiles import HeadIndex, Scores, score_tiles, softmax
from quant_bench.quantization.attention import RoundedAttention

Mask = Bool[Tensor, "..."]


@dataclass(frozen=True)
class Weighing:
    """How an attention module makes its weights, with what a quantizer rounds on the way.

    Attributes:
        core: the arm's core, for the operands; None without one.
        normalize: masked scores and their heads -> weights.
        null: logits of the null a head, or None.
        null_key: whether the null is one more key of `normalize`, before all others. The alternative, what rows of
            `normalize` lack to sum to 1, takes several passes over the scores where this takes one.
        null_beside: whether rows lack more than the null has, so that its share is computed beside them.
        at_scores: sees the scores before the mask.
        at_weights: sees the weights, as rounded by scope `full`; None where they are used as they are.
    """

    core: Any
    normalize: Callable[[Scores, HeadIndex], Scores]
    null: Float[Tensor, " head"] | None = None
    null_key: bool = False
    null_beside: bool = False
    at_scores: Callable[[Scores], Scores] | None = None
    at_weights: Callable[[Scores], Scores] | None = None

    @classmethod
    def of(cls, module: nn.Module) -> "Weighing":
        """What an attention module does now.

        Raises:
            NotApplicable: its core has no method `probabilities`, so its weights cannot be seen.
        """
        core: Any = core_of(module)
        rounded = isinstance(core, RoundedAttention)
        arm = core.core if rounded else core
        known = isinstance(arm, Mechanism)
        null = arm.null.logit.detach() if known and arm.null is not None else None
        if rounded:
            beside = null is not None and arm.normalizer is not None
            normalize = normalizer_of(arm, module)
            return cls(arm, normalize, null, False, beside, core.scores.round_, core.probabilities.round_)
        if known and core.normalizer is None:
            return cls(core, softmax, null, null_key=null is not None)
        return cls(core, normalizer_of(core, module), null, null_beside=null is not None)


@dataclass
class Masses:
    """Attention mass of one layer and one sequence, as means over queries; float64 on the CPU.

    Attributes:
        received: mass on each text token.
        first: weight of the text's first token, query by query.
        phantom: mass on the null.
        sink_token: mass on the sink token; None without one.
    """

    received: Float[Tensor, "head key"]
    first: Float[Tensor, "head query"]
    phantom: Float[Tensor, " head"]
    sink_token: Float[Tensor, " head"] | None

    @property
    def missing(self) -> Float[Tensor, " head"]:
        """What is on no token and not on the null: rows that clipping or rectifying keeps from summing to 1."""
        placed = self.received.sum(1) + self.phantom
        return 1.0 - (placed if self.sink_token is None else placed + self.sink_token)


def masses(
    how: Weighing, module: nn.Module, operands: tuple[Query, Key, Key], mask: Mask | None, scaling: float, first: int
) -> Masses:
    """Sums of a layer's weights over the queries of a text.

    Args:
        how: makes the weights.
        module: the attention module.
        operands: query, key and value of one sequence as its core gets them.
        mask: as its core gets it; None means causal.
        scaling: factor on the scores.
        first: tokens before the text (a sink token), whose own queries do not count.
    """
    query, key, _ = operands_of(how.core, module, operands, scaling)
    wide = torch.promote_types(query.dtype, torch.float32)
    query, key = query[:, :, first:].to(wide), key.to(wide)
    if mask is not None and mask.shape[-2] > 1:
        mask = mask[..., first:, :]
    if how.null is not None and how.null_key:
        query, key = _with_null(query, key, how.null, scaling)
        mask = None if mask is None else functional.pad(mask, (1, 0), value=True)
    # columns before the text: the null, the sink token
    before = first + int(how.null_key)
    _, heads, queries, _ = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    group = heads // kv_heads
    received = query.new_zeros(kv_heads, group, keys, dtype=torch.float64)
    beginning = query.new_empty(kv_heads, group, queries)
    phantom = received.new_zeros(kv_heads, group)
    # of one sequence, so a slab is a key/value head
    for tile in score_tiles(query, key, mask, scaling, how.at_scores):
        weights, taken = _weights(how, tile.scores, tile.heads, mask is not None)
        received[tile.slabs, :, : tile.end] += weights.sum(2)
        beginning[tile.slabs, :, tile.rows] = weights[..., before]
        if taken is not None:
            phantom[tile.slabs] += taken
    received = received.view(heads, keys).cpu() / queries
    return Masses(
        received=received[:, before:],
        first=beginning.view(heads, queries).double().cpu(),
        phantom=received[:, 0] if how.null_key else phantom.view(heads).cpu() / queries,
        sink_token=received[:, before - 1] if first else None,
    )


def _with_null(
    query: Query, key: Key, null: Float[Tensor, " head"], scaling: float
) -> tuple[Float[Tensor, "batch head query wider"], Float[Tensor, "batch kv_head longer wider"]]:
    """One more feature and, in front, one more key, whose scaled product with a query is its head's null logit."""
    logits = (null / scaling).to(query.dtype)[None, :, None, None].expand(*query.shape[:3], 1)
    phantom = functional.pad(key.new_zeros(*key.shape[:2], 1, key.shape[3]), (0, 1), value=1.0)
    return torch.cat((query, logits), -1), torch.cat((phantom, functional.pad(key, (0, 1))), 2)


def _weights(
    how: Weighing, scores: Scores, owners: HeadIndex, masked: bool
) -> tuple[Scores, Float[Tensor, "slab group"] | None]:
    """Weights of a tile, and the mass on its null summed over queries."""
    taken = None
    if how.null is not None and how.null_beside:
        taken = _lacking(safe_softmax(scores, how.null.to(scores.dtype)[owners][..., None, None]))
    weights = how.normalize(scores, owners)
    if masked:
        # a query without an allowed key has no weights: its row is 0
        weights = weights.nan_to_num_(0.0)
    if how.null is not None and not how.null_key and not how.null_beside:
        taken = _lacking(weights)
    return (weights if how.at_weights is None else how.at_weights(weights)), taken


def _lacking(weights: Scores) -> Float[Tensor, "slab group"]:
    """How much the rows lack to sum to 1, over all queries."""
    return (1.0 - weights.sum(-1, dtype=torch.float64)).sum(-1)


def uniform_masses(mask: Mask | None, tokens: int, first: int) -> Float[Tensor, " key"]:
    """Mass on each text token if every query spread its weight evenly over the text that it may see.

    The first of them is H_T / T under a causal mask, H_T = 1 + 1/2 + … + 1/T.

    Args:
        mask: as a core gets it (of the first head); None means causal.
        tokens: of the text.
        first: tokens before the text, which get nothing.
    """
    if mask is None:
        shares = 1.0 / torch.arange(1, tokens + 1, dtype=torch.float64)
        return shares.flip(0).cumsum(0).flip(0) / tokens
    allowed = mask[(None,) * (4 - mask.dim())][0, 0].cpu()[-tokens:, first : first + tokens].double()
    allowed = allowed.expand(tokens, tokens)
    # a query that may see nothing has nothing to spread
    return (1.0 / allowed.sum(1).clamp_min(1.0)) @ allowed / tokens
