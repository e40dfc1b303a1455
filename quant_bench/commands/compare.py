"""The command `quant-bench compare`: two arms, quantizers or models, or the 2×2 of a sink logit and a gate."""

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import pandas as pd

from quant_bench import registry, report, schemes
from quant_bench.cache import cache_folder
from quant_bench.cell import BASELINE_ARM
from quant_bench.commands.common import FOLDER, example
from quant_bench.errors import RecordError, SpecError
from quant_bench.record import Record, Store
from quant_bench.report.arm_tables import redundancy_document
from quant_bench.report.commands import command_for
from quant_bench.report.compare import compare as compare_records
from quant_bench.report.comparison_tables import comparison_document
from quant_bench.report.frame import label_of
from quant_bench.report.layers import layers as layers_of
from quant_bench.report.layout import Document
from quant_bench.report.pairing import BY, By
from quant_bench.report.redundancy import FORMS, redundancy
from quant_bench.report.render import shown
from quant_bench.report.text import visible
from quant_bench.samples import SampleStore
from quant_bench.spec import Spec, joined
from quant_bench.training.tiers import is_tier, tier_of


@click.command(epilog=example("quant-bench compare w8a8-integer w4a4g128-integer --task hellaswag --flips 5"))
@click.argument("names", nargs=-1, metavar="[A B]")
@click.option("--table", type=click.Choice(["2x2"]), help="Redundancy of a sink logit and a gate instead of two names.")
@click.option("--model", "models", multiple=True, help="Only this model.")
@click.option("--task", "tasks", multiple=True, help="Only this task; a name stands for all its settings.")
@click.option("--quantizer", "quantizers", multiple=True, help="Only this recipe or scheme shorthand.")
@click.option(
    "--flips", type=click.IntRange(min=0), default=0, help="List so many items that only one of both answers."
)
@click.option("--layers", "by_layer", is_flag=True, help="Show the layers' outlier statistics side by side.")
@click.option("--format", "how", type=click.Choice(report.FORMATS), default="table", help="table by default.")
@click.option("--results", type=FOLDER, default=Path("results"), show_default=True, help="Folder of the records.")
def compare(
    names: tuple[str, ...], table: str | None, flips: int, by_layer: bool, how: report.Format, **options: Any
) -> None:
    """Paired differences of A and B, the first minus the second: for each seed, and over seeds.

    A and B are two arms, two quantizers, or two models of the records. Only cells that agree in all else are compared,
    with the same convention, data and item count. Intervals are from the records, or from the answers in the cache
    (QUANT_BENCH_CACHE); without these there is none. In the formats csv and json --flips and --layers take the place of
    the differences. A cell that one side has and the other lacks is named with the command that measures it, and the
    exit code is 1.
    """
    results: Path = options.pop("results")
    if len(names) != (0 if table else 2):
        raise click.UsageError("--table takes no names" if table else "name two of a kind, or --table 2x2")
    if how in ("csv", "json") and flips and by_layer:
        raise click.UsageError(f"{how} is one table: ask for --flips or --layers")
    store = Store.read(results).valid()
    if table:
        _show_redundancy(list(_chosen(store, **options)), how, results)
        return
    by, first, second = _compared(names, store)
    if (by == "quantizer" and options["quantizers"]) or (by == "model" and options["models"]):
        raise click.UsageError(f"two {by}s are compared: --{by} would leave out one of them")
    records = list(_chosen(store, **options))
    found = compare_records(records, first, second, results, by=by, store=SampleStore(cache_folder()))
    for note in found.notes:
        _say(note)
    if found.frame.empty:
        lost = "\n".join(str(one) for one in found.missing)
        nothing = lost or f"{results} has no two cells of {first} and {second} that can be compared"
        raise RecordError(nothing)
    layers = layers_of(records if by_layer else [], first, second, by)
    if by_layer and layers.empty:
        _say("no two records of the task outliers can be compared layer by layer")
    shown_as = _labels(records) if by == "quantizer" else {}
    sides = shown_as.get(first, first), shown_as.get(second, second)
    document = comparison_document(found, sides, flips, layers)
    chosen = layers if by_layer else found.flips if flips else found.frame
    click.echo(_text(document, chosen, how), nl=False)
    for one in found.missing:
        _say(f"missing: {one}")
    if found.missing:
        sys.exit(1)


def _say(text: str) -> None:
    """Lines on standard error."""
    click.echo("\n".join(visible(line) for line in text.splitlines()), err=True)


