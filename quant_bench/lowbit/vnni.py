"""The inner loops of an integer product of our own for CPUs with AVX-512 VNNI, as LLVM code inside compiled loops.

`torch._int_mm` is as fast, but it writes every int32 accumulator to memory, and with groups of 128 columns it does so
for each group: most of the time goes there. Here a tile of 6 tokens × 64 rows stays in 24 registers for a whole group
and is scaled before it leaves the L1 cache. LLVM, which numba brings along, compiles it at run time, so no compiler
has to be installed.

The instruction multiplies unsigned by signed bytes: weights are used as w + 128, and 128 · Σ a is taken off again by
starting the accumulators at -128 · Σ a.
"""

import os
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import numba
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from quant_bench.numerics.llvm import Loop, broadcast, load, number

TOKENS, VECTORS, LANES = 6, 4, 16
PANEL = VECTORS * LANES
_WORD = ir.IntType(32)
_VECTOR, _BYTES = ir.VectorType(_WORD, LANES), ir.VectorType(ir.IntType(8), 64)
_FLOAT = ir.FloatType()
_FLOATS = ir.VectorType(_FLOAT, LANES)
_HALF = ir.VectorType(_WORD, 8)
_WITHOUT_VNNI = ("SSE41", "AVX", "AVX2", "AVX512_CORE")
_NAME = "llvm.x86.avx512.vpdpbusd.512"


@cache
def supported() -> bool:
    """Whether numba compiles for a processor with AVX-512 VNNI here, and oneDNN is not told to do without it.

    Who sets `ONEDNN_MAX_CPU_ISA` wants to see what another processor would do; our product takes part in that.
    """
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _WITHOUT_VNNI:
        return False
    config = numba.config
    if config.CPU_NAME is not None or config.CPU_FEATURES is not None or not config.ENABLE_AVX or config.DISABLE_JIT:
        # a restricted target may lack the instruction, and LLVM would end the process
        return False
    features = binding.get_host_cpu_features()
    return all(features.get(name, False) for name in ("avx512f", "avx512bw", "avx512vnni"))


def _multiply_add(builder: Any, acc: Any, unsigned: Any, signed: Any) -> Any:
    """Acc plus the sums of four products of neighbouring bytes (vpdpbusd, which does not saturate)."""
    # LLVM 22 changed the operands of the intrinsic from words to bytes
    operand = _BYTES if binding.llvm_version_info[0] >= 22 else _VECTOR
    function = builder.module.globals.get(_NAME)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(_VECTOR, [_VECTOR, operand, operand]), _NAME)
    return builder.call(function, [acc, builder.bitcast(unsigned, operand), builder.bitcast(signed, operand)])


class Place(NamedTuple):
    """Where a tile reads and writes, as addresses; the first four are per token or per row, as named.

    Attributes:
        a: activation codes of the first token at the group's first column.
        pitch: bytes from one token's codes to the next.
        panel: packed weights of the panel at the group's first column.
        steps: columns of the group divided by 4.
        sums: Σ a of each token.
        token_scale: activation scale of each token.
        token_zero: activation zero point of each token.
        row_scale: weight scale of each row.
        row_zero: weight zero point of each row.
        row_sum: Σ (w - z_w) of each row.
        bias: bias of each row.
        out: float32 result of the first token and row.
        out_pitch: bytes from one token's result to the next.
    """

    a: Any
    pitch: Any
    panel: Any
    steps: Any
    sums: Any
    token_scale: Any
    token_zero: Any
    row_scale: Any
    row_zero: Any
    row_sum: Any
    bias: Any
    out: Any
    out_pitch: Any


def _products(builder: Any, place: Place) -> list[Any]:
    """Accumulators of a tile, token by token: Σ a · (w + 128) - 128 · Σ a."""
    start = []
    for token in range(TOKENS):
        total = load(builder, _WORD, builder.add(place.sums, number(4 * token)), 4)
        start += [broadcast(builder, builder.neg(builder.shl(total, number(7, _WORD))), _VECTOR)] * VECTORS
    rows = [builder.add(place.a, builder.mul(place.pitch, number(token))) for token in range(TOKENS)]
    loop = Loop(builder, place.steps, start)
    column = builder.shl(loop.index, number(2))
    base = builder.add(place.panel, builder.shl(loop.index, number(8)))
    weights = [load(builder, _VECTOR, builder.add(base, number(64 * part)), 64) for part in range(VECTORS)]
    results = []
    for token in range(TOKENS):
        four = broadcast(builder, load(builder, _WORD, builder.add(rows[token], column)), _VECTOR)
        for part in range(VECTORS):
            acc = loop.values[token * VECTORS + part]
            results.append(_multiply_add(builder, acc, weights[part], four))
    loop.close(results)
    return results


