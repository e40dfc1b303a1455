"""The command `quant-bench new`: a plugin that works, with its test, to begin from."""

from pathlib import Path

import click

from quant_bench import registry
from quant_bench.commands.common import NEW_FOLDER, example
from quant_bench.report.text import visible
from quant_bench.scaffold import scaffold


@click.command(epilog=example("quant-bench new quantizer shrink --dir mine"))
@click.argument("what", type=click.Choice([kind.removesuffix("s") for kind in registry.KINDS]))
@click.argument("name")
@click.option("--dir", "folder", type=NEW_FOLDER, default=Path(), help="Plugin folder; by default this one.")
def new(what: str, name: str, folder: Path) -> None:
    """Write a quantizer, an arm or a task that keeps its contract, with its test, to begin from.

    The files of a quantizer are DIR/quantizers/NAME.py and DIR/tests/test_NAME.py. DIR is then a folder for --plugins,
    or a checkout of this project. Nothing is overwritten.
    """
    kind = next(kind for kind in registry.KINDS if kind.removesuffix("s") == what)
    files = scaffold(kind, name, folder)
    files.write()
    for path in files.files:
        click.echo(f"written {visible(str(path))}")
    click.echo(f"check it: quant-bench check {visible(str(next(iter(files.files))))}")
