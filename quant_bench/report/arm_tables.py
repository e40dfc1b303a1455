"""Comparisons of arms -> tables: two arms beside each other, and the 2×2 of a sink logit and a gate."""

from typing import Final

import pandas as pd

from quant_bench.cell import BASELINE_ARM
from quant_bench.report.compare import POOL, Comparison
from quant_bench.report.frame import GROUP, plain_rows
from quant_bench.report.layout import Document, Entry, Section, Table
from quant_bench.report.redundancy import FORMS, GAINS
from quant_bench.report.rows import Row, heading, model_of, parted, question
from quant_bench.report.text import between, number, signed

REDUNDANCY: Final = (
    f"2×2: a gain is what an arm is better than {BASELINE_ARM} at the same seed (of a perplexity: of its logarithm, in "
    "nats), and R = gain(sink) + gain(gate) - gain(both) is what the two have in common. Intervals are 95 % Student "
    "intervals over seeds."
)
_GAINS: Final = ("gain(sink)", "gain(gate)", "gain(both)", "R")
_FORMS: Final = " or ".join(f"{gate} and {both}" for _, gate, both in FORMS.values())


def comparison_document(found: Comparison, first: str, second: str) -> Document:
    """What `compare` found, by model and question."""
    legend = (
        f"Each difference is {first} minus {second} at the same seed, on the same items; ↓ marks what is better when "
        "it is lower, ↑ when it is higher.",
        "Over several seeds it is their mean ± their standard deviation, with the 95 % Student interval of the mean. "
        f"The 95 % interval of one seed is a paired bootstrap over items; records have it against {BASELINE_ARM} only.",
    )
    groups = parted(plain_rows(found.frame), lambda row: tuple(row[name] for name in GROUP)).values()
    sections = [
        Section(" · ".join(part for part in model if part), "", tuple(_comparison(group) for group in members))
        for model, members in sorted(parted(groups, model_of).items())
    ]
    return Document(f"{first} against {second}", legend, tuple(sections), "Nothing to compare.\n")


def _comparison(group: list[Row]) -> Table:
    rows = []
    for pool in parted(group, lambda row: tuple(row[name] for name in POOL)).values():
        first = pool[0]
        together = (_with_items(first),) if first["seeds"] == 1 else _over_seeds(first)
        each = tuple(f"{row['seed']}: {_with_items(row)}" for row in pool)
        lead = (Entry((first["label"],)), Entry((heading(first),)))
        rows.append((*lead, Entry(together), Entry((str(first["seeds"]),)), Entry(each)))
    headings = ("quantizer", "metric", "difference", "seeds", "each seed")
    return Table(question(group), headings, tuple(rows), words=2)


def _with_items(row: Row) -> str:
    shown = signed(row["difference"])
    return shown if row["low"] is None else f"{shown} {between(row['low'], row['high'], signed)}"


def _over_seeds(row: Row) -> tuple[str, ...]:
    mean = f"{signed(row['mean'])} ± {number(row['deviation'])}"
    return mean, between(row["mean_low"], row["mean_high"], signed)


def redundancy_document(frame: pd.DataFrame) -> Document:
    """The 2×2 tables of every model and question, for every metric with a better direction."""
    groups = parted(plain_rows(frame), lambda row: (row["group"], row["metric"])).values()
    sections = [
        Section(" · ".join(part for part in model if part), "", tuple(redundancy_table(group) for group in members))
        for model, members in sorted(parted(groups, model_of).items())
    ]
    nothing = f"No seed has all of {BASELINE_ARM}, sink_logit and {_FORMS}.\n"
    return Document("Redundancy of sink and gate", (REDUNDANCY,), tuple(sections), nothing)


def redundancy_table(group: list[Row]) -> Table:
    """The 2×2 of one question and metric, a row a quantizer and gate form."""
    pools = parted(group, lambda row: (row["label"], row["execution"], row["form"], row["n"], row["quantizer_version"]))
    rows = []
    for (label, execution, form, *_), pool in pools.items():
        lead = tuple(Entry((text,)) for text in (label, execution, form))
        gains = tuple(Entry(_gain(pool[0], gain)) for gain in GAINS)
        each = Entry(tuple(f"{row['seed']}: {signed(row['redundancy'])}" for row in pool))
        rows.append((*lead, *gains, Entry((str(pool[0]["seeds"]),)), each))
    headings = ("quantizer", "execution", "gate", *_GAINS, "seeds", "R of each seed")
    return Table(f"2×2 of sink and gate by {heading(group[0])} · {question(group)}", headings, tuple(rows))


def _gain(row: Row, gain: str) -> tuple[str, ...]:
    shown = signed(row[f"{gain}_mean"])
    low, high = row[f"{gain}_low"], row[f"{gain}_high"]
    return (shown,) if low is None else (shown, between(low, high, signed))
