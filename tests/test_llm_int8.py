"""LLM.int8() lies between the float model and rounding to nearest."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from quant_bench import registry
from quant_bench.errors import NotApplicable, SpecError
from quant_bench.model import LanguageModel
from quant_bench.quantizer import Calibration
from quant_bench.testing import check_quantizer, tiny_ids, tiny_model


def logits(model: LanguageModel) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.module(input_ids=tiny_ids(), use_cache=False).logits
    return out


def int8(threshold: float, **settings: object) -> LanguageModel:
    rest = "".join(f",{name}={value}" for name, value in settings.items())
    text = f"llm_int8(threshold={threshold}{rest})"
    return registry.build("quantizers", text).quantize(tiny_model("llama"), Calibration())


def test_threshold_above_everything_is_rounding_to_nearest() -> None:
    nearest = registry.build("quantizers", "w8a8").quantize(tiny_model("llama"), Calibration())
    assert torch.equal(logits(int8(1e9)), logits(nearest))


def test_threshold_of_zero_is_the_float_model() -> None:
    assert torch.allclose(logits(int8(0.0)), logits(tiny_model("llama")), atol=1e-5)


def test_an_outlier_column_is_exact_and_the_others_are_rounded_without_it() -> None:
    quantized = int8(6.0)
    layer = quantized.module.get_submodule("model.layers.0.mlp.up_proj")
    weight = tiny_model("llama").module.get_submodule("model.layers.0.mlp.up_proj").weight.detach()
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0)).clamp(-3.0, 3.0)
    x[2, 9] = 50.0
    rest = x.clone()
    rest[:, 9] = 0.0
    wanted = layer.products(rest) + functional.linear(x[:, 9:10], weight[:, 9:10])
    assert torch.allclose(layer(x), wanted, atol=1e-5)
    exact = functional.linear(x, weight)
    assert float((layer(x) - exact).norm()) < 0.2 * float((layer.products(x) - exact).norm())


def test_outliers_depend_on_other_tokens_and_the_model_says_so() -> None:
    quantized = int8(6.0)
    assert not quantized.token_independent
    assert any("at least 6" in note for note in quantized.coverage.notes)


def test_storage_counts_the_float_weights_that_are_kept() -> None:
    quantized = int8(6.0)
    tensors = quantized.module.get_submodule("model.layers").state_dict()
    kept = [tensor for name, tensor in tensors.items() if name.endswith(("float_weight", ".codes", ".scale"))]
    assert quantized.coverage.weight_bytes == sum(tensor.nbytes for tensor in kept)
    assert quantized.coverage.weight_bytes > quantized.coverage.float_bytes


@pytest.mark.parametrize("text", ["llm_int8(threshold=1.0)", "llm_int8:w4a4g16(threshold=2.0)"])
def test_llm_int8_keeps_the_contract(text: str) -> None:
    check_quantizer(registry.build("quantizers", text), families=("llama", "gpt2"))


def test_llm_int8_refuses_what_makes_no_sense() -> None:
    with pytest.raises(SpecError, match="negative"):
        int8(-1.0)
    static = registry.build("quantizers", "llm_int8:w8a8-static")
    with pytest.raises(NotApplicable, match="scope=full"):
        static.quantize(tiny_model("llama"), Calibration())
    with pytest.raises(NotApplicable, match="weight_bits=16"):
        registry.build("quantizers", "llm_int8:w16a8").quantize(tiny_model("llama"), Calibration())
