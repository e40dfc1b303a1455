"""HQQ: real zero points against an independent solver, against rounding to nearest, and bit for bit in execution."""

import itertools

import pytest
import torch

from quant_bench import registry
from quant_bench.errors import SpecError
from quant_bench.lowbit import plain
from quant_bench.lowbit.activation import ActivationRule, encode
from quant_bench.lowbit.codes import WeightCodes, quantize_weight
from quant_bench.lowbit.linear import QuantLinear
from quant_bench.numerics.hqq import HalfQuadratic, shrink
from quant_bench.numerics.integers import Grid, scale_and_zero
from quant_bench.quantization.hqq import hqq_codes
from quant_bench.quantizer import Calibration
from quant_bench.testing import check_quantizer, tiny_ids, tiny_model

SHAPES = [(64, 48, 5), (577, 35, 1), (130, 70, 13), (1, 1, 1)]
SCHEMES = list(itertools.product((8, 3), ("tensor", "channel", "group"), ("token", "group", "static"), (True, False)))


def heavy_tailed(rows, columns, seed=0):
    """Student's t with 3 degrees of freedom, at the size of a language model's weights."""
    torch.manual_seed(seed)
    return 0.02 * torch.distributions.StudentT(3.0).sample((rows, columns))


def recipe(bits=4, granularity="group", group=64, **more):
    settings = {"weight_bits": bits, "weight_granularity": granularity, **more}
    settings |= {"group_size": group} if "group" in settings.values() else {}
    return registry.load("quantizers", "hqq")(**settings)


def published(block, bits, steps=20, p=0.7, beta=10.0, kappa=1.01):
    """The published iteration on one group in float64: list of (objective, zero), from the rounded zero on."""
    block = block.double()
    top = 2**bits - 1
    low, high = min(block.min().item(), 0.0), max(block.max().item(), 0.0)
    scale = torch.tensor(high - low, dtype=torch.float32).double().item() / top
    zero = round(-low / scale)
    tried = []
    for _ in range(steps + 1):
        code = (block / scale + zero).round().clamp(0, top)
        error = block - (code - zero) * scale
        tried.append((error.abs().pow(p).sum().item(), zero))
        kept = torch.zeros_like(error)
        big = error.abs() > 0
        kept[big] = error[big].sign() * (error[big].abs() - error[big].abs() ** (p - 1) / beta).clamp(min=0)
        zero = (code - (block - kept) / scale).mean().item()
        beta *= kappa
    return tried


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("size", [0.02, 1.0])
def test_zero_points_are_those_of_an_independent_solver(bits, size):
    weight = heavy_tailed(6, 80) * size / 0.02
    codes = hqq_codes(weight, recipe(bits, group=32), HalfQuadratic())
    left = (codes.dequantize() - weight).abs().double().pow(0.7)
    for row, (group, start) in itertools.product(range(6), enumerate(range(0, 80, 32))):
        objective, zero = min(published(weight[row, start : start + 32], bits))
        assert left[row, start : start + 32].sum().item() == pytest.approx(objective, rel=1e-4)
        found = codes.zero_point[row, group].item() + 2 ** (bits - 1)
        assert found == pytest.approx(zero, abs=2e-3)


def test_zero_points_are_real_numbers_and_not_whole_ones():
    codes = hqq_codes(heavy_tailed(8, 128), recipe(), HalfQuadratic())
    assert codes.zero_point.dtype == torch.float32
    assert (codes.zero_point != codes.zero_point.round()).float().mean() > 0.5


@pytest.mark.parametrize(("bits", "share"), [(2, 0.99), (3, 0.97), (4, 0.97)])
@pytest.mark.parametrize("group", [32, 64])
def test_weights_are_nearer_than_rounded_to_nearest_in_every_norm(bits, share, group):
    weight = heavy_tailed(128, 512)
    found = hqq_codes(weight, recipe(bits, group=group), HalfQuadratic()).dequantize() - weight
    nearest = quantize_weight(weight, bits=bits, granularity="group", symmetric=False, group_size=group)
    plain_error = nearest.dequantize() - weight
    for power in (0.7, 1.0, 2.0):
        assert found.abs().pow(power).mean() < share * plain_error.abs().pow(power).mean()


