"""What the attention layers of a model are given and give, for the references of arms."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from quant_bench import attention
from quant_bench.arm import Attended
from quant_bench.mechanisms.gates import GatedProjection
from quant_bench.model import LanguageModel


@dataclasses.dataclass
class SeenLayer:
    """What one attention layer was given and gave.

    Attributes:
        module: the attention module.
        operands: `query`, `key`, `value`, `mask`, `scaling` and `hidden` of its last call, `read` (before a gate), and
            `output`, the input of its output projection.
    """

    module: Any
    operands: dict[str, Any] = dataclasses.field(default_factory=dict)

    def attended(self, length: int) -> Attended:
        """The operands of a reference; `length` is the longest context in tokens."""
        known = self.operands
        query, key = known["query"], known["key"]
        # OPT scales its queries before its scores
        scaling = float(getattr(self.module, "scaling", known["scaling"]))
        query = query * (known["scaling"] / scaling)
        mask = known["mask"]
        if mask is None:
            mask = attention.causal_mask(query.shape[2], key.shape[2], None, query.device)
        value = known.get("read", known["value"])
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return Attended(query, key, value, known["hidden"], mask, scaling, length, tensors)


@contextmanager
def watched_layers(model: LanguageModel) -> Iterator[list[SeenLayer]]:
    """Operands and outputs of every attention layer while the context lasts."""
    layers = [SeenLayer(model.module.get_submodule(path)) for path in model.layout.attentions]
    undo: list[Callable[[], None]] = []

    def watch(layer: SeenLayer) -> None:
        inner = attention.core_of(layer.module)

        def core(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
            layer.operands.update(query=query, key=key, value=value, **options)
            return inner(module, query, key, value, **options)

        def keep_hidden(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            layer.operands["hidden"] = options["hidden_states"] if "hidden_states" in options else arguments[0]

        undo.append(attention.replace_core(layer.module, core))
        undo.append(layer.module.register_forward_pre_hook(keep_hidden, with_kwargs=True).remove)

    for layer in layers:
        watch(layer)
    for site in model.layout.linears:
        operands = layers[site.layer].operands
        if site.role == "output":
            module = model.module.get_submodule(site.path)
            undo.append(module.register_forward_pre_hook(lambda m, a, o=operands: o.update(output=a[0])).remove)
        parent = model.module.get_submodule(site.path.rpartition(".")[0])
        if isinstance(parent, GatedProjection):

            def keep_read(gated: Any, a: Any, out: Tensor, o: Any = operands, p: Any = parent) -> None:
                o["read"] = p.reads(out).transpose(1, 2)

            undo.append(parent.projection.register_forward_hook(keep_read).remove)
    try:
        yield layers
    finally:
        for restore in undo:
            restore()
