"""Task `attention`: masses, read norms, sink rate, exposure and gates, from readings to scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from quant_bench.diagnostics.sequences import Sequences
from quant_bench.diagnostics.watch import AttentionWatch, Reading
from quant_bench.errors import SpecError
from quant_bench.model import LanguageModel
from quant_bench.score import Metric
from quant_bench.task import Context, Evaluation

Pooling = Literal["all", "sequence"]
Typical = Literal["median", "mean"]


@dataclass(frozen=True)
class AttentionSettings:
    """What no source fixes; every choice is stored with the result.

    Attributes:
        quiet: percentile of a head's read norms below which a read is quiet.
        pooling: over which reads of a head the percentile is taken: of all sequences, or of each one by itself.
        typical: what the first read's norm is divided by: median or mean of the others'.
        sink_threshold: mass above which a head counts as a sink.
        sink_length: queries, from the first on, over which `sink_rate` takes the mean.
    """

    quiet: float = 25.0
    pooling: Pooling = "all"
    typical: Typical = "median"
    sink_threshold: float = 0.3
    sink_length: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.quiet < 100:
            raise SpecError(f"quiet must lie between 0 and 100; got {self.quiet!r}")
        if not 0 < self.sink_threshold < 1:
            raise SpecError(f"sink_threshold must lie between 0 and 1; got {self.sink_threshold!r}")
        if self.sink_length < 1:
            raise SpecError(f"sink_length must be at least 1; got {self.sink_length!r}")


_UNITS = {
    "position0_mass": "share",
    "position0_mass_null": "share",
    "phantom_mass": "share",
    "missing_mass": "share",
    "sink_token_mass": "share",
    "sink_rate": "share",
    "sink_rate_context": "share",
    "phantom_rate": "share",
    "read_norm_ratio": "1",
    "read_norm_ratio_gated": "1",
    "exposure": "share",
    "exposure_gated": "share",
    "exposure_null": "share",
    "gate_mean": "share",
    "gate_min": "share",
    "gate_below_half": "share",
    "output_gate_mean": "share",
    "output_gate_min": "share",
    "output_gate_below_half": "share",
}
# descriptions: no value of them is good by itself
METRICS = {name: Metric(name, unit, "neither", "mean") for name, unit in _UNITS.items()}
_GATES = ("gate", "output_gate")


def attention(model: LanguageModel, context: Context, sequences: Sequences, settings: AttentionSettings) -> Evaluation:
    """Where attention weights go and how loud reads are; docs/diagnostics.md has every definition.

    A score is a mean over heads, layers and sequences (each counts the same), its interval one over sequences. Masses
    are means over queries of the weights as they enter the average of values; a quantized model's are its own rounded
    ones. `details` has the same numbers layer by layer.

    Raises:
        NotApplicable: the model's weights or reads cannot be seen.
        QuantizationError: a value is not finite.
    """
    rows: list[list[dict[str, float]]] = []
    norms, received, passed = _Kept(), _Kept(), _Kept()
    uniform: list[Tensor] = []
    beginnings: list[Tensor] = []
    length = min(settings.sink_length, sequences.ids.shape[1])
    with AttentionWatch(model) as watch:
        for index, ids in enumerate(sequences.ids):
            readings = watch.read(ids)
            rows.append([_row(reading, settings, length) for reading in readings])
            by_head = [reading.masses.first.mean(1) for reading in readings]
            beginnings = [a + b for a, b in zip(beginnings, by_head, strict=True)] if beginnings else by_head
            norms.add([reading.norms for reading in readings])
            received.add([_by_kv_head(reading) for reading in readings])
            if any(reading.gate is not None for reading in readings):
                passed.add([reading.passed for reading in readings])
            # sequences of one length without padding: the same for each
            uniform = [reading.uniform for reading in readings]
            context.progress(sequences.label, index + 1, len(sequences.ids))
    other: Pooling = "sequence" if settings.pooling == "all" else "all"
    for layer in range(len(model.layout.layers)):
        loud, mass = norms.of(layer), received.of(layer)
        gated = mass * passed.of(layer) if passed else mass
        shares = {"exposure": mass, "exposure_gated": gated, "exposure_null": uniform[layer].expand(mass.shape)}
        exposed = _on_quiet(loud, shares, settings.quiet, settings.pooling)
        exposed |= _on_quiet(loud, {f"exposure_pooling_{other}": mass}, settings.quiet, other)
        for name, values in exposed.items():
            for row, value in zip(rows, values, strict=True):
                row[layer][name] = float(value)
    evaluation = _evaluation(rows, sequences, length)
    for layer, total in zip(evaluation.details["layers"], beginnings, strict=True):
        # a row of the heat map of layers and heads
        layer["position0_mass_by_head"] = (total / len(rows)).tolist()
    return evaluation


class _Kept:
    """A float32 number for each read: (sequence, head, key) of each layer."""

    def __init__(self) -> None:
        self._layers: list[list[Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._layers)

    def add(self, parts: Sequence[Float[Tensor, "kv_head key"]]) -> None:
        self._layers = self._layers or [[] for _ in parts]
        for layer, part in zip(self._layers, parts, strict=True):
            layer.append(part.float())

    def of(self, layer: int) -> Float[Tensor, "item kv_head key"]:
        return torch.stack(self._layers[layer])


def _by_kv_head(reading: Reading) -> Float[Tensor, "kv_head key"]:
    """Mass on each read, the mean of the query heads that share it."""
    heads, keys = reading.norms.shape
    return reading.masses.received.view(heads, -1, keys).mean(1)


def _row(reading: Reading, settings: AttentionSettings, length: int) -> dict[str, float]:
    """Numbers of one layer and one sequence."""
    mass, typical = reading.masses, {"median": _median, "mean": _mean}
    row = {
        "position0_mass": float(mass.first.mean()),
        "position0_mass_null": float(reading.uniform[0]),
        "phantom_mass": float(mass.phantom.mean()),
        "missing_mass": float(mass.missing.mean()),
        "sink_rate": float((mass.first[:, :length].mean(1) > settings.sink_threshold).double().mean()),
        "sink_rate_context": float((mass.first.mean(1) > settings.sink_threshold).double().mean()),
        "phantom_rate": float((mass.phantom > settings.sink_threshold).double().mean()),
    }
    if mass.sink_token is not None and reading.sink_token_norms is not None:
        row["sink_token_mass"] = float(mass.sink_token.mean())
        row["sink_token_norm_ratio"] = _ratio(reading.sink_token_norms, reading.gated_norms[:, 1:], _median)
    for name, norms in (("read_norm_ratio", reading.norms), ("read_norm_ratio_gated", reading.gated_norms)):
        for kind, reduce in typical.items():
            key = name if kind == settings.typical else f"{name}_to_{kind}"
            row[key] = _ratio(norms[:, 0], norms[:, 1:], reduce)
    for name in _GATES:
        values = getattr(reading, name)
        if values is not None:
            row |= {f"{name}_mean": values.mean, f"{name}_below_half": values.below_half, f"{name}_min": values.least}
    return row


def _median(norms: Tensor) -> Tensor:
    # of an even count, the mean of the two in the middle
    return norms.double().quantile(0.5, dim=-1)


def _mean(norms: Tensor) -> Tensor:
    return norms.double().mean(-1)


def _ratio(
    one: Float[Tensor, " kv_head"], others: Float[Tensor, "kv_head key"], reduce: Callable[[Tensor], Tensor]
) -> float:
    """Mean over heads of a norm over the typical one; NaN where no head has a typical norm above 0."""
    if others.shape[1] == 0:
        return float("nan")
    typical = reduce(others)
    return float((one.double() / typical)[typical > 0].mean())


def quiet_reads(
    norms: Float[Tensor, "item kv_head key"], percentile: float, pooling: Pooling
) -> Bool[Tensor, "item kv_head key"]:
    """Reads whose norm lies below the percentile of their head's, pooled over all sequences or in each by itself."""
    axes = (0, 2) if pooling == "all" else (2,)
    limit = np.percentile(norms.double().numpy(), percentile, axis=axes, keepdims=True)
    return norms < torch.from_numpy(limit)


def _on_quiet(
    norms: Float[Tensor, "item kv_head key"], shares: dict[str, Tensor], percentile: float, pooling: Pooling
) -> dict[str, Float[Tensor, " item"]]:
    """Shares (of the shape of the norms) that fall on quiet reads, mean over heads."""
    quiet = quiet_reads(norms, percentile, pooling).double()
    return {name: (share.double() * quiet).sum(2).mean(1) for name, share in shares.items()}


def _evaluation(rows: list[list[dict[str, float]]], sequences: Sequences, length: int) -> Evaluation:
    """Scores from the numbers of each sequence and layer."""
    table = pd.concat([pd.DataFrame(layers).rename_axis("layer") for layers in rows], keys=range(len(rows)))
    frame = table.groupby(level=0).mean()
    metrics = {name: metric for name, metric in METRICS.items() if name in frame and frame[name].notna().any()}
    by_layer = table.groupby(level="layer").mean()
    layers: list[dict[str, Any]] = [
        {"layer": index} | {str(name): None if pd.isna(value) else float(value) for name, value in row.items()}
        for index, row in by_layer.iterrows()
    ]
    return sequences.evaluation(frame, metrics, {"layers": layers}, sink_length=length)
