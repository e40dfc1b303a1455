"""Activations on integer grids: which range each value is rounded with, and the rounding itself."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int8, Int32
from torch import Tensor
from torch.nn import functional

from quant_bench.errors import SpecError
from quant_bench.numerics.integers import Grid, round_to_grid, scale_and_zero

ActivationGranularity = Literal["tensor", "token", "group"]


@dataclass(frozen=True)
class ActivationRule:
    """How the input of a product is rounded.

    Attributes:
        bits: 2 to 8.
        granularity: one scale for the tensor, each token, or each `group_size` features of a token.
        symmetric: restricted grid around 0, else with a zero point.
        group_size: features a group; the last may be shorter.
        scale: static scale (one number), or None: the range is that of the values at hand.
        zero_point: static zero point on the grid (0 to 2^bits - 1, as `scale_and_zero` gives it; 0 if symmetric), set
            exactly when `scale` is.
    """

    bits: int
    granularity: ActivationGranularity = "token"
    symmetric: bool = True
    group_size: int = 128
    scale: Tensor | None = None
    zero_point: Tensor | None = None

    def __post_init__(self) -> None:
        if self.granularity not in get_args(ActivationGranularity):
            raise SpecError(
                f"a range belongs to a {', '.join(get_args(ActivationGranularity))}; got {self.granularity!r}"
            )
        if (self.scale is None) != (self.zero_point is None):
            raise SpecError("a static range has both a scale and a zero point")
        if self.scale is not None and self.granularity != "tensor":
            raise SpecError(f"a static range belongs to a tensor; got granularity {self.granularity!r}")
        if self.granularity == "group" and self.group_size < 1:
            raise SpecError(f"group_size must be at least 1; got {self.group_size!r}")
        if self.scale is not None and self.scale.numel() != 1:
            raise SpecError(f"a static scale is one number; got shape {tuple(self.scale.shape)}")

    @property
    def static(self) -> bool:
        """Whether the range was fixed by calibration."""
        return self.scale is not None

    def settings(self) -> dict[str, Any]:
        """All but a static range: the arguments to make a rule again."""
        return {name: getattr(self, name) for name in ("bits", "granularity", "symmetric", "group_size")}

    @property
    def grid(self) -> Grid:
        """The codes."""
        return Grid(self.bits, self.symmetric)

    @property
    def group(self) -> int | None:
        """Features a scale, or None for one scale a token (or tensor)."""
        return self.group_size if self.granularity == "group" else None

    def describe(self) -> str:
        """Such as `A8 per token`."""
        fineness = f"per group of {self.group_size}" if self.granularity == "group" else f"per {self.granularity}"
        return f"A{self.bits} {'static ' if self.static else ''}{fineness}{'' if self.symmetric else ' asymmetric'}"


class ActivationCodes(NamedTuple):
    """Rounded activations; value = (code - zero_point) · scale.

    Attributes:
        codes: stored codes (asymmetric ones minus 2^(bits-1)).
        scale: one for each token and group; NaN where the values were not finite, so that the result is not either.
        zero_point: in the coordinates of the stored codes, or None for a symmetric grid.
    """

    codes: Int8[Tensor, "token col"]
    scale: Float[Tensor, "token group"]
    zero_point: Int32[Tensor, "token group"] | None


def encode(x: Float[Tensor, "token col"], rule: ActivationRule) -> ActivationCodes:
    """Round activations to codes (plain torch: the definition that the fused kernels are tested against)."""
    codes, scale, zero = _round(x, rule)
    offset = rule.grid.offset
    stored = codes.sub_(offset).to(torch.int8)
    return ActivationCodes(stored, scale, None if rule.symmetric else zero - offset)


def encode_centred(
    x: Float[Tensor, "token col"], rule: ActivationRule
) -> tuple[Float[Tensor, "token col"], Float[Tensor, "token group"]]:
    """Code - zero_point as integer-valued float32, and the scales: the operands of simulated execution."""
    codes, scale, zero = _round(x, rule)
    return (codes if rule.symmetric else codes.sub_(_by_column(zero, rule.group, x.shape[1]))), scale


def fake_quantize(x: Float[Tensor, "*shape col"], rule: ActivationRule) -> Float[Tensor, "*shape col"]:
    """The values on the grid that x is rounded to, in x's dtype."""
    flat = x.reshape(-1, x.shape[-1])
    centred, scale = encode_centred(flat, rule)
    return centred.mul_(_by_column(scale, rule.group, flat.shape[1])).to(x.dtype).reshape(x.shape)


def saturation(x: Float[Tensor, "*shape col"], rule: ActivationRule) -> float:
    """Share of values that lie outside a static range and were clamped; 0 for a dynamic range, which covers all."""
    if rule.scale is None or rule.zero_point is None or x.numel() == 0:
        return 0.0
    codes = torch.div(x.float(), rule.scale).round_().add_(rule.zero_point)
    return float(((codes < rule.grid.low) | (codes > rule.grid.high)).sum(dtype=torch.int64)) / x.numel()


def _by_column(per_group: Tensor, group: int | None, columns: int) -> Tensor:
    if group is None:
        return per_group
    return per_group.repeat_interleave(group, dim=1)[:, :columns]


def _ranges(x: Float[Tensor, "token col"], rule: ActivationRule) -> tuple[Tensor, Tensor]:
    """Scale and zero point, each (token, group)."""
    tokens, columns = x.shape
    grid = rule.grid
    if rule.scale is not None and rule.zero_point is not None:
        scale = rule.scale.float().reshape(1, 1).expand(tokens, 1)
        # an infinity saturates, but NaN lies on no side of the range
        scale = torch.where(x.isnan().any(1, keepdim=True), torch.nan, scale)
        return scale, rule.zero_point.to(torch.int32).reshape(1, 1).expand(tokens, 1)
    if rule.granularity == "group":
        blocks = functional.pad(x, (0, -columns % rule.group_size)).reshape(tokens, -1, rule.group_size)
    else:
        blocks = x.reshape(tokens, 1, columns)
    if tokens == 0:
        empty = x.new_ones(blocks.shape[:2], dtype=torch.float32)
        return empty, empty.to(torch.int32)
    if grid.symmetric:
        high = blocks.abs().amax(-1)
        low = -high
    else:
        low, high = blocks.amin(-1), blocks.amax(-1)
    if rule.granularity == "tensor":
        low, high = low.amin().expand(tokens, 1), high.amax().expand(tokens, 1)
    return scale_and_zero(low, high, grid)


def _round(x: Float[Tensor, "token col"], rule: ActivationRule) -> tuple[Tensor, Tensor, Tensor]:
    x = x.float()
    scale, zero = _ranges(x, rule)
    columns = x.shape[1]
    codes = round_to_grid(x, _by_column(scale, rule.group, columns), _by_column(zero, rule.group, columns), rule.grid)
    return codes, scale, zero
