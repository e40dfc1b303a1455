"""The Hadamard transform of float32 rows in vector registers, as LLVM code inside a compiled loop.

The dense factor goes over `order` vectors of 16 lanes: a tile of its columns stays in registers while each vector is
read once. Before a tile is stored, its lanes are transformed by four exchanges each, so nothing has to be transposed.
What is left, the blocks, is butterflies over contiguous memory.
"""

# numba infers the types of compiled loops at each call
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from quant_bench.numerics.compiled import compiled
from quant_bench.numerics.llvm import Loop, broadcast, load, number, store

LANES = 16
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_WIDE, _MIDDLE, _NARROW = 12, 6, 4


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Product of a and b, plus c; fused where the processor can."""
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def _mix_lanes(builder: Any, value: Any) -> Any:
    """A vector times Sylvester's matrix of order 16."""
    distance = 1
    while distance < LANES:
        places = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [lane ^ distance for lane in range(LANES)])
        signs = ir.Constant(_VECTOR, [-1.0 if lane & distance else 1.0 for lane in range(LANES)])
        value = _multiply_add(builder, value, signs, builder.shuffle_vector(value, value, places))
        distance *= 2
    return value


def _tile(columns: int, *, mixed: bool, onto: bool = False) -> Any:
    """Code of `columns` neighbouring columns of the dense factor.

    The intrinsic gets addresses and sizes in bytes: source and target of the first vector, distance of neighbouring
    vectors at both, factor's entry of the first line and column, bytes a line of it, and the number of lines.

    Args:
        columns: of the tile, each in a register.
        mixed: transform the lanes of each result.
        onto: add to what lies at the target (before lanes are transformed).
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target, step, target_step, entries, pitch, lines = arguments
        targets = [builder.add(target, builder.mul(target_step, number(column))) for column in range(columns)]
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        loop = Loop(builder, lines, [load(builder, _VECTOR, place, 4) if onto else zero for place in targets])
        vector = load(builder, _VECTOR, builder.add(source, builder.mul(loop.index, step)), 4)
        line = builder.add(entries, builder.mul(loop.index, pitch))
        results = []
        for column in range(columns):
            entry = load(builder, _FLOAT, builder.add(line, number(4 * column)), 4)
            results.append(_multiply_add(builder, broadcast(builder, entry, _VECTOR), vector, loop.values[column]))
        loop.close(results)
        for place, value in zip(targets, results, strict=True):
            store(builder, _mix_lanes(builder, value) if mixed else value, place, 4)
        return context.get_dummy_value()

    def typed(
        typing: Any, source: Any, target: Any, step: Any, target_step: Any, entries: Any, pitch: Any, lines: Any
    ) -> Any:
        return types.void(*[types.int64] * 7), generate

    return intrinsic(typed)


_wide_mixed, _narrow_mixed, _single_mixed = (_tile(columns, mixed=True) for columns in (_WIDE, _NARROW, 1))
_wide, _narrow, _single = (_tile(columns, mixed=False) for columns in (_WIDE, _NARROW, 1))
_wide_onto, _middle_onto, _single_onto = (_tile(columns, mixed=True, onto=True) for columns in (_WIDE, _MIDDLE, 1))


@compiled()
def _butterflies(row, span):
    """Sylvester's matrix over the blocks of `span` numbers of a row, in place."""
    while span < row.shape[0]:
        for start in range(0, row.shape[0], 2 * span):
            left = row[start : start + span]
            right = row[start + span : start + 2 * span]
            for k in range(span):
                a, b = left[k], right[k]
                left[k], right[k] = a + b, a - b
        span *= 2


@compiled()
def transform_rows(x, base, step, mixed, out):
    """Transform each row of x; arguments as numpy arrays.

    Args:
        x: float32 (token, width), contiguous; the width is a multiple of `order · step`.
        base: float32 (order, order), the dense factor with the normalization of all factors.
        step: numbers between neighbours of the index that the dense factor mixes, a multiple of 16.
        mixed: transform each 16 lanes, too (then `step` is 16).
        out: as x; another array.
    """
    order = base.shape[0]
    width = x.shape[1]
    span = order * step
    entries, pitch = base.ctypes.data, 4 * order
    for token in range(x.shape[0]):
        source, target = x[token].ctypes.data, out[token].ctypes.data
        for start in range(0, width, span):
            for lane in range(0, step, LANES):
                place = 4 * (start + lane)
                column = 0
                while column < order:
                    a, b, c = source + place, target + place + 4 * column * step, entries + 4 * column
                    if column + _WIDE <= order:
                        if mixed:
                            _wide_mixed(a, b, 4 * step, 4 * step, c, pitch, order)
                        else:
                            _wide(a, b, 4 * step, 4 * step, c, pitch, order)
                        column += _WIDE
                    elif column + _NARROW <= order:
                        if mixed:
                            _narrow_mixed(a, b, 4 * step, 4 * step, c, pitch, order)
                        else:
                            _narrow(a, b, 4 * step, 4 * step, c, pitch, order)
                        column += _NARROW
                    else:
                        if mixed:
                            _single_mixed(a, b, 4 * step, 4 * step, c, pitch, order)
                        else:
                            _single(a, b, 4 * step, 4 * step, c, pitch, order)
                        column += 1
        _butterflies(out[token], span)


@compiled()
def transform_paired_rows(x, core, out):
    """The same where the dense factor is of Paley's second kind, C ⊗ S + I ⊗ R of orders half and 2: half the work.

    With u the sums and differences of neighbouring vectors, column (j, 0) is Σ C[i, j] u[i, 0] + u[j, 1], and column
    (j, 1) is Σ C[i, j] u[i, 1] - u[j, 0].

    Args:
        x: float32 (token, width), contiguous.
        core: float32 (half, half), C with the normalization of all factors.
        out: as x; another array.
    """
    half = core.shape[0]
    width, span, part = x.shape[1], 2 * half * LANES, half * LANES
    scale = abs(core[0, 1])
    both = np.empty(span, np.float32)
    entries, pitch, step = core.ctypes.data, 4 * half, 4 * LANES
    for token in range(x.shape[0]):
        for start in range(0, width, span):
            row, result = x[token, start : start + span], out[token, start : start + span]
            for i in range(half):
                for k in range(LANES):
                    a, b = row[2 * i * LANES + k], row[(2 * i + 1) * LANES + k]
                    both[i * LANES + k], both[part + i * LANES + k] = a + b, a - b
                    result[2 * i * LANES + k], result[(2 * i + 1) * LANES + k] = scale * (a - b), -scale * (a + b)
            for odd in range(2):
                source, target = both.ctypes.data + 4 * odd * part, result.ctypes.data + odd * step
                column = 0
                while column < half:
                    place, entry = target + 2 * step * column, entries + 4 * column
                    if column + _WIDE <= half:
                        _wide_onto(source, place, step, 2 * step, entry, pitch, half)
                        column += _WIDE
                    elif column + _MIDDLE <= half:
                        _middle_onto(source, place, step, 2 * step, entry, pitch, half)
                        column += _MIDDLE
                    else:
                        _single_onto(source, place, step, 2 * step, entry, pitch, half)
                        column += 1
        _butterflies(out[token], span)
