"""Moments: one pass over a tensor of tokens for kurtosis, maxima and per-channel sums, in float64, merged exactly.

Powers are products of the centred value: `pow(3)` and `pow(4)` call the mathematical library for each element and cost
a quarter of the matrix product that the tensor feeds.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from jaxtyping import Float, Float32, Float64
from torch import Tensor

# reordering sums lets them use vector registers; infinities and NaN keep their meaning (so no full fastmath)
_REORDER = {"reassoc", "contract", "nsz"}


def _compiled(*, reorder: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a loop at its first call and keep the machine code on disk.

    Shape checks of the test run wrap every function of the package; the compiler needs what they wrap.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        plain = inspect.unwrap(function)
        options: dict[str, Any] = {"fastmath": _REORDER if reorder else False, "nogil": True}
        try:
            compiled: Callable[..., Any] = numba.njit(cache=True, **options)(plain)
        except RuntimeError:
            # neither the installation nor the user's cache folder can be written: compile in every process
            compiled = numba.njit(**options)(plain)
        return compiled

    return decorate


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


class Measured(NamedTuple):
    """What one pass over a tensor (token, width) finds; arrays lie on the CPU.

    Attributes:
        moments: of all entries together.
        token_kurtosis: mean over tokens of the kurtosis of a token's entries.
        token_absmax: largest absolute entry of each token.
        token_squares: sum of squares of each token.
        channel_absmax: largest absolute entry of each channel.
        channel_squares: sum of squares of each channel.
        finite: whether every entry is finite; if not, nothing else here means anything.
    """

    moments: Moments
    token_kurtosis: float
    token_absmax: np.ndarray
    token_squares: np.ndarray
    channel_absmax: np.ndarray
    channel_squares: np.ndarray
    finite: bool


def measure(values: Float[Tensor, "token width"]) -> Measured:
    """Moments, maxima and sums of squares of a tensor in one pass.

    Each token is centred on its own mean while it lies in the nearest cache, then tokens are combined, so no large
    mean or single outlier can cancel digits. Float32 on the CPU takes a compiled loop, other devices torch; half
    precision on the CPU is widened first.
    """
    if values.device.type == "cpu":
        rows, absmax, channel_absmax, channel_squares = _measure_cpu(values.float().contiguous())
    else:
        rows, absmax, channel_absmax, channel_squares = _measure_torch(values)
    width = values.shape[1]
    finite = bool(np.isfinite(absmax).all())
    mean, m2, m3, m4, tokens_kurtosis = _combine(rows, width) if finite and len(rows) else (0.0,) * 5
    moments = Moments(rows.shape[0] * width, mean, m2, m3, m4)
    squares = rows[:, 1] + width * rows[:, 0] * rows[:, 0]
    return Measured(moments, tokens_kurtosis, absmax, squares, channel_absmax, channel_squares, finite)


def count_beyond(
    values: Float[Tensor, "token width"], absmax: np.ndarray, centre: float, radius: float, *, inclusive: bool = False
) -> int:
    """Number of entries with abs(x - centre) above `radius` (or equal to it, with `inclusive`).

    Exact, and cheap where such entries are rare: tokens whose largest absolute entry `absmax` rules them out are not
    read.
    """
    candidates = np.flatnonzero(absmax >= radius - abs(centre))
    if not len(candidates):
        return 0
    if values.device.type == "cpu":
        return int(_count(values.float().contiguous().numpy(), candidates, centre, radius, inclusive))
    distance = (values[torch.from_numpy(candidates).to(values.device)].double() - centre).abs()
    return int(((distance >= radius) if inclusive else (distance > radius)).sum())


def _measure_cpu(values: Float32[Tensor, "token width"]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    array = values.detach().numpy()
    tokens, width = array.shape
    rows, top = np.empty((tokens, 4)), np.zeros(tokens, np.int32)
    channel_top, channel_squares = np.zeros(width, np.int32), np.zeros(width)
    _sweep(array, array.view(np.int32), rows, top, channel_top, channel_squares)
    return rows, top.view(np.float32), channel_top.view(np.float32), channel_squares


def _measure_torch(values: Float[Tensor, "token width"]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    wide = values.detach().double()
    absolute = values.detach().abs().float()
    mean = wide.mean(1, keepdim=True)
    centred = wide - mean
    square = centred * centred
    sums = [mean[:, 0], square.sum(1), (square * centred).sum(1), (square * square).sum(1)]
    rows: Float64[Tensor, "token four"] = torch.stack(sums, 1)
    parts = (rows, absolute.amax(1), absolute.amax(0), (wide * wide).sum(0))
    copied = [part.cpu().numpy() for part in parts]
    return copied[0], copied[1], copied[2], copied[3]


@_compiled(reorder=True)
def _sweep(
    values: np.ndarray,
    bits: np.ndarray,
    rows: np.ndarray,
    top: np.ndarray,
    channel_top: np.ndarray,
    channel_squares: np.ndarray,
) -> None:
    """Fill per-token moments and maxima, and per-channel maxima and squares.

    Absolute values are compared as the bits of the float without its sign: the order is the same, integer maxima use
    vector registers, and NaN ends up above infinity instead of getting lost.
    """
    tokens, width = values.shape
    for token in range(tokens):
        total = 0.0
        largest = np.int32(0)
        for channel in range(width):
            value = np.float64(values[token, channel])
            absolute = bits[token, channel] & np.int32(0x7FFFFFFF)
            total += value
            largest = max(largest, absolute)
            channel_top[channel] = max(channel_top[channel], absolute)
            channel_squares[channel] += value * value
        mean = total / width
        m2 = m3 = m4 = 0.0
        for channel in range(width):
            centred = values[token, channel] - mean
            square = centred * centred
            m2 += square
            m3 += square * centred
            m4 += square * square
        rows[token, 0], rows[token, 1], rows[token, 2], rows[token, 3] = mean, m2, m3, m4
        top[token] = largest


@_compiled()
def _combine(rows: np.ndarray, width: int) -> tuple[float, float, float, float, float]:
    """Mean, m2, m3, m4 of all tokens together (Pébay's shift of centres), and the mean kurtosis of a token."""
    tokens = rows.shape[0]
    mean = 0.0
    for token in range(tokens):
        mean += rows[token, 0]
    mean /= tokens
    m2 = m3 = m4 = kurtosis = 0.0
    for token in range(tokens):
        shift, r2, r3, r4 = rows[token, 0] - mean, rows[token, 1], rows[token, 2], rows[token, 3]
        square = shift * shift
        m2 += r2 + width * square
        m3 += r3 + 3.0 * shift * r2 + width * square * shift
        m4 += r4 + 4.0 * shift * r3 + 6.0 * square * r2 + width * square * square
        kurtosis += r4 * width / (r2 * r2) if r2 > 0.0 else 1.0
    return mean, m2, m3, m4, kurtosis / tokens


@_compiled()
def _count(values: np.ndarray, candidates: np.ndarray, centre: float, radius: float, inclusive: bool) -> int:
    found = 0
    for token in candidates:
        for channel in range(values.shape[1]):
            distance = abs(values[token, channel] - centre)
            found += distance > radius or (inclusive and distance == radius)
    return found
