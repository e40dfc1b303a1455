"""Gates: on the read of a key/value head (where values are projected), and on the output of a query head."""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from quant_bench.attention import Query
from quant_bench.errors import NotApplicable

Read = Float[Tensor, "*batch kv_head dim"]
Gate = Float[Tensor, "*batch kv_head"]
Hidden = Float[Tensor, "batch query width"]
Fused = Literal["value", "thirds", "heads"]

# gates start at sigmoid(4) = 0.982 or above: a gated model begins as (nearly) the model without gates
OPEN = 4.0
NORM_SLOPE = 8.0


class NormGate(nn.Module):
    """g = sigmoid(beta (|v| / sqrt(dim) - threshold)): quiet reads are damped. beta is 8, threshold starts at -0.5.

    Source: arXiv 2609.22005, norm gate.
    """

    undecayed = ("threshold",)
    float_because = "a gate of one number a head stays in float"

    def __init__(self, kv_heads: int, dim: int, like: Tensor) -> None:
        super().__init__()
        start = -OPEN / NORM_SLOPE
        self.threshold = nn.Parameter(like.new_full((kv_heads,), start), requires_grad=like.requires_grad)

    def argument(self, read: Read) -> Gate:
        """What goes into the sigmoid, in float32 or wider."""
        wide = read.to(torch.promote_types(read.dtype, torch.float32))
        size = torch.linalg.vector_norm(wide, dim=-1) / math.sqrt(read.shape[-1])
        return NORM_SLOPE * (size - self.threshold.to(wide.dtype))

    def forward(self, read: Read) -> Read:
        return read * torch.sigmoid(self.argument(read))[..., None].to(read.dtype)


