"""An arm's tables and figures: paired differences to softmax, the 2×2, injection curves, attention and depth maps."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pandas as pd

from quant_bench.cell import BASELINE_ARM, Cell
from quant_bench.report.compare import POOL, Comparison, compare
from quant_bench.report.frame import plain_rows
from quant_bench.report.redundancy import FORMS, GAINS
from quant_bench.report.rows import Row as Score
from quant_bench.report.rows import Together, heading, model_of, parted, question
from quant_bench.site.board import CAUSES, Board, Row
from quant_bench.site.figures import Choice, Figure, Heat, Points, is_map, number_in
from quant_bench.site.models import named, records_of, told_apart_by

_DAMAGE: Final = "injection_damage_"


@dataclass(frozen=True)
class Seed:
    """The difference of one seed, with its interval over items and both records."""

    seed: int
    difference: Together
    paths: tuple[str, str]


@dataclass(frozen=True)
class Paired:
    """The difference of an arm to softmax under one quantizer, over its seeds.

    Attributes:
        model, question: what was asked of which weights.
        label: quantizer.
        metric: heading of it.
        difference: over items for one seed, over seeds for several.
        deviation: over seeds.
        seeds: each.
    """

    model: str
    question: str
    label: str
    metric: str
    difference: Together
    deviation: float | None
    seeds: tuple[Seed, ...]


@dataclass(frozen=True)
class Gain:
    """One row of the 2×2: gains of sink, gate and both, and what the two have in common; with their records."""

    model: str
    question: str
    label: str
    form: str
    metric: str
    gains: tuple[Together, ...]
    paths: tuple[str, ...]


def compared(board: Board, arm: str) -> Comparison:
    """Differences of an arm to softmax, and what is missing for more."""
    return compare(board.records.values(), arm, BASELINE_ARM)


def paired(found: Comparison) -> list[Paired]:
    """Rows of a comparison by quantizer and metric."""
    rows = []
    for pool in parted(plain_rows(found.frame), lambda row: tuple(row[name] for name in POOL)).values():
        first = pool[0]
        if first["better"] == "neither":
            continue
        seeds = tuple(
            Seed(row["seed"], Together(row["difference"], row["low"], row["high"], 1), _paths(row)) for row in pool
        )
        together = seeds[0].difference
        if first["seeds"] > 1:
            together = Together(first["mean"], first["mean_low"], first["mean_high"], first["seeds"])
        asked = question([first]), first["label"], heading(first)
        rows.append(Paired(_model(first), *asked, together, first["deviation"], seeds))
    return sorted(rows, key=_causes_last)


def _causes_last(row: "Paired | Gain") -> bool:
    """What says why stands behind what says how good."""
    return re.split(r"\W", row.question)[0] in CAUSES


def _model(row: Score) -> str:
    return " · ".join(part for part in model_of([row]) if part)


def _paths(row: Score) -> tuple[str, str]:
    arms = row["first"], row["second"]
    first, second = (Cell(row["model"], arm, row["quantizer"], row["task"], row["seed"]) for arm in arms)
    return first.path(Path()).as_posix(), second.path(Path()).as_posix()


def differences(rows: Sequence[Paired]) -> Figure:
    """Differences by quantizer, a metric at a time."""
    choices = []
    for (metric, asked, model), members in parted(rows, lambda row: (row.metric, row.question, row.model)).items():
        points = Points("difference")
        for row in members:
            found = row.difference
            points.add(found.value, row.label, found, text=_seeds(found.seeds), path=row.seeds[0].paths[0])
        keys = (f"{metric} — {asked}", model)
        zero = Together(0.0, None, None, 0)
        order = list(dict.fromkeys(row.label for row in members))
        choices.append(
            Choice(
                keys,
                [points],
                f"difference to {BASELINE_ARM}: {metric}",
                "quantizer",
                across=True,
                order=order,
                line=zero,
                line_name=BASELINE_ARM,
            )
        )
    caption = "95 % intervals: over items for one seed, over seeds for several. Where there is none, no record has it."
    return Figure("differences", f"Paired differences to {BASELINE_ARM}", ("metric", "weights"), choices, caption)


def gains(board: Board, found: pd.DataFrame, arm: str) -> list[Gain]:
    """Rows of the 2×2 that an arm is part of."""
    rows = []
    forms = {form for form, members in FORMS.items() if arm in (BASELINE_ARM, *members)}
    by_seed = {
        (score["group"], score["arm"], score["quantizer"], score["execution"], score["seed"]): score["path"]
        for score in plain_rows(board.frame)
    }
    keys = ("form", "group", "quantizer", "execution", "quantizer_version", "metric", "n")
    pools = parted(plain_rows(found), lambda row: tuple(row[name] for name in keys)).values()
    for pool in pools:
        first = pool[0]
        if first["form"] not in forms:
            continue
        of_form = (BASELINE_ARM, *FORMS[first["form"]])
        places = [
            (row["group"], member, row["quantizer"], row["execution"], row["seed"])
            for row in pool
            for member in of_form
        ]
        four = tuple(
            Together(first[f"{gain}_mean"], first[f"{gain}_low"], first[f"{gain}_high"], first["seeds"])
            for gain in GAINS
        )
        label = f"{first['label']} {first['execution']}"
        asked = question([first]), label, first["form"], heading(first)
        rows.append(Gain(_model(first), *asked, four, tuple(dict.fromkeys(by_seed[place] for place in places))))
    return sorted(rows, key=_causes_last)


def injection(board: Board, arm: str) -> Figure:
    """Damage by dose of junk, the arm beside softmax."""
    curves: dict[tuple[str, ...], dict[str, Points]] = {}
    for row in board.rows:
        if row.arm not in (arm, BASELINE_ARM):
            continue
        for index, found in row.numbers.items():
            column = board.columns[index]
            dose = _dose(column.metric)
            if dose is None or found.value is None or column.task != "injection":
                continue
            key = (f"{row.label} {row.execution}", column.question, board.models[row.model].title)
            points = curves.setdefault(key, {}).setdefault(row.arm, Points(row.arm, line=True))
            points.add(dose, found.value.value, found.value, text=_seeds(found.value.seeds), path=found.paths[0])
    choices = [
        Choice(key, list(series.values()), "dose", "damage, nats/token", "x")
        for key, series in curves.items()
        if arm in series
    ]
    return Figure(
        "injection",
        "Injection curves",
        ("quantizer", "question", "weights"),
        choices,
        "Loss with junk in quiet reads minus loss without, on the same tokens; bars are 95 % intervals.",
    )


def _seeds(count: int) -> str:
    return f"{count} seed" if count == 1 else f"{count} seeds"


def _dose(metric: str) -> float | None:
    try:
        dose = float(metric.removeprefix(_DAMAGE)) if metric.startswith(_DAMAGE) else None
    except ValueError:
        return None
    return dose if dose is not None and 0 < dose < 1e9 else None


def _maps(board: Board, rows: Sequence[Row], task: str) -> Iterator[tuple[tuple[str, str], str, Any]]:
    several = told_apart_by(rows)
    several += [] if "model" in several or len({row.model for row in board.rows}) == 1 else ["model"]
    for row, path, record in records_of(board, rows, task):
        yield (named(board, row, record, several), f"{record.cell.task} · {record.convention}"), path, record.details


def attention_map(board: Board, arm: str) -> Figure:
    """Mass on position 0 by layer and head."""
    choices = []
    for keys, path, details in _maps(board, [row for row in board.rows if row.arm == arm], "attention"):
        by_layer: dict[int, list[float | None]] = {}
        for layer in _rows(details.get("layers")):
            heads, index = layer.get("position0_mass_by_head"), layer.get("layer")
            if isinstance(heads, list) and isinstance(index, int):
                by_layer[index] = [number_in(mass) for mass in heads]
        width = max((len(heads) for heads in by_layer.values()), default=0)
        if is_map(len(by_layer), width):
            z = [heads + [None] * (width - len(heads)) for _, heads in sorted(by_layer.items())]
            heat = Heat(list(range(width)), [str(index) for index in sorted(by_layer)], z, False, path)
            choices.append(Choice(keys, heat, "head", "layer"))
    caption = "Mean over queries of the weight on position 0: where it is near 1, a head is at rest there."
    return Figure("attention", "Attention on position 0", ("quantizer", "question"), choices, caption)


def depth_map(board: Board, arm: str) -> Figure:
    """Mean weight of each source in each router's read."""
    choices = []
    for keys, path, details in _maps(board, [row for row in board.rows if row.arm == arm], "depth"):
        routers = {
            str(router["router"]): {str(name): number_in(weight) for name, weight in router["sources"].items()}
            for router in _rows(details.get("routers"))
            if isinstance(router.get("sources"), dict) and isinstance(router.get("router"), str)
        }
        # records sort their keys as texts
        sources = sorted({name for weights in routers.values() for name in weights}, key=_in_depth)
        if is_map(len(routers), len(sources)):
            z = [[weights.get(source) for source in sources] for weights in routers.values()]
            choices.append(Choice(keys, Heat(sources, list(routers), z, False, path), "source", "router"))
    caption = "Mean weight that the read before a sublayer gives to each earlier state."
    return Figure("depth", "Depth weights", ("quantizer", "question"), choices, caption)


def _in_depth(source: str) -> tuple[int, int, str]:
    """A source's place: by the layer in its name; one without comes from before all layers."""
    layer, part = re.search(r"[0-9]{1,9}", source), source.rpartition(".")[2]
    return -1 if layer is None else int(layer[0]), {"attention": 0, "mlp": 1}.get(part, 2), source


def _rows(table: object) -> list[dict[str, Any]]:
    return [row for row in table if isinstance(row, dict)] if isinstance(table, list) else []


def missing(found: Comparison) -> list[tuple[str, str]]:
    """What is missing for more differences: why, and the command that measures it."""
    return [(str(one).removesuffix(f"\n  {one.command}"), one.command) for one in found.missing]
