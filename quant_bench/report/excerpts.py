"""Excerpts: some columns of the leaderboard in a Markdown file for people, kept true by `quant-bench report`.

An excerpt stands between two comments; the first names the model and the columns. It has a row for each quantizer of
the model with softmax attention, or, where a quantizer is named (`none`, `w4a4-integer`), one for each arm under it:

    <!-- leaderboard MODEL: TASK METRIC; TASK METRIC -->
    <!-- /leaderboard -->
    <!-- leaderboard MODEL with QUANTIZER: TASK METRIC; TASK METRIC -->
    <!-- /leaderboard -->

One of the tables in a record's details, by the name that it has there; of the quantizer `none` where none is named:

    <!-- details MODEL: TASK NAME -->
    <!-- /details -->
    <!-- details MODEL with QUANTIZER: TASK NAME -->
    <!-- /details -->
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pandas as pd

from quant_bench.cell import BASELINE_ARM
from quant_bench.errors import RecordError
from quant_bench.record import Record
from quant_bench.report.frame import plain_rows
from quant_bench.report.layout import Entry, Footnotes, Table
from quant_bench.report.render import markdown_table
from quant_bench.report.rows import Row, heading, question, scored
from quant_bench.report.tables import differences, lines
from quant_bench.report.text import markdown, number

# arm or quantizer, and execution
Key = tuple[str, str]
# at a line's beginning: one that is indented or in a sentence is an example
_BEGIN: Final = "^<!-- {} "
_WHOLE: Final = r"^(<!-- {0} ([^\r\n]*?): ([^\r\n]*) -->\r?\n)(?:(?!^<!-- (?:leaderboard|details) ).)*?^(<!-- /{0} -->)"
_KINDS: Final = {"leaderboard": "MODEL: TASK METRIC", "details": "MODEL: TASK NAME"}


def holds_excerpts(text: str) -> bool:
    """Whether there is anything to fill in."""
    return any(re.search(_BEGIN.format(kind), text, re.MULTILINE) for kind in _KINDS)


def filled(text: str, frame: pd.DataFrame, root: Path) -> str:
    """The text with every excerpt as the records have it now.

    Args:
        text: of a document.
        frame: from `long_frame`.
        root: folder of the records that it was made of.

    Raises:
        RecordError: a column has no scores, or scores of several kinds that must not stand in one column; details have
            no such table, or several records have one; or an excerpt does not end, or does not say its columns.
    """
    rows = scored(plain_rows(frame))
    text = _filled(text, "leaderboard", lambda model, columns: _excerpt(rows, model, columns))
    return _filled(text, "details", lambda model, named: _details(rows, model, named, root))


def _filled(text: str, kind: str, made: Callable[[str, str], str]) -> str:
    def fill(found: re.Match[str]) -> str:
        begin, subject, asked, end = found.groups()
        return f"{begin}{made(subject, asked)}{end}"

    flags = re.DOTALL | re.MULTILINE
    new, count = re.subn(_WHOLE.format(kind), fill, text, flags=flags)
    if count != len(re.findall(_BEGIN.format(kind), text, flags)):
        raise RecordError(
            f"<!-- {kind} {_KINDS[kind]} --> stands on a line of its own, and ends with <!-- /{kind} --> before "
            "another excerpt begins"
        )
    return new


def _details(rows: list[Row], subject: str, asked: str, root: Path) -> str:
    """A table of a record's details as it stands: a column for each name in its rows."""
    model, _, quantizer = subject.partition(" with ")
    task, _, name = asked.strip().rpartition(" ")
    of_cell = (model, BASELINE_ARM, quantizer or "none", task)
    found = [row for row in rows if (row["model"], row["arm"], _shorthand(row), row["task"]) == of_cell]
    paths = {row["path"] for row in found}
    if len(paths) != 1:
        raise RecordError(f"an excerpt asks for details of {subject}: {task}, and {len(paths)} records are that")
    table = Record.read(root / paths.pop(), root).details.get(name)
    if not isinstance(table, list) or not table or not all(isinstance(line, dict) for line in table):
        raise RecordError(f"an excerpt asks for details of {subject}, and {task} has no table {name!r} in them")
    headings = tuple(dict.fromkeys(key for line in table for key in line))
    entries = tuple(tuple(Entry((_shown(line.get(key)),)) for key in headings) for line in table)
    shown = Table(title="", headings=headings, rows=entries, words=1)
    return "\n".join(["", *markdown_table(shown), "", markdown(question(found)), ""])


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return number(value) if isinstance(value, float) else str(value)


def _excerpt(rows: list[Row], subject: str, asked: str) -> str:
    """A row for each quantizer or arm, best first; executions that agree in all that both have share one."""
    columns = [column.strip() for column in asked.split(";")]
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
