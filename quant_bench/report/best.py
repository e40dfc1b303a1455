"""Which number of a column is the best, where intervals are able to say so."""

from collections.abc import Iterable
from typing import Final

from quant_bench.report.rows import Row, parted

Ends = tuple[float | None, float | None]

BOLD: Final = (
    "bold: the best of the quantized rows (or of several float rows), where its 95 % interval, or that of its "
    "difference to float, lies apart from those of all others"
)


def best_pools(group: Iterable[Row]) -> set[int]:
    """Numbers (`pool`) that are better than all others of their metric, by their intervals.

    The float model is what others are compared with, and so it is no rival of theirs: float rows (of several arms) have
    a best one of their own. Of two numbers one is better where their 95 % intervals, or those of their differences to
    the float model, lie apart. That is a strict test whatever the two share, because the standard error of a difference
    is never above the sum of the two standard errors. Equal numbers (an execution and its twin) are best together, and
    without another number to be better than, nothing is best.

    Args:
        group: rows of one group of `long_frame`.
    """
    ranked = {row["pool"]: row for row in group if row["rank"] is not None}
    found: set[int] = set()
    for rivals in parted(ranked.values(), lambda row: (row["metric"], row["execution"] == "float")).values():
        first = min(rivals, key=lambda row: row["rank"])
        others = [row for row in rivals if row["mean"] != first["mean"]]
        if others and all(_apart(first, other) for other in others):
            found |= {row["pool"] for row in rivals if row["mean"] == first["mean"]}
    return found


def _apart(better: Row, worse: Row) -> bool:
    pairs = [(_value(better), _value(worse))]
    # each difference is one to its own float cell: they may be held against each other where that is the same cell
    if max(better["seeds"], worse["seeds"]) < 2 and all(better[key] == worse[key] for key in ("arm", "seed")):
        pairs.append(((better["delta_low"], better["delta_high"]), (worse["delta_low"], worse["delta_high"])))
    return any(_separate(*pair, better["better"]) for pair in pairs)


def _value(row: Row) -> Ends:
    return (row["low"], row["high"]) if row["seeds"] < 2 else (row["mean_low"], row["mean_high"])


def _separate(first: Ends, second: Ends, better: str) -> bool:
    (low, high), (other_low, other_high) = first, second
    if low is None or high is None or other_low is None or other_high is None:
        return False
    return low > other_high if better == "higher" else high < other_low
