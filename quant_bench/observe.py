"""Observation: outlier statistics of a model's activations, streamed out of the forward passes that answer a task.

Tensors. The *protocol sites* are `Layout.sites`: of each layer both norm outputs, the attention output projection, the
MLP output and the layer output, and the final norm. The *product inputs* are what a linear layer's rounding sees: both
norm outputs, and the inputs of the output and down projections.

Samples. One sequence is one row of the batch without its padding. Everything is exact over all entries of all tokens,
except the two medians of entries: these are taken on every 64th token of a sequence, where the first token taken moves
on by one with each sequence, so that no position is favoured.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from quant_bench.errors import QuantizationError
from quant_bench.model import LanguageModel
from quant_bench.numerics.moments import Measured, Moments, count_beyond, measure

MEDIAN_STRIDE = 64
MASSIVE_ABSOLUTE = 100.0
MASSIVE_RATIO = 1000.0
SIGMAS = 6.0
# product inputs among the protocol sites, and the two kinds that are observed for their products alone
_NORMS = ("attention_norm", "mlp_norm")
_INPUTS = {"output": "attention_output_input", "down": "mlp_output_input"}
# μ of a token lies in [1, √width]; a bin is 0.5 percent wide, so a percentile is off by no more than that
_MU_RATIO = 1.005
_MU_BINS = 1024

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
    """Running statistics of one tensor; their size depends on its width alone."""

    def __init__(self, point: Point) -> None:
        self.point = point
        self.sequences = 0
        self.tokens = 0
        self.pooled = Moments()
        self._sums = dict.fromkeys(_AVERAGED, 0.0)
        self._counts = dict.fromkeys(_AVERAGED, 0)
        self._mu_counts = np.zeros(_MU_BINS, np.int64)
        self._mu_sum = 0.0
        self._channel_absmax = np.zeros(0, np.float32)
        self._channel_squares = np.zeros(0)

    def add(self, values: Float[Tensor, "token width"]) -> Moments:
        """Take in one sequence and return its moments.

        Raises:
            QuantizationError: an entry is not finite; the message names the tensor.
        """
        found = measure(values)
        if not found.finite:
            raise QuantizationError(f"the {self.point.kind} of {self.point.path!r} has entries that are not finite")
        if not self.sequences:
            self._channel_absmax = np.zeros(values.shape[1], np.float32)
            self._channel_squares = np.zeros(values.shape[1])
        start = self.sequences % min(MEDIAN_STRIDE, values.shape[0])
        sample = values[start::MEDIAN_STRIDE].detach().float().abs().cpu().numpy()
        if self.point.is_site:
            self._add_site(values, found, sample)
        if self.point.feeds_product:
            self._add_product(found, sample, values.shape[1])
        self.sequences += 1
        self.tokens += values.shape[0]
        self.pooled = self.pooled.merge(found.moments)
        np.maximum(self._channel_absmax, found.channel_absmax, out=self._channel_absmax)
        self._channel_squares += found.channel_squares
        return found.moments

    def _average(self, name: str, value: float | int) -> None:
        self._sums[name] += value
        self._counts[name] += 1

    def _add_site(self, values: Float[Tensor, "token width"], found: Measured, sample: np.ndarray) -> None:
        moments, absmax = found.moments, found.token_absmax
        self._average("inf_norm", float(absmax.max()))
        self._average("kurtosis", moments.kurtosis)
        self._average("kurtosis_published", moments.kurtosis_published)
        self._average("token_kurtosis", found.token_kurtosis)
        beyond = count_beyond(values, absmax, moments.mean, SIGMAS * moments.deviation)
        self._average("outlier_6sigma_share", beyond / moments.count)
        if self.point.kind != "layer_output":
            return
        median = float(_median(sample.reshape(1, -1))[0])
        ratio = MASSIVE_RATIO * median
        self._average("median", median)
        if median > 0.0:
            self._average("massive_ratio", float(absmax.max()) / median)
        larger = max(MASSIVE_ABSOLUTE, np.nextafter(ratio, -np.inf))
        self._average("massive_activations", count_beyond(values, absmax, 0.0, float(larger)))
        self._average("above_100", count_beyond(values, absmax, 0.0, MASSIVE_ABSOLUTE))
        if median > 0.0:
            self._average("above_1000_medians", count_beyond(values, absmax, 0.0, ratio, inclusive=True))

    def _add_product(self, found: Measured, sample: np.ndarray, width: int) -> None:
        medians = _median(sample)
        defined = medians > 0.0
        if defined.any():
            self._average("max_median_ratio", float((sample.max(1)[defined] / medians[defined]).mean()))
        norms = np.sqrt(found.token_squares / width)
        # a token of zeros is spread evenly over its channels: 1, the least value
        mu = np.divide(found.token_absmax, norms, out=np.ones_like(norms), where=norms > 0.0)
        self._mu_sum += float(mu.sum())
        bins = np.log(np.maximum(mu, 1.0)) / np.log(_MU_RATIO)
        self._mu_counts += np.bincount(np.minimum(bins, _MU_BINS - 1).astype(np.int64), minlength=_MU_BINS)

    def row(self) -> dict[str, Any]:
        """The tensor's line in the table per layer and site; None where a value has no meaning for it."""
        row: dict[str, Any] = {"layer": self.point.layer, "kind": self.point.kind}
        for name in _AVERAGED:
            row[name] = self._sums[name] / self._counts[name] if self._counts[name] else None
        row["pooled_kurtosis"] = self.pooled.kurtosis if self.point.is_site else None
        row.update(self._product_row())
        return row

    def _product_row(self) -> dict[str, float | None]:
        names = ("channel_absmax_ratio", "channel_rms_kurtosis", "incoherence", "incoherence_p999")
        if not self.point.feeds_product or not self.tokens:
            return dict.fromkeys(names)
        absmax, squares = self._channel_absmax, self._channel_squares / self.tokens
        median = float(np.median(absmax))
        mean_square = float(squares.mean())
        spread = float(np.mean(squares * squares)) / mean_square**2 if mean_square > 0.0 else 1.0
        place = int(np.searchsorted(np.cumsum(self._mu_counts), 0.999 * self.tokens))
        values = (float(absmax.max()) / median if median > 0.0 else None, spread, self._mu_sum / self.tokens)
        return dict(zip(names, (*values, float(_MU_RATIO ** (place + 0.5))), strict=True))


