"""Scope `full`: static per-tensor rounding of every activation tensor, the protocol of the outlier papers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quant_bench.attention import core_of, sdpa
from quant_bench.calibrate import RangeWatch
from quant_bench.lowbit.codes import quantize_weight
from quant_bench.model import LanguageModel
from quant_bench.numerics.integers import Grid
from quant_bench.numerics.tails import Range
from quant_bench.quantization.attention import RoundedAttention, watch_attention
from quant_bench.quantization.coverage import FLOAT_BECAUSE
from quant_bench.quantization.rounding import StaticRounding, round_input_, round_output
from quant_bench.quantizer import SchemeQuantizer

ATTENTION_NOTE = (
    "scope full: attention products (query·key, probabilities·value) run in float32 on rounded operands in every "
    "execution; they are simulated, never integer"
)
SITES_NOTE = (
    "scope full: rounded are inputs and outputs of linears, scores before the mask, attention probabilities, context, "
    "residual sums, norm outputs, embedding weights and outputs; in float are position encoding, activation function, "
    "the gate product (rounded as the down projection's input) and the head"
)


@dataclass(frozen=True)
class FullSites:
    """The activation tensors of scope `full` beside the inputs of linears, as module paths.

    Attributes:
        outputs: modules whose output is rounded.
        sums: modules whose first argument is a residual (or embedding) sum, rounded in place.
        attentions: attention modules.
    """

    outputs: tuple[str, ...]
    sums: tuple[str, ...]
    attentions: tuple[str, ...]


def full_sites(model: LanguageModel) -> FullSites:
    """Where scope `full` rounds.

    Source: `quantization` of Bondarenko et al. 2023 (https://arxiv.org/abs/2306.12929) for OPT; for gated decoders
    position encoding, activation function and gate product stay in float. Ours rounds norm outputs everywhere and the
    inputs of linears too, which makes every product one of two integer operands.
    """
    layout = model.layout
    inside = tuple(f"{layer}." for layer in layout.layers)
    norms = [
        path
        for path, module in model.module.named_modules()
        if "norm" in type(module).__name__.lower()
        and (path.startswith(inside) or path == layout.final_norm)
        and not hasattr(module, FLOAT_BECAUSE)
    ]
    # of a gated value projection it is the gated read that attention multiplies
    linears = [site.path.removesuffix(".projection") for site in layout.linears]
    sums = _middle_sums(model)
    if len(layout.embeddings) > 1:
        # token plus position embedding: their sum is what enters the first layer
        sums = [layout.layers[0], *sums]
    return FullSites((*layout.embeddings, *linears, *norms, *layout.layers), tuple(sums), layout.attentions)


def _middle_sums(model: LanguageModel) -> list[str]:
    """Norms that read the sum after attention, or (post-norm OPT) either sum; a layer's last sum is its output."""
    config = model.config
    if getattr(config, "use_parallel_residual", False):
        return []
    kinds = ["mlp_norm"]
    if getattr(config, "do_layer_norm_before", True) is False:
        kinds.append("attention_norm")
    return [site.path for site in model.layout.sites if site.kind in kinds]


def watch_full(watch: RangeWatch, sites: FullSites) -> None:
    """Watch what scope `full` rounds, but for the inputs of linears."""
    for path in sites.outputs:
        watch.output(path)
    for path in sites.sums:
        watch.input(path)
    for path in sites.attentions:
        watch_attention(watch, path)


def round_full(model: LanguageModel, scheme: SchemeQuantizer, sites: FullSites, ranges: dict[str, Range]) -> None:
    """Install the roundings of scope `full`; linears have been replaced already."""
    grid = Grid(scheme.activation_bits, scheme.activation_symmetric)

    def rounding(name: str) -> StaticRounding:
        return StaticRounding(ranges[name], grid).to(model.device)

    for path in sites.outputs:
        module = model.module.get_submodule(path)
        weights = [_embedding_weights(module, scheme)] if path in model.layout.embeddings else []
        round_output(module, *(part for part in weights if part is not None), rounding(f"{path}:output"))
    for path in sites.sums:
        round_input_(model.module.get_submodule(path), rounding(f"{path}:input"))
    for path in sites.attentions:
        attention: Any = model.module.get_submodule(path)
        core: Any = core_of(attention)
        scores, probabilities, context = (rounding(f"{path}:{name}") for name in ("scores", "probabilities", "context"))
        attention.attention_core = RoundedAttention(scores, probabilities, context, None if core is sdpa else core)


def _embedding_weights(module: nn.Module, scheme: SchemeQuantizer) -> StaticRounding | None:
    """Rounding of looked-up rows, equal to a lookup in rounded weights: so a tied head keeps its float storage."""
    if scheme.weight_bits == 16:
        return None
    weight: Any = module.weight
    codes = quantize_weight(
        weight.detach(),
        bits=scheme.weight_bits,
        granularity="tensor",
        symmetric=scheme.weight_symmetric,
        search=scheme.weight_range,
    )
    # Gemma multiplies the looked-up row by a constant, and the grid with it
    factor = float(torch.as_tensor(getattr(module, "embed_scale", 1.0)).to(weight.dtype))
    result = StaticRounding(Range(0.0, 0.0), Grid(scheme.weight_bits, scheme.weight_symmetric))
    result.scale.copy_(codes.scale[0, 0] * factor)
    if codes.zero_point is not None:
        half = 1 << (scheme.weight_bits - 1)
        zero = codes.zero_point[0, 0]
        result.low.copy_(-half - zero)
        result.high.copy_(half - 1 - zero)
    return result.to(weight.device)
