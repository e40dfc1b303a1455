"""A model's map of which matrices feel rounding most, from records of the task `sensitivity`."""

from collections.abc import Iterator, Sequence
from typing import Any

from quant_bench.record import Record
from quant_bench.site.board import Board, Row
from quant_bench.site.figures import Choice, Figure, Heat, is_map, number_in, positive
from quant_bench.site.models import named, records_of, told_apart_by


def sensitivity_map(board: Board, rows: Sequence[Row]) -> Figure:
    """One matrix rounded at a time: KL to the float model, by role and layer, a map for each width."""
    several = told_apart_by(rows)
    choices = [
        Choice((f"{bits} bits", named(board, row, record, several), f"{record.cell.task} · {record.convention}"), made,
               "layer", "matrix")
        for row, path, record in records_of(board, rows, "sensitivity")
        for bits, made in _maps(record, path)
    ]  # fmt: skip
    return Figure(
        "sensitivity",
        "Sensitivity: what rounding one matrix costs",
        ("width", "model", "question"),
        choices,
        "KL of next-token distributions in nats per token, float against the model with only this matrix rounded.",
    )


def _maps(record: Record, path: str) -> Iterator[tuple[int, Heat]]:
    """A map for each width; what is no row of a matrix is left out, for anybody may have written it."""
    table = record.details.get("linears")
    found = [row for row in table if _is_matrix(row)] if isinstance(table, list) else []
    roles, layers = list(dict.fromkeys(row["role"] for row in found)), sorted({row["layer"] for row in found})
    if not is_map(len(roles), len(layers)):
        return
    for bits in range(2, 9):
        known = {(row["role"], row["layer"]): number_in(row.get(f"w{bits}")) for row in found}
        if any(value is not None for value in known.values()):
            z = [[known.get((role, layer)) for layer in layers] for role in roles]
            yield bits, Heat(layers, [role.replace("_", " ") for role in roles], z, positive(known.values()), path)


def _is_matrix(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("role"), str):
        return False
    layer = row.get("layer")
    return type(layer) is int and 0 <= layer < 10_000
