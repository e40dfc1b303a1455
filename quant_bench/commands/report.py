"""The command `quant-bench report`: the leaderboard from the records."""

import sys
from pathlib import Path

import click

from quant_bench import report
from quant_bench.commands.common import RESULTS, example, rendered
from quant_bench.record import Store
from quant_bench.report.text import visible


@click.command("report", epilog=example("quant-bench report --format csv > scores.csv"))
@click.option("--format", "how", type=click.Choice(report.FORMATS), help="Print in this format only.")
@click.option("--check", is_flag=True, help=f"Exit with 1 when {report.FILE} is not what the records say.")
@click.option("--results", type=RESULTS, default=Path("results"), show_default=True, help="Folder of the records.")
def report_command(how: report.Format | None, check: bool, results: Path) -> None:
    """Make the leaderboard from the records: on screen, and in LEADERBOARD.md beside them.

    With --format it is only printed, with --check only compared. Files that are no records are named, the leaderboard
    is made from the others, and the exit code is 1.
    """
    if not results.is_dir():
        raise click.UsageError(f"there is no folder {visible(str(results))}: name the records' folder by --results")
    store = Store.read(results)
    frame = report.long_frame(store.records)
    for problem in store.problems:
        click.echo(f"not a record: {visible(str(problem))}", err=True)
    if check:
        if report.stale(results, frame):
            raise click.ClickException(f"{results / report.FILE} is stale: run `quant-bench report` and commit it")
        click.echo(f"{results / report.FILE} is what the records say")
    elif how is not None:
        click.echo(rendered(frame, how), nl=False)
    else:
        click.echo(rendered(frame, "table"), nl=False)
        if not store.problems:
            click.echo(f"written to {report.write(results, frame)}", err=True)
    if store.problems:
        sys.exit(1)
