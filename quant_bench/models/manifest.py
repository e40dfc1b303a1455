"""Manifests: what a folder with a quantized model says of itself; knows no torch."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from quant_bench.cache import file_sha256
from quant_bench.errors import ModelError
from quant_bench.identity import ModelIdentity, Recipe

MANIFEST = "quant_bench.json"
# not transformers' own name: it would fill what it does not find there with random numbers
WEIGHTS = "quantized.safetensors"
FORMAT = 1
# of a `LanguageModel`, beside its identity and recipe
MODEL_FIELDS = ("layout", "coverage", "token_independent", "execution")


@dataclass(frozen=True)
class Manifest:
    """A folder's account of its quantized model (docs/saving.md).

    Attributes:
        format: of the folder, `FORMAT`.
        quant_bench: version that wrote it.
        identity: of the float model.
        arm: canonical text of its arm.
        arm_version: of that arm.
        recipe: what quantized it.
        model: layout, coverage, token_independent and execution of the `LanguageModel`.
        modules: path -> class, settings and (of a product) description of every module that is no part of the float
            model, parents first.
        aliases: name of a tensor -> the name under which its storage is in the file.
        files: name -> sha256 of every other file that `files_in` finds.
    """

    format: int
    quant_bench: str
    identity: ModelIdentity
    arm: str
    arm_version: int
    recipe: Recipe
    model: dict[str, Any]
    modules: dict[str, dict[str, Any]]
    aliases: dict[str, str]
    files: dict[str, str]

    def text(self) -> str:
        """JSON, the same for the same content."""
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False) + "\n"


def is_saved(folder: Path) -> bool:
    """Whether a folder holds a quantized model of ours."""
    return (folder / MANIFEST).is_file()


def read(folder: Path, cache: Path | None = None) -> Manifest:
    """The manifest of a folder whose files are those that it names; its identity has the manifest's own digest.

    Args:
        folder: written by `quant_bench.save`.
        cache: where digests of files are kept, so that they are computed once.

    Raises:
        ModelError: the manifest cannot be read, is of another format, or a file is missing, was added or
            was changed.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf8"))
        if content["format"] != FORMAT:
            raise ModelError(f"{path} is of format {content['format']!r}; this version reads format {FORMAT}")
        manifest: Manifest = typed(Manifest, content)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path} is damaged ({type(error).__name__}: {error}); quantize the model again") from error
    present = files_in(folder)
    for name in present:
        if name not in manifest.files:
            raise ModelError(f"{folder / name} is not of the model that was saved there: take it out of the folder")
    for name, digest in manifest.files.items():
        if name not in present:
            raise ModelError(f"{folder} lacks {name!r}, which its manifest names; quantize the model again")
        if file_sha256(folder / name, cache) != digest:
            raise ModelError(f"{folder / name} is damaged or was changed after it was saved; quantize the model again")
    if WEIGHTS not in manifest.files:
        raise ModelError(f"{path} names no {WEIGHTS}")
    identity = dataclasses.replace(manifest.identity, quantized_sha256=file_sha256(path))
    return dataclasses.replace(manifest, identity=identity)


def files_in(folder: Path) -> list[str]:
    """Names of the files that loading may read: not the manifest, hidden files, README.md and the like, or LICENSE."""
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [
        name.as_posix()
        for name in names
        if name.suffix not in ("", ".md") and name != Path(MANIFEST) and not any(p.startswith(".") for p in name.parts)
    ]


def typed(kind: Any, value: Any) -> Any:
    """A value of JSON as a type has it: an object as a dataclass, a list as a tuple, all else as it is.

    Args:
        kind: a dataclass, a simple type, or one of the types that its fields have.
        value: what JSON holds.

    Raises:
        TypeError, KeyError: it is of another type, or a field is missing or unknown.
    """
    of = get_args(kind)
    if kind is Any or (value is None and NoneType in of):
        return value
    if isinstance(kind, UnionType):
        return typed(of[0], value)
    if get_origin(kind) is Literal:
        if value in of:
            return value
    elif get_origin(kind) is tuple and isinstance(value, list):
        return tuple(typed(of[0], each) for each in value)
    elif get_origin(kind) is dict and isinstance(value, dict):
        return {key: typed(of[1], each) for key, each in value.items()}
    elif dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        return kind(**{key: typed(hints[key], each) for key, each in value.items()})  # type: ignore[operator]
    elif type(value) is kind or (kind is float and type(value) is int):
        return value
    raise TypeError(f"{value!r} is no {getattr(kind, '__name__', kind)}")
