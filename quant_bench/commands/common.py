"""What commands share: kinds of options, examples, errors in one line, and how outcomes and tables are shown."""

import io
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quant_bench import report, schemes
from quant_bench.cell import require_device
from quant_bench.errors import QuantBenchError, SpecError, UnknownPlugin
from quant_bench.report.text import number, visible

if TYPE_CHECKING:
    from quant_bench.runner import Outcome


class _NewPath(click.Path):
    """A path to write to. An empty one, as from a shell variable that is not set, would mean the current folder."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        if value == "":
            self.fail("the name is empty", parameter, context)
        return super().convert(value, parameter, context)


FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
NEW_FOLDER = _NewPath(file_okay=False, path_type=Path)
NEW_FILE = _NewPath(dir_okay=False, path_type=Path)


def example(command: str) -> str:
    """A command's epilog."""
    # the control character keeps click from breaking the line, so that it can be copied
    return f"\b\nExample:\n  {command}"


class Commands(click.Group):
    """Turns our errors, and those of the file system, into one line and an exit code: 2 for what was asked, else 1."""

    def invoke(self, context: click.Context) -> Any:
        """Run a command."""
        # a file or pipe may have an encoding that lacks a sign of ours
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
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


def device_name(_: click.Context, __: click.Parameter, value: str) -> str:
    """Check of the option --device."""
    require_device(value)
    return value


def rendered(frame: Any, how: report.Format) -> str:
    """A leaderboard for the screen, or for the file or pipe that takes its place."""
    screen = sys.stdout.isatty()
    # a file or pipe has no width of its own; a table cut at 80 columns helps nobody
    return report.rendered(frame, how, None if screen else 160, screen and "NO_COLOR" not in os.environ)


def outcome_lines() -> Callable[["Outcome"], None]:
    """What prints one line a cell on standard output; a long reason stands there once, and then its beginning."""
    said: set[str] = set()

    def show(outcome: "Outcome") -> None:
        cell, record = outcome.cell, outcome.record
        state = "done before" if outcome.skipped else outcome.state.replace("_", " ")
        found = ""
        if record is not None and record.scores:
            score = record.scores[0]
            found = f"{score.metric.name} {number(score.value)}"
        elif record is not None and record.reason:
            # without data, a run of many cells would say the same paragraph for each
            found = textwrap.shorten(record.reason, 100, placeholder=" …") if record.reason in said else record.reason
            said.add(record.reason)
        seed = f" seed {cell.seed}" if cell.seed else ""
        arm = "" if cell.arm == "softmax" else f"{cell.arm} "
        label = schemes.label(cell.quantizer, () if record is None else tuple(record.settings["quantizer"]))
        click.echo(visible(f"{state:<15} {arm}{label} {cell.task}{seed}  {found}".rstrip()))

    return show


def finish(outcomes: "list[Outcome]") -> None:
    """Counts of states on standard error; exit code 1 when a cell failed."""
    states = [outcome.state for outcome in outcomes]
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    click.echo(", ".join(f"{count} {state.replace('_', ' ')}" for state, count in counts.items()), err=True)
    if "failed" in counts:
        sys.exit(1)
