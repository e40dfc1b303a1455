"""The command `quant-bench train`: the checkpoints of a tier, one for each arm and seed."""

import sys
from pathlib import Path
from typing import Any

import click

from quant_bench import registry
from quant_bench._roots import use_plugins
from quant_bench.cell import SEEDS
from quant_bench.commands.common import FOLDER, NEW_FOLDER, device_name, example
from quant_bench.errors import Blocked, NotApplicable, SpecError
from quant_bench.report.text import number, visible
from quant_bench.training.tiers import TIERS, changed


@click.command(epilog=example("quant-bench train --tier toy --arm softmax --arm sink_logit --seed 0 --seed 1"))
@click.option("--tier", "name", type=click.Choice(tuple(TIERS)), required=True, help="Shape, data and schedule.")
@click.option("--arm", "arms", multiple=True, default=["softmax"], show_default=True, help="Attention mechanism.")
@click.option(
    "--seed", "seeds", multiple=True, type=click.IntRange(0, SEEDS - 1), default=[0], show_default=True,
    help="Of the first weights and of the order of the data.",
)  # fmt: skip
@click.option("--max-steps", "steps", type=click.IntRange(min=1), help="Length of the run; else the tier's.")
@click.option("--tokens", type=click.IntRange(min=1), help="The same in tokens.")
@click.option("--text", help="Source of the text, or a file or folder; else the tier's.")
@click.option("--bf16/--no-bf16", default=None, help="Products in bfloat16 (autocast); else the tier's.")
@click.option("--data", type=FOLDER, help="Offline mirror of the data sets; else QUANT_BENCH_DATA, else the hub.")
@click.option("--cache", type=NEW_FOLDER, help="Where checkpoints lie.")
@click.option("--plugins", type=FOLDER, multiple=True, help="Folder with arms/ of your own.")
@click.option(
    "--device", default="cpu", show_default=True, callback=device_name,
    help="cpu, cuda or cuda:N; several GPUs by torchrun.",
)  # fmt: skip
def train(
    name: str, arms: tuple[str, ...], seeds: tuple[int, ...], data: Path | None, cache: Path | None, **options: Any
) -> None:
    """Train every arm and seed named, matched in everything else.

    All arms of a tier and seed share data order, schedule and the first value of every parameter that they have in
    common. A finished checkpoint is found again; a killed training goes on from its last one. `quant-bench run
    tier:NAME --arm ARM --seed SEED` evaluates a checkpoint, and trains it where it is missing.
    """
    use_plugins(options.pop("plugins"))
    device = options.pop("device")
    tier = changed(TIERS[name], **options)
    built = [registry.build("arms", text) for text in arms]
    # torch comes with these
    from quant_bench.cache import cache_folder
    from quant_bench.data import DataSource
    from quant_bench.lowbit.memory import tune_allocator
    from quant_bench.progress import Progressor
    from quant_bench.training.checkpoints import Order, find_or_train

    tune_allocator()
    source, folder = DataSource(data), cache_folder(cache)
    failed = False
    with Progressor(len(built) * len(seeds)) as progressor:
        for seed in seeds:
            for arm in built:
                order = Order(tier, arm, seed, source, folder, device)
                progressor.cell(f"{tier.label} {order.arm_text} seed {seed}")
                try:
                    checkpoint = find_or_train(order, progressor.work)
                    loss = f"loss {number(checkpoint.note['losses'][-1]['loss'])}  {checkpoint.folder}"
                    _say("trained", f"{order.arm_text} seed {seed}  {loss}")
                except (Blocked, SpecError):
                    # what is missing or misnamed is so for the others too
                    raise
                except NotApplicable as error:
                    _say("not applicable", f"{order.arm_text} seed {seed}  {error}")
                except Exception as error:
                    failed = True
                    _say("failed", f"{order.arm_text} seed {seed}  {type(error).__name__}: {error}")
                progressor.advance()
    if failed:
        sys.exit(1)


def _say(state: str, text: str) -> None:
    click.echo(visible(f"{state:<15} {text}"))
