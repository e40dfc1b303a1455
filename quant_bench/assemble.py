"""From what a task found to what a record holds."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from quant_bench import registry
from quant_bench.cell import BASELINE_ARM
from quant_bench.environment import environment, versions
from quant_bench.identity import ModelIdentity
from quant_bench.plan import Difference, PlannedCell, RunOptions
from quant_bench.record import Record, State
from quant_bench.samples import Samples
from quant_bench.score import Score
from quant_bench.statistics import delta_of, score_of
from quant_bench.task import Evaluation


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
