"""Records -> one long data frame, grouped and ranked: what may be compared with what is decided here and only here."""

from collections.abc import Iterable
from typing import Any, Final

import pandas as pd

from quant_bench.record import Record, uncollected
from quant_bench.report.seeds import MEANING, pool
from quant_bench.schemes import execution_of, label
from quant_bench.score import Delta, Score

# two numbers are ranked together only when all of these agree: other weights, precision, questions, conventions or item
# counts make another quantity of the same name
GROUP: Final = (
    "model",
    "matched_sha256",
    "dtype",
    "task",
    "task_version",
    "convention",
    "data_sha256",
    "items",
)
# models of these names are trained for every arm and seed
TRAINED: Final = "tier:"
ROW: Final = ("arm", "quantizer", "execution", "seed")
COLUMNS: Final = (
    *("model", "weights_sha256", "dtype", "task", "task_version", "convention", "data_sha256", "items"),
    *ROW,
    *("label", "note", "path", "arm_version", "quantizer_version", "mac_share", "state", "reason"),
    *("order", "metric", "unit", "better", "reduction", "chance", "value", "stderr", "low", "high", "n"),
    *("delta", "delta_low", "delta_high", "p_value"),
    *("arm_delta", "arm_low", "arm_high", "arm_p_value", "matched_sha256"),
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
    "arm_delta",
    "arm_low",
    "arm_high",
    "arm_p_value",
    "mac_share",
)
_COUNTS: Final = ("items", "order", "n", "seed", "arm_version", "quantizer_version", "task_version")


@uncollected()
def long_frame(records: Iterable[Record]) -> pd.DataFrame:
    """One row a score, one a cell without scores; sorted, grouped (`group`) and ranked.

    `path` is the record's, below the folder of records. `matched_sha256` is what must agree of the weights: their
    digest, or, for a model that is trained for every arm and seed, the digest of what these trainings share. Beside
    `COLUMNS` it has `group` (from 0; only rows of one group may be compared), `rank` within group and metric (1 is
    best, equal values share the better rank; of several seeds their mean is ranked; none for descriptions, for what is
    no mean of items, and for what the next three mark),
    `uninformative` (the float model is at chance), `outdated` (a newer version of the same plugin is in the group),
    `other_items` (not the item count, unit or direction of the metric's other rows), `beats_float` (its interval says:
    better than the float model), and what several seeds say together (`seeds.pool`).
    """
    rows = [row for record in records for row in _rows(record)]
    # object: pandas would look through every column for what it might hold, and convert texts to Arrow's and back
    frame = pd.DataFrame(rows, columns=list(COLUMNS), dtype=object)
    frame = frame.astype({name: "float64" for name in _NUMBERS} | {name: "Int64" for name in _COUNTS})
    frame["group"] = _groups(frame)
    frame = frame.sort_values(["group", "order", *ROW], kind="stable", na_position="last", ignore_index=True)
    pool(frame)
    _mark(frame)
    frame["rank"] = _ranks(frame)
    return frame


def plain_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of plain Python values, None where there is none."""
    columns = [column.to_numpy(dtype=object, na_value=None).tolist() for _, column in frame.items()]
    # a list: iterating over the index of names for every row would take most of a large report's time
    names = list(frame.columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def asked(record: Record) -> tuple[Any, ...]:
    """The values of `GROUP`: only records in which they all agree may be compared."""
    identity = record.identity
    trained = record.cell.model.startswith(TRAINED)
    matched = identity.get("training_sha256") if trained else identity["weights_sha256"]
    dtype = record.settings.get("model", {}).get("dtype")
    items = record.scores[0].n if record.scores else None
    question = (record.cell.task, record.versions["task"], record.convention, identity["data_sha256"], items)
    return (record.cell.model, matched, dtype, *question)


def label_of(record: Record) -> str:
    """Short name of a record's quantizer; see `schemes.label`."""
    return label(record.cell.quantizer, tuple(record.settings["quantizer"]))


