"""Rows of a frame as people read them: what they are grouped by, and what a table's title and headings say."""

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Final, NamedTuple, TypeVar

from quant_bench.report.frame import TRAINED

Row = dict[str, Any]
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)

# number of a row -> its interval over items, its mean over seeds, and how many seeds have it
_TOGETHER: Final = {
    "value": (("low", "high"), "mean", "seeds"),
    "delta": (("delta_low", "delta_high"), "delta_mean", "delta_seeds"),
    "arm_delta": (("arm_low", "arm_high"), "arm_mean", "arm_seeds"),
}


class Together(NamedTuple):
    """What the seeds of a row say of a number: one seed with its interval over items, several with that over seeds."""

    value: float
    low: float | None
    high: float | None
    seeds: int


def parted(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by their key, in the order in which keys come."""
    parts: dict[Key, list[Item]] = {}
    for item in items:
        parts.setdefault(key(item), []).append(item)
    return parts


def model_of(group: list[Row]) -> tuple[str, str, str]:
    """Model, weights and dtype of a group; a blocked cell need not know its weights."""
    matched, dtype = (next((row[name] for row in group if row[name]), "") for name in ("matched_sha256", "dtype"))
    model = group[0]["model"]
    if model.startswith(TRAINED):
        return model, f"training {matched[:12]}" if matched else "trained for each arm and seed", dtype
    return model, f"weights {matched[:12]}" if matched else "weights unknown", dtype


def scored(group: Iterable[Row]) -> list[Row]:
    """The rows that are scores."""
    return [row for row in group if row["metric"] is not None]


def question(group: list[Row]) -> str:
    """What a group was asked: task, convention, items, version and data."""
    first = next(iter(scored(group)), None)
    if first is None:
        return f"{group[0]['task']} · no scores"
    items = "" if first["items"] is None else f"{first['items']:,} items"
    version, data = f"version {first['task_version']}", f"data {first['data_sha256'][:12]}"
    return " · ".join(part for part in (first["task"], first["convention"], items, version, data) if part)


def heading(meaning: Row) -> str:
    """A metric's name, unit and better direction."""
    arrow = {"higher": " ↑", "lower": " ↓"}.get(meaning["better"], "")
    unit = "" if meaning["unit"] in ("1", "") else f" ({meaning['unit']})"
    return f"{meaning['metric']}{unit}{arrow}"


def headline(group: list[Row]) -> str | None:
    """The metric that ranks a group: the first mean of items with a better direction."""
    directed = [row for row in group if row["better"] in ("higher", "lower") and row["reduction"] != "none"]
    return min(directed, key=lambda row: row["order"])["metric"] if directed else None


def together(score: Row, number: str) -> Together | None:
    """What all seeds of a score's row say of `value`, `delta` or `arm_delta`; None where no seed has it."""
    (low, high), mean, count = _TOGETHER[number]
    if score["seeds"] >= 2:
        number, low, high = mean, f"{mean}_low", f"{mean}_high"
    if score[number] is None:
        return None
    return Together(score[number], score[low], score[high], score[count])


def by_metric(scores: Iterable[Row]) -> dict[str, Row]:
    """One score a metric: that of any seed, for it says what all seeds say together."""
    # where seeds differ in version or item count, the one that may be ranked goes last, and so it is taken
    order = sorted(scored(scores), key=lambda row: row["outdated"] + row["other_items"], reverse=True)
    return {row["metric"]: row for row in order}
