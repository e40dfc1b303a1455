"""Per-item samples: parquet files in the cache, named by everything that they depend on."""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from quant_bench.cache import file_made_whole

_DATA = b"quant_bench.data_sha256"
_PROBED = b"quant_bench.probed"
_CONVENTION = b"quant_bench.convention"

log = logging.getLogger(__name__)


def digest_of(parts: Mapping[str, Any]) -> str:
    """Digest of a strict-JSON mapping, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, allow_nan=False).encode()).hexdigest()


def key_of(
    cell: Mapping[str, Any], identity: Mapping[str, Any], versions: Mapping[str, Any], calibration_sha256: str | None
) -> str:
    """Key of a cell's samples: weights, plugins, settings, versions, calibration and seed, never a name or a path.

    So neither another model under the same name nor a changed setting can find the answers of this one. A record has
    all of it, too.

    Args:
        cell: parts of the cell, as its record has them.
        identity: of the model, with `weights_sha256`, `tokenizer_sha256` and (if it was loaded quantized)
            `quantized_sha256`.
        versions: of the plugins and the suite.
        calibration_sha256: of what the quantizer was given, or None.
    """
    # only there where it says something: keys of what was measured before stay
    dtype = cell["model"].rpartition(" ")[2]
    loaded = {"quantized": identity["quantized_sha256"]} if identity.get("quantized_sha256") else {}
    return digest_of(
        {
            **loaded,
            "weights": identity["weights_sha256"],
            "tokenizer": identity["tokenizer_sha256"],
            # the name itself may hold spaces
            "dtype": dtype if dtype in ("bfloat16", "float16") else "float32",
            **{name: cell[name] for name in ("arm", "quantizer", "task", "seed")},
            "versions": {name: versions.get(name) for name in ("arm", "quantizer", "task", "quant_bench")},
            "calibration": calibration_sha256,
        }
    )


@dataclass(frozen=True)
class Samples:
    """The items of one cell.

    Attributes:
        frame: one row an item.
        data_sha256: digest of the data they were asked about.
        probed: whether next-token distributions were collected with them, at `SampleStore.probe_path`.
        convention: of the task; an arm may change what a window holds, and with it what an item is. None when unknown.
    """

    frame: pd.DataFrame
    data_sha256: str
    probed: bool = False
    convention: str | None = None

    def same_items(self, other: "Samples") -> bool:
        """Whether items of the same name are the same question."""
        conventions = {self.convention, other.convention} - {None}
        return self.data_sha256 == other.data_sha256 and len(conventions) < 2


class SampleStore:
    """Samples under `<cache>/samples`. What a key does not name cannot change an answer: see `key_of`."""

    def __init__(self, cache: Path) -> None:
        self.folder = cache / "samples"

    def path(self, key: str) -> Path:
        """Where the samples of a key lie."""
        return self.folder / f"{key}.parquet"

    def probe_path(self, key: str) -> Path:
        """Where the next-token distributions of a key lie."""
        return self.folder.parent / "probes" / key

    def write(self, key: str, samples: Samples) -> None:
        """Write atomically: a reader sees the whole file or none."""
        table = pa.Table.from_pandas(samples.frame, preserve_index=False)
        notes = {_DATA: samples.data_sha256.encode(), _PROBED: b"1" if samples.probed else b"0"}
        if samples.convention is not None:
            notes[_CONVENTION] = samples.convention.encode()
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), **notes})
        with file_made_whole(self.path(key)) as work:
            pq.write_table(table, work)

    def read(self, key: str) -> Samples | None:
        """The samples of a key; None when they were never written, the cache was cleaned, or the file is damaged."""
        path = self.path(key)
        if not path.is_file():
            return None
        try:
            table = pq.read_table(path)
            notes = table.schema.metadata or {}
            convention = notes[_CONVENTION].decode() if _CONVENTION in notes else None
            return Samples(table.to_pandas(), notes.get(_DATA, b"").decode(), notes.get(_PROBED) == b"1", convention)
        # the last three: damage inside of texts, and of what pandas notes of the columns
        except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
            log.warning("%s cannot be read, as if it were not there: %s", path, error)
            return None
