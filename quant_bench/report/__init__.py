"""Report: the leaderboard as a pure function of the records; knows no torch."""

from pathlib import Path

import pandas as pd

from quant_bench.cache import write_atomically
from quant_bench.record import Store
from quant_bench.report.frame import long_frame
from quant_bench.report.render import FORMATS, Format, rendered

__all__ = ["FILE", "FORMATS", "Format", "leaderboard", "long_frame", "rendered", "stale", "write"]

FILE = "LEADERBOARD.md"


def leaderboard(root: Path) -> pd.DataFrame:
    """Every score under a folder of records, grouped and ranked: one row a score, one a cell without scores.

    Raises:
        RecordError: a file is no record, or does not lie where its content says; the message names every such file.
    """
    return long_frame(Store.read(root).valid())


def stale(root: Path, frame: pd.DataFrame) -> bool:
    """Whether the leaderboard file under a folder differs from what its records say.

    Neither records nor a leaderboard is in order, too.
    """
    path = root / FILE
    if not path.is_file():
        return len(frame) > 0
    return path.read_bytes() != rendered(frame, "markdown").encode()


def write(root: Path, frame: pd.DataFrame) -> Path:
    """Write the leaderboard file, as a whole or not at all, and return its path."""
    path = root / FILE
    write_atomically(path, rendered(frame, "markdown").encode())
    return path
