"""Layouts: where the parts of each supported decoder lie."""

from dataclasses import dataclass

from torch import nn
from transformers.pytorch_utils import Conv1D

from quant_bench.errors import ModelError
from quant_bench.model import Layout, LinearSite, Role, Site, SiteKind


@dataclass(frozen=True)
class _Family:
    """Paths of one family: `body` and what ends in it from the model, the others from the decoder layer.

    Attributes:
        name: of the layout.
        body: module that maps ids to final hidden states.
        layers: module list of decoder layers, below `body`.
        attention: attention module.
        linears: matrix products in order of execution.
        norms: the norm beside attention and the norm beside the MLP.
        embeddings: below `body`; one that a model lacks is left out.
        final_norm: below `body`.
    """

    name: str
    body: str
    layers: str
    attention: str
    linears: tuple[tuple[str, Role], ...]
    norms: tuple[str, str]
    embeddings: tuple[str, ...]
    final_norm: str


def _separate(output: str) -> tuple[tuple[str, Role], ...]:
    """Query, key, value and output projections that are four modules of `self_attn`."""
    parts: tuple[tuple[str, Role], ...] = (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"))
    return tuple((f"self_attn.{name}", role) for name, role in (*parts, (output, "output")))


_GATED: tuple[tuple[str, Role], ...] = (("mlp.gate_proj", "gate"), ("mlp.up_proj", "up"), ("mlp.down_proj", "down"))


def _llama(name: str, mlp_norm: str = "post_attention_layernorm") -> _Family:
    """Families that share Llama's names."""
    norms = ("input_layernorm", mlp_norm)
    linears = _separate("o_proj") + _GATED
    return _Family(name, "model", "layers", "self_attn", linears, norms, ("embed_tokens",), "norm")


_LLAMA = _llama("llama")
_GPT2 = _Family(
    name="gpt2",
    body="transformer",
    layers="h",
    attention="attn",
    linears=(
        ("attn.c_attn", "query_key_value"),
        ("attn.c_proj", "output"),
        ("mlp.c_fc", "up"),
        ("mlp.c_proj", "down"),
    ),
    norms=("ln_1", "ln_2"),
    embeddings=("wte", "wpe"),
    final_norm="ln_f",
)
_GPT_NEOX = _Family(
    name="gpt_neox",
    body="gpt_neox",
    layers="layers",
    attention="attention",
    linears=(
        ("attention.query_key_value", "query_key_value"),
        ("attention.dense", "output"),
        ("mlp.dense_h_to_4h", "up"),
        ("mlp.dense_4h_to_h", "down"),
    ),
    norms=("input_layernorm", "post_attention_layernorm"),
    embeddings=("embed_in",),
    final_norm="final_layer_norm",
)
_OPT = _Family(
    name="opt",
    body="model.decoder",
    layers="layers",
    attention="self_attn",
    linears=(*_separate("out_proj"), ("fc1", "up"), ("fc2", "down")),
    norms=("self_attn_layer_norm", "final_layer_norm"),
    embeddings=("embed_tokens", "embed_positions"),
    final_norm="final_layer_norm",
)

_FAMILIES: dict[str, _Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "smollm3": _LLAMA,
    "qwen3": _llama("qwen3"),
    "gemma3_text": _llama("gemma3", "pre_feedforward_layernorm"),
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
    "opt": _OPT,
}


def layout_of(module: nn.Module) -> Layout:
    """Where the parts of a causal language model lie, by its configuration's `model_type`.

    - A norm's site is the norm *beside* its block. Where a model normalizes after the block (OPT-350m, whose
      `do_layer_norm_before` is False), that norm comes behind it; the outlier papers' own code does the same.
    - OPT-350m has no final norm, so `final_norm` is None and the site is left out. Its `project_in` and `project_out`
      (like OPT's embeddings and head) belong to no decoder layer, so they are no `linears`.
    - Gemma 3 has two further norms behind attention and MLP. `attention_output` and `mlp_output` are the projections
      before those; what the norms make of them shows in `layer_output`.

    Raises:
        ModelError: the model type is not supported, or the module does not look like its type.
    """
    config = getattr(module, "config", None)
    kind = str(getattr(config, "model_type", type(module).__name__))
    family = _FAMILIES.get(kind)
    if family is None:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelError(f"model type {kind!r} has no layout here; supported are {known}")
    modules = dict(module.named_modules())
    if "lm_head" not in modules or family.body not in modules:
        raise ModelError(f"{type(module).__name__} of type {kind!r} is no causal language model: needs an lm_head")
    count = len(list(modules[f"{family.body}.{family.layers}"].children()))
    layers = tuple(f"{family.body}.{family.layers}.{index}" for index in range(count))
    final_norm: str | None = f"{family.body}.{family.final_norm}"
    if family.name == "opt" and final_norm not in modules:
        final_norm = None
    linears = tuple(
        LinearSite(f"{layer}.{name}", index, role)
        for index, layer in enumerate(layers)
        for name, role in family.linears
    )
    layout = Layout(
        family=family.name,
        body=family.body,
        layers=layers,
        attentions=tuple(f"{layer}.{family.attention}" for layer in layers),
        linears=linears,
        sites=_sites(family, layers, final_norm),
        embeddings=tuple(path for name in family.embeddings if (path := f"{family.body}.{name}") in modules),
        head="lm_head",
        final_norm=final_norm,
    )
    _check(layout, modules, kind)
    return layout


def _sites(family: _Family, layers: tuple[str, ...], final_norm: str | None) -> tuple[Site, ...]:
    """The outlier protocol's tensors, in order of the forward pass."""
    role = {role: name for name, role in family.linears}
    below: tuple[tuple[str, SiteKind], ...] = (
        (family.norms[0], "attention_norm"),
        (role["output"], "attention_output"),
        (family.norms[1], "mlp_norm"),
        (role["down"], "mlp_output"),
    )
    sites: list[Site] = []
    for index, layer in enumerate(layers):
        sites += [Site(f"{layer}.{name}", index, kind) for name, kind in below]
        sites.append(Site(layer, index, "layer_output"))
    if final_norm is not None:
        sites.append(Site(final_norm, None, "final_norm"))
    return tuple(sites)


def _check(layout: Layout, modules: dict[str, nn.Module], kind: str) -> None:
    """Every named part exists, and no matrix product of a layer is left out."""
    named = {site.path for site in layout.linears} | {site.path for site in layout.sites}
    named |= set(layout.attentions) | set(layout.embeddings)
    missing = sorted(path for path in named if modules.get(path) is None)
    if missing:
        raise ModelError(f"a model of type {kind!r} should have {missing[0]!r}, and this one has not")
    products = {site.path for site in layout.linears}
    for path, part in modules.items():
        inside = any(path.startswith(f"{layer}.") for layer in layout.layers)
        if inside and isinstance(part, nn.Linear | Conv1D) and path not in products:
            raise ModelError(f"the layout of {kind!r} does not know the matrix product {path!r}")