def _compared(names: Sequence[str], records: Sequence[Record]) -> tuple[By, str, str]:
    """What two names are, and their canonical forms.

    Raises:
        SpecError: they are not two of a kind, or one and the same.
    """
    kinds = [_kinds_of(name, records) for name in names]
    for name, found in zip(names, kinds, strict=True):
        if not found:
            raise SpecError(f"{name!r} is no arm, no quantizer and no model of the records")
    common = [by for by in BY if all(by in found for found in kinds)]
    if not common:
        told = " and ".join(f"{name!r} ({' or '.join(found)})" for name, found in zip(names, kinds, strict=True))
        raise SpecError(f"{told} are not two of a kind")
    by = common[0]
    first, second = (_name(by, name, records) for name in names)
    if first == second:
        raise SpecError(f"{names[0]!r} and {names[1]!r} are one {by}")
    return by, first, second


def _kinds_of(name: str, records: Sequence[Record]) -> list[By]:
    cells = [record.cell for record in records]
    found: list[By] = ["model"] if name in {cell.model for cell in cells} or is_tier(name) else []
    try:
        parts = [Spec.parse(part).name for part in joined(name)]
    except SpecError:
        return found
    scheme = schemes.is_scheme(parts[0]) or parts[0] in registry.names("quantizers")
    if scheme or name in {cell.quantizer for cell in cells}:
        found.append("quantizer")
    if name in {cell.arm for cell in cells} or set(parts) <= set(registry.names("arms")):
        found.append("arm")
    return found


def _name(by: By, text: str, records: Sequence[Record]) -> str:
    if by == "model":
        return tier_of(text).label if is_tier(text) and text not in {one.cell.model for one in records} else text
    kind: registry.Kind = "arms" if by == "arm" else "quantizers"
    return _canonical(kind, text, records)


def _show_redundancy(records: list[Record], how: report.Format, results: Path) -> None:
    frame = redundancy(report.long_frame(records))
    if not frame.empty:
        click.echo(_text(redundancy_document(frame), frame, how), nl=False)
        return
    asked = [record for record in records if record.cell.arm == BASELINE_ARM and record.state == "measured"]
    commands = [command_for(asked[0], (BASELINE_ARM, *named), results) for named in FORMS.values()] if asked else []
    needed = " or ".join(", ".join((BASELINE_ARM, *named)) for named in FORMS.values())
    hint = "".join(f"\n  {command}" for command in commands)
    raise RecordError(f"a 2×2 table needs measured cells of {needed}, alike in all else but the arm{hint}")


def _chosen(
    records: Iterable[Record], models: tuple[str, ...], tasks: tuple[str, ...], quantizers: tuple[str, ...]
) -> Iterable[Record]:
    """Records of the models, tasks and quantizers named; of all where none is.

    Raises:
        RecordError: there is none.
        SpecError: there is no such tier.
    """
    known = list(records)
    wanted = {_canonical("quantizers", text, known) for text in quantizers}
    # two ways to write a tier's settings are one tier; records also carry names with a dtype behind them
    names = {record.cell.model for record in known}
    models = tuple(tier_of(name).label if name not in names and is_tier(name) else name for name in models)
    found = [
        record
        for record in known
        if (not models or record.cell.model in models)
        and (not tasks or record.cell.task in tasks or record.cell.task.partition("(")[0] in tasks)
        and (not wanted or record.cell.quantizer in wanted)
    ]
    if not found:
        raise RecordError("there is no record of what --model, --task and --quantizer name" if known else "no records")
    return found


def _canonical(kind: registry.Kind, text: str, records: Sequence[Record]) -> str:
    """A plugin's one name; a name that records carry needs no plugin and no torch.

    Raises:
        SpecError, UnknownPlugin: there is no such plugin or setting.
    """
    known = {record.cell.arm if kind == "arms" else record.cell.quantizer for record in records}
    labelled = {label: name for name, label in _labels(records).items()} if kind == "quantizers" else {}
    if text in known or text in labelled:
        return labelled.get(text, text)
    return registry.canonical(kind, registry.build(kind, text))


def _labels(records: Iterable[Record]) -> dict[str, str]:
    """What tables call each canonical quantizer."""
    return {record.cell.quantizer: label_of(record) for record in records}


def _text(document: Document, frame: pd.DataFrame, how: report.Format) -> str:
    screen = sys.stdout.isatty()
    # a file or pipe has no width of its own; a table cut at 80 columns helps nobody
    return shown(lambda: document, frame, how, None if screen else 160, screen and "NO_COLOR" not in os.environ)