class Observer:
    """Statistics of every observed tensor while it is entered; the hooks are gone when it is left.

        with Observer(model) as observer:
            final_hidden(model, ids)
            kurtosis = observer.sequence_kurtosis()

    Memory depends on the model alone, not on the number of batches. A batch with padding needs `mask` set before its
    forward pass: padding is left out of every count.

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
        self._latest: dict[str, Moments] = {}

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
        found = list(self._latest.values())
        return {
            "avg_kurtosis": float(np.mean([moments.kurtosis for moments in found])),
            "avg_kurtosis_published": float(np.mean([moments.kurtosis_published for moments in found])),
        }

    def _note_shape(self, module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named["input_ids"] if "input_ids" in named else positional[0]
        self._shape = (ids.shape[0], ids.shape[1])

    def _input_hook(self, statistics: Statistics) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            self._add(statistics, arguments[0])

        return hook

    def _output_hook(self, statistics: Statistics) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            self._add(statistics, output[0] if isinstance(output, tuple) else output)

        return hook

    def _add(self, statistics: Statistics, values: Tensor) -> None:
        for sequence in self._sequences(values):
            moments = statistics.add(sequence)
            if statistics.point.is_site:
                self._latest[f"{statistics.point.kind} {statistics.point.path}"] = moments

    def _sequences(self, values: Tensor) -> Iterator[Tensor]:
        """Real tokens of each sequence; some models flatten batch and sequence inside a layer."""
        batch, length = self._shape
        rows = values.reshape(batch, length, values.shape[-1])
        for index in range(batch):
            yield rows[index] if self.mask is None else rows[index][self.mask[index].to(rows.device)]


def _median(values: np.ndarray) -> np.ndarray:
    """Median of each row, the mean of the two middle entries where their number is even."""
    width = values.shape[1]
    low, high = (width - 1) // 2, width // 2
    parts = np.partition(values, [low, high], axis=1)
    middle: np.ndarray = (parts[:, low].astype(np.float64) + parts[:, high]) / 2
    return middle


def weight_incoherence(weight: Float[Tensor, "row col"]) -> float:
    """μ_W = √(mn) · max|W| / ‖W‖_F, from 1 (all entries equally large) to √(mn); 1 for a matrix of zeros.

    Source: Chee et al. 2023 (QuIP), definition 1, https://arxiv.org/abs/2307.13304.
    """
    absmax = float(weight.abs().max())
    root_mean_square = float(torch.linalg.vector_norm(weight.float())) / weight.numel() ** 0.5
    return absmax / root_mean_square if root_mean_square > 0.0 else 1.0