def _rows(record: Record) -> list[tuple[Any, ...]]:
    cell, identity = record.cell, record.identity
    quantizer, named = execution_of(cell.quantizer)
    said = str(named or record.settings["quantizer"].get("execution") or "foreign")
    # rows of this execution are what others are compared with: no setting of a quantizer may say it
    execution = "float" if quantizer == "none" else "foreign" if said == "float" else said
    model, matched, *question = asked(record)
    covered = (record.coverage or {}).get("mac_share")
    shown = label(quantizer, tuple(record.settings["quantizer"]))
    shared: tuple[Any, ...] = (model, identity["weights_sha256"], *question)
    shared += (cell.arm, quantizer, execution, cell.seed, shown, identity.get("note") or None)
    shared += ("/".join(cell.parts()),)
    shared += (record.versions["arm"], record.versions["quantizer"], covered, record.state, record.reason)
    if not record.scores:
        return [(*shared, *[None] * (len(COLUMNS) - len(shared) - 1), matched)]
    return [(*shared, order, *_score(score), matched) for order, score in enumerate(record.scores)]


def _score(score: Score) -> tuple[Any, ...]:
    metric = score.metric
    low, high = score.ci95 or (None, None)
    meaning = (metric.name, metric.unit, metric.better, metric.reduction, metric.chance)
    value = (score.value, score.stderr, low, high, score.n)
    return (*meaning, *value, *_difference(score.delta), *_difference(score.arm_delta))


def _difference(delta: Delta | None) -> tuple[float | None, ...]:
    if delta is None:
        return (None, None, None, None)
    return (delta.value, *(delta.ci95 or (None, None)), delta.p_value)


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
    by_metric = _metrics(frame)
    higher, lower = frame["better"] == "higher", frame["better"] == "lower"
    at_chance = higher & (frame["low"].fillna(frame["value"]) <= frame["chance"])
    at_chance |= lower & (frame["high"].fillna(frame["value"]) >= frame["chance"])
    reference = frame["execution"] == "float"
    # several float rows are several arms or seeds: one good one is enough for a task to be informative
    informed = (reference & ~at_chance).groupby(by_metric).transform("any")
    asked = reference.groupby(by_metric).transform("any")
    frame["uninformative"] = asked & ~informed & frame["value"].notna()
    plugin = _plugins(frame["quantizer"])
    newest = frame.groupby(["group", plugin], dropna=False)["quantizer_version"].transform("max")
    arm = _plugins(frame["arm"])
    newest_arm = frame.groupby(["group", arm], dropna=False)["arm_version"].transform("max")
    frame["outdated"] = (frame["quantizer_version"] < newest) | (frame["arm_version"] < newest_arm)
    counts = frame["n"].astype("float64").fillna(-1.0)
    # the float model's count is the column's; without it, the largest
    expected = counts.where(reference).groupby(by_metric).transform("max")
    expected = expected.fillna(counts.groupby(by_metric).transform("max"))
    meaning = frame.groupby(list(MEANING), dropna=False).ngroup().astype("float64")
    usual = meaning.where(reference).groupby(by_metric).transform("first")
    usual = usual.fillna(meaning.groupby(by_metric).transform("first"))
    frame["other_items"] = ((counts != expected) | (meaning != usual)) & frame["value"].notna()
    # one seed is judged by its items, several by their spread
    lowest = frame["delta_low"].where(frame["seeds"] < 2, frame["delta_mean_low"])
    highest = frame["delta_high"].where(frame["seeds"] < 2, frame["delta_mean_high"])
    beats = (higher & (lowest > 0)) | (lower & (highest < 0))
    luck = (frame["p_value"] >= 0.05) & (frame["seeds"] < 2)
    frame["beats_float"] = beats & ~luck.fillna(False).astype(bool) & ~frame["uninformative"]


def _metrics(frame: pd.DataFrame) -> "pd.Series[int]":
    """Number of each row's group and metric: looked up once, and not for every question about them."""
    return frame.groupby(["group", "metric"], dropna=False, sort=False).ngroup()


def _plugins(specs: "pd.Series[str]") -> "pd.Series[str]":
    """Names without settings; each text is cut once, not once a row."""
    return specs.map({text: text.partition("(")[0] for text in specs.unique()})


def _ranks(frame: pd.DataFrame) -> "pd.Series[float]":
    signed = frame["mean"].where(frame["better"] != "higher", -frame["mean"])
    ranked = frame["better"].isin(["higher", "lower"]) & ~frame["uninformative"] & ~frame["outdated"]
    # a maximum has no standard error, and one that is lower has gone with worse integers: nothing is ranked by it
    ranked &= ~frame["other_items"] & (frame["reduction"] != "none")
    # the seeds of one row stand in one place: the first of them is ranked, and the others get its rank
    once = ranked & ~frame["pool"].where(frame["value"].notna()).duplicated()
    found = signed.where(once).groupby(_metrics(frame)).rank(method="min")
    return found.groupby(frame["pool"]).transform("min").where(ranked)
