"""Where outliers sit: the channels, positions and tokens that a record of the task `outliers` names, layer by layer."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from quant_bench.record import Record
from quant_bench.report.text import number
from quant_bench.site.board import Board, Row
from quant_bench.site.figures import number_in
from quant_bench.site.models import SITES, named, records_of, told_apart_by

# of the tensors that a record places, the one that massive activations live in and the one that makes them
SHOWN: Final = ("layer_output", "mlp_output_input")
_MOST = 3


@dataclass(frozen=True)
class Place:
    """A tensor, and what stands out in it: texts such as `213: 23,570`, largest first."""

    layer: int
    site: str
    channels: tuple[str, ...]
    positions: tuple[str, ...]
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class Placed:
    """The table of one record, named among those of its page."""

    title: str
    path: str
    lines: tuple[Place, ...]


def placed(board: Board, rows: Sequence[Row]) -> list[Placed]:
    """A table a record that says where outliers sit; records that do not say it are left out."""
    several = told_apart_by(rows)
    found = []
    for row, path, record in records_of(board, rows, "outliers"):
        lines = _lines(record)
        if lines:
            title = f"{named(board, row, record, several)} · {record.cell.task} · {record.convention}"
            found.append(Placed(title, path, lines))
    return found


def _lines(record: Record) -> tuple[Place, ...]:
    table, texts = record.details.get("tensors"), record.details.get("token_texts")
    texts = texts if isinstance(texts, dict) else {}
    lines = []
    for row in table.values() if isinstance(table, dict) else ():
        if not isinstance(row, dict) or row.get("kind") not in SHOWN or not isinstance(row.get("layer"), int):
            continue
        channels, positions, tokens = (_largest(row.get(f"top_{what}")) for what in ("channels", "positions", "tokens"))
        if channels:
            tokens_named = [(json.dumps(str(texts[name])) if name in texts else name, size) for name, size in tokens]
            lines.append(Place(row["layer"], row["kind"], _told(channels), _told(positions), _told(tokens_named)))
    return tuple(sorted(lines, key=lambda line: (SITES.index(line.site), line.layer)))


def _told(found: list[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(f"{name}: {size}" for name, size in found)


def _largest(found: Any) -> list[tuple[str, str]]:
    """Names and sizes, largest first; anybody may have written the table."""
    sizes = {str(name): number_in(size) for name, size in found.items()} if isinstance(found, dict) else {}
    known = [(name, size) for name, size in sizes.items() if size is not None]
    return [(name, number(size)) for name, size in sorted(known, key=lambda one: -one[1])[:_MOST]]
