"""Manifests: what a folder with a quantized model says of itself; knows no torch."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        modules: path -> class and settings of every module that is no part of the float model, parents first.
        aliases: name of a tensor -> the name under which its storage is in the file.
        files: name -> sha256 of every other file.
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
        ModelError: the manifest cannot be read, is of another format, or a file is missing or was changed.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf8"))
        if content["format"] != FORMAT:
            raise ModelError(f"{path} is of format {content['format']!r}; this version reads format {FORMAT}")
        identity = ModelIdentity(**content.pop("identity"))
        identity = dataclasses.replace(identity, quantized_sha256=file_sha256(path))
        manifest = Manifest(identity=identity, recipe=Recipe(**content.pop("recipe")), **content)
        files = {str(name): str(digest) for name, digest in manifest.files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path} is damaged ({type(error).__name__}: {error}); quantize the model again") from error
    for name, digest in files.items():
        file = folder / name
        if file.name != name or not file.is_file():
            raise ModelError(f"{folder} lacks {name!r}, which its manifest names; quantize the model again")
        if file_sha256(file, cache) != digest:
            raise ModelError(f"{file} is damaged or was changed after it was saved; quantize the model again")
    if WEIGHTS not in files:
        raise ModelError(f"{path} names no {WEIGHTS}")
    return manifest
