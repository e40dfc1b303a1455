"""Model folders: which files are the weights, what is refused before anything is opened, digests; knows no torch."""

import json
from pathlib import Path
from typing import Any

from quant_bench.cache import listing_sha256
from quant_bench.errors import ModelError, UnsafeModel

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# under this name a model's configuration says which arm its weights belong to
ARM_KEY = "quant_bench_arm"
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers would load, sorted by name.

    Raises:
        UnsafeModel: there are only pickled weights; they are not opened.
        ModelError: there are no weights, or a shard is missing.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if index.is_file():
        names = sorted(set(_json(index).get("weight_map", {}).values()))
        files = [folder / str(name) for name in names]
        missing = [file.name for file in files if file.name not in names or not file.is_file()]
        if missing or not files:
            raise ModelError(f"{folder}: the index names weights that are not there: {', '.join(missing) or 'none'}")
        return files
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        raise UnsafeModel(
            f"{folder} has only pickled weights ({', '.join(pickles)}), and unpickling runs code; convert them to "
            "safetensors where you trust them (`save_pretrained` does)"
        )
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    hint = f"; to load a GGUF file give its path ({folder / ggufs[0]})" if ggufs else ""
    raise ModelError(f"{folder} has no model.safetensors{hint}")


def check_config(folder: Path, trust_remote_code: bool) -> None:
    """Refuse what must not, or cannot, be loaded as a float model.

    Raises:
        UnsafeModel: the model brings code of its own and that was not allowed.
        ModelError: there is no configuration or tokenizer, or the weights are quantized already.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json")
    if (folder / "adapter_config.json").is_file():
        raise ModelError(f"{folder} holds an adapter; merge it into its model and save that")
    config = _json(folder / "config.json")
    tokenizer = folder / "tokenizer_config.json"
    for file, content in (("config.json", config), (tokenizer.name, _json(tokenizer) if tokenizer.is_file() else {})):
        if content.get("auto_map") and not trust_remote_code:
            raise UnsafeModel(
                f"{folder} wants to run its own code (auto_map in {file}); read that code, and allow it with "
                "trust_remote_code (--trust-remote-code); the record will say so"
            )
    quantized = config.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method", "unknown method") if isinstance(quantized, dict) else quantized
        raise ModelError(f"{folder} is quantized already ({method}); give the float checkpoint")


def arm_of(folder: Path) -> str | None:
    """The arm that the weights of a folder belong to, as `quant_bench.save` noted it; None for the model as it is."""
    arm = _json(folder / "config.json").get(ARM_KEY)
    return None if arm is None else str(arm)


def weights_sha256(folder: Path, files: list[Path], cache: Path) -> str:
    """What `sha256sum config.json FILE… | sha256sum` prints: equal weights under another configuration differ."""
    return listing_sha256([folder / "config.json", *files], cache)


def tokenizer_sha256(folder: Path, cache: Path) -> str:
    """Digest of the tokenizer's files, listed by name as `sha256sum` prints them.

    Raises:
        ModelError: there are none.
    """
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not files:
        raise ModelError(f"{folder} has no tokenizer files (tokenizer.json or the like)")
    return listing_sha256(files, cache)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} should hold a JSON object")
    return content
