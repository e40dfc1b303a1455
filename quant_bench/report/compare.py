"""Two arms against each other, from records alone: a paired difference for each seed, and over seeds."""

import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pandas as pd

from quant_bench.cell import BASELINE_ARM, Cell
from quant_bench.record import Record
from quant_bench.report.frame import GROUP, asked
from quant_bench.schemes import label
from quant_bench.score import Score
from quant_bench.statistics import spread_of

# what the differences of several seeds must agree in before their mean says anything
POOL: Final = (*GROUP, "quantizer", "quantizer_version", "first_version", "second_version", "metric", "n")
COLUMNS: Final = (
    *("first", "second", *GROUP, "quantizer", "label", "quantizer_version", "first_version", "second_version"),
    *("metric", "unit", "better", "reduction", "n", "seed", "first_value", "second_value"),
    *("difference", "low", "high", "p_value", "seeds", "mean", "deviation", "mean_low", "mean_high"),
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
        cell = self.cell
        seed = f", seed {cell.seed}" if cell.seed else ""
        return f"{cell.arm} of {cell.model}, {label(cell.quantizer)}, {cell.task}{seed}: {self.why}\n  {self.command}"


@dataclass(frozen=True)
class Comparison:
    """Differences of two arms.

    Attributes:
        frame: `COLUMNS`; one row a metric and seed. `difference` is first minus second on the same items; `low`, `high`
            and `p_value` are paired over items, and there where one arm is softmax and the record says so. `mean`,
            `deviation`, `mean_low` and `mean_high` are those of all `seeds` of the row's quantizer, task and metric.
        missing: cells that are not measured though their counterpart is.
        notes: pairs that must not be compared, and why.
    """

    frame: pd.DataFrame
    missing: tuple[Missing, ...]
    notes: tuple[str, ...]


def compare(records: Iterable[Record], first: str, second: str, results: Path = Path("results")) -> Comparison:
    """Differences of two arms wherever one model, quantizer, task and seed has both.

    Two records are compared only when weights (or what the trainings of both arms share), dtype, task and its version,
    convention, data, item count and the quantizer's version agree.

    Args:
        records: of any arms.
        first: canonical spec of an arm.
        second: that of the arm which is subtracted.
        results: folder of the records, for the commands that measure what is missing.
    """
    cells = {record.cell: record for record in records if record.cell.arm in (first, second)}
    missing: list[Missing] = []
    notes: list[str] = []
    rows: list[dict[str, Any]] = []
    for place in dict.fromkeys(replace(cell, arm=first) for cell in cells):
        pair = [cells.get(replace(place, arm=arm)) for arm in (first, second)]
        known = next(record for record in pair if record is not None)
        if any(record is not None and record.state == "not_applicable" for record in pair):
            continue
        asked_for = zip((first, second), pair, strict=True)
        lost = [_missing(arm, known, record, (first, second), results) for arm, record in asked_for]
        missing += [one for one in lost if one is not None]
        ours, theirs = pair
        if ours is None or theirs is None or any(lost):
            continue
        difference = _apart(ours, theirs)
        if difference is None:
            rows += _differences(ours, theirs, notes)
        else:
            notes.append(f"{_named(ours.cell)} is not compared: {difference}")
    frame = pd.DataFrame(_with_spread(rows), columns=list(COLUMNS))
    counts = ("items", "task_version", "quantizer_version", "first_version", "second_version", "n", "seed", "seeds")
    numbers = ("first_value", "second_value", "difference", "low", "high", "p_value")
    pooled = ("mean", "deviation", "mean_low", "mean_high")
    frame = frame.astype({name: "Int64" for name in counts} | {name: "float64" for name in numbers + pooled})
    return Comparison(frame, tuple(missing), tuple(notes))


def command_for(record: Record, arms: Sequence[str], results: Path = Path("results")) -> str:
    """The command that measures the cells of some arms beside a record."""
    cell, model = record.cell, record.settings.get("model", {})
    words = ["quant-bench", "run", str(model.get("name") or cell.model)]
    for arm in arms:
        words += ["--arm", arm]
    words += ["--quantizer", label(cell.quantizer), "--task", cell.task, "--seed", str(cell.seed)]
    for option, usual in (("dtype", "float32"), ("revision", None)):
        if model.get(option, usual) != usual:
            words += [f"--{option}", str(model[option])]
    if results != Path("results"):
        words += ["--results", str(results)]
    return shlex.join(words)


def _missing(arm: str, known: Record, record: Record | None, arms: tuple[str, str], results: Path) -> Missing | None:
    if record is not None and record.state == "measured":
        return None
    why = "there is no record" if record is None else f"{record.state}: {record.reason}"
    return Missing(replace(known.cell, arm=arm), why, command_for(known, arms, results))


def _named(cell: Cell) -> str:
    seed = f", seed {cell.seed}" if cell.seed else ""
    return f"{cell.model}, {label(cell.quantizer)}, {cell.task}{seed}"


def _apart(ours: Record, theirs: Record) -> str | None:
    """In what two records differ that must agree, or None."""
    pairs = list(zip(GROUP, asked(ours), asked(theirs), strict=True))
    pairs.append(("quantizer_version", ours.versions["quantizer"], theirs.versions["quantizer"]))
    return next((f"{name} is {own!r} and {other!r}" for name, own, other in pairs if own != other), None)


def _differences(ours: Record, theirs: Record, notes: list[str]) -> Iterator[dict[str, Any]]:
    """One row for each metric that both have."""
    others = {score.metric: score for score in theirs.scores}
    shared = dict(zip(GROUP, asked(ours), strict=True)) | {
        "first": ours.cell.arm,
        "second": theirs.cell.arm,
        "quantizer": ours.cell.quantizer,
        "label": label(ours.cell.quantizer),
        "quantizer_version": ours.versions["quantizer"],
        "first_version": ours.versions["arm"],
        "second_version": theirs.versions["arm"],
        "seed": ours.cell.seed,
    }
    for score in ours.scores:
        other = others.get(score.metric)
        if other is None:
            continue
        if score.n != other.n:
            notes.append(f"{_named(ours.cell)}: {score.metric.name} is not compared: {score.n} and {other.n} items")
            continue
        interval = _over_items(score, other, theirs.cell.arm, ours.cell.arm)
        if interval is None:
            notes.append(
                f"{_named(ours.cell)}: {score.metric.name} is not compared: the difference in the record is one to "
                "another cell than there is now; measure both again with --force"
            )
            continue
        metric = score.metric
        meaning = {"metric": metric.name, "unit": metric.unit, "better": metric.better, "reduction": metric.reduction}
        values = {"n": score.n, "first_value": score.value, "second_value": other.value}
        yield {**shared, **meaning, **values, **interval}


def _over_items(score: Score, other: Score, second: str, first: str) -> dict[str, float | None] | None:
    """Difference of two scores, with its interval where a record has it; None where the records contradict it."""
    plain = score.value - other.value
    sign, delta = (1.0, score.arm_delta) if second == BASELINE_ARM else (-1.0, other.arm_delta)
    if delta is None or BASELINE_ARM not in (first, second):
        return {"difference": plain, "low": None, "high": None, "p_value": None}
    # both come from the same items: they differ by rounding, which goes with the scores and not with their difference
    rounding = 1e-9 * max(abs(score.value), abs(other.value))
    if not math.isclose(sign * delta.value, plain, rel_tol=1e-9, abs_tol=rounding):
        return None
    low, high = sorted(sign * end for end in delta.ci95) if delta.ci95 else (None, None)
    return {"difference": plain, "low": low, "high": high, "p_value": delta.p_value}


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
