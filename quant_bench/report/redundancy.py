"""The 2×2 of a sink logit and a gate: how much of what each gains alone the other gains, too."""

import math
from collections.abc import Iterable
from typing import Any, Final

import pandas as pd

from quant_bench.cell import BASELINE_ARM
from quant_bench.report.frame import GROUP, plain_rows
from quant_bench.report.seeds import MEANING
from quant_bench.statistics import spread_of

# gate form: sink alone, gate alone, both
FORMS: Final = {
    "norm": ("sink_logit", "norm_gate", "combo"),
    "projection": ("sink_logit", "projection_gate", "combo2"),
}
GAINS: Final = ("gain_sink", "gain_gate", "gain_both", "redundancy")
_ROW: Final = ("quantizer", "execution", "quantizer_version", "metric", "n")
_SHOWN: Final = (*GROUP, "weights_sha256", "label", "unit", "better", "reduction", "order")
COLUMNS: Final = (
    *("form", "group", *GROUP, "weights_sha256", *_ROW, "label", "unit", "better", "reduction", "order", "seed"),
    *(*GAINS, "seeds"),
    *(f"{gain}_{part}" for gain in GAINS for part in ("mean", "low", "high")),
)


def redundancy(frame: pd.DataFrame) -> pd.DataFrame:
    """R = gain(sink) + gain(gate alone) - gain(both), wherever one seed has all four arms.

    A gain is what an arm is better than softmax at the same seed, on the same items: positive is better. That of a
    perplexity is the difference of its logarithms, so nats like the loss behind it (perplexities do not add up). R is
    positive where the two do in part the same, zero where they add up, and negative where they help each other.

    Source: arXiv 2609.22005, 2×2 of zero option and filter.

    Args:
        frame: from `long_frame`.

    Returns:
        `COLUMNS`: one row a gate form, quantizer, metric with a better direction, and seed; `…_mean` over the `seeds`
        of that row with the 95 % Student interval from `…_low` to `…_high`, none for one seed.
    """
    places: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    complete = [form for form, named in FORMS.items() if {BASELINE_ARM, *named} <= set(frame["arm"])]
    for row in plain_rows(frame) if complete else ():
        directed = row["better"] in ("higher", "lower") and row["reduction"] in ("mean", "exp")
        if row["state"] == "measured" and directed and not row["outdated"]:
            place = (row["group"], *(row[name] for name in (*_ROW, *MEANING)), row["seed"])
            places.setdefault(place, {})[row["arm"]] = row
    rows = [
        _gains(form, [arms[arm] for arm in (BASELINE_ARM, *named)])
        for form, named in FORMS.items()
        if form in complete
        for arms in places.values()
        if {BASELINE_ARM, *named} <= arms.keys()
    ]
    made = pd.DataFrame(_with_spread(rows), columns=list(COLUMNS))
    counts = ("group", "items", "task_version", "quantizer_version", "n", "order", "seed", "seeds")
    numbers = [name for name in COLUMNS if name.startswith(GAINS)]
    return made.astype({name: "Int64" for name in counts} | {name: "float64" for name in numbers})


def _gains(form: str, arms: list[dict[str, Any]]) -> dict[str, Any]:
    """One row from softmax, sink, gate and both."""
    base, *others = (_nats(row) for row in arms)
    sign = 1.0 if arms[0]["better"] == "lower" else -1.0
    sink, gate, both = (sign * (base - other) for other in others)
    row = {name: arms[0][name] for name in ("group", *_SHOWN, *_ROW, "seed")}
    row |= {"form": form, "unit": "nats" if row["reduction"] == "exp" else row["unit"]}
    return row | dict(zip(GAINS, (sink, gate, both, sink + gate - both), strict=True))


def _nats(row: dict[str, Any]) -> float:
    value: float = row["value"]
    return math.log(value) if row["reduction"] == "exp" else value


def _with_spread(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    pools: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["form"], row["group"], *(row[name] for name in (*_ROW, "unit", "better")))
        pools.setdefault(key, []).append(row)
    found = []
    for pool in pools.values():
        together: dict[str, Any] = {"seeds": len(pool)}
        for gain in GAINS:
            spread = spread_of([row[gain] for row in pool])
            low, high = spread.ci95 or (None, None)
            together |= {f"{gain}_mean": spread.mean, f"{gain}_low": low, f"{gain}_high": high}
        found += [row | together for row in sorted(pool, key=lambda row: row["seed"])]
    return found
