"""Routers in a model: decoder layers without residual sums, and a state that goes from layer to layer."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from quant_bench.depth.router import Pass, Psi, Router, State
from quant_bench.errors import NotApplicable
from quant_bench.mechanisms.install import Shape, attentions, shape_of
from quant_bench.model import LanguageModel, LinearSite

# layouts whose layers are a norm and attention, then a norm and an MLP, each in a residual sum
FAMILIES = ("llama", "qwen3")
Make = Callable[[int, Shape], Router]


class RoutedLayer(nn.Module):
    """A decoder layer whose residual sums are routers; mixed into the model's own layer class."""

    depth_attention: Router
    depth_mlp: Router

    def forward(self, hidden_states: State, *, depth: Pass, **options: Any) -> State:
        """The state behind the layer, which its second router reads."""
        layer: Any = self
        attention: Any = layer.self_attn
        if self.depth_attention.wants_psi or self.depth_mlp.wants_psi:
            attention.null_masses = []
        output, _ = attention(hidden_states=layer.input_layernorm(hidden_states), **options)
        psi = _psi(attention, self.depth_attention.weigher.rule.coupled)
        state = depth.read(self.depth_attention, hidden_states, output, psi)
        output = layer.mlp(layer.post_attention_layernorm(state))
        return depth.read(self.depth_mlp, state, output, psi)


def _psi(attention: Any, needed: bool) -> Psi | None:
    """Mass on the null, mean over heads, from the pieces (of a packed row) that attention left."""
    pieces: list[Tensor] = attention.__dict__.pop("null_masses", [])
    if not pieces:
        if needed:
            raise NotApplicable("coupling needs attention with a null logit")
        return None
    return torch.cat([piece.mean(1) for piece in pieces], -1)


@cache
def _routed(kind: type[nn.Module]) -> type[nn.Module]:
    """A layer class with routers."""
    return type(f"Routed{kind.__name__}", (RoutedLayer, kind), {})


def install(model: LanguageModel, make: Make, coupled: bool) -> LanguageModel:
    """Put routers in the place of the residual sums of every layer.

    Args:
        model: given away.
        make: builds the router behind the sublayer of that number (attention of layer l is 2l, its MLP 2l + 1).
        coupled: whether routers need the null mass of attention, which must have a null then.

    Raises:
        NotApplicable: other layers than Llama's and Qwen3's, routers already, or no null to couple to.
    """
    if model.layout.family not in FAMILIES:
        raise NotApplicable(f"depth routing knows the layers of {' and '.join(FAMILIES)}, not {model.layout.family}")
    body: Any = model.body
    if hasattr(body, "sink_token") and coupled:
        raise NotApplicable("coupling beside a sink token is not defined: its query has a null mass of its own")
    for attention in attentions(model):
        if coupled and getattr(getattr(attention, "attention_core", None), "null", None) is None:
            raise NotApplicable(
                "coupling needs a null: compose with an arm that has one (softmax1+…, sink_logit+…, combo2+…)"
            )
    shape, sites = shape_of(model), []
    for index, path in enumerate(model.layout.layers):
        layer: Any = model.module.get_submodule(path)
        if isinstance(layer, RoutedLayer):
            raise NotApplicable("this arm cannot be attached: the layers have routers already")
        layer.depth_attention, layer.depth_mlp = make(2 * index, shape), make(2 * index + 1, shape)
        kind: Any = type(layer)
        layer.__class__ = _routed(kind)
        for site in (site for site in model.layout.linears if site.layer == index):
            sites.append(site)
            if site.role in ("output", "down"):
                sites += _products(path, "depth_attention" if site.role == "output" else "depth_mlp", layer, index)
    model.layout = replace(model.layout, linears=tuple(sites))
    body.register_forward_pre_hook(_begin, with_kwargs=True)
    return model


def _products(path: str, name: str, layer: Any, index: int) -> Iterator[LinearSite]:
    """Matrix products of a router, where it has any."""
    router = getattr(layer, name)
    if hasattr(router, "query_projection"):
        yield LinearSite(f"{path}.{name}.query_projection", index, "depth_query")
        yield LinearSite(f"{path}.{name}.key_projection", index, "depth_key")


def routers_of(body: Any) -> list[Router]:
    """Routers in order of execution; empty for a model without."""
    routed = [layer for layer in getattr(body, "layers", ()) if isinstance(layer, RoutedLayer)]
    return [router for layer in routed for router in (layer.depth_attention, layer.depth_mlp)]


class _Late(Pass):
    """A pass that begins when the first layer is called: only then is the embedding at hand."""

    def __init__(self, routers: list[Router]) -> None:
        self.routers = routers
        self.inner: Pass | None = None

    def read(self, router: Router, state: State, output: State, psi: Psi | None) -> State:
        if self.inner is None:
            # what the first sublayer was given is the embedding
            self.inner = self.routers[0].begin(self.routers, state)
        return self.inner.read(router, state, output, psi)


def _begin(body: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
    """Hand the layers the state of this forward pass; the body passes it on with the options it does not know."""
    return arguments, options | {"depth": _Late(routers_of(body))}
