"""Plan: options -> the cells that they name, and which of them are done already."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import quant_bench
from quant_bench import registry
from quant_bench.arm import Arm
from quant_bench.cell import BASELINE_ARM, require_device, require_seed
from quant_bench.errors import RecordError, SpecError
from quant_bench.identity import ModelIdentity
from quant_bench.probe import Probe
from quant_bench.quantizer import Quantizer
from quant_bench.record import Cell, Record
from quant_bench.samples import SampleStore, key_of
from quant_bench.task import Task

# the fields of a score that compare its cell with another
Difference = Literal["delta", "arm_delta"]

DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_TASKS = ("wikitext2", "outliers", "parity")


@dataclass(frozen=True)
class RunOptions:
    """What `quant-bench run` was asked to do.

    Attributes:
        model: alias, hub id, folder (of a float model, or written by `quant-bench quantize`), GGUF file,
            `pypi:PACKAGE==VERSION` or `tier:NAME`.
        arms: arm specs.
        quantizers: quantizer specs or scheme shorthands.
        tasks: task specs.
        seeds: one cell each.
        limit: first so many items of every task that states none of its own.
        batch_size: sequences generated side by side, or `auto`; never changes a score.
        seq_length: tokens a window, for every task that has such a setting.
        dtype: of the float parts.
        device: torch device.
        data: offline mirror, or None for `QUANT_BENCH_DATA` or the hub.
        results: where records lie.
        cache: what may be thrown away; None for the user's cache folder.
        dry_run: only say what would run.
        force: measure again what is done.
        trust_remote_code: allow code that comes with a model; stored in the record.
        revision: hub revision.

    Raises:
        SpecError: a value that none of these can have.
    """

    model: str
    arms: tuple[str, ...] = ("softmax",)
    quantizers: tuple[str, ...] = ("none",)
    tasks: tuple[str, ...] = DEFAULT_TASKS
    seeds: tuple[int, ...] = (0,)
    limit: int | None = None
    batch_size: int | Literal["auto"] = "auto"
    seq_length: int | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"
    data: Path | None = None
    results: Path = Path("results")
    cache: Path | None = None
    dry_run: bool = False
    force: bool = False
    trust_remote_code: bool = False
    revision: str | None = None

    def __post_init__(self) -> None:
        numbers = {
            "limit": (self.limit, 1, None),
            "batch_size": (self.batch_size, 1, "auto"),
            "seq_length": (self.seq_length, 2, None),
        }
        for name, (value, least, default) in numbers.items():
            if value != default and not (type(value) is int and value >= least):
                raise SpecError(f"{name} is {default} or a whole number from {least}; got {value!r}")
        if self.dtype not in DTYPES:
            raise SpecError(f"dtype is one of {', '.join(DTYPES)}; got {self.dtype!r}")
        require_device(self.device)
        for seed in self.seeds:
            require_seed(seed)


@dataclass(frozen=True)
class PlannedCell:
    """A cell with the objects that it names."""

    cell: Cell
    arm: Arm
    quantizer: Quantizer
    task: Task

    def versions(self) -> dict[str, Any]:
        """Versions that a finished record must carry to count as done."""
        return {
            "arm": self.arm.version,
            "quantizer": self.quantizer.version,
            "task": self.task.version,
            "quant_bench": quant_bench.__version__,
        }


def model_name(options: RunOptions) -> str:
    """The model's part of a cell: its name, then what else changes its numbers."""
    name = options.model if options.revision is None else f"{options.model}@{options.revision}"
    return name if options.dtype == "float32" else f"{name} {options.dtype}"


def planned_cells(options: RunOptions) -> list[PlannedCell]:
    """Every cell of the product; softmax and the float model first, so that later cells can be compared with them."""
    arms = _unique(registry.build("arms", text) for text in options.arms)
    arms.sort(key=lambda arm: registry.canonical("arms", arm) != BASELINE_ARM)
    quantizers = _unique(registry.build("quantizers", text) for text in options.quantizers)
    quantizers.sort(key=lambda quantizer: registry.canonical("quantizers", quantizer) != "none")
    tasks = _unique(_with_limits(registry.build("tasks", text), options) for text in options.tasks)
    planned = []
    for seed in _unique(options.seeds):
        for arm in arms:
            for quantizer in quantizers:
                for task in tasks:
                    cell = Cell(
                        model=model_name(options),
                        arm=registry.canonical("arms", arm),
                        quantizer=registry.canonical("quantizers", quantizer),
                        task=registry.canonical("tasks", task),
                        seed=seed,
                    )
                    planned.append(PlannedCell(cell, arm, quantizer, task))
    if not planned:
        raise SpecError("nothing to run: name at least one arm, quantizer, task and seed")
    return planned


def _unique(given: Any) -> list[Any]:
    """Without repetitions (`w8a8` and `rtn` are one quantizer), in the order given."""
    return list(dict.fromkeys(given))


def _with_limits(task: Task, options: RunOptions) -> Task:
    """The task with the run's limit and sequence length where it states none itself."""
    changes: dict[str, Any] = {}
    names = {field.name for field in fields(task)}
    if options.limit is not None and task.limit is None:
        changes["limit"] = options.limit
    if options.seq_length is not None and "seq_length" in names and getattr(task, "seq_length") is None:  # noqa: B009
        changes["seq_length"] = options.seq_length
    return replace(task, **changes)


