"""ModelIdentity: which weights a model has; apart from `model.py` so that records and look-ups need no torch."""

from dataclasses import dataclass
from typing import Literal


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
