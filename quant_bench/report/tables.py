"""Ranked frame -> tables for people: sections by model, one table a group, and an overview; no format is known here."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any, Final

import pandas as pd

from quant_bench.cell import BASELINE_ARM
from quant_bench.report.arm_tables import REDUNDANCY, redundancy_table
from quant_bench.report.best import best_pools
from quant_bench.report.frame import plain_rows
from quant_bench.report.layout import Entry, Footnotes, Section, Table
from quant_bench.report.rows import Key, Row, by_metric, heading, model_of, parted, question, scored, together
from quant_bench.report.rows import headline as headline_of
from quant_bench.report.text import between, number, signed

METRICS_A_TABLE: Final = 4
UNINFORMATIVE, BEATS_FLOAT, UNRANKED = "†", "‡", "*"
_DELTA, _VERSUS = "Δ", f"vs {BASELINE_ARM}"
# rows of a table differ in these; several seeds of one row are shown by their mean
_ROW: Final = ("arm", "quantizer", "execution", "arm_version", "quantizer_version", "state", "reason")
LEGEND: Final = (
    "Each value stands over its 95 % bootstrap interval and Δ, the paired difference to the float model on the same "
    "items with its 95 % interval.",
    "# is the rank by the table's first metric that is a mean of items and has a better direction. Tables of other "
    "conventions, item counts, weights or versions are never ranked together. An overview stands in the order of the "
    "share of a column's other rows that a row is ahead of, a tie counting half, averaged over its columns; the float "
    "model comes first.",
    f"{UNINFORMATIVE} uninformative: the float model is at chance, so nothing is ranked.",
    f"{BEATS_FLOAT} better than the float model beyond its interval: look for the reason before believing it.",
    f"{UNRANKED} not ranked: measured by an older version of the plugin, over another number of items, or in another "
    "unit.",
)
ARMS: Final = (
    f"{_VERSUS} is the paired difference to the same cell with {BASELINE_ARM} attention on the same items, with "
    "its 95 % interval. Where there are several arms, their rows stand together for each quantizer."
)
SEEDS: Final = (
    "A row of several seeds has their mean ± their standard deviation. Its intervals, and those of its differences, "
    "are 95 % Student intervals of the mean over seeds: they say nothing about items."
)


def legend(frame: pd.DataFrame, gains: pd.DataFrame) -> tuple[str, ...]:
    """What the signs of the leaderboard of a frame and of its `redundancy` mean."""
    further = [ARMS] if frame["arm_delta"].notna().any() else []
    further += [REDUNDANCY] if not gains.empty else []
    further += [SEEDS] if (frame["seeds"] > 1).any() else []
    return LEGEND[:1] + tuple(further) + LEGEND[1:]


def sections(frame: pd.DataFrame, gains: pd.DataFrame) -> list[Section]:
    """Every model's tables: an overview where it has several tasks, then one table a group, and its `redundancy`."""
    # plain rows: thousands of small data frames would take minutes
    groups = list(parted(plain_rows(frame), lambda row: row["group"]).values())
    by_group = parted(plain_rows(gains), lambda row: row["group"])
    found = []
    for key, members in sorted(parted(groups, model_of).items()):
        tables = [table for group in members for table in _group_tables(group)]
        for group in members:
            gained = [row for row in by_group.get(group[0]["group"], ()) if row["metric"] == headline_of(group)]
            tables += [redundancy_table(gained)] if gained else []
        if len(members) > 1:
            tables.insert(0, _overview(members))
        rows = [row for group in members for row in group]
        # what is said of the weights, then of each arm attached to them, once
        notes = "; ".join(dict.fromkeys(part for row in rows if row["note"] for part in row["note"].split("; ")))
        # a note on one of several weights says nothing about the others
        said = notes and len({row["weights_sha256"] for row in rows if row["weights_sha256"]}) == 1
        found.append(Section(" · ".join(part for part in key if part), notes if said else "", tuple(tables)))
    return found


def _told_apart(scores: list[Row], several: list[str]) -> list[str]:
    return [", ".join(dict.fromkeys(str(row[name]) for row in scores)) for name in several]


