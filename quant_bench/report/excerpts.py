"""Excerpts: some columns of the leaderboard in a Markdown file for people, kept true by `quant-bench report`.

An excerpt stands between two comments; the first names the model and the columns. It has a row for each quantizer of
the model with softmax attention, or, where a quantizer is named (`none`, `w4a4-integer`), one for each arm under it:

    <!-- leaderboard MODEL: TASK METRIC; TASK METRIC -->
    <!-- /leaderboard -->
    <!-- leaderboard MODEL with QUANTIZER: TASK METRIC; TASK METRIC -->
    <!-- /leaderboard -->
"""

import math
import re
from typing import Final

import pandas as pd

from quant_bench.cell import BASELINE_ARM
from quant_bench.errors import RecordError
from quant_bench.report.frame import plain_rows
from quant_bench.report.layout import Entry, Footnotes, Table
from quant_bench.report.render import markdown_table
from quant_bench.report.rows import Row, heading, question, scored
from quant_bench.report.tables import differences, lines
from quant_bench.report.text import markdown

# arm or quantizer, and execution
Key = tuple[str, str]
# at a line's beginning: one that is indented or in a sentence is an example
_BEGIN: Final = re.compile("^<!-- leaderboard ", re.MULTILINE)
_EXCERPT: Final = re.compile(
    r"^(<!-- leaderboard ([^\r\n]*?): ([^\r\n]*) -->\r?\n)(?:(?!^<!-- leaderboard ).)*?^(<!-- /leaderboard -->)",
    re.DOTALL | re.MULTILINE,
)


def holds_excerpts(text: str) -> bool:
    """Whether there is anything to fill in."""
    return _BEGIN.search(text) is not None


def filled(text: str, frame: pd.DataFrame) -> str:
    """The text with every excerpt as the records have it now.

    Raises:
        RecordError: a column has no scores, or scores of several kinds that must not stand in one column; or an excerpt
            does not end, or does not say its columns.
    """
    rows = scored(plain_rows(frame))

    def fill(found: re.Match[str]) -> str:
        begin, model, columns, end = found.groups()
        return f"{begin}{_excerpt(rows, model, [column.strip() for column in columns.split(';')])}{end}"

    made, count = _EXCERPT.subn(fill, text)
    if count != len(_BEGIN.findall(text)):
        raise RecordError(
            "<!-- leaderboard MODEL: TASK METRIC --> stands on a line of its own, and ends with <!-- /leaderboard -->"
        )
    return made


def _excerpt(rows: list[Row], subject: str, columns: list[str]) -> str:
    """A row for each quantizer or arm, best first; executions that agree in all that both have share one."""
    model, _, quantizer = subject.partition(" with ")
    lead = "arm" if quantizer else "quantizer"
    of_model = [row for row in rows if row["model"] == model]
    eligible = [row for row in of_model if (_shorthand(row) == quantizer if quantizer else row["arm"] == BASELINE_ARM)]
    footnotes, headings = Footnotes(), [lead]
    cells: dict[Key, dict[str, Row]] = {}
    for column in columns:
        task, _, metric = column.rpartition(" ")
        found = [row for row in eligible if (row["task"], row["metric"]) == (task, metric)]
        if len({row["group"] for row in found}) != 1:
            what = "scores of several conventions, weights or versions" if found else "no scores"
            raise RecordError(f"an excerpt asks for {column!r} of {subject}, and the records have {what} of that name")
        # of several seeds any row has what all say together; what must not be ranked goes first, and so it is replaced
        found.sort(key=lambda row: row["outdated"] + row["other_items"], reverse=True)
        name = task.partition("(")[0]
        headings.append(f"{name}: {heading(found[-1])} {footnotes.mark(question(found))}")
        for row in found:
            cells.setdefault((row[lead], row["execution"]), {})[column] = row
    shown = [(executions, cells[key]) for key, executions in _distinct(cells).items()]
    shown.sort(key=lambda row: _place(row[1], columns))
    # a row of fewer seeds than another says so: its interval knows nothing of the spread over seeds
    seeds = max(row["seeds"] for found in cells.values() for row in found.values())
    entries = tuple((_name(lead, *row), *(_entry(row[1].get(column), seeds) for column in columns)) for row in shown)
    table = Table(title="", headings=tuple(headings), rows=entries, words=1)
    notes = [f"{index}. {markdown(note)}" for index, note in enumerate(footnotes.texts, 1)]
    return "\n".join(["", *markdown_table(table), "", *notes, ""])


def _distinct(cells: dict[Key, dict[str, Row]]) -> dict[Key, list[str]]:
    """Rows to show, each with the executions that it speaks for: what they all have is equal."""
    kept: dict[Key, list[str]] = {}
    # those with more columns first; among equals the order of names, so that `integer` comes before `simulated`
    for key in sorted(cells, key=lambda key: (-len(cells[key]), key)):
        values = {column: row["mean"] for column, row in cells[key].items()}
        for other, executions in kept.items():
            if other[0] == key[0] and values.items() <= {c: row["mean"] for c, row in cells[other].items()}.items():
                executions.append(key[1])
                break
        else:
            kept[key] = [key[1]]
    return kept


def _place(found: dict[str, Row], columns: list[str]) -> list[float]:
    """Best first in the first column, then in the others; what a row lacks stands last."""
    rows = (found.get(column) for column in columns)
    return [math.inf if row is None else -row["mean"] if row["better"] == "higher" else row["mean"] for row in rows]


def _shorthand(row: Row) -> str:
    """A row's quantizer as one names it: the execution stands behind it unless it is the usual one."""
    shown, execution = str(row["label"]), row["execution"]
    return f"{shown}-{execution}" if execution in ("integer", "classic") else shown


def _name(lead: str, executions: list[str], found: dict[str, Row]) -> Entry:
    first = next(iter(found.values()))
    if lead == "arm":
        return Entry((str(first["arm"]),))
    label = str(first["label"])
    return Entry((label if executions == ["float"] else f"{label} ({' = '.join(executions)})",))


def _entry(row: Row | None, seeds: int) -> Entry:
    return Entry(("–",)) if row is None else Entry((lines(row, seeds)[0], *differences(row)))
