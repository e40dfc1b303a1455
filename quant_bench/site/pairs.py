"""Paired differences of any two rows of a model: over seeds from the records, over items from answers in the cache."""

from collections.abc import Iterable, Iterator
from copy import copy
from itertools import combinations
from typing import Any, Final

from quant_bench.cell import BASELINE_ARM
from quant_bench.errors import DataError
from quant_bench.progress import Progressor
from quant_bench.record import Record
from quant_bench.report.compare import agree
from quant_bench.report.paired import Columns, Pair, answers, drawn_by
from quant_bench.report.rows import Together, parted
from quant_bench.report.text import visible
from quant_bench.samples import Samples, SampleStore
from quant_bench.score import Score
from quant_bench.site.board import Board, Row
from quant_bench.statistics import Resampled, spread_of

# rows of one column and model: pairs grow with their square, and so does the page
_MOST_ROWS: Final = 100

Keys = tuple[str, str]


def paired_rows(board: Board, store: SampleStore | None) -> list[dict[Keys, Together]]:
    """Difference of two rows, the first minus the second, in each column, wherever its 95 % interval can be known.

    Rows of several seeds have a Student interval over the differences of the seeds that both have. Rows of one seed, or
    with one in common, have a paired bootstrap interval over items, where the cache has the answers of both (or, of
    rows of several seeds with one in common, the record itself). More than 100 rows are left out.

    Args:
        board: rows and columns.
        store: answers of the cells; None for differences over seeds alone.
    """
    found: list[dict[Keys, Together]] = []
    with Progressor(len(board.columns)) as progress:
        for index, column in enumerate(board.columns):
            progress.cell(visible(column.question))
            pairs: dict[Keys, Together] = {}
            measured = [_Measured(board, row, index) for row in board.rows if _has_value(row, index)]
            answered = store if column.reduction != "none" else None
            for rows in parted(measured, lambda one: (one.row.model, one.n)).values():
                if len(rows) > _MOST_ROWS:
                    continue
                for alike in parted(rows, lambda one: one.seeds).values():
                    pairs |= _of_same_seeds(alike, answered)
                pairs |= _of_common_seeds(rows, answered)
            found.append(pairs)
            progress.advance()
    return found


def _has_value(row: Row, index: int) -> bool:
    return index in row.numbers and row.numbers[index].value is not None


class _Measured:
    """A row in one column, with the record of its first seed and the scores of all."""

    def __init__(self, board: Board, row: Row, index: int) -> None:
        number, column = row.numbers[index], board.columns[index]
        assert number.value is not None
        # the records of the number itself come first
        records = [board.records[path] for path in number.paths[: number.value.seeds]]
        by_seed = {record.cell.seed: (record, _score(record, column.metric)) for record in records}
        self.row, self.n = row, number.n
        self._keep(dict(sorted(by_seed.items())))

    def _keep(self, by_seed: dict[int, tuple[Record, Score]]) -> None:
        self.by_seed, self.seeds = by_seed, tuple(by_seed)
        self.record = by_seed[self.seeds[0]][0]
        self.scores = [score for _, score in by_seed.values()]

    def of(self, seeds: Iterable[int]) -> "_Measured":
        """The same row with some of its seeds."""
        fewer = copy(self)
        fewer._keep({seed: self.by_seed[seed] for seed in seeds})
        return fewer


def _score(record: Record, metric: str) -> Score:
    return next(score for score in record.scores if score.metric.name == metric)


def _couples(rows: list[_Measured]) -> Iterator[tuple[_Measured, _Measured]]:
    """Any two rows that `compare` would take, in its order of draws: what both have in common is of one version."""
    for first, second in combinations(sorted(rows, key=lambda one: drawn_by(one.record.cell)), 2):
        ours, theirs = first.record, second.record
        common = [kind for kind in ("arm", "quantizer") if getattr(ours.cell, kind) == getattr(theirs.cell, kind)]
        if all(ours.versions[kind] == theirs.versions[kind] for kind in common):
            yield first, second


def _of_same_seeds(rows: list[_Measured], store: SampleStore | None) -> dict[Keys, Together]:
    if len(rows[0].seeds) > 1:
        return dict(_over_seeds(rows))
    return {} if store is None else dict(_over_items(rows, store))


def _of_common_seeds(rows: list[_Measured], store: SampleStore | None) -> dict[Keys, Together]:
    """Pairs of rows that have other seeds, by those that both have."""
    found: dict[Keys, Together] = {}
    for first, second in _couples(rows):
        common = [seed for seed in first.seeds if seed in second.seeds]
        if not common or first.seeds == second.seeds:
            continue
        ours, theirs = first.of(common), second.of(common)
        known = _stored(ours, theirs) if len(common) == 1 else None
        found |= _of_same_seeds([ours, theirs], store) if known is None else {(first.row.key, second.row.key): known}
    return found


def _stored(ours: _Measured, theirs: _Measured) -> Together | None:
    """The difference of one seed that a record holds to what it is compared with, as `compare` takes it first."""
    cell, other = ours.record.cell, theirs.record.cell
    delta = None
    if cell.arm == other.arm and other.quantizer == "none":
        delta = ours.scores[0].delta
    elif cell.quantizer == other.quantizer and other.arm == BASELINE_ARM:
        delta = ours.scores[0].arm_delta
    if delta is None or delta.ci95 is None or not agree(delta.value, ours.scores[0], theirs.scores[0]):
        return None
    return Together(delta.value, *delta.ci95, 1)


def _over_seeds(rows: list[_Measured]) -> Iterator[tuple[Keys, Together]]:
    for first, second in _couples(rows):
        differences = [a.value - b.value for a, b in zip(first.scores, second.scores, strict=True)]
        spread = spread_of(differences)
        low, high = spread.ci95 or (None, None)
        yield (first.row.key, second.row.key), Together(spread.mean, low, high, spread.n)


def _over_items(rows: list[_Measured], store: SampleStore) -> Iterator[tuple[Keys, Together]]:
    held: dict[str, Samples | None] = {one.row.key: answers(one.record, store) for one in rows}
    drawn: dict[tuple[str, Columns], Resampled] = {}

    def resampled(one: _Measured, columns: Columns, samples: Samples) -> Resampled:
        key = (one.row.key, columns)
        if key not in drawn:
            drawn[key] = Resampled(columns, samples.frame, one.seeds[0])
        return drawn[key]

    for first, second in _couples(rows):
        ours, theirs = held[first.row.key], held[second.row.key]
        if ours is None or theirs is None or not ours.same_items(theirs):
            continue
        pair, scores = Pair(ours.frame, theirs.frame), (first.scores[0], second.scores[0])
        columns = pair.columns(*scores)
        if columns is None:
            continue
        try:
            delta = resampled(first, columns, ours).minus(resampled(second, columns, theirs), second.row.label)
        except DataError:
            # the same items in another order
            delta = pair.delta(columns, first.seeds[0], second.row.label)
        if delta.ci95 is not None:
            yield (first.row.key, second.row.key), Together(scores[0].value - scores[1].value, *delta.ci95, 1)


def pairs_data(found: list[dict[Keys, Together]]) -> list[dict[str, Any]]:
    """As JSON: by column, then by the keys of both rows."""
    return [
        {" ".join(keys): [pair.value, pair.low, pair.high, pair.seeds] for keys, pair in pairs.items()}
        for pairs in found
    ]
