"""Report: the leaderboard as a pure function of the records; knows no torch."""

from pathlib import Path

import pandas as pd

from quant_bench.cache import write_atomically
from quant_bench.record import Store
from quant_bench.report.excerpts import filled, holds_excerpts
from quant_bench.report.frame import long_frame
from quant_bench.report.render import FORMATS, Format, rendered

__all__ = ["FILE", "FORMATS", "Format", "leaderboard", "long_frame", "rendered", "stale", "write"]

FILE = "LEADERBOARD.md"
# beside the folder of records, and only those that have excerpts
DOCUMENTS = ("README.md", "docs/*.md")


def leaderboard(root: Path) -> pd.DataFrame:
    """Every score under a folder of records, grouped and ranked: one row a score, one a cell without scores.

    Raises:
        RecordError: a file is no record, or does not lie where its content says; the message names every such file.
    """
    return long_frame(Store.read(root).valid())


def stale(root: Path, frame: pd.DataFrame) -> list[Path]:
    """Files that differ from what the records say: the leaderboard, and documents beside the folder that have excerpts.

    Neither records nor a leaderboard is in order, too.

    Raises:
        RecordError: an excerpt asks for what no record has.
    """
    if not (root / FILE).is_file() and not len(frame):
        return []
    files = _files(root, frame)
    return [path for path, content in files.items() if not path.is_file() or path.read_bytes() != content]


def write(root: Path, frame: pd.DataFrame) -> Path:
    """Write the leaderboard and the excerpts of documents, each whole or not at all; return the former's path.

    Raises:
        RecordError: an excerpt asks for what no record has.
    """
    for path, content in _files(root, frame).items():
        write_atomically(path, content)
    return root / FILE


def _files(root: Path, frame: pd.DataFrame) -> dict[Path, bytes]:
    files = {root / FILE: rendered(frame, "markdown").encode()}
    beside = root.resolve().parent
    for path in sorted(path for pattern in DOCUMENTS for path in beside.glob(pattern)):
        # bytes that are no text stay as they are
        if path.is_file() and holds_excerpts(text := path.read_bytes().decode(errors="surrogateescape")):
            files[path] = filled(text, frame, root).encode(errors="surrogateescape")
    return files
