"""Pages as data: which there are, and what each template is given."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quant_bench.cell import BASELINE_ARM
from quant_bench.report.redundancy import redundancy
from quant_bench.report.rows import Together, parted
from quant_bench.report.tables import ARMS, BEATS_FLOAT, LEGEND, SEEDS, UNINFORMATIVE, UNRANKED, legend
from quant_bench.site import arms, models, places
from quant_bench.site.board import CAUSES, CHECKS, Board, Column, Number, Row, page_name
from quant_bench.site.figures import Figure
from quant_bench.site.pareto import pareto
from quant_bench.site.sensitivity import sensitivity_map

_SHOWN_AT_FIRST: Final = 8
# what the legend says of tables that are arranged in another way
_LEGEND: Final = {
    LEGEND[1]: "Each column is one question with one convention, one data digest and one item count. Rows stand in the "
    "order of their rank by the first column that ranks; numbers of other weights, precision or plugin versions are "
    "never ranked together.",
    ARMS: f"vs {BASELINE_ARM} is the paired difference to the same cell with {BASELINE_ARM} attention on the same "
    "items, with its 95 % interval.",
    SEEDS: "A number of several seeds is their mean. Its intervals, and those of its differences, are 95 % Student "
    "intervals of the mean over seeds: they say nothing about items.",
}


@dataclass(frozen=True)
class Page:
    """A page: its path below the site's folder, its template, and what that is given."""

    path: str
    template: str
    values: dict[str, Any]


@dataclass(frozen=True)
class QuestionTable:
    """One question's numbers: `rows` with the rank by its headline and a number, or None, for each column."""

    title: str
    anchor: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Row, float | None, tuple[Number | None, ...]], ...]
    arms: bool
    seeds: bool


def pages(board: Board) -> list[Page]:
    """Every page of the site."""
    by_name = parted(board.rows, lambda row: board.models[row.model].name)
    by_arm = parted(board.rows, lambda row: row.arm)
    links = {"model_pages": model_links(board), "arm_pages": arm_links(board), "command": board.command}
    signs = {"uninformative": UNINFORMATIVE, "beats_float": BEATS_FLOAT, "unranked": UNRANKED}
    links |= {"signs": signs, "titles": [model.title for model in board.models]}
    gains = redundancy(board.frame)
    said = [_LEGEND.get(line, line) for line in (legend(board.frame, gains) if board.rows else LEGEND)]
    found = [
        Page("index.html", "index.html", links | {"legend": said, "empty": not board.rows}),
        Page("compare.html", "compare.html", links),
        Page("pareto.html", "figures.html", links | {"title": "Quality against cost", "figures": [pareto(board)]}),
        Page("models/index.html", "list.html", links | _listed("Models", _models_listed(board, by_name))),
        Page("arms/index.html", "list.html", links | _listed("Arms", _arms_listed(board, by_arm))),
    ]
    for name, rows in by_name.items():
        found.append(Page(f"models/{page_name(name)}", "model.html", links | _model(board, name, rows)))
    for arm, rows in by_arm.items():
        found.append(Page(f"arms/{page_name(arm)}", "arm.html", links | _arm(board, arm, rows, gains)))
    return found


def model_links(board: Board) -> dict[str, str]:
    """Page of each model's name."""
    return {model.name: f"models/{page_name(model.name)}" for model in board.models}


def arm_links(board: Board) -> dict[str, str]:
    """Page of each arm."""
    return {row.arm: f"arms/{page_name(row.arm)}" for row in board.rows}


def _listed(title: str, entries: list[tuple[str, str, str]]) -> dict[str, Any]:
    return {"title": title, "entries": entries}


def _models_listed(board: Board, by_name: dict[str, list[Row]]) -> list[tuple[str, str, str]]:
    links = model_links(board)
    return [
        (name, links[name], f"{_count(rows, 'row')}, {_count({row.arm for row in rows}, 'arm')}")
        for name, rows in by_name.items()
    ]


def _arms_listed(board: Board, by_arm: dict[str, list[Row]]) -> list[tuple[str, str, str]]:
    links = arm_links(board)
    return [
        (arm, links[arm], f"{_count(rows, 'row')}, {_count({board.models[row.model].name for row in rows}, 'model')}")
        for arm, rows in sorted(by_arm.items())
    ]


def _count(things: Iterable[Any], name: str) -> str:
    count = len(list(things))
    return f"{count:,} {name}" + ("" if count == 1 else "s")


def _model(board: Board, name: str, rows: list[Row]) -> dict[str, Any]:
    tables = question_tables(board, rows)
    parity = [table for table in tables if _task(table) in CHECKS]
    causes = [table for table in tables if _task(table) in CAUSES]
    figures = [models.sweep(board, rows), sensitivity_map(board, rows), *models.layer_maps(board, rows)]
    return {
        "title": name,
        "weights": [board.models[index] for index in dict.fromkeys(row.model for row in rows)],
        "arms": sorted({row.arm for row in rows}),
        "quality": [table for table in tables if table not in parity and table not in causes],
        "parity": parity,
        "causes": causes,
        "places": places.placed(board, rows),
        "coverage": models.coverage(board, rows),
        "megabytes": models.megabytes,
        "figures": {figure.name: figure for figure in figures},
    }


