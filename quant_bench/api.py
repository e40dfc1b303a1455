"""The same from Python: `run`, `quantize`, `evaluate`, `leaderboard`."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quant_bench.errors import RecordError, SpecError

if TYPE_CHECKING:
    import pandas as pd

    from quant_bench.model import LanguageModel
    from quant_bench.runner import Outcome
    from quant_bench.score import Score


def run(
    model: str,
    *,
    quantizers: Sequence[str] = ("none",),
    tasks: Sequence[str] = (),
    results: Path | str = "results",
    **options: Any,
) -> "list[Outcome]":
    """Run cells end to end and write their records; finished cells are skipped.

    Args:
        model: alias, hub id, folder, GGUF file or `pypi:PACKAGE==VERSION`.
        quantizers: specs or scheme shorthands such as `w8a8` and `w4a4g128-integer`.
        tasks: specs such as `wikitext2` and `hellaswag(limit=100)`; none for the default ones.
        results: folder of the records.
        options: the other fields of `quant_bench.runner.RunOptions`.

    Returns:
        One outcome a cell, with its record.

    Raises:
        SpecError: a name, a setting or an option cannot be read.
        ModelError: the model cannot be loaded.
        RecordError: a record in the way cannot be read, or the results cannot be written.
    """
    from quant_bench.plan import DEFAULT_TASKS, RunOptions
    from quant_bench.runner import run_cells

    lists: dict[str, Any] = {"quantizers": quantizers, "tasks": tasks or DEFAULT_TASKS}
    lists |= {name: options.pop(name) for name in ("arms", "seeds") if name in options}
    for name, given in lists.items():
        # the letters of a text would be names of one letter
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise SpecError(f"{name} are a list, such as [{given!r}]; got {given!r}")
        lists[name] = tuple(given)
    options |= {name: Path(options[name]) for name in ("data", "cache") if options.get(name) is not None}
    return run_cells(RunOptions(model, results=Path(results), **lists, **options))


def train(
    tier: str,
    arm: str = "softmax",
    *,
    seed: int = 0,
    data: Path | str | None = None,
    cache: Path | str | None = None,
    device: str = "cpu",
) -> Path:
    """Train one arm of a tier, or find it trained; every other arm of that tier and seed differs in nothing else.

    Args:
        tier: such as `micro` or `toy(steps=500)`.
        arm: spec such as `sink_logit` or `sink_logit+projection_gate`.
        seed: of the initial weights and of the order of the data.
        data: offline mirror, or None for `QUANT_BENCH_DATA` or the hub.
        cache: folder where checkpoints lie; None for the user's cache folder.
        device: torch device.

    Returns:
        Folder of the checkpoint; `load_model` reads it, `training.json` in it says how it was made.

    Raises:
        SpecError: there is no such tier or arm.
        Blocked: the text must be fetched and cannot be.
        NotApplicable: the arm makes no sense for the tier's layout.
    """
    from quant_bench import registry
    from quant_bench.cache import cache_folder
    from quant_bench.data import DataSource
    from quant_bench.training.checkpoints import Order, find_or_train
    from quant_bench.training.tiers import PREFIX, tier_of

    source = DataSource(None if data is None else Path(data))
    folder = cache_folder(None if cache is None else Path(cache))
    chosen = tier_of(f"{PREFIX}{tier.removeprefix(PREFIX)}")
    return find_or_train(Order(chosen, registry.build("arms", arm), seed, source, folder, device)).folder


def quantize(
    model: "LanguageModel", quantizer: str, *, data: Path | str | None = None, seed: int = 0
) -> "LanguageModel":
    """Quantize a loaded model. The model is given away; use the one returned.

    Args:
        model: from `load_model`.
        quantizer: spec or scheme shorthand.
        data: offline mirror for the calibration text of quantizers that need one.
        seed: chooses the calibration sequences.

    Raises:
        Blocked: the quantizer needs calibration text and there is none.
        ModelError: the model is quantized already.
        SpecError: the seed is not below 2^32.
    """
    from quant_bench import registry
    from quant_bench.cache import cache_folder
    from quant_bench.cell import require_seed
    from quant_bench.data import DataSource
    from quant_bench.models import quantize_with
    from quant_bench.weights import calibration_of

    require_seed(seed)
    chosen = registry.build("quantizers", quantizer)
    source = DataSource(None if data is None else Path(data))
    calibration = calibration_of(model, source, cache_folder(), chosen.calibration_sequences, seed)
    return quantize_with(chosen, model, calibration, seed)


def evaluate(
    model: "LanguageModel", task: str, *, data: Path | str | None = None, seed: int = 0, cache: Path | str | None = None
) -> "list[Score]":
    """Ask one task's questions; scores carry intervals, and no difference (there is no reference here).

    Args:
        model: float or quantized.
        task: spec such as `wikitext2(limit=8)`.
        data: offline mirror, or None for `QUANT_BENCH_DATA` or the hub.
        seed: of the bootstrap and of anything drawn.
        cache: folder for what may be thrown away; None for the user's cache folder.

    Raises:
        Blocked: data are missing.
        NotApplicable: the task makes no sense for this model.
        SpecError: the task cannot be read, or the seed is no whole number below 2^32.
    """
    from quant_bench import registry
    from quant_bench.cache import cache_folder
    from quant_bench.cell import require_seed
    from quant_bench.data import DataSource
    from quant_bench.probe import Probe
    from quant_bench.score import Score
    from quant_bench.statistics import score_of
    from quant_bench.task import Context

    require_seed(seed)
    chosen = registry.build("tasks", task)
    context = Context(
        data=DataSource(None if data is None else Path(data)),
        cache=cache_folder(None if cache is None else Path(cache)),
        probe=Probe.off(),
        seed=seed,
    )
    chosen.prepare(model, context)
    found = chosen.evaluate(model, context)
    plain = [Score(score.metric, score.value, n=score.n) for score in found.plain]
    return plain + [score_of(measure, found.samples, seed) for measure in found.measures]


def leaderboard(results: Path | str = "results") -> "pd.DataFrame":
    """The leaderboard of a folder of records, one row a score, with its rank where it may have one; needs no torch.

    Raises:
        RecordError: there is no such folder, or a file in it is no record.
    """
    from quant_bench.report import leaderboard as build

    root = Path(results)
    if not root.is_dir():
        raise RecordError(f"no folder {str(results)!r}: a run writes its records there")
    return build(root)
