"""Tiny models with arms, and an account of one forward pass that is independent of what watches them."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quant_bench.arm import Arm, Attended
from quant_bench.attention import causal_mask
from quant_bench.diagnostics.sequences import Sequences
from quant_bench.errors import NotApplicable
from quant_bench.model import LanguageModel
from quant_bench.registry import build
from quant_bench.scoring import final_hidden
from quant_bench.tiny import tiny_model

ITEMS, LENGTH = 3, 40


def sequences(items: int = ITEMS, length: int = LENGTH, seed: int = 1) -> Sequences:
    ids = torch.randint(3, 97, (items, length), generator=torch.Generator().manual_seed(seed))
    return Sequences(ids, f"random seq={length}", "0" * 64)


def armed(arm: str, family: str = "llama", **overrides: Any) -> LanguageModel:
    """A tiny model with an arm whose own parameters have left their start; skips where the arm says it cannot be."""
    torch.manual_seed(0)
    try:
        model = build("arms", arm).attach(tiny_model(family, **overrides))
    except NotApplicable as error:
        pytest.skip(str(error))
    generator = torch.Generator().manual_seed(7)
    names = ("attention_core.", ".gate.", "sink_token", "output_gate")
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if any(part in name for part in names):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.4)
            # a gate that starts at 0.98 closes for nothing
            if name.endswith(("gate.bias", "gate.threshold")):
                parameter.mul_(0.2)
    return model


# an independent account of one forward pass: operands caught at the attention entry, weights from the arm's definition


@contextmanager
def caught(model: LanguageModel) -> Iterator[list[dict[str, Any]]]:
    """What each attention module was given, and what its value projection put out."""
    found: list[dict[str, Any]] = [{} for _ in model.layout.attentions]
    undo: list[Callable[[], None]] = []
    for index, path in enumerate(model.layout.attentions):
        module: Any = model.module.get_submodule(path)
        before = getattr(module, "attention_core", None)

        def core(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
            place = [model.module.get_submodule(p) for p in model.layout.attentions].index(module)
            found[place] |= {"query": query, "key": key, "value": value, **options}
            found[place]["output_factor"] = module.__dict__.get("output_factor")
            return inner[place](module, query, key, value, **options)

        def keep(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], index: int = index) -> None:
            found[index]["hidden"] = options["hidden_states"] if "hidden_states" in options else arguments[0]

        undo.append(module.register_forward_pre_hook(keep, with_kwargs=True).remove)
        if before is not None:
            del module.attention_core
        module.attention_core = core

        def restore(module: Any = module, before: Any = before) -> None:
            del module.attention_core
            if before is not None:
                module.attention_core = before

        found[index]["inner"] = before
        undo.append(restore)
    from quant_bench.attention import sdpa

    inner = [layer["inner"] or sdpa for layer in found]
    for site in model.layout.linears:
        if site.role in ("value", "query_key_value"):

            def projected(module: nn.Module, arguments: Any, output: Tensor, layer: int = site.layer) -> None:
                found[layer]["projected"] = output

            undo.append(model.module.get_submodule(site.path).register_forward_hook(projected).remove)
    try:
        yield found
    finally:
        for action in undo:
            action()


def plain_reads(model: LanguageModel, projected: Tensor, kv_heads: int) -> Tensor:
    """(head, position, dim) of one sequence, by each layout's own splitting."""
    family, config = model.layout.family, model.config
    if family == "gpt2":
        value = projected.split(config.hidden_size, dim=-1)[2][0]
        return value.reshape(len(value), kv_heads, -1).permute(1, 0, 2)
    if family == "gpt_neox":
        dim = config.hidden_size // kv_heads
        return projected[0].reshape(projected.shape[1], kv_heads, 3 * dim)[..., 2 * dim :].permute(1, 0, 2)
    return projected[0].reshape(projected.shape[1], kv_heads, -1).permute(1, 0, 2)


@dataclasses.dataclass
class Account:
    """One layer and one sequence, with whole matrices: weights (head, query, key) and reads (kv head, key, dim)."""

    weights: Tensor
    allowed: Tensor
    null: Tensor | None
    reads: Tensor
    averaged: Tensor
    output_factor: Tensor | None


@torch.no_grad()
def accounts(model: LanguageModel, arm: Arm, ids: Tensor) -> list[Account]:
    """Every layer by the arm's plain definition, in float64."""
    with caught(model) as layers:
        final_hidden(model, ids[None])
    found = []
    for index, layer in enumerate(layers):
        module: Any = model.module.get_submodule(model.layout.attentions[index])
        inside = {name: value.double() for name, value in module.named_parameters()}
        inside |= {name: value.double() for name, value in module.named_buffers()}
        query, key, value = (layer[name].double() for name in ("query", "key", "value"))
        mask = layer["mask"]
        mask = causal_mask(query.shape[2], key.shape[2], None, query.device) if mask is None else mask
        reads = plain_reads(model, layer["projected"], key.shape[1])
        scaling = layer["scaling"]
        if model.layout.family == "opt":
            # which scales its queries, and its scores by 1
            scaling = key.shape[-1] ** -0.5
            query = query / scaling
        attended = Attended(query, key, value, layer["hidden"].double(), mask, scaling, model.max_length, inside)
        scores = query @ attended.of_heads(key).transpose(-1, -2) * scaling
        bias = arm.key_bias(attended)
        scores = scores if bias is None else scores + attended.of_heads(bias)[:, :, None]
        masked = scores.masked_fill(~mask, -torch.inf)
        logit = next((v for name, v in inside.items() if name.endswith("null.logit")), None)
        null = None
        if logit is not None:
            null = torch.softmax(torch.cat((masked, logit[None, :, None, None].expand(*masked.shape[:3], 1)), -1), -1)
            null = null[0, ..., -1]
        weights = arm.normalize(attended, masked)[0]
        allowed = mask[(None,) * (4 - mask.dim())][0, 0].expand(weights.shape[1:])
        factor = layer["output_factor"]
        found.append(Account(weights, allowed, null, reads.double(), value[0], factor))
    return found


def tokens_before(model: LanguageModel) -> int:
    return int(hasattr(model.body, "sink_token"))
