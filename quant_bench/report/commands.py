"""The command that measures a cell, as a text for people."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from quant_bench.cell import Cell
from quant_bench.record import Record
from quant_bench.schemes import label


def command_for(record: Record, arms: Sequence[str], results: Path = Path("results")) -> str:
    """The command that measures the cells of some arms beside a record."""
    return command_for_cell(record.cell, record, arms, (record.cell.quantizer,), results)


def command_for_cell(
    cell: Cell, like: Record | None, arms: Sequence[str], quantizers: Sequence[str], results: Path = Path("results")
) -> str:
    """The command that measures a cell's task and seed under some arms and quantizers.

    Args:
        cell: gives model, task and seed.
        like: a record of the same model, which says how it was loaded; without one, the model's name does.
        arms: canonical specs.
        quantizers: canonical specs.
        results: folder of the records.
    """
    name, _, dtype = cell.model.partition(" ")
    model = {"name": name, "dtype": dtype or "float32"} if like is None else like.settings.get("model", {})
    named = str(model.get("name") or cell.model)
    # nobody who copies a command is handed an option for a name
    first, last = ([named], []) if not named.startswith("-") else ([], ["--", named])
    words = ["quant-bench", "run", *first]
    for arm in arms:
        words += ["--arm", arm]
    for quantizer in quantizers:
        words += ["--quantizer", label(quantizer)]
    words += ["--task", cell.task, "--seed", str(cell.seed)]
    for option, usual in (("dtype", "float32"), ("revision", None)):
        if model.get(option, usual) != usual:
            words += [f"--{option}", str(model[option])]
    if results != Path("results"):
        words += ["--results", str(results)]
    return shlex.join(words + last)
