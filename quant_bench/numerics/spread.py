"""Spread of a token's entries over its channels: medians and incoherence, by counting instead of sorting."""

import math

import numpy as np
from jaxtyping import Float32, Float64

from quant_bench.numerics.compiled import compiled

# bins of μ: its float32 bits without the last 16, so 128 to a factor of 2, each less than 0.8 percent wide
_SHIFT = 16
_ONE = 0x3F800000
_BINS = 16 * 128


def absolute_medians(values: Float32[np.ndarray, "token width"]) -> Float64[np.ndarray, " token"]:
    """Median of the absolute entries of each row, the mean of the two middle ones where their number is even.

    The bits of a float without its sign are ordered as the floats are, so 31 halvings of the range of bits, each a
    count over the row, find the exact entry. Partitioning branches on the data and takes ten times as long.
    """
    medians = np.empty(len(values))
    _medians(np.ascontiguousarray(values).view(np.int32), medians)
    return medians


def max_median_ratio(maxima: Float32[np.ndarray, " token"], medians: Float64[np.ndarray, " token"]) -> float | None:
    """Mean of maximum / median over the tokens whose median is not 0; None where there are none.

    Source: He et al. 2024, https://arxiv.org/abs/2405.19279.
    """
    ratio = float(_mean_ratio(maxima, medians))
    return ratio if ratio >= 0.0 else None


class Incoherence:
    """μ = √d · max|x| / ‖x‖₂ of tokens, from 1 (all entries equally large) to √d: mean and percentiles, streamed.

    A token of zeros is spread evenly: 1.

    Source: the activations' form of Chee et al. 2023 (QuIP), definition 1, https://arxiv.org/abs/2307.13304.
    """

    def __init__(self) -> None:
        self._counts = np.zeros(_BINS, np.int64)
        self._sum = 0.0
        self._tokens = 0

    def add(self, absmax: Float32[np.ndarray, " token"], squares: Float64[np.ndarray, " token"], width: int) -> None:
        """Take in tokens by their largest absolute entry and their sum of squares."""
        self._sum += _count_incoherence(absmax, squares, width, self._counts)
        self._tokens += len(absmax)

    @property
    def mean(self) -> float:
        """Mean over tokens; 1 without any."""
        return self._sum / self._tokens if self._tokens else 1.0

    def percentile(self, share: float) -> float:
        """The value that a share of the tokens does not exceed, to 0.4 percent."""
        place = int(np.searchsorted(np.cumsum(self._counts), share * self._tokens))
        middle = _ONE + (place << _SHIFT) + (1 << (_SHIFT - 1))
        return float(np.int32(middle).view(np.float32))


def weight_incoherence(absmax: float, root_mean_square: float) -> float:
    """μ_W = √(mn) · max|W| / ‖W‖_F, from 1 (all entries equally large) to √(mn); 1 for a matrix of zeros.

    Source: Chee et al. 2023 (QuIP), definition 1, https://arxiv.org/abs/2307.13304.
    """
    return absmax / root_mean_square if root_mean_square > 0.0 else 1.0


@compiled()
def _medians(bits: np.ndarray, medians: np.ndarray) -> None:
    mask = np.int32(0x7FFFFFFF)
    width = bits.shape[1]
    rank = (width - 1) // 2
    ends = np.empty(2, np.int32)
    values = ends.view(np.float32)
    for token in range(bits.shape[0]):
        row = bits[token]
        low, high = np.int32(0), mask
        while low < high:
            middle = low + (high - low) // np.int32(2)
            below = 0
            for channel in range(width):
                below += 1 if (row[channel] & mask) <= middle else 0
            if below > rank:
                high = middle
            else:
                low = middle + np.int32(1)
        ends[0] = ends[1] = low
        if width % 2 == 0:
            below, above = 0, mask
            for channel in range(width):
                absolute = row[channel] & mask
                below += 1 if absolute <= low else 0
                above = min(above, absolute if absolute > low else mask)
            if below == rank + 1:
                ends[1] = above
        medians[token] = (np.float64(values[0]) + np.float64(values[1])) / 2


@compiled()
def _count_incoherence(absmax: np.ndarray, squares: np.ndarray, width: int, counts: np.ndarray) -> float:
    total = 0.0
    values = np.empty(absmax.shape[0], np.float32)
    for token in range(absmax.shape[0]):
        mu = absmax[token] / math.sqrt(squares[token] / width) if squares[token] > 0.0 else 1.0
        mu = max(1.0, mu)
        total += mu
        values[token] = mu
    bits = values.view(np.int32)
    for token in range(absmax.shape[0]):
        counts[min((bits[token] - _ONE) >> _SHIFT, _BINS - 1)] += 1
    return total


@compiled()
def _mean_ratio(maxima: np.ndarray, medians: np.ndarray) -> float:
    total, defined = 0.0, 0
    for token in range(medians.shape[0]):
        if medians[token] > 0.0:
            total += maxima[token] / medians[token]
            defined += 1
    return total / defined if defined else -1.0