def test_no_group_is_worse_than_rounded_to_nearest_in_its_own_norm():
    weight = heavy_tailed(64, 300)
    for bits in (2, 4, 8):
        found = hqq_codes(weight, recipe(bits, group=50), HalfQuadratic()).dequantize() - weight
        nearest = quantize_weight(weight, bits=bits, granularity="group", symmetric=False, group_size=50)
        ours, theirs = (
            error.reshape(64, 6, 50).abs().pow(0.7).sum(-1) for error in (found, nearest.dequantize() - weight)
        )
        assert (ours <= theirs * (1 + 1e-5)).all()


def test_shrinking_leaves_no_small_error_and_less_of_a_large_one():
    error = torch.tensor([0.0, 1e-3, -1e-3, 2.0, -2.0])
    assert torch.allclose(shrink(error, 0.7, 10.0), torch.tensor([0.0, 0.0, 0.0, 1.0, -1.0]) * (2 - 2**-0.3 / 10))


def test_a_short_last_group_is_solved_without_filling():
    weight = heavy_tailed(4, 70)
    whole = hqq_codes(weight, recipe(group=64), HalfQuadratic())
    alone = hqq_codes(weight[:, 64:], recipe(granularity="channel"), HalfQuadratic())
    assert torch.equal(whole.dequantize()[:, 64:], alone.dequantize())


def test_a_searched_range_is_where_zero_points_start():
    weight = heavy_tailed(32, 128)
    plain_codes, searched = (
        hqq_codes(weight, recipe(3, "channel", weight_range=way), HalfQuadratic()) for way in ("minmax", "mse")
    )
    clipped = quantize_weight(weight, bits=3, symmetric=False, search="mse")
    assert torch.equal(searched.scale, clipped.scale)
    squares = [(codes.dequantize() - weight).square().mean() for codes in (searched, plain_codes)]
    assert squares[0] < squares[1]


def rules(bits, granularity, symmetric):
    if granularity != "static":
        return ActivationRule(bits, granularity, symmetric, 16)
    scale, zero = scale_and_zero(torch.tensor(-2.0), torch.tensor(5.0), Grid(bits, symmetric))
    return ActivationRule(bits, "tensor", symmetric, 16, scale, zero)


def by_hand(x, layer):
    """The layer from codes in int64, real zero points taken off in float32 group by group, without the engine."""
    a, w = encode(x, layer.activation), layer.weight
    group = layer.group or w.columns
    total = 0
    for index, start in enumerate(range(0, w.columns, group)):
        left, right = a.codes[:, start : start + group].long(), w.unpacked()[:, start : start + group].long()
        if a.zero_point is not None:
            left = left - a.zero_point[:, min(index, a.zero_point.shape[1] - 1)][:, None]
        zero = w.zero_point[:, min(index, w.zero_point.shape[1] - 1)]
        whole = zero.round().clamp(-(2 ** (w.bits - 1)), 2 ** (w.bits - 1) - 1)
        acc = (left @ (right - whole.long()[:, None]).t()).to(torch.int32).float()
        acc = acc - left.sum(1).to(torch.int32).float()[:, None] * (zero - whole)
        term = acc * w.scale[:, min(index, w.scale.shape[1] - 1)]
        if a.scale.shape[1] > 1:
            term = term * a.scale[:, index][:, None]
        total = term if index == 0 else total + term
    total = total if a.scale.shape[1] > 1 else total * a.scale
    return total if layer.bias is None else total + layer.bias


