"""Observation: outlier statistics of a model's activations, streamed out of the forward passes that answer a task.

Tensors. The *protocol sites* are `Layout.sites`: of each layer both norm outputs, the attention output projection, the
MLP output and the layer output, and the final norm. The *product inputs* are what a linear layer's rounding sees: both
norm outputs, and the inputs of the output and down projections.

Samples. One sequence is one row of the batch without its padding. Everything is exact over all entries of all tokens,
except the two medians of entries: these are taken on every 64th token of a sequence, where the first token taken moves
on by one with each sequence, so that no position is favoured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from quant_bench.errors import QuantizationError
from quant_bench.model import LanguageModel
from quant_bench.numerics.moments import Channels, Measured, Moments, Values, count_beyond, host, measure
from quant_bench.numerics.places import Places, Tokens, largest_channels
from quant_bench.numerics.spread import Incoherence, absolute_medians, max_median_ratio

MEDIAN_STRIDE = 64
MASSIVE_ABSOLUTE = 100.0
MASSIVE_RATIO = 1000.0
SIGMAS = 6.0
# product inputs among the protocol sites, and the two kinds that are observed for their products alone
_NORMS = ("attention_norm", "mlp_norm")
_INPUTS = {"output": "attention_output_input", "down": "mlp_output_input"}
# per-sequence values that are averaged over sequences
_AVERAGED = (
    "inf_norm",
    "kurtosis",
    "kurtosis_published",
    "token_kurtosis",
    "outlier_6sigma_share",
    "max_median_ratio",
    "median",
    "massive_ratio",
    "massive_activations",
    "above_100",
    "above_1000_medians",
)


@dataclass(frozen=True)
class Point:
    """A tensor that is observed: the output of the module at `path`, or its first input."""

    path: str
    layer: int | None
    kind: str
    is_input: bool = False

    @property
    def is_site(self) -> bool:
        """Whether it belongs to the outlier protocol."""
        return not self.is_input

    @property
    def feeds_product(self) -> bool:
        """Whether a quantized matrix product reads it."""
        return self.is_input or self.kind in _NORMS

    @property
    def is_placed(self) -> bool:
        """Whether it is noted where its outliers sit: in the residual stream, and in what a product reads."""
        return self.feeds_product or self.kind == "layer_output"


def points_of(model: LanguageModel) -> tuple[Point, ...]:
    """The tensors to observe, in order of layers."""
    sites = [Point(site.path, site.layer, site.kind) for site in model.layout.sites]
    inputs = [
        Point(site.path, site.layer, _INPUTS[site.role], is_input=True)
        for site in model.layout.linears
        if site.role in _INPUTS
    ]
    return (*sites, *inputs)


class Statistics:
    """Running statistics of one tensor; their size depends on its width and its longest sequence alone."""

    def __init__(self, point: Point) -> None:
        self.point = point
        self.sequences = 0
        self.tokens = 0
        self.pooled = Moments()
        self.latest = Moments()
        self._sums = dict.fromkeys(_AVERAGED, 0.0)
        self._counts = dict.fromkeys(_AVERAGED, 0)
        self._incoherence = Incoherence()
        self._places = Places()
        self._channels: Channels | None = None

    def add(self, values: Float[Tensor, "token width"], tokens: Tokens | None = None) -> None:
        """Take in one sequence, and which tokens it has where that is known.

        Raises:
            QuantizationError: an entry is not finite; the message names the tensor.
        """
        if self._channels is None and self.point.is_placed:
            self._channels = Channels(values.shape[1])
        # looked at as an array from here on, unless it lies on an accelerator, where torch counts
        seen: Values = host(values) if values.device.type == "cpu" else values
        found = measure(seen, moments=self.point.is_site, channels=self._channels)
        if not found.finite:
            raise QuantizationError(f"the {self.point.kind} of {self.point.path!r} has entries that are not finite")
        if self.point.is_site:
            self._add_site(seen, found)
        if self.point.feeds_product:
            self._add_product(seen, found)
        if self.point.is_placed:
            self._places.add(found.absmax, tokens)
        self.sequences += 1
        self.tokens += values.shape[0]
        self.latest = found.moments
        self.pooled = self.pooled.merge(found.moments)

    def _sampled(self, values: Values) -> tuple[slice, np.ndarray]:
        """The tokens that medians are taken on, and their entries."""
        taken = slice(self.sequences % min(MEDIAN_STRIDE, len(values)), None, MEDIAN_STRIDE)
        return taken, host(values[taken]) if isinstance(values, Tensor) else values[taken]

    def _average(self, name: str, value: float | int | None) -> None:
        if value is not None:
            self._sums[name] += value
            self._counts[name] += 1

    def _add_site(self, values: Values, found: Measured) -> None:
        moments, absmax = found.moments, found.absmax
        self._average("inf_norm", found.largest)
        self._average("kurtosis", moments.kurtosis)
        self._average("kurtosis_published", moments.kurtosis_published)
        self._average("token_kurtosis", found.token_kurtosis)
        beyond = count_beyond(values, absmax, moments.mean, SIGMAS * moments.deviation)
        self._average("outlier_6sigma_share", beyond / moments.count)
        if self.point.kind == "layer_output":
            self._add_massive(values, found)

    def _add_massive(self, values: Values, found: Measured) -> None:
        absmax = found.absmax
        median = float(absolute_medians(self._sampled(values)[1].reshape(1, -1))[0])
        self._average("median", median)
        self._average("massive_ratio", found.largest / median if median > 0.0 else None)
        above = count_beyond(values, absmax, 0.0, MASSIVE_ABSOLUTE)
        self._average("above_100", above)
        if median > 0.0:
            ratio = MASSIVE_RATIO * median
            outstanding = count_beyond(values, absmax, 0.0, ratio, inclusive=True)
            self._average("above_1000_medians", outstanding)
            # of two thresholds the higher one decides
            self._average("massive_activations", above if ratio <= MASSIVE_ABSOLUTE else outstanding)
        else:
            self._average("massive_activations", above)

    def _add_product(self, values: Values, found: Measured) -> None:
        taken, sample = self._sampled(values)
        self._average("max_median_ratio", max_median_ratio(found.absmax[taken], absolute_medians(sample)))
        self._incoherence.add(found.absmax, found.squares, values.shape[1])

    def row(self) -> dict[str, Any]:
        """The tensor's line in the table per layer and site; None where a value has no meaning for it."""
        row: dict[str, Any] = {"layer": self.point.layer, "kind": self.point.kind}
        for name in _AVERAGED:
            row[name] = self._sums[name] / self._counts[name] if self._counts[name] else None
        row["pooled_kurtosis"] = self.pooled.kurtosis if self.point.is_site else None
        row.update(self._product_row())
        if self._channels is not None:
            row["top_channels"] = _named(largest_channels(self._channels.absmax))
            row["top_positions"] = _named(self._places.positions)
            row["top_tokens"] = _named(self._places.tokens)
        return row

    def _product_row(self) -> dict[str, float | None]:
        names = ("channel_absmax_ratio", "channel_rms_kurtosis", "incoherence", "incoherence_p999")
        if self._channels is None or not self.point.feeds_product:
            return dict.fromkeys(names)
        absmax, squares = self._channels.absmax, self._channels.squares / self.tokens
        median = float(np.median(absmax))
        mean_square = float(squares.mean())
        kurtosis = float(np.mean(squares * squares)) / mean_square**2 if mean_square > 0.0 else 1.0
        ratio = float(absmax.max()) / median if median > 0.0 else None
        incoherence = self._incoherence
        return dict(zip(names, (ratio, kurtosis, incoherence.mean, incoherence.percentile(0.999)), strict=True))


