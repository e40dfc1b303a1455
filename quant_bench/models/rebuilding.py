"""From a folder with a quantized model back to the model: modules from the manifest, tensors from safetensors."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from quant_bench import rebuild, registry
from quant_bench.errors import ModelError, QuantBenchError, UnknownPlugin
from quant_bench.model import Coverage, LanguageModel, Layout
from quant_bench.models.arms import arm_of
from quant_bench.models.manifest import MODEL_FIELDS, WEIGHTS, Manifest, typed
from quant_bench.spec import Spec


def fill(model: LanguageModel, manifest: Manifest, folder: Path) -> LanguageModel:
    """Turn an untrained float model into the quantized one of a folder.

    Args:
        model: of the folder's configuration, with its arm; given away.
        manifest: of the folder.
        folder: with the tensors.

    Raises:
        ModelError: manifest, tensors and model do not fit.
    """
    # a recipe's module classes are declared when it is imported; one that is not here may have none of its own
    with suppress(UnknownPlugin):
        registry.load("quantizers", Spec.parse(manifest.recipe.quantizer).name)
    if arm_of(model) != manifest.arm:
        raise ModelError(f"{folder}: the manifest says arm {manifest.arm}, config.json says {arm_of(model)}")
    try:
        tensors = _tensors(folder / WEIGHTS)
        tensors |= {name: tensors[stored] for name, stored in manifest.aliases.items()}
        made = _rebuild(model.module, manifest, tensors)
        _load(model.module, tensors, manifest, made)
        types = get_type_hints(LanguageModel)
        for name in MODEL_FIELDS:
            setattr(model, name, typed(types[name], manifest.model[name]))
        _require_paths(model.layout, model.module)
    except (
        QuantBenchError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        SafetensorError,
    ) as error:
        raise ModelError(f"the quantized model in {folder} cannot be made again: {error!r}") from error
    model.module.eval().requires_grad_(False)
    model.recipe = manifest.recipe
    return model


def _tensors(file: Path) -> dict[str, Tensor]:
    """Copies: a map of the file would follow its changes, and need not be aligned as torch aligns."""
    with safe_open(file, framework="pt") as stored:
        return {name: stored.get_tensor(name).clone() for name in stored.keys()}  # noqa: SIM118


def _rebuild(root: nn.Module, manifest: Manifest, tensors: dict[str, Tensor]) -> set[str]:
    """Put the declared modules in their places; names of the tensors that went into them."""
    used: set[str] = set()
    done: set[str] = set()

    def build(path: str, before: nn.Module | None) -> nn.Module:
        done.add(path)
        inside = f"{path}."
        own = {name.removeprefix(inside): name for name in tensors if name.rpartition(".")[0] == path}
        used.update(own.values())
        below = [other for other in manifest.modules if other.rpartition(".")[0] == path]
        children = {other.removeprefix(inside): build(other, before) for other in below}
        entry = manifest.modules[path]
        parts = rebuild.Parts(entry["settings"], {name: tensors[full] for name, full in own.items()}, children, before)
        module = rebuild.rebuilt(entry["class"], parts)
        for name, child in children.items():
            # what was added from outside, such as the rounding of an output
            if getattr(module, name, None) is not child:
                module.add_module(name, child)
                rebuild.install_hook(module, name)
        return module

    for path in manifest.modules:
        if path not in done:
            parent_path, _, name = path.rpartition(".")
            parent = root.get_submodule(parent_path)
            setattr(parent, name, build(path, parent._modules.get(name)))
            rebuild.install_hook(parent, name)
    return used


def _load(module: nn.Module, tensors: dict[str, Tensor], manifest: Manifest, made: set[str]) -> None:
    """Fill what is the float model's own; then nothing may be missing, left over or of another shape or dtype."""
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        if name not in made:
            owner = module.get_submodule(path)
            if last in owner._parameters and owner._parameters[last] is None:
                # a bias that the recipe has added
                owner.register_parameter(last, nn.Parameter(torch.empty_like(tensor), requires_grad=False))
    state = module.state_dict()
    for name in sorted({*state, *tensors}):
        if name not in state or name not in tensors:
            raise ModelError(f"{name} is {'missing' if name in state else 'unknown'}")
        if state[name].shape != tensors[name].shape or state[name].dtype != tensors[name].dtype:
            raise ModelError(f"{name} is of another shape or dtype")
        if name not in made:
            state[name].copy_(tensors[name])
    for name, stored in manifest.aliases.items():
        if name not in made and state[name].data_ptr() != state[stored].data_ptr():
            raise ModelError(f"{name} and {stored} should be one tensor")


def _require_paths(layout: Layout, module: nn.Module) -> None:
    """Each path of a layout exists."""
    paths = [layout.body, layout.head, *layout.layers, *layout.attentions, *layout.embeddings]
    for path in (*paths, *(site.path for site in layout.linears), *(site.path for site in layout.sites)):
        module.get_submodule(path)


def described_here(model: LanguageModel, manifest: Manifest) -> Coverage:
    """The saved account of a model's products, by the names of the kernels that multiply them on this machine."""
    quantized = dict(model.coverage.quantized)
    for path, entry in manifest.modules.items():
        module: Any = model.module.get_submodule(path)
        there = entry.get("described")
        if path in quantized and isinstance(there, str) and hasattr(module, "describe"):
            # a recipe may have added something behind
            quantized[path] = quantized[path].replace(there, module.describe())
    return replace(model.coverage, quantized=quantized)
