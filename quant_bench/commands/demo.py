"""The command `quant-bench demo`: the main job on a real model."""

from pathlib import Path

import click

from quant_bench import report
from quant_bench.commands.common import FOLDER, NEW_FOLDER, example, finish, outcome_lines, rendered
from quant_bench.report.text import visible


@click.command(epilog=example("quant-bench demo"))
@click.option("--data", type=FOLDER, help="Offline mirror of the data sets; else QUANT_BENCH_DATA, else the hub.")
@click.option(
    "--results", type=NEW_FOLDER, default=Path("build/demo"), show_default=True, help="Folder of the demo's records."
)
def demo(data: Path | None, results: Path) -> None:
    """Run the main job on a real model, SmolLM2-135M, in minutes on two cores, and show the leaderboard."""
    from quant_bench.demo import demo_options
    from quant_bench.runner import run_cells

    options, text = demo_options(data, results)
    click.echo(f"Text: {visible(text)}", err=True)
    outcomes = run_cells(options, outcome_lines())
    frame = report.leaderboard(results)
    click.echo(rendered(frame, "table"), nl=False)
    written = report.write(results, frame)
    table = results / "leaderboard.csv"
    table.write_text(report.rendered(frame, "csv"), encoding="utf-8")
    click.echo(f"written to {written} and {table}", err=True)
    finish(outcomes)
