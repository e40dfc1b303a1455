"""Task `sensitivity`: which matrices a model feels most when they are rounded, one at a time."""

from dataclasses import dataclass
from typing import Any

import pandas as pd

from quant_bench.diagnostics.sequences import Sequences
from quant_bench.errors import NotApplicable, SpecError
from quant_bench.lowbit.codes import WeightGranularity, quantize_weight
from quant_bench.model import LanguageModel
from quant_bench.quantization.sensitivity import Table, sensitivities
from quant_bench.score import Metric
from quant_bench.task import Context, Evaluation, Measure, Plain


@dataclass(frozen=True)
class Widths:
    """How a matrix is rounded.

    Attributes:
        bits: widths to try.
        granularity: of its scales.
        group_size: of granularity `group`.
    """

    bits: tuple[int, ...]
    granularity: WeightGranularity
    group_size: int

    def __post_init__(self) -> None:
        if not self.bits or not all(2 <= bits <= 8 for bits in self.bits) or self.group_size < 1:
            raise SpecError(
                f"bits are digits from 2 to 8, group_size at least 1; got {self.bits} and {self.group_size}"
            )


def sensitivity(model: LanguageModel, context: Context, sequences: Sequences, widths: Widths) -> Evaluation:
    """KL(float || one matrix rounded) in nats a token, for every linear of the layers.

    Scores: the mean over matrices at each width, with an interval over sequences, and the largest matrix's. Details:
    every matrix with its mean and standard error over sequences, and the sum of each layer.

    Raises:
        NotApplicable: the model is quantized already.
    """
    if model.execution != "float":
        raise NotApplicable("sensitivity is measured from the float model: ask it of the quantizer none")
    table = sensitivities(
        model,
        sequences.ids.to(model.device),
        widths.bits,
        lambda weight, bits: quantize_weight(
            weight, bits=bits, granularity=widths.granularity, group_size=widths.group_size
        ),
        lambda done, total: context.progress("sensitivity", done, total),
    )
    samples = pd.DataFrame({"item": range(len(sequences.ids)), "tokens": sequences.ids.shape[1]})
    measures, plain = [], []
    for bits in widths.bits:
        each = [found[bits] for found in table.values()]
        samples[f"kl_w{bits}"] = sum(each[1:], each[0]).numpy() / len(each)
        measures.append(Measure(Metric(f"sensitivity_w{bits}", "nats/token", "lower", "mean"), f"kl_w{bits}"))
        largest = max(float(kl.mean()) for kl in each)
        plain.append(Plain(Metric(f"max_sensitivity_w{bits}", "nats/token", "lower"), largest, len(samples)))
    fineness = f"g{widths.group_size}" if widths.granularity == "group" else widths.granularity
    return Evaluation(
        measures=measures,
        samples=samples,
        data_sha256=sequences.sha256,
        convention=f"{sequences.label} weights={fineness}",
        plain=plain,
        details=_details(model, table, widths),
        settings=sequences.settings,
    )


def _details(model: LanguageModel, table: Table, widths: Widths) -> dict[str, Any]:
    """Rows for a table: matrices in order of execution, and layers."""
    linears = []
    layers: dict[int, dict[str, float]] = {}
    for site in model.layout.linears:
        found = table[site.path]
        row: dict[str, Any] = {"linear": site.path, "layer": site.layer, "role": site.role}
        total = layers.setdefault(site.layer, {f"w{bits}": 0.0 for bits in widths.bits})
        for bits, kl in found.items():
            row[f"w{bits}"] = float(kl.mean())
            row[f"w{bits}_stderr"] = float(kl.std() / len(kl) ** 0.5) if len(kl) > 1 else None
            total[f"w{bits}"] += row[f"w{bits}"]
        linears.append(row)
    return {
        "linears": linears,
        "layers": [{"layer": layer} | numbers for layer, numbers in sorted(layers.items())],
        "unit": "nats/token",
    }
