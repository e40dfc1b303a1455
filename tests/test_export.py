"""What is exported is read back by the compressed-tensors package and by transformers as our weights, bit for bit."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file

from quant_bench import models, registry
from quant_bench.errors import ModelError, NotApplicable
from quant_bench.export import packed_words, save_compressed
from quant_bench.model import LanguageModel
from quant_bench.testing.tokens import tiny_calibration, tiny_ids
from quant_bench.tiny import CONFIGS, tiny_model

ZEROS = "rtn(weight_bits=4,activation_bits=16,weight_symmetric=False,weight_granularity=group,group_size={})"
SCHEMES = (
    "w8a8",
    "rtn(weight_granularity=tensor)",
    "rtn(weight_bits=4,activation_bits=16)",
    "w8a16",
    "gptq:w4a16g8",
    "awq:w8a16g8",
    ZEROS.format(8),
)


def quantized(text: str, model: LanguageModel) -> LanguageModel:
    quantizer = registry.build("quantizers", text)
    return models.quantize_with(quantizer, model, tiny_calibration(quantizer))


def dequantized(model: LanguageModel) -> dict[str, torch.Tensor]:
    """Our weights, by path."""
    paths = [site.path for site in model.layout.linears]
    found: dict[str, Any] = {path: model.module.get_submodule(path) for path in paths}
    return {path: layer.weight.dequantize() for path, layer in found.items()}


def read_by_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    with warnings.catch_warnings():
        # transformers says that it keeps the folder's own configuration, which is what we want
        warnings.simplefilter("ignore")
        module, report = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=CompressedTensorsConfig(dequantize=True), output_loading_info=True
        )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    return module


@pytest.mark.parametrize("text", SCHEMES)
@pytest.mark.parametrize("family", [family for family in CONFIGS if family != "gpt2"])
def test_both_readers_have_our_weights(family: str, text: str, tmp_path: Path) -> None:
    model = quantized(text, tiny_model(family))
    save_compressed(model, tmp_path / "out")
    wanted = dequantized(model)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    read = QuantizationConfig.model_validate(config)
    scheme = read.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(read.format)
    module = read_by_transformers(tmp_path / "out")
    for path, weight in wanted.items():
        own = {name.removeprefix(f"{path}."): tensor for name, tensor in stored.items() if name.startswith(f"{path}.")}
        bias = own.pop("bias", None)
        assert set(own) == set(compressor.compression_param_names(scheme))
        assert torch.equal(compressor.decompress(own, scheme)["weight"], weight), path
        layer = module.get_submodule(path)
        assert torch.equal(layer.weight, weight), path
        ours: Any = model.module.get_submodule(path)
        assert (bias is None) == (ours.bias is None)
        assert bias is None or torch.equal(layer.bias, ours.bias)
    for name, tensor in module.state_dict().items():
        if name.rpartition(".")[0] not in wanted:
            assert torch.equal(tensor, model.module.state_dict()[name]), name


def test_transformers_rounds_activations_as_finely_as_we_do(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = quantized("rtn(execution=classic)", tiny_model("llama"))
    save_compressed(model, tmp_path / "out")
    ours: Any = model.module
    floating = read_by_transformers(tmp_path / "out")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        exact, rounded, wanted = (each(input_ids=tiny_ids()).logits for each in (floating, theirs, ours))
    # the package's grid ends at 127.5 where ours ends at 127, so the codes are not the same
    error, expected = ((logits - exact).square().mean().sqrt() for logits in (rounded, wanted))
    assert expected / 2 < error < 2 * expected


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [16, 19])
def test_words_are_packed_as_the_package_packs_them(bits: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (5, columns), generator=generator).to(torch.int8)
    codes[0, :] = half - 1
    assert torch.equal(packed_words(codes, bits), pack_to_int32(codes, bits))


def test_a_tied_head_is_stored_once_and_left_in_float(tmp_path: Path) -> None:
    save_compressed(quantized("w8a8", tiny_model("llama")), tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    module = read_by_transformers(tmp_path / "out")
    assert module.lm_head.weight is module.model.embed_tokens.weight


def test_the_folder_says_what_made_it(tmp_path: Path) -> None:
    model = quantized("gptq:w4a16g8", tiny_model("llama"))
    save_compressed(model, tmp_path / "out")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quant_bench_recipe"]
    assert said["quantizer"] == registry.canonical("quantizers", registry.build("quantizers", "gptq:w4a16g8"))
    assert said["weights_sha256"] == model.identity.weights_sha256
    with pytest.raises(ModelError, match="quantized already"):
        models.load_model(str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("text", "family", "reason"),
    [
        ("w4a4", "llama", "W8A8 can be exported"),
        ("rtn(activation_symmetric=False)", "llama", "W8A8 can be exported"),
        ("rtn(weight_symmetric=False)", "llama", "W8A8 can be exported"),
        ("rtn(activation_granularity=tensor,activation_static=True)", "llama", "W8A8 can be exported"),
        ("w3a16g8", "llama", "weights of 4 and 8 bits"),
        ("w4a16g32", "llama", "groups of 32 must divide the 48 columns"),
        ("w8a8-kv8", "llama", "no word for a KeyValueRounding"),
        ("quarot(activation_bits=16)", "llama", "no word for a RotatedInput"),
        ("llm_int8", "llama", "no word for a OutlierLinear"),
        ("hqq:w4a16g8", "llama", "real zero points"),
        ("rtn(weight_bits=16)", "llama", "no word for a RoundedLinear"),
        ("rtn(weight_bits=16,activation_bits=16)", "llama", "leaves them in float"),
        ("w8a8", "gpt2", "Conv1D"),
    ],
)
def test_what_the_format_cannot_say_is_refused(text: str, family: str, reason: str, tmp_path: Path) -> None:
    model = quantized(text, tiny_model(family))
    with pytest.raises(NotApplicable, match=reason):
        save_compressed(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_other_attention_is_refused(tmp_path: Path) -> None:
    model = quantized("w8a8", models.attach(tiny_model("llama"), "softmax1"))
    with pytest.raises(NotApplicable, match="softmax1"):
        save_compressed(model, tmp_path / "out")


def test_a_float_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not quantized"):
        save_compressed(tiny_model("llama"), tmp_path / "out")
