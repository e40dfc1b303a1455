"""Equivalent scale transformations: a factor a channel moves from the input of linears into what produces that input.

The float model computes the same (up to rounding of float arithmetic): x / s is read with W · s.

- norm -> query, key, value and an arm's output gate; norm -> gate, up. Gemma's norms multiply by 1 + weight.
- value -> output: query heads that share a key/value head share its factors. Left out where a gate looks at the size
  of a read, since that would change.
- up -> down, where what lies between commutes with positive factors: a gated product, or ReLU.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quant_bench.mechanisms.core import GateBias
from quant_bench.mechanisms.gates import GatedProjection, HeadGate, ProjectionGate
from quant_bench.mechanisms.install import shape_of
from quant_bench.model import NORM_READERS, LanguageModel, LinearSite
from quant_bench.quantization.linears import weight_of

Kind = Literal["norm", "value", "up"]
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Fold:
    """One place where factors can move.

    Attributes:
        layer: decoder layer.
        kind: what produces the input.
        producer: path of the norm, or of the linear.
        consumers: linears that read it.
        heads: for `value`: query heads a key/value head and the dimension of a head; else (1, 0).
    """

    layer: int
    kind: Kind
    producer: str
    consumers: tuple[LinearSite, ...]
    heads: tuple[int, int] = (1, 0)

    def gather(self, columns: Float[Tensor, " col"]) -> Float[Tensor, " channel"]:
        """Largest number of the columns that one channel of the producer feeds."""
        shared, dim = self.heads
        return columns if shared == 1 else columns.view(-1, shared, dim).amax(1).flatten()

    def spread(self, channels: Float[Tensor, " channel"]) -> Float[Tensor, " col"]:
        """A number a channel of the producer as a number a column of the consumers."""
        shared, dim = self.heads
        return channels if shared == 1 else channels.view(-1, 1, dim).expand(-1, shared, dim).flatten()


def folds_of(model: LanguageModel, layer: int) -> Iterator[Fold]:
    """Every place of a decoder layer where factors can move, in order of execution."""
    sites = [site for site in model.layout.linears if site.layer == layer]
    by_role = {site.role: site for site in sites}
    if getattr(model.config, "do_layer_norm_before", True) is not False:
        # a norm behind its block feeds the residual sum too
        norms = {site.kind: site.path for site in model.layout.sites if site.layer == layer}
        for kind, roles in NORM_READERS.items():
            # a norm without a gain (OPT has the setting) has no place for factors
            if getattr(model.module.get_submodule(norms[kind]), "weight", None) is None:
                continue
            yield Fold(layer, "norm", norms[kind], tuple(site for site in sites if site.role in roles))
    value = by_role.get("value", by_role.get("query_key_value"))
    if value is not None and _reads_scale(model, value, layer):
        shape = shape_of(model)
        yield Fold(layer, "value", value.path, (by_role["output"],), (shape.heads // shape.kv_heads, shape.dim))
    if "gate" in by_role or _activation(model) == "relu":
        yield Fold(layer, "up", by_role["up"].path, (by_role["down"],))


def fold(model: LanguageModel, place: Fold, scale: Float[Tensor, " channel"]) -> None:
    """Divide what the producer gives by positive factors and multiply the weights that read it, in place."""
    with torch.no_grad():
        for parameter, change in changes(model, place, scale):
            parameter.copy_(change(parameter))


def changes(
    model: LanguageModel, place: Fold, scale: Float[Tensor, " channel"]
) -> Iterator[tuple[nn.Parameter, Change]]:
    """Every parameter that factors reach, and its new value as a function of its old one; gradients reach the factors.

    A parameter comes once a place; several places of a layer may reach it, in any order.
    """
    columns = place.spread(scale)
    for site in place.consumers:
        linear: Any = model.module.get_submodule(site.path)
        yield linear.weight, _times(columns[:, None] if isinstance(linear, Conv1D) else columns)
    if place.kind == "norm":
        yield from _norm_changes(model, place, scale)
    else:
        yield from _row_changes(model, place, scale)


def _times(factor: Tensor) -> Change:
    return lambda values: values * factor


def _norm_changes(
    model: LanguageModel, place: Fold, scale: Float[Tensor, " channel"]
) -> Iterator[tuple[nn.Parameter, Change]]:
    norm: Any = model.module.get_submodule(place.producer)
    if "gemma" in type(norm).__name__.lower():
        yield norm.weight, lambda weight: (1.0 + weight) / scale - 1.0
    else:
        yield norm.weight, lambda weight: weight / scale
    if getattr(norm, "bias", None) is not None:
        yield norm.bias, lambda bias: bias / scale
    # an arm's gate that is no product of its own reads the norm too, each head a slice of it or all of it
    attention = model.layout.attentions[place.layer]
    gate = getattr(model.module.get_submodule(attention), "output_gate", None)
    if place.consumers[0].path.startswith(f"{attention}.") and isinstance(gate, HeadGate):
        weight = gate.weights[0]
        yield weight, _times(scale.view(weight.shape[0], 1, -1))


def _row_changes(
    model: LanguageModel, place: Fold, scale: Float[Tensor, " channel"]
) -> Iterator[tuple[nn.Parameter, Change]]:
    linear: Any = model.module.get_submodule(place.producer)
    factors = scale
    if place.kind == "value":
        rows = weight_of(linear).shape[0]
        if rows == 3 * len(scale):
            factors = scale.new_ones(rows)
            if isinstance(linear, Conv1D):
                factors[-len(scale) :] = scale
            else:
                factors.view(-1, 3, place.heads[1])[:, 2] = scale.view(-1, place.heads[1])
        for gate in _read_gates(model, place.producer, place.layer):
            yield gate.weight, _times(scale.view_as(gate.weight))
    rows_of = factors if isinstance(linear, Conv1D) else factors[:, None]
    yield linear.weight, lambda weight: weight / rows_of
    if linear.bias is not None:
        yield linear.bias, lambda bias: bias / factors


def _read_gates(model: LanguageModel, value: str, layer: int) -> list[Any]:
    """Gates that look at reads: around the value projection, and in the attention core."""
    parent = model.module.get_submodule(value.rpartition(".")[0])
    core: Any = getattr(model.module.get_submodule(model.layout.attentions[layer]), "attention_core", None)
    bias = getattr(core, "bias", None)
    found = [parent.gate] if isinstance(parent, GatedProjection) else []
    return [*found, bias.gate] if isinstance(bias, GateBias) else found


def _reads_scale(model: LanguageModel, value: LinearSite, layer: int) -> bool:
    """Whether every gate on reads can be kept: a direction can be scaled back, a length cannot."""
    return all(isinstance(gate, ProjectionGate) for gate in _read_gates(model, value.path, layer))


def _activation(model: LanguageModel) -> str | None:
    for name in ("hidden_act", "activation_function", "hidden_activation"):
        found = getattr(model.config, name, None)
        if found is not None:
            return str(found)
    return None
