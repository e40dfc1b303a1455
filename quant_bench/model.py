"""LanguageModel: a causal language model with its tokenizer, layout and identity, as every stage hands it on."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import nn

from quant_bench.identity import ModelIdentity as ModelIdentity
from quant_bench.identity import Recipe as Recipe

Role = Literal[
    "query",
    "key",
    "value",
    "query_key_value",
    "output",
    "gate",
    "up",
    "down",
    "output_gate",
    "depth_query",
    "depth_key",
]
SiteKind = Literal["attention_norm", "attention_output", "mlp_norm", "mlp_output", "layer_output", "final_norm"]
# roles of the products that read what a layer's norm gives
NORM_READERS: Final[Mapping[SiteKind, tuple[Role, ...]]] = {
    "attention_norm": ("query", "key", "value", "query_key_value", "output_gate"),
    "mlp_norm": ("gate", "up"),
}


@dataclass(frozen=True)
class LinearSite:
    """One matrix product of a decoder layer.

    Attributes:
        path: dotted module path (`model.layers.0.self_attn.q_proj`); the module is `nn.Linear` or GPT-2's `Conv1D`.
        layer: decoder layer, from 0.
        role: what it computes; `query_key_value` is a fused projection, OPT's and GPT-2's fc1 and fc2 are up and down,
            `output_gate`, `depth_query` and `depth_key` are an arm's.
    """

    path: str
    layer: int
    role: Role


@dataclass(frozen=True)
class Site:
    """A tensor that the outlier protocol looks at: the (first) output of the module at `path`."""

    path: str
    layer: int | None
    kind: SiteKind


@dataclass(frozen=True)
class Layout:
    """Where the parts of a decoder lie, as dotted paths from the `PreTrainedModel`.

    Attributes:
        family: `llama`, `qwen3`, `gemma3`, `gpt2`, `gpt_neox` or `opt`.
        body: the module that maps token ids to final hidden states (after the final norm).
        layers: decoder layers in order.
        attentions: attention modules in order.
        linears: every matrix product of the layers, in order of execution.
        sites: the outlier protocol's tensors: per layer attention_norm, attention_output (the output projection),
            mlp_norm, mlp_output and layer_output, then final_norm.
        embeddings: token (and learned position) embeddings.
        head: the language-model head.
        final_norm: the last norm, or None (OPT-350m has none).
    """

    family: str
    body: str
    layers: tuple[str, ...]
    attentions: tuple[str, ...]
    linears: tuple[LinearSite, ...]
    sites: tuple[Site, ...]
    embeddings: tuple[str, ...]
    head: str
    final_norm: str | None


@dataclass(frozen=True)
class Coverage:
    """Which weight matrices and products were quantized.

    Attributes:
        quantized: module path -> how (`W8 per channel, A8 per token; int8 product by torch._int_mm`).
        skipped: module path -> why it stayed in float.
        tied: module path -> the module whose storage it shares.
        mac_share: share of the multiply-accumulates of one token's forward pass (attention products at the model's
            full context not counted) that run on quantized operands, from 0 to 1.
        notes: further statements (`attention products are simulated: …`).
        weight_bytes: storage of the quantized matrices: codes (two a byte at 4 bits and below), scales, zero points,
            and float weights that are kept beside them.
        float_bytes: the same matrices in float32.
    """

    quantized: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    mac_share: float = 0.0
    notes: tuple[str, ...] = ()
    weight_bytes: int = 0
    float_bytes: int = 0


@dataclass
class LanguageModel:
    """A causal language model as every stage hands it on.

    Ownership: who passes a model to `quantize` or `attach` gives it away and uses only what comes back.

    Attributes:
        module: the transformers model in eval mode (`PreTrainedModel`).
        tokenizer: its tokenizer (`PreTrainedTokenizerBase`).
        identity: which weights these are.
        layout: where its parts lie.
        coverage: what a quantizer did; empty for a float model.
        token_independent: whether a token's quantized values depend on that token (and static ranges) alone. False
            under dynamic per-tensor ranges: then nothing may share a forward pass, or scores would depend on it.
        execution: `float`, or the execution of the quantized products.
        recipe: what quantized it (`models.quantize_with` sets it), or None for a float model.
    """

    module: nn.Module
    tokenizer: Any
    identity: ModelIdentity
    layout: Layout
    coverage: Coverage = field(default_factory=Coverage)
    token_independent: bool = True
    execution: Literal["float", "simulated", "integer", "classic", "foreign"] = "float"
    recipe: Recipe | None = None

    @property
    def config(self) -> Any:
        """The transformers configuration (`PreTrainedConfig`)."""
        return self.module.config

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.tensors()).device

    @property
    def max_length(self) -> int:
        """Longest context in tokens that the configuration allows."""
        return int(self.config.max_position_embeddings)

    @property
    def body(self) -> nn.Module:
        """Module that maps token ids to final hidden states."""
        return self.module.get_submodule(self.layout.body)

    @property
    def head(self) -> nn.Module:
        """Language-model head."""
        return self.module.get_submodule(self.layout.head)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Parameters and buffers (a quantized model may have no parameter left in a layer)."""
        yield from self.module.parameters()
        yield from self.module.buffers()
