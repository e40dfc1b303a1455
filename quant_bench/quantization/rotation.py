"""Rotating a float model (QuaRot): the same function of tokens, without outlier channels."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quant_bench.errors import NotApplicable
from quant_bench.mechanisms.install import attentions, shape_of
from quant_bench.model import NORM_READERS, LanguageModel, LinearSite
from quant_bench.numerics.hadamard import factors, hadamard_matrix, is_known, transform
from quant_bench.quantization.linears import bias_of, weight_of
from quant_bench.quantization.online import RootMeanSquareNorm, RotatedInput, RotatedNorm, RotatedScores, UnrotatedGate

Matrix = Float[Tensor, "row col"]


@dataclass(frozen=True)
class Rotation:
    """Which rotations a model gets.

    Attributes:
        residual: norms' gains are folded and the residual stream is rotated.
        heads: reads of each head are rotated, and an online transform before the output projection mixes the heads.
        down: an online transform before the down projection.
        keys: an online transform of queries and keys, after position encoding.
        seed: of the signs of the residual rotation.
    """

    residual: bool = True
    heads: bool = True
    down: bool = True
    keys: bool = False
    seed: int = 0


@torch.no_grad()
def rotate(model: LanguageModel, rotation: Rotation) -> tuple[LanguageModel, tuple[str, ...]]:
    """Rotate a float model in place; its logits stay as they were, but for rounding.

    Weights are folded in float64 and cast back.

    Source: Ashkboos et al. 2024, QuaRot, section 4, https://arxiv.org/abs/2404.00456; Ashkboos et al. 2024, SliceGPT,
    https://arxiv.org/abs/2401.15024 (LayerNorm as RMSNorm of centred features).

    Args:
        model: given away.
        rotation: which rotations.

    Returns:
        The model, and statements for its coverage report.

    Raises:
        NotApplicable: the residual stream passes something that does not commute with a rotation.
    """
    notes: list[str] = []
    if rotation.residual:
        _require_rotatable(model)
        signs = _signs(model, rotation.seed)
        notes += _untie(model)
        notes += _fold_norms(model, signs)
        _rotate_residual(model, signs)
        notes.append(
            "residual stream rotated: embeddings, head and norms hold other values, the float logits are equal"
        )
    if rotation.heads:
        notes.append(_rotate_heads(model))
    if rotation.down:
        for site in list(model.layout.linears):
            if site.role == "down":
                _online(model, site, weight_of(_module(model, site.path)).shape[1])
        notes.append("an online Hadamard transform before each down projection (float, not counted in mac_share)")
    if rotation.keys:
        for module in attentions(model):
            module.query_key_transform = RotatedScores()
        notes.append("an online Hadamard transform of queries and keys: keys are rounded and cached rotated")
    return model, tuple(notes)


def _module(model: LanguageModel, path: str) -> Any:
    return model.module.get_submodule(path)


def _require_rotatable(model: LanguageModel) -> None:
    body: Any = model.body
    if any(hasattr(_module(model, layer), "depth_attention") for layer in model.layout.layers):
        raise NotApplicable("rotation needs residual sums: between these layers there are depth routers")
    if getattr(model.config, "do_layer_norm_before", True) is False or model.layout.final_norm is None:
        raise NotApplicable("rotation needs norms before the blocks and before the head: gains behind sums do not fold")
    if getattr(body, "project_in", None) is not None:
        raise NotApplicable("rotation needs embeddings as wide as the model; this model projects them")


def _signs(model: LanguageModel, seed: int) -> Float[Tensor, " width"]:
    width = shape_of(model).width
    bits = torch.randint(2, (width,), generator=torch.Generator().manual_seed(seed))
    return (2.0 * bits - 1.0).to(model.device, torch.float64)


def _untie(model: LanguageModel) -> list[str]:
    head: Any = model.head
    tied = [path for path in model.layout.embeddings if _module(model, path).weight is head.weight]
    if not tied:
        return []
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    model.config.tie_word_embeddings = False
    return [f"head untied from {tied[0]}: the last norm's gain is folded into the head alone"]


def _write(linear: nn.Module, weight: Matrix, bias: Tensor | None) -> None:
    """Put values into a product; a bias is added where it had none."""
    target: Any = linear
    own = target.weight
    own.copy_(weight.T if isinstance(linear, Conv1D) else weight)
    if bias is None:
        return
    if target.bias is None:
        target.bias = nn.Parameter(bias.to(own.dtype), requires_grad=own.requires_grad)
    else:
        target.bias.copy_(bias)


def _wide(linear: nn.Module) -> tuple[Matrix, Tensor | None]:
    bias = bias_of(linear)
    return weight_of(linear).double(), None if bias is None else bias.double()


def _gain(model: LanguageModel, norm: Any) -> tuple[Tensor, Tensor]:
    """Gain and bias of a norm, float64."""
    width = shape_of(model).width
    weight = getattr(norm, "weight", None)
    gain = torch.ones(width, dtype=torch.float64, device=model.device) if weight is None else weight.detach().double()
    gain = 1.0 + gain if model.layout.family == "gemma3" else gain.clone()
    bias = getattr(norm, "bias", None)
    return gain, torch.zeros_like(gain) if bias is None else bias.detach().double().clone()


def _fold_norms(model: LanguageModel, signs: Tensor) -> list[str]:
    """Gains and biases of norms go into the products that read them; what is left of a norm commutes with rotations."""
    readers: dict[tuple[int | None, str], list[nn.Module]] = {(None, "final_norm"): [model.head]}
    for site in model.layout.linears:
        for kind, roles in NORM_READERS.items():
            if site.role in roles:
                readers.setdefault((site.layer, kind), []).append(_module(model, site.path))
    notes: list[str] = []
    for place in model.layout.sites:
        if place.kind not in ("attention_norm", "mlp_norm", "final_norm"):
            continue
        norm = _module(model, place.path)
        gain, shift = _gain(model, norm)
        for linear in readers[place.layer, place.kind]:
            weight, bias = _wide(linear)
            added = weight @ shift if bool(shift.any()) else None
            if added is not None:
                bias = added if bias is None else bias + added
            _write(linear, weight * gain, bias)
        if place.kind == "attention_norm":
            notes += _unrotate_gate(model, place.layer or 0, (signs, gain, shift))
        if isinstance(norm, nn.LayerNorm):
            model.module.set_submodule(place.path, RootMeanSquareNorm(norm.eps).train(norm.training))
        else:
            norm.weight.fill_(0.0 if model.layout.family == "gemma3" else 1.0)
    return sorted(set(notes))


def _unrotate_gate(model: LanguageModel, layer: int, before: tuple[Tensor, Tensor, Tensor]) -> list[str]:
    """Output gates that are no product of the layout read the hidden state as it was."""
    attention = _module(model, model.layout.attentions[layer])
    gate = getattr(attention, "output_gate", None)
    if gate is None or hasattr(gate, "projection"):
        return []
    attention.output_gate = UnrotatedGate(gate, *before)
    return ["output gates that read slices of the hidden state get it rotated back online"]


def _rotate_residual(model: LanguageModel, signs: Tensor) -> None:
    """Features x become x Q, Q = D H: readers W Q, writers Qᵀ W (of centred outputs where norms took the mean)."""
    body: Any = model.body
    centred = any(isinstance(module, RootMeanSquareNorm) for module in model.module.modules())

    def rows(values: Tensor) -> Tensor:
        return transform(values.double() * signs)

    def written(values: Tensor) -> Tensor:
        return rows(values.double() - values.double().mean(-1, keepdim=True) if centred else values)

    for path in model.layout.embeddings:
        weight = _module(model, path).weight
        weight.copy_(written(weight))
    if hasattr(body, "sink_token"):
        body.sink_token.vector.copy_(written(body.sink_token.vector))
    reading = {role for roles in NORM_READERS.values() for role in roles}
    post_norms = model.layout.family == "gemma3"
    for site in model.layout.linears:
        linear = _module(model, site.path)
        weight, bias = _wide(linear)
        if site.role in reading:
            _write(linear, rows(weight), bias)
        elif site.role in ("output", "down") and not post_norms:
            _write(linear, written(weight.T).T, None if bias is None else written(bias))
    weight, bias = _wide(model.head)
    _write(model.head, rows(weight), bias)
    if post_norms:
        for layer in model.layout.layers:
            for name in ("post_attention_layernorm", "post_feedforward_layernorm"):
                block: Any = _module(model, layer)
                setattr(block, name, RotatedNorm(getattr(block, name), signs))


def _rotate_heads(model: LanguageModel) -> str:
    """Reads v become v R in every key/value head, and the output projection undoes it."""
    shape = shape_of(model)
    elementwise = any(_is_elementwise(module, shape.dim) for module in attentions(model))
    if not elementwise:
        dense = hadamard_matrix(shape.dim).to(model.device)
        for site in model.layout.linears:
            if site.role in ("value", "query_key_value"):
                _rotate_reads(model, site)
            elif site.role == "output":
                linear = _module(model, site.path)
                weight, _ = _wide(linear)
                heads = transform(weight.reshape(-1, shape.heads, shape.dim))
                _write(linear, heads.flatten(1), None)
        for module in attentions(model):
            # the gates of value projections and of key biases
            for gate in (part for part in module.modules() if hasattr(part, "rotate_")):
                gate.rotate_(dense.T.expand(shape.kv_heads, -1, -1))
    # where there is no flat matrix that mixes heads alone, all features are mixed
    split = not elementwise and is_known(factors(shape.heads).order)
    size = shape.heads if split else shape.heads * shape.dim
    for site in list(model.layout.linears):
        if site.role == "output":
            _online(model, site, size)
    online = f"an online Hadamard transform of {'heads' if split else 'all features'} before each output projection"
    if elementwise:
        return f"value heads not rotated: an elementwise output gate does not commute with a rotation; {online}"
    return f"value heads rotated; {online} (float, not counted in mac_share)"


def _is_elementwise(attention: Any, dim: int) -> bool:
    gate: Any = getattr(attention, "output_gate", None)
    projection = getattr(gate, "projection", None)
    return projection is not None and dim > 1 and weight_of(projection).shape[0] != gate.heads


def _rotate_reads(model: LanguageModel, site: LinearSite) -> None:
    shape = shape_of(model)
    linear = _module(model, site.path)
    weight, bias = _wide(linear)
    parts = [weight.clone()] if bias is None else [weight.clone(), bias.clone()[:, None]]
    for part in parts:
        if site.role == "value":
            reads = part.view(shape.kv_heads, shape.dim, -1)
        elif model.layout.family == "gpt2":
            reads = part[-shape.kv_heads * shape.dim :].view(shape.kv_heads, shape.dim, -1)
        else:
            reads = part.view(shape.kv_heads, 3, shape.dim, -1)[:, 2]
        reads.copy_(transform(reads.transpose(1, 2).contiguous()).transpose(1, 2))
    _write(linear, parts[0], None if bias is None else parts[1][:, 0])


def _online(model: LanguageModel, site: LinearSite, size: int) -> None:
    """Transform the input of a product, and its weights with it."""
    linear = _module(model, site.path)
    weight, _ = _wide(linear)
    _write(linear, transform(weight, size), None)
    model.module.set_submodule(site.path, RotatedInput(linear, size).train(linear.training))
    sites = (replace(s, path=f"{s.path}.projection") if s.path == site.path else s for s in model.layout.linears)
    model.layout = replace(model.layout, linears=tuple(sites))
