"""The command `quant-bench publish`: records and leaderboard for others."""

from pathlib import Path

import click

from quant_bench.cache import cache_folder
from quant_bench.commands.common import FOLDER, example
from quant_bench.errors import SpecError
from quant_bench.report.text import visible
from quant_bench.samples import SampleStore


@click.command(epilog=example("quant-bench publish --to hub:org/quant-bench-results"))
@click.option("--to", required=True, metavar="DIR|hub:ORG/DATASET", help="A folder, or a data set on the hub.")
@click.option("--pairs", is_flag=True, help="A folder's site has paired intervals of any two rows, as `site --pairs`.")
@click.option("--results", type=FOLDER, default=Path("results"), show_default=True, help="Folder of the records.")
def publish(to: str, pairs: bool, results: Path) -> None:
    """Publish the records with scores (parquet, csv, json), leaderboard and data set card: all of it or nothing.

    A folder gets the site, too, and may be a checkout of a gh-pages branch: what else lies there is kept. The token of
    the hub is the one that `hf auth login` stored. A record that is there and not here is never lost: merge first.
    """
    from quant_bench.submission.publish import HUB, publish_folder, publish_hub

    if to.startswith(HUB):
        if pairs:
            raise SpecError("--pairs is of a folder's site, and a data set on the hub has none")
        click.echo(f"published: {visible(publish_hub(results, to.removeprefix(HUB)))}")
    else:
        answers = SampleStore(cache_folder()) if pairs else None
        click.echo(f"published: {publish_folder(results, Path(to), answers)} records in {visible(to)}")
