"""From what a task found to what a record holds."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from quant_bench import registry
from quant_bench.cell import BASELINE_ARM
from quant_bench.environment import environment, versions
from quant_bench.identity import ModelIdentity
from quant_bench.plan import Difference, PlannedCell, RunOptions, sample_key, twins
from quant_bench.record import Record, State
from quant_bench.samples import Samples, SampleStore
from quant_bench.score import Score
from quant_bench.statistics import delta_of, score_of
from quant_bench.task import Evaluation

log = logging.getLogger(__name__)


def scores_of(evaluation: Evaluation, references: Mapping[Difference, Samples], seed: int) -> Iterator[Score]:
    """Scores with intervals, and with paired differences where another cell answered the same items.

    Args:
        evaluation: what the task found.
        references: samples of the float cell (`delta`) and of the cell with softmax attention (`arm_delta`).
        seed: of the resamples.
    """
    names: dict[Difference, str] = {"delta": "none", "arm_delta": BASELINE_ARM}
    for plain in evaluation.plain:
        yield Score(plain.metric, plain.value, n=plain.n)
    for measure in evaluation.measures:
        score = score_of(measure, evaluation.samples, seed)
        found = {
            difference: delta_of(measure, evaluation.samples, reference.frame, seed, names[difference])
            for difference, reference in references.items()
            if measure.column in reference.frame.columns
        }
        yield replace(score, delta=found.get("delta"), arm_delta=found.get("arm_delta"))


def empty_record(
    options: RunOptions, planned: PlannedCell, identity: ModelIdentity, state: State, reason: str | None
) -> Record:
    """A record without scores: everything that is known before a task has answered."""
    settings: dict[str, Any] = {
        "model": {
            "name": options.model,
            "dtype": options.dtype,
            "revision": options.revision,
            "trust_remote_code": options.trust_remote_code,
        },
        "arm": registry.settings(planned.arm),
        "quantizer": registry.settings(planned.quantizer),
        "task": registry.settings(planned.task),
    }
    known: dict[str, Any] = {
        "weights_sha256": identity.weights_sha256,
        "tokenizer_sha256": identity.tokenizer_sha256,
        "data_sha256": None,
        "calibration_sha256": None,
        "source": identity.source,
        "revision": identity.revision,
        "note": identity.note,
    }
    if identity.training_sha256 is not None:
        known["training_sha256"] = identity.training_sha256
    if identity.quantized_sha256 is not None:
        known["quantized_sha256"] = identity.quantized_sha256
    return Record(
        state=state,
        reason=reason,
        cell=planned.cell,
        settings=settings,
        versions={**versions(), **planned.versions()},
        identity=known,
        environment=environment(options.device),
    )


def references_of(
    planned: PlannedCell,
    ours: Samples,
    store: SampleStore,
    identity: Callable[[PlannedCell], ModelIdentity | None],
    calibration_sha256: str | None,
) -> dict[Difference, Samples]:
    """Samples of the cells that a cell is compared with, where the cache has them and they answer the same items.

    Args:
        planned: the cell.
        ours: its own samples.
        store: of samples.
        identity: of another cell's model, None where its weights do not exist.
        calibration_sha256: of what this cell's quantizer saw.
    """
    found: dict[Difference, Samples] = {}
    for difference, twin in twins(planned).items():
        # what the quantizer saw belongs to a cell: two arms are compared only where both were given the same
        seen = None if difference == "delta" else calibration_sha256
        other = identity(twin)
        reference = None if other is None else store.read(sample_key(twin, other, seen))
        if reference is not None and ours.same_items(reference):
            found[difference] = reference
        elif reference is not None:
            log.warning("%s: %s answered other items; no difference is given", planned.cell.task, twin.cell)
    return found
