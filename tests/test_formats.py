"""FP8, MXFP4 and NVFP4 against torch's and ml_dtypes' own types, and the layers and recipe made of them."""

import copy
import math

import ml_dtypes
import numpy as np
import pytest
import torch

from quant_bench import registry, schemes
from quant_bench.errors import NotApplicable, QuantizationError, SpecError, UnknownPlugin
from quant_bench.lowbit.formats import FormatLinear, FormatWeight
from quant_bench.numerics.formats import E2M1, E4M3, FORMATS, encode, round_to_element
from quant_bench.quantizer import Calibration
from quant_bench.spec import Spec
from quant_bench.testing import check_quantizer, tiny_ids, tiny_model

NAMES = ("fp8", "mxfp4", "nvfp4")


def e2m1(values):
    """The nearest numbers that ml_dtypes' 4-bit type holds."""
    clipped = np.clip(np.asarray(values, np.float32), -6, 6)
    return torch.from_numpy(np.asarray(clipped.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)))


def e4m3(values):
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def many_values():
    """Every border between neighbours of either type with what lies beside it, and random numbers of all sizes."""
    borders = torch.arange(-1024, 1025) / 1024
    sizes = 2.0 ** torch.arange(-12, 11)
    exact = (borders[:, None] * sizes).flatten()
    beside = torch.cat([torch.nextafter(exact, torch.tensor(side)) for side in (torch.inf, -torch.inf)])
    noise = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    return torch.cat([exact, beside, noise, noise * 100, torch.tensor([0.0, -0.0, 1e-40, -1e-40, 3e38])])


def test_e4m3_is_what_torch_and_ml_dtypes_round_to():
    values = many_values()
    found = round_to_element(values, E4M3)
    assert torch.equal(found, e4m3(values))
    theirs = values.clamp(-448, 448).numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert torch.equal(found, torch.from_numpy(theirs))


def test_e2m1_is_what_ml_dtypes_rounds_to():
    values = many_values()
    found = round_to_element(values, E2M1)
    assert torch.equal(found, e2m1(values))
    assert found.abs().unique().tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_what_is_not_a_number_stays_none():
    assert round_to_element(torch.tensor([torch.nan]), E2M1).isnan().all()


def heavy_tailed(rows, columns, seed=0):
    torch.manual_seed(seed)
    return torch.distributions.StudentT(3.0).sample((rows, columns))


def by_definition(row, name, scale):
    """Values of one row, block by block in Python floats, with ml_dtypes for elements and e4m3 scales."""
    values = []
    size = FORMATS[name].block
    for start in range(0, len(row), size):
        block = row[start : start + size]
        largest = max(abs(v) for v in block.tolist())
        if name == "mxfp4":
            own = 2.0 ** (math.floor(math.log2(largest)) - 2) if largest else 1.0
        else:
            own = float(
                np.float32(np.float32(largest) / np.float32(6) / np.float32(scale)).astype(ml_dtypes.float8_e4m3fn)
            )
        for value in block:
            scaled = np.float32(value.item()) / np.float32(scale) / np.float32(own) if own else np.float32(0)
            values.append(e2m1(scaled).item() * own * scale)
    return torch.tensor(values)


@pytest.mark.parametrize("columns", [16, 32, 40, 100])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_blocks_are_those_of_the_definition(name, columns):
    weight = heavy_tailed(5, columns)
    weight[1] = 0
    weight[2, :32] *= 1e-6
    scale = weight.abs().max() / np.float32(6 * 448) if name == "nvfp4" else torch.tensor(1.0)
    found = FormatWeight.of(weight, name).dequantize()
    want = torch.stack([by_definition(row, name, float(scale)) for row in weight])
    assert torch.allclose(found, want, rtol=1e-6, atol=0)


def test_fp8_has_a_scale_a_channel():
    weight = heavy_tailed(5, 40)
    weight[3] = 0
    found = FormatWeight.of(weight, "fp8")
    scale = weight.abs().amax(1, keepdim=True) / 448
    scale[3] = 1
    assert torch.equal(found.scale, scale)
    assert torch.equal(found.dequantize(), e4m3(weight / scale) * scale)
    assert torch.allclose(found.dequantize().abs().amax(1), weight.abs().amax(1), rtol=1e-6, atol=0)