def _several(group: Iterable[Row]) -> list[str]:
    """What else tells rows apart, where more than one of it is there."""
    rows = list(group)
    return [name for name in ("arm", "seed") if len({row[name] for row in rows}) > 1]


def _group_tables(group: list[Row]) -> Iterator[Table]:
    """A group's table, cut where it has more metrics than a page is wide."""
    metrics = list(dict.fromkeys(row["metric"] for row in sorted(scored(group), key=lambda row: row["order"])))
    headline, several, meaning = headline_of(group), _several(group), by_metric(group)
    cells, best = parted(group, itemgetter(*_ROW)), best_pools(group)
    found = {key: by_metric(scores) for key, scores in cells.items()}
    places = {key: _place(scores, headline) for key, scores in cells.items()}
    order = _in_blocks(places, lambda key: _block(cells[key][0], several))
    seeds = max(map(_seeds, cells.values()))
    # a group without scores has one table, too
    for start in range(0, max(len(metrics), 1), METRICS_A_TABLE):
        shown = metrics[start : start + METRICS_A_TABLE]
        footnotes = Footnotes()
        rows = []
        for key in order:
            first, scores = cells[key][0], found[key]
            rank = scores[headline]["rank"] if headline in scores else None
            lead = ["–" if rank is None else f"{rank:.0f}", first["label"], first["execution"]]
            entries = [Entry((text,)) for text in [*lead, *_told_apart(cells[key], several)]]
            if first["state"] != "measured":
                entries += [Entry((_state(first, footnotes),)), *[Entry(("–",))] * (len(shown) - 1)]
            else:
                entries += [_entry(scores.get(metric), seeds, best) for metric in shown]
            rows.append(tuple(entries))
        headings = ["#", "quantizer", "execution", *several, *(heading(meaning[metric]) for metric in shown)]
        headings += [] if shown else ["state"]
        title = question(group) + (" (continued)" if start else "")
        yield Table(title, tuple(headings), tuple(rows), footnotes.texts, 3 + len(several))


def _entry(score: Row | None, seeds: int, best: set[int]) -> Entry:
    return Entry(("–",)) if score is None else Entry(lines(score, seeds), score["pool"] in best)


def _seeds(rows: Iterable[Row]) -> int:
    """Seeds that were measured; of the row that has most of them, others say that they have fewer."""
    return len({row["seed"] for row in rows if row["state"] == "measured"})


def _state(row: Row, footnotes: Footnotes) -> str:
    return f"{row['state'].replace('_', ' ')} {footnotes.mark(row['reason'])}"


def _place(scores: list[Row], headline: str | None) -> tuple[Any, ...]:
    """Measured before others, then by rank; the float model first among equals."""
    first = scores[0]
    ranks = [row["rank"] for row in scores if row["metric"] == headline and row["rank"] is not None]
    shown = (first["execution"] != "float", first["label"], first["execution"])
    arm = (first["arm"] != BASELINE_ARM, first["arm"], first["seed"])
    return first["state"] != "measured", ranks[0] if ranks else float("inf"), *shown, *arm


def _in_blocks(places: dict[Key, tuple[Any, ...]], block: Callable[[Key], Any]) -> list[Key]:
    """Rows in their order, but those of one block behind its first one."""
    order = sorted(places, key=lambda key: places[key])
    first: dict[Any, int] = {}
    for index, key in enumerate(order):
        first.setdefault(block(key), index)
    return sorted(order, key=lambda key: first[block(key)])


def _block(row: Row, several: list[str]) -> tuple[Any, ...]:
    """What stands together: the arms of one quantizer, so that each is beside its baseline."""
    measured = row["state"] == "measured"
    return (measured, row["label"], row["execution"]) if "arm" in several else (measured,)


def lines(score: Row, seeds: int | None = None) -> tuple[str, ...]:
    """Value with its marks, interval, and differences with their intervals; of so many `seeds` of its table."""
    found = [_marked(score, seeds or score["seeds"])]
    own = together(score, "value")
    if own is not None and own.low is not None and own.high is not None:
        found.append(between(own.low, own.high))
    return (*found, *differences(score))