class ProjectionGate(nn.Module):
    """g = sigmoid(w·v + b): reads along a learned direction pass. w starts at 0, b at 4.

    Source: arXiv 2609.22005, projection gate.
    """

    undecayed = ("weight", "bias")
    float_because = "a gate of one direction a head stays in float"

    def __init__(self, kv_heads: int, dim: int, like: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(like.new_zeros(kv_heads, dim), requires_grad=like.requires_grad)
        self.bias = nn.Parameter(like.new_full((kv_heads,), OPEN), requires_grad=like.requires_grad)

    def argument(self, read: Read) -> Gate:
        """What goes into the sigmoid, in float32 or wider."""
        wide = torch.promote_types(read.dtype, torch.float32)
        return (read.to(wide) * self.weight.to(wide)).sum(-1) + self.bias.to(wide)

    def forward(self, read: Read) -> Read:
        return read * torch.sigmoid(self.argument(read))[..., None].to(read.dtype)

    def rotate_(self, rotation: Float[Tensor, "kv_head dim dim"]) -> None:
        """Keep the gate's value when reads become `rotation @ v` (a quantizer that rotates value heads calls this)."""
        self.weight.data = torch.einsum("hij,hj->hi", rotation.to(self.weight.dtype), self.weight.data)


ReadGate = NormGate | ProjectionGate


class HeadGate(nn.Module):
    """sigmoid(G(x)) for each token and query head, on the head's output.

    `linear` and `mlp` see the head's own slice of x, `all_features` sees all of it. In fine-tuning mode weights start
    near 0 and the output is divided by the initial probability, so that a pretrained model is (nearly) unchanged.

    Raises:
        NotApplicable: the heads' slices of x would not be of one size.

    Source: gated attention of Bondarenko et al. 2023, section 4.2 and its code, https://arxiv.org/abs/2306.12929.
    """

    # one a head, stored as matrices, which a rule by shape would decay
    undecayed = ("biases.0", "biases.1")
    float_because = "the published quantized models keep this gate in float"

    def __init__(
        self,
        heads: int,
        width: int,
        like: Tensor,
        kind: Literal["linear", "mlp", "all_features"],
        probability: float,
        fine_tuning: bool,
    ) -> None:
        super().__init__()
        if kind != "all_features" and width % heads:
            raise NotApplicable(f"{width} features of the layer's input are no equal slices for {heads} heads")
        self.heads, self.kind = heads, kind
        self.factor = 1.0 / probability if fine_tuning else 1.0
        inputs = width if kind == "all_features" else width // heads
        rows = [1 if kind == "all_features" else heads]
        hidden = max(1, inputs // 4)
        shapes = {"linear": [(1, inputs)], "mlp": [(hidden, inputs), (1, hidden)], "all_features": [(heads, inputs)]}
        weights, biases = [], []
        for row, column in shapes[kind]:
            # nn.Linear's own initial range
            limit = 1.0 / math.sqrt(column)
            weight = like.new_empty(*rows, row, column)
            weights.append(weight.normal_(0.0, 0.001) if fine_tuning else weight.uniform_(-limit, limit))
            biases.append(like.new_zeros(*rows, row).uniform_(-limit, limit))
        # the published code sets the bias of `linear` alone; in fine-tuning mode the others would not start where they
        # should, so there it is set too
        if kind == "linear" or fine_tuning:
            biases[-1].fill_(math.log(probability / (1.0 - probability)))
        self.weights = nn.ParameterList([nn.Parameter(w, requires_grad=like.requires_grad) for w in weights])
        self.biases = nn.ParameterList([nn.Parameter(b, requires_grad=like.requires_grad) for b in biases])

    def forward(self, hidden: Hidden) -> Query:
        """Factor on each head's output, shape (batch, head, query, 1)."""
        batch, queries, _ = hidden.shape
        parts = hidden.view(batch, queries, 1 if self.kind == "all_features" else self.heads, -1)
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            parts = torch.einsum("bqhi,hoi->bqho", torch.relu(parts) if index else parts, weight) + bias
        return torch.sigmoid(parts.reshape(batch, queries, self.heads, 1)).transpose(1, 2) * self.factor


class OutputGate(nn.Module):
    """sigmoid(x W) on the attention output, a factor for each head or each feature of each head.

    Source: G1 of Qiu et al. 2025, https://arxiv.org/abs/2505.06708. There W is part of the query projection; here it is
    a product of its own (the same arithmetic), and quantized like any other.
    """

    undecayed = ()

    def __init__(self, heads: int, dim: int, width: int, like: Tensor, deviation: float) -> None:
        super().__init__()
        self.heads = heads
        self.projection = nn.Linear(width, heads * dim, bias=False, device=like.device, dtype=like.dtype)
        nn.init.normal_(self.projection.weight, 0.0, deviation)
        self.projection.requires_grad_(like.requires_grad)

    def forward(self, hidden: Hidden) -> Query:
        """Factor on each head's output, shape (batch, head, query, 1 or dim)."""
        gate = torch.sigmoid(self.projection(hidden))
        return gate.view(*gate.shape[:-1], self.heads, -1).transpose(1, 2)


def reads_in(output: Float[Tensor, "*batch out"], fused: Fused, shape: tuple[int, int]) -> Read:
    """The reads in a projection's output (a view).

    Args:
        output: of a value projection, alone or fused with query and key.
        fused: how it is laid out. `value`: alone; `thirds`: query, key and value one after the other (GPT-2); `heads`:
            query, key and value of each head (GPT-NeoX).
        shape: key/value heads and their dimension.
    """
    heads, dim = shape
    if fused == "value":
        return output.view(*output.shape[:-1], heads, dim)
    if fused == "thirds":
        return output[..., -heads * dim :].view(*output.shape[:-1], heads, dim)
    reads: Tensor = output.view(*output.shape[:-1], heads, 3, dim)[..., 2, :]
    return reads


class GatedProjection(nn.Module):
    """A value projection (alone, or fused with query and key) and the gate on its reads.

    The cache stores what this returns, so generation costs nothing more.

    Args:
        projection: `nn.Linear`, GPT-2's `Conv1D`, or what a quantizer puts there.
        gate: acts on reads.
        fused: how the output is laid out; see `reads_in`.
        shape: key/value heads and their dimension.
    """

    def __init__(self, projection: nn.Module, gate: nn.Module, fused: Fused, shape: tuple[int, int]) -> None:
        super().__init__()
        self.projection, self.gate, self.fused, self.shape = projection, gate, fused, shape

    def reads(self, out: Float[Tensor, "*batch out"]) -> Read:
        """The reads in what the projection gave, before the gate."""
        return reads_in(out, self.fused, self.shape)

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch out"]:
        out = self.projection(x)
        read = self.gate(self.reads(out))
        if self.fused == "value":
            return read.flatten(-2)
        if self.fused == "thirds":
            return torch.cat((out[..., : -read.shape[-2] * read.shape[-1]], read.flatten(-2)), -1)
        heads = out.unflatten(-1, (self.shape[0], 3, self.shape[1]))
        return torch.cat((heads[..., :2, :], read[..., None, :]), -2).flatten(-3)


def log_gate(gate: ReadGate, value: Float[Tensor, "batch kv_head key dim"]) -> Float[Tensor, "batch kv_head key"]:
    """Logarithm of a read gate for values as attention gets them; stable far below 0."""
    return functional.logsigmoid(gate.argument(value.transpose(1, 2))).transpose(1, 2)
