"""The command `quant-bench report`: the leaderboard from the records."""

import io
import sys
from pathlib import Path
from typing import Any

import click
import pandas as pd

from quant_bench import report
from quant_bench.cache import write_atomically
from quant_bench.commands.common import NEW_FILE, NEW_FOLDER, example, rendered
from quant_bench.errors import RecordError
from quant_bench.record import Store
from quant_bench.report.model_card import model_index, models_of
from quant_bench.report.text import visible

_FORMATS = (*report.FORMATS, "parquet", "model-index")


@click.command("report", epilog=example("quant-bench report --format csv > scores.csv"))
@click.option("--format", "how", type=click.Choice(_FORMATS), help="Print in this format only.")
@click.option("--check", is_flag=True, help="Exit with 1 when a file is not what the records say.")
@click.option("--model", help="Only this model, in the format asked for; model-index needs one.")
@click.option("--out", type=NEW_FILE, help="Write the format to this file.")
@click.option("--results", type=NEW_FOLDER, default=Path("results"), show_default=True, help="Folder of the records.")
def report_command(how: str | None, check: bool, model: str | None, out: Path | None, results: Path) -> None:
    """Make the leaderboard from the records: on screen, in LEADERBOARD.md beside them, in excerpts of documents.

    With --format it is only printed (or written to --out), with --check only compared. model-index is the metadata of a
    Hugging Face model card. Files that are no records are named, the leaderboard is made from the others, and the exit
    code is 1.
    """
    if not results.is_dir():
        raise click.UsageError(f"there is no folder {visible(str(results))}: name the records' folder by --results")
    if (model or out) and (check or how is None):
        raise click.UsageError("--model and --out go with --format: the leaderboard beside the records has all models")
    if how == "parquet" and out is None:
        raise click.UsageError("parquet is no text: name a file by --out")
    if how == "model-index" and model is None:
        raise click.UsageError("a model card is of one model: name it by --model")
    store = Store.read(results)
    frame = report.long_frame(store.records)
    for problem in store.problems:
        click.echo(f"not a record: {visible(str(problem))}", err=True)
    if check:
        stale = report.stale(results, frame)
        if stale:
            names = ", ".join(visible(str(path)) for path in stale)
            raise click.ClickException(f"stale: {names}; run `quant-bench report` and commit what it writes")
        click.echo(f"{results / report.FILE} is what the records say")
    elif how is None:
        click.echo(rendered(frame, "table"), nl=False)
        if not store.problems:
            click.echo(f"written to {report.write(results, frame)}", err=True)
    elif out is None:
        click.echo(_exported(frame, how, model), nl=False)
    else:
        exported = _exported(frame, how, model)
        write_atomically(out, exported if isinstance(exported, bytes) else exported.encode())
        click.echo(f"written to {visible(str(out))}", err=True)
    if store.problems:
        sys.exit(1)


def _exported(frame: pd.DataFrame, how: Any, model: str | None) -> str | bytes:
    if how == "model-index":
        return model_index(frame, str(model))
    chosen = frame if model is None else frame[frame["model"] == model].reset_index(drop=True)
    if chosen.empty and model is not None:
        raise RecordError(f"there is no record of {model!r}; records are of {models_of(frame)}")
    if how != "parquet":
        return rendered(chosen, how)
    buffer = io.BytesIO()
    chosen.to_parquet(buffer, index=False)
    return buffer.getvalue()
