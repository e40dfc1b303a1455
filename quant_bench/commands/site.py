"""The command `quant-bench site`: the leaderboard as static pages."""

import sys
from pathlib import Path

import click

from quant_bench.cache import cache_folder
from quant_bench.commands.common import FOLDER, NEW_FOLDER, example
from quant_bench.report.text import visible
from quant_bench.samples import SampleStore
from quant_bench.site import write_site


@click.command("site", epilog=example("quant-bench site --out public"))
@click.option("--out", type=NEW_FOLDER, required=True, help="Folder of the site: new, empty, or an earlier site.")
@click.option("--pairs", is_flag=True, help="Also paired intervals of any two rows, from the answers in the cache.")
@click.option("--results", type=FOLDER, default=Path("results"), show_default=True, help="Folder of the records.")
def site(out: Path, pairs: bool, results: Path) -> None:
    """Make the leaderboard as a static site: open index.html from the disk, or put the folder on any host.

    Pages ask nobody for anything. Files that are no records are named, the site is made from the others, and the exit
    code is 1. Records hold no answers to single items, so the paired interval of any two rows is known only on the
    machine that measured them: --pairs computes it, in seconds to minutes.
    """
    answers = SampleStore(cache_folder()) if pairs else None
    written = write_site(results, out, answers)
    for problem in written.problems:
        click.echo(f"not a record: {visible(str(problem))}", err=True)
    if answers is not None:
        click.echo(f"{written.over_items:,} paired intervals from the answers in {answers.folder}", err=True)
    click.echo(f"{written.pages} pages and {written.records} records: {written.index}")
    if written.problems:
        sys.exit(1)
