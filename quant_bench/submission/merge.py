"""Two trees of records -> one that has what either has; what both have differently is named."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from quant_bench import report
from quant_bench.cache import folder_made_whole, write_atomically
from quant_bench.errors import RecordError, SpecError
from quant_bench.record import Record
from quant_bench.submission.check import Tree

Preferred = Literal["a", "b"]


@dataclass(frozen=True)
class Merged:
    """What became of two trees.

    Attributes:
        records: how many there are now.
        from_first: that only the first had.
        from_second: that only the second had.
        conflicts: paths that both had with different content, each with what differs.
    """

    records: int
    from_first: int
    from_second: int
    conflicts: tuple[str, ...]


def merge(first: Path, second: Path, out: Path, prefer: Preferred | None = None) -> Merged:
    """Write both trees' records and a leaderboard made of them into a new folder, as a whole or not at all.

    Args:
        first: a folder of records.
        second: another.
        out: does not exist yet, or is empty.
        prefer: which of the two decides where both have a record of one cell with different content; None refuses.

    Raises:
        RecordError: a file in one of the folders is no record, or both have a record that `prefer` does not decide
            about; the message names every one. Or `out` holds something.
        SpecError: `out` lies in one of the folders, where its records would not lie where their content says.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecordError(f"{out} exists and is not empty: nothing was merged")
    for root in (first, second):
        if root.resolve() in (out.resolve(), *out.resolve().parents):
            raise SpecError(f"{out} lies in {root}: name a folder outside of both")
    ours, theirs = Tree.read(first), Tree.read(second)
    problems = [
        f"{root / one.path}: {one.what}" for root, tree in ((first, ours), (second, theirs)) for one in tree.problems
    ]
    if problems:
        raise RecordError("\n".join(problems))
    both = ours.texts.keys() & theirs.texts.keys()
    conflicts = tuple(
        f"{name}: {_difference(ours.records[name], theirs.records[name])}"
        for name in sorted(both)
        if ours.texts[name] != theirs.texts[name]
    )
    if conflicts and prefer is None:
        raise RecordError(
            "\n".join([*conflicts, "both have these cells: say by --prefer a or --prefer b which to keep"])
        )
    texts = {**ours.texts, **theirs.texts} if prefer == "b" else {**theirs.texts, **ours.texts}
    with folder_made_whole(out, only=True) as work:
        for name, content in texts.items():
            path = work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        # the leaderboard alone: a README beside the new folder is no part of it
        write_atomically(work / report.FILE, report.rendered(report.leaderboard(work), "markdown").encode())
    return Merged(len(texts), len(ours.texts.keys() - both), len(theirs.texts.keys() - both), conflicts)


def _difference(ours: Record, theirs: Record) -> str:
    """What a reader needs to know to decide."""
    if ours.state != theirs.state:
        return f"{ours.state} and {theirs.state}"
    values = {score.metric.name: score.value for score in theirs.scores}
    apart = [score for score in ours.scores if values.get(score.metric.name, score.value) != score.value]
    if apart:
        score = apart[0]
        return f"{score.metric.name} is {score.value!r} and {values[score.metric.name]!r}"
    others = [one.name for one in fields(Record) if getattr(ours, one.name) != getattr(theirs, one.name)]
    what = " and ".join(others) or "bytes"
    return f"the same values, but other {what}" if ours.scores else f"other {what}"
