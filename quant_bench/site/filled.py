"""Ranked frame -> board: what stands in which row and column, and in which order."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import pandas as pd

from quant_bench.record import Record
from quant_bench.report.best import best_pools
from quant_bench.report.frame import plain_rows
from quant_bench.report.rows import Row as Score
from quant_bench.report.rows import by_metric, heading, headline, model_of, parted, question, together
from quant_bench.report.seeds import MEANING
from quant_bench.report.tables import BEATS_FLOAT, UNINFORMATIVE, UNRANKED
from quant_bench.site.board import CAUSES, CHECKS, Board, Column, Model, Number, Row, ranks, short

# a metric of cells that have no scores at all
_NO_METRIC: Final = "state"
_NO_KEY: Final = re.compile(r"[^A-Za-z0-9_.]+")


def bits_of(record: Record) -> str:
    """`W8 A8`, `W4 A16 KV8`, `float`, or `other` for a quantizer that does not say."""
    if record.cell.quantizer == "none":
        return "float"
    settings = record.settings["quantizer"]
    weight, activation, cache = (settings.get(f"{name}_bits") for name in ("weight", "activation", "kv"))
    if not isinstance(weight, int) or not isinstance(activation, int):
        return "other"
    return f"W{weight} A{activation}" + (f" KV{cache}" if isinstance(cache, int) and cache < 16 else "")


def made_board(frame: pd.DataFrame, records: Iterable[Record]) -> Board:
    """The board of a ranked frame and the records that it was made of."""
    by_path = {record.cell.path(Path()).as_posix(): record for record in records}
    groups = list(parted(plain_rows(frame), lambda row: row["group"]).values())
    keys = [_model_key(group) for group in groups]
    known = parted(dict.fromkeys(key for key in keys if key[1]), lambda key: key[0])
    models: dict[tuple[str, str, str], int] = {}
    titles: list[Model] = []
    columns: dict[tuple[Any, ...], int] = {}
    headed: list[Column] = []
    rows: dict[tuple[Any, ...], Row] = {}
    for key, group in sorted(zip(keys, groups, strict=True), key=lambda pair: pair[0]):
        # a cell without scores need not know its weights; where the model has one set only, they are meant
        homes = known.get(key[0], [])
        home = homes[0] if not key[1] and len(homes) == 1 else key
        if home not in models:
            models[home] = len(models)
            titles.append(Model(home[0], *_told(group, home), _note(group)))
        places = _columns(group, columns, headed)
        best = best_pools(group)
        of_row = parted(group, lambda row: (row["arm"], row["quantizer"], row["execution"]))
        for (arm, quantizer, execution), scores in of_row.items():
            identity = (*home, arm, quantizer, execution)
            row = rows.get(identity)
            if row is None:
                bits = bits_of(by_path[scores[0]["path"]])
                label = scores[0]["label"]
                row = Row(short(*identity), models[home], arm, quantizer, execution, label, bits)
                rows[identity] = row
            row.seeds |= {score["seed"] for score in scores}
            for metric, number in _numbers(scores, places, best).items():
                row.numbers[places[metric]] = number
    found = list(rows.values())
    order = _order(headed, found)
    new_places = {old: new for new, old in enumerate(order)}
    for row in found:
        row.numbers = dict(sorted((new_places[index], number) for index, number in row.numbers.items()))
    return Board(titles, [headed[index] for index in order], found, by_path, frame)


def _order(columns: list[Column], rows: list[Row]) -> list[int]:
    """Questions that rank and are informative first, then causes, then checks.

    Of each kind, those of most models come first, then those of the first model. Of a task those of most items of a
    model come before others, which are a part of them, however many rows these have; then those of most rows.
    """
    answers: Counter[str] = Counter()
    asked: dict[str, set[int]] = {}
    informative = set()
    for row in rows:
        for index, number in row.numbers.items():
            column = columns[index]
            answers[column.question] += column.headline
            asked.setdefault(column.question, set()).add(row.model)
            if number.value and column.headline and ranks(column) and UNINFORMATIVE not in number.marks:
                informative.add(column.question)

    most: Counter[tuple[str, int]] = Counter()
    for column in columns:
        for model in asked[column.question]:
            most[column.task, model] = max(most[column.task, model], column.items)

    def place(index: int) -> tuple[Any, ...]:
        column = columns[index]
        kind = 3 if column.task in CHECKS else 2 if column.task in CAUSES else int(column.question not in informative)
        of_models = asked[column.question]
        is_part = any(column.items < most[column.task, model] for model in of_models)
        return kind, -len(of_models), min(of_models), is_part, -answers[column.question], column.question, index

    return sorted(range(len(columns)), key=place)


def _model_key(group: list[Score]) -> tuple[str, str, str]:
    matched, dtype = (next((row[name] for row in group if row[name]), "") for name in ("matched_sha256", "dtype"))
    return group[0]["model"], matched, dtype


def _told(group: list[Score], key: tuple[str, str, str]) -> tuple[str, str]:
    known = [row | {"matched_sha256": key[1], "dtype": key[2]} for row in group[:1]]
    return model_of(known)[1:]


def _note(group: list[Score]) -> str:
    """What is said of the weights, where all of the group say it."""
    notes = {row["note"] for row in group if row["state"] == "measured"}
    return notes.pop() or "" if len(notes) == 1 else ""


def _columns(group: list[Score], columns: dict[tuple[Any, ...], int], headed: list[Column]) -> dict[str, int]:
    """Index of the column of each metric of a group; new ones are added."""
    scored = [row for row in sorted(group, key=lambda row: (row["order"] is None, row["order"])) if row["metric"]]
    meaning = by_metric(scored)
    first = scored[0] if scored else group[0]
    said = [first[name] for name in ("task", "task_version", "convention", "data_sha256", "items")]
    asked = said if scored else [first["task"]]
    head = headline(group) or next(iter(dict.fromkeys(row["metric"] for row in scored)), _NO_METRIC)
    places = {}
    for metric in dict.fromkeys([row["metric"] for row in scored] or [_NO_METRIC]):
        row = meaning.get(metric)
        # two units or directions of one name are two metrics
        of_metric: list[Any] = [row[name] for name in MEANING] if row else ["", "neither", "", None]
        identity = (*asked, metric, *of_metric)
        if identity not in columns:
            columns[identity] = len(headed)
            task = first["task"].partition("(")[0]
            headed.append(
                Column(
                    # an address has a comma between two keys, and a minus before one that sorts down
                    key=f"{task}.{_NO_KEY.sub('-', metric)[:60]}.{short(*identity)[:6]}",
                    task=task,
                    items=first["items"] or 0,
                    question=question(group),
                    metric=metric,
                    heading=heading(row) if row else _NO_METRIC,
                    **dict(zip(MEANING, of_metric, strict=True)),
                    headline=metric == head,
                )
            )
        places[metric] = columns[identity]
    return places


def _numbers(scores: list[Score], places: Mapping[str, int], best: set[int]) -> dict[str, Number]:
    """What a row has to say on each metric of a group; numbers of the pools in `best` are its best."""
    measured = [row for row in scores if row["state"] == "measured"]
    others = list({row["path"]: row for row in scores if row["state"] != "measured"}.values())
    reason = "; ".join(dict.fromkeys(row["reason"] for row in others))
    if not measured:
        first = others[0]
        paths = tuple(row["path"] for row in others)
        return {
            metric: Number(None, None, None, None, "", None, first["state"], reason, paths, len(others))
            for metric in places
        }
    found = {}
    for metric, score in by_metric(measured).items():
        marks = UNINFORMATIVE * score["uninformative"] + BEATS_FLOAT * score["beats_float"]
        marks += UNRANKED * (score["outdated"] or score["other_items"])
        of_metric = [row for row in measured if row["metric"] == metric]
        own = [row for row in of_metric if row["pool"] == score["pool"]]
        apart = [row for row in of_metric if row["pool"] != score["pool"]]
        paths = tuple(dict.fromkeys(row["path"] for row in (*own, *apart, *others)))
        said = [f"seed {row['seed']} is apart: another version of a plugin, or another item count" for row in apart]
        found[metric] = Number(
            value=together(score, "value"),
            delta=together(score, "delta"),
            arm_delta=together(score, "arm_delta"),
            rank=score["rank"],
            marks=marks,
            n=score["n"],
            state="measured",
            reason="; ".join(part for part in (*said, reason) if part),
            paths=paths,
            lost=len(apart) + len(others),
            best=score["pool"] in best,
        )
    return found
