"""GPTQ against a few plain lines, against round to nearest, and its settings."""

import pytest
import torch

from quant_bench import registry
from quant_bench.errors import QuantizationError, SpecError
from quant_bench.lowbit.codes import quantize_weight
from quant_bench.model import LanguageModel
from quant_bench.numerics import gptq
from quant_bench.numerics.integers import Grid, scale_and_zero
from quant_bench.quantization.linears import weight_of
from quant_bench.quantization.sequential import GptqRule, gptq_encode
from quant_bench.quantizer import Calibration
from quant_bench.testing import check_quantizer, tiny_calibration, tiny_model


def correlated(columns: int, tokens: int = 400, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) * torch.logspace(-1, 1, columns)[:, None]
    return torch.randn(tokens, columns, generator=generator) @ mixing


def plain_gptq(
    weight: torch.Tensor, second: torch.Tensor, bits: int, group: int, damping: float, order: list[int] | None = None
) -> torch.Tensor:
    """Optimal Brain Surgeon, one column at a time: the inverse of what is left is found anew at each step."""
    columns = weight.shape[1]
    high = 2 ** (bits - 1) - 1
    h = second.double() + damping * second.double().diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    w, result = weight.double().clone(), torch.zeros_like(weight, dtype=torch.float64)
    left = list(order or range(columns))
    scales: dict[int, torch.Tensor] = {}
    while left:
        first, index = left[0], left[0] // group
        if index not in scales:
            source = w if order is None else weight.double()
            scales[index] = source[:, index * group : (index + 1) * group].abs().amax(1) / high
        inverse = torch.linalg.inv(h[left][:, left])
        result[:, first] = (w[:, first] / scales[index]).round().clamp(-high, high) * scales[index]
        error = (w[:, first] - result[:, first]) / inverse[0, 0]
        w[:, left] = w[:, left] - error[:, None] * inverse[0]
        left = left[1:]
    return result


@pytest.mark.parametrize("group", [12, 24, 5])
@pytest.mark.parametrize("block", [128, 8, 7])
def test_codes_are_those_of_a_plain_reference(group: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq, "BLOCK", block)
    x = correlated(24)
    weight, second = torch.randn(7, 24, generator=torch.Generator().manual_seed(1)), x.T @ x / len(x)
    scheme = registry.build("quantizers", f"gptq:w4a16g{group}")
    codes = gptq_encode(weight, second, scheme, GptqRule(damping=0.02))
    expected = plain_gptq(weight, second, 4, group, 0.02)
    torch.testing.assert_close(codes.dequantize().double(), expected, atol=1e-4, rtol=1e-4)


