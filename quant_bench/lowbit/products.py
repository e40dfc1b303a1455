"""Plain integer products by our own VNNI tiles, and the weight panels that the tiles read."""

from typing import Any

import torch
from jaxtyping import Int8, Int32
from torch import Tensor
from torch.nn import functional

from quant_bench.lowbit import tiles
from quant_bench.lowbit.threads import shared
from quant_bench.lowbit.vnni import PANEL, TOKENS


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple that is not below the value."""
    return -(-value // multiple) * multiple


def pack_panels(codes: Any, layout: tuple[int, bool, int, int], width: int) -> Int32[Tensor, "panel word lane"]:
    """Weight panels for `tiles`, made at each call: kept, they would double the layer's memory."""
    count = round_up(codes.shape[0], PANEL) // PANEL
    panels = torch.empty(count, width // 4, PANEL, dtype=torch.int32)
    shared(tiles.pack_panels, count, codes.size, codes, layout, panels.numpy())
    return panels


def vnni_product(a: Int8[Tensor, "token col"], w: Int8[Tensor, "row col"]) -> Int32[Tensor, "token row"]:
    """Plain integer product by the same tiles, for the self-test and for parity."""
    tokens, columns = a.shape
    width = round_up(columns, 4)
    codes = functional.pad(a, (0, width - columns, 0, -tokens % TOKENS)).contiguous()
    sums = codes.sum(1, dtype=torch.int32)[None]
    panels = pack_panels(w.contiguous().view(torch.uint8).numpy(), (columns, False, columns, width), width)
    out = torch.empty(tokens, w.shape[0], dtype=torch.int32)
    arrays = (codes.numpy(), sums.numpy(), panels.numpy(), out.numpy())
    shared(tiles.products, codes.shape[0] // TOKENS, tokens * w.numel() // 16, *arrays)
    return out
