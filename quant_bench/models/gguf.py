"""GGUF: a file is dequantized once into a safetensors folder that is keyed by the file's digest."""

import json
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant_bench.cache import file_sha256, folder_made_whole, tensor_files
from quant_bench.errors import ModelError
from quant_bench.models.quiet import quiet

# goes up when the same file would be converted to something else
_CONVERSION = 1
_NOTE = "conversion.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
# llama.cpp's pre-tokenizers that part digits one by one and then split as GPT-2 does (`llm_tokenizer_bpe`)
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Converted:
    """A converted GGUF file.

    Attributes:
        folder: safetensors, configuration and tokenizer.
        sha256: of the GGUF file.
        note: what the weights are, for the identity.
    """

    folder: Path
    sha256: str
    note: str


def convert(path: Path, cache: Path) -> Converted:
    """The safetensors form of a GGUF file, made on first use (half a minute for 135 million parameters).

    Raises:
        ModelError: the file is not GGUF, or transformers cannot read its architecture.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file (it does not begin with 'GGUF')")
    sha256 = file_sha256(path, cache)
    folder = cache / "gguf" / f"{sha256}.{_CONVERSION}"
    if not folder.is_dir():
        logger.info("dequantizing %s into %s (once)", path.name, folder)
        with folder_made_whole(folder) as work, tensor_files(work), quiet():
            _write(path, work)
    try:
        note = json.loads((folder / _NOTE).read_text(encoding="utf8"))
        whole = file_sha256(folder / "model.safetensors", cache) == note["safetensors_sha256"]
    except (OSError, ValueError, KeyError):
        whole = False
    if not whole:
        raise ModelError(f"{folder} has changed since it was converted; delete the folder and it is made again")
    return Converted(folder, sha256, note["note"])


def _write(path: Path, work: Path) -> None:
    """Dequantize to float32 (exact for every GGUF type whose scales are 16-bit floats) and save."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        note = describe(path)
        module: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError, ImportError) as error:
        raise ModelError(f"transformers cannot read {path.name}: {type(error).__name__}: {error}") from error
    _split_digits(tokenizer, _pre_tokenizer(path))
    # the weights are plain floats now; left in place these marks make save_pretrained refuse
    if hasattr(module.config, "quantization_config"):
        del module.config.quantization_config
    module.hf_quantizer = None
    module.is_quantized = False
    # one file, so that its digest can stand in the note
    module.save_pretrained(work, max_shard_size="1000GB")
    tokenizer.save_pretrained(work)
    content = {"file": path.name, "note": note, "safetensors_sha256": file_sha256(work / "model.safetensors")}
    (work / _NOTE).write_text(json.dumps(content, sort_keys=True, indent=1) + "\n", encoding="utf8")


def describe(path: Path) -> str:
    """What kind of numbers a GGUF file holds, in words for the identity of the model made from it."""
    from gguf import GGUFReader

    elements: Counter[str] = Counter()
    matrices: Counter[str] = Counter()
    for tensor in GGUFReader(path).tensors:
        if tensor.tensor_type.name not in _FLOATS:
            elements[tensor.tensor_type.name] += int(tensor.n_elements)
            matrices[tensor.tensor_type.name] += 1
    if not elements:
        return "converted from a GGUF file of floats, not read from the original checkpoint"
    kinds = ", ".join(f"{matrices[kind]} {kind}" for kind, _ in elements.most_common())
    main = elements.most_common(1)[0][0]
    return (
        f"the float reference is dequantized from a {main} GGUF file (quantized tensors: {kinds}), "
        "not the original checkpoint"
    )


def _pre_tokenizer(path: Path) -> str:
    from gguf import GGUFReader

    field = GGUFReader(path).get_field("tokenizer.ggml.pre")
    return "" if field is None else str(field.contents())


def _split_digits(tokenizer: Any, kind: str) -> None:
    """Part digits one by one where the file's pre-tokenizer does: transformers ignores these kinds.

    Without it a run of spaces before a digit is cut elsewhere than by the model's own tokenizer.
    """
    from tokenizers import pre_tokenizers

    if kind in _SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
