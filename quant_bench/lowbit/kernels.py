"""Integer matrix products that are exact, and the start-up self-test that finds out which ones are.

`torch._int_mm` adds pairs of 8-bit products in 16 bits on processors without VNNI and saturates without a word. Tests
with small operands, cosines and noise ratios do not notice; full-range operands compared with int64 do.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Int8, Int32, Int64
from numba.core.errors import NumbaError
from torch import Tensor
from torch.nn import functional

from quant_bench.errors import KernelError
from quant_bench.lowbit.products import vnni_product
from quant_bench.lowbit.vnni import supported

Product = Callable[[Int8[Tensor, "token col"], Int8[Tensor, "row col"]], Int32[Tensor, "token row"]]

# (token, col, row) of the self-test: one token, one column, odd sizes, and a width where float32 sums are not exact
_SHAPES = ((1, 64, 64), (5, 1, 3), (7, 577, 35), (33, 2048, 192))
_FLOAT32_EXACT = 1 << 24

# the name of our own kernel, which runs whole layers and not only products
VNNI = "vnni tiles"


@dataclass(frozen=True)
class Kernel:
    """One way to multiply int8 matrices.

    Attributes:
        name: as it stands in records.
        product: codes (token, col) times codes (row, col) transposed.
        why: why it was chosen on this machine.
        tested: what the self-test said of each candidate, in order of preference.
    """

    name: str
    product: Product
    why: str
    tested: tuple[tuple[str, str], ...] = ()


def int64_product(a: Int8[Tensor, "token col"], w: Int8[Tensor, "row col"]) -> Int64[Tensor, "token row"]:
    """The reference: plain int64 arithmetic on the CPU (CUDA has no int64 matrix product)."""
    return (a.cpu().long() @ w.cpu().long().t()).to(a.device)


def int_mm(a: Int8[Tensor, "token col"], w: Int8[Tensor, "row col"]) -> Int32[Tensor, "token row"]:
    """`torch._int_mm`; exact on CPUs with VNNI, but for a single column (a group's rest, say), hence the second."""
    if a.shape[1] == 1:
        a, w = functional.pad(a, (0, 1)), functional.pad(w, (0, 1))
    return torch._int_mm(a, w.t())


def int_mm_padded(a: Int8[Tensor, "token col"], w: Int8[Tensor, "row col"]) -> Int32[Tensor, "token row"]:
    """`torch._int_mm` behind CUDA's limits: more than 16 tokens, columns and rows multiples of 8; zeros fill up."""
    tokens, columns = a.shape
    rows = w.shape[0]
    padded = functional.pad(a, (0, -columns % 8, 0, max(0, 17 - tokens)))
    weight = functional.pad(w, (0, -columns % 8, 0, -rows % 8))
    return torch._int_mm(padded, weight.t())[:tokens, :rows].contiguous()


def float32_split(a: Int8[Tensor, "token col"], w: Int8[Tensor, "row col"]) -> Int32[Tensor, "token row"]:
    """Float32 products over as many columns as keep every partial sum an exact integer below 2^24."""
    step = _FLOAT32_EXACT // (128 * 128)
    total = torch.zeros(a.shape[0], w.shape[0], dtype=torch.int32, device=a.device)
    for start in range(0, a.shape[1], step):
        part = slice(start, start + step)
        total += functional.linear(a[:, part].float(), w[:, part].float()).to(torch.int32)
    return total


def float64_product(a: Int8[Tensor, "token col"], w: Int8[Tensor, "row col"]) -> Int32[Tensor, "token row"]:
    """Float64 products: exact below 2^53, half as fast as float32."""
    return functional.linear(a.double(), w.double()).to(torch.int32)


def self_test(product: Product, device: torch.device) -> str:
    """`exact`, or what went wrong: the largest error against int64 on full-range operands, or the exception."""
    generator = torch.Generator().manual_seed(0)
    worst = 0
    for tokens, columns, rows in _SHAPES:
        noise = torch.randint(-128, 128, (tokens + rows, columns), dtype=torch.int8, generator=generator)
        a, w = noise[:tokens], noise[tokens:]
        # all-maximal and all-minimal operands are where pairwise 16-bit sums saturate
        cases = [(a, w), *((torch.full_like(a, x), torch.full_like(w, y)) for x in (127, -128) for y in (127, -128))]
        for left, right in cases:
            try:
                got = product(left.to(device), right.to(device)).cpu().long()
            except (RuntimeError, NotImplementedError, TypeError, NumbaError) as error:
                return f"failed: {type(error).__name__}: {str(error).splitlines()[0]}"
            worst = max(worst, int((got - int64_product(left, right)).abs().max()))
    return "exact" if worst == 0 else f"wrong by up to {worst}"


def _candidates(device: torch.device) -> list[tuple[str, Product]]:
    plain: list[tuple[str, Product]] = [("float32 split", float32_split), ("float64", float64_product)]
    if device.type == "cuda":
        # TF32 would round the float32 operands, so the float64 product comes first
        return [("torch._int_mm padded", int_mm_padded), *reversed(plain)]
    if device.type == "cpu":
        own: list[tuple[str, Product]] = [(VNNI, vnni_product)] if supported() else []
        return [*own, ("torch._int_mm", int_mm), *plain]
    return plain


@cache
def _choose(kind: str, index: int | None) -> Kernel:
    device = torch.device(kind, index) if index is not None else torch.device(kind)
    candidates = _candidates(device)
    tested = tuple((name, self_test(product, device)) for name, product in candidates)
    for (name, product), (_, verdict) in zip(candidates, tested, strict=True):
        if verdict == "exact":
            why = "fastest candidate whose accumulators all equal int64 on full-range operands"
            return Kernel(name, product, why, tested)
    raise KernelError(f"no exact integer product on {device}: {tested}")


def choose_kernel(device: torch.device | str = "cpu") -> Kernel:
    """The fastest integer product that passed the self-test on this device; tested once a process.

    Raises:
        KernelError: not even float64 is exact.
    """
    device = torch.device(device)
    return _choose(device.type, device.index)


def instruction_set() -> dict[str, Any]:
    """What the processor offers: torch's capability level and whether it has VNNI (8-bit dot products)."""
    return {"isa": torch.backends.cpu.get_cpu_capability(), "vnni": has_vnni(), "machine": platform.machine()}


@cache
def has_vnni() -> bool:
    """Whether the processor multiplies and adds four 8-bit pairs into 32 bits in one instruction."""
    check = getattr(torch.cpu, "_is_vnni_supported", None)
    return bool(check()) if check is not None else False


def kernel_report(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Instruction set, kernel, reason and verdicts, for `doctor` and for records."""
    kernel = choose_kernel(device)
    return {**instruction_set(), "kernel": kernel.name, "why": kernel.why, "tested": dict(kernel.tested)}
