"""The weight side of a product from outside: int8 codes for an integer kernel, or integers held in float32."""

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int32
from torch import Tensor
from torch.nn import functional

from quant_bench.lowbit.codes import WeightCodes
from quant_bench.lowbit.floats import pack_weight, packed_product
from quant_bench.lowbit.kernels import Product
from quant_bench.lowbit.plain import FLOAT32_EXACT, parts


@runtime_checkable
class Operand(Protocol):
    """Accumulators of one group: activation codes in `dtype` by this weight's columns of that group."""

    dtype: torch.dtype

    def __call__(self, a: Tensor, norms: Any, group: int) -> Tensor:
        """Accumulators (token, row), in int32 or rounded once to float32; `norms` are Σ|a| of each token."""


class IntegerOperand:
    """Stored int8 codes, unpacked for one call."""

    dtype = torch.int8

    def __init__(self, weight: WeightCodes, group: int, product: Product) -> None:
        codes = weight.unpacked()
        self._codes = [codes[:, part].contiguous() for part in parts(weight.columns, group)]
        self._product = product

    def __call__(self, a: Tensor, norms: Any, group: int) -> Int32[Tensor, "token row"]:
        """Plain integer product."""
        return self._product(a.contiguous(), self._codes[group])


class FloatOperand:
    """Integers code - zero_point in float32, in oneDNN's layout where that works: sums are exact in any order."""

    dtype = torch.float32

    def __init__(self, weight: WeightCodes, group: int) -> None:
        self._weight = weight
        self._parts = parts(weight.columns, group)
        centred = weight.centred()
        self._limit = FLOAT32_EXACT // max(1, int(centred.abs().max()))
        pieces = [centred[:, part] for part in self._parts]
        packed = [pack_weight(piece) for piece in pieces]
        self._packed = packed if all(piece is not None for piece in packed) else None
        self._dense = pieces if self._packed is None else None

    def __call__(self, a: Float[Tensor, "token col"], norms: Any, group: int) -> Float[Tensor, "token row"]:
        """Float32 product; tokens whose sums might pass 2^24 are done again in float64 and rounded once."""
        if self._packed is not None and a.shape[0]:
            sums = packed_product(a, self._packed[group])  # type: ignore[arg-type]
        else:
            dense = self._weight.centred()[:, self._parts[group]] if self._dense is None else self._dense[group]
            sums = functional.linear(a, dense)
        # one number decides for all tokens, and it is nearly always far below
        if a.shape[0] and int(norms.max()) > self._limit:
            inexact = torch.from_numpy(norms > self._limit)
            dense = self._weight.centred()[:, self._parts[group]].double()
            sums[inexact] = functional.linear(a[inexact].double(), dense).float()
        return sums
