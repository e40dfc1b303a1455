"""Saturation: the share of activations that fall off their static ranges."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from quant_bench.lowbit.linear import QuantLinear
from quant_bench.model import LanguageModel
from quant_bench.quantization.rounding import StaticRounding


def saturation_shares(model: LanguageModel, ids: Int[Tensor, "batch seq"]) -> dict[str, float]:
    """Share of values clamped by each static rounding in one forward pass, by module path.

    Args:
        model: a quantized model; its body runs once and is left as it was.
        ids: token ids.

    Returns:
        One entry a static rounding: the input of a `QuantLinear` under its own path, others under the rounding's path.
        Empty for schemes with dynamic ranges, which cover every value.
    """
    shares: dict[str, float] = {}
    undo: list[Any] = []
    observed: list[tuple[QuantLinear, str]] = []
    for path, module in model.module.named_modules():
        if isinstance(module, QuantLinear) and module.activation is not None and module.activation.static:
            module.observe_saturation = True
            observed.append((module, path))
        elif isinstance(module, StaticRounding):
            undo.append(module.register_forward_pre_hook(_recorder(shares, path)))
    try:
        with torch.no_grad():
            model.body(input_ids=ids.to(model.device), use_cache=False)
    finally:
        for handle in undo:
            handle.remove()
        for linear, path in observed:
            linear.observe_saturation = False
            if linear.saturation is not None:
                shares[path] = linear.saturation
    return shares


def _recorder(shares: dict[str, float], path: str) -> Any:
    def record(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(module, StaticRounding)
        shares[path] = module.saturated(arguments[0])

    return record
