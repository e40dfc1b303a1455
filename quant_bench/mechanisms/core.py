"""Mechanism: an attention core put together from a key bias, a null logit and a normalizer."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from quant_bench.attention import Key, Query, sdpa
from quant_bench.errors import NotApplicable
from quant_bench.mechanisms.fused import Logits, null_attention, with_key_bias
from quant_bench.mechanisms.gates import ReadGate, log_gate
from quant_bench.mechanisms.normalizers import safe_softmax
from quant_bench.mechanisms.tiles import Change, HeadIndex, Normalizer, Scores, softmax, tiled_attention

Operands = tuple[Query, Key, Key]


class Null(nn.Module):
    """The null's logit of each query head: 0 for ever, or learned from 0 on."""

    undecayed = ("logit",)

    def __init__(self, heads: int, like: Tensor, learned: bool) -> None:
        super().__init__()
        zeros = like.new_zeros(heads)
        if learned:
            self.logit = nn.Parameter(zeros, requires_grad=like.requires_grad)
        else:
            self.register_buffer("logit", zeros, persistent=False)


class GateBias(nn.Module):
    """log g of each read as a bias of its key: routing by the gate, values as they are."""

    def __init__(self, gate: ReadGate) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, key: Key, value: Key, scaling: float) -> Float[Tensor, "batch kv_head key"]:
        return log_gate(self.gate, value)


class KeyLengthBias(nn.Module):
    """-scaling |k|^2 / 2: with it, scores rank keys by their distance from the query."""

    def forward(self, key: Key, value: Key, scaling: float) -> Float[Tensor, "batch kv_head key"]:
        wide = key.to(torch.promote_types(key.dtype, torch.float32))
        return wide.square().sum(-1) * (-scaling / 2)


class Mechanism(nn.Module):
    """An `AttentionCore`: weights = normalizer(scores + key bias, null), each part where an arm has set it.

    Where the attention module has a list `null_masses` (a depth router's layer puts it there), every call appends the
    mass on the null, of shape (batch, head, query).

    Attributes:
        null: null logits, or None.
        bias: key, value and the whole scaling (of queries as they are projected) -> bias of each key, or None.
        normalizer: masked scores -> weights, given the null logits of their heads; None means softmax.
    """

    def __init__(self) -> None:
        super().__init__()
        self.null: Null | None = None
        self.bias: nn.Module | None = None
        self.normalizer: Callable[[Tensor, Tensor | None], Tensor] | None = None

    def operands(self, module: nn.Module, query: Query, key: Key, value: Key, scaling: float) -> Logits:
        """Queries and keys whose scaled products are the logits, the key bias included."""
        if self.bias is None:
            return query, key
        # OPT scales its queries before: of its scores, what scales a product of query and key is the module's
        whole = float(getattr(module, "scaling", scaling))
        return with_key_bias(query, key, self.bias(key, value, whole), scaling)

    def probabilities(self, module: nn.Module, scores: Scores, heads: HeadIndex) -> Scores:
        """Weights of masked logits; a row that may see nothing gives zeros."""
        null = None
        if self.null is not None:
            null = self.null.logit.to(scores.dtype)[heads][..., None, None]
        return safe_softmax(scores, null) if self.normalizer is None else self.normalizer(scores, null)

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
        if self.normalizer is not None:
            return attention_in_tiles(self, module, (query, key, value), mask, scaling).to(query.dtype)
        masses: list[Tensor] | None = None if self.null is None else module.__dict__.get("null_masses")
        query, key = self.operands(module, query, key, value, scaling)
        width = value.shape[-1]
        if masses is not None:
            # one more feature, of ones: what its average lacks to 1 is on the null, with exact gradients
            value = functional.pad(value, (0, 1), value=1.0)
        # fused kernels want keys and values of one width, a multiple of 8
        full = max(key.shape[-1], width + 8) if masses is not None else max(key.shape[-1], width)
        query, key, value = (_widened(part, full) for part in (query, key, value))
        if self.null is None:
            mixed = sdpa(module, query, key, value, mask=mask, scaling=scaling)
        else:
            mixed = null_attention(query, key, value, self.null.logit, mask=mask, scaling=scaling)
        if masses is not None:
            masses.append((1.0 - mixed[..., width]).clamp_min(0.0))
        return mixed[..., :width]


def normalizer_of(core: Any, module: nn.Module) -> Normalizer:
    """How a core turns scores (disallowed ones are -inf) into probabilities.

    Plain softmax, or the method `probabilities(module, scores, heads)` of the core that an arm has set.

    Raises:
        NotApplicable: the arm's core has no such method, so its probabilities can be neither seen nor rounded.
    """
    if core is sdpa:
        return softmax
    if not hasattr(core, "probabilities"):
        raise NotApplicable(f"{core!r} has no method `probabilities`, so its attention probabilities cannot be seen")
    return lambda scores, heads: core.probabilities(module, scores, heads)


def operands_of(core: Any, module: nn.Module, operands: Operands, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys whose scaled products are a core's logits, with its key bias where it has one; and values."""
    prepare = getattr(core, "operands", None)
    return operands if prepare is None else (*prepare(module, *operands, scaling), operands[2])


def attention_in_tiles(
    core: Any,
    module: nn.Module,
    operands: Operands,
    mask: Bool[Tensor, "..."] | None,
    scaling: float,
    steps: tuple[Change | None, Change | None] = (None, None),
) -> Float[Tensor, "batch head query out"]:
    """The attention of a core with its scores and probabilities at hand, in float32 or wider.

    Args:
        core: an arm's, or `sdpa`.
        module: the attention module; gets the mass on the null, where it has the list `null_masses`.
        operands: query, key and value as an `AttentionCore` gets them.
        mask: likewise.
        scaling: likewise.
        steps: what sees scores (before the mask) and probabilities, and may change them in place.

    Raises:
        NotApplicable: the core has no method `probabilities`.
    """
    _keep_null_mass(core, module, operands, mask, scaling)
    return tiled_attention(
        operands_of(core, module, operands, scaling),
        mask,
        scaling,
        mechanism=normalizer_of(core, module),
        at_scores=steps[0],
        at_probabilities=steps[1],
    )


def _keep_null_mass(
    core: Any, module: nn.Module, operands: Operands, mask: Bool[Tensor, "..."] | None, scaling: float
) -> None:
    """Leave each query's mass on the null of `core` in the list `module.null_masses`, where there are both.

    The mass is that of the softmax with the null, before any stretching or rounding.
    """
    masses: list[Tensor] | None = module.__dict__.get("null_masses")
    if masses is None or not isinstance(core, Mechanism) or core.null is None:
        return
    query, key = core.operands(module, *operands, scaling)
    mixed = null_attention(query, key, torch.ones_like(key), core.null.logit, mask=mask, scaling=scaling)
    masses.append((1.0 - mixed[..., 0]).clamp_min(0.0))


def _widened(part: Float[Tensor, "*batch dim"], width: int) -> Float[Tensor, "*batch wider"]:
    return functional.pad(part, (0, width - part.shape[-1])) if width > part.shape[-1] else part
