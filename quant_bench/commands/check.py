"""The command `quant-bench check`: the contract of a plugin, promise by promise."""

import dataclasses
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quant_bench import registry, schemes
from quant_bench._roots import plugin_folders, use_plugins
from quant_bench.commands.common import FOLDER, example
from quant_bench.errors import Blocked, SpecError, UnknownPlugin
from quant_bench.report.text import visible

if TYPE_CHECKING:
    from quant_bench.testing.promises import Verdict

_SIGNS = {"kept": ("pass", "green"), "broken": ("FAIL", "red"), "not_applicable": ("n/a", None)}
_UNSEEN = ("?", "yellow")
# a task is asked three times
_ITEMS = 2


@click.command(epilog=example("quant-bench check my/quantizers/mine.py"))
@click.argument("what", metavar="NAME|FILE")
@click.option("--kind", "asked", type=click.Choice(registry.KINDS), help="Where plugins of two kinds have that name.")
@click.option("--layout", "layouts", multiple=True, help="Only this layout of tiny models, such as llama or gpt2.")
@click.option("--plugins", type=FOLDER, multiple=True, help="Folder with arms/, quantizers/ or tasks/ of your own.")
@click.option("--data", type=FOLDER, help="Offline mirror of the data sets, for tasks; else QUANT_BENCH_DATA.")
def check(
    what: str, asked: registry.Kind | None, layouts: tuple[str, ...], plugins: tuple[Path, ...], data: Path | None
) -> None:
    """Hold a quantizer, an arm or a task to its contract on tiny random models.

    NAME may have settings, such as "rtn(weight_bits=4)"; FILE is DIR/quantizers/NAME.py (or arms, tasks). Each line is
    a promise of the contract; at a broken one stand what was expected, what was seen, and a hint. The exit code is 1
    when one is broken.
    """
    use_plugins(plugins)
    kind, text = _of_file(Path(what)) if what.endswith(".py") else (asked or _kind_of(what), what)
    # torch comes with these
    from quant_bench.data import DataSource
    from quant_bench.testing.conformance import conformance
    from quant_bench.testing.promises import LOADS, Finding, verdicts

    click.echo(visible(f"{kind.removesuffix('s')} {text}"))
    try:
        plugin: Any = registry.build(kind, text)
    except (SpecError, UnknownPlugin, Blocked):
        raise
    except Exception as error:
        found = verdicts([LOADS], [Finding(LOADS, text, error)])
    else:
        if kind == "tasks" and plugin.limit is None:
            plugin = dataclasses.replace(plugin, limit=_ITEMS)
        found = conformance(kind, plugin, layouts, DataSource(data) if kind == "tasks" else None)
    for verdict in found:
        _show(verdict)
    broken = sum(verdict.state == "broken" for verdict in found)
    kept = sum(verdict.state == "kept" for verdict in found)
    click.echo(f"{kept} kept, {broken} broken, {len(found) - kept - broken} not looked at")
    if broken or any(verdict.state == "not_looked_at" for verdict in found):
        sys.exit(1)


def _of_file(file: Path) -> tuple[registry.Kind, str]:
    """Kind and name of a plugin's file; its folder becomes a plugin folder.

    Raises:
        SpecError: there is no such file, or its folder is none of plugins.
    """
    file = file.resolve()
    if not file.is_file():
        raise SpecError(f"there is no file {file}")
    kind = next((kind for kind in registry.KINDS if kind == file.parent.name), None)
    if kind is None:
        raise SpecError(f"a plugin lies in a folder named {', '.join(registry.KINDS)}; {file} does not")
    if str(file.parent) not in plugin_folders(kind):
        use_plugins([file.parent.parent])
    return kind, file.stem


def _kind_of(text: str) -> registry.Kind:
    """The one kind that has a plugin of a text's name.

    Raises:
        UnknownPlugin: none has.
        SpecError: more than one has.
    """
    name = re.split(r"[(:+]", text)[0].strip()
    found = [kind for kind in registry.KINDS if name in registry.names(kind)]
    if not found and schemes.looks_like_one(name):
        found = ["quantizers"]
    if not found:
        raise UnknownPlugin(f"no quantizer, arm or task named {name!r}: see `quant-bench list`, or name its file")
    if len(found) > 1:
        raise SpecError(f"{name!r} is in {' and '.join(found)}: choose by --kind")
    return found[0]


def _show(verdict: "Verdict") -> None:
    sign, colour = _SIGNS.get(verdict.state, _UNSEEN)
    click.echo(f"  {click.style(f'{sign:<4}', fg=colour)}  {verdict.promise.name}")
    if verdict.state == "broken":
        for label, text in (
            ("expected", verdict.promise.expected),
            ("seen", verdict.seen),
            ("hint", verdict.promise.hint),
        ):
            click.echo(visible(f"        {label:<8}  {text}"))
    elif verdict.seen:
        click.echo(visible(f"        {verdict.seen}"))