def _named(largest: dict[int, float]) -> dict[str, float]:
    return {str(name): value for name, value in largest.items()}


class Observer:
    """Statistics of every observed tensor while it is entered; the hooks are gone when it is left.

        with Observer(model) as observer:
            final_hidden(model, ids)
            kurtosis = observer.latest()["avg_kurtosis"]

    Memory depends on the model and the longest sequence, not on the number of batches. A batch with padding needs
    `mask` set before its forward pass: padding is left out of every count.

    Attributes:
        mask: True at real tokens of the next batches, or None when there is no padding.
        statistics: one for each observed tensor.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.mask: Bool[Tensor, "batch seq"] | None = None
        self.statistics = [Statistics(point) for point in points_of(model)]
        self._handles: list[Any] = []
        self._shape: tuple[int, int] = (1, 1)
        self._tokens: list[Tokens | None] = [None]

    def __enter__(self) -> "Observer":
        body = self.model.body
        self._handles.append(body.register_forward_pre_hook(self._note_shape, with_kwargs=True))
        for statistics in self.statistics:
            module = self.model.module.get_submodule(statistics.point.path)
            if statistics.point.is_input:
                self._handles.append(module.register_forward_pre_hook(self._input_hook(statistics)))
            else:
                self._handles.append(module.register_forward_hook(self._output_hook(statistics)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def latest(self) -> dict[str, float]:
        """`avg_kurtosis` and `avg_kurtosis_published` of the last sequence: means over the protocol sites."""
        found = [statistics.latest for statistics in self.statistics if statistics.point.is_site]
        return {
            "avg_kurtosis": sum(moments.kurtosis for moments in found) / len(found),
            "avg_kurtosis_published": sum(moments.kurtosis_published for moments in found) / len(found),
        }

    def _note_shape(self, module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        # a sink token has turned ids into embeddings, itself the first
        tokens = next((named[name] for name in ("input_ids", "inputs_embeds") if named.get(name) is not None), None)
        tokens = positional[0] if tokens is None else tokens
        self._shape = (tokens.shape[0], tokens.shape[1])
        self._tokens = [None] * tokens.shape[0]
        if not tokens.is_floating_point():
            ids, mask = tokens.cpu(), None if self.mask is None else self.mask.cpu()
            self._tokens = [Tokens.of((row if mask is None else row[mask[i]]).numpy()) for i, row in enumerate(ids)]

    def _input_hook(self, statistics: Statistics) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            self._add(statistics, arguments[0])

        return hook

    def _output_hook(self, statistics: Statistics) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            self._add(statistics, output[0] if isinstance(output, tuple) else output)

        return hook

    def _add(self, statistics: Statistics, values: Tensor) -> None:
        """Take in the real tokens of each sequence; some models flatten batch and sequence inside a layer."""
        batch, length = self._shape
        if batch == 1 and self.mask is None:
            statistics.add(values.reshape(length, values.shape[-1]), self._tokens[0])
            return
        rows = values.reshape(batch, length, values.shape[-1])
        mask = self.mask
        if mask is not None:
            # a token before the text is no padding
            mask = functional.pad(mask, (length - mask.shape[1], 0), value=True).to(rows.device)
        for index in range(batch):
            statistics.add(rows[index][... if mask is None else mask[index]], self._tokens[index])
