"""Installing the parts of a mechanism in every attention module of a float model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from quant_bench.errors import NotApplicable
from quant_bench.mechanisms.core import GateBias, Mechanism, Null
from quant_bench.mechanisms.gates import Fused, GatedProjection
from quant_bench.model import LanguageModel, LinearSite

# a routing gate behind a gate on reads would see gated reads, which is neither mechanism
_PLAIN = "and a routing gate needs reads that are not gated"


@dataclass(frozen=True)
class Shape:
    """Sizes of the attention modules of a model.

    Attributes:
        heads: query heads.
        kv_heads: key/value heads.
        dim: of a head.
        width: of the hidden state.
        like: a weight, for dtype, device and whether gradients are wanted.
    """

    heads: int
    kv_heads: int
    dim: int
    width: int
    like: Tensor


def shape_of(model: LanguageModel) -> Shape:
    """Sizes from the configuration; OPT and GPT-2 have no shared key/value heads."""
    config = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    return Shape(heads, kv_heads, dim, int(config.hidden_size), next(model.module.parameters()))


def attentions(model: LanguageModel) -> Iterator[Any]:
    """Attention modules in order."""
    for path in model.layout.attentions:
        yield model.module.get_submodule(path)


def mechanism(module: Any) -> Mechanism:
    """The mechanism of an attention module, put there if it has none.

    Raises:
        NotApplicable: another core is there already.
    """
    core = getattr(module, "attention_core", None)
    if core is None:
        module.attention_core = core = Mechanism()
    if not isinstance(core, Mechanism):
        raise NotApplicable(f"attention has a core of its own already: {type(core).__name__}")
    return core


def add_null(model: LanguageModel, learned: bool) -> LanguageModel:
    """Give every head a null logit (value zero): fixed at 0, or learned from there."""
    shape = shape_of(model)
    for module in attentions(model):
        core = mechanism(module)
        _require(core.null is None, "a null logit")
        core.null = Null(shape.heads, shape.like, learned)
    return model


def add_key_bias(model: LanguageModel, make: Callable[[Shape], nn.Module]) -> LanguageModel:
    """Give every attention module a bias of its keys."""
    shape = shape_of(model)
    gated = _has(model, GatedProjection)
    for module in attentions(model):
        core = mechanism(module)
        _require(core.bias is None, "a key bias")
        core.bias = make(shape)
        _require(not (gated and isinstance(core.bias, GateBias)), f"a gate on its reads, {_PLAIN}")
    return model


def set_normalizer(
    model: LanguageModel, normalizer: Callable[[Tensor, Tensor | None], Tensor], null: bool = False
) -> LanguageModel:
    """Let every attention module make weights with `normalizer(scores, null logits)`.

    Args:
        model: given away.
        normalizer: see `Mechanism`.
        null: whether it knows what to do with null logits.
    """
    for module in attentions(model):
        core = mechanism(module)
        _require(core.normalizer is None, "a normalizer")
        _require(null or core.null is None, "a null logit, which this normalizer does not know")
        core.normalizer = normalizer
    return model


def fused_at(model: LanguageModel, site: LinearSite) -> Fused | None:
    """How reads lie in what a product gives (see `gates.reads_in`); None for a product that gives none."""
    if site.role == "query_key_value":
        return "thirds" if model.layout.family == "gpt2" else "heads"
    return "value" if site.role == "value" else None


def add_read_gate(model: LanguageModel, make: Callable[[int, int, Tensor], nn.Module]) -> LanguageModel:
    """Gate every read where it is projected; `make(kv_heads, dim, like)` builds a layer's gate."""
    _require(not _has(model, GateBias), f"a routing gate, {_PLAIN}")
    shape = shape_of(model)
    sites: list[LinearSite] = []
    for site in model.layout.linears:
        fused = fused_at(model, site)
        if fused is None:
            sites.append(site)
            continue
        projection = model.module.get_submodule(site.path)
        _require(not site.path.endswith(".projection"), "a gate on its reads")
        gate = make(shape.kv_heads, shape.dim, shape.like)
        wrapped = GatedProjection(projection, gate, fused, (shape.kv_heads, shape.dim))
        model.module.set_submodule(site.path, wrapped.train(projection.training))
        sites.append(replace(site, path=f"{site.path}.projection"))
    model.layout = replace(model.layout, linears=tuple(sites))
    return model


def add_output_gate(model: LanguageModel, make: Callable[[Shape], nn.Module]) -> LanguageModel:
    """Multiply the output of every head by a gate of the attention layer's input."""
    shape = shape_of(model)
    sites = list(model.layout.linears)
    for index, path in enumerate(model.layout.attentions):
        module: Any = model.module.get_submodule(path)
        _require(getattr(module, "output_gate", None) is None, "a gate on its output")
        module.output_gate = make(shape).train(module.training)
        module.register_forward_pre_hook(_keep_hidden, with_kwargs=True)
        if hasattr(module.output_gate, "projection"):
            site = LinearSite(f"{path}.output_gate.projection", index, "output_gate")
            # in order of execution: before the layer's first product
            sites.insert(next(i for i, other in enumerate(sites) if other.layer == index), site)
    model.layout = replace(model.layout, linears=tuple(sites))
    return model


def _keep_hidden(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Compute the output gate from what the attention module is called with; `attention.py` applies it."""
    hidden = options["hidden_states"] if "hidden_states" in options else arguments[0]
    module.output_factor = module.output_gate(hidden)


def undecayed(module: nn.Module) -> set[str]:
    """Names of parameters that weight decay must leave alone: gates, null logits and the sink token of arms.

    A rule by shape ("decay every matrix") would decay gate directions stored as one matrix.
    """
    names: set[str] = set()
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        names |= {f"{prefix}{name}" for name in getattr(part, "undecayed", ())}
    return names & {name for name, _ in module.named_parameters()}


def learning_rates(module: nn.Module) -> dict[str, float]:
    """Parameters that want a learning rate of their own, by name, with its ratio to that of the others."""
    found: dict[str, float] = {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        found |= {f"{prefix}{name}": ratio for name, ratio in getattr(part, "learning_rates", {}).items()}
    return found


def _has(model: LanguageModel, part: type[nn.Module]) -> bool:
    return any(isinstance(module, part) for module in model.module.modules())


def _require(free: bool, what: str) -> None:
    if not free:
        raise NotApplicable(f"this arm cannot be attached: attention has {what} already")
