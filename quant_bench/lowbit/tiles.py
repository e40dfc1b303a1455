"""Compiled loops of the VNNI product: packing weights into panels, tiles with their epilogue, and single tokens.

Arrays come in plain tuples: numba resolves those quickly at each call, and parameter lists stay short.

    activation = (codes int8 (token, 4·words), scale (1 or group, token), zero, sums (group, token), by_group)
    weight     = (scale float32 (group, row), zero int32, sum int32 Σ (w - z_w), bias, has_bias, asymmetric, stride)

Rows are filled up to whole panels and tokens to whole tiles. `asymmetric`: either operand has a zero point.
"""

# numba infers the types of compiled loops at each call
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
import numpy as np

from quant_bench.lowbit.threads import compiled
from quant_bench.lowbit.vnni import LANES, PANEL, TOKENS, dot_bytes, dot_nibbles, tile


@compiled
def _offset_row(codes, columns, packed, group, stride, out):
    """One weight row as unsigned bytes code + 128, each group at a multiple of `stride`."""
    half = codes.shape[0]
    for index in range((columns + group - 1) // group):
        first = index * group
        last = min(first + group, columns)
        to = index * stride
        if packed:
            _low(codes[first : min(last, half)], out[to:])
            _high(codes[max(first, half) - half : max(last - half, 0)], out[to + max(half - first, 0) :])
        else:
            _bytes(codes[first:last], out[to:])


@compiled
def _low(nibbles, out):
    for k in range(nibbles.shape[0]):
        out[k] = (nibbles[k] & np.uint8(15)) + np.uint8(120)


@compiled
def _high(nibbles, out):
    for k in range(nibbles.shape[0]):
        out[k] = (nibbles[k] >> np.uint8(4)) + np.uint8(120)


@compiled
def _bytes(codes, out):
    for k in range(codes.shape[0]):
        out[k] = codes[k] ^ np.uint8(128)


@compiled
def _transpose(block, out):
    for row in range(LANES):
        for k in range(out.shape[0]):
            out[k, row] = block[row, k]


@compiled
def pack_panels(start, stop, codes, layout, panels):
    """Panels start..stop of 64 weight rows each: four neighbouring columns of all rows, then the next four.

    Args:
        start: first panel.
        stop: panel after the last.
        codes: uint8 (row, col) as stored: bytes of int8 codes, or two nibbles a byte.
        layout: (columns unpacked, whether codes are nibbles, columns of a group, columns it takes in a panel).
        panels: int32 (panel, column / 4, 64).
    """
    columns, packed, group, stride = layout
    rows = codes.shape[0]
    words = panels.shape[1]
    # 64 bytes between the rows' ends: a power of two as pitch would put all rows into the same cache sets
    flat = np.zeros((PANEL, 4 * words + 64), np.uint8)
    quads = flat.view(np.int32)
    for panel in range(start, stop):
        for row in range(min(PANEL, rows - panel * PANEL)):
            _offset_row(codes[panel * PANEL + row], columns, packed, group, stride, flat[row])
        for k0 in range(0, words, LANES):
            for row0 in range(0, PANEL, LANES):
                _transpose(quads[row0 : row0 + LANES, k0:], panels[panel, k0 : k0 + LANES, row0:])


@compiled
def _tile_at(codes, sums, panels, place, acc):
    """One tile of one group: place = (token, panel, group, stride)."""
    token, panel, group, stride = place
    pitch = codes.shape[1]
    column = group * stride
    steps = min(stride, pitch - column) // 4
    a = codes.ctypes.data + token * pitch + column
    w = panels.ctypes.data + (panel * (pitch // 4) + column // 4) * 4 * PANEL
    total = sums.ctypes.data + 4 * (group * sums.shape[1] + token)
    tile(a, pitch, w, steps, total, acc.ctypes.data)


@compiled
def _correct(acc, activation, weight, place):
    """Acc -= z_w · Σ a + z_a · Σ (w - z_w)."""
    _, _, zero, sums, by_group = activation
    _, weight_zero, weight_sum, _, _, _, _ = weight
    token0, panel, group, _ = place
    row0 = panel * PANEL
    for token in range(TOKENS):
        total = sums[group, token0 + token]
        centre = zero[group if by_group else 0, token0 + token]
        centres = weight_zero[group, row0 : row0 + PANEL]
        row_sums = weight_sum[group, row0 : row0 + PANEL]
        for row in range(PANEL):
            acc[token, row] -= centres[row] * total + centre * row_sums[row]


@compiled
def _scale(acc, activation, weight, place, total):
    """Total (+)= (acc · weight_scale) · activation_scale, the last factor only if it differs between groups."""
    _, scale, _, _, by_group = activation
    token0, panel, group, _ = place
    weight_scale = weight[0][group, panel * PANEL : (panel + 1) * PANEL]
    for token in range(TOKENS):
        factor = scale[group, token0 + token] if by_group else np.float32(1.0)
        if group == 0:
            for row in range(PANEL):
                total[token, row] = (np.float32(acc[token, row]) * weight_scale[row]) * factor
        else:
            for row in range(PANEL):
                total[token, row] += (np.float32(acc[token, row]) * weight_scale[row]) * factor


@compiled
def _store(total, activation, weight, place, out):
    """Out = total · activation_scale (unless that was done by group) + bias, without the rows and tokens filled up."""
    _, scale, _, _, by_group = activation
    _, _, _, bias, has_bias, _, _ = weight
    token0, panel, _, _ = place
    row0 = panel * PANEL
    rows = min(PANEL, out.shape[1] - row0)
    for token in range(min(TOKENS, out.shape[0] - token0)):
        factor = np.float32(1.0) if by_group else scale[0, token0 + token]
        target = out[token0 + token, row0:]
        if has_bias:
            added = bias[row0:]
            for row in range(rows):
                target[row] = total[token, row] * factor + added[row]
        else:
            for row in range(rows):
                target[row] = total[token, row] * factor


@compiled
def multiply(start, stop, activation, weight, panels, out):
    """Token tiles start..stop of the whole layer: products, zero points, scales and bias."""
    codes, _, _, sums, _ = activation
    scale, _, _, _, _, asymmetric, stride = weight
    acc = np.empty((TOKENS, PANEL), np.int32)
    total = np.empty((TOKENS, PANEL), np.float32)
    for panel in range(panels.shape[0]):
        for block in range(start, stop):
            for group in range(scale.shape[0]):
                place = (block * TOKENS, panel, group, stride)
                _tile_at(codes, sums, panels, place, acc)
                if asymmetric:
                    _correct(acc, activation, weight, place)
                _scale(acc, activation, weight, place, total)
            _store(total, activation, weight, (block * TOKENS, panel, 0, stride), out)


@compiled
def products(start, stop, codes, sums, panels, out):
    """Token tiles start..stop of the plain product Σ a · w, into int32 (token, row)."""
    acc = np.empty((TOKENS, PANEL), np.int32)
    for panel in range(panels.shape[0]):
        rows = min(PANEL, out.shape[1] - panel * PANEL)
        for block in range(start, stop):
            token0 = block * TOKENS
            _tile_at(codes, sums, panels, (token0, panel, 0, codes.shape[1]), acc)
            for token in range(min(TOKENS, out.shape[0] - token0)):
                for row in range(rows):
                    out[token0 + token, panel * PANEL + row] = acc[token, row]


@compiled
def _row_address(codes, row, layout, flat):
    """Address of a weight row that `dot_bytes` can read: the stored bytes, or `flat` where they are unpacked to."""
    columns, packed, group, stride = layout
    if not packed and columns == stride:
        return codes.ctypes.data + row * columns
    _offset_row(codes[row], columns, packed, group, stride, flat)
    flat ^= np.uint8(128)
    return flat.ctypes.data


@compiled
def few_tokens(start, stop, activation, weight, codes, layout, out):
    """Weight rows start..stop for a few tokens, straight from the stored codes: packing panels would cost more.

    Here a group takes a multiple of 64 columns in the activation codes, filled up with 0.
    """
    a, scale, zero, sums, by_group = activation
    weight_scale, weight_zero, weight_sum, bias, has_bias, _, stride = weight
    columns, packed, _, _ = layout
    groups = weight_scale.shape[0]
    nibbles = packed and columns == stride and columns % 64 == 0
    flat = np.zeros(a.shape[1], np.uint8)
    base = np.int32(8) if nibbles else np.int32(128)
    at = flat.ctypes.data
    for row in range(start, stop):
        if not nibbles:
            at = _row_address(codes, row, layout, flat)
        for token in range(out.shape[0]):
            total = np.float32(0.0)
            for index in range(groups):
                address = a.ctypes.data + token * a.shape[1] + index * stride
                if nibbles:
                    half = columns // 2
                    acc = dot_nibbles(codes.ctypes.data + row * half, address, columns // 64, half)
                else:
                    acc = dot_bytes(at + index * stride, address, stride // 64)
                own = index if by_group else 0
                centre = base + weight_zero[index, row]
                acc -= centre * sums[index, token] + zero[own, token] * weight_sum[index, row]
                term = np.float32(np.int32(acc)) * weight_scale[index, row]
                if by_group:
                    term *= scale[index, token]
                total = term if index == 0 else total + term
            if not by_group:
                total *= scale[0, token]
            if has_bias:
                total += bias[row]
            out[token, row] = total
