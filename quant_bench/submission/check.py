"""Whether a tree of records may be taken over: what a results repository's CI asks of every change."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quant_bench import registry
from quant_bench.errors import RecordError
from quant_bench.record import Record, files_below
from quant_bench.record_json import parsed, validate
from quant_bench.score import Score
from quant_bench.submission.plausible import implausible, inconsistent

TOLERANCE: Final = 1e-6
_EXPLAINING: Final = ("weights", "tokenizer", "data", "calibration", "training")
_KINDS: Final[Mapping[str, registry.Kind]] = {"arm": "arms", "quantizer": "quantizers", "task": "tasks"}


@dataclass(frozen=True)
class Problem:
    """What speaks against a file.

    Attributes:
        path: of the file, below the tree.
        what: is wrong.
    """

    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


@dataclass(frozen=True)
class Tree:
    """The records under a folder by their path below it, and the files that are none."""

    records: Mapping[str, Record]
    texts: Mapping[str, bytes]
    problems: tuple[Problem, ...]

    @classmethod
    def read(cls, root: Path) -> "Tree":
        """Read every file of the models' folders. What is no regular file of a record is a problem, links too."""
        records: dict[str, Record] = {}
        texts: dict[str, bytes] = {}
        problems: list[Problem] = []
        unread: list[OSError] = []
        for path in files_below(root, unread):
            name = path.relative_to(root).as_posix()
            try:
                if path.is_symlink():
                    raise RecordError("it is a link")
                record = Record.read(path, root)
                texts[name] = path.read_bytes()
                validate(parsed(texts[name].decode()))
                records[name] = record
            except (RecordError, OSError) as error:
                problems.append(Problem(name, str(error).removeprefix(f"{path}: ")))
        problems += [Problem(Path(one.filename).relative_to(root).as_posix(), str(one.strerror)) for one in unread]
        return cls(records, texts, tuple(problems))


def check(tree: Tree, base: Tree | None = None, tolerance: float = TOLERANCE) -> list[Problem]:
    """Every reason not to take over a tree of records, in order of path; none when it is sound.

    Records that are the same in `base` have been checked when they got there: their plugins may have moved on since.

    Args:
        tree: what is submitted, as a whole: with what was there before.
        base: what was there before.
        tolerance: a measured value and what is said of it may differ from `base` by this share of the value. Above,
            the change must have a reason in the record: other versions of the plugins, or other digests.

    Raises:
        RecordError: `base` has files and no record among them: it is another folder than was meant.
    """
    if base is not None and base.problems and not base.records:
        raise RecordError(f"what was there before has no record, and files that are none, such as {base.problems[0]}")
    found = list(tree.problems)
    cells = {record.cell: record for record in tree.records.values()}
    for name, record in tree.records.items():
        if base is not None and tree.texts[name] == base.texts.get(name):
            continue
        if not _as_written(record, tree.texts[name]):
            found.append(Problem(name, "it is not written as quant-bench writes records (keys sorted, one indent)"))
        found += [Problem(name, what) for what in implausible(record, cells)]
        found += [Problem(name, what) for what in _plugins(record)]
    found += [Problem(cell.path(Path()).as_posix(), what) for cell, what in inconsistent(cells)]
    if base is not None:
        found += _changes(tree, base, tolerance)
    return sorted(found, key=lambda problem: (problem.path, problem.what))


def _as_written(record: Record, text: bytes) -> bool:
    try:
        return record.to_text().encode() == text
    except RecordError:
        # nested so deeply that it can just be read
        return False


def _plugins(record: Record) -> Iterator[str]:
    """What this version of the suite does not know of a record's plugins."""
    for part, kind in _KINDS.items():
        text, stored = getattr(record.cell, part), record.settings[part]
        try:
            plugin: Any = registry.build(kind, text)
        except Exception as error:
            # settings from elsewhere may make a plugin raise anything
            yield f"{part}: {str(error) or type(error).__name__}"
            continue
        if registry.canonical(kind, plugin) != text:
            yield f"{part} {text!r} is written {registry.canonical(kind, plugin)!r}"
        if record.versions[part] != plugin.version:
            yield f"{part} {text!r} has version {plugin.version} here; the record is of {record.versions[part]}"
        elif registry.settings(plugin) != stored:
            yield f"settings.{part} are not those of {text!r}"


def _changes(tree: Tree, base: Tree, tolerance: float) -> Iterator[Problem]:
    for name, before in base.records.items():
        after = tree.records.get(name)
        if after is None:
            broken = any(problem.path == name for problem in tree.problems)
            yield Problem(name, "it was a record and is none any more" if broken else "it was deleted")
        elif before.state == "measured" and tree.texts[name] != base.texts[name]:
            yield from (Problem(name, what) for what in _changed(before, after, tolerance))


def _changed(before: Record, after: Record, tolerance: float) -> Iterator[str]:
    """What a measured record lost, and numbers that changed without a reason in the record."""
    if after.state != "measured":
        yield f"it was measured and is {after.state}"
        return
    scores = {score.metric.name: score for score in after.scores}
    explained = _circumstances(before) != _circumstances(after)
    for score in before.scores:
        name = score.metric.name
        if name not in scores:
            yield f"{name} is gone"
        elif not explained:
            for what, was, now in _apart(score, scores[name], tolerance):
                yield f"{name}{what} was {was!r} and is {now!r}, with the same versions and digests"
    if not explained:
        for what, was in _stored(before).items():
            now = _stored(after)[what]
            if was is not None and was != now:
                yield f"coverage.{what} was {was!r} and is {now!r}, with the same versions and digests"


def _apart(before: Score, after: Score, tolerance: float) -> Iterator[tuple[str, object, object]]:
    """The first number of a score that is not what it was; one that was not there may be."""
    if before.metric != after.metric:
        yield "", before.metric, after.metric
        return
    size = tolerance * max(abs(before.value), before.metric.unit == "share")
    numbers = _numbers(after)
    for what, (was, drawn) in _numbers(before).items():
        now, _ = numbers.get(what, (None, 0.0))
        if was is not None and (now is None or not math.isclose(was, now, rel_tol=tolerance, abs_tol=size + drawn)):
            yield what, was, now
            return


def _numbers(score: Score) -> dict[str, tuple[float | None, float]]:
    """All numbers of a score by what they are, the value without a name, and how far another draw may move each."""
    differences = ((" delta", score.delta), (" arm_delta", score.arm_delta))
    found: dict[str, tuple[float | None, float]] = {"": (score.value, 0.0), " n": (score.n, 0.0)}
    found[" stderr"] = score.stderr, 0.0
    for name, delta in differences:
        if delta is not None:
            found |= {name: (delta.value, 0.0), f"{name} p_value": (delta.p_value, 0.0)}
    for name, one in (("", score), *differences):
        if one is not None and one.ci95 is not None:
            low, high = one.ci95
            # other resamples move an end by about a hundredth of the width
            drawn = (high - low) / 20
            found |= {f"{name} low": (low, drawn), f"{name} high": (high, drawn)}
    return found


def _stored(record: Record) -> dict[str, object]:
    """Numbers of the coverage."""
    return {name: (record.coverage or {}).get(name) for name in ("mac_share", "weight_bytes", "float_bytes")}


def _circumstances(record: Record) -> tuple[object, ...]:
    # these alone: a digest of no known thing would be a reason for anything
    digests = [record.identity.get(f"{name}_sha256") for name in _EXPLAINING]
    return record.convention, [record.versions[part] for part in _KINDS], digests
