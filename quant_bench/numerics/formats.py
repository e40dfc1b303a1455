"""Floating-point formats of 4 and 8 bits: elements, and the scales that blocks of them share."""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

FormatName = Literal["fp8", "mxfp4", "nvfp4"]
# one float32 scale for each row of a matrix (channel, token), or for all of it
OuterScale = Literal["row", "tensor"]

_EXPONENT_BITS = 0x7F800000


@dataclass(frozen=True)
class Element:
    """Sign, exponent and mantissa without infinities; subnormal numbers included.

    Attributes:
        mantissa: bits after the leading one.
        exponent: of the smallest normal number.
        largest: largest value; larger ones saturate.
    """

    mantissa: int
    exponent: int
    largest: float


E4M3: Final = Element(mantissa=3, exponent=-6, largest=448.0)
E2M1: Final = Element(mantissa=1, exponent=0, largest=6.0)
# the magnitudes of e2m1 in the order of their codes
E2M1_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Format:
    """Elements with the scales that make them values.

    Attributes:
        element: what a value becomes.
        block: neighbouring values of a row that share a block scale; None: there is no block scale.
        power_of_two: block scales are powers of two (e8m0) and there is no float32 scale; else they are e4m3.
        text: for people.
    """

    element: Element
    block: int | None
    power_of_two: bool
    text: str


FORMATS: Final[dict[FormatName, Format]] = {
    "fp8": Format(E4M3, None, False, "FP8 (e4m3)"),
    "mxfp4": Format(E2M1, 32, True, "MXFP4 (e2m1, blocks of 32 with e8m0 scales)"),
    "nvfp4": Format(E2M1, 16, False, "NVFP4 (e2m1, blocks of 16 with e4m3 scales)"),
}


class Encoded(NamedTuple):
    """A matrix in a format; value = element · block scale · scale.

    Attributes:
        elements: values of the element's grid, float32.
        block_scale: (row, block), float32 numbers that e4m3 or e8m0 hold; None without blocks.
        scale: float32 (row, 1) or (1, 1); None without a float32 scale.
    """

    elements: Float[Tensor, "row col"]
    block_scale: Float[Tensor, "row block"] | None
    scale: Float[Tensor, "outer 1"] | None

    def operand(self, block: int | None) -> Float[Tensor, "row col"]:
        """Element · block scale, which float32 holds exactly."""
        return self.elements if self.block_scale is None else blockwise(self.elements, self.block_scale, block)


def blockwise(elements: Float[Tensor, "row col"], scale: Float[Tensor, "row block"], block: int | None) -> Tensor:
    """Elements times the scale of their block."""
    assert block is not None
    return (_blocks(elements, block) * scale[..., None]).flatten(1)[:, : elements.shape[1]]


def power_below(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Largest power of two not above |x|: 0 below the normal numbers, infinity where x is not finite."""
    return (values.contiguous().view(torch.int32) & _EXPONENT_BITS).view(torch.float32)


def round_to_element(values: Float[Tensor, "*shape"], element: Element) -> Float[Tensor, "*shape"]:
    """The nearest value of an element, half to even, saturating; NaN stays NaN.

    Source: IEEE 754-2019 section 4.3.1 (rounding); Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433 (e4m3);
    OCP Microscaling Formats v1.0, section 5.3 (e2m1).
    """
    values = values.float()
    step = power_below(values).clamp_(2.0**element.exponent, element.largest).mul_(2.0**-element.mantissa)
    return torch.div(values, step).round_().mul_(step).clamp_(-element.largest, element.largest)


def encode(values: Float[Tensor, "row col"], form: Format, outer: OuterScale = "row") -> Encoded:
    """Elements and scales of a matrix, whose ranges are its own largest magnitudes.

    - fp8: scale = max|x| / 448 of the row, or of the matrix.
    - mxfp4: block scale = 2^(floor(log2 max|x|) - 2), so that magnitudes above 6 scales saturate at 6.
      Source: OCP Microscaling Formats v1.0, section 6.3.
    - nvfp4: scale = max|x| / (6 · 448), block scale = max|x| of the block / 6 / scale, rounded to e4m3.
      Source: NVIDIA 2025, Pretraining LLMs with NVFP4, appendix on quantization, https://arxiv.org/abs/2509.25149.

    Ranges of zeros have scale 1. A block whose scale underflows to 0 becomes zeros. A value that is not finite makes
    its range NaN.
    """
    values = values.float()
    size = values.abs()
    largest = _blocks(size, form.block).amax(-1) if form.block is not None else None
    if form.power_of_two:
        assert largest is not None
        scale = power_below(largest).div_(power_below(torch.tensor(form.element.largest)))
        # a format's exponent ends at -127; float32 has normal numbers down to -126
        scale = _ones_for_zeros(scale.clamp_(min=2.0**-126), largest)
        return Encoded(_divided(values, scale, form), scale, None)
    rows = size.amax(1, keepdim=True) if outer == "row" or not size.numel() else size.amax().reshape(1, 1)
    span = form.element.largest * (1.0 if form.block is None else E4M3.largest)
    scale = _ones_for_zeros(rows / span, rows)
    if largest is None:
        return Encoded(round_to_element(values / scale, form.element), None, scale)
    block_scale = round_to_element(largest / form.element.largest / scale, E4M3)
    return Encoded(_divided(values / scale, block_scale, form), block_scale, scale)


def _blocks(values: Float[Tensor, "row col"], block: int) -> Float[Tensor, "row block size"]:
    """A short last block is filled up with zeros."""
    columns = values.shape[1]
    return functional.pad(values, (0, -columns % block)).reshape(len(values), -(-columns // block), block)


def _ones_for_zeros(scale: Tensor, largest: Tensor) -> Tensor:
    """Scale 1 where there is nothing to scale, or the scale underflows."""
    return torch.where((largest == 0) | (scale == 0), 1.0, scale)


def _divided(values: Tensor, scale: Tensor, form: Format) -> Tensor:
    """Elements of values over the scale of their block."""
    assert form.block is not None
    divisor = torch.where(scale == 0, torch.inf, scale)[..., None]
    elements = round_to_element(_blocks(values, form.block) / divisor, form.element)
    return elements.flatten(1)[:, : values.shape[1]]
