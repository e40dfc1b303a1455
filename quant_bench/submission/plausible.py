"""What a record's numbers must be to be possible at all, alone and beside the cell that they are compared with."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from quant_bench.cell import BASELINE_ARM, Cell
from quant_bench.record import Record
from quant_bench.report.frame import TRAINED, asked
from quant_bench.score import Delta, Score

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_ROUNDING: Final = 1e-9
# an interval of 95 % is 2 · 1.96 standard errors wide where means are normal, and within this factor of it elsewhere
_NORMAL, _FACTOR = 3.92, 3.0
# lowest values of metrics by their name
_LOWEST: Final[Mapping[str, float]] = {"kl": 0.0, "bits_per_byte": 0.0}


def implausible(record: Record, others: Mapping[Cell, Record]) -> Iterator[str]:
    """What no measurement could have given.

    Args:
        record: which one.
        others: records by cell, among which the float cell and the cell with softmax are looked for.
    """
    for name, digest in record.identity.items():
        if name.endswith("_sha256") and digest is not None and not _DIGEST.fullmatch(str(digest)):
            yield f"identity.{name} is no sha256 in lower-case hexadecimal digits"
    cell = record.cell
    float_cell, softmax = others.get(replace(cell, quantizer="none")), others.get(replace(cell, arm=BASELINE_ARM))
    names: set[str] = set()
    for score in record.scores:
        name = score.metric.name
        if name in names:
            yield f"{name} stands twice"
        names.add(name)
        for problem in _of_score(score):
            yield f"{name}: {problem}"
        references = (("delta", score.delta, float_cell, "none"), ("arm_delta", score.arm_delta, softmax, BASELINE_ARM))
        for which, delta, other, expected in references:
            if delta is not None:
                for problem in _of_delta(score, delta, record, other, expected):
                    yield f"{name}: {which} {problem}"


def inconsistent(records: Mapping[Cell, Record]) -> Iterator[tuple[Cell, str]]:
    """Digests and meanings that differ within a model though their names say that they are of one thing.

    A model that is trained here has weights for each arm and seed, but one training.
    """
    seen: dict[tuple[object, ...], tuple[Cell, object]] = {}
    for cell, record in records.items():
        trained = cell.model.startswith(TRAINED)
        identity = record.identity
        one_each = {
            "weights_sha256": (cell.model, *((cell.arm, cell.seed) if trained else ())),
            "tokenizer_sha256": (cell.model,),
            "training_sha256": (cell.model,),
            "data_sha256": (cell.model, cell.task, record.versions["task"], record.convention),
            "calibration_sha256": (cell.model, json.dumps(record.settings.get("calibration"), sort_keys=True)),
        }
        said = [(f"identity.{name}", (name, *of), identity.get(name)) for name, of in one_each.items()]
        said.append(("settings.model.dtype", ("dtype", cell.model), record.settings.get("model", {}).get("dtype")))
        of_task = (cell.model, cell.task, record.versions["task"])
        said += [(f"what {one.metric.name} means", (*of_task, one.metric.name), one.metric) for one in record.scores]
        for name, of, content in said:
            if content is None:
                continue
            first, known = seen.setdefault(of, (cell, content))
            if known != content:
                yield cell, f"{name} is not that of {first.path(Path()).as_posix()}"


def _of_score(score: Score) -> Iterator[str]:
    metric, value = score.metric, score.value
    lowest = _LOWEST.get(metric.name, -math.inf)
    highest = math.inf
    if "perplexity" in metric.name and metric.reduction == "exp":
        lowest = 1.0
    elif metric.unit == "share" and metric.better != "neither":
        lowest, highest = 0.0, 1.0
    if not lowest - _ROUNDING <= value <= highest + _ROUNDING:
        yield f"{value!r} is not between {lowest:g} and {highest:g}"
    if score.n is not None and score.n < 1:
        yield f"n is {score.n}"
    if score.stderr is not None and score.stderr < 0:
        yield f"the standard error is {score.stderr!r}"
    if not _contains(score.ci95, value):
        yield f"its interval {list(score.ci95 or ())} does not contain {value!r}"
    if score.ci95 is not None and score.stderr is not None and metric.reduction != "none":
        low, high = score.ci95
        width, error = high - low, score.stderr
        if metric.reduction == "exp" and low > 0:
            # an exponential's interval is even in the logarithm
            width, error = math.log(high / low), error / value
        usual, rounding = _NORMAL * error, _ROUNDING * max(1.0, abs(value))
        if not usual / _FACTOR - rounding <= width <= usual * _FACTOR + rounding:
            yield f"its interval {list(score.ci95)} does not go with the standard error {score.stderr!r}"


def _of_delta(score: Score, delta: Delta, record: Record, other: Record | None, expected: str) -> Iterator[str]:
    if delta.reference != expected:
        yield f"is one to {delta.reference!r}, not to {expected!r}"
    if not _contains(delta.ci95, delta.value):
        yield f"interval {list(delta.ci95 or ())} does not contain {delta.value!r}"
    if delta.p_value is not None and not 0 <= delta.p_value <= 1:
        yield f"p value is {delta.p_value!r}"
    if other is None or other.state != "measured" or asked(other) != asked(record):
        return
    found = next((one for one in other.scores if one.metric.name == score.metric.name and one.n == score.n), None)
    if found is None:
        return
    difference = score.value - found.value
    rounding = _ROUNDING * max(abs(score.value), abs(found.value))
    if not math.isclose(delta.value, difference, rel_tol=_ROUNDING, abs_tol=rounding):
        yield f"is {delta.value!r}, but the records of the two cells differ by {difference!r}"


def _contains(interval: tuple[float, float] | None, value: float) -> bool:
    if interval is None:
        return True
    rounding = _ROUNDING * max(1.0, abs(value))
    return interval[0] - rounding <= value <= interval[1] + rounding