def test_block_scales_are_numbers_of_their_types():
    weight = heavy_tailed(8, 128) * 1e-3
    mx, nv = encode(weight, FORMATS["mxfp4"]), encode(weight, FORMATS["nvfp4"], "tensor")
    powers = mx.block_scale.numpy().astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert torch.equal(mx.block_scale, torch.from_numpy(powers))
    assert torch.equal(nv.block_scale, e4m3(nv.block_scale))
    assert nv.block_scale.max() == 448
    assert mx.scale is None


@pytest.mark.parametrize("name", NAMES)
def test_stored_elements_are_the_encoded_ones_in_as_many_bits_as_the_format_has(name):
    weight = heavy_tailed(6, 70)
    stored = FormatWeight.of(weight, name)
    found = encode(weight, FORMATS[name], "row" if name == "fp8" else "tensor")
    assert torch.equal(stored.operand(), found.operand(FORMATS[name].block))
    want = {"fp8": 6 * 70 + 6 * 4, "mxfp4": 6 * 35 + 6 * 3, "nvfp4": 6 * 35 + 6 * 5 + 4}
    assert stored.nbytes == want[name]


def test_a_block_far_below_the_largest_becomes_zeros():
    weight = torch.ones(1, 32)
    weight[0, :16] = 1e-7
    found = FormatWeight.of(weight, "nvfp4").dequantize()
    assert (found[0, :16] == 0).all()
    assert torch.allclose(found[0, 16:], torch.ones(16))


def test_weights_that_are_not_finite_are_refused():
    with pytest.raises(QuantizationError, match="not finite"):
        FormatWeight.of(torch.tensor([[1.0, torch.inf]]), "mxfp4")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [None, *NAMES])
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_multiplies_what_its_formats_stand_for(name, activation, bias):
    weight, x = heavy_tailed(24, 80), torch.randn(7, 80)
    added = torch.randn(24) if bias else None
    layer = FormatLinear(FormatWeight.of(weight, name), added, activation)
    rounded = x
    if activation is not None:
        found = encode(x, FORMATS[activation])
        rounded = found.operand(FORMATS[activation].block) * (1 if found.scale is None else found.scale)
    want = rounded.double() @ FormatWeight.of(weight, name).dequantize().double().t()
    want = want if added is None else want + added
    assert torch.allclose(layer(x).double(), want, rtol=1e-5, atol=1e-4)
    assert layer(x.half().reshape(1, 7, 80)).shape == (1, 7, 24)
    assert layer(x.half()).dtype == torch.float16


@pytest.mark.parametrize("activation", NAMES)
def test_a_token_depends_on_no_other_and_spoils_none(activation):
    layer = FormatLinear(FormatWeight.of(heavy_tailed(16, 64), "fp8"), None, activation)
    x = heavy_tailed(9, 64)
    whole = layer(x)
    rows = torch.cat([layer(x[index : index + 1]) for index in range(9)])
    assert torch.allclose(rows, whole, rtol=1e-5, atol=1e-5)
    for bad in (torch.nan, torch.inf):
        x[4, 3] = bad
        spoiled = layer(x)
        assert spoiled[4].isnan().all()
        keep = torch.arange(9) != 4
        assert torch.allclose(spoiled[keep], whole[keep], rtol=1e-5, atol=1e-5)


def test_a_scale_of_the_tensor_is_shared_by_its_tokens():
    x = torch.randn(4, 32)
    x[0] *= 1e6
    tensor, token = (encode(x, FORMATS["nvfp4"], outer) for outer in ("tensor", "row"))
    assert tensor.scale.shape == (1, 1)
    assert (tensor.operand(16)[1:] == 0).all()
    assert (token.operand(16)[1:] != 0).any()


