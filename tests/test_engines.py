"""Foreign engines: whose codes they are, where they agree with ours, and that records and tasks say so."""

import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quant_bench import models, registry
from quant_bench.errors import Blocked, NotApplicable, QuantizationError, SpecError
from quant_bench.lowbit.codes import quantize_weight
from quant_bench.lowbit.floats import pack_float_linears_
from quant_bench.model import LanguageModel
from quant_bench.outliers import _weight_incoherence
from quant_bench.parity import integer_layers
from quant_bench.quantization import bias_of, weight_of
from quant_bench.quantization.linears import as_linear
from quant_bench.quantizer import Calibration
from quant_bench.runner import RunOptions, run_cells
from quant_bench.testing import check_quantizer, tiny_calibration, tiny_ids, tiny_model

try:
    import torchao.quantization as torchao
except ImportError:
    torchao = None
TORCHAO = ("", "(scheme=w8a16)", "(group_size=16,scheme=w4a16)")
needs_torchao = pytest.mark.skipif(torchao is None, reason="torchao is an optional extra, and not installed")

QUANTO = ("quanto(activations=none)", "quanto(activations=none,weights=qint4)", "quanto(weights=qint2)")
FLOAT8 = ("quanto(activations=none,weights=qfloat8)", "quanto(activations=qfloat8,weights=qfloat8)")
LAYOUTS = ("llama", "gpt2", "gpt_neox", "opt", "gemma3", "qwen3")


def quantized(text: str, family: str = "llama") -> LanguageModel:
    quantizer = registry.build("quantizers", text)
    return quantizer.quantize(tiny_model(family), tiny_calibration(quantizer))


def weights_of(model: LanguageModel) -> dict[str, Any]:
    return {site.path: model.module.get_submodule(site.path).weight for site in model.layout.linears}


def floats(family: str) -> dict[str, Tensor]:
    model = tiny_model(family)
    return {site.path: weight_of(model.module.get_submodule(site.path)) for site in model.layout.linears}


@pytest.mark.parametrize("text", QUANTO + FLOAT8)
def test_quanto_keeps_the_contract_with_other_settings(text: str) -> None:
    assert check_quantizer(registry.build("quantizers", text), ("llama", "gpt2", "gpt_neox")) == {}


@needs_torchao
def test_torchao_keeps_the_contract_and_refuses_groups_that_do_not_divide() -> None:
    assert check_quantizer(registry.build("quantizers", "torchao(scheme=w8a16)"), ("llama", "gpt2")) == {}
    refused = check_quantizer(registry.build("quantizers", "torchao(group_size=16,scheme=w4a16)"), ("gemma3", "gpt2"))
    assert list(refused) == ["gemma3"]
    assert "must divide the columns; this model has [40]" in refused["gemma3"]


@pytest.mark.parametrize("family", LAYOUTS)
def test_codes_and_scales_of_quanto_in_8_bits_are_ours(family: str) -> None:
    for path, weight in weights_of(quantized("quanto", family)).items():
        ours = quantize_weight(floats(family)[path], bits=8)
        assert torch.equal(weight._data, ours.unpacked()), path
        assert torch.equal(weight._scale, ours.scale), path


def test_weight_only_quanto_in_8_bits_gives_the_logits_of_w8a16() -> None:
    ids = tiny_ids()
    with torch.no_grad():
        theirs = quantized("quanto(activations=none)").module(input_ids=ids).logits
        ours = quantized("w8a16").module(input_ids=ids).logits
    # one multiplies scaled weights, the other scales before: float32 rounding only
    assert float((theirs - ours).abs().max() / ours.abs().max()) < 1e-5


@pytest.mark.parametrize(("kind", "bits"), [("qint4", 4), ("qint2", 2)])
def test_low_bits_of_quanto_span_each_channel_from_its_least_to_its_largest_value(kind: str, bits: int) -> None:
    found = weights_of(quantized(f"quanto(activations=none,weights={kind})"))
    for path, weight in floats("llama").items():
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        scale = (high - low) / (2**bits - 1)
        wanted = ((weight - low) / scale).round() * scale + low
        assert torch.allclose(found[path].dequantize(), wanted, rtol=1e-5, atol=1e-6), path


