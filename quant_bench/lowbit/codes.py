"""Weights as integer codes: the only truth that every execution of a quantized layer works on."""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float, Int8, Int32, UInt8
from torch import Tensor, nn
from torch.nn import functional

from quant_bench.errors import QuantizationError
from quant_bench.lowbit.clip import best_clip
from quant_bench.numerics.integers import Grid, round_to_grid, scale_and_zero
from quant_bench.rebuild import Parts, rebuildable

WeightGranularity = Literal["tensor", "channel", "group"]
Search = Literal["minmax", "mse"]


def pack_nibbles(codes: Int8[Tensor, "row col"]) -> UInt8[Tensor, "row half"]:
    """Two 4-bit codes a byte, stored as code + 8: low nibble from the first half of the columns, high from the second.

    Split halves unpack with one mask and one shift over whole rows; interleaved neighbours would need a shuffle. An odd
    number of columns is filled up with code 0.
    """
    half = (codes.shape[1] + 1) // 2
    stored = (functional.pad(codes, (0, 2 * half - codes.shape[1])) + 8).to(torch.uint8)
    return stored[:, :half] | (stored[:, half:] << 4)


def unpack_nibbles(packed: UInt8[Tensor, "row half"], columns: int) -> Int8[Tensor, "row col"]:
    """The codes that `pack_nibbles` stored."""
    both = torch.cat((packed & 15, packed >> 4), dim=1).to(torch.int8) - 8
    return both[:, :columns].contiguous()


