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
from typing import Any

import numba
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

TOKENS, VECTORS, LANES = 6, 4, 16
PANEL = VECTORS * LANES
_WORD, _LONG = ir.IntType(32), ir.IntType(64)
_VECTOR, _BYTES = ir.VectorType(_WORD, LANES), ir.VectorType(ir.IntType(8), 64)
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


def _number(value: int, kind: Any = _LONG) -> Any:
    return ir.Constant(kind, value)


def _load(builder: Any, kind: Any, address: Any, align: int = 1) -> Any:
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = align
    return loaded


def _broadcast(builder: Any, word: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    single = builder.insert_element(undefined, word, _number(0, _WORD))
    return builder.shuffle_vector(single, undefined, ir.Constant(_VECTOR, [0] * LANES))


def _multiply_add(builder: Any, acc: Any, unsigned: Any, signed: Any) -> Any:
    """Acc plus the sums of four products of neighbouring bytes (vpdpbusd, which does not saturate)."""
    # LLVM 22 changed the operands of the intrinsic from words to bytes
    operand = _BYTES if binding.llvm_version_info[0] >= 22 else _VECTOR
    function = builder.module.globals.get(_NAME)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(_VECTOR, [_VECTOR, operand, operand]), _NAME)
    return builder.call(function, [acc, builder.bitcast(unsigned, operand), builder.bitcast(signed, operand)])


class _Loop:
    """A counted loop in LLVM's form: `carried` values go round as phi nodes."""

    def __init__(self, builder: Any, count: Any, carried: list[Any]) -> None:
        self.builder, self.count, self.before = builder, count, builder.block
        self.body, self.after = builder.append_basic_block(), builder.append_basic_block()
        builder.branch(self.body)
        builder.position_at_end(self.body)
        self.index = builder.phi(_LONG)
        self.index.add_incoming(_number(0), self.before)
        self.values = []
        for value in carried:
            phi = builder.phi(value.type)
            phi.add_incoming(value, self.before)
            self.values.append(phi)

    def close(self, results: list[Any]) -> None:
        following = self.builder.add(self.index, _number(1))
        self.index.add_incoming(following, self.body)
        for phi, result in zip(self.values, results, strict=True):
            phi.add_incoming(result, self.body)
        more = self.builder.icmp_signed("<", following, self.count)
        self.builder.cbranch(more, self.body, self.after)
        self.builder.position_at_end(self.after)


@intrinsic  # type: ignore[untyped-decorator]
def tile(typing: Any, a: Any, pitch: Any, panel: Any, steps: Any, sums: Any, out: Any) -> Any:
    """Tile of 6 tokens × 64 rows: Σ a · w into int32 at `out`. Addresses of a, panel, Σ a and out; 4 columns a step."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, pitch, panel, steps, sums, out = arguments
        start = []
        for token in range(TOKENS):
            total = _load(builder, _WORD, builder.add(sums, _number(4 * token)), 4)
            initial = _broadcast(builder, builder.neg(builder.shl(total, _number(7, _WORD))))
            start += [initial] * VECTORS
        rows = [builder.add(a, builder.mul(pitch, _number(token))) for token in range(TOKENS)]
        loop = _Loop(builder, steps, start)
        column = builder.shl(loop.index, _number(2))
        base = builder.add(panel, builder.shl(loop.index, _number(8)))
        weights = [_load(builder, _VECTOR, builder.add(base, _number(64 * part)), 64) for part in range(VECTORS)]
        results = []
        for token in range(TOKENS):
            four = _broadcast(builder, _load(builder, _WORD, builder.add(rows[token], column)))
            for part in range(VECTORS):
                acc = loop.values[token * VECTORS + part]
                results.append(_multiply_add(builder, acc, weights[part], four))
        loop.close(results)
        for index, result in enumerate(results):
            address = builder.add(out, _number(64 * index))
            builder.store(result, builder.inttoptr(address, _VECTOR.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


def _sum_lanes(builder: Any, acc: Any) -> Any:
    # halve by shuffles: the reduction intrinsic's name differs between LLVM versions
    width = LANES // 2
    while width:
        mask = ir.Constant(_VECTOR, [(lane + width) % LANES for lane in range(LANES)])
        acc = builder.add(acc, builder.shuffle_vector(acc, acc, mask))
        width //= 2
    return builder.extract_element(acc, _number(0, _WORD))


def _dot(load: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Callable[..., Any]:
    """Code of a loop over 64 columns a step; `load` gives unsigned weights and signed activations of a step."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        steps = arguments[2]
        zeros = ir.Constant(_VECTOR, [0] * LANES)
        loop = _Loop(builder, steps, [zeros])
        unsigned, signed = load(builder, arguments, loop.index)
        acc = _multiply_add(builder, loop.values[0], unsigned, signed)
        loop.close([acc])
        return _sum_lanes(builder, acc)

    return generate


def _load_bytes(builder: Any, arguments: Any, index: Any) -> tuple[Any, Any]:
    offset = builder.shl(index, _number(6))
    weights = _load(builder, _VECTOR, builder.add(arguments[0], offset))
    # flipping the sign bit of each byte adds 128
    flipped = builder.xor(weights, ir.Constant(_VECTOR, [-0x7F7F7F80] * LANES))
    return flipped, _load(builder, _VECTOR, builder.add(arguments[1], offset))


def _load_nibbles(builder: Any, arguments: Any, index: Any) -> tuple[Any, Any]:
    weight, a, _, half = arguments
    offset = builder.shl(index, _number(5))
    both = _load(builder, _HALF, builder.add(weight, offset))
    low = builder.and_(both, ir.Constant(_HALF, [0x0F0F0F0F] * 8))
    high = builder.and_(builder.lshr(both, ir.Constant(_HALF, [4] * 8)), ir.Constant(_HALF, [0x0F0F0F0F] * 8))
    first = builder.add(a, offset)
    join = ir.Constant(_VECTOR, list(range(LANES)))
    signed = (_load(builder, _HALF, first), _load(builder, _HALF, builder.add(first, half)))
    return builder.shuffle_vector(low, high, join), builder.shuffle_vector(*signed, join)


@intrinsic  # type: ignore[untyped-decorator]
def dot_bytes(typing: Any, weight: Any, a: Any, steps: Any) -> Any:
    """Σ (w + 128) · a over 64 columns a step, int8 at both addresses."""
    return types.int32(*[types.int64] * 3), _dot(_load_bytes)


@intrinsic  # type: ignore[untyped-decorator]
def dot_nibbles(typing: Any, weight: Any, a: Any, steps: Any, half: Any) -> Any:
    """Σ (w + 8) · a over 32 bytes of nibbles a step; the high nibbles belong to columns from `half` on."""
    return types.int32(*[types.int64] * 4), _dot(_load_nibbles)
