"""Ranked frame -> tables for people: sections by model, one table a group, and an overview; no format is known here."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import pandas as pd

from quant_bench.report.frame import ROW
from quant_bench.report.text import number, signed

METRICS_A_TABLE: Final = 6
UNINFORMATIVE, BEATS_FLOAT, UNRANKED = "†", "‡", "*"
LEGEND: Final = (
    "Each value stands over its 95 % bootstrap interval and Δ, the paired difference to the float model on the same "
    "items with its 95 % interval.",
    "# is the rank by the table's first metric that has a better direction. Tables of different conventions, item "
    "counts, weights or versions are never ranked together. An overview stands in order of the mean of these ranks.",
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
    found = []
    for _, part in frame.groupby(_model_key(frame), sort=True):
        tables = [table for _, group in part.groupby("group", sort=True) for table in _group_tables(group)]
        if part["group"].nunique() > 1:
            tables.insert(0, _overview(part))
        found.append(Section(_model_title(part), next(iter(part["note"].dropna()), ""), tuple(tables)))
    return found


def _model_key(frame: pd.DataFrame) -> "pd.Series[str]":
    """Model, weights and dtype of the group that a row was put in: a blocked cell need not know its weights."""
    own = frame["model"] + "\0" + frame["weights_sha256"].fillna("") + "\0" + frame["dtype"].fillna("")
    return own.groupby(frame["group"]).transform("max")


def _model_title(part: pd.DataFrame) -> str:
    weights, dtype = part["weights_sha256"].dropna(), part["dtype"].dropna()
    known = [f"weights {weights.iloc[0][:12]}" if len(weights) else "weights unknown"]
    return " · ".join([part["model"].iloc[0], *known, *dtype.iloc[:1]])


def _group_tables(group: pd.DataFrame) -> Iterator[Table]:
    """A group's table, cut where it has more metrics than a page is wide."""
    scored = group[group["metric"].notna()]
    metrics = list(scored.sort_values("order", kind="stable")["metric"].unique())
    title = _title(group)
    if not metrics:
        yield _table(group, [], title)
    for start in range(0, len(metrics), METRICS_A_TABLE):
        continued = "" if start == 0 else " (continued)"
        yield _table(group, metrics[start : start + METRICS_A_TABLE], title + continued)


def _title(group: pd.DataFrame) -> str:
    known = group[group["state"] == "measured"]
    task = group["task"].iloc[0]
    if known.empty:
        return f"{task} · no scores"
    first = known.iloc[0]
    items = "" if pd.isna(first["items"]) else f"{first['items']:,} items"
    parts = (task, first["convention"], items, f"version {first['task_version']}", f"data {first['data_sha256'][:12]}")
    return " · ".join(part for part in parts if part)


def _table(group: pd.DataFrame, metrics: list[str], title: str) -> Table:
    footnotes = _Footnotes()
    headline = _headline(group)
    multiple = {name for name in ("arm", "seed") if group[name].nunique() > 1}
    keyed = {key: rows for key, rows in group.groupby(list(ROW), sort=False)}
    order = sorted(keyed, key=lambda key: _place(keyed[key], headline))
    rows = []
    for key in order:
        cells = keyed[key].set_index("metric")
        first = keyed[key].iloc[0]
        rank = _rank(keyed[key], headline)
        lead = [rank, first["label"], first["execution"], *(str(first[name]) for name in sorted(multiple))]
        entries = [Entry((text,)) for text in lead]
        if first["state"] != "measured":
            note = f"{first['state'].replace('_', ' ')} {footnotes.mark(first['reason'])}"
            entries += [Entry((note,)), *[Entry(("–",))] * (len(metrics) - 1)]
        else:
            entries += [_entry(cells.loc[metric]) if metric in cells.index else Entry(("–",)) for metric in metrics]
        rows.append(tuple(entries))
    units = group.dropna(subset=["metric"]).drop_duplicates("metric").set_index("metric")
    headings = ["#", "quantizer", "execution", *sorted(multiple), *(_heading(m, units.loc[m]) for m in metrics)]
    headings += ["state"] if not metrics else []
    return Table(title, tuple(headings), tuple(rows), tuple(footnotes.texts), 3 + len(multiple))


