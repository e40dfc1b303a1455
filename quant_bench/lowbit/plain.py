"""QuantLinear's arithmetic in plain torch: runs on every device, and defines what the fused kernels must reproduce."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor
from torch.nn import functional

from quant_bench.lowbit.activation import ActivationCodes, ActivationRule, encode, encode_centred
from quant_bench.lowbit.codes import WeightCodes
from quant_bench.lowbit.kernels import choose_kernel, int64_product

# integer-valued float32 sums are exact as long as no partial sum can exceed this
FLOAT32_EXACT = 1 << 24


def parts(columns: int, group: int | None) -> list[slice]:
    """The column ranges that accumulators run over."""
    step = columns if group is None else group
    return [slice(start, min(start + step, columns)) for start in range(0, columns, step)]


def column(values: Tensor, index: int) -> Tensor:
    """Scale or zero point of a group; a tensor with one column serves all groups."""
    return values[:, index if values.shape[1] > 1 else 0]


def _accumulate(
    activation: ActivationCodes,
    weight: WeightCodes,
    group: int | None,
    product: Callable[..., Tensor],
    kind: torch.dtype,
) -> Tensor:
    """Σ (a - z_a)(w - z_w) = Σ a w - z_w Σ a - z_a Σ (w - z_w), in integers, stacked over the groups.

    Of a real zero point z_w is the whole number; `less_rest` takes the remainder off.
    """
    codes = weight.unpacked()
    zero, _ = weight.split_zero()
    sums = []
    for index, part in enumerate(parts(weight.columns, group)):
        a, w = activation.codes[:, part], codes[:, part]
        total = product(a.contiguous(), w.contiguous())
        centre = torch.zeros(weight.rows, dtype=kind, device=w.device)
        if zero is not None:
            centre = column(zero, index).to(kind)
            total = total - centre * a.sum(1, keepdim=True, dtype=kind)
        if activation.zero_point is not None:
            centred_sum = w.sum(1, dtype=kind) - centre * w.shape[1]
            total = total - column(activation.zero_point, index).to(kind)[:, None] * centred_sum
        sums.append(total)
    return torch.stack(sums)


def accumulators(
    activation: ActivationCodes, weight: WeightCodes, group: int | None
) -> Int32[Tensor, "group token row"]:
    """Integer accumulators by the device's kernel."""
    product = choose_kernel(activation.codes.device).product
    return _accumulate(activation, weight, group, product, torch.int32)


def reference_accumulators(
    activation: ActivationCodes, weight: WeightCodes, group: int | None
) -> Int64[Tensor, "group token row"]:
    """The same by int64 arithmetic."""
    return _accumulate(activation, weight, group, int64_product, torch.int64)


def epilogue(
    sums: list[Float[Tensor, "token row"]],
    weight_scale: Float[Tensor, "row wgroup"],
    activation_scale: Float[Tensor, "token agroup"],
    bias: Float[Tensor, " row"] | None,
) -> Float[Tensor, "token row"]:
    """Accumulators to values, in the one order that both executions share: it decides the last bit.

    One activation scale a token: (Σ_g acc_g · w_g) · a. One for each group: Σ_g (acc_g · w_g) · a_g. Then the bias.
    """
    by_group = activation_scale.shape[1] > 1
    total: Tensor | None = None
    for index, acc in enumerate(sums):
        term = acc * column(weight_scale, index)
        if by_group:
            term = term * column(activation_scale, index)[:, None]
        total = term if total is None else total + term
    assert total is not None
    if not by_group:
        total = total * activation_scale
    return total if bias is None else total + bias


def less_rest(
    sums: list[Float[Tensor, "token row"]],
    weight: WeightCodes,
    group: int | None,
    row_sums: Callable[[int, slice], Tensor],
) -> list[Float[Tensor, "token row"]]:
    """Accumulators minus what real zero points add to their whole numbers: acc_g - (Σ_g (a - z_a)) · rest_g.

    Σ (a - z_a)(w - whole - rest) = Σ (a - z_a)(w - whole) - rest · Σ (a - z_a): the sums are integers in every
    execution, rounded once to float32, and so one order of two float operations gives one result.

    Args:
        sums: accumulators with whole zero points, one tensor a group.
        weight: whose zero points may be real numbers; else the sums come back as they are.
        group: columns of an accumulator.
        row_sums: index and columns of a group -> Σ (a - z_a) of each token, float32.
    """
    _, rest = weight.split_zero()
    if rest is None:
        return sums
    pieces = enumerate(parts(weight.columns, group))
    return [
        acc - row_sums(index, part)[:, None] * column(rest, index)
        for acc, (index, part) in zip(sums, pieces, strict=True)
    ]


def integer_linear(
    x: Float[Tensor, "token col"], weight: WeightCodes, rule: ActivationRule, bias: Float[Tensor, " row"] | None
) -> Float[Tensor, "token row"]:
    """Encode, multiply in integers, scale."""
    codes = encode(x, rule)
    group = weight.group_size or rule.group
    sums = [part.float() for part in accumulators(codes, weight, group)]

    def row_sums(index: int, part: slice) -> Tensor:
        total = codes.codes[:, part].sum(1)
        if codes.zero_point is None:
            return total.float()
        return (total - column(codes.zero_point, index) * (part.stop - part.start)).float()

    return epilogue(less_rest(sums, weight, group, row_sums), weight.scale, codes.scale, bias)


def simulated_linear(
    x: Float[Tensor, "token col"],
    centred: Float[Tensor, "row col"],
    weight: WeightCodes,
    rule: ActivationRule,
    bias: Float[Tensor, " row"] | None,
) -> Float[Tensor, "token row"]:
    """The same with the integers held in float32."""
    a, scale = encode_centred(x, rule)
    group = weight.group_size or rule.group
    sums = [exact_sums(a[:, part], centred[:, part]) for part in parts(weight.columns, group)]

    def row_sums(index: int, part: slice) -> Tensor:
        # float64 adds integers exactly in any order, as the other execution does
        return a[:, part].sum(1, dtype=torch.float64).float()

    return epilogue(less_rest(sums, weight, group, row_sums), weight.scale, scale, bias)


def exact_sums(a: Float[Tensor, "token col"], w: Float[Tensor, "row col"]) -> Float[Tensor, "token row"]:
    """Integer-valued product, each sum rounded once to float32 as a conversion from int32 would.

    Float32 arithmetic is exact while (Σ|a| of a token) · max|w| ≤ 2^24. Tokens above that are done again in float64.
    """
    sums = functional.linear(a, w)
    if a.numel() == 0 or w.numel() == 0:
        return sums
    bound = a.abs().sum(1) * w.abs().amax()
    # the bound itself is rounded, so equality counts as above
    inexact = bound >= FLOAT32_EXACT
    if bool(inexact.any()):
        sums[inexact] = functional.linear(a[inexact].double(), w.double()).float()
    return sums