def test_static_inputs_of_quanto_are_rounded_on_our_grid_with_the_scale_of_its_calibration() -> None:
    # one batch: no momentum enters, and the scale is that of the largest magnitude
    model, path = quantized("quanto(calibration_batches=1)"), "model.layers.0.self_attn.q_proj"
    seen: list[Tensor] = []
    plain = tiny_model("llama")
    plain.module.get_submodule(path).register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    batches = tiny_calibration(registry.build("quantizers", "quanto(calibration_batches=1)")).batches
    with torch.no_grad():
        plain.module(input_ids=batches[0])
    layer: Any = model.module.get_submodule(path)
    scale = seen[0].abs().max() / 127
    assert torch.equal(layer.input_scale, scale)
    x = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(0))
    codes = (x / scale).round().clamp(-128, 127).long()
    exact = (codes @ layer.weight._data.long().T).double() * (scale * layer.weight._scale.T).double()
    with torch.no_grad():
        assert torch.allclose(layer(x).double(), exact, rtol=1e-6, atol=1e-6)
    assert type(layer(x)) is Tensor


@needs_torchao
def test_torchao_rounds_on_the_full_grid_where_ours_is_restricted() -> None:
    found = weights_of(quantized("torchao", "gpt2"))
    for path, weight in floats("gpt2").items():
        scale = weight.abs().amax(1, keepdim=True) / 127.5
        # by the reciprocal, which moves ties: that is torchao's own arithmetic
        codes = (weight * (1 / scale)).round().clamp(-128, 127).char()
        assert torch.equal(found[path].scale, scale), path
        assert torch.equal(found[path].qdata, codes), path
        ours = quantize_weight(weight, bits=8)
        assert int(ours.unpacked().min()) >= -127
        ratio = ours.scale / found[path].scale
        assert torch.allclose(ratio, torch.full_like(ratio, 127.5 / 127))


