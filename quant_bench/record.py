"""Records: one JSON file a cell, its path made from its content; knows no torch."""

import dataclasses
import gc
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, Protocol, runtime_checkable

from quant_bench.cache import write_atomically
from quant_bench.cell import Cell as Cell
from quant_bench.errors import RecordError
from quant_bench.record_json import SCHEMA_VERSION, dumped, looks_right, parsed, plain, refuse, validate
from quant_bench.score import Delta, Metric, Score

State = Literal["measured", "failed", "blocked", "not_applicable"]
# the largest of ours, with statistics of every tensor of a large model, stay below one
LARGEST_BYTES: Final = 16 << 20


@runtime_checkable
class Evaluated(Protocol):
    """What a record takes over from a task's `Evaluation`."""

    data_sha256: str
    convention: str
    details: dict[str, Any]
    settings: dict[str, Any]


@dataclass(frozen=True)
class Record:
    """One cell's result, or why there is none. docs/record.md describes every field of the file.

    Attributes:
        state: `measured`, `failed`, `blocked` (something is missing) or `not_applicable`.
        reason: why there are no scores; None when measured.
        cell: which cell.
        settings: settings in force, defaults included, by `model`, `arm`, `quantizer`, `task`, `resolved` and
            `calibration`.
        versions: of the plugins (`arm`, `quantizer`, `task`), the suite and what it stands on.
        identity: digests `weights_sha256`, `tokenizer_sha256`, `data_sha256`, `calibration_sha256` (None where there
            is none) and what else says which model it is.
        environment: machine, kernel, threads, commit.
        convention: what must agree before two numbers may stand in one column; None without scores.
        coverage: which weight matrices were quantized; None without scores.
        scores: in the task's order.
        details: tables that are no scores.
        took_seconds: for the task.
        prepare_seconds: for loading and quantizing the model, shared by the cells of one quantized model.
        peak_memory_bytes: highest resident memory while the task ran, or None.
    """

    state: State
    reason: str | None
    cell: Cell
    settings: Mapping[str, Any]
    versions: Mapping[str, str | int | None]
    identity: Mapping[str, Any]
    environment: Mapping[str, Any] = field(default_factory=dict)
    convention: str | None = None
    coverage: Mapping[str, Any] | None = None
    scores: tuple[Score, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    took_seconds: float = 0.0
    prepare_seconds: float = 0.0
    peak_memory_bytes: int | None = None

    def with_results(
        self, *, scores: Sequence[Score], evaluation: Evaluated, coverage: Any, calibration: Any
    ) -> "Record":
        """This record with what a task found.

        Args:
            scores: with intervals and differences.
            evaluation: the task's `Evaluation`.
            coverage: the quantized model's `Coverage`.
            calibration: the `Calibration` that the quantizer was given.

        Raises:
            RecordError: a number is not finite: strict JSON has no NaN, and a leaderboard no use for one.
        """
        resolved = {
            "resolved": evaluation.settings,
            "calibration": {key: getattr(calibration, key) for key in ("description", "usable", "wanted")},
        }
        digests = {"data_sha256": evaluation.data_sha256, "calibration_sha256": calibration.sha256}
        record = dataclasses.replace(
            self,
            scores=tuple(scores),
            convention=evaluation.convention,
            details=evaluation.details,
            coverage=dataclasses.asdict(coverage),
            settings={**self.settings, **resolved},
            identity={**self.identity, **digests},
        )
        record.to_text()
        return record

    def with_cost(self, took_seconds: float, peak_memory_bytes: int | None, prepare_seconds: float = 0.0) -> "Record":
        """This record with what it cost."""
        return dataclasses.replace(
            self, took_seconds=took_seconds, peak_memory_bytes=peak_memory_bytes, prepare_seconds=prepare_seconds
        )

    def to_text(self) -> str:
        """The file's content: strict JSON, keys sorted, one space of indent, final newline.

        Raises:
            RecordError: a value has no place in strict JSON, the content breaks the schema, or no reader would take it.
        """
        document = plain(self._document())
        validate(document)
        if not looks_right(document):
            refuse(document)
        return dumped(document)

    @classmethod
    def from_text(cls, text: str | bytes) -> "Record":
        """The record that `to_text` wrote, as text or as the bytes of a file.

        Raises:
            RecordError: the text is no record; the message says where.
        """
        document = parsed(text)
        # the whole schema takes milliseconds a record; what a reader relies on is checked at once, and only what looks
        # wrong is taken to the schema, whose messages are better
        if not looks_right(document):
            refuse(document)
        given = {key: value for key, value in document.items() if key != "schema"}
        given["cell"] = Cell(**given["cell"])
        given["scores"] = tuple(_score(score) for score in given["scores"])
        return cls(**given)

    def write(self, root: Path) -> Path:
        """Write the record where its cell belongs, as a whole or not at all, and return the path.

        Raises:
            RecordError: the content is no valid record.
            OSError: the folder cannot be written.
        """
        text = self.to_text()
        path = self.cell.path(root)
        write_atomically(path, text.encode("ascii"))
        if os.name == "posix":
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        return path

    @classmethod
    def read(cls, path: Path, root: Path | None = None) -> "Record":
        """Read one record.

        Args:
            path: of the file.
            root: folder of all records; None checks the last four parts of the path only.

        Raises:
            RecordError: the file is no record, or does not lie where its content says; the message names it.
        """
        try:
            _check_file(path)
            record = cls.from_text(path.read_bytes())
        except (RecordError, OSError) as error:
            raise RecordError(f"{path}: {error}") from error
        belongs = record.cell.parts()
        lies = path.parts[-4:] if root is None else path.parts[len(root.parts) :]
        if lies != belongs:
            raise RecordError(f"{path}: its content says that it lies at {'/'.join(belongs)}")
        return record

    def _document(self) -> dict[str, Any]:
        document = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        document["schema"] = SCHEMA_VERSION
        document["cell"] = dataclasses.asdict(self.cell)
        document["scores"] = [_score_document(score) for score in self.scores]
        return document


@dataclass(frozen=True)
class Store:
    """Every record under a folder, in order of path, and every file that is none."""

    records: tuple[Record, ...]
    problems: tuple[RecordError, ...]

    @classmethod
    def read(cls, root: Path) -> "Store":
        """Read a folder; a file that is no record becomes a problem that names it, and the others are read.

        So does a folder that cannot be read, and one that is a link. Files beside the models' folders
        (`LEADERBOARD.md`) and hidden files (left by a killed process) are no records.
        """
        records, problems, unread = [], [], list[OSError]()
        with uncollected():
            for path in files_below(root, unread):
                if any(part.startswith(".") for part in path.parts[len(root.parts) :]):
                    continue
                try:
                    records.append(Record.read(path, root))
                except RecordError as error:
                    problems.append(error)
        problems += [RecordError(f"{error.filename}: {error.strerror}") for error in unread]
        return cls(tuple(records), tuple(problems))

    def valid(self) -> tuple[Record, ...]:
        """The records, when there is no problem.

        Raises:
            RecordError: a file is no record; the message names every one.
        """
        if self.problems:
            raise RecordError("\n".join(str(problem) for problem in self.problems))
        return self.records


def _check_file(path: Path) -> None:
    """Refuse what would take all memory, or wait for ever (a pipe), before it is opened."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise RecordError("it is no regular file")
    if found.st_size > LARGEST_BYTES:
        raise RecordError(f"its {found.st_size:,} bytes are more than the {LARGEST_BYTES:,} that a record may have")


@contextmanager
def uncollected() -> Iterator[None]:
    """Neither records nor tables of them hold cycles, and to look for some takes a fifth of the time of making them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def files_below(root: Path, unread: list[OSError]) -> Iterator[Path]:
    """Files in the models' folders, hidden ones too, and links that are no files; files beside them are not ours.

    Args:
        root: folder of all records; what is hidden in it (`.git`) is not ours.
        unread: gets the errors of folders that cannot be read: what lies in them must not be taken for absent.
    """
    # not os.walk: it asks the disk of each folder whether it is a link, which reading its parent has already said
    waiting = [root] if root.is_dir() else []
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                inside = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            unread.append(error)
            continue
        if folder == root:
            inside = [one for one in inside if one.name[0] != "." and not os.path.isfile(one)]  # noqa: PTH113 - never raises
        folders = [entry for entry in inside if entry.is_dir(follow_symlinks=False)]
        yield from (Path(entry) for entry in inside if not entry.is_dir(follow_symlinks=False))
        waiting += (Path(entry) for entry in reversed(folders))


def _score_document(score: Score) -> dict[str, Any]:
    document = {f.name: getattr(score, f.name) for f in dataclasses.fields(score) if f.name != "metric"}
    metric = dataclasses.asdict(score.metric)
    document["delta"] = None if score.delta is None else dataclasses.asdict(score.delta)
    # absent where there is none: records from before there were arms keep their bytes
    document.pop("arm_delta")
    if score.arm_delta is not None:
        document["arm_delta"] = dataclasses.asdict(score.arm_delta)
    return {"metric": metric.pop("name"), **metric, **document}


def _score(document: dict[str, Any]) -> Score:
    meaning = (document["metric"], document["unit"], document["better"], document["reduction"], document["chance"])
    delta, arm_delta = _delta(document["delta"]), _delta(document.get("arm_delta"))
    numbers = (document["value"], document["stderr"], _pair(document["ci95"]), document["n"])
    return Score(_metric(repr(document["chance"]), *meaning), *numbers, delta, arm_delta)


@lru_cache
def _metric(_chance: str, *meaning: Any) -> Metric:
    """A metric; thousands of records share a few. Equal chances are apart where they are written differently."""
    return Metric(*meaning)


def _delta(document: dict[str, Any] | None) -> Delta | None:
    if document is None:
        return None
    return Delta(document["value"], _pair(document["ci95"]), document["reference"], document["p_value"])


def _pair(interval: list[float] | None) -> tuple[float, float] | None:
    return None if interval is None else (interval[0], interval[1])