@pytest.mark.parametrize("name", NAMES)
def test_no_change_of_dtype_and_no_copy_changes_a_layer(name):
    layer = FormatLinear(FormatWeight.of(heavy_tailed(8, 48), name), torch.randn(8), name)
    x = torch.randn(3, 48)
    want = layer(x)
    assert torch.equal(copy.deepcopy(layer).half().to(torch.bfloat16)(x), want)
    other = FormatLinear(FormatWeight.of(heavy_tailed(8, 48, 1), name), torch.randn(8), name)
    other(x)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), want)


@pytest.mark.parametrize("text", ["fp8", "mxfp4", "nvfp4"])
def test_formats_keep_the_contract_on_every_layout(text):
    check_quantizer(registry.build("quantizers", text))


@pytest.mark.parametrize("text", ["nvfp4a16-kv8", "fp(weights=mxfp4)", "nvfp4(activation_scale=tensor)"])
def test_further_settings_keep_the_contract(text):
    check_quantizer(registry.build("quantizers", text), families=("llama", "gpt2"))


def quantized(text):
    return registry.build("quantizers", text).quantize(tiny_model("llama"), Calibration())


def test_eight_bits_err_less_than_four_and_weights_alone_less_than_both():
    ids = tiny_ids()
    with torch.no_grad():
        reference = tiny_model("llama").module(input_ids=ids).logits
        error = {
            text: float((quantized(text).module(input_ids=ids).logits - reference).square().mean())
            for text in ("fp8", "fp8a16", "nvfp4", "nvfp4a16", "mxfp4", "mxfp4a16")
        }
    assert error["fp8a16"] < error["fp8"] < error["nvfp4a16"] < error["nvfp4"] < error["mxfp4"]
    assert error["mxfp4a16"] < error["mxfp4"]


def test_coverage_names_formats_scales_and_keys():
    coverage = quantized("nvfp4-kv4").coverage
    how = "W NVFP4 (e2m1, blocks of 16 with e4m3 scales), a float32 scale per tensor x A NVFP4"
    assert all(text.startswith(how) for text in coverage.quantized.values())
    assert "lm_head" in coverage.skipped
    assert any("rounded to 4 bits" in note for note in coverage.notes)
    # half a byte an element and a byte for 16 of them, a little more for widths that blocks do not divide
    assert 0.5625 / 4 <= coverage.weight_bytes / coverage.float_bytes < 0.6 / 4
    assert quantized("mxfp4").token_independent
    assert not quantized("nvfp4(activation_scale=tensor)").token_independent


@pytest.mark.parametrize("text", ["fp8-integer", "fp(activations=float,execution=integer,weights=mxfp4)"])
def test_integer_execution_is_not_applicable(text):
    with pytest.raises(NotApplicable, match="floating-point"):
        quantized(text)


@pytest.mark.parametrize("text", list(schemes.FORMATS))
@pytest.mark.parametrize("suffix", ["", "-kv8", "-integer", "-kv4-integer"])
def test_a_shorthand_is_the_label_of_what_it_builds(text, suffix):
    built = registry.build("quantizers", f"{text}{suffix}")
    assert type(built).__name__ == "Fp"
    assert schemes.label(registry.canonical("quantizers", built)) == f"{text}{suffix}"


def test_settings_follow_a_shorthand_and_come_back_in_its_label():
    built = registry.build("quantizers", "nvfp4(activation_scale=tensor)")
    assert schemes.label(registry.canonical("quantizers", built)) == "nvfp4(activation_scale=tensor)"
    mixed = registry.canonical("quantizers", registry.build("quantizers", "fp(weights=mxfp4)"))
    assert schemes.label(mixed) == mixed == "fp(weights=mxfp4)"
    assert schemes.expand("mxfp4a16") == Spec("fp", {"weights": "mxfp4", "activations": "float"})


@pytest.mark.parametrize(
    "text", ["mxfp4(activations=fp8)", "mxfp4(activation_scale=tensor)", "fp8(kv_bits=9)", "fp8-classic", "gptq:mxfp4"]
)
def test_what_means_nothing_is_refused(text):
    with pytest.raises((SpecError, UnknownPlugin)):
        registry.build("quantizers", text)
