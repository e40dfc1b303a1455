"""The commands `quant-bench data …`: an offline mirror of the data sets."""

from pathlib import Path

import click

from quant_bench.commands.common import FOLDER, Commands, example
from quant_bench.report.text import visible


@click.group(cls=Commands, epilog=example("quant-bench data verify ~/mirror"))
def data() -> None:
    """Work with an offline mirror of the data sets."""


@data.command(epilog=example("quant-bench data verify ~/mirror"))
@click.argument("folder", type=FOLDER)
def verify(folder: Path) -> None:
    """Compare every file of the mirror FOLDER with its pinned sha256; exit with 1 when one is wrong."""
    from quant_bench.data import DataSource

    states = DataSource(folder, allow_hub=False).verify()
    for name, state in states:
        click.echo(f"{visible(name)}: {visible(state)}")
    wrong = [name for name, state in states if state.startswith("wrong")]
    if wrong:
        raise click.ClickException(f"{len(wrong)} of {len(states)} files are not what their names say")