def _headline(group: pd.DataFrame) -> str | None:
    """The metric that ranks a table: the first one with a better direction."""
    directed = group[group["better"].isin(["higher", "lower"])]
    return None if directed.empty else str(directed.sort_values("order", kind="stable")["metric"].iloc[0])


def _heading(metric: str, meaning: Any) -> str:
    arrow = {"higher": " ↑", "lower": " ↓"}.get(meaning["better"], "")
    unit = "" if meaning["unit"] in ("1", "") else f" ({meaning['unit']})"
    return f"{metric}{unit}{arrow}"


def _place(rows: pd.DataFrame, headline: str | None) -> tuple[bool, float, bool, str, str, str, int]:
    found = rows.loc[rows["metric"] == headline, "rank"].dropna()
    rank = float(found.iloc[0]) if len(found) else float("inf")
    first = rows.iloc[0]
    unmeasured = first["state"] != "measured"
    return (
        unmeasured,
        rank,
        first["execution"] != "float",
        first["label"],
        first["execution"],
        first["arm"],
        first["seed"],
    )


def _rank(rows: pd.DataFrame, headline: str | None) -> str:
    found = rows.loc[rows["metric"] == headline, "rank"].dropna()
    return f"{found.iloc[0]:.0f}" if len(found) else "–"


def _entry(score: Any) -> Entry:
    """Value with its marks, interval, and difference with its interval."""
    lines = [_marked(score)]
    if pd.notna(score["low"]):
        lines.append(f"[{number(score['low'])}, {number(score['high'])}]")
    if pd.notna(score["delta"]):
        delta = f"Δ {signed(score['delta'])}"
        if pd.notna(score["delta_low"]):
            delta += f" [{signed(score['delta_low'])}, {signed(score['delta_high'])}]"
        lines.append(delta)
    return Entry(tuple(lines))


def _marked(score: Any) -> str:
    marks = UNINFORMATIVE * bool(score["uninformative"]) + BEATS_FLOAT * bool(score["beats_float"])
    marks += UNRANKED * bool(score["outdated"] or score["other_items"])
    items = f" (n={score['n']:,})" if score["other_items"] and pd.notna(score["n"]) else ""
    return number(score["value"]) + marks + items


def _overview(part: pd.DataFrame) -> Table:
    """First directed metric of every group side by side; each column has its own convention and item count."""
    footnotes = _Footnotes()
    headings = ["quantizer", "execution"]
    several = [name for name in ("arm", "seed") if part[name].nunique() > 1]
    columns: list[dict[Any, tuple[str, float]]] = []
    shown: dict[Any, Any] = {}
    for _, group in part.groupby("group", sort=True):
        metric = _headline(group) or next(iter(group["metric"].dropna()), None)
        column: dict[Any, tuple[str, float]] = {}
        for key, rows in group.groupby(list(ROW), sort=False):
            first = rows.iloc[0]
            shown.setdefault(key, first)
            scores = rows[rows["metric"] == metric]
            if len(scores):
                column[key] = _marked(scores.iloc[0]), float(scores.iloc[0]["rank"])
            elif first["state"] != "measured":
                column[key] = f"{first['state'].replace('_', ' ')} {footnotes.mark(first['reason'])}", float("nan")
        columns.append(column)
        headings.append(f"{group['task'].iloc[0]}: {metric or 'state'} {footnotes.mark(_title(group))}")

    def place(key: Any) -> tuple[int, float, bool, str, str]:
        ranks = [rank for column in columns if key in column and not pd.isna(rank := column[key][1])]
        mean = sum(ranks) / len(ranks) if ranks else float("inf")
        return -len(ranks), mean, shown[key]["execution"] != "float", shown[key]["label"], shown[key]["execution"]

    rows = []
    for key in sorted(shown, key=place):
        lead = [shown[key]["label"], shown[key]["execution"], *(str(shown[key][name]) for name in several)]
        rows.append(tuple(Entry((text,)) for text in [*lead, *(column.get(key, ("–", 0.0))[0] for column in columns)]))
    headings[2:2] = several
    return Table("Overview", tuple(headings), tuple(rows), tuple(footnotes.texts), 2 + len(several))
