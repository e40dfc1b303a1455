"""Watching attention: a core around each layer's own one that also sums up its weights and keeps the norms of reads."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from quant_bench.attention import AttentionCore, Key, Query, core_of, replace_core
from quant_bench.diagnostics.masses import Mask, Masses, Weighing, masses, uniform_masses
from quant_bench.diagnostics.reads import ReadSite, openness, read_sites, sizes
from quant_bench.errors import QuantizationError
from quant_bench.model import LanguageModel
from quant_bench.scoring import final_hidden


@dataclass(frozen=True)
class GateValues:
    """A gate's factors on one sequence, summed up."""

    mean: float
    least: float
    below_half: float

    @classmethod
    def of(cls, factors: Float[Tensor, "..."]) -> "GateValues":
        """Mean, minimum, and share below 0.5."""
        return cls(float(factors.double().mean()), float(factors.min()), float((factors < 0.5).double().mean()))


@dataclass
class Reading:
    """What one layer did with one sequence.

    Attributes:
        masses: where its weights went.
        uniform: mass on each token under even weights.
        norms: of the reads as they were projected.
        gated_norms: of the values that were averaged: gated, and rounded where the cache is.
        passed: factor of the value gate on each read; 1 without one.
        gate: of the gate on reads (on their routing for `renorm`), or None.
        output_gate: of the gate on the heads' outputs, or None.
        sink_token_norms: of the sink token's read, or None.
    """

    masses: Masses
    uniform: Float[Tensor, " key"]
    norms: Float[Tensor, "kv_head key"]
    gated_norms: Float[Tensor, "kv_head key"]
    passed: Float[Tensor, "kv_head key"]
    gate: GateValues | None
    output_gate: GateValues | None
    sink_token_norms: Float[Tensor, " kv_head"] | None


@dataclass
class _Layer:
    """One watched layer: what its core does, and what was seen of the present sequence."""

    site: ReadSite
    how: Weighing
    core: AttentionCore
    projected: Float[Tensor, "one position out"] | None = None
    reading: Reading | None = None
    undo: list[Callable[[], None]] = field(default_factory=list)


class AttentionWatch:
    """While open, each forward pass of one sequence leaves one `Reading` a layer; the model's output is unchanged.

    The weights are computed a second time, tile by tile, by the installed mechanism's own parts, from the queries and
    keys that the core is given: scores rounded by scope `full`, rounded caches and gates are in them. Nothing is kept
    but sums.

    Args:
        model: float or quantized.

    Raises:
        NotApplicable: a layer's weights or reads cannot be seen.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self._layers = [
            _Layer(site, Weighing.of(site.attention), core_of(site.attention)) for site in read_sites(model)
        ]

    def __enter__(self) -> "AttentionWatch":
        for layer in self._layers:
            self._install(layer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for layer in self._layers:
            while layer.undo:
                layer.undo.pop()()

    @torch.inference_mode()
    def read(self, ids: Int64[Tensor, " seq"]) -> list[Reading]:
        """Run one sequence and return what each layer did with it.

        Raises:
            QuantizationError: a value is not finite.
        """
        final_hidden(self.model, ids[None])
        found = []
        for layer in self._layers:
            assert layer.reading is not None
            if not bool(layer.reading.masses.received.isfinite().all() and layer.reading.norms.isfinite().all()):
                raise QuantizationError(f"attention of layer {layer.site.layer} is not finite")
            found.append(layer.reading)
            layer.reading = None
        return found

    def _install(self, layer: _Layer) -> None:
        inner = layer.core

        def core(module: nn.Module, query: Query, key: Key, value: Key, *, mask: Mask | None, scaling: float) -> Query:
            layer.reading = _reading(layer, (query, key, value), mask, scaling)
            return inner(module, query, key, value, mask=mask, scaling=scaling)

        def keep(output: Tensor) -> None:
            layer.projected = output

        layer.undo.append(layer.site.hook(keep).remove)
        layer.undo.append(replace_core(layer.site.attention, core))


def _reading(layer: _Layer, operands: tuple[Query, Key, Key], mask: Mask | None, scaling: float) -> Reading:
    site, projected = layer.site, layer.projected
    assert projected is not None
    layer.projected = None
    reads = site.of_text(projected)
    gate = site.gate or site.router
    factors = None if gate is None else openness(gate, reads)
    return Reading(
        masses=masses(layer.how, site.attention, operands, mask, scaling, site.first),
        uniform=uniform_masses(mask, reads.shape[1], site.first),
        norms=sizes(reads).cpu(),
        gated_norms=sizes(operands[2][0, :, site.first :]).cpu(),
        passed=torch.ones(reads.shape[:2]) if site.gate is None or factors is None else factors.cpu(),
        gate=None if factors is None else GateValues.of(factors),
        output_gate=_output_gate(site),
        sink_token_norms=sizes(operands[2][0, :, :1])[:, 0].cpu() if site.first else None,
    )


def _output_gate(site: ReadSite) -> GateValues | None:
    """Of the factors that wait to be applied to this layer's output, without a constant factor on all of them."""
    factors: Tensor | None = site.attention.__dict__.get("output_factor")
    if factors is None:
        return None
    return GateValues.of(factors[:, :, site.first :] / getattr(site.attention.output_gate, "factor", 1.0))
