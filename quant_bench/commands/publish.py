"""The command `quant-bench publish`: records and leaderboard for others."""

from pathlib import Path

import click

from quant_bench.commands.common import FOLDER, example
from quant_bench.report.text import visible


@click.command(epilog=example("quant-bench publish --to hub:org/quant-bench-results"))
@click.option("--to", required=True, metavar="DIR|hub:ORG/DATASET", help="A folder, or a data set on the hub.")
@click.option("--results", type=FOLDER, default=Path("results"), show_default=True, help="Folder of the records.")
def publish(to: str, results: Path) -> None:
    """Publish the records with scores (parquet, csv, json), leaderboard and data set card: all of it or nothing.

    A folder gets the site, too, and may be a checkout of a gh-pages branch: what else lies there is kept. The token of
    the hub is the one that `hf auth login` stored. A record that is there and not here is never lost: merge first.
    """
    from quant_bench.submission.publish import HUB, publish_folder, publish_hub

    if to.startswith(HUB):
        click.echo(f"published: {visible(publish_hub(results, to.removeprefix(HUB)))}")
    else:
        click.echo(f"published: {publish_folder(results, Path(to))} records in {visible(to)}")
