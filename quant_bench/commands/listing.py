"""The command `quant-bench list`: what there is."""

from pathlib import Path

import click

from quant_bench import registry, schemes
from quant_bench._roots import use_plugins
from quant_bench.commands.common import FOLDER, example
from quant_bench.report.text import visible

_LISTS = ("arms", "quantizers", "tasks", "models", "schemes")


@click.command("list", epilog=example("quant-bench list quantizers"))
@click.argument("what", type=click.Choice(_LISTS), required=False)
@click.option("--plugins", type=FOLDER, multiple=True, help="Folder with arms/, quantizers/ or tasks/ of your own.")
def list_command(what: str | None, plugins: tuple[Path, ...]) -> None:
    """List arms, quantizers, tasks, models or schemes; all of them by default."""
    use_plugins(plugins)
    for name in _LISTS if what is None else (what,):
        if what is None:
            click.echo(f"{name}:")
        entries = _entries(name)
        width = max((len(entry) for entry in entries), default=0)
        for entry, meaning in entries.items():
            click.echo(f"  {entry:<{width}}  {visible(meaning)}".rstrip())


def _entries(what: str) -> dict[str, str]:
    if what == "models":
        from quant_bench.models import ALIASES

        return {name: alias.description for name, alias in ALIASES.items()}
    if what == "schemes":
        return (
            dict(schemes.SCHEMES)
            | dict(schemes.FORMATS)
            | {
                "…-kv8, …-kv4": "with a quantized key/value cache",
                "…-integer, …-classic": "in this execution; simulated is the default",
                "RECIPE:…": "by another recipe than rtn",
            }
        )
    kind: registry.Kind = next(kind for kind in registry.KINDS if kind == what)
    return {name: registry.summary(kind, name) for name in registry.names(kind)}
