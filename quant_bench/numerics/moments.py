"""Moments: one pass over a tensor of tokens for kurtosis, maxima and per-channel sums, in float64, merged exactly.

Powers are products of the centred value: `pow(3)` and `pow(4)` call the mathematical library for each element and cost
a quarter of the matrix product that the tensor feeds.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from quant_bench.numerics.compiled import compiled

Values = Float[Tensor, "token width"] | Float32[np.ndarray, "token width"]


@dataclass(frozen=True)
class Moments:
    """Count, mean and sums of the second to fourth powers of deviations from the mean, in float64.

    Source: Pébay 2008, equations 3.1 and 4.1, Sandia report SAND2008-6212, https://doi.org/10.2172/1028931.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    m3: float = 0.0
    m4: float = 0.0

    def merge(self, other: "Moments") -> "Moments":
        """Moments of both sets of values together."""
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        mean = self.mean + (other.mean - self.mean) * (other.count / count)
        first, second = self._about(mean), other._about(mean)
        return Moments(count, mean, *(a + b for a, b in zip(first, second, strict=True)))

    def _about(self, centre: float) -> tuple[float, float, float]:
        """Sums of the second to fourth powers of deviations from another centre."""
        shift = self.mean - centre
        square = shift * shift
        m2 = self.m2 + self.count * square
        m3 = self.m3 + 3.0 * shift * self.m2 + self.count * square * shift
        m4 = self.m4 + 4.0 * shift * self.m3 + 6.0 * square * self.m2 + self.count * square * square
        return m2, m3, m4

    @property
    def deviation(self) -> float:
        """Population standard deviation."""
        return float(np.sqrt(self.m2 / self.count)) if self.count else 0.0

    @property
    def kurtosis(self) -> float:
        """Fourth standardized moment: 3 for a Gaussian, population variance, no epsilon, scale-free.

        Never below 1, which equal chances of two values reach. Constant values have no spread to standardize; they
        get 1, the limit of two values that approach each other: no outlier.
        """
        return self.m4 * self.count / (self.m2 * self.m2) if self.m2 > 0.0 else 1.0

    @property
    def kurtosis_published(self) -> float:
        """Kurtosis as the outlier papers' code has it: mean fourth power over (s⁴ + 1e-6), s² = m2 / (count - 1).

        The epsilon lowers it by 1 percent at s = 0.1 and by half at s = 0.032; constant values give 0.
        Source: https://github.com/Qualcomm-AI-research/outlier-free-transformers.
        """
        variance = self.m2 / max(self.count - 1, 1)
        return self.m4 / max(self.count, 1) / (variance * variance + 1e-6)


class Channels:
    """Largest absolute entry and sum of squares of each channel, over all tokens taken in.

    Attributes:
        absmax: float32, one a channel.
        squares: float64, one a channel.
    """

    def __init__(self, width: int) -> None:
        self.absmax = np.zeros(width, np.float32)
        self.squares = np.zeros(width)


_NO_CHANNELS = Channels(0)


class Measured(NamedTuple):
    """What one pass over a tensor (token, width) finds; arrays lie on the CPU.

    Attributes:
        moments: of all entries together; empty when not asked for.
        token_kurtosis: mean over tokens of the kurtosis of a token's entries; 1 when not asked for.
        absmax: largest absolute entry of each token.
        squares: sum of squares of each token.
        largest: largest absolute entry; not finite if any entry is not, and then nothing else here means anything.
    """

    moments: Moments
    token_kurtosis: float
    absmax: np.ndarray
    squares: np.ndarray
    largest: float

    @property
    def finite(self) -> bool:
        """Whether every entry is finite."""
        return math.isfinite(self.largest)


def measure(values: Values, *, moments: bool = True, channels: Channels | None = None) -> Measured:
    """Moments, maxima and sums of squares of a tensor in one pass.

    Each token is centred on its own mean while it lies in the nearest cache, then tokens are combined, so no large
    mean or single outlier can cancel digits. Float32 on the CPU takes a compiled loop, other devices torch; half
    precision on the CPU is widened first.

    Args:
        values: activations; an array must be contiguous (see `host`).
        moments: whether moments and token kurtosis are wanted.
        channels: what each channel's maxima and squares are added to, if they are wanted.
    """
    tokens, width = values.shape
    if isinstance(values, Tensor) and values.device.type != "cpu":
        rows, absmax, largest = _measure_torch(values, channels)
    else:
        array = host(values) if isinstance(values, Tensor) else values
        rows, absmax, largest = _measure_cpu(array, moments, channels)
    if not (moments and tokens and math.isfinite(largest)):
        return Measured(Moments(), 1.0, absmax, rows[4], largest)
    mean, m2, m3, m4, token_kurtosis = _combine(rows, width)
    return Measured(Moments(tokens * width, mean, m2, m3, m4), token_kurtosis, absmax, rows[4], largest)


def host(values: Float[Tensor, "token width"]) -> np.ndarray:
    """Entries as a contiguous float32 array; no copy of what is that already."""
    if values.dtype != torch.float32 or values.device.type != "cpu" or not values.is_contiguous():
        values = values.float().cpu().contiguous()
    array: np.ndarray = values.detach().numpy()
    return array