@pytest.mark.parametrize(("columns", "rows", "tokens"), SHAPES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_simulated_equals_integer_equals_int64_by_hand(columns, rows, tokens, scheme):
    bits, weight_granularity, granularity, symmetric = scheme
    weight, bias = heavy_tailed(rows, columns), torch.randn(rows)
    weight[0] = 0
    x = torch.randn(tokens, columns) * 3 + 1
    x[0], x[-1] = 2.0, 50 * x[-1]
    codes = hqq_codes(weight, recipe(bits, weight_granularity, 16), HalfQuadratic())
    rule = rules(bits, granularity, symmetric)
    made = {name: QuantLinear(codes, bias, rule, name) for name in ("integer", "simulated", "classic")}
    want = by_hand(x, made["integer"])
    assert torch.equal(made["integer"](x), want)
    assert torch.equal(made["simulated"](x), want)
    assert torch.equal(plain.integer_linear(x, codes, rule, bias), want)
    assert torch.equal(plain.simulated_linear(x, codes.centred(), codes, rule, bias), want)
    assert torch.allclose(made["classic"](x), want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    assert torch.equal(made["integer"].accumulators(x).long(), made["integer"].reference_accumulators(x))


@pytest.mark.parametrize("symmetric", [True, False])
def test_sums_beyond_exact_float32_stay_equal(symmetric):
    columns = 4096
    codes = WeightCodes(
        torch.randint(-128, 128, (9, columns), dtype=torch.int8), torch.ones(9, 1), torch.rand(9, 1) * 90 - 45, bits=8
    )
    x = torch.rand(7, columns) + 5
    rule = ActivationRule(8, symmetric=symmetric)
    integer, simulated = (QuantLinear(codes, None, rule, name) for name in ("integer", "simulated"))
    assert torch.equal(integer(x), by_hand(x, integer))
    assert torch.equal(simulated(x), by_hand(x, integer))


def test_a_zero_point_off_the_grid_keeps_its_value_and_its_bits():
    codes = WeightCodes(
        torch.tensor([[-8, 7, 0, 3]], dtype=torch.int8), torch.ones(1, 1), torch.tensor([[11.25]]), bits=4
    )
    assert codes.dequantize().tolist() == [[-19.25, -4.25, -11.25, -8.25]]
    x = torch.randn(3, 4)
    integer, simulated = (QuantLinear(codes, None, ActivationRule(8), name) for name in ("integer", "simulated"))
    assert torch.equal(integer(x), simulated(x))
    assert torch.allclose(integer(x), x @ codes.dequantize().t(), rtol=0, atol=0.5)


def test_real_zero_points_survive_state_dtype_and_device_changes():
    layer = QuantLinear(hqq_codes(heavy_tailed(8, 64), recipe(), HalfQuadratic()), None, ActivationRule(8), "integer")
    x = torch.randn(4, 64)
    want = layer(x)
    assert torch.equal(layer.half().to(torch.bfloat16)(x), want)
    other = QuantLinear(
        hqq_codes(heavy_tailed(8, 64, 1), recipe(), HalfQuadratic()), None, ActivationRule(8), "integer"
    )
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), want)


@pytest.mark.parametrize(
    "text", ["hqq:w4a16", "hqq:w4a4g128", "hqq(activation_symmetric=False,weight_granularity=group,weight_bits=4)"]
)
def test_recipe_keeps_the_contract(text):
    check_quantizer(registry.build("quantizers", text), families=("llama", "gpt2"))


def test_coverage_says_that_zero_points_are_real():
    model = registry.build("quantizers", "hqq:w4a16").quantize(tiny_model("llama"), Calibration())
    assert all("W4 per group of 128 with real zero points" in how for how in model.coverage.quantized.values())
    logits = model.module(input_ids=tiny_ids()).logits
    assert bool(logits.isfinite().all())


@pytest.mark.parametrize("setting", ["weight_symmetric=False", "norm=0.0", "norm=1.5", "steps=-1"])
def test_settings_that_mean_nothing_are_refused(setting):
    with pytest.raises(SpecError):
        registry.build("quantizers", f"hqq({setting})")
