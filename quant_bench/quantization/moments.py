"""What recipes want to know of the inputs of linears: second moments, sizes of channels, and some rows."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from quant_bench.errors import QuantizationError
from quant_bench.model import LanguageModel
from quant_bench.quantization.layerwise import LayerStream


@dataclass
class Moments:
    """Of one linear's input over all calibration tokens.

    Attributes:
        second: mean over tokens of x xᵀ, float32; None where it was not asked for.
        mean: mean of |x| of each feature.
        largest: maximum of |x| of each feature.
        rows: evenly spaced tokens, at most as many as were asked for.
        tokens: tokens seen.
    """

    second: Float[Tensor, "col col"] | None
    mean: Float[Tensor, " col"]
    largest: Float[Tensor, " col"]
    rows: Float[Tensor, "token col"]
    tokens: int

    def divided(self, scale: Float[Tensor, " col"]) -> "Moments":
        """The moments of x / scale."""
        second = None if self.second is None else self.second / scale[:, None] / scale
        return Moments(second, self.mean / scale, self.largest / scale, self.rows / scale, self.tokens)


class _Watch:
    """Sums of one input tensor."""

    def __init__(self, columns: int, device: torch.device, second: bool, rows: int) -> None:
        self.second = torch.zeros(columns, columns, device=device) if second else None
        self.mean = torch.zeros(columns, dtype=torch.float64, device=device)
        self.largest = torch.zeros(columns, device=device)
        self.wanted, self.kept, self.tokens = rows, list[Tensor](), 0

    def add(self, x: Tensor) -> None:
        x = x.detach().reshape(-1, x.shape[-1]).float()
        if self.second is not None:
            self.second.addmm_(x.T, x)
        size = x.abs()
        self.mean += size.sum(0, dtype=torch.float64)
        self.largest = torch.maximum(self.largest, size.amax(0))
        if self.wanted:
            step = max(1, len(x) // self.wanted)
            self.kept.append(x[::step][: self.wanted].clone())
        self.tokens += len(x)

    def moments(self) -> Moments:
        second = None if self.second is None else self.second / self.tokens
        rows = torch.cat(self.kept) if self.kept else self.largest.new_zeros(0, len(self.largest))
        return Moments(second, (self.mean / self.tokens).float(), self.largest, rows, self.tokens)


def layer_moments(
    model: LanguageModel, stream: LayerStream, *, second: bool = False, rows: int = 0
) -> dict[str, Moments]:
    """Moments of the inputs of every linear of the stream's layer, by path; its inputs stay where they are.

    Linears that read one tensor (query, key and value) share one object.

    Args:
        model: whose layer it is.
        stream: stands before the layer.
        second: whether second moments are wanted.
        rows: tokens to keep of each batch.

    Raises:
        QuantizationError: an input is not finite, or a linear is never called.
    """
    paths = [site.path for site in model.layout.linears if site.layer == stream.layer]
    watches: dict[str, _Watch] = {}
    last: list[tuple[Tensor, _Watch]] = []

    def hook(path: str) -> Any:
        def before(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            x = arguments[0]
            # the same tensor again: seen already, unless this path has sums of its own
            shared = next((watch for tensor, watch in last if tensor is x), None)
            if shared is not None and watches.get(path, shared) is shared:
                watches[path] = shared
                return
            watch = watches.get(path)
            if watch is None:
                watch = watches[path] = _Watch(x.shape[-1], x.device, second, rows)
            watch.add(x)
            last.append((x, watch))

        return before

    hooks = [model.module.get_submodule(path).register_forward_pre_hook(hook(path)) for path in paths]
    try:
        stream.run(last.clear)
    finally:
        for handle in hooks:
            handle.remove()
    missing = [path for path in paths if path not in watches]
    if missing:
        raise QuantizationError(f"{missing[0]} is not called when its layer runs")
    found: dict[int, Moments] = {id(watch): watch.moments() for watch in watches.values()}
    for path, watch in watches.items():
        if not bool(watch.largest.isfinite().all()):
            raise QuantizationError(f"{path}: the input over calibration is not finite")
    return {path: found[id(watch)] for path, watch in watches.items()}
