"""QuantLinear's arithmetic on the CPU with compiled loops; every bit equals `plain.py`."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
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

# up to so many tokens, weight rows are read one by one: packing panels pays only above (without and with groups)
_FEW_TOKENS = (12, 4)
# int32 elements of a tile that stays in half a megabyte of L2 cache
_TILE_ELEMENTS = 1 << 17


class Rows(NamedTuple):
    """Rounded rows as arrays, per-token numbers group first; see `fused.quantize_rows`.

    Arrays rather than tensors: slicing and passing them on costs a tenth, which is what a single token consists of.
    """

    codes: Any
    scale: Any
    zero: Any
    sums: Any
    norms: Any


@dataclass(frozen=True)
class Prepared:
    """What the loops want to know of a layer beside its codes; views of the layer's own storage where there are any.

    Attributes:
        codes: bytes as stored, uint8 (row, col or half).
        columns: columns unpacked.
        packed: whether the codes are nibbles.
        group: columns of an accumulator.
        groups: number of groups.
        arrays: scale, whole zero and Σ (w - z_w) as (group, row filled up to panels), and the bias.
        rest: (group, row) what real zero points add to whole ones, or None.
        has_bias: whether there is a bias.
        asymmetric: whether weights or activations have a zero point.
        rows: output channels.
    """

    codes: Any
    columns: int
    packed: bool
    group: int
    groups: int
    arrays: tuple[Any, Any, Any, Any]
    rest: Any
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
    zero, rest = weight.split_zero()
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
            by_group(zero, torch.int32),
            by_group(sums, torch.int32),
            filled.numpy(),
        ),
        None if rest is None else by_group(rest, torch.float32)[:, :rows],
        bias is not None,
        zero is not None or not rule.symmetric,
        rows,
    )


def row_rule(x: Tensor, rule: ActivationRule, shape: tuple[int, int, int]) -> tuple[Any, ...]:
    """How rows are rounded, as `fused.quantize_rows` takes it; depends on x only if the range is dynamic per tensor.

    Args:
        x: the values.
        rule: how to round.
        shape: (columns of a group, number of groups, columns that a group takes in the codes).
    """
    grid = rule.grid
    mode, static = fused.STATIC, (1.0, 0.0)
    if rule.scale is not None and rule.zero_point is not None:
        static = (rule.scale.item(), rule.zero_point.item())
    elif rule.granularity != "tensor":
        mode = fused.SYMMETRIC if rule.symmetric else fused.ASYMMETRIC
    elif x.numel():
        scale, zero = scale_and_zero(x.amin(), x.amax(), grid)
        static = (scale.item(), zero.item())
    limits = np.array((grid.low, grid.high, grid.offset), np.float32)
    return mode, limits, np.array(static, np.float32), rule.granularity == "group", shape[0], shape[2]


def _rows(codes: Any, by_group: bool, groups: int) -> Rows:
    count, scales = codes.shape[0], groups if by_group else 1
    words = np.empty((scales + groups, count), np.int32)
    scale, norms = np.empty((scales, count), np.float32), np.empty(count, np.int32)
    return Rows(codes, scale, words[:scales], words[scales:], norms)


def quantize(x: Float[Tensor, "token col"], rule: ActivationRule, shape: tuple[int, int, int], codes: Any) -> Rows:
    """Round rows into `codes` (int8: stored codes; float32: code minus zero point).

    Args:
        x: float32, any strides; copied unless contiguous.
        rule: how to round.
        shape: (columns of a group, number of groups, columns that a group takes in `codes`).
        codes: array with as many rows as x, or more, which are filled with zeros.
    """
    arguments = row_rule(x, rule, shape)
    rows = _rows(codes, arguments[3], shape[1])
    values = x.contiguous().numpy()
    shared(fused.quantize_rows, codes.shape[0], values.size, (values, values.view(np.int32)), arguments, tuple(rows))
    return rows


class VnniLinear:
    """The whole integer layer by our own product.

    Args:
        layer: codes, scales and zero points.
        rule: how x is rounded.
    """

    def __init__(self, layer: Prepared, rule: ActivationRule) -> None:
        self._layer, self._rule = layer, rule
        self._few, self._many = self._plan(64), self._plan(4)

    def _plan(self, multiple: int) -> tuple[Any, ...]:
        """What does not change between calls: row rule, weight side and layout of codes for `tiles`; width of a row."""
        layer, rule = self._layer, self._rule
        stride, width = layer.layout(multiple)
        changes = rule.granularity == "tensor" and not rule.static
        fixed = None if changes else row_rule(torch.empty(0), rule, (layer.group, layer.groups, stride))
        weight = (*layer.arrays, layer.has_bias, layer.asymmetric, stride)
        return fixed, weight, (layer.columns, layer.packed, layer.group, stride), width

    def __call__(self, x: Float[Tensor, "token col"]) -> Float[Tensor, "token row"]:
        """Rounded, multiplied and scaled."""
        layer, tokens = self._layer, x.shape[0]
        few = tokens <= _FEW_TOKENS[layer.groups > 1]
        fixed, weight, layout, width = self._few if few else self._many
        rule = fixed or row_rule(x, self._rule, (layer.group, layer.groups, layout[3]))
        out = torch.empty(tokens, layer.rows)
        values, target = x.contiguous().numpy(), out.numpy()
        # sixteen products count as one element of other loops
        work = tokens * layer.rows * layer.columns // 16
        if few:
            shared(tiles.few_tokens, layer.rows, work, values, rule, weight, layer.codes, layout, target)
            return out
        panels = pack_panels(layer.codes, layout, width).numpy()
        codes = np.empty((round_up(tokens, TOKENS), width), np.int8)
        rows = tuple(_rows(codes, rule[3], layer.groups))
        both = (values, values.view(np.int32))
        shared(tiles.quantize_and_multiply, codes.shape[0] // TOKENS, work, both, rule, rows, weight, panels, target)
        return out


def tiled_linear(
    x: Float[Tensor, "token col"], layer: Prepared, rule: ActivationRule, operand: Operand
) -> Float[Tensor, "token row"]:
    """A layer by a product from outside: torch's integer product, or a float product of integers.

    Groups go tile by tile, so that accumulators are read again while they are still in the cache.
    """
    tokens = x.shape[0]
    codes = torch.empty(tokens, layer.columns, dtype=operand.dtype)
    rows = quantize(x, rule, (layer.group, layer.groups, layer.group), codes.numpy())
    step = tokens if layer.groups == 1 else max(64, _TILE_ELEMENTS // layer.rows)
    out = torch.empty(tokens, layer.rows)
    for start in range(0, tokens, max(step, 1)):
        part = slice(start, min(start + step, tokens))
        _tile(codes[part], Rows(*(array[..., part] for array in rows)), layer, rule, operand, out[part])
    return out


def _tile(codes: Tensor, rows: Rows, layer: Prepared, rule: ActivationRule, operand: Operand, out: Tensor) -> None:
    by_group = rule.granularity == "group"
    count, work = out.shape[0], out.numel()
    target = out.numpy()
    bias = layer.arrays[3][: layer.rows]
    for index, columns in enumerate(parts(layer.columns, layer.group)):
        own = index if by_group else 0
        acc = operand(codes[:, columns], rows.norms, index).numpy()
        scale, zero, sums = (array[index, : layer.rows] for array in layer.arrays[:3])
        if operand.dtype == torch.int8 and layer.asymmetric:
            shared(fused.correct, count, work, acc, (rows.zero[own], rows.sums[index]), (zero, sums))
        if layer.rest is not None:
            # float32 codes are written less their zero points already
            width = columns.stop - columns.start if operand.dtype == torch.int8 else 0
            totals = rows.sums[index] - rows.zero[own] * np.int32(width)
            whole, acc = acc, np.empty(acc.shape, np.float32)
            shared(fused.less_rest, count, work, whole, totals, layer.rest[index], acc)
        if layer.groups == 1:
            shared(fused.scale_once, count, work, acc, (scale, rows.scale[0]), bias, target)
            return
        shared(fused.accumulate, count, work, acc, (scale, rows.scale[own], by_group), index == 0, target)
    shared(fused.finish, count, work, target, rows.scale[0], not by_group, bias)
