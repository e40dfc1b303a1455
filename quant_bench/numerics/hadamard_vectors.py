"""The Hadamard transform of float32 rows in vector registers, as LLVM code inside a compiled loop.

The dense factor goes over `order` vectors of 16 lanes: a tile of its columns stays in registers while each vector is
read once. Before a tile is stored, its lanes are transformed by four exchanges each, so nothing has to be transposed.
What is left, the blocks, is butterflies over contiguous memory.
"""

# numba infers the types of compiled loops at each call
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from quant_bench.numerics.compiled import compiled
from quant_bench.numerics.llvm import Loop, broadcast, load, number, store

LANES = 16
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_WIDE, _NARROW = 12, 4


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


def _tile(columns: int, *, mixed: bool) -> Any:
    """Code of `columns` neighbouring columns of the dense factor.

    The intrinsic gets addresses and sizes in bytes: source and target of the first vector, distance of neighbouring
    vectors, factor's entry of the first line and column, bytes a line of it, and the number of lines.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target, step, entries, pitch, lines = arguments
        loop = Loop(builder, lines, [ir.Constant(_VECTOR, [0.0] * LANES)] * columns)
        vector = load(builder, _VECTOR, builder.add(source, builder.mul(loop.index, step)), 4)
        line = builder.add(entries, builder.mul(loop.index, pitch))
        results = []
        for column in range(columns):
            entry = load(builder, _FLOAT, builder.add(line, number(4 * column)), 4)
            results.append(_multiply_add(builder, broadcast(builder, entry, _VECTOR), vector, loop.values[column]))
        loop.close(results)
        for column, value in enumerate(results):
            value = _mix_lanes(builder, value) if mixed else value
            store(builder, value, builder.add(target, builder.mul(step, number(column))), 4)
        return context.get_dummy_value()

    def typed(typing: Any, source: Any, target: Any, step: Any, entries: Any, pitch: Any, lines: Any) -> Any:
        return types.void(*[types.int64] * 6), generate

    return intrinsic(typed)


_wide_mixed, _narrow_mixed, _single_mixed = (_tile(columns, mixed=True) for columns in (_WIDE, _NARROW, 1))
_wide, _narrow, _single = (_tile(columns, mixed=False) for columns in (_WIDE, _NARROW, 1))


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
                            _wide_mixed(a, b, 4 * step, c, pitch, order)
                        else:
                            _wide(a, b, 4 * step, c, pitch, order)
                        column += _WIDE
                    elif column + _NARROW <= order:
                        if mixed:
                            _narrow_mixed(a, b, 4 * step, c, pitch, order)
                        else:
                            _narrow(a, b, 4 * step, c, pitch, order)
                        column += _NARROW
                    else:
                        if mixed:
                            _single_mixed(a, b, 4 * step, c, pitch, order)
                        else:
                            _single(a, b, 4 * step, c, pitch, order)
                        column += 1
        result = out[token]
        while span < width:
            for start in range(0, width, 2 * span):
                left = result[start : start + span]
                right = result[start + span : start + 2 * span]
                for k in range(span):
                    a, b = left[k], right[k]
                    left[k], right[k] = a + b, a - b
            span *= 2
        span = order * step
