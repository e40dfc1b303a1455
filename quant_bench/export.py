"""Export in the compressed-tensors format, which vLLM and transformers read."""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int8, Int32
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from quant_bench.cache import folder_made_whole, tensor_files
from quant_bench.errors import ModelError, NotApplicable
from quant_bench.lowbit.codes import WeightCodes
from quant_bench.lowbit.linear import QuantLinear
from quant_bench.model import LanguageModel
from quant_bench.models import arm_of
from quant_bench.models.saving import require_free, tensors_once, write_settings
from quant_bench.rebuild import is_rebuildable

Format = Literal["int-quantized", "pack-quantized"]
_WORD = 32


def save_compressed(model: LanguageModel, folder: Path | str) -> None:
    """Write a quantized model as compressed-tensors checkpoint, whole or not at all.

    W8A8 (weights symmetric per channel or tensor, activations symmetric per token) becomes `int-quantized`; weights of
    4 or 8 bits with float activations, per channel, tensor or group, with or without zero points, `pack-quantized`.
    Scales stay float32, so that readers in float32 have our weights bit for bit.

    Source: `quantization_config` and tensors as in https://github.com/vllm-project/compressed-tensors.

    Args:
        model: quantized by `quant_bench.quantize`.
        folder: a new (or empty) one.

    Raises:
        NotApplicable: the format, or its readers, know nothing of what the recipe did.
        ModelError: the model is not quantized, its recipe is unknown, or the folder is not empty.
        OSError: the folder cannot be written.
    """
    target = require_free(Path(folder))
    layers = _layers(model)
    how, scheme = _scheme(layers)
    config = {
        "quant_method": "compressed-tensors",
        "format": how,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "output_activations": None, **scheme}},
        "ignore": [path for path, module in model.module.named_modules() if isinstance(module, nn.Linear)],
        "kv_cache_scheme": None,
    }
    inside = tuple(f"{path}." for path in layers)
    kept, _ = tensors_once(model.module)
    tensors = {name: tensor for name, tensor in kept.items() if not name.startswith(inside)}
    dtype: torch.dtype = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    for path, layer in layers.items():
        own = _tensors(layer.weight, how)
        if layer.bias is not None:
            own["bias"] = layer.bias.to(dtype)
        tensors |= {f"{path}.{name}": tensor.to("cpu").contiguous() for name, tensor in own.items()}
    with folder_made_whole(target, only=True) as work, tensor_files(work):
        write_settings(model, work)
        _write_config(model, config, work / "config.json")
        save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})


def _layers(model: LanguageModel) -> dict[str, QuantLinear]:
    """Quantized products by path, where there is nothing else that a reader would not know."""
    if model.recipe is None:
        raise ModelError("this model is not quantized, or not by quant_bench.quantize: what made it is not known")
    arm = arm_of(model)
    if arm != "softmax":
        raise NotApplicable(f"compressed-tensors has no attention mechanism {arm}: its readers build the plain model")
    if model.layout.family == "gpt2":
        raise NotApplicable("the readers of compressed-tensors look for Linear, and GPT-2's products are Conv1D")
    layers: dict[str, QuantLinear] = {}
    for path, module in model.module.named_modules():
        if isinstance(module, QuantLinear):
            layers[path] = module
        elif is_rebuildable(module) and not isinstance(module, WeightCodes):
            raise NotApplicable(f"compressed-tensors has no word for a {type(module).__name__} ({path})")
    if not layers:
        raise NotApplicable("compressed-tensors stores quantized weights, and this recipe leaves them in float")
    return layers


def _scheme(layers: dict[str, QuantLinear]) -> tuple[Format, dict[str, Any]]:
    """Format and scheme that all products share."""
    found = {path: _scheme_of(path, layer) for path, layer in layers.items()}
    first, *others = found.items()
    for path, other in others:
        if other != first[1]:
            raise NotApplicable(
                f"one scheme for all products can be exported; {first[0]} and {path} have different ones"
            )
    return first[1]


def _scheme_of(path: str, layer: QuantLinear) -> tuple[Format, dict[str, Any]]:
    weight, rule = layer.weight, layer.activation
    zero, group = weight.zero_point, weight.group_size
    if zero is not None and zero.is_floating_point():
        raise NotApplicable(f"{path}: compressed-tensors has no real zero points")
    if group is not None and weight.columns % group:
        raise NotApplicable(
            f"{path}: groups of {group} must divide the {weight.columns} columns; use another group_size"
        )
    # one scale of the whole tensor is written for each channel
    weights = {
        "num_bits": weight.bits,
        "type": "int",
        "symmetric": zero is None,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
    }
    if rule is None:
        if weight.bits not in (4, 8):
            raise NotApplicable(f"{path}: readers unpack weights of 4 and 8 bits, not of {weight.bits}")
        return "pack-quantized", {"weights": weights, "input_activations": None}
    eight = weight.bits == rule.bits == 8 and group is None and zero is None
    if not eight or rule.static or rule.granularity != "token" or not rule.symmetric:
        raise NotApplicable(
            f"{path}: with rounded activations, W8A8 can be exported that is symmetric, per channel or tensor of "
            f"weights and per token of activations; this is {layer.describe()}"
        )
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return "int-quantized", {"weights": weights, "input_activations": activations}


def _tensors(weight: WeightCodes, how: Format) -> dict[str, Tensor]:
    codes = weight.unpacked()
    if how == "int-quantized":
        return {"weight": codes, "weight_scale": weight.scale}
    found = {
        "weight_packed": packed_words(codes, weight.bits),
        "weight_scale": weight.scale,
        "weight_shape": torch.tensor(codes.shape),
    }
    if weight.zero_point is not None:
        # packed along the output channels
        found["weight_zero_point"] = packed_words(weight.zero_point.to(torch.int8).T, weight.bits).T
    return found


def packed_words(codes: Int8[Tensor, "row col"], bits: int) -> Int32[Tensor, "row word"]:
    """Codes plus 2^(bits-1), as many in a 32-bit word as fit, the first in the lowest bits; bits divides 32."""
    each = _WORD // bits
    stored = codes.to(torch.int64) + (1 << (bits - 1))
    stored = functional.pad(stored, (0, -codes.shape[1] % each)).reshape(len(codes), -1, each)
    shifts = torch.arange(0, _WORD, bits, device=codes.device)
    words = (stored << shifts).sum(-1)
    # two's complement: the highest code may reach the sign bit
    return torch.where(words >= 1 << (_WORD - 1), words - (1 << _WORD), words).to(torch.int32)


def _write_config(model: LanguageModel, quantization: dict[str, Any], path: Path) -> None:
    assert model.recipe is not None
    config = json.loads(path.read_text(encoding="utf8"))
    config |= {
        "architectures": [type(model.module).__name__],
        "quantization_config": quantization,
        "quant_bench_recipe": {
            "quantizer": model.recipe.quantizer,
            "version": model.recipe.version,
            "calibration_sha256": model.recipe.calibration_sha256,
            "model": model.identity.name,
            "weights_sha256": model.identity.weights_sha256,
        },
    }
    path.write_text(json.dumps(config, indent=2, allow_nan=False) + "\n", encoding="utf8")
