"""QuantLinear: accumulators against int64, executions against each other, and the things that break such layers."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

from quant_bench.errors import QuantizationError
from quant_bench.lowbit import kernels, plain
from quant_bench.lowbit.activation import ActivationRule, encode
from quant_bench.lowbit.codes import WeightCodes, quantize_weight
from quant_bench.lowbit.linear import QuantLinear
from quant_bench.numerics.integers import Grid, scale_and_zero

SHAPES = [(64, 48, 5), (577, 35, 1), (130, 70, 13), (3, 2, 2), (1536, 65, 20), (1, 1, 1)]
SCHEMES = list(itertools.product((8, 4), (True, False), ("tensor", "channel", "group"), ("token", "group", "static")))


def static_rule(bits, symmetric):
    scale, zero = scale_and_zero(torch.tensor(-2.0), torch.tensor(5.0), Grid(bits, symmetric))
    return ActivationRule(bits, "tensor", symmetric, 16, scale, zero)


def layers(weight, scheme, bias=None, group=16):
    bits, symmetric, weight_granularity, granularity = scheme
    codes = quantize_weight(weight, bits=bits, granularity=weight_granularity, symmetric=symmetric, group_size=group)
    rule = (
        static_rule(bits, symmetric) if granularity == "static" else ActivationRule(bits, granularity, symmetric, group)
    )
    return {
        execution: QuantLinear(codes, bias, rule, execution, "layer")
        for execution in ("integer", "simulated", "classic")
    }


def inputs(tokens, columns):
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)) * 3
    # a constant token, and one far larger than the rest
    x[0] = 2.0
    x[-1] *= 50
    return x


def by_hand(x, layer):
    """The layer from its codes in int64 and the epilogue's order, without the engine."""
    a = encode(x, layer.activation)
    w = layer.weight
    group = layer.group or w.columns
    total = 0
    for index, start in enumerate(range(0, w.columns, group)):
        left, right = a.codes[:, start : start + group].long(), w.unpacked()[:, start : start + group].long()
        if a.zero_point is not None:
            left = left - a.zero_point[:, min(index, a.zero_point.shape[1] - 1)][:, None]
        if w.zero_point is not None:
            right = right - w.zero_point[:, min(index, w.zero_point.shape[1] - 1)][:, None]
        term = (left @ right.t()).to(torch.int32).float() * w.scale[:, min(index, w.scale.shape[1] - 1)]
        if a.scale.shape[1] > 1:
            term = term * a.scale[:, index][:, None]
        total = term if index == 0 else total + term
    total = total if a.scale.shape[1] > 1 else total * a.scale
    return total if layer.bias is None else total + layer.bias


