"""Comparisons of two arms, quantizers or models -> tables: differences, items that flip, and layers side by side."""

from collections.abc import Iterator

import pandas as pd

from quant_bench.report.compare import POOL, Comparison
from quant_bench.report.frame import GROUP, plain_rows
from quant_bench.report.layers import SHOWN
from quant_bench.report.layout import Document, Entry, Section, Table
from quant_bench.report.rows import Row, heading, model_of, parted, question
from quant_bench.report.text import between, number, signed

_ONE_SEED = (
    "The 95 % interval of one seed is a paired bootstrap over items: from the record where one of the two is what "
    "records are compared with, else from the answers in the cache. Without answers, and for what is no mean of items, "
    "there is none."
)
_SEEDS = (
    "Over several seeds the difference is their mean ± their standard deviation, with the 95 % Student interval of "
    "the mean."
)
_LAYERS = "The largest of a layer's tensors; every tensor and statistic is in the formats csv and json."
# characters of an answer
_ANSWER = 60
_FLIPS = "flips: items that only the first answers / only the second."


def comparison_document(found: Comparison, names: tuple[str, str], flips: int, layers: pd.DataFrame) -> Document:
    """What `compare` found, by model and question.

    Args:
        found: the comparison.
        names: what readers know the two as.
        flips: so many items are listed of each metric at most.
        layers: from `layers`; empty where none are asked for.
    """
    rows = plain_rows(found.frame)
    legend = [
        f"Each difference is {names[0]} minus {names[1]} at the same seed, on the same items; ↓ marks what is better "
        "when it is lower, ↑ when it is higher.",
        _ONE_SEED,
    ]
    legend += [_SEEDS] if any(row["seeds"] > 1 for row in rows) else []
    legend += [_FLIPS] if any(row["first_only"] is not None for row in rows) else []
    groups = list(parted(rows, lambda row: tuple(row[name] for name in GROUP)).values())
    flipped = parted(plain_rows(found.flips), lambda row: tuple(row[name] for name in GROUP)) if flips else {}
    sections = []
    for title, members in sorted(parted(groups, lambda group: _title(group, names)).items()):
        tables = []
        for group in members:
            tables.append(_differences(group, names))
            listed = flipped.get(tuple(group[0][name] for name in GROUP), [])
            tables += _flips(listed, question(group), names, flips)
        sections.append(Section(title, "", tuple(tables)))
    if not layers.empty:
        sections.append(Section("Layers", _LAYERS, tuple(_layers(plain_rows(layers), names))))
    return Document(f"{names[0]} against {names[1]}", tuple(legend), tuple(sections), "Nothing to compare.\n")


def _title(group: list[Row], names: tuple[str, ...]) -> str:
    if group[0]["model"] is None:
        return f"{names[0]} against {names[1]}"
    return " · ".join(part for part in model_of(group) if part)


def _lead(row: Row) -> dict[str, str]:
    """What tells a row apart beside the metric: of arm and quantizer, what is not compared."""
    return {name: row[key] for name, key in (("arm", "arm"), ("quantizer", "label")) if row[key] is not None}


def _differences(group: list[Row], names: tuple[str, ...]) -> Table:
    """Columns that would say nothing (flips of no answers, each of one seed) are left out."""
    flips = any(row["first_only"] is not None for row in group)
    seeds = any(row["seeds"] > 1 for row in group)
    rows = []
    for pool in parted(group, lambda row: tuple(row[name] for name in POOL)).values():
        first = pool[0]
        together = (_with_items(first),) if first["seeds"] == 1 else _over_seeds(first)
        columns: list[tuple[str, ...]] = [(text,) for text in (*_lead(first).values(), heading(first))]
        columns += [tuple(number(row[f"{side}_value"]) for row in pool) for side in ("first", "second")] + [together]
        columns += [tuple(map(_flip_counts, pool))] * flips
        columns += [(str(first["seeds"]),), tuple(f"{row['seed']}: {_with_items(row)}" for row in pool)] * seeds
        rows.append(tuple(map(Entry, columns)))
    lead = (*_lead(group[0]), "metric")
    headings = (*lead, *names, "difference", *["flips"] * flips, *["seeds", "each seed"] * seeds)
    return Table(question(group), headings, tuple(rows), words=len(lead))


def _flip_counts(row: Row) -> str:
    return "–" if row["first_only"] is None else f"{row['first_only']} / {row['second_only']}"


def _with_items(row: Row) -> str:
    shown = signed(row["difference"])
    return shown if row["low"] is None else f"{shown} {between(row['low'], row['high'], signed)}"


def _over_seeds(row: Row) -> tuple[str, ...]:
    mean = f"{signed(row['mean'])} ± {number(row['deviation'])}"
    return mean, between(row["mean_low"], row["mean_high"], signed)


def _flips(listed: list[Row], asked: str, names: tuple[str, ...], most: int) -> Iterator[Table]:
    """One table a metric and seed: the first items of each direction."""
    texts = {"text": "question", "first_answer": f"answer of {names[0]}", "second_answer": f"answer of {names[1]}"}
    parts = parted(listed, lambda row: (*_lead(row).values(), row["metric"], row["seed"]))
    for (*lead, metric, seed), found in parts.items():
        shown = [row for side in (1, 0) for row in [row for row in found if row["first"] == side][:most]]
        told = [key for key in texts if any(row[key] for row in shown)]
        rows = tuple(
            tuple(
                Entry((text,))
                for text in (str(row["item"]), names[row["second"]], *(row[key][:_ANSWER] or "–" for key in told))
            )
            for row in shown
        )
        what = " · ".join([*lead, metric, f"seed {seed}", f"{len(shown)} of {len(found)} flips", asked])
        yield Table(what, ("item", "right in", *(texts[key] for key in told)), rows, words=2 + len(told))


def _layers(rows: list[Row], names: tuple[str, ...]) -> Iterator[Table]:
    numbered = (row for row in rows if row["layer"] is not None and row["statistic"] in SHOWN)
    places = parted(numbered, lambda row: tuple(row[key] for key in ("model", "arm", "label", "task", "seed")))
    for (model, arm, quantizer, task, seed), members in places.items():
        highest: dict[int, dict[str, float]] = {}
        for row in members:
            place = highest.setdefault(row["layer"], {})
            for side, name in zip(("first_value", "second_value"), names, strict=True):
                key = f"{row['statistic']} {name}"
                place[key] = max(row[side], place.get(key, row[side]))
        columns = [f"{statistic} {name}" for statistic in SHOWN for name in names]
        table = tuple(
            (Entry((str(layer),)), *(Entry((number(found[key]) if key in found else "–",)) for key in columns))
            for layer, found in sorted(highest.items())
        )
        what = [part for part in (model, arm, quantizer, task, f"seed {seed}" if seed else None) if part]
        yield Table(" · ".join(what), ("layer", *columns), table, words=1)
