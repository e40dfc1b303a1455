"""One cell end to end: the only module that knows every stage.

Cells of one quantized model run together: the model is loaded and quantized once, its tasks share forward passes
(`Context.pass_memo`), and all quantizers of a float model share its tokenized requests (`Context.model_memo`). Each
record is written as soon as its cell is done, after the samples behind it, so that a killed run loses one cell at most.
"""

import logging
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from quant_bench.assemble import empty_record, references_of, scores_of
from quant_bench.cache import cache_folder
from quant_bench.cell import check_places
from quant_bench.data import DataSource
from quant_bench.environment import PeakMemory
from quant_bench.errors import Blocked, NotApplicable, QuantBenchError, RecordError
from quant_bench.lowbit.memory import HeapWatch, release_memory, tune_allocator
from quant_bench.lowbit.ready import make_ready_
from quant_bench.model import LanguageModel
from quant_bench.models import quantize_with
from quant_bench.models.recipe import calibration_of as calibration_of_recipe
from quant_bench.plan import (
    PlannedCell,
    RunOptions,
    float_twin,
    has_result,
    pending_cells,
    planned_cells,
    sample_key,
)
from quant_bench.probe import Probe
from quant_bench.progress import Progressor
from quant_bench.quantizer import Calibration
from quant_bench.record import Cell, Record, State
from quant_bench.record_json import LONGEST_TEXT
from quant_bench.samples import Samples, SampleStore
from quant_bench.task import Context, Evaluation
from quant_bench.weights import Weights, calibration_of, canonical, of_saved