@needs_torchao
def test_torchao_rounds_each_token_on_the_full_grid() -> None:
    layer: Any = quantized("torchao").module.get_submodule("model.layers.0.mlp.up_proj")
    x = torch.randn(7, 48, generator=torch.Generator().manual_seed(0))
    scale = x.abs().amax(1, keepdim=True) / 127.5
    codes = (x * (1 / scale)).round().clamp(-128, 127).long()
    exact = (codes @ layer.weight.qdata.long().T).double() * scale.double() * layer.weight.scale.T.double()
    with torch.no_grad():
        assert torch.allclose(layer(x).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", ["quanto", pytest.param("torchao", marks=needs_torchao)])
def test_coverage_names_the_engine_and_its_version_and_the_head_stays_tied(text: str) -> None:
    model = quantized(text)
    package = {"quanto": "optimum-quanto", "torchao": "torchao"}[text]
    version = metadata.version(package)
    assert model.execution == "foreign"
    assert set(model.coverage.quantized) == {site.path for site in model.layout.linears}
    for path, how in model.coverage.quantized.items():
        assert how.startswith(f"foreign execution by {package} {version}: "), path
    assert model.coverage.skipped["lm_head"] == "the head stays in float"
    assert model.coverage.tied == {"lm_head": "model.embed_tokens"}
    # a byte a code and four a channel (torchao: one more for a zero point), against four a weight
    rows = sum(len(weight) for weight in floats("llama").values())
    codes = model.coverage.float_bytes // 4
    assert model.coverage.weight_bytes == codes + rows * (4 if text == "quanto" else 5)


@pytest.mark.parametrize("arm", ["combo2", "sink_token", "gated"])
@pytest.mark.parametrize("text", ["quanto", pytest.param("torchao", marks=needs_torchao)])
def test_engines_run_the_products_of_an_arm_and_leave_its_gates_in_float(text: str, arm: str) -> None:
    quantizer = registry.build("quantizers", text)
    model = quantizer.quantize(models.attach(tiny_model("llama"), arm), tiny_calibration(quantizer))
    with torch.no_grad():
        assert bool(model.module(input_ids=tiny_ids()).logits.isfinite().all())
    assert set(model.coverage.quantized) == {site.path for site in model.layout.linears}


@pytest.mark.parametrize("text", ["quanto", pytest.param("torchao", marks=needs_torchao)])
def test_parity_does_not_apply_and_says_why(text: str) -> None:
    with pytest.raises(NotApplicable, match="execution 'foreign' has no layer of ours with codes"):
        integer_layers(quantized(text))


@pytest.mark.parametrize("text", ["quanto", pytest.param("torchao", marks=needs_torchao)])
def test_products_of_another_library_are_not_packed_as_float_ones(text: str) -> None:
    model = quantized(text)
    before = {site.path: model.module.get_submodule(site.path) for site in model.layout.linears}
    assert not set(pack_float_linears_(model.module)) & set(before)
    assert all(model.module.get_submodule(path) is module for path, module in before.items())


@pytest.mark.parametrize("text", ["quanto", *(pytest.param(f"torchao{how}", marks=needs_torchao) for how in TORCHAO)])
def test_weights_of_an_engine_have_the_incoherence_of_what_they_stand_for(text: str) -> None:
    model = quantized(text)
    found = _weight_incoherence(model)
    assert found.keys() == {site.path for site in model.layout.linears}
    for path, value in found.items():
        weight = model.module.get_submodule(path).weight.dequantize().detach().double()
        expected = weight.numel() ** 0.5 * float(weight.abs().max()) / float(weight.norm())
        assert value == pytest.approx(expected, rel=1e-5)


def test_a_run_records_the_engine_beside_its_numbers(tmp_path: Path) -> None:
    models.save(tiny_model("llama"), tmp_path / "model")
    options = RunOptions(
        model=str(tmp_path / "model"),
        quantizers=("none", "quanto(activations=none)"),
        tasks=("python_docs(seq_length=32)", "parity(text=python_docs)"),
        limit=1,
        results=tmp_path / "results",
        cache=tmp_path / "cache",
    )
    states = {(o.cell.quantizer, o.cell.task.partition("(")[0]): o for o in run_cells(options)}
    found = states["quanto(activations=none)", "python_docs"].record
    assert found is not None
    assert found.state == "measured"
    assert found.versions["optimum-quanto"] == metadata.version("optimum-quanto")
    assert "foreign execution by optimum-quanto" in str(found.coverage)
    assert found.scores[0].delta is not None
    parity = states["quanto(activations=none)", "parity"].record
    assert parity is not None
    assert parity.state == "not_applicable"
    assert "foreign" in (parity.reason or "")


def test_a_library_that_is_missing_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(Blocked, match="pip install torchao"):
        registry.build("quantizers", "torchao").quantize(tiny_model("llama"), Calibration())


def test_a_missing_compiler_blocks_low_bits_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Tensor:
        raise RuntimeError("Error building extension 'quanto_cpp'\nmore")

    quantized("quanto(activations=none)")
    monkeypatch.setattr(torch.ops.quanto, "unpack", broken)
    with pytest.raises(Blocked, match=r"quanto_cpp'\): install a C\+\+ compiler"):
        quantized("quanto(activations=none,weights=qint4)")
    assert quantized("quanto(activations=none)").execution == "foreign"


def test_what_quanto_cannot_calibrate_is_an_error() -> None:
    quanto = registry.build("quantizers", "quanto")
    with pytest.raises(QuantizationError, match="calibration batches"):
        quanto.quantize(tiny_model("llama"), Calibration())
    model = tiny_model("llama")
    with torch.no_grad():
        model.module.get_submodule("model.layers.1.mlp.up_proj").weight[3, 4] = torch.nan
    with pytest.raises(QuantizationError, match=r"model\.layers\.1\.mlp\.up_proj: .*not finite"):
        quanto.quantize(model, tiny_calibration(quanto))


@pytest.mark.parametrize(
    "text",
    [
        *("quanto:w4a16", "quanto(execution=integer)", "quanto(kv_bits=8)"),
        *("torchao(group_size=0)", "torchao(group_size=16)", "torchao:w8a8"),
    ],
)
def test_settings_that_a_foreign_engine_does_not_have_are_refused(text: str) -> None:
    with pytest.raises(SpecError):
        registry.build("quantizers", text)


def test_a_conv1d_is_the_same_product_as_its_linear() -> None:
    conv = Conv1D(6, 4)
    conv.bias.data.normal_(generator=torch.Generator().manual_seed(0))
    linear, x = as_linear(conv), torch.randn(3, 4)
    assert torch.allclose(linear(x), conv(x), atol=1e-6)
    assert torch.equal(linear.weight, weight_of(conv))
    assert bias_of(linear) is not None
    same = nn.Linear(2, 2)
    assert as_linear(same) is same