def count_beyond(values: Values, absmax: np.ndarray, centre: float, radius: float, *, inclusive: bool = False) -> int:
    """Number of entries with abs(x - centre) above `radius` (or equal to it, with `inclusive`).

    Exact, and cheap where such entries are rare: tokens whose largest absolute entry `absmax` rules them out are not
    read.
    """
    # distances are float64, so at least the radius is the same as above the number just below it
    limit = math.nextafter(radius, -math.inf) if inclusive else radius
    if not isinstance(values, Tensor) or values.device.type == "cpu":
        return int(_count(host(values) if isinstance(values, Tensor) else values, absmax, centre, limit))
    candidates = torch.from_numpy(np.flatnonzero(absmax >= radius - abs(centre))).to(values.device)
    distance = (values[candidates].double() - centre).abs()
    return int((distance > limit).sum())


def _measure_cpu(array: np.ndarray, moments: bool, channels: Channels | None) -> tuple[np.ndarray, np.ndarray, float]:
    rows, absmax = np.empty((5, array.shape[0])), np.empty(array.shape[0], np.float32)
    kept = channels or _NO_CHANNELS
    bits = (array.view(np.int32), absmax.view(np.int32), kept.absmax.view(np.int32))
    largest = _sweep(array, *bits, rows, kept.squares, moments, channels is not None)
    return rows, absmax, float(np.int32(largest).view(np.float32))


def _measure_torch(
    values: Float[Tensor, "token width"], channels: Channels | None
) -> tuple[np.ndarray, np.ndarray, float]:
    wide = values.detach().double()
    absolute = values.detach().abs().float()
    mean = wide.mean(1, keepdim=True)
    centred = wide - mean
    square, own = centred * centred, wide * wide
    sums = [mean[:, 0], square.sum(1), (square * centred).sum(1), (square * square).sum(1), own.sum(1)]
    if channels is not None:
        channels.absmax = np.maximum(channels.absmax, absolute.amax(0).cpu().numpy())
        channels.squares += own.sum(0).cpu().numpy()
    absmax = absolute.amax(1).cpu().numpy()
    return torch.stack(sums).cpu().numpy(), absmax, float(absmax.max(initial=0.0))


@compiled(reorder=True)
def _sweep(
    values: np.ndarray,
    bits: np.ndarray,
    top: np.ndarray,
    channel_top: np.ndarray,
    rows: np.ndarray,
    channel_squares: np.ndarray,
    moments: bool,
    channels: bool,
) -> int:
    """Fill each token's mean, m2, m3, m4 and squares, and its maximum; add to the channels' maxima and squares.

    Returns the bits of the largest absolute entry. Absolute values are compared as the bits of the float without its
    sign: the order is the same, integer maxima use vector registers, and NaN ends up above infinity instead of getting
    lost.
    """
    tokens, width = values.shape
    overall = np.int32(0)
    for token in range(tokens):
        total = squares = 0.0
        largest = np.int32(0)
        if channels:
            for channel in range(width):
                value = np.float64(values[token, channel])
                absolute = bits[token, channel] & np.int32(0x7FFFFFFF)
                total += value
                squares += value * value
                largest = max(largest, absolute)
                channel_top[channel] = max(channel_top[channel], absolute)
                channel_squares[channel] += value * value
        else:
            for channel in range(width):
                value = np.float64(values[token, channel])
                total += value
                squares += value * value
                largest = max(largest, bits[token, channel] & np.int32(0x7FFFFFFF))
        top[token] = largest
        overall = max(overall, largest)
        if moments:
            mean = total / width
            m2 = m3 = m4 = 0.0
            for channel in range(width):
                centred = values[token, channel] - mean
                square = centred * centred
                m2 += square
                m3 += square * centred
                m4 += square * square
            rows[0, token], rows[1, token], rows[2, token], rows[3, token] = mean, m2, m3, m4
        rows[4, token] = squares
    return int(overall)


@compiled()
def _combine(rows: np.ndarray, width: int) -> tuple[float, float, float, float, float]:
    """Mean, m2, m3, m4 of all tokens together (Pébay's shift of centres), and the mean kurtosis of a token."""
    tokens = rows.shape[1]
    mean = 0.0
    for token in range(tokens):
        mean += rows[0, token]
    mean /= tokens
    m2 = m3 = m4 = kurtosis = 0.0
    for token in range(tokens):
        shift, r2, r3, r4 = rows[0, token] - mean, rows[1, token], rows[2, token], rows[3, token]
        square = shift * shift
        m2 += r2 + width * square
        m3 += r3 + 3.0 * shift * r2 + width * square * shift
        m4 += r4 + 4.0 * shift * r3 + 6.0 * square * r2 + width * square * square
        kurtosis += r4 * width / (r2 * r2) if r2 > 0.0 else 1.0
    return mean, m2, m3, m4, kurtosis / tokens


@compiled()
def _count(values: np.ndarray, absmax: np.ndarray, centre: float, limit: float) -> int:
    found = 0
    for token in range(values.shape[0]):
        if absmax[token] + abs(centre) < limit:
            continue
        row = values[token]
        here = 0
        for channel in range(row.shape[0]):
            here += 1 if abs(row[channel] - centre) > limit else 0
        found += here
    return found
