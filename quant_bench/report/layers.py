"""Outlier statistics of two arms, quantizers or models side by side, tensor by tensor and layer by layer."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pandas as pd

from quant_bench.record import Record
from quant_bench.report.frame import label_of
from quant_bench.report.pairing import By, apart, counterpart

COLUMNS: Final = (
    *("first", "second", "model", "arm", "quantizer", "label", "task", "convention", "seed"),
    *("tensor", "kind", "layer", "statistic", "first_value", "second_value"),
)
# what a layer is told by, in a table
SHOWN: Final = ("inf_norm", "kurtosis")


def layers(records: Iterable[Record], first: str, second: str, by: By) -> pd.DataFrame:
    """Statistics of every tensor that both sides' records hold (task `outliers`), under the rules of `compare`.

    Args:
        records: of any cells.
        first: canonical spec of an arm or quantizer, or a model as its records name it.
        second: that which stands beside it.
        by: what the two are.

    Returns:
        `COLUMNS`: one row a tensor and statistic; of what is compared, the column is None.
    """
    cells = {record.cell: record for record in records if record.details.get("tensors")}
    rows = []
    for cell, ours in cells.items():
        theirs = cells.get(counterpart(cell, by, second)) if getattr(cell, by) == first else None
        if theirs is None or apart(ours, theirs, by) is not None:
            continue
        sides = {"first": first, "second": second, "convention": ours.convention, "label": label_of(ours)}
        place = vars(cell) | sides | {by: None} | ({"label": None} if by == "quantizer" else {})
        others = {(tensor, name): value for tensor, _, _, name, value in _statistics(theirs)}
        for tensor, kind, layer, name, value in _statistics(ours):
            if (tensor, name) in others:
                row = {"tensor": tensor, "kind": kind, "layer": layer, "statistic": name, "first_value": value}
                rows.append(place | row | {"second_value": others[tensor, name]})
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    return frame.astype({"layer": "Int64", "seed": "Int64", "first_value": "float64", "second_value": "float64"})


def _statistics(record: Record) -> Iterator[tuple[str, str, int | None, str, float]]:
    """Tensor, kind, layer, statistic and value; what is no number is left out, for anybody may have written it."""
    tensors = record.details["tensors"]
    for tensor, found in tensors.items() if isinstance(tensors, dict) else ():
        if not isinstance(found, dict):
            continue
        layer = found.get("layer")
        of = str(found.get("kind")), layer if type(layer) is int and abs(layer) < 1 << 31 else None
        numbers = ((name, _number(value)) for name, value in found.items() if name != "layer")
        yield from ((tensor, *of, name, value) for name, value in numbers if value is not None)


def _number(value: Any) -> float | None:
    try:
        return float(value) if type(value) in (int, float) and math.isfinite(value) else None
    except OverflowError:
        return None
