"""The command `quant-bench doctor`: what this machine can do."""

import sys
from pathlib import Path

import click

from quant_bench.commands.common import FOLDER, device_name, example
from quant_bench.report.text import visible


@click.command(epilog=example("quant-bench doctor --data ~/mirror"))
@click.option("--data", type=FOLDER, help="Offline mirror of the data sets; else QUANT_BENCH_DATA.")
@click.option("--device", default="cpu", show_default=True, callback=device_name, help="cpu, cuda or cuda:N.")
def doctor(data: Path | None, device: str) -> None:
    """Say what this machine can do: versions, processor, integer self-test and kernel, plugins, data."""
    from quant_bench.doctor import examine

    sound = True
    for finding in examine(data, device):
        sound = sound and finding.sound
        click.echo(f"\n{finding.title}" if finding.title else "")
        for name, value in finding.facts:
            click.echo(f"  {name:<28} {visible(value)}".rstrip())
    if not sound:
        sys.exit(1)
