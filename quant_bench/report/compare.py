"""Two arms, quantizers or models against each other: paired differences for each seed, and over seeds."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pandas as pd

from quant_bench.cell import BASELINE_ARM, Cell
from quant_bench.record import Record
from quant_bench.report.commands import command_for, command_for_cell
from quant_bench.report.frame import GROUP, asked, label_of
from quant_bench.report.paired import FLIPS, Columns, Pair, drawn_by, pair_of
from quant_bench.report.pairing import OF_A_MODEL, By, apart, counterpart, named
from quant_bench.samples import SampleStore
from quant_bench.score import Delta, Score
from quant_bench.statistics import spread_of

__all__ = ["COLUMNS", "FLIP_COLUMNS", "POOL", "Comparison", "Missing", "command_for", "compare"]

_PLACE: Final = (*GROUP, "arm", "arm_version", "quantizer", "label", "quantizer_version")
# what the differences of several seeds must agree in before their mean says anything
POOL: Final = (*_PLACE, "first_version", "second_version", "metric", "unit", "better", "reduction", "n")
COLUMNS: Final = (
    *("by", "first", "second", *_PLACE, "first_version", "second_version"),
    *("metric", "unit", "better", "reduction", "n", "seed", "first_value", "second_value"),
    *("difference", "low", "high", "p_value", "interval", "first_only", "second_only"),
    *("seeds", "mean", "deviation", "mean_low", "mean_high"),
)
FLIP_COLUMNS: Final = (*_PLACE, "metric", "seed", *FLIPS)
_COUNTS: Final = (
    *("items", "task_version", "arm_version", "quantizer_version", "first_version", "second_version"),
    *("n", "seed", "seeds", "first_only", "second_only"),
)
_NUMBERS: Final = (
    *("first_value", "second_value", "difference", "low", "high", "p_value"),
    *("mean", "deviation", "mean_low", "mean_high"),
)


@dataclass(frozen=True)
class Missing:
    """A cell without which another cannot be compared.

    Attributes:
        cell: which one.
        why: what is wrong with it.
        command: what measures it.
    """

    cell: Cell
    why: str
    command: str

    def __str__(self) -> str:
        return f"{self.cell.arm} of {named(self.cell)}: {self.why}\n  {self.command}"


@dataclass(frozen=True)
class Comparison:
    """Differences of two arms, quantizers or models.

    Attributes:
        frame: `COLUMNS`; one row a metric and seed. `difference` is first minus second on the same items; `low`, `high`
            and `p_value` are paired over items. `interval` says where they are from: `record` (one of the two is what
            records are compared with), `samples` (the answers in the cache), or None: there are no answers, or the
            metric is no mean of items. `first_only` and `second_only` count the items that only one of the two answers.
            `mean`, `deviation`, `mean_low` and `mean_high` are those of all `seeds` of the row's cell and metric.
        flips: `FLIP_COLUMNS`; one row an item that one answers and the other does not.
        missing: cells that are not measured though their counterpart is.
        notes: pairs that must not be compared, and intervals that cannot be known, and why.
    """

    frame: pd.DataFrame
    flips: pd.DataFrame
    missing: tuple[Missing, ...]
    notes: tuple[str, ...]


def compare(
    records: Iterable[Record],
    first: str,
    second: str,
    results: Path = Path("results"),
    *,
    by: By = "arm",
    store: SampleStore | None = None,
) -> Comparison:
    """Differences of two arms, quantizers or models wherever all else of a cell has both.

    Two records are compared only when weights (or what the trainings of both arms share), dtype, task and its version,
    convention, data, item count and the versions of the other plugins agree; two models have weights of their own, but
    must cut the text into the same tokens where items are windows of tokens.

    Args:
        records: of any cells.
        first: canonical spec of an arm or quantizer, or a model as its records name it.
        second: that which is subtracted.
        results: folder of the records, for the commands that measure what is missing.
        by: what the two are.
        store: samples of the cells; without it, intervals are those that records hold.
    """
    known = [record for record in records if getattr(record.cell, by) in (first, second)]
    cells = {record.cell: record for record in known}
    found = _Found(by, first, second, results, store)
    models = {record.cell.model: record for record in known}
    for place in dict.fromkeys(counterpart(cell, by, first) for cell in cells):
        sides = [counterpart(place, by, name) for name in (first, second)]
        pair = [cells.get(side) for side in sides]
        if any(record is not None and record.state == "not_applicable" for record in pair):
            continue
        lost = [side for side, record in zip(sides, pair, strict=True) if record is None or record.state != "measured"]
        for side in lost:
            record = cells.get(side)
            why = "there is no record" if record is None else f"{record.state}: {record.reason}"
            found.missing.append(Missing(side, why, found.command(side, models.get(side.model))))
        ours, theirs = pair
        if ours is None or theirs is None or lost:
            continue
        difference = apart(ours, theirs, by)
        if difference is None:
            found.add(ours, theirs)
        else:
            found.notes.append(f"{named(ours.cell)} is not compared: {difference}")
    frame = pd.DataFrame(_with_spread(found.rows), columns=list(COLUMNS))
    frame = frame.astype({name: "Int64" for name in _COUNTS} | {name: "float64" for name in _NUMBERS})
    return Comparison(frame, found.flipped(), tuple(found.missing), tuple(found.notes))


class _Found:
    """What is known so far of a comparison."""

    def __init__(self, by: By, first: str, second: str, results: Path, store: SampleStore | None) -> None:
        self.by, self.names, self.results, self.store = by, (first, second), results, store
        self.rows: list[dict[str, Any]] = []
        self.flips: list[pd.DataFrame] = []
        self.missing: list[Missing] = []
        self.notes: list[str] = []

    def command(self, cell: Cell, like: Record | None) -> str:
        """What measures a cell, beside its counterpart where one run can measure both."""
        arms = self.names if self.by == "arm" else (cell.arm,)
        quantizers = self.names if self.by == "quantizer" else (cell.quantizer,)
        return command_for_cell(cell, like, arms, quantizers, self.results)

    def flipped(self) -> pd.DataFrame:
        """Every flip, in the order of the cells."""
        return pd.concat(self.flips, ignore_index=True) if self.flips else pd.DataFrame(columns=list(FLIP_COLUMNS))

    def add(self, ours: Record, theirs: Record) -> None:
        """One row for each metric that both records have, and the items that flip."""
        others = {score.metric: score for score in theirs.scores}
        shared = self._shared(ours, theirs)
        pair = "" if self.store is None else pair_of(ours, theirs, self.store)
        unknown = False
        for score in ours.scores:
            other = others.get(score.metric)
            if other is None:
                if score.metric.name in {metric.name for metric in others}:
                    self._note(ours, score, "its unit, direction, reduction or chance is another one in each")
                continue
            if score.n != other.n:
                self._note(ours, score, f"{score.n} and {other.n} items")
                continue
            sign, stored = self._stored(score, other)
            if stored is not None and not agree(sign * stored.value, score, other):
                why = "the difference in the record is one to another cell than there is now"
                self._note(ours, score, f"{why}; measure both again with --force")
                continue
            row = shared | _meaning(score, other) | {"difference": score.value - other.value}
            columns = (
                pair.columns(score, other) if isinstance(pair, Pair) and score.metric.reduction != "none" else None
            )
            if stored is not None:
                row |= _interval(stored, sign) | {"interval": "record"}
            elif columns is not None and isinstance(pair, Pair):
                row |= _drawn(pair, columns, ours.cell, theirs.cell) | {"interval": "samples"}
            else:
                unknown |= score.metric.reduction != "none"
            if columns is not None and isinstance(pair, Pair):
                row |= self._flips(pair.flips(columns), shared, score.metric.name)
            self.rows.append(row)
        if unknown and self.store is not None:
            self.notes.append(self._without_interval(ours, theirs, pair))

    def _flips(self, found: pd.DataFrame | None, shared: dict[str, Any], metric: str) -> dict[str, int]:
        if found is None:
            return {}
        if len(found):
            place = {name: shared[name] for name in _PLACE} | {"metric": metric, "seed": shared["seed"]}
            self.flips.append(found.assign(**place)[list(FLIP_COLUMNS)])
        return {"first_only": int(found["first"].sum()), "second_only": int(found["second"].sum())}

    def _stored(self, score: Score, other: Score) -> tuple[float, Delta | None]:
        """The difference that a record holds, where one of the two is what it is compared with; else None."""
        baseline = {"arm": BASELINE_ARM, "quantizer": "none"}.get(self.by)
        name = "arm_delta" if self.by == "arm" else "delta"
        if self.names[1] == baseline:
            return 1.0, getattr(score, name)
        return -1.0, getattr(other, name) if self.names[0] == baseline else None

    def _shared(self, ours: Record, theirs: Record) -> dict[str, Any]:
        """Columns of a pair of records; what they are compared by is None but for the names."""
        shared = dict(zip(GROUP, asked(ours), strict=True))
        if self.by == "model":
            shared |= dict.fromkeys(OF_A_MODEL)
        for kind in ("arm", "quantizer"):
            versions = [record.versions[kind] for record in (ours, theirs)]
            compared = kind == self.by
            shared |= {kind: None if compared else getattr(ours.cell, kind)}
            shared |= {f"{kind}_version": None if compared else versions[0]}
            if compared:
                shared |= {"first_version": versions[0], "second_version": versions[1]}
        shared["label"] = None if self.by == "quantizer" else label_of(ours)
        sides = {"by": self.by, "first": self.names[0], "second": self.names[1], "seed": ours.cell.seed}
        return {"first_version": None, "second_version": None} | shared | sides

    def _note(self, ours: Record, score: Score, why: str) -> None:
        self.notes.append(f"{named(ours.cell)}: {score.metric.name} is not compared: {why}")

    def _without_interval(self, ours: Record, theirs: Record, pair: Pair | str) -> str:
        lacking = "no column of the answers in the cache gives both numbers on the same items"
        why = pair if isinstance(pair, str) else lacking
        commands = dict.fromkeys(self.command(record.cell, record) for record in (ours, theirs))
        again = "".join(f"\n  {command} --force" for command in commands)
        return f"{named(ours.cell)}: an interval cannot be known: {why}; to know it, measure both again:{again}"


def agree(stored: float, score: Score, other: Score) -> bool:
    """Whether a stored difference is that of the two scores, up to rounding."""
    # both come from the same items: they differ by rounding, which goes with the scores and not with their difference
    rounding = 1e-9 * max(abs(score.value), abs(other.value))
    return math.isclose(stored, score.value - other.value, rel_tol=1e-9, abs_tol=rounding)


def _meaning(score: Score, other: Score) -> dict[str, Any]:
    metric = score.metric
    meaning = {"metric": metric.name, "unit": metric.unit, "better": metric.better, "reduction": metric.reduction}
    return meaning | {"n": score.n, "first_value": score.value, "second_value": other.value}


def _interval(delta: Delta, sign: float) -> dict[str, float | None]:
    low, high = sorted(sign * end for end in delta.ci95) if delta.ci95 else (None, None)
    return {"low": low, "high": high, "p_value": delta.p_value}


def _drawn(pair: Pair, columns: Columns, ours: Cell, theirs: Cell) -> dict[str, float | None]:
    """The interval from the answers, whose ends only change place and sign where the two cells change place."""
    if drawn_by(ours) < drawn_by(theirs):
        return _interval(pair.delta(columns, ours.seed, theirs.quantizer), 1.0)
    return _interval(Pair(pair.second, pair.first).delta(columns, ours.seed, ours.quantizer), -1.0)


def _with_spread(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with what the seeds of each say together, the seeds of one row beside each other."""
    pools: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        pools.setdefault(tuple(row[name] for name in POOL), []).append(row)
    found = []
    for pool in pools.values():
        spread = spread_of([row["difference"] for row in pool])
        low, high = spread.ci95 or (None, None)
        together = {"seeds": spread.n, "mean": spread.mean, "deviation": spread.deviation}
        together |= {"mean_low": low, "mean_high": high}
        found += [row | together for row in sorted(pool, key=lambda row: row["seed"])]
    return found
