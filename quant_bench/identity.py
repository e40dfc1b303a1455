"""ModelIdentity and Recipe: which weights a model has and what quantized it; records and look-ups need no torch."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ModelIdentity:
    """Which weights these are, so that two checkpoints are never confused.

    Attributes:
        name: as the user named it (an alias, hub id, folder, GGUF file or `pypi:` wheel), the first part of a cell.
        source: what was read: `hub`, `folder`, `gguf` or `pypi`; `tier` for a checkpoint trained here, `memory` for a
            model built in Python.
        revision: hub commit, or None.
        weights_sha256: digest of configuration and weights. A GGUF file: of the file. A folder: of the lines that
            `sha256sum config.json FILE.safetensors …` prints, so `| sha256sum` gives it again.
        tokenizer_sha256: digest of the tokenizer's files, taken in the same way.
        dtype: the dtype that the float parts compute in.
        trust_remote_code: whether code that came with the model was allowed to run.
        note: what a reader must know (`dequantized from a Q4_1 GGUF file`), or "".
        training_sha256: of a checkpoint trained here, the digest of all that its training shares with that of other
            arms and seeds (settings, schedule, data): these are compared though their weights differ. Else None.
        quantized_sha256: of a model that was loaded quantized, the digest of the manifest of its folder, which holds
            those of its files; all fields above are then those of the float model. Else None.
    """

    name: str
    source: Literal["hub", "folder", "gguf", "pypi", "tier", "memory"]
    revision: str | None
    weights_sha256: str
    tokenizer_sha256: str
    dtype: str
    trust_remote_code: bool = False
    note: str = ""
    training_sha256: str | None = None
    quantized_sha256: str | None = None


@dataclass(frozen=True)
class Recipe:
    """What made a quantized model of a float one.

    Attributes:
        quantizer: canonical text.
        settings: every setting in force, defaults included.
        version: of the recipe.
        seed: of its calibration.
        calibration_sha256: digest of the calibration tokens, None where there were none.
        calibration: text, split, sequence length and seed, in words.
        usable: calibration sequences found.
        wanted: calibration sequences asked for.
    """

    quantizer: str
    settings: dict[str, Any]
    version: int
    seed: int
    calibration_sha256: str | None
    calibration: str
    usable: int
    wanted: int
