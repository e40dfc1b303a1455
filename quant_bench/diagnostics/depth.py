"""Task `depth`: which earlier states sublayers read, what is left to the null, and how large states are."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from quant_bench.depth import Read, Router, routers_of
from quant_bench.diagnostics.sequences import Sequences
from quant_bench.errors import QuantizationError, SpecError
from quant_bench.model import LanguageModel
from quant_bench.score import Metric
from quant_bench.scoring import final_hidden
from quant_bench.task import Context, Evaluation


@dataclass(frozen=True)
class DepthSettings:
    """What no source fixes.

    Attributes:
        collapsed: mean weight on one source above which a router counts as collapsed.
    """

    collapsed: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.collapsed < 1:
            raise SpecError(f"collapsed must lie between 0 and 1; got {self.collapsed!r}")


_UNITS = {
    "depth_top_weight": "share",
    "depth_top_weight_uniform": "share",
    "depth_null_mass": "share",
    "depth_psi": "share",
    "depth_beta": "1",
    "depth_entropy": "nats",
    "depth_entropy_uniform": "nats",
    "depth_collapsed": "share",
    "state_rms": "1",
    "state_growth": "1",
}
# descriptions: no value of them is good by itself
METRICS = {name: Metric(name, unit, "neither", "mean") for name, unit in _UNITS.items()}


@dataclass
class _Seen:
    """One router's read of one sequence, as means over tokens."""

    weights: Float[Tensor, " source"]
    names: tuple[str, ...]
    numbers: dict[str, float]


def _summary(read: Read, router: Router) -> _Seen:
    """Numbers of one read."""
    weights = read.weights.double()
    lacking = 1.0 - weights.sum(-1, keepdim=True)
    # the null is one more place where mass can be
    places = torch.cat((weights, lacking.clamp_min(0.0)), -1)
    count = weights.shape[-1]
    numbers = {
        "depth_top_weight": float(weights.amax(-1).mean()),
        "depth_top_weight_uniform": 1.0 / count,
        "depth_null_mass": float(lacking.mean()),
        "depth_beta": float(router.weigher.beta()),
        "depth_entropy": float(torch.special.entr(places).sum(-1).mean()),
        "depth_entropy_uniform": float(np.log(count)),
    }
    if read.psi is not None:
        # of the sublayer that the router stands behind
        numbers["depth_psi"] = float(read.psi[..., -1].double().mean())
    return _Seen(weights.mean((0, 1)).cpu(), read.names, numbers)


class DepthWatch:
    """While open, each forward pass of one sequence leaves a summary of every router and the size of every state."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.routers = routers_of(model.body)
        self.reads: list[_Seen] = []
        self.states: list[dict[str, float]] = []

    @contextmanager
    def open(self) -> Iterator["DepthWatch"]:
        """Look at the model for as long as the context lasts; its output is the same."""
        layers = [self.model.module.get_submodule(path) for path in self.model.layout.layers]
        handles = [layer.register_forward_hook(self._keep_state) for layer in layers]
        for router in self.routers:
            router.observer = lambda read, router=router: self.reads.append(_summary(read, router))
        try:
            yield self
        finally:
            for router in self.routers:
                router.observer = None
            for handle in handles:
                handle.remove()

    def _keep_state(self, layer: Any, arguments: Any, output: Any) -> None:
        state: Tensor = output[0] if isinstance(output, tuple) else output
        rms = state.double().square().mean(-1).sqrt().mean()
        self.states.append({"state_rms": float(rms), "state_max": float(state.abs().max())})

    def read(self, ids: Int64[Tensor, " seq"]) -> tuple[list[_Seen], list[dict[str, float]]]:
        """Run one sequence.

        Raises:
            QuantizationError: a value is not finite.
        """
        self.reads, self.states = [], []
        final_hidden(self.model, ids[None])
        values = [value for row in (*(seen.numbers for seen in self.reads), *self.states) for value in row.values()]
        if not np.isfinite(values).all():
            raise QuantizationError("a state or a depth weight is not finite")
        return self.reads, self.states


def depth(model: LanguageModel, context: Context, sequences: Sequences, settings: DepthSettings) -> Evaluation:
    """Depth weights and sizes of states; docs/attnres.md has every definition.

    A score is a mean over routers (of states: over layers) and sequences. Kept are sums over sequences and one row of
    scores a sequence. A model without routers has the numbers of its states alone.

    Raises:
        QuantizationError: a value is not finite.
    """
    rows: list[dict[str, float]] = []
    weights: list[Tensor] = []
    routed: list[dict[str, float]] = []
    layers: list[dict[str, float]] = []
    names: list[tuple[str, ...]] = []
    with DepthWatch(model).open() as watch:
        for index, ids in enumerate(sequences.ids):
            reads, states = watch.read(ids)
            rows.append(_row(reads, states, settings))
            names = [seen.names for seen in reads]
            weights = _added(weights, [seen.weights for seen in reads])
            routed = _totals(routed, [seen.numbers for seen in reads])
            layers = _totals(layers, states)
            context.progress(sequences.label, index + 1, len(sequences.ids))
    count = len(rows)
    details = {
        "routers": [
            {"router": f"{place // 2}.{('attention', 'mlp')[place % 2]}"}
            | {name: value / count for name, value in numbers.items()}
            | {"sources": dict(zip(of, (total / count).tolist(), strict=True))}
            for place, (of, numbers, total) in enumerate(zip(names, routed, weights, strict=True))
        ],
        "layers": [
            {"layer": index} | {name: value / count for name, value in numbers.items()}
            for index, numbers in enumerate(layers)
        ],
    }
    samples = pd.DataFrame(rows)
    # a sequence whose first state is 0 has no growth, and then nobody has
    metrics = {name: metric for name, metric in METRICS.items() if name in samples and samples[name].notna().all()}
    return sequences.evaluation(samples, metrics, details)


def _row(reads: list[_Seen], states: list[dict[str, float]], settings: DepthSettings) -> dict[str, float]:
    """Scores of one sequence."""
    first, last = states[0]["state_rms"], states[-1]["state_rms"]
    row = {"state_rms": float(np.mean([state["state_rms"] for state in states]))}
    if first > 0:
        row["state_growth"] = last / first
    if reads:
        row["depth_collapsed"] = float(np.mean([float(seen.weights.max()) > settings.collapsed for seen in reads]))
        for name in reads[0].numbers:
            row[name] = float(np.mean([seen.numbers[name] for seen in reads]))
    return row


def _added(totals: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
    return [total + part for total, part in zip(totals, parts, strict=True)] if totals else parts


def _totals(totals: list[dict[str, float]], parts: list[dict[str, float]]) -> list[dict[str, float]]:
    if not totals:
        return [dict(part) for part in parts]
    return [{name: total[name] + part[name] for name in part} for total, part in zip(totals, parts, strict=True)]
