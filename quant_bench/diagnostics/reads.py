"""Reads: what each key/value head projects from a token, before any gate, in every layout of projections."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quant_bench.errors import NotApplicable
from quant_bench.mechanisms.core import GateBias
from quant_bench.mechanisms.gates import Fused, GatedProjection, ReadGate, reads_in
from quant_bench.mechanisms.install import fused_at, shape_of
from quant_bench.model import LanguageModel

Reads = Float[Tensor, "kv_head key dim"]


@dataclass(frozen=True)
class ReadSite:
    """Where the reads of one layer are projected.

    Attributes:
        layer: decoder layer, from 0.
        projection: module whose output holds them, the gate (if any) not yet applied.
        fused: how the output is laid out; see `gates.reads_in`.
        shape: key/value heads and their dimension.
        attention: the attention module.
        gate: the gate on the values, or None.
        router: the gate on the routing (arm `renorm`), or None.
        first: position of the text's first token: 1 behind a sink token.
    """

    layer: int
    projection: nn.Module
    fused: Fused
    shape: tuple[int, int]
    attention: Any
    gate: ReadGate | None
    router: ReadGate | None
    first: int

    def of_text(self, output: Float[Tensor, "one position out"]) -> Reads:
        """The reads of the text's tokens (a view), head first."""
        return reads_in(output, self.fused, self.shape)[0, self.first :].transpose(0, 1)

    def hook(self, act: Callable[[Float[Tensor, "one position out"]], Tensor | None]) -> RemovableHandle:
        """Call `act` with each output of the projection; what it returns, if anything, takes the output's place."""
        return self.projection.register_forward_hook(lambda module, arguments, output: act(output))


def read_sites(model: LanguageModel) -> tuple[ReadSite, ...]:
    """Where each layer's reads are projected, in order of layers.

    Raises:
        NotApplicable: a layer has no value projection of its own.
    """
    shape = shape_of(model)
    sites = []
    for site in model.layout.linears:
        fused = fused_at(model, site)
        if fused is None:
            continue
        parent = model.module.get_submodule(site.path.rpartition(".")[0])
        attention: Any = model.module.get_submodule(model.layout.attentions[site.layer])
        core = getattr(attention, "attention_core", None)
        bias = getattr(getattr(core, "arm", core), "bias", None)
        sites.append(
            ReadSite(
                layer=site.layer,
                projection=model.module.get_submodule(site.path),
                fused=fused,
                shape=(shape.kv_heads, shape.dim),
                attention=attention,
                gate=_read_gate(parent.gate) if isinstance(parent, GatedProjection) else None,
                router=_read_gate(bias.gate) if isinstance(bias, GateBias) else None,
                first=1 if getattr(attention, "has_sink_token", False) else 0,
            )
        )
    if [site.layer for site in sites] != list(range(len(model.layout.layers))):
        raise NotApplicable("this diagnosis needs one value projection a layer")
    return tuple(sites)


def _read_gate(gate: nn.Module) -> ReadGate:
    if not isinstance(gate, ReadGate):
        raise NotApplicable(f"this diagnosis knows norm and projection gates on reads, not {type(gate).__name__}")
    return gate


def sizes(reads: Reads) -> Float[Tensor, "kv_head key"]:
    """Norm of each read, in float32 or wider."""
    return torch.linalg.vector_norm(reads.to(torch.promote_types(reads.dtype, torch.float32)), dim=-1)


def openness(gate: ReadGate, reads: Reads) -> Float[Tensor, "kv_head key"]:
    """The gate's factor on each read, between 0 and 1."""
    return torch.sigmoid(gate.argument(reads.transpose(0, 1))).transpose(0, 1)
