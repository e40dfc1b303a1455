"""Softmax attention with a null logit on torch's fused kernels: no T × T matrix, exact gradients."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from quant_bench.attention import Key, Query, causal_mask

Logits = tuple[Float[Tensor, "batch head query wide"], Float[Tensor, "batch kv_head key wide"]]
NullLogit = Float[Tensor, " head"]
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def null_attention(
    query: Query, key: Key, value: Key, null: NullLogit, *, mask: Bool[Tensor, "..."] | None, scaling: float
) -> Query:
    """Attention whose softmax has one more logit with a zero value: exp(s_ij) / (exp(null_h) + sum_k exp(s_ik)).

    On CPU the kernel's own result is scaled by exp(lse - logaddexp(lse, null)); elsewhere a key and a value of zeros
    stand for the null, whose logit is a column of the mask. Both are differentiable in every operand.

    Args:
        query: queries; they are the last of the key positions.
        key: keys; `kv_head` divides `head`.
        value: values, as wide as the keys.
        null: logit of the null, per query head.
        mask: True where a query may attend; None means causal.
        scaling: factor on the scores.

    Source: Miller 2023, https://www.evanmiller.org/attention-is-off-by-one.html (null 0); learned logits as in gpt-oss.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    if mask is None and queries not in (1, keys):
        mask = causal_mask(queries, keys, None, query.device)
    if query.device.type != "cpu":
        return _phantom_key(query, key, value, null, mask, scaling)
    additive = None
    if mask is not None:
        additive = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
        additive = additive[(None,) * (4 - additive.dim())]
    apply: Any = _NullAttention.apply
    mixed: Tensor = apply(query, key, value, null, additive, mask is None and queries > 1, scaling)
    return mixed


class _NullAttention(torch.autograd.Function):
    """The log-sum-exp rescale, with its own backward.

    The plain rescale `out * exp(lse - lse2)` trains with silently wrong gradients of queries and keys: the kernel's
    log-sum-exp is not differentiable. Given the rescaled output and the log-sum-exp *with* the null, the kernel's own
    backward computes P2 * (g·v - g·out2) with P2 = exp(s - lse2), which is the gradient of the softmax with a null.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        null: Tensor,
        additive: Tensor | None,
        causal: bool,
        scaling: float,
    ) -> Tensor:
        out, lse = _flash(query, key, value, 0.0, causal, attn_mask=additive, scale=scaling)
        with_null = torch.logaddexp(lse, null.to(lse.dtype)[:, None])
        # a query that may see nothing has output 0 whatever its factor is
        out = (out * torch.exp(lse - with_null)[..., None]).to(query.dtype)
        ctx.save_for_backward(query, key, value, null, out, with_null, additive)
        ctx.causal, ctx.scaling = causal, scaling
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, null, out, with_null, additive = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        group = query.shape[1] // key.shape[1]
        # the kernel's backward knows no shared key/value heads: repeated, and their gradients summed
        keys, values = (part.repeat_interleave(group, 1) if group > 1 else part for part in (key, value))
        of_query, of_key, of_value = _flash_backward(
            gradient, query, keys, values, out, with_null, 0.0, ctx.causal, attn_mask=additive, scale=ctx.scaling
        )
        if group > 1:
            of_key, of_value = (part.unflatten(1, (key.shape[1], group)).sum(2) for part in (of_key, of_value))
        through = (gradient * out).sum(-1).to(with_null.dtype)
        of_null = -(torch.exp(null.to(with_null.dtype)[:, None] - with_null) * through).sum((0, 2)).to(null.dtype)
        return of_query, of_key, of_value, of_null, None, None, None


def _phantom_key(
    query: Query, key: Key, value: Key, null: NullLogit, mask: Bool[Tensor, "..."] | None, scaling: float
) -> Query:
    """One more key and value of zeros, whose logit is written into the mask."""
    queries, keys = query.shape[-2], key.shape[-2]
    if mask is None:
        mask = causal_mask(queries, keys, None, query.device)
    mask = mask[(None,) * (4 - mask.dim())]
    rows = null.to(query.dtype)[None, :, None, None].expand(mask.shape[0], -1, mask.shape[2], 1)
    allowed = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, -torch.inf)
    additive = torch.cat((allowed.expand(-1, query.shape[1], -1, -1), rows), -1)
    key, value = (functional.pad(part, (0, 0, 0, 1)) for part in (key, value))
    grouped = query.shape[1] != key.shape[1]
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=additive, scale=scaling, enable_gqa=grouped
    )


def with_key_bias(query: Query, key: Key, bias: Float[Tensor, "batch kv_head key"], scaling: float) -> Logits:
    """Queries and keys whose scaled products are the old ones plus a bias of each key.

    Eight more features (kernels want multiples of 8): ones in the query; the bias, and what its rounding to a narrower
    dtype lost, in the key. The alternative, a bias in the mask, loses the causal skip: 1.5 to 1.8 times the time.
    """
    # in float16 a bias may lie beyond the last number
    largest = torch.finfo(key.dtype).max
    wide = (bias / scaling).clamp(-largest, largest)
    coarse = wide.to(key.dtype)
    rest = (wide - coarse.to(wide.dtype)).to(key.dtype)
    features = functional.pad(torch.stack((coarse, rest), -1), (0, 6))
    ones = functional.pad(query.new_ones(*query.shape[:-1], 2), (0, 6))
    return torch.cat((query, ones), -1), torch.cat((key, features), -1)
