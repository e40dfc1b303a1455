"""The command `quant-bench merge`: two trees of records become one."""

from pathlib import Path
from typing import Literal

import click

from quant_bench.commands.common import FOLDER, NEW_FOLDER, example
from quant_bench.report.text import visible


@click.command(epilog=example("quant-bench merge results theirs/results --out merged"))
@click.argument("a", type=FOLDER)
@click.argument("b", type=FOLDER)
@click.option("--out", type=NEW_FOLDER, required=True, help="New folder for what either has.")
@click.option("--prefer", type=click.Choice(["a", "b"]), help="Whose record to keep where both have a cell.")
def merge(a: Path, b: Path, out: Path, prefer: Literal["a", "b"] | None) -> None:
    """Put the records of the folders A and B into a new folder, with a leaderboard made of all.

    A cell that both have with the same bytes is one. Where the content differs nothing is merged, the cells are named
    and the exit code is 1, unless --prefer says whose record to keep.
    """
    from quant_bench.submission.merge import merge as merge_trees

    merged = merge_trees(a, b, out, prefer)
    for conflict in merged.conflicts:
        click.echo(visible(f"kept that of {prefer}: {conflict}"), err=True)
    counts = f"{merged.from_first} only of A, {merged.from_second} only of B"
    click.echo(f"{merged.records} records in {visible(str(out))}: {counts}")
