"""Compiled loops of the VNNI product: packing weights into panels, tiles with their epilogue, and single tokens.

Arrays come in plain tuples: numba resolves those quickly at each call, and parameter lists stay short.

    activation = (codes int8 (token, 4·words), scale (1 or group, token), zero, sums (group, token), by_group)
    weight     = (scale float32 (group, row), zero int32, sum int32 Σ (w - z_w), bias, has_bias, asymmetric, stride)

Rows are filled up to whole panels and tokens to whole tiles. `asymmetric`: either operand has a zero point.
"""

# numba infers the types of compiled loops at each call
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
import numpy as np

from quant_bench.lowbit import vnni
from quant_bench.lowbit.fused import quantize_rows
from quant_bench.lowbit.threads import compiled, inlined
from quant_bench.lowbit.vnni import LANES, PANEL, TOKENS, dot_bytes, dot_nibbles

# bytes of activation codes that stay in the L2 cache while all panels pass by
_CHUNK = 1 << 18


@inlined
def _low(nibbles, plus, out):
    for k in range(nibbles.shape[0]):
        out[k] = (nibbles[k] & np.uint8(15)) + plus


@inlined
def _high(nibbles, plus, out):
    for k in range(nibbles.shape[0]):
        out[k] = (nibbles[k] >> np.uint8(4)) + plus


