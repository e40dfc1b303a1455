"""The 2×2 of a sink logit and a gate -> tables."""

from typing import Final

import pandas as pd

from quant_bench.cell import BASELINE_ARM
from quant_bench.report.frame import plain_rows
from quant_bench.report.layout import Document, Entry, Section, Table
from quant_bench.report.redundancy import FORMS, GAINS
from quant_bench.report.rows import Row, heading, model_of, parted, question
from quant_bench.report.text import between, signed

REDUNDANCY: Final = (
    f"2×2: a gain is what an arm is better than {BASELINE_ARM} at the same seed (of a perplexity: of its logarithm, in "
    "nats), and R = gain(sink) + gain(gate) - gain(both) is what the two have in common. Intervals are 95 % Student "
    "intervals over seeds."
)
_GAINS: Final = ("gain(sink)", "gain(gate)", "gain(both)", "R")
_FORMS: Final = " or ".join(f"{gate} and {both}" for _, gate, both in FORMS.values())


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
