"""The one attention entry point of every model here: cores, key/value transforms and packed sequences hook in at it.

Every model is loaded with `attn_implementation=ATTENTION`, transformers' own extension point. What a module computes
is decided per module, so arms and quantizers change attention without touching a model file:

- `module.attention_core`: the mechanism (default `sdpa`); an arm or scope `full` sets another one.
- `module.query_key_transform`: what happens to queries and keys first of all; scores must stay as they are (a rotation
  of both).
- `module.key_value_transform`: what happens to new keys and values before they are attended to and cached (KV-cache
  quantization sets it).
- `module.output_factor`: factors on the heads' outputs, computed from the layer's input by an arm's output gate; used
  once.
- `module.has_sink_token`: the first token of a packed row is a learned one, before every path of the row.

A packed forward (see `packing.py`) takes over how queries meet keys; it calls the same core for each piece.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from quant_bench.errors import NotApplicable

ATTENTION = "quant_bench"
# added to a score, it leaves nothing of its weight
_HIDDEN = -1e3

Query = Float[Tensor, "batch head query dim"]
Key = Float[Tensor, "batch kv_head key dim"]


@runtime_checkable
class AttentionCore(Protocol):
    """One attention mechanism for queries that are the last `query` of `key` positions."""

    def __call__(
        self, module: nn.Module, query: Query, key: Key, value: Key, *, mask: Bool[Tensor, "..."] | None, scaling: float
    ) -> Query:
        """Mix values.

        Args:
            module: the attention module, for parameters and state that belong to the mechanism.
            query: queries after position encoding.
            key: keys after position encoding, of all `key` positions; `kv_head` divides `head`.
            value: values.
            mask: True where a query may attend, broadcastable to (batch, head, query, key); None means causal:
                query i attends to keys up to key - query + i.
            scaling: factor on the scores.

        Returns:
            Mixed values, one row a query; a fully masked row is 0.
        """


@runtime_checkable
class Router(Protocol):
    """What a packed forward installs: it decides which keys each query of the flat token row meets."""

    def __call__(
        self, module: nn.Module, query: Query, key: Key, value: Key, scaling: float, window: int | None
    ) -> Query:
        """Attention of a flat row of tokens (batch is 1)."""


_router: Router | None = None


def set_router(router: Router | None) -> None:
    """Install (or, with None, remove) the router of a packed forward. `packing.py` is the only caller."""
    global _router
    _router = router


def is_packed() -> bool:
    """Whether a packed forward is running: its router knows which tokens of the row meet."""
    return _router is not None


def causal_mask(query: int, key: int, window: int | None, device: torch.device) -> Bool[Tensor, "query key"]:
    """True where query i, the (key - query + i)-th position, may see a key; `window` counts the query itself."""
    position = torch.arange(key - query, key, device=device)[:, None]
    other = torch.arange(key, device=device)[None, :]
    allowed = other <= position
    return allowed if window is None else allowed & (other > position - window)


def sdpa(
    module: nn.Module, query: Query, key: Key, value: Key, *, mask: Bool[Tensor, "..."] | None, scaling: float
) -> Query:
    """Softmax attention by torch's fused kernel.

    Source: Vaswani et al. 2017, equation 1, https://arxiv.org/abs/1706.03762.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    if mask is None and queries not in (1, keys):
        # the fused kernel's is_causal aligns to the upper left; a tail of queries needs the lower right
        mask = causal_mask(queries, keys, None, query.device)
    causal = mask is None and queries > 1
    grouped = query.shape[1] != key.shape[1]
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=grouped
    )


def core_of(module: nn.Module) -> AttentionCore:
    """The mechanism of an attention module."""
    return getattr(module, "attention_core", sdpa)


def replace_core(module: nn.Module, core: AttentionCore) -> Callable[[], None]:
    """Put a function in the place of a module's mechanism for a while; returns what puts the one before back."""
    # found before a child module of that name, which stays where it is among the children
    place = module.__dict__
    before = place.get("attention_core")

    def restore() -> None:
        if before is None:
            del place["attention_core"]
        else:
            place["attention_core"] = before

    place["attention_core"] = core
    return restore


