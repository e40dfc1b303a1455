"""Quality against what it costs: stored bits, memory, and the time that the task took."""

from collections.abc import Iterable

from quant_bench.record import Record
from quant_bench.report.rows import Together, parted
from quant_bench.site.board import Board, Column, Row, ranks
from quant_bench.site.figures import Choice, Figure, Points, number_in, positive

_BITS = "stored bits a weight, scales and zero points included"
_MEMORY = "memory of the layers' matrices, MB"
# bytes of one float of a model's own precision
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
CAPTION = (
    "The line joins what nothing beats in both: no point is better at the same cost or less. Time is that of one run "
    "of the task on the machine that the record names, other programs beside it unknown, and without an interval; "
    "tasks that read the same text share a pass, and the first of them has its time. Records hold no other measure of "
    "speed."
)


def pareto(board: Board) -> Figure:
    """Every metric with a better direction against every cost that records hold."""
    choices = []
    for index, column in enumerate(board.columns):
        if not (ranks(column) and column.headline):
            continue
        for model, rows in parted(board.rows, lambda row: row.model).items():
            shown = [row for row in rows if index in row.numbers and row.numbers[index].value is not None]
            if len(shown) < 2:
                continue
            for cost, costs in _costs(board, rows, shown, index).items():
                keys = (f"{column.heading} — {column.question}", cost, board.models[model].title)
                choices.append(_choice(keys, column, index, shown, costs))
    return Figure("pareto", "Quality against cost", ("quality", "cost", "model"), choices, CAPTION)


def _choice(keys: tuple[str, ...], column: Column, index: int, rows: list[Row], costs: dict[str, float]) -> Choice:
    series: dict[str, Points] = {}
    places: dict[str, tuple[float, float]] = {}
    for row in rows:
        shown = row.numbers[index].value
        if row.key in costs and shown is not None:
            places[row.key] = costs[row.key], shown.value
    best = frontier(places.values(), column.better == "higher")
    # arms under one quantizer cost the same, and names beside all of them would lie on each other
    several = len({row.arm for row in rows}) > 1
    named: dict[tuple[float, float], str] = {}
    missing = []
    for row in rows:
        found, name = row.numbers[index], f"{row.arm} · {row.label} {row.execution}"
        if row.key not in places or found.value is None:
            missing.append(f"{name}: its records do not hold this cost")
            continue
        place = places[row.key]
        if place in best:
            named.setdefault(place, f"{row.arm} {row.label}" if several else row.label)
        label = "" if several or place in best else row.label
        points = series.setdefault(row.execution, Points(row.execution))
        points.add(*place, found.value, text=name, path=found.paths[0], label=label)
    front = Points("nothing is better and cheaper", line=True)
    for cost, value in best:
        front.add(cost, value, Together(value, None, None, 0), label=named[cost, value])
    log = "x" if positive(cost for cost, _ in places.values()) else ""
    log += "y" if column.reduction == "exp" and positive(value for _, value in places.values()) else ""
    return Choice(keys, [*series.values(), front], keys[1], column.heading, log, missing=missing)


def frontier(points: Iterable[tuple[float, float]], higher: bool) -> list[tuple[float, float]]:
    """Points (cost, value) that no other beats in one of the two without losing in the other, by cost."""
    found: list[tuple[float, float]] = []
    for cost, value in sorted(points, key=lambda point: (point[0], -point[1] if higher else point[1])):
        if not found or (value > found[-1][1] if higher else value < found[-1][1]):
            found.append((cost, value))
    return found


def _costs(board: Board, rows: list[Row], shown: list[Row], index: int) -> dict[str, dict[str, float]]:
    """Cost -> row -> number; time on each machine is a cost of its own."""
    costs: dict[str, dict[str, float]] = {_BITS: {}, _MEMORY: {}}
    of_row = {row.key: _storage(board, row) for row in rows}
    floats = {pair[1] for pair in of_row.values() if pair is not None}
    width = _WIDTHS.get(board.models[rows[0].model].dtype)
    for row in shown:
        pair = of_row[row.key]
        if pair is not None:
            costs[_BITS][row.key] = 32 * pair[0] / pair[1]
            costs[_MEMORY][row.key] = pair[0] / 1e6
        elif row.execution == "float" and width is not None:
            costs[_BITS][row.key] = 8.0 * width
            # the float model has the same matrices as its quantized ones, where these agree on how many
            if len(floats) == 1:
                costs[_MEMORY][row.key] = next(iter(floats)) * width / 4e6
        records = [board.records[path] for path in row.numbers[index].paths]
        for machine, members in parted((r for r in records if r.state == "measured"), _machine).items():
            seconds = [record.took_seconds for record in members]
            costs.setdefault(f"seconds of the task on {machine}", {})[row.key] = sum(seconds) / len(seconds)
    return {cost: found for cost, found in costs.items() if found}


def _storage(board: Board, row: Row) -> tuple[float, float] | None:
    """Bytes of a row's quantized matrices, and of the same in float32; None where no record has them."""
    for number in row.numbers.values():
        for path in number.paths:
            said = board.records[path].coverage or {}
            stored, floats = number_in(said.get("weight_bytes")), number_in(said.get("float_bytes"))
            if stored is not None and floats is not None and stored >= 0 and floats >= 1:
                return stored, floats
    return None


def _machine(record: Record) -> str:
    said = record.environment
    kernel = said.get("kernel")
    parts = [str(said.get("device") or "a machine without a name")]
    parts += [f"{said['threads']} threads"] if "threads" in said else []
    parts += [str(kernel["isa"])] if isinstance(kernel, dict) and kernel.get("isa") else []
    return ", ".join(parts)
