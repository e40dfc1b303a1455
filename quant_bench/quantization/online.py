"""Modules that a rotated model keeps at run time: transforms before a product, norms without gain."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from quant_bench.numerics.hadamard import transform
from quant_bench.rebuild import rebuildable

Features = Float[Tensor, "*batch width"]


@rebuildable("size")
class RotatedInput(nn.Module):
    """A product whose input is Hadamard-transformed first; its weights carry the inverse.

    Every execution of the product is handed the same tensor, so executions stay equal bit for bit.

    Args:
        projection: `nn.Linear`, GPT-2's `Conv1D`, or what a quantizer puts there.
        size: order of the transform; below the width it mixes heads (see `transform`).
    """

    def __init__(self, projection: nn.Module, size: int) -> None:
        super().__init__()
        self.projection, self.size = projection, size

    def forward(self, x: Features) -> Float[Tensor, "*batch out"]:
        out: Tensor = self.projection(transform(x, self.size))
        return out

    def extra_repr(self) -> str:
        return f"size={self.size}"


@rebuildable()
class RotatedScores(nn.Module):
    """Queries and keys times the Hadamard matrix of a head's size: scores stay, outlier channels of keys are spread."""

    def forward(
        self, query: Float[Tensor, "batch head query dim"], key: Float[Tensor, "batch kv_head key dim"]
    ) -> tuple[Float[Tensor, "batch head query dim"], Float[Tensor, "batch kv_head key dim"]]:
        return transform(query), transform(key)


@rebuildable("eps")
class RootMeanSquareNorm(nn.Module):
    """x / sqrt(mean(x²) + eps): a LayerNorm of centred features whose gain and bias were folded away."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Features) -> Features:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


@rebuildable()
class RotatedNorm(nn.Module):
    """A norm *behind* a block, whose gain cannot be folded: the residual's rotation is applied to its output.

    Args:
        norm: with its gain.
        signs: 1 and -1, of the residual rotation.
    """

    signs: Tensor

    def __init__(self, norm: nn.Module, signs: Float[Tensor, " width"]) -> None:
        super().__init__()
        self.norm = norm
        self.register_buffer("signs", signs)

    def forward(self, x: Features) -> Features:
        out: Tensor = self.norm(x)
        return transform(out * self.signs.to(out.dtype))


@rebuildable()
class UnrotatedGate(nn.Module):
    """An output gate that reads slices of the layer's input: it gets the input as it was before rotation and folding.

    Args:
        gate: acts on the hidden state.
        signs: of the residual rotation.
        gain: of the norm before the layer.
        shift: bias of that norm.
    """

    signs: Tensor
    gain: Tensor
    shift: Tensor

    def __init__(
        self,
        gate: nn.Module,
        signs: Float[Tensor, " width"],
        gain: Float[Tensor, " width"],
        shift: Float[Tensor, " width"],
    ) -> None:
        super().__init__()
        self.gate = gate
        for name, value in (("signs", signs), ("gain", gain), ("shift", shift)):
            self.register_buffer(name, value)

    @property
    def factor(self) -> float:
        """Of the gate: what all its values are multiplied by."""
        return float(getattr(self.gate, "factor", 1.0))

    def forward(self, hidden: Features) -> Any:
        plain = transform(hidden, inverse=True) * (self.signs * self.gain).to(hidden.dtype)
        return self.gate(plain + self.shift.to(hidden.dtype))
