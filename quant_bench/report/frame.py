"""Records -> one long data frame, grouped and ranked: what may be compared with what is decided here and only here."""

from collections.abc import Iterable
from typing import Any, Final

import pandas as pd

from quant_bench.record import Record
from quant_bench.schemes import execution_of, label
from quant_bench.score import Score

# two numbers are ranked together only when all of these agree: other weights, precision, questions, conventions or item
# counts make another quantity of the same name
GROUP: Final = (
    "model",
    "weights_sha256",
    "dtype",
    "task",
    "task_version",
    "convention",
    "data_sha256",
    "items",
)
ROW: Final = ("arm", "quantizer", "execution", "seed")
COLUMNS: Final = (
    *GROUP,
    *ROW,
    *("label", "note", "arm_version", "quantizer_version", "mac_share", "state", "reason"),
    *("order", "metric", "unit", "better", "reduction", "chance", "value", "stderr", "low", "high", "n"),
    *("delta", "delta_low", "delta_high", "p_value"),
)
_NUMBERS: Final = (
    "chance",
    "value",
    "stderr",
    "low",
    "high",
    "delta",
    "delta_low",
    "delta_high",
    "p_value",
    "mac_share",
)
_COUNTS: Final = ("items", "order", "n", "seed", "arm_version", "quantizer_version", "task_version")


def long_frame(records: Iterable[Record]) -> pd.DataFrame:
    """One row a score, one a cell without scores; sorted, grouped (`group`) and ranked.

    Beside `COLUMNS` it has `group` (from 0; only rows of one group may be compared), `rank` within group and metric (1
    is best, equal values share the better rank; none for descriptions, for what is no mean of items, and for what the
    next three mark),
    `uninformative` (the float model is at chance), `outdated` (a newer version of the same plugin is in the group),
    `other_items` (not the item count of the metric's other rows) and `beats_float` (its interval says: better than the
    float model).
    """
    rows = [row for record in records for row in _rows(record)]
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    frame = frame.astype({name: "float64" for name in _NUMBERS} | {name: "Int64" for name in _COUNTS})
    frame["group"] = _groups(frame)
    frame = frame.sort_values(["group", "order", *ROW], kind="stable", na_position="last", ignore_index=True)
    _mark(frame)
    frame["rank"] = _ranks(frame)
    return frame


def plain_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of plain Python values, None where there is none."""
    columns = [column.astype(object).where(column.notna(), None).tolist() for _, column in frame.items()]
    # a list: iterating over the index of names for every row would take most of a large report's time
    names = list(frame.columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _rows(record: Record) -> list[tuple[Any, ...]]:
    cell, identity = record.cell, record.identity
    quantizer, named = execution_of(cell.quantizer)
    settings = record.settings["quantizer"]
    execution = named or settings.get("execution") or ("float" if quantizer == "none" else "foreign")
    dtype = identity.get("dtype") or record.settings.get("model", {}).get("dtype")
    items = record.scores[0].n if record.scores else None
    asked = (cell.task, record.versions["task"], record.convention, identity["data_sha256"], items)
    covered = (record.coverage or {}).get("mac_share")
    shared: tuple[Any, ...] = (cell.model, identity["weights_sha256"], dtype, *asked)
    shared += (cell.arm, quantizer, execution, cell.seed, label(quantizer), identity.get("note") or None)
    shared += (record.versions["arm"], record.versions["quantizer"], covered, record.state, record.reason)
    if not record.scores:
        return [(*shared, *[None] * (len(COLUMNS) - len(shared)))]
    return [(*shared, order, *_score(score)) for order, score in enumerate(record.scores)]


def _score(score: Score) -> tuple[Any, ...]:
    metric, delta = score.metric, score.delta
    low, high = score.ci95 or (None, None)
    delta_low, delta_high = (delta.ci95 if delta else None) or (None, None)
    meaning = (metric.name, metric.unit, metric.better, metric.reduction, metric.chance)
    difference = (delta and delta.value, delta_low, delta_high, delta and delta.p_value)
    return (*meaning, score.value, score.stderr, low, high, score.n, *difference)


def _groups(frame: pd.DataFrame) -> "pd.Series[int]":
    """Number of each row's group, in sorted order; a cell without scores joins the first that it could belong to."""
    measured = frame["state"] == "measured"
    keys = frame.loc[:, list(GROUP)].astype(object).where(frame[list(GROUP)].notna(), "")
    homes: dict[tuple[Any, Any], list[tuple[Any, ...]]] = {}
    for key in sorted(set(keys[measured].itertuples(index=False, name=None)), key=_sortable):
        homes.setdefault((key[0], key[3]), []).append(key)
    chosen = [
        key if known else next((home for home in homes.get((key[0], key[3]), ()) if _fits(key, home)), key)
        for key, known in zip(keys.itertuples(index=False, name=None), measured, strict=True)
    ]
    number = {key: index for index, key in enumerate(sorted(set(chosen), key=_sortable))}
    return pd.Series([number[key] for key in chosen], index=frame.index, dtype="int64")