def finished(planned: PlannedCell, options: RunOptions, identity: ModelIdentity | None) -> Record | None:
    """The record of a cell that needs no more work, or None.

    `failed` and `blocked` cells are tried again; so is a cell of other weights (if it is known which they are now),
    tokenizer or plugin versions: its name is the same, its numbers are not.
    """
    path = planned.cell.path(options.results)
    if options.force or not path.is_file():
        return None
    record = Record.read(path, options.results)
    if record.state not in ("measured", "not_applicable"):
        return None
    digests = ("weights_sha256", "tokenizer_sha256", "quantized_sha256")
    if identity is not None and any(record.identity.get(name) != getattr(identity, name) for name in digests):
        return None
    return record if all(record.versions.get(key) == value for key, value in planned.versions().items()) else None


def has_result(planned: PlannedCell, options: RunOptions, identity: ModelIdentity | None) -> bool:
    """Whether a cell has a record that a failure must not cost, under `force` too; what cannot be read is none."""
    try:
        return finished(planned, replace(options, force=False), identity) is not None
    except RecordError:
        return False


def sample_key(planned: PlannedCell, identity: ModelIdentity, calibration_sha256: str | None) -> str:
    """Key of a cell's samples; see `samples.key_of`."""
    return key_of(vars(planned.cell), vars(identity), planned.versions(), calibration_sha256)


def float_twin(planned: PlannedCell) -> PlannedCell:
    """The cell of the same model, arm, task and seed without quantization."""
    twin = replace(planned.cell, quantizer="none")
    return PlannedCell(twin, planned.arm, registry.build("quantizers", "none"), planned.task)


def arm_twin(planned: PlannedCell) -> PlannedCell:
    """The cell of the same model, quantizer, task and seed with softmax attention."""
    twin = replace(planned.cell, arm=BASELINE_ARM)
    return PlannedCell(twin, registry.build("arms", BASELINE_ARM), planned.quantizer, planned.task)


def twins(planned: PlannedCell) -> dict[Difference, PlannedCell]:
    """The cells that a cell is compared with: not itself, so the float cell with softmax has none."""
    found: dict[Difference, PlannedCell] = {"delta": float_twin(planned), "arm_delta": arm_twin(planned)}
    return {difference: twin for difference, twin in found.items() if twin.cell != planned.cell}


def pending_cells(
    cells: list[PlannedCell],
    options: RunOptions,
    identity: Callable[[PlannedCell], ModelIdentity | None],
    store: SampleStore,
) -> tuple[list[PlannedCell], list[tuple[PlannedCell, Record]]]:
    """Cells to run and cells that are done; a cell whose weights do not exist yet (identity None) is to run.

    A finished float or softmax cell whose samples or distributions are gone or damaged runs again when a cell to run
    would be compared with it, and a finished cell without differences runs again beside its float or softmax cell: a
    missing reference must never turn into a missing difference without anybody having asked for that.
    """
    done: list[tuple[PlannedCell, Record]] = []
    todo: list[PlannedCell] = []
    for planned in cells:
        weights = identity(planned)
        try:
            record = None if weights is None else finished(planned, options, weights)
        except RecordError as error:
            raise RecordError(f"{error}; move it away or use --force to measure the cell again") from error
        if record is None:
            todo.append(planned)
        else:
            done.append((planned, record))
    references: dict[Cell, Record | None] = {planned.cell: None for planned in todo}
    references |= {planned.cell: record for planned, record in done}
    for planned, record in list(done):
        compared = [(kind, twin.cell) for kind, twin in twins(planned).items() if twin.cell in references]
        if any(_lacks_difference(kind, record, references[twin]) for kind, twin in compared):
            done.remove((planned, record))
            todo.append(planned)
    # a cell that runs again only to be compared with may itself be compared with another
    looked_at = 0
    while looked_at < len(todo):
        wanted = {twin.cell for planned in todo[looked_at:] for twin in twins(planned).values()}
        looked_at = len(todo)
        for planned, record in list(done):
            weights = identity(planned)
            assert weights is not None
            key = sample_key(planned, weights, record.identity.get("calibration_sha256"))
            if planned.cell in wanted and not _has_reference(record, key, store):
                done.remove((planned, record))
                todo.append(planned)
    order = {planned.cell: index for index, planned in enumerate(cells)}
    todo.sort(key=lambda planned: order[planned.cell])
    return todo, done


def _lacks_difference(difference: Difference, record: Record, reference: Record | None) -> bool:
    """Whether a cell was measured without what it is compared with, which is there now or (None) is about to be."""

    def means(of: Record) -> set[str]:
        return {score.metric.name for score in of.scores if score.metric.reduction != "none"}

    if not means(record) or any(getattr(score, difference) is not None for score in record.scores):
        return False
    if reference is None:
        return True
    # two arms of one quantizer saw the same calibration, or they are not compared; the float model saw none
    same = ("data_sha256",) if difference == "delta" else ("data_sha256", "calibration_sha256")
    comparable = all(record.identity.get(key) == reference.identity.get(key) for key in same)
    comparable = comparable and record.convention == reference.convention
    return comparable and bool(means(record) & means(reference))


def _has_reference(record: Record, key: str, store: SampleStore) -> bool:
    """Whether what other cells are compared with is still there, for a finished cell."""
    if record.state != "measured":
        return True
    samples = store.read(key)
    return samples is not None and (not samples.probed or Probe.sound(store.probe_path(key)))
