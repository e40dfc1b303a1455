"""The command `quant-bench submit-check`: may these records be taken over?"""

import sys
from pathlib import Path

import click

from quant_bench._roots import use_plugins
from quant_bench.commands.common import FOLDER, example
from quant_bench.report.text import visible


@click.command("submit-check", epilog=example("quant-bench submit-check results --against base/results"))
@click.argument("path", type=FOLDER)
@click.option("--against", type=FOLDER, help="What was there before: nothing may be deleted or silently changed.")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=1e-6,
    show_default=True,
    help="Share of a measured value by which it may differ from the one before.",
)
@click.option("--plugins", type=FOLDER, multiple=True, help="Folder with arms/, quantizers/ or tasks/ of your own.")
def submit_check(path: Path, against: Path | None, tolerance: float, plugins: tuple[Path, ...]) -> None:
    """Check the records in the folder PATH as a results repository's CI does: docs/submit.md has every rule.

    Problems are listed, one a line, and the exit code is 1.
    """
    use_plugins(plugins)
    from quant_bench.submission.check import Tree, check

    tree = Tree.read(path)
    base = None if against is None else Tree.read(against)
    problems = check(tree, base, tolerance)
    for problem in problems:
        click.echo(visible(str(problem)))
    known = 0 if base is None else sum(tree.texts[name] == base.texts.get(name) for name in tree.records)
    counted = f"{len(tree.records)} records, {len(tree.records) - known} of them new or changed"
    click.echo(f"{counted}: {len(problems)} problems" if problems else f"{counted}: sound", err=True)
    if problems:
        sys.exit(1)
