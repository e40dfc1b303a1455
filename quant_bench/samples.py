"""Per-item samples: parquet files in the cache, named by everything that they depend on."""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

_DATA = b"quant_bench.data_sha256"


def digest_of(parts: Mapping[str, Any]) -> str:
    """Digest of a strict-JSON mapping, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, allow_nan=False).encode()).hexdigest()


@dataclass(frozen=True)
class Samples:
    """The items of one cell and the digest of the data they were asked about."""

    frame: pd.DataFrame
    data_sha256: str


class SampleStore:
    """Samples under `<cache>/samples`. What a key does not name cannot change an answer: see `plan.sample_key`."""

    def __init__(self, cache: Path) -> None:
        self.folder = cache / "samples"

    def path(self, key: str) -> Path:
        """Where the samples of a key lie."""
        return self.folder / f"{key}.parquet"

    def write(self, key: str, samples: Samples) -> None:
        """Write atomically: a reader sees the whole file or none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pandas(samples.frame, preserve_index=False)
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), _DATA: samples.data_sha256.encode()})
        handle, name = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
        os.close(handle)
        try:
            pq.write_table(table, name)
            Path(name).replace(self.path(key))
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def read(self, key: str) -> Samples | None:
        """The samples of a key, or None when they were never written or the cache was cleaned."""
        path = self.path(key)
        if not path.is_file():
            return None
        table = pq.read_table(path)
        return Samples(table.to_pandas(), (table.schema.metadata or {}).get(_DATA, b"").decode())
