"""Compiled loops around the products: rounding rows to codes, and scaling accumulators, each in one pass over memory.

Plain-torch equals are in `activation.py` and `plain.py`; tests demand equal bits. Per-token numbers are stored group
first, (group, token), so that the numbers of neighbouring tokens lie side by side.
"""

# numba infers the types of compiled loops at each call
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from quant_bench.lowbit.threads import compiled, inlined

# how the range of a row is found
SYMMETRIC, ASYMMETRIC, STATIC = 0, 1, 2

# adding and subtracting 1.5 · 2^23 rounds a float32 half to even, and unlike rint it always becomes vector code
_ROUND = np.float32(12582912.0)
# scales between which a quotient below 2^100 is rounded rightly without a division
_SMALL, _LARGE = np.float32(1e-25), np.float32(1e25)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY_BITS = np.int32(0x7F800000)


# loops run from 0 over slices, since a start that might be negative costs a test an element, and sums are cast back,
# since numba widens 32-bit integers to 64: either would cost the vector code, or half of it


@compiled
def _largest_magnitude(words):
    """Largest |x| as float32 bits: integer maxima become vector code, and NaN counts as above infinity."""
    largest = np.int32(0)
    for k in range(words.shape[0]):
        largest = np.int32(max(largest, np.int32(words[k] & _MAGNITUDE)))
    return largest


@compiled
def _extremes(words):
    """Smallest and largest x, 0 included, in an order-preserving integer form of float32 bits."""
    low = np.int32(0)
    high = np.int32(0)
    for k in range(words.shape[0]):
        sign = np.int32(words[k] >> np.int32(31))
        ordered = np.int32(words[k] ^ np.int32(sign & _MAGNITUDE))
        low = np.int32(min(low, ordered))
        high = np.int32(max(high, ordered))
    return low, high


@compiled
def _range(words, mode, grid_high, bits, floats):
    """Scale and zero point (on the grid) of one range of values, as `numerics.scale_and_zero` defines them.

    `bits` and `floats` are two views of the same two words, to read one as the other.
    """
    zero = np.float32(0.0)
    largest = _largest_magnitude(words)
    if largest >= _INFINITY_BITS:
        return np.float32(np.nan), zero
    if mode == SYMMETRIC:
        bits[0] = largest
        scale = floats[0] / grid_high
    else:
        low, high = _extremes(words)
        bits[0] = low ^ ((low >> np.int32(31)) & _MAGNITUDE)
        bits[1] = high
        scale = (floats[1] - floats[0]) / grid_high
    if scale == np.float32(0.0):
        return np.float32(1.0), zero
    if not np.isfinite(scale):
        return np.float32(np.nan), zero
    if mode == ASYMMETRIC:
        zero = (np.float32(-floats[0]) / scale + _ROUND) - _ROUND
        zero = min(max(zero, np.float32(0.0)), grid_high)
    return scale, zero