def _tile(*, corrected: bool, added: Literal["nothing", "bias", "total"]) -> Any:
    """A tile with its epilogue: out = (acc · row_scale) · token_scale, plus bias or plus what `out` holds already.

    Args:
        corrected: take zero points off the accumulators first: z_w · Σ a + z_a · Σ (w - z_w).
        added: what is added last.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = Place(*(builder.extract_value(arguments[0], index) for index in range(len(Place._fields))))
        results = _products(builder, place)

        def of_rows(address: Any, kind: Any, part: int) -> Any:
            return load(builder, kind, builder.add(address, number(64 * part)), 4)

        def of_token(address: Any, kind: Any, vector: Any, token: int) -> Any:
            return broadcast(builder, load(builder, kind, builder.add(address, number(4 * token)), 4), vector)

        for token in range(TOKENS):
            factor = of_token(place.token_scale, _FLOAT, _FLOATS, token)
            line = builder.add(place.out, builder.mul(place.out_pitch, number(token)))
            for part in range(VECTORS):
                acc = results[token * VECTORS + part]
                if corrected:
                    total = of_token(place.sums, _WORD, _VECTOR, token)
                    centre = of_token(place.token_zero, _WORD, _VECTOR, token)
                    acc = builder.sub(acc, builder.mul(of_rows(place.row_zero, _VECTOR, part), total))
                    acc = builder.sub(acc, builder.mul(of_rows(place.row_sum, _VECTOR, part), centre))
                value = builder.fmul(builder.sitofp(acc, _FLOATS), of_rows(place.row_scale, _FLOATS, part))
                value = builder.fmul(value, factor)
                target = builder.add(line, number(64 * part))
                if added == "bias":
                    value = builder.fadd(value, of_rows(place.bias, _FLOATS, part))
                elif added == "total":
                    value = builder.fadd(load(builder, _FLOATS, target, 4), value)
                builder.store(value, builder.inttoptr(target, _FLOATS.as_pointer())).align = 4
        return context.get_dummy_value()

    def typed(typing: Any, place: Any) -> Any:
        return types.void(place), generate

    return intrinsic(typed)


tile = _tile(corrected=False, added="nothing")
tile_with_bias = _tile(corrected=False, added="bias")
tile_onto_total = _tile(corrected=False, added="total")
corrected_tile = _tile(corrected=True, added="nothing")
corrected_tile_with_bias = _tile(corrected=True, added="bias")
corrected_tile_onto_total = _tile(corrected=True, added="total")


@intrinsic  # type: ignore[untyped-decorator]
def integer_tile(typing: Any, place: Any) -> Any:
    """The bare int32 accumulators of a tile at `out`; everything in `place` about scales is ignored."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = Place(*(builder.extract_value(arguments[0], index) for index in range(len(Place._fields))))
        for index, result in enumerate(_products(builder, place)):
            token, part = divmod(index, VECTORS)
            line = builder.add(place.out, builder.mul(place.out_pitch, number(token)))
            target = builder.inttoptr(builder.add(line, number(64 * part)), _VECTOR.as_pointer())
            builder.store(result, target).align = 4
        return context.get_dummy_value()

    return types.void(place), generate


def _sum_lanes(builder: Any, acc: Any) -> Any:
    # halve by shuffles: the reduction intrinsic's name differs between LLVM versions
    width = LANES // 2
    while width:
        mask = ir.Constant(_VECTOR, [(lane + width) % LANES for lane in range(LANES)])
        acc = builder.add(acc, builder.shuffle_vector(acc, acc, mask))
        width //= 2
    return builder.extract_element(acc, number(0, _WORD))


def _dot(operands: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Callable[..., Any]:
    """Code of a loop over 64 columns a step; `operands` gives unsigned weights and signed activations of a step."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        steps = arguments[2]
        zeros = ir.Constant(_VECTOR, [0] * LANES)
        loop = Loop(builder, steps, [zeros])
        unsigned, signed = operands(builder, arguments, loop.index)
        acc = _multiply_add(builder, loop.values[0], unsigned, signed)
        loop.close([acc])
        return _sum_lanes(builder, acc)

    return generate


def _load_bytes(builder: Any, arguments: Any, index: Any) -> tuple[Any, Any]:
    offset = builder.shl(index, number(6))
    weights = load(builder, _VECTOR, builder.add(arguments[0], offset))
    # flipping the sign bit of each byte adds 128
    flipped = builder.xor(weights, ir.Constant(_VECTOR, [-0x7F7F7F80] * LANES))
    return flipped, load(builder, _VECTOR, builder.add(arguments[1], offset))


def _load_nibbles(builder: Any, arguments: Any, index: Any) -> tuple[Any, Any]:
    weight, a, _, half = arguments
    offset = builder.shl(index, number(5))
    both = load(builder, _HALF, builder.add(weight, offset))
    low = builder.and_(both, ir.Constant(_HALF, [0x0F0F0F0F] * 8))
    high = builder.and_(builder.lshr(both, ir.Constant(_HALF, [4] * 8)), ir.Constant(_HALF, [0x0F0F0F0F] * 8))
    first = builder.add(a, offset)
    join = ir.Constant(_VECTOR, list(range(LANES)))
    signed = (load(builder, _HALF, first), load(builder, _HALF, builder.add(first, half)))
    return builder.shuffle_vector(low, high, join), builder.shuffle_vector(*signed, join)


@intrinsic  # type: ignore[untyped-decorator]
def dot_bytes(typing: Any, weight: Any, a: Any, steps: Any) -> Any:
    """Σ (w + 128) · a over 64 columns a step, int8 at both addresses."""
    return types.int32(*[types.int64] * 3), _dot(_load_bytes)


@intrinsic  # type: ignore[untyped-decorator]
def dot_nibbles(typing: Any, weight: Any, a: Any, steps: Any, half: Any) -> Any:
    """Σ (w + 8) · a over 32 bytes of nibbles a step; the high nibbles belong to columns from `half` on."""
    return types.int32(*[types.int64] * 4), _dot(_load_nibbles)
