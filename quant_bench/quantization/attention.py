"""Attention with its scores, probabilities and context rounded (or watched), in tiles that stay in the cache."""

from typing import Any

from jaxtyping import Bool
from torch import Tensor, nn

from quant_bench.attention import Key, Query, causal_mask, core_of, sdpa
from quant_bench.calibrate import RangeWatch
from quant_bench.errors import NotApplicable
from quant_bench.mechanisms.core import keep_null_mass
from quant_bench.mechanisms.tiles import Normalizer, Scores, softmax, tiled_attention
from quant_bench.quantization.rounding import StaticRounding
from quant_bench.rebuild import rebuildable

Operands = tuple[Query, Key, Key]


def mechanism_of(module: nn.Module) -> Normalizer:
    """How an attention module turns scores (disallowed ones are -inf) into probabilities.

    Plain softmax, or the method `probabilities(module, scores, heads)` of the core that an arm has set.

    Raises:
        NotApplicable: the arm's core has no such method, so its probabilities cannot be rounded.
    """
    core: Any = core_of(module)
    if core is sdpa:
        return softmax
    if not hasattr(core, "probabilities"):
        raise NotApplicable(f"scope=full rounds attention probabilities, and {core!r} has no method `probabilities`")
    return lambda scores, heads: core.probabilities(module, scores, heads)


def operands_of(core: Any, module: nn.Module, operands: Operands, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys whose scaled products are the arm's logits: with its key bias, where it has one."""
    prepare = getattr(core, "operands", None)
    return operands if prepare is None else (*prepare(module, *operands, scaling), operands[2])


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
        keep_null_mass(arm, module, (query, key, value), mask, scaling)
        mixed = tiled_attention(
            operands_of(arm, module, (query, key, value), scaling),
            mask,
            scaling,
            at_scores=self.scores.round_,
            mechanism=softmax if arm is None else lambda scores, heads: arm.probabilities(module, scores, heads),
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
        keep_null_mass(before, module, (query, key, value), mask, scaling)
        total = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]

        def seen(name: str, values: Scores) -> Scores:
            watch.observe(f"{path}:{name}", values, total)
            return values

        mixed = tiled_attention(
            operands_of(before, module, (query, key, value), scaling),
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
