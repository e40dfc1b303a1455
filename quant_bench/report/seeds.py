"""Several seeds of one row: what its numbers are together."""

from typing import Final

import numpy as np
import pandas as pd

from quant_bench.statistics import spread_of

# rows that differ in nothing but the seed; the item count and the versions keep apart what must not be averaged
_POOL: Final = ("group", "arm", "quantizer", "execution", "arm_version", "quantizer_version", "metric", "n")
# what a metric's name must stand for, to be one metric
MEANING: Final = ("unit", "better", "reduction", "chance")
_OF: Final = (("value", "mean"), ("delta", "delta_mean"), ("arm_delta", "arm_mean"))


def pool(frame: pd.DataFrame) -> None:
    """Add `pool` (rows of one number differ in the seed alone) and what its seeds say together.

    `seeds` is the number of seeds; `mean`, `delta_mean` and `arm_mean` are means over the seeds of `value`, `delta` and
    `arm_delta`. Each has `…_low` and `…_high`, the Student interval over seeds, none for one seed; `deviation` is the
    standard deviation of `value`, `delta_seeds` and `arm_seeds` say how many seeds have that difference.
    """
    frame["pool"] = frame.groupby([*_POOL, *MEANING], dropna=False, sort=False).ngroup()
    positions = frame[frame["value"].notna()].groupby("pool").indices
    measured = np.flatnonzero(frame["value"].notna())
    several = [measured[found] for found in positions.values() if len(found) > 1]
    frame["seeds"] = frame["value"].notna().groupby(frame["pool"]).transform("sum").astype("Int64")
    frame["deviation"] = np.nan
    for column, name in _OF:
        numbers = frame[column].to_numpy(dtype="float64")
        means, lows, highs = numbers.copy(), np.full(len(frame), np.nan), np.full(len(frame), np.nan)
        counts, deviations = np.isfinite(numbers).astype("int64"), np.full(len(frame), np.nan)
        for rows in several:
            found = numbers[rows][np.isfinite(numbers[rows])]
            counts[rows] = len(found)
            if len(found):
                spread = spread_of(found.tolist())
                means[rows] = spread.mean
                lows[rows], highs[rows] = spread.ci95 or (np.nan, np.nan)
                deviations[rows] = np.nan if spread.deviation is None else spread.deviation
        frame[name], frame[f"{name}_low"], frame[f"{name}_high"] = means, lows, highs
        if column == "value":
            frame["deviation"] = deviations
        else:
            frame[name.replace("mean", "seeds")] = pd.array(counts, dtype="Int64")