@intrinsic  # type: ignore[untyped-decorator]
def _fused_multiply_add(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """A · b + c, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@inlined
def _divide(value, scale, inverse):
    """The correctly rounded quotient, three times as fast as the division that nothing else may replace.

    Source: Markstein 1990, theorem on the final step of a division, https://doi.org/10.1147/rd.341.0111.
    """
    quotient = value * inverse
    return _fused_multiply_add(_fused_multiply_add(-quotient, scale, value), inverse, quotient)


@compiled
def quotients(values, scale):
    """Each value over the scale as `quantize_rows` divides, for the test that no rounding differs."""
    out = np.empty_like(values)
    for k in range(values.shape[0]):
        out[k] = _divide(values[k], scale, np.float32(1.0) / scale)
    return out


@inlined
def _code(quotient, low, high):
    return np.int32((min(max(quotient, low), high) + _ROUND) - _ROUND)


@compiled
def _write(values, scale, span, out):
    """Rounded values of one range; sums of codes and magnitudes.

    span = (low, high, shift added after clamping, whether the range covers all values).
    """
    low, high, shift, covered = span
    total = np.int32(0)
    norm = np.int32(0)
    inverse = np.float32(1.0) / scale
    # remainder and quotient must stay normal numbers, and a value far outside of a static range has no such quotient
    if covered and _SMALL < scale < _LARGE:
        for k in range(values.shape[0]):
            code = _code(_divide(values[k], scale, inverse), low, high)
            norm = np.int32(norm + np.int32(abs(code)))
            code = np.int32(code + shift)
            total = np.int32(total + code)
            out[k] = code
    else:
        for k in range(values.shape[0]):
            code = _code(values[k] / scale, low, high)
            norm = np.int32(norm + np.int32(abs(code)))
            code = np.int32(code + shift)
            total = np.int32(total + code)
            out[k] = code
    return total, norm


@compiled
def quantize_rows(start, stop, x, rule, out):
    """Round rows start..stop of x to codes in one pass over memory.

    Args:
        start: first row.
        stop: row after the last; rows that x does not have are filled with zeros.
        x: (values float32 (token, col), the same memory as int32).
        rule: (mode; grid, float32 [low, high, offset]; static, float32 [scale, zero point on the grid]; by_group: one
            range a group instead of one a row; group: columns of a group of accumulators; stride: columns that it
            takes in the codes, what is left over is 0).
        out: (codes int8, stored codes, or float32, code minus zero point; scale float32 (1 or group, token); zero int32
            of the same shape, in the coordinates of the stored codes; sums int32 (group, token) of what was written;
            norms int32 (token), Σ |code - zero point|).
    """
    values, words = x
    mode, grid, static, by_group, group, stride = rule
    codes, scale, zero, sums, norms = out
    tokens, columns = values.shape
    bits = np.empty(2, np.int32)
    floats = bits.view(np.float32)
    row_scale, row_zero = static[0], static[1]
    for row in range(start, stop):
        norms[row] = 0
        if row >= tokens:
            codes[row] = 0
            sums[:, row] = 0
            scale[:, row] = 0
            zero[:, row] = 0
            continue
        if mode == STATIC:
            broken = _largest_magnitude(words[row]) > _INFINITY_BITS
            row_scale = np.float32(np.nan) if broken else static[0]
        for index in range(sums.shape[0]):
            first = index * group
            last = min(first + group, columns)
            if by_group or index == 0:
                if mode != STATIC:
                    end = last if by_group else columns
                    row_scale, row_zero = _range(words[row, first:end], mode, grid[1], bits, floats)
                scale[index, row] = row_scale
                zero[index, row] = np.int32(row_zero - grid[2])
            shift = np.int32(row_zero - grid[2]) if codes.itemsize == 1 else np.int32(0)
            to = index * stride
            if np.isnan(row_scale):
                codes[row, to : to + last - first] = shift
                sums[index, row] = shift * (last - first)
            else:
                span = (grid[0] - row_zero, grid[1] - row_zero, shift, mode != STATIC)
                total, norm = _write(values[row, first:last], row_scale, span, codes[row, to:])
                sums[index, row] = total
                norms[row] += norm
            codes[row, to + last - first : min(to + stride, codes.shape[1])] = 0


@compiled
def correct(start, stop, acc, activation, weight):
    """Acc -= z_w · Σ a + z_a · Σ (w - z_w), in integers: rows start..stop of a (token, row) tile, in place.

    activation = (zero, sums), each (token); weight = (zero, Σ (w - z_w)), each (row).
    """
    zero, sums = activation
    weight_zero, weight_sum = weight
    for token in range(start, stop):
        total = sums[token]
        centre = zero[token]
        for row in range(acc.shape[1]):
            acc[token, row] -= weight_zero[row] * total + centre * weight_sum[row]


@compiled
def less_rest(start, stop, acc, sums, rest, out):
    """Out = acc - Σ (a - z_a) · rest of z_w, in float32: what real zero points add to their whole numbers."""
    for token in range(start, stop):
        total = np.float32(sums[token])
        for row in range(acc.shape[1]):
            out[token, row] = np.float32(acc[token, row]) - total * rest[row]


@compiled
def accumulate(start, stop, acc, scales, first, out):
    """Out (+)= (acc · weight scale) · activation scale; scales = (of each row, of each token, whether the last counts).

    `acc` is int32 or float32 and may be `out` itself.
    """
    weight_scale, activation_scale, by_group = scales
    for token in range(start, stop):
        factor = activation_scale[token] if by_group else np.float32(1.0)
        if first:
            for row in range(acc.shape[1]):
                out[token, row] = (np.float32(acc[token, row]) * weight_scale[row]) * factor
        else:
            for row in range(acc.shape[1]):
                out[token, row] += (np.float32(acc[token, row]) * weight_scale[row]) * factor


@compiled
def finish(start, stop, out, activation_scale, scale_now, bias):
    """Out = out · activation_scale + bias, in place; an empty bias is none."""
    for token in range(start, stop):
        factor = activation_scale[token] if scale_now else np.float32(1.0)
        if bias.shape[0]:
            for row in range(out.shape[1]):
                out[token, row] = out[token, row] * factor + bias[row]
        else:
            for row in range(out.shape[1]):
                out[token, row] *= factor


@compiled
def scale_once(start, stop, acc, scales, bias, out):
    """Out = (acc · weight scale) · activation scale + bias: the whole epilogue of a product without groups."""
    weight_scale, activation_scale = scales
    for token in range(start, stop):
        factor = activation_scale[token]
        if bias.shape[0]:
            for row in range(acc.shape[1]):
                out[token, row] = (np.float32(acc[token, row]) * weight_scale[row]) * factor + bias[row]
        else:
            for row in range(acc.shape[1]):
                out[token, row] = (np.float32(acc[token, row]) * weight_scale[row]) * factor
