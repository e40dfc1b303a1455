"""Coverage: every weight matrix of a model accounted for, and the share of its products that is quantized."""

from collections.abc import Callable
from math import prod
from typing import Any

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.pytorch_utils import Conv1D

from quant_bench.errors import QuantizationError
from quant_bench.model import Coverage, LanguageModel
from quant_bench.quantization.linears import weight_of

# bytes of a float32, which the storage of codes is compared with
FLOAT_BYTES = 4
# a module of an arm that must stay in float carries its reason under this name
FLOAT_BECAUSE = "float_because"
# a module that another library executes carries its description under this name
FOREIGN = "foreign_execution"


def coverage_of(model: LanguageModel, notes: tuple[str, ...] = ()) -> Coverage:
    """Account for every weight matrix: quantized (how), skipped (why) or tied (to what).

    A module counts as quantized when it has a method `describe() -> str`, or the mark of a foreign engine. Its size is
    that of its `in_features` and `out_features`, or of its `weight`.

    Args:
        model: a quantized model, or a float one.
        notes: further statements for the report.
    """
    quantized: dict[str, str] = {}
    skipped: dict[str, str] = {}
    products = covered = stored = dense = 0
    for path, module in model.module.named_modules():
        description = _description(module)
        if description is not None:
            size = _size(module)
            quantized[path] = description
            work = size * _calls(model, path)
            products, covered = products + work, covered + work
            stored += _stored(getattr(module, "weight", None))
            dense += size * FLOAT_BYTES
        elif isinstance(module, nn.Linear | Conv1D) or hasattr(module, FLOAT_BECAUSE):
            skipped[path] = _reason(model, path, module)
            products += _size(module) * _calls(model, path)
        elif isinstance(module, nn.Embedding):
            if hasattr(module, "output_rounding"):
                quantized[path] = "a lookup: weights and output rounded per tensor, static (storage stays in float)"
            else:
                skipped[path] = "a lookup; stays in float"
    return Coverage(
        quantized=quantized,
        skipped=skipped,
        tied=_tied(model),
        mac_share=covered / products if products else 0.0,
        notes=notes,
        weight_bytes=stored,
        float_bytes=dense,
    )


def require_coverage(model: LanguageModel, coverage: Coverage) -> None:
    """Nothing in the decoder layers stays in float by accident.

    Raises:
        QuantizationError: a matrix product of a layer is not quantized and gives no reason of its own.
    """
    missed = [site.path for site in model.layout.linears if site.path not in coverage.quantized]
    inside = tuple(f"{layer}." for layer in model.layout.layers)
    for path in coverage.skipped:
        module = model.module.get_submodule(path)
        if path.startswith(inside) and not hasattr(module, FLOAT_BECAUSE) and path not in missed:
            missed.append(path)
    if missed:
        total = len(model.layout.linears)
        shown = ", ".join(missed[:3]) + (", …" if len(missed) > 3 else "")
        raise QuantizationError(f"{len(missed)} matrix products stayed in float ({total} in the layout): {shown}")


def _description(module: nn.Module) -> str | None:
    describe: Callable[[], str] | None = getattr(module, "describe", None)
    return getattr(module, FOREIGN, None) if describe is None else describe()


def _stored(weight: Any) -> int:
    """Bytes of what holds a weight; a tensor of another library is made of plain ones."""
    if not is_traceable_wrapper_subclass(weight):
        return getattr(weight, "nbytes", 0)
    return sum(_stored(getattr(weight, name)) for name in weight.__tensor_flatten__()[0])


def _calls(model: LanguageModel, path: str) -> int:
    """How often a product runs for one token: once, but for what a module around it names in `calls_a_token`."""
    names = path.split(".")
    for depth in range(1, len(names)):
        around: Any = model.module.get_submodule(".".join(names[:depth]))
        calls: dict[str, int] = getattr(around, "calls_a_token", {})
        if names[depth] in calls:
            return calls[names[depth]]
    return 1


def _size(module: nn.Module) -> int:
    """Multiply-accumulates a token."""
    sizes: Any = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    if hasattr(module, FLOAT_BECAUSE) and None in sizes:
        # a gate of an arm: each of its numbers is one factor
        return sum(parameter.numel() for parameter in module.parameters())
    if None in sizes:
        sizes = weight_of(module).shape if isinstance(module, nn.Linear | Conv1D) else _shape(module)
    return prod(sizes)


def _shape(module: nn.Module) -> tuple[int, ...]:
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 2:
        raise QuantizationError(f"{type(module).__name__} has `describe` but neither in_features nor a weight matrix")
    return tuple(weight.shape)


def _reason(model: LanguageModel, path: str, module: nn.Module) -> str:
    own: str | None = getattr(module, FLOAT_BECAUSE, None)
    if own is not None:
        return own
    if path == model.layout.head:
        return "the head stays in float"
    if any(path == site.path for site in model.layout.linears):
        return "16 bits: left in float"
    return "outside the decoder layers; stays in float"


def _tied(model: LanguageModel) -> dict[str, str]:
    """The head, where it shares an embedding's storage."""
    weight = getattr(model.head, "weight", None)
    for path in model.layout.embeddings:
        embedding = getattr(model.module.get_submodule(path), "weight", None)
        if weight is not None and embedding is not None and weight.data_ptr() == embedding.data_ptr():
            return {model.layout.head: path}
    return {}
