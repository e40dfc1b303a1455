"""Ranked frame -> tables for people: sections by model, one table a group, and an overview; no format is known here."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import pandas as pd

from quant_bench.report.frame import ROW, plain_rows
from quant_bench.report.text import number, signed

METRICS_A_TABLE: Final = 4
UNINFORMATIVE, BEATS_FLOAT, UNRANKED = "†", "‡", "*"
Row = dict[str, Any]
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
LEGEND: Final = (
    "Each value stands over its 95 % bootstrap interval and Δ, the paired difference to the float model on the same "
    "items with its 95 % interval.",
    "# is the rank by the table's first metric that is a mean of items and has a better direction. Tables of other "
    "conventions, item counts, weights or versions are never ranked together. An overview stands in the order of the "
    "mean of these ranks, behind the float model.",
    f"{UNINFORMATIVE} uninformative: the float model is at chance, so nothing is ranked.",
    f"{BEATS_FLOAT} better than the float model beyond its interval: look for the reason before believing it.",
    f"{UNRANKED} not ranked: measured by an older version of the plugin, or over another number of items.",
)


@dataclass(frozen=True)
class Entry:
    """One cell of a table: lines that a format puts under each other."""

    lines: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Table:
    """Headings, rows and footnotes, not yet escaped for any format; the first `words` columns are no numbers."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Entry, ...], ...]
    footnotes: tuple[str, ...] = ()
    words: int = 3


@dataclass(frozen=True)
class Section:
    """One model: weights and precision in the title, and what a reader must know about them."""

    title: str
    note: str
    tables: tuple[Table, ...]


@dataclass
class _Footnotes:
    """Numbered notes of one table; the same text has the same number."""

    texts: list[str] = field(default_factory=list)

    def mark(self, text: str) -> str:
        if text not in self.texts:
            self.texts.append(text)
        return f"[{self.texts.index(text) + 1}]"


def sections(frame: pd.DataFrame) -> list[Section]:
    """Every model's tables: an overview where it has several tasks, then one table a group."""
    # plain rows: thousands of small data frames would take minutes
    groups = list(_parted(plain_rows(frame), lambda row: row["group"]).values())
    found = []
    for key, members in sorted(_parted(groups, _model_of).items()):
        tables = [table for group in members for table in _group_tables(group)]
        if len(members) > 1:
            tables.insert(0, _overview(members))
        notes = [row["note"] for group in members for row in group if row["note"]]
        name, weights, dtype = key
        known = [f"weights {weights[:12]}" if weights else "weights unknown", *([dtype] if dtype else [])]
        found.append(Section(" · ".join([name, *known]), notes[0] if notes else "", tuple(tables)))
    return found


