"""Saving a model: a float one as transformers does, a quantized one with its codes and a manifest."""

import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import quant_bench
from quant_bench import registry
from quant_bench.cache import file_sha256, folder_made_whole, tensor_files
from quant_bench.errors import ModelError, NotApplicable
from quant_bench.model import LanguageModel
from quant_bench.models import arms
from quant_bench.models.loading import untrained
from quant_bench.models.manifest import FORMAT, MANIFEST, MODEL_FIELDS, WEIGHTS, Manifest, files_in
from quant_bench.models.quiet import quiet
from quant_bench.rebuild import install_hook, is_rebuildable, settings_of


def save(model: LanguageModel, folder: Path | str) -> None:
    """Write a model, its tokenizer and its arm; `load_model(folder)` gives it back with equal logits.

    A float model is written as transformers writes it, with the arm in config.json. A quantized one is written whole
    or not at all: codes, scales, zero points and ranges in `quantized.safetensors`, all else in `quant_bench.json`.

    Args:
        model: float, or quantized by `quant_bench.quantize`.
        folder: for a quantized model a new (or empty) one.

    Raises:
        ModelError: the folder is not empty, the recipe is unknown, or a module of the model cannot be made again.
        OSError: the folder cannot be written.
        NotApplicable: the model is executed by a foreign engine, which has a format of its own.
    """
    if model.execution == "foreign":
        raise NotApplicable("a foreign engine executes this model: save it with that engine")
    if model.recipe is None:
        if model.execution != "float" or any(is_rebuildable(module) for module in model.module.modules()):
            raise ModelError("what quantized this model is not known: quantize with quant_bench.quantize, then save")
        _save_float(model, Path(folder))
        return
    _save_quantized(model, require_free(Path(folder)))


def require_free(folder: Path) -> Path:
    """The folder, if something can be saved there.

    Raises:
        ModelError: there is a file, or a folder with something in it, or one that nothing can take the place of; or its
            place cannot be written to.
    """
    if folder.is_mount():
        raise ModelError(f"{str(folder)!r} is a mount point: save to a new folder in it")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{str(folder)!r} is there already: save to a new folder")
    place = next(above for above in folder.absolute().parents if above.exists())
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise ModelError(f"nothing can be saved in {str(place)!r}: {error}") from error
    return folder


def write_settings(model: LanguageModel, folder: Path) -> None:
    """Configuration, settings of generation and tokenizer."""
    module: Any = model.module
    module.config.save_pretrained(folder)
    if getattr(module, "generation_config", None) is not None:
        module.generation_config.save_pretrained(folder)
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(folder)


def _save_float(model: LanguageModel, folder: Path) -> None:
    module: Any = model.module
    with quiet(), tensor_files(folder):
        # names as the modules have them: those of older checkpoint formats are not what `load_weights` looks for
        module.save_pretrained(folder, save_original_format=False)
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(folder)


def _save_quantized(model: LanguageModel, folder: Path) -> None:
    assert model.recipe is not None
    _require_rebuildable(model)
    modules = {
        path: {"class": type(module).__name__, "settings": settings_of(module), **_described(module)}
        for path, module in model.module.named_modules()
        if is_rebuildable(module)
    }
    tensors, aliases = tensors_once(model.module)
    arm = arms.arm_of(model)
    with folder_made_whole(folder, only=True) as work:
        write_settings(model, work)
        with tensor_files(work):
            save_file(tensors, work / WEIGHTS)
        manifest = Manifest(
            format=FORMAT,
            quant_bench=quant_bench.__version__,
            identity=replace(model.identity, quantized_sha256=None),
            arm=arm,
            arm_version=registry.build("arms", arm).version,
            recipe=model.recipe,
            model={name: _plain(getattr(model, name)) for name in MODEL_FIELDS},
            modules=modules,
            aliases=aliases,
            files={name: file_sha256(work / name) for name in files_in(work)},
        )
        (work / MANIFEST).write_text(manifest.text(), encoding="utf8")


def _described(module: nn.Module) -> dict[str, str]:
    """What a product says of itself here; another machine may have another kernel."""
    describe: Any = getattr(module, "describe", None)
    return {} if describe is None else {"described": describe()}


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | str) else asdict(value)


def tensors_once(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor of a state once, and other names of the same storage (a tied head)."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple[Any, ...], str] = {}
    for name, tensor in module.state_dict().items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and key in names:
            aliases[name] = names[key]
        else:
            names[key] = name
            tensors[name] = tensor.detach().to("cpu", memory_format=torch.contiguous_format).contiguous()
    return tensors, aliases


def _require_rebuildable(model: LanguageModel) -> None:
    """Every module and hook is the float model's own, or declared.

    Raises:
        ModelError: with the first that is not.
    """
    with torch.device("meta"):
        before = untrained(model.config, arms.arm_of(model), model.identity, None).module
    for path, module in model.module.named_modules():
        stood = None
        if not is_rebuildable(module):
            with suppress(AttributeError):
                stood = before.get_submodule(_origin(model.module, path))
            if stood is None or type(stood) is not type(module):
                raise ModelError(f"{path} is a {type(module).__name__}, which does not say how it is made again")
            _require_dtypes(path, module, stood)
        known = nn.Module()
        for name, _ in module.named_children():
            install_hook(known, name)
        strange = _hooks(module) - _hooks(known) - (Counter() if stood is None else _hooks(stood))
        if strange:
            raise ModelError(f"{path} has a hook {next(iter(strange))}, which does not say how it is made again")


def _require_dtypes(path: str, module: nn.Module, stood: nn.Module) -> None:
    """A converted model has other rotary frequencies, say, which no file holds."""
    known = {**stood._parameters, **stood._buffers}
    for name, tensor in {**module._parameters, **module._buffers}.items():
        before = known.get(name)
        if tensor is not None and before is not None and tensor.dtype != before.dtype:
            raise ModelError(
                f"{path}.{name} was converted to {tensor.dtype}: load the model with the dtype it shall have"
            )


def _origin(module: nn.Module, path: str) -> str:
    """Path that a module of the float model had before declared modules were wrapped around it."""
    kept: list[str] = []
    for name in path.split(".") if path else ():
        child = module.get_submodule(name)
        if is_rebuildable(child) or not is_rebuildable(module):
            kept.append(name)
        module = child
    return ".".join(kept)


def _hooks(module: nn.Module) -> Counter[str]:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return Counter(f"{hook.__module__}.{getattr(hook, '__qualname__', type(hook).__name__)}" for hook in hooks)
