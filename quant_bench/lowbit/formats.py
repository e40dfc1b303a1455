"""Linear layers on floating-point formats, simulated: elements as stored, products in float32."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from quant_bench.errors import QuantizationError
from quant_bench.lowbit.codes import keep_dtype, pack_nibbles, unpack_nibbles
from quant_bench.numerics.formats import (
    E2M1_VALUES,
    E4M3,
    FORMATS,
    Encoded,
    Format,
    FormatName,
    OuterScale,
    blockwise,
    encode,
)
from quant_bench.rebuild import Parts, rebuildable


@rebuildable("name", "columns")
class FormatWeight(nn.Module):
    """A weight matrix in a floating-point format, stored in as many bits as the format has.

    Attributes:
        name: of the format.
        columns: number of columns before packing.
        elements: float8_e4m3fn (row, col), or uint8 (row, half) with two e2m1 codes a byte (sign, then magnitude).
        block_scale: float8_e4m3fn (row, block), or uint8 exponents plus 127 (e8m0); None without blocks.
        scale: float32 (row, 1) or (1, 1); None without a float32 scale.
    """

    elements: Tensor
    block_scale: Tensor | None
    scale: Tensor | None

    def __init__(
        self, elements: Tensor, block_scale: Tensor | None, scale: Tensor | None, name: FormatName, columns: int
    ) -> None:
        super().__init__()
        self.name: FormatName = name
        self.rows, self.columns = elements.shape[0], columns
        self.register_buffer("elements", elements)
        self.register_buffer("block_scale", block_scale)
        self.register_buffer("scale", scale)

    @classmethod
    def of(cls, weight: Float[Tensor, "row col"], name: FormatName) -> "FormatWeight":
        """Round a weight matrix.

        Raises:
            QuantizationError: a weight is not finite.
        """
        if not bool(weight.isfinite().all()):
            raise QuantizationError("a weight is not finite: no range covers it")
        form = FORMATS[name]
        # a format with blocks has one float32 scale for the matrix, fp8 one for each channel
        found = encode(weight.detach(), form, "row" if form.block is None else "tensor")
        return cls(_stored(found.elements, form), _stored_scale(found, form), found.scale, name, weight.shape[1])

    @classmethod
    def rebuilt(cls, parts: Parts) -> "FormatWeight":
        """The same weights again."""
        tensors = parts.tensors
        return cls(tensors["elements"], tensors.get("block_scale"), tensors.get("scale"), **parts.settings)

    @property
    def form(self) -> Format:
        """Elements and blocks."""
        return FORMATS[self.name]

    @property
    def nbytes(self) -> int:
        """Bytes of elements and scales as stored."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    def operand(self) -> Float[Tensor, "row col"]:
        """Element · block scale, which float32 holds exactly."""
        if self.form.element == E4M3:
            elements = self.elements.float()
        else:
            # stored codes are the sign and the magnitude's place, minus 8
            values = torch.tensor(E2M1_VALUES)
            table = torch.cat((values, -values)).to(self.elements.device)
            elements = table[unpack_nibbles(self.elements, self.columns).int() + 8]
        if self.block_scale is None:
            return elements
        scale = self.block_scale
        # e8m0 is the exponent field of a float32
        floats = (scale.int() << 23).view(torch.float32) if self.form.power_of_two else scale.float()
        return blockwise(elements, floats, self.form.block)

    def dequantize(self) -> Float[Tensor, "row col"]:
        """The weights that the elements stand for, float32."""
        operand = self.operand()
        return operand if self.scale is None else operand * self.scale

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FormatWeight":
        """Follow `fn` to its device, never to its dtype: elements and scales are what was quantized."""
        super()._apply(lambda tensor: keep_dtype(fn, tensor), recurse)  # type: ignore[no-untyped-call]
        return self


def _stored(elements: Float[Tensor, "row col"], form: Format) -> Tensor:
    if form.element == E4M3:
        return elements.to(torch.float8_e4m3fn)
    size = elements.abs()
    # places of 0 to 1.5 in halves, of 2 and 3, of 4 and 6
    place = torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4))
    return pack_nibbles((place - 8 + 8 * torch.signbit(elements)).to(torch.int8))


def _stored_scale(found: Encoded, form: Format) -> Tensor | None:
    if found.block_scale is None:
        return None
    if form.power_of_two:
        return (found.block_scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return found.block_scale.to(torch.float8_e4m3fn)


@rebuildable("activation", "outer")
class FormatLinear(nn.Module):
    """y = x Wᵀ + b with weights, and activations where asked, in floating-point formats. Inference only.

    Operands are element · block scale, as tensor cores multiply them; the float32 scales and the bias come after the
    sum: (acc · weight scale) · activation scale + bias. Sums are float32 in the processor's order.

    Args:
        weight: elements and scales.
        bias: added last, or None.
        activation: format of the input; None leaves it in float.
        outer: float32 scale of the input: `row` is one a token.
    """

    bias: Tensor | None

    def __init__(
        self, weight: FormatWeight, bias: Tensor | None, activation: FormatName | None, outer: OuterScale = "row"
    ) -> None:
        super().__init__()
        self.weight = weight
        self.in_features, self.out_features = weight.columns, weight.rows
        self.activation: FormatName | None = activation
        self.outer: OuterScale = outer
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())
        self._operand: Tensor | None = None

    @classmethod
    def rebuilt(cls, parts: Parts) -> "FormatLinear":
        """The same layer again."""
        weight: Any = parts.children["weight"]
        return cls(weight, parts.tensors.get("bias"), **parts.settings)

    def forward(self, x: Float[Tensor, "*batch col"]) -> Float[Tensor, "*batch row"]:
        """Apply the layer; the result has x's dtype."""
        operand = self.prepare() if self._operand is None else self._operand
        flat = x.detach().reshape(-1, self.in_features).float()
        scale = None
        if self.activation is not None:
            form = FORMATS[self.activation]
            found = encode(flat, form, self.outer)
            flat, scale = found.operand(form.block), found.scale
        out = functional.linear(flat, operand)
        if self.weight.scale is not None:
            out *= self.weight.scale.reshape(1, -1)
        if scale is not None:
            out *= scale
        if self.bias is not None:
            out += self.bias
        return out.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    def prepare(self) -> Float[Tensor, "row col"]:
        """Make the operand of all forward passes; see `QuantLinear.prepare` for why before the first one."""
        self._operand = self.weight.operand()
        return self._operand

    def describe(self) -> str:
        """Such as `W FP8 (e4m3), a scale per channel x A FP8 (e4m3), a scale per token; simulated in float32`."""
        weights = f"W {self.weight.form.text}{_outer(self.weight.form, 'channel', 'tensor')}"
        if self.activation is None:
            return f"{weights}; float product: activations are not quantized"
        per = "token" if self.outer == "row" else "tensor"
        form = FORMATS[self.activation]
        return f"{weights} x A {form.text}{_outer(form, per, per)}; simulated in float32"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FormatLinear":
        """Follow `fn` to its device, never to its dtype."""
        self._operand = None
        super()._apply(lambda tensor: keep_dtype(fn, tensor), recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._operand = None
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_operand": None}


def _outer(form: Format, plain: str, blocked: str) -> str:
    if form.power_of_two:
        return ""
    return f", a float32 scale per {plain if form.block is None else blocked}"