def test_codes_in_order_of_activations_are_those_of_a_plain_reference() -> None:
    x = correlated(24)[:, torch.randperm(24, generator=torch.Generator().manual_seed(2))]
    weight, second = torch.randn(7, 24, generator=torch.Generator().manual_seed(1)), x.T @ x / len(x)
    order = torch.argsort(second.diagonal(), descending=True).tolist()
    codes = gptq_encode(weight, second, registry.build("quantizers", "gptq:w3a16g8"), GptqRule(True, 0.01))
    torch.testing.assert_close(
        codes.dequantize().double(), plain_gptq(weight, second, 3, 8, 0.01, order), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("text", ["w4a16g16", "w3a16", "w4a4", "w8a8-static", "w4a16(weight_symmetric=False)"])
@pytest.mark.parametrize("act_order", [False, True])
def test_products_are_nearer_than_those_of_rounding_to_nearest(text: str, act_order: bool) -> None:
    scheme = registry.build("quantizers", f"gptq:{text}")
    x = correlated(48)
    weight = torch.randn(32, 48, generator=torch.Generator().manual_seed(3))
    nearest = quantize_weight(
        weight,
        bits=scheme.weight_bits,
        granularity=scheme.weight_granularity,
        symmetric=scheme.weight_symmetric,
        search=scheme.weight_range,
        group_size=scheme.group_size,
    )
    found = gptq_encode(weight, x.T @ x / len(x), scheme, GptqRule(act_order))
    errors = [float((x @ (codes.dequantize() - weight).T).square().sum()) for codes in (found, nearest)]
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.parametrize("columns", [3, 24, 300])
def test_factor_is_the_upper_one_of_the_inverse(columns: int) -> None:
    x = torch.randn(2 * columns, columns, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    second = x.T @ x
    damped = second + 0.01 * second.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    expected = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    torch.testing.assert_close(gptq.inverse_factor(second, 0.01), expected)


def test_uncorrelated_inputs_leave_rounding_to_nearest() -> None:
    weight = torch.randn(6, 20, generator=torch.Generator().manual_seed(4))
    scheme = registry.build("quantizers", "gptq:w4a16g5")
    found = gptq_encode(weight, torch.eye(20), scheme, GptqRule())
    nearest = quantize_weight(weight, bits=4, granularity="group", group_size=5)
    assert torch.equal(found.unpacked(), nearest.unpacked())
    assert torch.equal(found.scale, nearest.scale)


def test_features_without_input_are_rounded_to_the_nearest() -> None:
    x = correlated(20)
    x[:, 7] = 0.0
    weight = torch.randn(6, 20, generator=torch.Generator().manual_seed(4))
    found = gptq_encode(weight, x.T @ x, registry.build("quantizers", "gptq:w4a16g20"), GptqRule(act_order=True))
    step = scale_and_zero(weight.amin(1), weight.amax(1), Grid(4, True))[0]
    assert bool(((found.dequantize() - weight)[:, 7].abs() <= step / 2 * 1.001).all())


@pytest.mark.parametrize("act_order", [False, True])
def test_features_without_input_leave_the_others_as_they_are_without_them(act_order: bool) -> None:
    x = 1e-3 * correlated(20)
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(4))
    half = gptq_encode(
        weight[:, :20], x.T @ x, registry.build("quantizers", "gptq:w4a16g20"), GptqRule(act_order=act_order)
    )
    x = torch.cat((x, torch.zeros_like(x)), 1)
    found = gptq_encode(weight, x.T @ x, registry.build("quantizers", "gptq:w4a16g20"), GptqRule(act_order=act_order))
    assert torch.equal(found.unpacked()[:, :20], half.unpacked())


def test_singular_second_moments_say_what_to_do() -> None:
    model = tiny_model("llama")
    ids = torch.full((1, 4), 5)
    recipe = registry.build("quantizers", "gptq:w4a16(damping=0.0)")
    with pytest.raises(QuantizationError, match=r"layers\.0\.self_attn\.\w+: .*not positive definite.*raise damping"):
        recipe.quantize(model, Calibration((ids,)))


def layer_output(model: LanguageModel) -> torch.Tensor:
    with torch.no_grad():
        ids = torch.cat(list(tiny_calibration(registry.build("quantizers", "gptq:w4a16")).batches))
        return model.body(input_ids=ids, use_cache=False).last_hidden_state


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "opt"])
def test_model_outputs_are_nearer_to_float_than_those_of_rounding_to_nearest(family: str) -> None:
    float_output = layer_output(tiny_model(family))
    errors = {}
    for recipe in ("gptq", "rtn"):
        quantizer = registry.build("quantizers", f"{recipe}:w4a16")
        calibration = tiny_calibration(registry.build("quantizers", "gptq:w4a16"))
        quantized = quantizer.quantize(tiny_model(family), calibration)
        errors[recipe] = float((layer_output(quantized) - float_output).square().sum())
    assert errors["gptq"] < 0.9 * errors["rtn"]


def test_layers_see_inputs_that_rounded_layers_give() -> None:
    quantizer = registry.build("quantizers", "gptq:w2a16")
    calibration = tiny_calibration(quantizer)
    quantized = quantizer.quantize(tiny_model("llama"), calibration)
    other = tiny_model("llama")
    first = {f"model.layers.0.{name}" for name in ("self_attn.q_proj", "mlp.down_proj")}
    for site in other.layout.linears:
        if site.layer == 0:
            codes = quantized.module.get_submodule(site.path).weight
            weight_of(other.module.get_submodule(site.path)).copy_(codes.dequantize())
    seen: list[torch.Tensor] = []
    path = "model.layers.1.self_attn.q_proj"
    other.module.get_submodule(path).register_forward_pre_hook(
        lambda module, given: seen.append(given[0].flatten(0, 1))
    )
    with torch.no_grad():
        for ids in calibration.batches:
            other.body(input_ids=ids, use_cache=False)
    x = torch.cat(seen)
    weight = weight_of(other.module.get_submodule(path))
    expected = gptq_encode(weight, x.T @ x / len(x), quantizer, GptqRule())
    assert first <= {site.path for site in other.layout.linears}
    agree = expected.unpacked() == quantized.module.get_submodule(path).weight.unpacked()
    assert float(agree.float().mean()) > 0.99


@pytest.mark.parametrize("text", ["gptq:w4a16g16", "gptq(act_order=True,damping=0.05,weight_bits=4)"])
def test_recipe_keeps_the_contract(text: str) -> None:
    check_quantizer(registry.build("quantizers", text), families=("gpt2", "gemma3"))


@pytest.mark.parametrize("arm", ["combo2", "output_gate"])
def test_recipe_takes_arms(arm: str) -> None:
    model = registry.build("arms", arm).attach(tiny_model("llama"))
    quantizer = registry.build("quantizers", "gptq:w4a4")
    assert quantizer.quantize(model, tiny_calibration(quantizer)).coverage.mac_share > 0.8


def test_damping_out_of_range_is_a_usage_error() -> None:
    with pytest.raises(SpecError, match="damping"):
        registry.build("quantizers", "gptq(damping=1.5)")
