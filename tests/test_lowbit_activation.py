"""Rounding of activations: the plain definition against a reference, the fused loops against the definition."""

import numpy as np
import pytest
import torch

from quant_bench.errors import SpecError
from quant_bench.lowbit import cpu, fused
from quant_bench.lowbit.activation import ActivationRule, encode, encode_centred, fake_quantize, saturation
from quant_bench.numerics.integers import Grid, scale_and_zero


def rule(granularity, symmetric, bits=8, group=16):
    if granularity == "static":
        scale, zero = scale_and_zero(torch.tensor(-1.0), torch.tensor(1.7), Grid(bits, symmetric))
        return ActivationRule(bits, "tensor", symmetric, group, scale, zero)
    return ActivationRule(bits, granularity, symmetric, group)


def awkward(tokens, columns):
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(columns)) * 2
    x[0] = 0
    x[1] = 2.5
    x[2, 0] = 6e4
    x[3] = -x[3].abs()
    x[4] *= 1e-40
    x[5] *= 1e37
    # ties: the scale of a row with maximum 127 is 1
    x[6] = torch.arange(columns) % 127 + 0.5
    x[6, 0] = 127
    return x


RULES = [(g, s, b) for g in ("token", "group", "tensor", "static") for s in (True, False) for b in (8, 4)]


@pytest.mark.parametrize(("granularity", "symmetric", "bits"), RULES)
@pytest.mark.parametrize("columns", [64, 37])
def test_fused_rounding_equals_the_plain_definition(granularity, symmetric, bits, columns):
    made = rule(granularity, symmetric, bits)
    x = awkward(9, columns)
    group = 16 if granularity == "group" else columns
    groups = -(-columns // group)
    codes = np.empty((9, columns), np.int8)
    rows = cpu.quantize(x, made, (group, groups, group), codes)
    want = encode(x, made)
    assert torch.equal(torch.from_numpy(codes), want.codes)
    assert torch.equal(torch.from_numpy(rows.scale).t(), want.scale)
    if want.zero_point is not None:
        assert torch.equal(torch.from_numpy(rows.zero).t(), want.zero_point)
    floats = np.empty((9, columns), np.float32)
    rows = cpu.quantize(x, made, (group, groups, group), floats)
    centred, scale = encode_centred(x, made)
    assert torch.equal(torch.from_numpy(floats), centred)
    assert torch.equal(torch.from_numpy(rows.scale).t(), scale)
    assert rows.norms.tolist() == centred.abs().sum(1).int().tolist()


@pytest.mark.parametrize(("granularity", "symmetric", "bits"), RULES)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible_in_both_forms(granularity, symmetric, bits, broken):
    made = rule(granularity, symmetric, bits)
    x = awkward(9, 48)
    x[7, 20] = broken
    if granularity == "static" and broken == float("inf"):
        assert fake_quantize(x, made)[7].isfinite().all()
    else:
        assert fake_quantize(x, made)[7, 20].isnan()
    codes = np.empty((9, 48), np.int8)
    group = 16 if granularity == "group" else 48
    rows = cpu.quantize(x, made, (group, 48 // group, group), codes)
    want = encode(x, made)
    assert torch.equal(torch.from_numpy(codes), want.codes)
    assert torch.equal(torch.from_numpy(rows.scale).t().nan_to_num(-1), want.scale.nan_to_num(-1))


def test_quotients_without_a_division_are_correctly_rounded():
    generator = np.random.default_rng(0)
    scale = np.exp(generator.uniform(-50, 50, 64)).astype(np.float32)
    for one in scale:
        values = (generator.uniform(-300, 300, 20000) * one).astype(np.float32)
        got = fused.quotients(values, one)
        assert np.array_equal(got, values / one)


def test_codes_of_a_row_follow_from_numbers_worked_out_by_hand():
    x = torch.tensor([[-1.27, 0.635, 0.005, 1.0]])
    codes = encode(x, ActivationRule(8))
    assert codes.scale.item() == torch.tensor(1.27).div(127).item()
    assert codes.codes.tolist() == [[-127, 63 if x[0, 1] / codes.scale < 63.5 else 64, 0, 100]]
    codes = encode(torch.tensor([[0.0, 1.0, 15.0]]), ActivationRule(4, symmetric=False))
    assert codes.codes.tolist() == [[-8, -7, 7]]
    assert codes.zero_point is not None
    assert codes.zero_point.item() == -8


def test_a_constant_token_keeps_its_value_within_half_a_step():
    x = torch.full((1, 10), 3.3)
    for symmetric in (True, False):
        assert torch.allclose(fake_quantize(x, ActivationRule(8, symmetric=symmetric)), x, rtol=1e-6)


def test_a_token_does_not_depend_on_the_others():
    x = torch.randn(6, 32)
    for granularity in ("token", "group"):
        made = rule(granularity, False)
        assert torch.equal(encode(x, made).codes[2:3], encode(x[2:3], made).codes)


def test_rounding_leaves_its_input_alone():
    x = torch.randn(4, 16)
    before = x.clone()
    for granularity in ("token", "group", "tensor", "static"):
        fake_quantize(x, rule(granularity, True))
        cpu.quantize(x, rule(granularity, True), (16, 1, 16), np.empty((4, 16), np.int8))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fake_quantization_keeps_shape_and_dtype(dtype):
    x = torch.randn(2, 3, 16).to(dtype)
    got = fake_quantize(x, ActivationRule(8))
    assert (got.shape, got.dtype) == (x.shape, dtype)


def test_saturation_is_the_share_of_clamped_values():
    made = ActivationRule(8, "tensor", True, scale=torch.tensor(0.01), zero_point=torch.tensor(0, dtype=torch.int32))
    assert saturation(torch.tensor([[1.27, 1.28, -1.3, 0.0]]), made) == 0.5
    assert saturation(torch.tensor([[1e9]]), ActivationRule(8)) == 0.0


def test_half_a_static_range_is_refused():
    with pytest.raises(SpecError, match="both"):
        ActivationRule(8, "tensor", scale=torch.tensor(1.0))
    with pytest.raises(SpecError, match="belongs to a tensor"):
        ActivationRule(8, "token", scale=torch.tensor(1.0), zero_point=torch.tensor(0))
