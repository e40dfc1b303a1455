"""The command `quant-bench site`: the leaderboard as static pages."""

import sys
from pathlib import Path

import click

from quant_bench.commands.common import FOLDER, RESULTS, example
from quant_bench.report.text import visible
from quant_bench.site import write_site


@click.command("site", epilog=example("quant-bench site --out public"))
@click.option("--out", type=RESULTS, required=True, help="Folder of the site: new, empty, or an earlier site.")
@click.option("--results", type=FOLDER, default=Path("results"), show_default=True, help="Folder of the records.")
def site(out: Path, results: Path) -> None:
    """Make the leaderboard as a static site: open index.html from the disk, or put the folder on any host.

    Pages ask nobody for anything. Files that are no records are named, the site is made from the others, and the exit
    code is 1.
    """
    written = write_site(results, out)
    for problem in written.problems:
        click.echo(f"not a record: {visible(str(problem))}", err=True)
    click.echo(f"{written.pages} pages and {written.records} records: {written.index}")
    if written.problems:
        sys.exit(1)
