"""From what a task found to what a record holds."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from quant_bench import registry
from quant_bench.environment import environment, versions
from quant_bench.identity import ModelIdentity
from quant_bench.plan import PlannedCell, RunOptions
from quant_bench.record import Record, State
from quant_bench.samples import Samples
from quant_bench.score import Score
from quant_bench.statistics import delta_of, score_of
from quant_bench.task import Evaluation


def scores_of(evaluation: Evaluation, reference: Samples | None, seed: int) -> Iterator[Score]:
    """Scores with intervals, and with paired differences where the float cell answered the same items."""
    for plain in evaluation.plain:
        yield Score(plain.metric, plain.value, n=plain.n)
    for measure in evaluation.measures:
        score = score_of(measure, evaluation.samples, seed)
        if reference is not None and measure.column in reference.frame.columns:
            score = replace(score, delta=delta_of(measure, evaluation.samples, reference.frame, seed, "none"))
        yield score


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
    return Record(
        state=state,
        reason=reason,
        cell=planned.cell,
        settings=settings,
        versions={**versions(), **planned.versions()},
        identity=known,
        environment=environment(options.device),
    )