def differences(score: Row) -> tuple[str, ...]:
    """Differences of a value to the float model and to softmax attention, with their intervals."""
    lines = []
    for sign, column in ((_DELTA, "delta"), (_VERSUS, "arm_delta")):
        found = together(score, column)
        if found is None:
            continue
        line = f"{sign} {signed(found.value)}"
        if found.low is not None and found.high is not None:
            line += f" {between(found.low, found.high, signed)}"
        lines.append(line if found.seeds == score["seeds"] else f"{line} ({found.seeds} of {score['seeds']} seeds)")
    return tuple(lines)


def _marked(score: Row, seeds: int) -> str:
    marks = UNINFORMATIVE * score["uninformative"] + BEATS_FLOAT * score["beats_float"]
    marks += UNRANKED * (score["outdated"] or score["other_items"])
    items = f" (n={score['n']:,})" if score["other_items"] and score["n"] is not None else ""
    # a seed of another version, item count or unit is no part of the number
    told = f"{score['seeds']} of {seeds} seeds" if score["seeds"] < seeds else f"{seeds} seeds"
    if score["seeds"] < 2:
        return number(score["value"]) + marks + items + (f" ({told})" if seeds > 1 else "")
    return f"{number(score['mean'])}{marks} ± {number(score['deviation'])} ({told}){items}"


def _overview(groups: list[list[Row]]) -> Table:
    """The metric that ranks each group, side by side, and its difference to float; the float model comes first.

    Each column has its own convention and item count.
    """
    footnotes = Footnotes()
    several = _several(row for group in groups for row in group)
    headings = ["quantizer", "execution", *several]
    shown: dict[tuple[Any, ...], list[Row]] = {}
    columns: list[dict[tuple[Any, ...], Entry]] = []
    # of each column the share of its other ranked rows that a row is ahead of: ranks of 8 rows and of 50 have no mean
    ahead: dict[tuple[Any, ...], list[float]] = {}
    for group in groups:
        metric = headline_of(group) or next((row["metric"] for row in scored(group)), None)
        headings.append(f"{group[0]['task'].partition('(')[0]}: {metric or 'state'} {footnotes.mark(question(group))}")
        column: dict[tuple[Any, ...], Entry] = {}
        ranks: dict[tuple[Any, ...], float] = {}
        keyed = parted(group, lambda row: (row["arm"], row["quantizer"], row["execution"]))
        seeds = max(map(_seeds, keyed.values()))
        for key, scores in keyed.items():
            shown.setdefault(key, []).extend(scores)
            measured = by_metric([row for row in scores if row["state"] == "measured"])
            if not measured:
                column[key] = Entry((_state(scores[0], footnotes),))
            elif metric in measured:
                first = lines(measured[metric], seeds)[0]
                # the interval of the value itself stands in the group's own table
                column[key] = Entry((first, *differences(measured[metric])))
                if measured[metric]["rank"] is not None:
                    ranks[key] = measured[metric]["rank"]
        columns.append(column)
        # where all are equal nobody is ahead of anybody
        order = sorted(ranks.values())
        for key, rank in ranks.items() if len(set(order)) > 1 else ():
            level, behind = bisect_left(order, rank), bisect_right(order, rank)
            beaten = len(order) - behind + (behind - level - 1) / 2
            ahead.setdefault(key, []).append(beaten / (len(order) - 1))

    def place(key: tuple[Any, ...]) -> tuple[Any, ...]:
        shares = ahead.get(key, [])
        mean = sum(shares) / len(shares) if shares else -1.0
        first = shown[key][0]
        return first["execution"] != "float", -mean, -len(shares), first["label"], first["arm"] != BASELINE_ARM, *key

    rows = []
    places = {key: place(key) for key in shown}
    for key in _in_blocks(places, lambda key: _block(shown[key][0], several)[1:]):
        lead = [shown[key][0]["label"], shown[key][0]["execution"], *_told_apart(shown[key], several)]
        found = (column.get(key, Entry(("–",))) for column in columns)
        rows.append((*(Entry((text,)) for text in lead), *found))
    return Table("Overview", tuple(headings), tuple(rows), footnotes.texts, 2 + len(several))