def attend(
    module: nn.Module, query: Query, key: Key, value: Key, *, mask: Bool[Tensor, "..."] | None, scaling: float
) -> Query:
    """The module's mechanism for one path of a packed forward, behind the row's sink token where there is one."""
    core = core_of(module)
    sink: tuple[Key, Key] | None = getattr(module, "sink_states", None)
    if sink is None:
        return core(module, query, key, value, mask=mask, scaling=scaling)
    key, value = (torch.cat((first, rest), 2) for first, rest in zip(sink, (key, value), strict=True))
    if mask is None and query.shape[2] > 1:
        # one query more keeps the square causal form, which kernels do without a mask
        query = torch.cat((query[:, :, :1], query), 2)
        return core(module, query, key, value, mask=None, scaling=scaling)[:, :, 1:]
    mask = None if mask is None else functional.pad(mask, (1, 0), value=True)
    return core(module, query, key, value, mask=mask, scaling=scaling)


def _routed(
    module: Any, router: Router, query: Query, key: Key, value: Key, *, scaling: float, window: int | None
) -> Query:
    """A packed forward; a sink token at the head of the row is attended to by every path, and sees itself."""
    if not getattr(module, "has_sink_token", False):
        return router(module, query, key, value, scaling, window)
    module.sink_states = None
    first = key[:, :, :1], value[:, :, :1]
    own = core_of(module)(module, query[:, :, :1], *first, mask=None, scaling=scaling)
    module.sink_states = first
    try:
        rest = router(module, query[:, :, 1:], key[:, :, 1:], value[:, :, 1:], scaling, window)
        return torch.cat((own, rest), 2)
    finally:
        module.sink_states = None


def _attention(
    module: nn.Module,
    query: Query,
    key: Key,
    value: Key,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "batch query head dim"], None]:
    """What transformers calls; returns heads last but one, as its interface wants, and no weights."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.is_autocast_enabled(query.device.type):
        # rotary embeddings leave queries and keys wider than values; autocast narrows them for its own kernels alone
        narrow = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(narrow), key.to(narrow), value.to(narrow)
    rotation: Callable[[Query, Key], tuple[Query, Key]] | None = getattr(module, "query_key_transform", None)
    if rotation is not None:
        query, key = rotation(query, key)
    transform: Callable[[Key, Key], tuple[Key, Key]] | None = getattr(module, "key_value_transform", None)
    if transform is not None:
        key, value = transform(key, value)
    if _router is not None:
        mixed = _routed(module, _router, query, key, value, scaling=scale, window=sliding_window)
    else:
        mask = attention_mask
        if mask is not None and mask.dtype != torch.bool:
            mask = _allowed(mask)
        if mask is not None and mask.shape[-1] > key.shape[-2]:
            mask = mask[..., : key.shape[-2]]
        mixed = core_of(module)(module, query, key, value, mask=mask, scaling=scale)
    factor: Tensor | None = module.__dict__.pop("output_factor", None)
    if factor is not None:
        mixed = mixed * factor
    return mixed.transpose(1, 2).contiguous(), None


def _allowed(mask: Tensor) -> Bool[Tensor, "..."]:
    """True where an additive mask leaves a score alone.

    Raises:
        NotApplicable: it does more than hide keys: a core knows who sees whom, and no bias of single scores.
    """
    allowed = mask == 0
    if not mask.is_floating_point() or not bool((allowed | (mask <= _HIDDEN)).all()):
        raise NotApplicable(
            "attention masks here say which keys a query may see: give a mask of two axes, a boolean one, or an "
            f"additive one of 0 and numbers below {_HIDDEN:g}"
        )
    return allowed


def _mask(*arguments: Any, **options: Any) -> Tensor | None:
    """Transformers' own mask for an ordinary forward; none for a packed one, whose router knows who sees whom."""
    return None if _router is not None else sdpa_mask(*arguments, **options)


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)
