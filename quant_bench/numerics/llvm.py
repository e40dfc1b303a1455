"""Small pieces of LLVM code for loops that numba's own language cannot say: vectors in registers.

LLVM, which numba brings along, compiles them at run time, so no compiler has to be installed.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

LONG = ir.IntType(64)


def number(value: int, kind: Any = LONG) -> Any:
    """An integer constant."""
    return ir.Constant(kind, value)


def load(builder: Any, kind: Any, address: Any, align: int = 1) -> Any:
    """What lies at an address (an int64)."""
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = align
    return loaded


def store(builder: Any, value: Any, address: Any, align: int = 1) -> None:
    """Put a value at an address (an int64)."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = align


def broadcast(builder: Any, scalar: Any, vector: Any) -> Any:
    """A vector of one number."""
    undefined = ir.Constant(vector, ir.Undefined)
    word = ir.IntType(32)
    single = builder.insert_element(undefined, scalar, number(0, word))
    lanes = ir.VectorType(word, vector.count)
    return builder.shuffle_vector(single, undefined, ir.Constant(lanes, [0] * vector.count))


class Loop:
    """A counted loop in LLVM's form: `carried` values go round as phi nodes."""

    def __init__(self, builder: Any, count: Any, carried: list[Any]) -> None:
        self.builder, self.count, self.before = builder, count, builder.block
        self.body, self.after = builder.append_basic_block(), builder.append_basic_block()
        builder.branch(self.body)
        builder.position_at_end(self.body)
        self.index = builder.phi(LONG)
        self.index.add_incoming(number(0), self.before)
        self.values = []
        for value in carried:
            phi = builder.phi(value.type)
            phi.add_incoming(value, self.before)
            self.values.append(phi)

    def close(self, results: list[Any]) -> None:
        """End of the body; `results` are what the carried values are next time, or after the loop."""
        following = self.builder.add(self.index, number(1))
        self.index.add_incoming(following, self.body)
        for phi, result in zip(self.values, results, strict=True):
            phi.add_incoming(result, self.body)
        more = self.builder.icmp_signed("<", following, self.count)
        self.builder.cbranch(more, self.body, self.after)
        self.builder.position_at_end(self.after)
