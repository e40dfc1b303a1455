"""What several test files need: a text of their own, and the context of a task that reads it."""

from pathlib import Path
from typing import Any

from quant_bench.corpora import make_text
from quant_bench.data import DataSource, Text
from quant_bench.probe import Probe
from quant_bench.task import Context


class FakeData(DataSource):
    """Has the same rows under every name."""

    def __init__(self, rows: list[str]) -> None:
        self.rows = rows

    def text(self, name: str, split: str = "test") -> Text:
        return make_text(self.rows, "test", f"{name} {split}")


def context_of(rows: list[str] | None = None, probe: Probe | None = None, **fields: Any) -> Context:
    return Context(FakeData(rows or []), Path("unused"), probe or Probe.off(), **fields)
