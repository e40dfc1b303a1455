"""The command `quant-bench compare`: two arms, or the 2×2 of a sink logit and a gate, from records alone."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import click
import pandas as pd

from quant_bench import registry, report, schemes
from quant_bench.cell import BASELINE_ARM
from quant_bench.commands.common import FOLDER, example
from quant_bench.errors import RecordError, SpecError
from quant_bench.record import Record, Store
from quant_bench.report.arm_tables import comparison_document, redundancy_document
from quant_bench.report.compare import command_for
from quant_bench.report.compare import compare as compare_arms
from quant_bench.report.layout import Document
from quant_bench.report.redundancy import FORMS, redundancy
from quant_bench.report.render import shown
from quant_bench.report.text import visible
from quant_bench.training.tiers import is_tier, tier_of


@click.command(epilog=example("quant-bench compare sink_logit softmax --quantizer w8a8-static"))
@click.argument("arms", nargs=-1, metavar="[ARM ARM]")
@click.option("--table", type=click.Choice(["2x2"]), help="Redundancy of a sink logit and a gate instead of two arms.")
@click.option("--model", "models", multiple=True, help="Only this model.")
@click.option("--task", "tasks", multiple=True, help="Only this task; a name stands for all its settings.")
@click.option("--quantizer", "quantizers", multiple=True, help="Only this recipe or scheme shorthand.")
@click.option("--format", "how", type=click.Choice(report.FORMATS), default="table", help="table by default.")
@click.option(
    "--results",
    type=FOLDER,
    default=Path("results"),
    show_default=True,
    help="Folder of the records.",
)
def compare(
    arms: tuple[str, ...],
    table: str | None,
    how: report.Format,
    results: Path,
    **only: tuple[str, ...],
) -> None:
    """Paired differences of two arms, the first minus the second: for each seed, and over seeds.

    Only cells of one model, quantizer, task and seed are compared, with the same convention, data and item count. A
    cell that one arm has and the other lacks is named with the command that measures it, and the exit code is 1.
    """
    if len(arms) != (0 if table else 2):
        raise click.UsageError("--table takes no arms" if table else "name two arms, or --table 2x2")
    records = list(_chosen(Store.read(results).valid(), **only))
    if table:
        _show_redundancy(records, how, results)
        return
    first, second = (_canonical("arms", arm, {record.cell.arm for record in records}) for arm in arms)
    if first == second:
        raise SpecError(f"{arms[0]!r} and {arms[1]!r} are one arm")
    found = compare_arms(records, first, second, results)
    for note in found.notes:
        click.echo(visible(note), err=True)
    if found.frame.empty:
        lost = "\n".join(str(one) for one in found.missing)
        nothing = lost or f"{results} has no two cells of {first} and {second} that can be compared"
        raise RecordError(nothing)
    click.echo(_text(comparison_document(found, first, second), found.frame, how), nl=False)
    for one in found.missing:
        click.echo("\n".join(visible(line) for line in f"missing: {one}".splitlines()), err=True)
    if found.missing:
        sys.exit(1)


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
    wanted = {_canonical("quantizers", text, {record.cell.quantizer for record in known}) for text in quantizers}
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


def _canonical(kind: registry.Kind, text: str, known: set[str]) -> str:
    """A plugin's one name; a name that records carry needs no plugin and no torch.

    Raises:
        SpecError, UnknownPlugin: there is no such plugin or setting.
    """
    labelled = {schemes.label(name): name for name in known} if kind == "quantizers" else {}
    if text in known or text in labelled:
        return labelled.get(text, text)
    return registry.canonical(kind, registry.build(kind, text))


def _text(document: Document, frame: pd.DataFrame, how: report.Format) -> str:
    screen = sys.stdout.isatty()
    # a file or pipe has no width of its own; a table cut at 80 columns helps nobody
    return shown(lambda: document, frame, how, None if screen else 160, screen and "NO_COLOR" not in os.environ)