def _arm(board: Board, arm: str, rows: list[Row], gains: Any) -> dict[str, Any]:
    found = None if arm == BASELINE_ARM else arms.compared(board, arm)
    paired = arms.paired(found) if found else []
    figures: list[Figure] = [arms.differences(paired), arms.injection(board, arm)]
    figures += [arms.attention_map(board, arm), arms.depth_map(board, arm)]
    return {
        "title": arm,
        "baseline": BASELINE_ARM,
        "models": list(dict.fromkeys(board.models[row.model].name for row in rows)),
        "paired": parted(paired, lambda row: (row.model, row.question)),
        "missing": arms.missing(found) if found else [],
        "notes": list(found.notes) if found else [],
        "gains": parted(arms.gains(board, gains, arm), lambda row: (row.model, row.question)),
        "figures": {figure.name: figure for figure in figures},
    }


def _task(table: QuestionTable) -> str:
    return table.columns[0].task


def question_tables(board: Board, rows: Sequence[Row]) -> list[QuestionTable]:
    """A table for each question and set of weights, best first where the question ranks."""
    found = []
    by_model = parted(rows, lambda row: row.model)
    for asked, columns in parted(enumerate(board.columns), lambda pair: (pair[1].task, pair[1].question)).items():
        indices = [index for index, _ in columns]
        head = next((index for index, column in columns if column.headline), indices[0])
        for model, members in by_model.items():
            shown = [row for row in members if any(index in row.numbers for index in indices)]
            if not shown:
                continue
            ordered = sorted(shown, key=lambda row: _place(row, head))
            made = tuple((row, _rank(row, head), tuple(row.numbers.get(index) for index in indices)) for row in ordered)
            title = asked[1] if len(by_model) == 1 else f"{asked[1]} — {board.models[model].title}"
            several = len({row.arm for row in shown}) > 1, any(row.seeds != {0} for row in shown)
            anchor = f"{columns[0][1].key}-{model}"
            found.append(QuestionTable(title, anchor, tuple(column for _, column in columns), made, *several))
    return found


def _rank(row: Row, head: int) -> float | None:
    number = row.numbers.get(head)
    return None if number is None else number.rank


def _place(row: Row, head: int) -> tuple[Any, ...]:
    number, rank = row.numbers.get(head), _rank(row, head)
    measured = number is not None and number.value is not None
    return (
        not measured,
        float("inf") if rank is None else rank,
        row.execution != "float",
        row.label,
        row.execution,
        row.arm,
    )


def leaderboard_data(board: Board) -> dict[str, Any]:
    """What the scripts of the leaderboard and of the comparison read."""
    paths = {path: index for index, path in enumerate(board.records)}
    links, of_arm = model_links(board), arm_links(board)
    first = [index for index, column in enumerate(board.columns) if column.headline][:_SHOWN_AT_FIRST]
    return {
        "models": [{"name": model.name, "title": model.title, "page": links[model.name]} for model in board.models],
        "arms": of_arm,
        "columns": [
            {
                "key": column.key,
                "task": column.task,
                "question": column.question,
                "metric": column.metric,
                "heading": column.heading,
                "better": column.better,
                "shown": index in first,
            }
            for index, column in enumerate(board.columns)
        ],
        "rows": [_row_data(row, paths) for row in board.rows],
        "records": [[path, board.command(path)] for path in board.records],
        "signs": {"uninformative": UNINFORMATIVE, "beats": BEATS_FLOAT, "unranked": UNRANKED},
    }


def _row_data(row: Row, paths: dict[str, int]) -> list[Any]:
    numbers = {str(index): _number_data(number, paths) for index, number in row.numbers.items()}
    return [row.key, row.model, row.arm, row.label, row.execution, row.bits, sorted(row.seeds), numbers]


def _number_data(number: Number, paths: dict[str, int]) -> dict[str, Any]:
    """What is not there is left out."""
    found: dict[str, Any] = {"p": [paths[path] for path in number.paths]}
    for name, shown in (("v", number.value), ("d", number.delta), ("a", number.arm_delta)):
        if shown is not None:
            found[name] = _together(shown)
    for name, value in (
        ("r", number.rank),
        ("n", number.n),
        ("m", number.marks),
        ("lost", number.lost),
        ("best", number.best),
    ):
        if value:
            found[name] = value
    if number.state != "measured":
        found["s"] = number.state
    if number.reason:
        found["why"] = number.reason
    return found


def _together(shown: Together) -> list[Any]:
    return [shown.value, shown.low, shown.high, shown.seeds]