@rebuildable("bits", "columns", "group_size", "granularity")
class WeightCodes(nn.Module):
    """Integer codes of a weight matrix with their scales; value = (code - zero_point) · scale.

    Changing the dtype of a model does not touch codes, scales or zero points: they are what was quantized.

    Attributes:
        codes: int8 (row, col), or up to 4 bits uint8 (row, half): see `pack_nibbles`. Codes of an asymmetric grid are
            stored minus 2^(bits-1).
        scale: float32 (row, group); group is 1 unless `group_size` is set.
        zero_point: (row, group) in the coordinates of the stored codes: int32, or float32 where zero points are real
            numbers (see `split_zero`); None for a symmetric grid.
        bits: 2 to 8.
        group_size: columns a scale, the last group may be shorter; None: one scale a row.
        columns: number of columns before packing.
        granularity: as asked for; `tensor` repeats its one scale in every row.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None

    def __init__(
        self,
        codes: Int8[Tensor, "row col"],
        scale: Float[Tensor, "row group"],
        zero_point: Tensor | None,
        *,
        bits: int,
        group_size: int | None = None,
        granularity: WeightGranularity | None = None,
    ) -> None:
        super().__init__()
        groups = 1 if group_size is None else -(-codes.shape[1] // group_size)
        if scale.shape != (codes.shape[0], groups):
            raise QuantizationError(f"scale must have shape {(codes.shape[0], groups)}; got {tuple(scale.shape)}")
        if int(codes.min()) < -(1 << (bits - 1)) or int(codes.max()) >= 1 << (bits - 1):
            raise QuantizationError(f"codes must fit in {bits} bits")
        self.bits = bits
        self.group_size = group_size
        self.columns = codes.shape[1]
        self.granularity: WeightGranularity = granularity or ("channel" if group_size is None else "group")
        self.register_buffer("codes", pack_nibbles(codes) if bits <= 4 else codes.contiguous())
        self.register_buffer("scale", scale.float().contiguous())
        if zero_point is not None:
            kind = torch.float32 if zero_point.is_floating_point() else torch.int32
            zero_point = zero_point.to(kind).contiguous()
        self.register_buffer("zero_point", zero_point)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "WeightCodes":
        """Follow `fn` to its device, never to its dtype: a rounded scale would be another quantization."""
        super()._apply(lambda tensor: keep_dtype(fn, tensor), recurse)  # type: ignore[no-untyped-call]
        return self

    @classmethod
    def rebuilt(cls, parts: Parts) -> "WeightCodes":
        """The codes again; they are packed in memory as in a file."""
        settings, tensors = dict(parts.settings), parts.tensors
        columns, codes = settings.pop("columns"), tensors["codes"]
        unpacked = unpack_nibbles(codes, columns) if settings["bits"] <= 4 else codes
        return cls(unpacked, tensors["scale"], tensors.get("zero_point"), **settings)

    @property
    def rows(self) -> int:
        """Number of output channels."""
        return self.scale.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points as stored."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    def unpacked(self) -> Int8[Tensor, "row col"]:
        """Codes, one a byte."""
        return unpack_nibbles(self.codes, self.columns) if self.bits <= 4 else self.codes

    def split_zero(self) -> tuple[Int32[Tensor, "row group"] | None, Float[Tensor, "row group"] | None]:
        """Zero points as whole number and remainder, zero = whole + rest; None where there is none.

        The whole number is a code of the grid, so that integer sums stay within what their bits allow.
        """
        zero = self.zero_point
        if zero is None or not zero.is_floating_point():
            return zero, None
        half = 1 << (self.bits - 1)
        whole = zero.round().clamp_(-half, half - 1)
        return whole.to(torch.int32), zero - whole

    def centred(self) -> Float[Tensor, "row col"]:
        """Code - whole zero point as integer-valued float32: what simulated execution multiplies with."""
        centred = self.unpacked().float()
        whole, _ = self.split_zero()
        return centred if whole is None else centred.sub_(self.by_column(whole))

    def by_column(self, per_group: Tensor) -> Tensor:
        """Repeat a (row, group) tensor so that it broadcasts over the columns."""
        if self.group_size is None:
            return per_group
        return per_group.repeat_interleave(self.group_size, dim=1)[:, : self.columns]

    def dequantize(self) -> Float[Tensor, "row col"]:
        """The weights that the codes stand for, float32."""
        values = self.centred()
        _, rest = self.split_zero()
        if rest is not None:
            values.sub_(self.by_column(rest))
        return values.mul_(self.by_column(self.scale))

    def extra_repr(self) -> str:
        return f"{self.rows}, {self.columns}, bits={self.bits}, granularity={self.granularity}"


def keep_dtype(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """`fn(tensor)` on its device, in the dtype that the tensor had."""
    moved = fn(tensor)
    return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)


def quantize_weight(
    weight: Float[Tensor, "row col"],
    *,
    bits: int,
    granularity: WeightGranularity = "channel",
    symmetric: bool = True,
    search: Search = "minmax",
    group_size: int = 128,
) -> WeightCodes:
    """Round a weight matrix to integer codes.

    Args:
        weight: finite weights, one output channel a row.
        bits: 2 to 8.
        granularity: one scale for the tensor, each row, or each `group_size` columns of a row (the last may be
            shorter).
        symmetric: restricted grid around 0, else with a zero point.
        search: `minmax` covers every value; `mse` takes, of 100 equally spaced clips, the one with the least squared
            rounding error (the widest of equals).
        group_size: columns a group.

    Raises:
        QuantizationError: a weight is not finite.
    """
    if not bool(weight.isfinite().all()):
        raise QuantizationError("a weight is not finite: no range covers it")
    grid = Grid(bits, symmetric)
    blocks = weight_blocks(weight.detach().float(), granularity, group_size)
    low, high = blocks.amin(-1), blocks.amax(-1)
    if search == "mse":
        low, high = best_clip(blocks, low, high, grid)
    return quantize_in_ranges(weight, (low, high), grid, granularity, group_size)


def quantize_in_ranges(
    weight: Float[Tensor, "row col"],
    ranges: tuple[Float[Tensor, " block"], Float[Tensor, " block"]],
    grid: Grid,
    granularity: WeightGranularity,
    group_size: int,
) -> WeightCodes:
    """Round a weight matrix to the nearest codes of given ranges; what lies outside gets the nearest end.

    Args:
        weight: finite weights, one output channel a row.
        ranges: low and high end for each row of `weight_blocks`.
        grid: codes.
        granularity: see `quantize_weight`.
        group_size: columns a group.
    """
    rows, columns = weight.shape
    blocks = weight_blocks(weight.detach().float(), granularity, group_size)
    scale, zero = scale_and_zero(*ranges, grid)
    codes = round_to_grid(blocks, scale[:, None], zero[:, None], grid).sub_(grid.offset).to(torch.int8)
    groups = -(-columns // group_size) if granularity == "group" else 1
    codes = codes.reshape(rows, -1)[:, :columns].contiguous()

    def per_row(values: Tensor) -> Tensor:
        return values.reshape(-1, groups).expand(rows, groups).contiguous()

    return WeightCodes(
        codes,
        per_row(scale),
        None if grid.symmetric else per_row(zero - grid.offset),
        bits=grid.bits,
        group_size=group_size if granularity == "group" else None,
        granularity=granularity,
    )


def weight_blocks(
    weight: Float[Tensor, "row col"], granularity: WeightGranularity, group_size: int
) -> Float[Tensor, "block size"]:
    """One row for each scale; a short last group is filled with 0, which lies in every range and rounds exactly."""
    if granularity == "tensor":
        return weight.reshape(1, -1)
    if granularity == "channel":
        return weight
    missing = -weight.shape[1] % group_size
    return functional.pad(weight, (0, missing)).reshape(-1, group_size)
