"""The command `quant-bench quantize`: a quantized model in a folder."""

from pathlib import Path
from typing import Any, Literal

import click

from quant_bench._roots import use_plugins
from quant_bench.commands.common import FOLDER, NEW_FOLDER, device_name, example
from quant_bench.report.text import visible


@click.command(epilog=example("quant-bench quantize smollm2-135m-instruct --quantizer w4a16g64 --out smollm2-w4"))
@click.argument("model")
@click.option("--quantizer", required=True, help="Recipe or scheme shorthand.")
@click.option("--out", required=True, type=NEW_FOLDER, help="New folder for the model.")
@click.option(
    "--format", "how", type=click.Choice(["quant-bench", "compressed-tensors"]), default="quant-bench",
    show_default=True, help="Ours holds every recipe; compressed-tensors is what vLLM and transformers read.",
)  # fmt: skip
@click.option("--arm", default="softmax", show_default=True, help="Attention mechanism.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the calibration.")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True,
    help="Of what stays in float.",
)  # fmt: skip
@click.option("--device", default="cpu", show_default=True, callback=device_name, help="cpu, cuda or cuda:N.")
@click.option("--data", type=FOLDER, help="Offline mirror of the data sets; else QUANT_BENCH_DATA, else the hub.")
@click.option("--plugins", type=FOLDER, multiple=True, help="Folder with arms/ or quantizers/ of your own.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
@click.option("--revision", help="Revision of a model on the hub.")
def quantize(
    model: str,
    quantizer: str,
    out: Path,
    how: Literal["quant-bench", "compressed-tensors"],
    plugins: tuple[Path, ...],
    **options: Any,
) -> None:
    """Quantize MODEL and write it to a folder, which quant-bench run takes for a model.

    The folder holds codes, scales and the recipe; `quant-bench run DIR` measures the cells of MODEL and that quantizer.
    MODEL is what quant-bench run takes.
    """
    use_plugins(plugins)
    # torch comes with these
    from quant_bench import models
    from quant_bench.export import save_compressed
    from quant_bench.models.saving import require_free
    from quant_bench.plan import RunOptions
    from quant_bench.progress import Progressor
    from quant_bench.weights import canonical, quantized

    require_free(out)
    arm, seed = options.pop("arm"), options.pop("seed")
    asked = RunOptions(canonical(model), arms=(arm,), quantizers=(quantizer,), seeds=(seed,), **options)
    with Progressor(1) as progressor:
        progressor.cell(f"{quantizer}: quantizing")
        made = quantized(asked, progressor.work)
    save = models.save if how == "quant-bench" else save_compressed
    save(made, out)
    coverage = made.coverage
    sizes = f"{coverage.weight_bytes / 1e6:.1f} MB in place of {coverage.float_bytes / 1e6:.1f} MB of float32"
    click.echo(visible(f"saved {out}: {made.recipe.quantizer if made.recipe else quantizer}, {sizes}"))
