"""QuantLinear's arithmetic on the CPU with compiled loops; every bit equals `plain.py`."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int32
from torch import Tensor

from quant_bench.lowbit import fused, tiles
from quant_bench.lowbit.activation import ActivationRule
from quant_bench.lowbit.codes import WeightCodes
from quant_bench.lowbit.operands import Operand
from quant_bench.lowbit.plain import parts
from quant_bench.lowbit.products import pack_panels, round_up
from quant_bench.lowbit.threads import shared
from quant_bench.lowbit.vnni import PANEL, TOKENS
from quant_bench.numerics.integers import scale_and_zero

# up to so many tokens, rows are read one by one: packing panels pays only above
FEW_TOKENS = 4
# int32 elements of a tile that stays in half a megabyte of L2 cache
_TILE_ELEMENTS = 1 << 17


class Rows(NamedTuple):
    """Rounded rows, group first; see `fused.quantize_rows`."""

    codes: Tensor
    scale: Float[Tensor, "agroup token"]
    zero: Int32[Tensor, "agroup token"]
    sums: Int32[Tensor, "group token"]
    norms: Int32[Tensor, " token"]


@dataclass(frozen=True)
class Prepared:
    """What the loops want to know of a layer beside its codes; views of the layer's own storage where there are any.

    Attributes:
        codes: bytes as stored, uint8 (row, col or half).
        columns: columns unpacked.
        packed: whether the codes are nibbles.
        group: columns of an accumulator.
        groups: number of groups.
        arrays: scale, zero and Σ (w - z_w) as (group, row filled up to panels), and the bias.
        has_bias: whether there is one.
        asymmetric: whether weights or activations have a zero point.
        rows: output channels.
    """

    codes: Any
    columns: int
    packed: bool
    group: int
    groups: int
    arrays: tuple[Any, Any, Any, Any]
    has_bias: bool
    asymmetric: bool
    rows: int

    def layout(self, multiple: int) -> tuple[int, int]:
        """Columns that a group takes when filled up to a multiple, and all groups together."""
        stride = round_up(self.group, multiple)
        return stride, (self.groups - 1) * stride + round_up(self.columns - (self.groups - 1) * self.group, multiple)


def prepare(weight: WeightCodes, rule: ActivationRule, bias: Tensor | None) -> Prepared:
    """Group-first copies of scales and zero points, and column sums; small beside the codes."""
    group = weight.group_size or rule.group or weight.columns
    pieces = parts(weight.columns, group)
    rows, padded = weight.rows, round_up(weight.rows, PANEL)

    def by_group(values: Tensor | None, kind: torch.dtype) -> Any:
        out = torch.zeros(len(pieces), padded, dtype=kind)
        if values is not None:
            out[:, :rows] = values.t()
        return out.numpy()

    sums = None
    if not rule.symmetric:
        centred = weight.centred()
        sums = torch.stack([centred[:, part].sum(1, dtype=torch.float64) for part in pieces], 1)
    filled = torch.zeros(padded if bias is not None else 0)
    if bias is not None:
        filled[:rows] = bias
    return Prepared(
        weight.codes.view(torch.uint8).numpy(),
        weight.columns,
        weight.bits <= 4,
        group,
        len(pieces),
        (
            by_group(weight.scale, torch.float32),
            by_group(weight.zero_point, torch.int32),
            by_group(sums, torch.int32),
            filled.numpy(),
        ),
        bias is not None,
        weight.zero_point is not None or not rule.symmetric,
        rows,
    )


def _static(x: Tensor, rule: ActivationRule) -> tuple[int, tuple[float, float]]:
    """Mode of the row loop, and the range that it needs from outside."""
    if rule.scale is not None and rule.zero_point is not None:
        return fused.STATIC, (float(rule.scale), float(rule.zero_point))
    if rule.granularity != "tensor":
        return fused.SYMMETRIC if rule.symmetric else fused.ASYMMETRIC, (1.0, 0.0)
    if x.numel() == 0:
        return fused.STATIC, (1.0, 0.0)
    scale, zero = scale_and_zero(x.amin(), x.amax(), rule.grid)
    return fused.STATIC, (float(scale), float(zero))


def quantize(x: Float[Tensor, "token col"], rule: ActivationRule, shape: tuple[int, int, int], out: Tensor) -> Rows:
    """Round rows into `out` (int8: stored codes; float32: code minus zero point).

    Args:
        x: any strides; copied unless contiguous.
        rule: how to round.
        shape: (columns of a group, number of groups, columns that a group takes in `out`).
        out: as many rows as x, or more, which are filled with zeros.
    """
    x = x.contiguous()
    group, groups, stride = shape
    by_group = rule.granularity == "group"
    count = out.shape[0]
    words = torch.empty((groups if by_group else 1) * 2 + groups + 1, count, dtype=torch.int32)
    scales = groups if by_group else 1
    rows = Rows(out, words[:scales].view(torch.float32), words[scales : 2 * scales], words[2 * scales : -1], words[-1])
    mode, static = _static(x, rule)
    grid = rule.grid
    arguments = (
        mode,
        np.array((grid.low, grid.high, grid.offset), np.float32),
        np.array(static, np.float32),
        by_group,
        group,
        stride,
    )
    values = (x.numpy(), x.view(torch.int32).numpy())
    shared(fused.quantize_rows, count, x.numel(), values, arguments, tuple(tensor.numpy() for tensor in rows))
    return rows


def vnni_linear(x: Float[Tensor, "token col"], layer: Prepared, rule: ActivationRule) -> Float[Tensor, "token row"]:
    """The whole integer layer by our own product."""
    tokens = x.shape[0]
    out = torch.empty(tokens, layer.rows)
    if tokens == 0:
        return out
    few = tokens <= FEW_TOKENS
    stride, width = layer.layout(64 if few else 4)
    if few:
        width = stride * layer.groups
    codes = torch.empty(tokens if few else round_up(tokens, TOKENS), width, dtype=torch.int8)
    rows = quantize(x, rule, (layer.group, layer.groups, stride), codes)
    scale, zero, sums, bias = layer.arrays
    activation = (
        rows.codes.numpy(),
        rows.scale.numpy(),
        rows.zero.numpy(),
        rows.sums.numpy(),
        rule.granularity == "group",
    )
    weight = (scale, zero, sums, bias, layer.has_bias, layer.asymmetric, stride)
    layout = (layer.columns, layer.packed, layer.group, stride)
    if few:
        work = tokens * layer.rows * layer.columns // 16
        shared(tiles.few_tokens, layer.rows, work, activation, weight, layer.codes, layout, out.numpy())
        return out
    panels = pack_panels(layer.codes, layout, width).numpy()
    work = tokens * layer.rows * layer.columns // 16
    shared(tiles.multiply, codes.shape[0] // TOKENS, work, activation, weight, panels, out.numpy())
    return out


def tiled_linear(
    x: Float[Tensor, "token col"], layer: Prepared, rule: ActivationRule, operand: Operand
) -> Float[Tensor, "token row"]:
    """A layer by a product from outside: torch's integer product, or a float product of integers.

    Groups go tile by tile, so that accumulators are read again while they are still in the cache.
    """
    tokens = x.shape[0]
    codes = torch.empty(tokens, layer.columns, dtype=operand.dtype)
    rows = quantize(x, rule, (layer.group, layer.groups, layer.group), codes)
    step = tokens if layer.groups == 1 else max(64, _TILE_ELEMENTS // layer.rows)
    out = torch.empty(tokens, layer.rows)
    for start in range(0, tokens, max(step, 1)):
        part = slice(start, min(start + step, tokens))
        _tile(Rows(codes[part], *(values[..., part] for values in rows[1:])), layer, rule, operand, out[part])
    return out


def _tile(rows: Rows, layer: Prepared, rule: ActivationRule, operand: Operand, out: Tensor) -> None:
    by_group = rule.granularity == "group"
    count, work = out.shape[0], out.numel()
    target = out.numpy()
    bias = layer.arrays[3][: layer.rows]
    for index, columns in enumerate(parts(layer.columns, layer.group)):
        own = index if by_group else 0
        acc = operand(rows.codes[:, columns], rows.norms, index).numpy()
        scale, zero, sums = (array[index, : layer.rows] for array in layer.arrays[:3])
        token_scale = rows.scale[own].numpy()
        if operand.dtype == torch.int8 and layer.asymmetric:
            shared(fused.correct, count, work, acc, (rows.zero[own].numpy(), rows.sums[index].numpy()), (zero, sums))
        if layer.groups == 1:
            shared(fused.scale_once, count, work, acc, (scale, token_scale), bias, target)
            return
        shared(fused.accumulate, count, work, acc, (scale, token_scale, by_group), index == 0, target)
    shared(fused.finish, count, work, target, rows.scale[0].numpy(), not by_group, bias)
