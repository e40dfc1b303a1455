"""Weights as codes: packing, ranges, groups and what a change of dtype must not touch."""

import copy

import pytest
import torch

from quant_bench.errors import QuantizationError
from quant_bench.lowbit.codes import WeightCodes, pack_nibbles, quantize_weight, unpack_nibbles


def reference(weight, bits, symmetric, group):
    """Codes and values of a weight matrix, one number at a time in double precision where float32 is not the point."""
    rows, columns = weight.shape
    values = torch.empty(rows, columns)
    for row in range(rows):
        for start in range(0, columns, group):
            block = weight[row, start : start + group]
            top = (1 << (bits - 1)) - 1 if symmetric else (1 << bits) - 1
            low, high = min(block.min().item(), 0.0), max(block.max().item(), 0.0)
            width = torch.tensor(max(-low, high) if symmetric else high, dtype=torch.float32)
            width = width if symmetric else width - torch.tensor(low, dtype=torch.float32)
            scale = width / top
            if scale == 0:
                scale = torch.tensor(1.0)
            zero = 0 if symmetric else round((torch.tensor(-low) / scale).item())
            for index, value in enumerate(block):
                code = round((value / scale).item()) + zero
                code = min(max(code, -top if symmetric else 0), top)
                values[row, start + index] = (code - zero) * scale
    return values


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("granularity", "group"), [("channel", 10**9), ("group", 5), ("group", 16)])
def test_codes_stand_for_the_values_of_a_plain_reference(bits, symmetric, granularity, group):
    weight = torch.randn(3, 37, generator=torch.Generator().manual_seed(bits))
    weight[1] = 0
    codes = quantize_weight(weight, bits=bits, granularity=granularity, symmetric=symmetric, group_size=group)
    assert torch.equal(codes.dequantize(), reference(weight, bits, symmetric, group))
    assert codes.scale.shape == (3, -(-37 // group))


def test_one_scale_for_the_tensor_is_the_same_in_every_row():
    weight = torch.randn(4, 9)
    codes = quantize_weight(weight, bits=8, granularity="tensor")
    assert codes.scale.unique().numel() == 1
    assert torch.equal(codes.dequantize().reshape(1, -1), reference(weight.reshape(1, -1), 8, True, 36))


def test_an_all_zero_channel_has_codes_zero_and_a_finite_scale():
    weight = torch.randn(3, 8)
    weight[2] = 0
    for symmetric in (True, False):
        codes = quantize_weight(weight, bits=4, symmetric=symmetric)
        assert (codes.dequantize()[2] == 0).all()
        assert codes.scale[2].item() == 1.0


def test_nibbles_hold_the_first_half_of_the_columns_low():
    codes = torch.tensor([[-8, -1, 0, 1, 2, 7]], dtype=torch.int8)
    packed = pack_nibbles(codes)
    # code + 8: 0 7 8 | 9 10 15
    assert packed.tolist() == [[0 | 9 << 4, 7 | 10 << 4, 8 | 15 << 4]]


@pytest.mark.parametrize("columns", [1, 2, 7, 64])
def test_packing_is_undone_by_unpacking(columns):
    codes = torch.randint(-8, 8, (5, columns), dtype=torch.int8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes), columns), codes)


def test_four_bits_take_half_the_bytes_of_eight():
    weight = torch.randn(64, 256)
    eight, four = (quantize_weight(weight, bits=bits) for bits in (8, 4))
    assert eight.codes.nbytes == 64 * 256
    assert four.codes.nbytes == 64 * 128
    assert four.nbytes == 64 * 128 + 64 * 4


def test_mse_search_takes_the_best_of_a_hundred_clips():
    weight = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    weight[:, 0] = 6
    found = quantize_weight(weight, bits=4, search="mse")
    errors = []
    for index in range(100):
        clip = weight.abs().amax(1, keepdim=True) * (1 - index / 100)
        scale = clip / 7
        errors.append((((weight / scale).round().clamp(-7, 7) * scale - weight) ** 2).sum(1))
    best = torch.stack(errors).amin(0)
    error = ((found.dequantize() - weight) ** 2).sum(1)
    assert torch.allclose(error, best, rtol=1e-5)
    plain = quantize_weight(weight, bits=4)
    assert (error < ((plain.dequantize() - weight) ** 2).sum(1)).all()


def test_weights_that_are_not_finite_are_refused():
    weight = torch.randn(2, 4)
    weight[0, 1] = torch.inf
    with pytest.raises(QuantizationError, match="not finite"):
        quantize_weight(weight, bits=8)


def test_codes_that_do_not_fit_are_refused():
    with pytest.raises(QuantizationError, match="4 bits"):
        WeightCodes(torch.tensor([[9]], dtype=torch.int8), torch.ones(1, 1), None, bits=4)


def test_scales_of_the_wrong_shape_are_refused():
    with pytest.raises(QuantizationError, match="shape"):
        WeightCodes(torch.zeros(2, 8, dtype=torch.int8), torch.ones(2, 1), None, bits=8, group_size=4)


@pytest.mark.parametrize("change", ["half", "bfloat16", "double"])
def test_changing_the_dtype_does_not_touch_codes_or_scales(change):
    codes = quantize_weight(torch.randn(4, 10), bits=4, symmetric=False, granularity="group", group_size=4)
    before = copy.deepcopy(codes.state_dict())
    getattr(codes, change)()
    after = codes.state_dict()
    assert {key: value.dtype for key, value in after.items()} == {key: value.dtype for key, value in before.items()}
    assert all(torch.equal(after[key], before[key]) for key in before)