def _fits(key: tuple[Any, ...], home: tuple[Any, ...]) -> bool:
    """Whether a cell without scores says nothing against a group."""
    return all(own in ("", other) for own, other in zip(key, home, strict=True))


def _sortable(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple((part == "", str(part) if not isinstance(part, int) else f"{part:012d}") for part in key)


def _mark(frame: pd.DataFrame) -> None:
    """Add the columns that keep a row out of the ranking, and the flag of what is too good to be true."""
    by_metric = [frame["group"], frame["metric"]]
    higher, lower = frame["better"] == "higher", frame["better"] == "lower"
    at_chance = higher & (frame["low"].fillna(frame["value"]) <= frame["chance"])
    at_chance |= lower & (frame["high"].fillna(frame["value"]) >= frame["chance"])
    reference = frame["execution"] == "float"
    # several float rows are several arms or seeds: one good one is enough for a task to be informative
    informed = (reference & ~at_chance).groupby(by_metric, dropna=False).transform("any")
    asked = reference.groupby(by_metric, dropna=False).transform("any")
    frame["uninformative"] = asked & ~informed & frame["value"].notna()
    plugin = frame["quantizer"].str.split("(").str[0]
    newest = frame.groupby(["group", plugin], dropna=False)["quantizer_version"].transform("max")
    arm = frame["arm"].str.split("(").str[0]
    newest_arm = frame.groupby(["group", arm], dropna=False)["arm_version"].transform("max")
    frame["outdated"] = (frame["quantizer_version"] < newest) | (frame["arm_version"] < newest_arm)
    counts = frame["n"].astype("float64").fillna(-1.0)
    # the float model's count is the column's; without it, the largest
    expected = counts.where(reference).groupby(by_metric, dropna=False).transform("max")
    expected = expected.fillna(counts.groupby(by_metric, dropna=False).transform("max"))
    frame["other_items"] = (counts != expected) & frame["value"].notna()
    beats = (higher & (frame["delta_low"] > 0)) | (lower & (frame["delta_high"] < 0))
    frame["beats_float"] = beats & ~(frame["p_value"] >= 0.05) & ~frame["uninformative"]


def _ranks(frame: pd.DataFrame) -> "pd.Series[float]":
    signed = frame["value"].where(frame["better"] != "higher", -frame["value"])
    ranked = frame["better"].isin(["higher", "lower"]) & ~frame["uninformative"] & ~frame["outdated"]
    # a maximum has no standard error, and one that is lower has gone with worse integers: nothing is ranked by it
    ranked &= ~frame["other_items"] & (frame["reduction"] != "none")
    return signed.where(ranked).groupby([frame["group"], frame["metric"]], dropna=False).rank(method="min")