@pytest.mark.parametrize(("columns", "rows", "tokens"), SHAPES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_simulated_equals_integer_equals_int64_by_hand(columns, rows, tokens, scheme):
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(rows, columns, generator=generator)
    weight[0] = 0
    bias = torch.randn(rows, generator=generator)
    x = inputs(tokens, columns)
    made = layers(weight, scheme, bias)
    want = by_hand(x, made["integer"])
    assert torch.equal(made["integer"](x), want)
    assert torch.equal(made["simulated"](x), want)
    assert torch.allclose(made["classic"](x), want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    integer = made["integer"]
    assert torch.equal(integer.accumulators(x).long(), integer.reference_accumulators(x))
    assert torch.equal(plain.integer_linear(x, integer.weight, integer.activation, bias), want)
    centred = integer.weight.centred()
    assert torch.equal(plain.simulated_linear(x, centred, integer.weight, integer.activation, bias), want)


@pytest.mark.parametrize("tokens", [*range(1, 20), 37, 64])
@pytest.mark.parametrize("group", [None, 32])
def test_every_number_of_tokens_gives_each_token_the_same_bits(tokens, group):
    weight = torch.randn(75, 96, generator=torch.Generator().manual_seed(0))
    scheme = (8, True, "channel", "token") if group is None else (4, True, "group", "group")
    made = layers(weight, scheme, group=group or 16)
    x = inputs(64, 96)
    whole = made["integer"](x)
    assert torch.equal(made["integer"](x[:tokens]), whole[:tokens])
    assert torch.equal(made["simulated"](x[:tokens]), whole[:tokens])


@pytest.mark.parametrize(("left", "right"), [(127, 127), (127, -127), (-127, -127)])
@pytest.mark.parametrize("columns", [1040, 1041, 2048])
def test_simulated_stays_exact_where_float32_sums_would_not(left, right, columns):
    codes = torch.full((3, columns), right, dtype=torch.int8)
    codes[1, ::2] -= 1 if right > 0 else -1
    codes[2, 5] -= 3 if right > 0 else -3
    weight = WeightCodes(codes, torch.ones(3, 1), None, bits=8)
    x = torch.full((4, columns), float(left))
    x[1, 3] -= 2 if left > 0 else -2
    x[2, ::3] = 0
    x[:, 0] = 127
    made = {name: QuantLinear(weight, None, ActivationRule(8), name) for name in ("integer", "simulated")}
    want = (x.long() @ codes.long().t()).to(torch.int32).float()
    assert torch.equal(made["integer"](x), want)
    assert torch.equal(made["simulated"](x), want)
    assert torch.equal(plain.simulated_linear(x, weight.centred(), weight, ActivationRule(8), None), want)


def test_full_range_operands_with_both_zero_points_are_exact():
    columns = 2048
    weight = WeightCodes(
        torch.randint(-128, 128, (33, columns), dtype=torch.int8),
        torch.ones(33, 1),
        torch.full((33, 1), -128, dtype=torch.int32),
        bits=8,
    )
    rule = ActivationRule(8, symmetric=False)
    x = torch.rand(9, columns) + 3
    for tokens in (1, 9):
        integer = QuantLinear(weight, None, rule, "integer")
        assert torch.equal(integer.accumulators(x[:tokens]).long(), integer.reference_accumulators(x[:tokens]))
        assert torch.equal(integer(x[:tokens]), by_hand(x[:tokens], integer))
        assert torch.equal(QuantLinear(weight, None, rule, "simulated")(x[:tokens]), by_hand(x[:tokens], integer))


def test_sums_that_could_overflow_are_refused():
    weight = WeightCodes(torch.zeros(1, 40000, dtype=torch.int8), torch.ones(1, 1), torch.zeros(1, 1), bits=8)
    with pytest.raises(QuantizationError, match="overflow"):
        QuantLinear(weight, None, ActivationRule(8, symmetric=False), "integer")


def test_different_groups_of_weights_and_activations_are_refused():
    weight = quantize_weight(torch.randn(4, 64), bits=4, granularity="group", group_size=16)
    with pytest.raises(QuantizationError, match="different groups"):
        QuantLinear(weight, None, ActivationRule(4, "group", group_size=32), "integer")


@pytest.mark.parametrize("execution", ["integer", "simulated"])
def test_a_token_that_is_not_finite_spoils_only_itself(execution):
    layer = layers(torch.randn(8, 32), (8, True, "channel", "token"))[execution]
    x = inputs(6, 32)
    clean = layer(x)
    x[2, 7] = torch.nan
    spoiled = layer(x)
    assert spoiled[2].isnan().all()
    keep = torch.arange(6) != 2
    assert torch.equal(spoiled[keep], clean[keep])


@pytest.mark.parametrize("execution", ["integer", "simulated", "classic"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_result_has_the_shape_and_dtype_of_the_input(execution, dtype):
    layer = layers(torch.randn(8, 32), (8, True, "channel", "token"))[execution]
    x = torch.randn(2, 3, 32).to(dtype)
    got = layer(x)
    assert (got.shape, got.dtype) == ((2, 3, 8), dtype)
    if execution != "classic":
        assert torch.equal(got, layer(x.float()).to(dtype))
    assert layer(x[:, :0]).shape == (2, 0, 8)


@pytest.mark.parametrize("execution", ["integer", "simulated", "classic"])
def test_inputs_that_are_strided_or_require_gradients_are_only_read(execution):
    torch.manual_seed(0)
    layer = layers(torch.randn(8, 32), (8, True, "channel", "token"))[execution]
    x = torch.randn(32, 6).t().requires_grad_()
    before = x.detach().clone()
    got = layer(x)
    assert not got.requires_grad
    want = layer(before.contiguous())
    if execution == "classic":
        # its float product may add in another order for another layout; the error of a sum of 32 products goes with
        # their size (4e-7 of the largest result over 300 seeds), not with the sum, which may lie near 0
        assert torch.allclose(got, want, rtol=0, atol=1e-6 * float(want.abs().max()))
    else:
        assert torch.equal(got, want)
    assert torch.equal(x.detach(), before)


def test_weight_only_executions_multiply_with_the_same_dequantized_weights():
    weight = quantize_weight(torch.randn(8, 32), bits=4, granularity="group", group_size=16)
    bias, x = torch.randn(8), torch.randn(3, 32)
    want = functional.linear(x, weight.dequantize(), bias)
    for execution in ("integer", "simulated", "classic"):
        layer = QuantLinear(weight, bias, None, execution)
        assert torch.equal(layer(x), want)
        assert "activations are not quantized" in layer.describe()
        with pytest.raises(QuantizationError, match="no integer accumulators"):
            layer.accumulators(x)
    lean = QuantLinear(weight, bias, None, "integer")
    lean(x)
    stored = {tensor.dtype for tensor in lean.buffers()}
    assert stored == {torch.uint8, torch.float32}
    assert not lean._derived.get("dequantized", torch.empty(0)).numel()


@pytest.mark.parametrize("execution", ["integer", "simulated", "classic"])
def test_changing_the_dtype_of_the_model_does_not_undo_the_quantization(execution):
    layer = layers(torch.randn(8, 32), (4, False, "group", "static"), torch.randn(8))[execution]
    x = torch.randn(3, 32)
    want = layer(x)
    before = copy.deepcopy(layer.state_dict())
    model = nn.Sequential(layer, nn.Linear(8, 4))
    model.half()
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())
    assert torch.equal(model[0](x), want)
    assert model[1].weight.dtype == torch.float16


@pytest.mark.parametrize("execution", ["integer", "simulated", "classic"])
def test_copies_and_loaded_states_compute_the_same(execution, tmp_path):
    scheme = (4, False, "group", "static")
    layer = layers(torch.randn(8, 32), scheme, torch.randn(8))[execution]
    x = torch.randn(3, 32)
    want = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), want)
    other = layers(torch.randn(8, 32), scheme, torch.randn(8))[execution]
    # computed once with its own codes, so that anything kept from them would show
    assert not torch.equal(other(x), want)
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(other(x), want)


def test_executions_share_codes_and_scales():
    made = layers(torch.randn(8, 32), (8, True, "channel", "token"))
    assert made["integer"].weight.codes is made["simulated"].weight.codes
    assert made["integer"].weight.scale is made["simulated"].weight.scale


def test_saturation_is_measured_only_on_request():
    layer = layers(torch.randn(8, 32), (8, True, "channel", "static"))["integer"]
    x = torch.zeros(2, 32)
    x[0, :8] = 100
    layer(x)
    assert layer.saturation is None
    layer.observe_saturation = True
    layer(x)
    assert layer.saturation == 8 / 64


def test_description_names_grids_and_kernel():
    made = layers(torch.randn(8, 32), (8, True, "channel", "token"))
    kernel = kernels.choose_kernel("cpu").name
    assert made["integer"].describe() == f"W8 per channel x A8 per token, int32 accumulators by {kernel}"
    assert made["simulated"].kernel == "integers in float32"
    assert "fake quantization" in made["classic"].describe()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("columns", "rows", "tokens"), SHAPES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_cuda_gives_the_bits_of_the_cpu(columns, rows, tokens, scheme):
    weight = torch.randn(rows, columns)
    made = layers(weight, scheme, torch.randn(rows))
    x = inputs(tokens, columns)
    want = made["integer"](x)
    for execution in ("integer", "simulated"):
        assert torch.equal(made[execution].cuda()(x.cuda()).cpu(), want)