__all__ = ["Outcome", "RunOptions", "run_cells"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What became of a cell.

    Attributes:
        cell: which one.
        state: of its record, or `planned` in a dry run.
        path: where its record lies.
        record: the record; None in a dry run.
        skipped: whether it was done before this run.
    """

    cell: Cell
    state: str
    path: Path
    record: Record | None
    skipped: bool


@dataclass
class _Run:
    """State that one run hands from cell to cell."""

    options: RunOptions
    cache: Path
    data: DataSource
    weights: Weights
    store: SampleStore
    progressor: Progressor
    report: Callable[[Outcome], None]
    outcomes: list[Outcome] = field(default_factory=list)
    memory: PeakMemory = field(default_factory=PeakMemory)
    heap: HeapWatch = field(default_factory=HeapWatch)
    model_memo: dict[Any, Any] = field(default_factory=dict)

    def work(self, description: str, done: int, total: int) -> None:
        """A task has done a step: show it, and keep the process from growing step by step."""
        self.progressor.work(description, done, total)
        self.heap.check()

    def finish(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.report(outcome)


def run_cells(options: RunOptions, report: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:
    """Run every cell that is not done, and return one outcome a cell.

    Args:
        options: what to run.
        report: called with each outcome as soon as it is known.

    Raises:
        SpecError, UnknownPlugin: a spec cannot be read.
        ModelError: the model cannot be loaded.
        RecordError: a record in the way cannot be read, or the results cannot be written.
    """
    options = replace(options, model=canonical(options.model))
    cells = planned_cells(options)
    cache = cache_folder(options.cache)
    data = DataSource(options.data)
    weights = Weights(options, cache, data)
    if weights.saved is not None:
        options = of_saved(options, weights.saved)
        cells = planned_cells(options)
    store = SampleStore(cache)
    if options.dry_run:
        todo, done = pending_cells(cells, options, weights.identity, store)
        skipped = [Outcome(p.cell, r.state, p.cell.path(options.results), r, True) for p, r in done]
        planned = [Outcome(p.cell, "planned", p.cell.path(options.results), None, False) for p in todo]
        for outcome in skipped + planned:
            report(outcome)
        return skipped + planned
    tune_allocator()
    _check_writable(options.results)
    with Progressor(len(cells)) as progressor:
        weights.train(cells, progressor.work)
        todo, done = pending_cells(cells, options, weights.identity, store)
        check_places((planned.cell for planned in todo), options.results)
        run = _Run(options, cache, data, weights, store, progressor, report)
        for planned_cell, record in done:
            progressor.advance()
            path = planned_cell.cell.path(options.results)
            run.finish(Outcome(planned_cell.cell, record.state, path, record, True))
        for _, group in groupby(todo, key=lambda p: (p.cell.seed, p.cell.arm)):
            run.model_memo.clear()
            for _, same_model in groupby(list(group), key=lambda p: p.cell.quantizer):
                _run_group(run, list(same_model))
    return run.outcomes


def _check_writable(results: Path) -> None:
    """Find out before hours of work that the results cannot be stored."""
    try:
        results.mkdir(parents=True, exist_ok=True)
        # a file without a name of its own: another run may look into the same folder at the same time
        tempfile.TemporaryFile(dir=results).close()
    except OSError as error:
        raise RecordError(f"cannot write records to {str(results)!r}: {error}") from error


def _run_group(run: _Run, group: list[PlannedCell]) -> None:
    """All cells of one quantized model."""
    first = group[0]
    run.progressor.cell(f"{first.cell.quantizer}: loading")
    started = time.perf_counter()
    try:
        model = run.weights.load(first)
        calibration = _calibration(run, first, model)
        model = _quantized(first, model, calibration)
    except Exception as error:
        for planned in group:
            _store_failure(run, planned, error, time.perf_counter() - started)
        return
    prepare_took = time.perf_counter() - started
    pass_memo: dict[Any, Any] = {}
    for planned in list(group):
        try:
            planned.task.prepare(model, _context(run, planned, Probe.off(), pass_memo))
        except Exception as error:
            group.remove(planned)
            _store_failure(run, planned, error, time.perf_counter() - started)
    for planned in group:
        run.progressor.cell(f"{planned.cell.quantizer}: {planned.cell.task}")
        release_memory()
        run.memory.reset()
        started = time.perf_counter()
        try:
            probe = _probe(run, planned)
            context = _context(run, planned, probe, pass_memo)
            evaluation = planned.task.evaluate(model, context)
            probe.save()
            record = _measured(run, planned, model, calibration, evaluation)
        except Exception as error:
            _store_failure(run, planned, error, time.perf_counter() - started)
            continue
        _write(run, planned, record.with_cost(time.perf_counter() - started, run.memory.bytes(), prepare_took))


def _calibration(run: _Run, planned: PlannedCell, model: LanguageModel) -> Calibration:
    """The calibration that the quantizer asks for, the same for all quantizers of a model that ask for as much."""
    if model.recipe is not None:
        return calibration_of_recipe(model.recipe)
    wanted = planned.quantizer.calibration_sequences
    key = ("calibration", wanted, planned.cell.seed)
    if key not in run.model_memo:
        run.model_memo[key] = calibration_of(model, run.data, run.cache, wanted, planned.cell.seed)
    calibration: Calibration = run.model_memo[key]
    return calibration


def _quantized(planned: PlannedCell, model: LanguageModel, calibration: Calibration) -> LanguageModel:
    if model.recipe is None:
        model = quantize_with(planned.quantizer, model, calibration, planned.cell.seed)
    return _ready(model)


def _ready(model: LanguageModel) -> LanguageModel:
    """Ready to run; the keys of depth routers stay plain, and so a router folds them into its query."""
    folded = {site.path for site in model.layout.linears if site.role == "depth_key"}
    make_ready_(model.module, skip=folded)
    return model


def _context(run: _Run, planned: PlannedCell, probe: Probe, pass_memo: dict[Any, Any]) -> Context:
    return Context(
        data=run.data,
        cache=run.cache,
        probe=probe,
        batch_size=run.options.batch_size,
        seed=planned.cell.seed,
        model_memo=run.model_memo,
        pass_memo=pass_memo,
        progress=run.work,
    )


def _probe(run: _Run, planned: PlannedCell) -> Probe:
    """Collects the float model's distributions, or compares with them where they were collected."""
    twin = float_twin(planned)
    path = run.store.probe_path(sample_key(twin, run.weights.named(twin), None))
    if planned.cell.quantizer == "none":
        return Probe.collect(path)
    return Probe.compare(path) if Probe.sound(path) else Probe.off()


def _measured(
    run: _Run, planned: PlannedCell, model: LanguageModel, calibration: Calibration, evaluation: Evaluation
) -> Record:
    """Scores with intervals and differences; stores the samples first."""
    identity = model.identity
    key = sample_key(planned, identity, calibration.sha256)
    probed = planned.cell.quantizer == "none" and run.store.probe_path(key).is_file()
    ours = Samples(evaluation.samples, evaluation.data_sha256, probed, evaluation.convention)
    run.store.write(key, ours)
    references = references_of(planned, ours, run.store, run.weights.identity, calibration.sha256)
    if "delta" not in references and evaluation.measures and "none" not in run.options.quantizers:
        log.warning("%s has no difference to float: the cache has no answers of the quantizer none", planned.cell)
    return empty_record(run.options, planned, identity, "measured", None).with_results(
        scores=list(scores_of(evaluation, references, planned.cell.seed)),
        evaluation=evaluation,
        coverage=model.coverage,
        calibration=calibration,
    )


def _text(message: str) -> str:
    """A message that every file and log can hold: names of files may have bytes that are no text."""
    return message.encode(errors="backslashreplace").decode()


def _store_failure(run: _Run, planned: PlannedCell, error: Exception, took: float) -> None:
    """Record why a cell has no scores. A failed or blocked cell is tried again by the next run.

    A measured record of the same cell (under --force) stays: a failure must not cost a result.
    """
    state: State = "failed"
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, Blocked | NotApplicable):
        state = "blocked" if isinstance(error, Blocked) else "not_applicable"
        reason = str(error)
    reason = _text(reason)[:LONGEST_TEXT]
    if not isinstance(error, QuantBenchError):
        # our own errors say what is wrong; of others it matters where they come from
        log.error("%s failed:\n%s", planned.cell, _text("".join(traceback.format_exception(error))))
    record = empty_record(run.options, planned, run.weights.named(planned), state, reason)
    record = record.with_cost(took, run.memory.bytes())
    if has_result(planned, run.options, run.weights.identity(planned)):
        run.finish(Outcome(planned.cell, state, planned.cell.path(run.options.results), record, False))
    else:
        _write(run, planned, record)


def _write(run: _Run, planned: PlannedCell, record: Record) -> None:
    try:
        path = record.write(run.options.results)
    except OSError as error:
        raise RecordError(f"cannot write the record of {planned.cell}: {error}") from error
    run.progressor.advance()
    run.finish(Outcome(planned.cell, record.state, path, record, False))
