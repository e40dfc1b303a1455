"""Engines that bring their own execution: optimum-quanto and torchao in the place of a model's matrix products.

Ours decides nothing about their codes and runs nothing of their arithmetic; coverage names the library and its version.
"""

import importlib
from collections.abc import Callable
from importlib import metadata
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor, nn

from quant_bench.errors import Blocked, NotApplicable, QuantizationError
from quant_bench.model import LanguageModel, LinearSite
from quant_bench.quantization.coverage import FOREIGN, coverage_of, require_coverage
from quant_bench.quantization.linears import as_linear, replace_linears, weight_of

QuantoWeights = Literal["qint8", "qint4", "qint2", "qfloat8"]
QuantoActivations = Literal["none", "qint8", "qfloat8"]
TorchaoScheme = Literal["w8a8", "w8a16", "w4a16"]


def quanto_linears(
    model: LanguageModel,
    batches: tuple[Int[Tensor, "_batch _seq"], ...],
    weights: QuantoWeights,
    activations: QuantoActivations,
) -> LanguageModel:
    """Put quanto's modules in the place of every matrix product of the layers, and calibrate them its own way.

    Outputs of products stay in float: quanto's streamlining ends there on these layouts too, but rounds them during the
    first calibration batch, where GPT-NeoX's fused projection has no quantized form.

    Source: https://github.com/huggingface/optimum-quanto (0.2.7: `nn/qmodule.py`, `calibrate.py`).

    Args:
        model: given away.
        batches: token ids for the static ranges of inputs; read only where activations are quantized.
        weights: one scale for each output channel; at 4 and 2 bits more than 128 columns have one for each group of
            128, or of 96, 64 or 32 where those divide the columns and 128 does not.
        activations: of inputs, one static scale a tensor; `none` leaves them in float.

    Raises:
        Blocked: the library, or the compiler that it calls for 2- and 4-bit weights, is missing.
        QuantizationError: a weight or a range is not finite, or calibration is missing.
    """
    quanto = _library("optimum.quanto", "optimum-quanto")
    if weights in ("qint4", "qint2"):
        _require_unpacking()
    if activations != "none" and not batches:
        raise QuantizationError("static ranges need calibration batches, and there are none")
    types = {name: None if name == "none" else quanto.qtypes[name] for name in (weights, activations)}

    def make(linear: nn.Linear) -> nn.Module:
        module: Any = quanto.QLinear.from_module(linear, weights=types[weights], activations=types[activations])
        module.disable_output_quantization()
        return module.requires_grad_(False)

    inputs = "float inputs" if activations == "none" else f"{activations} inputs, one static scale a tensor"
    text = f"{weights} weights, {inputs}, float outputs"
    model = _replaced(model, make, f"optimum-quanto {metadata.version('optimum-quanto')}", text)
    if activations != "none":
        _calibrate(model, quanto.Calibration(streamline=False), batches)
    for site in model.layout.linears:
        model.module.get_submodule(site.path).freeze()  # type: ignore[operator]
    return _counted(model)


def torchao_linears(model: LanguageModel, scheme: TorchaoScheme, group_size: int) -> LanguageModel:
    """Give every matrix product of the layers a weight of torchao's, whose product is torchao's own.

    Source: https://github.com/pytorch/ao (0.18: `quantization/quant_api.py`).

    Args:
        model: given away.
        scheme: `w8a8`: int8 weights for each output channel, int8 inputs for each token; `w8a16` and `w4a16`: weights
            only, 4 bits in groups.
        group_size: columns a scale at 4 bits.

    Raises:
        Blocked: the library is missing.
        NotApplicable: the groups do not divide the columns of a product.
        QuantizationError: a weight is not finite.
    """
    torchao = _library("torchao.quantization", "torchao")
    if scheme == "w4a16":
        columns = {weight_of(model.module.get_submodule(site.path)).shape[1] for site in model.layout.linears}
        if uneven := sorted(width for width in columns if width % group_size):
            raise NotApplicable(f"torchao's groups of {group_size} must divide the columns; this model has {uneven}")
        # the packed 4-bit formats need a GPU; this one keeps a code a byte and multiplies the dequantized weights
        int4: torch.dtype = vars(torch)["int4"]
        config = torchao.IntxWeightOnlyConfig(weight_dtype=int4, granularity=torchao.PerGroup(group_size))
        text = f"int4 weights in groups of {group_size}, float inputs; product of dequantized weights"
    elif scheme == "w8a16":
        config, text = torchao.Int8WeightOnlyConfig(), "int8 weights per channel, float inputs"
    else:
        config = torchao.Int8DynamicActivationInt8WeightConfig()
        text = "int8 weights per channel, int8 inputs per token; int8 product"

    def make(linear: nn.Linear) -> nn.Module:
        torchao.quantize_(linear, config)
        return linear.requires_grad_(False)

    return _counted(_replaced(model, make, f"torchao {metadata.version('torchao')}", text))


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Blocked(
            f"this recipe runs {package}, which cannot be imported ({error}): pip install {package}"
        ) from error


def _require_unpacking() -> None:
    """Quanto compiles a loop when the first 2- or 4-bit weight is read."""
    try:
        torch.ops.quanto.unpack(torch.zeros(1, 1, dtype=torch.uint8), 4)
    except (RuntimeError, OSError, ImportError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise Blocked(
            f"optimum-quanto compiles its unpacking of 2- and 4-bit weights, and cannot ({reason}): "
            "install a C++ compiler and Python's headers"
        ) from error


def _replaced(model: LanguageModel, make: Callable[[nn.Linear], nn.Module], engine: str, text: str) -> LanguageModel:
    def replaced(site: LinearSite, linear: nn.Module) -> nn.Module:
        if not bool(weight_of(linear).isfinite().all()):
            raise QuantizationError("a weight is not finite: no range covers it")
        module = make(as_linear(linear))
        setattr(module, FOREIGN, f"foreign execution by {engine}: {text}")
        return module

    return replace_linears(model, replaced)


def _calibrate(model: LanguageModel, calibration: Any, batches: tuple[Tensor, ...]) -> None:
    body: Any = model.body
    with torch.no_grad(), calibration:
        for batch in batches:
            body(input_ids=batch.to(model.device), use_cache=False)
    for site in model.layout.linears:
        scale: Any = model.module.get_submodule(site.path).input_scale
        if not bool(scale.isfinite() & (scale > 0)):
            raise QuantizationError(f"{site.path}: calibration found the input scale {float(scale)}")


def _counted(model: LanguageModel) -> LanguageModel:
    model.execution = "foreign"
    model.coverage = coverage_of(model, ("attention products run in float",))
    require_coverage(model, model.coverage)
    return model