@compiled
def _unpack(codes, layout, flip, out):
    """One weight row as bytes, each group at a multiple of `stride`: code + 128 if `flip` is 128, code if it is 0."""
    columns, packed, group, stride = layout
    half = codes.shape[0]
    # nibbles hold code + 8
    plus = np.uint8(flip - 8)
    if packed and (group == stride or columns <= group):
        _low(codes, plus, out)
        _high(codes[: columns - half], plus, out[half:])
        return
    for index in range((columns + group - 1) // group):
        first = index * group
        last = min(first + group, columns)
        target = out[index * stride :]
        if packed:
            _low(codes[first : min(last, half)], plus, target)
            _high(codes[max(first, half) - half : max(last - half, 0)], plus, target[max(half - first, 0) :])
        else:
            source = codes[first:last]
            for k in range(source.shape[0]):
                target[k] = source[k] ^ flip


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
    rows = codes.shape[0]
    words = panels.shape[1]
    # 64 bytes between the rows' ends: a power of two as pitch would put all rows into the same cache sets
    flat = np.zeros((PANEL, 4 * words + 64), np.uint8)
    quads = flat.view(np.int32)
    for panel in range(start, stop):
        for row in range(min(PANEL, rows - panel * PANEL)):
            _unpack(codes[panel * PANEL + row], layout, np.uint8(128), flat[row])
        for k0 in range(0, words, LANES):
            for row0 in range(0, PANEL, LANES):
                _transpose(quads[row0 : row0 + LANES, k0:], panels[panel, k0 : k0 + LANES, row0:])


@inlined
def _run(place, corrected, added):
    """The tile for these flags; added: 0 nothing, 1 the bias, 2 the total so far."""
    if corrected:
        if added == 0:
            vnni.corrected_tile(place)
        elif added == 1:
            vnni.corrected_tile_with_bias(place)
        else:
            vnni.corrected_tile_onto_total(place)
    elif added == 0:
        vnni.tile(place)
    elif added == 1:
        vnni.tile_with_bias(place)
    else:
        vnni.tile_onto_total(place)


@inlined
def _copy(buffer, out, token0, row0):
    """The part of an overhanging tile that the result has."""
    rows = min(PANEL, out.shape[1] - row0)
    for token in range(min(TOKENS, out.shape[0] - token0)):
        if rows == PANEL:
            for row in range(PANEL):
                out[token0 + token, row0 + row] = buffer[token, row]
        else:
            for row in range(rows):
                out[token0 + token, row0 + row] = buffer[token, row]


@inlined
def _close_groups(total, scale, token0, by_group, bias, row0, has_bias):
    """Total = total · scale of the token (unless that was done group by group) + bias, in place."""
    for token in range(TOKENS):
        factor = np.float32(1.0) if by_group else scale[0, token0 + token]
        if has_bias:
            for row in range(PANEL):
                total[token, row] = total[token, row] * factor + bias[row0 + row]
        else:
            for row in range(PANEL):
                total[token, row] *= factor


@inlined
def _address(array):
    """As a signed number: numba makes a float64 of signed plus unsigned."""
    return np.int64(array.ctypes.data)


@compiled
def multiply(start, stop, activation, weight, panels, out):
    """Token tiles start..stop of the whole layer: products, zero points, scales and bias."""
    codes, scale, zero, sums, by_group = activation
    row_scale, row_zero, row_sum, bias, has_bias, corrected, stride = weight
    pitch, padded, tokens = codes.shape[1], row_scale.shape[1], sums.shape[1]
    groups = row_scale.shape[0]
    once = groups == 1
    buffer = np.empty((TOKENS, PANEL), np.float32)
    ones = np.ones(TOKENS, np.float32)
    # taking an address counts a reference, too dear for the inner loop
    base = (_address(codes), _address(panels), _address(sums), _address(scale), _address(zero))
    row_base = (_address(row_scale), _address(row_zero), _address(row_sum), _address(bias))
    at_buffer, at_out, at_ones = _address(buffer), _address(out), _address(ones)
    line = np.int64(4 * out.shape[1])
    for panel in range(panels.shape[0]):
        row0 = panel * PANEL
        for block in range(start, stop):
            token0 = block * TOKENS
            direct = once and row0 + PANEL <= out.shape[1] and token0 + TOKENS <= out.shape[0]
            for group in range(groups):
                column = group * stride
                token = 4 * ((group if by_group else 0) * tokens + token0)
                row = 4 * (group * padded + row0)
                place = (
                    base[0] + token0 * pitch + column,
                    np.int64(pitch),
                    base[1] + (panel * pitch + column) * PANEL,
                    np.int64(min(stride, pitch - column) // 4),
                    base[2] + 4 * (group * tokens + token0),
                    base[3] + token if once or by_group else at_ones,
                    base[4] + token,
                    row_base[0] + row,
                    row_base[1] + row,
                    row_base[2] + row,
                    row_base[3] + 4 * row0,
                    at_out + token0 * line + 4 * row0 if direct else at_buffer,
                    line if direct else np.int64(4 * PANEL),
                )
                _run(place, corrected, (1 if has_bias else 0) if once else (0 if group == 0 else 2))
            if not direct:
                if not once:
                    _close_groups(buffer, scale, token0, by_group, bias, row0, has_bias)
                _copy(buffer, out, token0, row0)


@compiled
def quantize_and_multiply(start, stop, x, rule, rows, weight, panels, out):
    """Token tiles start..stop of the whole layer, from float32 to float32, chunk by chunk.

    `x`, `rule` and `rows` are those of `quantize_rows`.
    """
    codes, scale, zero, sums, _ = rows
    activation = (codes, scale, zero, sums, rule[3])
    chunk = max(1, _CHUNK // (TOKENS * codes.shape[1]))
    for first in range(start, stop, chunk):
        last = min(first + chunk, stop)
        quantize_rows(first * TOKENS, last * TOKENS, x, rule, rows)
        multiply(first, last, activation, weight, panels, out)


@compiled
def products(start, stop, codes, sums, panels, out):
    """Token tiles start..stop of the plain product Σ a · w, into int32 (token, row)."""
    buffer = np.empty((TOKENS, PANEL), np.int32)
    pitch = codes.shape[1]
    none = np.int64(0)
    for panel in range(panels.shape[0]):
        for block in range(start, stop):
            token0 = block * TOKENS
            a = _address(codes) + token0 * pitch
            w = _address(panels) + panel * pitch * PANEL
            total = _address(sums) + 4 * token0
            nothing = (none, none, none, none, none, none)
            vnni.integer_tile((a, pitch, w, pitch // 4, total, *nothing, _address(buffer), 4 * PANEL))
            _copy(buffer, out, token0, panel * PANEL)


@compiled
def few_tokens(start, stop, x, rule, weight, codes, layout, out):
    """Weight rows start..stop for a few tokens, straight from the stored codes: packing panels would cost more.

    Every thread rounds the tokens for itself. Here a group takes a multiple of 64 columns of the activation codes.
    """
    weight_scale, weight_zero, weight_sum, bias, has_bias, _, stride = weight
    columns, packed, _, _ = layout
    groups, tokens = weight_scale.shape[0], out.shape[0]
    by_group = rule[3]
    scales = groups if by_group else 1
    a = np.empty((tokens, groups * stride), np.int8)
    scale, zero = np.empty((scales, tokens), np.float32), np.empty((scales, tokens), np.int32)
    sums, norms = np.empty((groups, tokens), np.int32), np.empty(tokens, np.int32)
    quantize_rows(0, tokens, (x, x.view(np.int32)), rule, (a, scale, zero, sums, norms))
    nibbles = packed and columns == stride
    flat = np.zeros(a.shape[1], np.uint8)
    base = np.int32(8) if nibbles else np.int32(128)
    at_codes, at_flat, at_a = _address(codes), _address(flat), _address(a)
    for row in range(start, stop):
        at = at_flat
        if nibbles:
            at = at_codes + row * (columns // 2)
        elif not packed and columns == stride:
            at = at_codes + row * columns
        else:
            _unpack(codes[row], layout, np.uint8(0), flat)
        for token in range(tokens):
            total = np.float32(0.0)
            for index in range(groups):
                address = at_a + (token * groups + index) * stride
                if nibbles:
                    acc = dot_nibbles(at, address, np.int64(columns // 64), np.int64(columns // 2))
                else:
                    acc = dot_bytes(at + index * stride, address, np.int64(stride // 64))
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