def _parted(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    parts: dict[Key, list[Item]] = {}
    for item in items:
        parts.setdefault(key(item), []).append(item)
    return parts


def _model_of(group: list[Row]) -> tuple[str, str, str]:
    """Model, weights and dtype of a group; a blocked cell need not know its weights."""
    weights, dtype = (next((row[name] for row in group if row[name]), "") for name in ("weights_sha256", "dtype"))
    return group[0]["model"], weights, dtype


def _cells(group: list[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Scores of each row of a table."""
    return _parted(group, lambda row: tuple(row[name] for name in ROW))


def _several(group: Iterable[Row]) -> list[str]:
    """What else tells rows apart, where more than one of it is there."""
    rows = list(group)
    return [name for name in ("arm", "seed") if len({row[name] for row in rows}) > 1]


def _group_tables(group: list[Row]) -> Iterator[Table]:
    """A group's table, cut where it has more metrics than a page is wide."""
    metrics = list(dict.fromkeys(row["metric"] for row in sorted(_scored(group), key=lambda row: row["order"])))
    if not metrics:
        yield _table(group, [], _title(group))
    for start in range(0, len(metrics), METRICS_A_TABLE):
        continued = "" if start == 0 else " (continued)"
        yield _table(group, metrics[start : start + METRICS_A_TABLE], _title(group) + continued)


def _scored(group: Iterable[Row]) -> list[Row]:
    return [row for row in group if row["metric"] is not None]


def _title(group: list[Row]) -> str:
    first = next(iter(_scored(group)), None)
    if first is None:
        return f"{group[0]['task']} · no scores"
    items = "" if first["items"] is None else f"{first['items']:,} items"
    version, data = f"version {first['task_version']}", f"data {first['data_sha256'][:12]}"
    return " · ".join(part for part in (first["task"], first["convention"], items, version, data) if part)


def _table(group: list[Row], metrics: list[str], title: str) -> Table:
    footnotes = _Footnotes()
    headline, several = _headline(group), _several(group)
    meaning = {row["metric"]: row for row in reversed(_scored(group))}
    rows = []
    for scores in sorted(_cells(group).values(), key=lambda scores: _place(scores, headline)):
        first, by_metric = scores[0], {row["metric"]: row for row in scores}
        rank = by_metric[headline]["rank"] if headline in by_metric else None
        lead = ["–" if rank is None else f"{rank:.0f}", first["label"], first["execution"]]
        entries = [Entry((text,)) for text in [*lead, *(str(first[name]) for name in several)]]
        if first["state"] != "measured":
            entries += [Entry((_state(first, footnotes),)), *[Entry(("–",))] * (len(metrics) - 1)]
        else:
            entries += [_entry(by_metric[metric]) if metric in by_metric else Entry(("–",)) for metric in metrics]
        rows.append(tuple(entries))
    headings = ["#", "quantizer", "execution", *several, *(_heading(meaning[metric]) for metric in metrics)]
    headings += [] if metrics else ["state"]
    return Table(title, tuple(headings), tuple(rows), tuple(footnotes.texts), 3 + len(several))


def _state(row: Row, footnotes: _Footnotes) -> str:
    return f"{row['state'].replace('_', ' ')} {footnotes.mark(row['reason'])}"


def _headline(group: list[Row]) -> str | None:
    """The metric that ranks a table: the first mean of items with a better direction."""
    directed = [row for row in group if row["better"] in ("higher", "lower") and row["reduction"] != "none"]
    return min(directed, key=lambda row: row["order"])["metric"] if directed else None


def _heading(meaning: Row) -> str:
    arrow = {"higher": " ↑", "lower": " ↓"}.get(meaning["better"], "")
    unit = "" if meaning["unit"] in ("1", "") else f" ({meaning['unit']})"
    return f"{meaning['metric']}{unit}{arrow}"


def _place(scores: list[Row], headline: str | None) -> tuple[Any, ...]:
    """Measured before others, then by rank; the float model first among equals."""
    first = scores[0]
    ranks = [row["rank"] for row in scores if row["metric"] == headline and row["rank"] is not None]
    shown = (first["execution"] != "float", first["label"], first["execution"], first["arm"], first["seed"])
    return first["state"] != "measured", ranks[0] if ranks else float("inf"), *shown


def _entry(score: Row) -> Entry:
    """Value with its marks, interval, and difference with its interval."""
    lines = [_marked(score)]
    if score["low"] is not None:
        lines.append(f"[{number(score['low'])}, {number(score['high'])}]")
    if score["delta"] is not None:
        delta = f"Δ {signed(score['delta'])}"
        if score["delta_low"] is not None:
            delta += f" [{signed(score['delta_low'])}, {signed(score['delta_high'])}]"
        lines.append(delta)
    return Entry(tuple(lines))


def _marked(score: Row) -> str:
    marks = UNINFORMATIVE * score["uninformative"] + BEATS_FLOAT * score["beats_float"]
    marks += UNRANKED * (score["outdated"] or score["other_items"])
    items = f" (n={score['n']:,})" if score["other_items"] and score["n"] is not None else ""
    return number(score["value"]) + marks + items


def _overview(groups: list[list[Row]]) -> Table:
    """The metric that ranks each group, side by side, and its difference to float; the float model comes first.

    Each column has its own convention and item count.
    """
    footnotes = _Footnotes()
    several = _several(row for group in groups for row in group)
    headings = ["quantizer", "execution", *several]
    shown: dict[tuple[Any, ...], Row] = {}
    columns: list[dict[tuple[Any, ...], tuple[Entry, float | None]]] = []
    for group in groups:
        metric = _headline(group) or next((row["metric"] for row in _scored(group)), None)
        headings.append(f"{group[0]['task'].partition('(')[0]}: {metric or 'state'} {footnotes.mark(_title(group))}")
        column: dict[tuple[Any, ...], tuple[Entry, float | None]] = {}
        for key, scores in _cells(group).items():
            first = scores[0]
            shown.setdefault(key, first)
            asked = next((row for row in scores if row["metric"] == metric), None)
            if first["state"] != "measured":
                column[key] = Entry((_state(first, footnotes),)), None
            elif asked is not None:
                lines = _entry(asked).lines
                # the interval of the value itself stands in the group's own table
                column[key] = Entry((lines[0], *(line for line in lines if line.startswith("Δ")))), asked["rank"]
        columns.append(column)

    def place(key: tuple[Any, ...]) -> tuple[Any, ...]:
        ranks = [rank for column in columns if key in column and (rank := column[key][1]) is not None]
        mean = sum(ranks) / len(ranks) if ranks else float("inf")
        return shown[key]["execution"] != "float", -len(ranks), mean, shown[key]["label"], *key

    rows = []
    for key in sorted(shown, key=place):
        lead = [shown[key]["label"], shown[key]["execution"], *(str(shown[key][name]) for name in several)]
        found = (column.get(key, (Entry(("–",)), None))[0] for column in columns)
        rows.append((*(Entry((text,)) for text in lead), *found))
    return Table("Overview", tuple(headings), tuple(rows), tuple(footnotes.texts), 2 + len(several))
