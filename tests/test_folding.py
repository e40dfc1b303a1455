"""Moving scales changes no float model; layers run alone give what they give in the model."""

from pathlib import Path

import pytest
import torch

from quant_bench import registry
from quant_bench.errors import QuantizationError
from quant_bench.model import LanguageModel
from quant_bench.quantization.folding import fold, folds_of
from quant_bench.quantization.layerwise import SPILL_VARIABLE, LayerStream
from quant_bench.quantization.moments import layer_moments
from quant_bench.quantizer import Calibration
from quant_bench.testing import tiny_ids, tiny_model

FAMILIES = ("llama", "qwen3", "gemma3", "gpt2", "gpt_neox", "opt")
ARMS = (
    *("softmax1", "sink_logit", "sink_token", "norm_gate", "projection_gate", "combo2", "output_gate", "renorm"),
    *("renorm(gate=projection)", "gated", "gated(kind=mlp)", "gated(kind=all_features)", "clipped_softmax"),
    "output_gate(kind=headwise)",
)


def calibration() -> Calibration:
    return Calibration(torch.split(tiny_ids(8, seed=2), 4))


def logits(model: LanguageModel) -> torch.Tensor:
    with torch.no_grad():
        return model.module(input_ids=tiny_ids(), use_cache=False).logits


def assert_same(after: torch.Tensor, before: torch.Tensor) -> None:
    assert float((after - before).abs().max()) < 1e-5 * float(before.abs().max())


def with_arm(arm: str, family: str = "llama") -> LanguageModel:
    torch.manual_seed(3)
    model = registry.build("arms", arm).attach(tiny_model(family))
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if "gate" in name and "gate_proj" not in name:
                # gates that start as constants would hide what they read
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def fold_everywhere(model: LanguageModel) -> int:
    generator, count = torch.Generator().manual_seed(5), 0
    for layer in range(len(model.layout.layers)):
        for place in folds_of(model, layer):
            columns = model.module.get_submodule(place.consumers[0].path)
            width = getattr(columns, "in_features", None) or columns.weight.shape[0]
            channels = len(place.gather(torch.ones(width)))
            fold(model, place, torch.exp(torch.randn(channels, generator=generator)))
            count += 1
    return count


@pytest.mark.parametrize(
    ("family", "places"), [("llama", 4), ("qwen3", 4), ("gemma3", 4), ("gpt2", 3), ("gpt_neox", 3), ("opt", 4)]
)
def test_random_factors_change_no_float_model(family: str, places: int) -> None:
    model = tiny_model(family)
    before = logits(model)
    assert fold_everywhere(model) == 2 * places
    after = logits(model)
    assert not torch.equal(before, after)
    assert_same(after, before)


def test_a_norm_without_a_gain_takes_no_factors() -> None:
    model = tiny_model("opt", layer_norm_elementwise_affine=False)
    before = logits(model)
    # the values' and the first projections' are left
    assert fold_everywhere(model) == 2 * 2
    assert_same(logits(model), before)


@pytest.mark.parametrize("arm", ARMS)
def test_random_factors_change_no_arm(arm: str) -> None:
    model = with_arm(arm)
    before = logits(model)
    places = 2 * (3 if arm in ("norm_gate", "renorm") else 4)
    assert fold_everywhere(model) == places
    assert_same(logits(model), before)


@pytest.mark.parametrize(("family", "places"), [("gpt2", 6), ("gpt_neox", 6), ("opt", 8), ("gemma3", 8)])
@pytest.mark.parametrize("arm", ["combo2", "output_gate"])
def test_random_factors_change_no_arm_on_other_layouts(arm: str, family: str, places: int) -> None:
    model = with_arm(arm, family)
    before = logits(model)
    assert fold_everywhere(model) == places
    assert_same(logits(model), before)


def test_norms_behind_their_block_keep_their_scale() -> None:
    model = tiny_model("opt", do_layer_norm_before=False)
    assert [place.kind for place in folds_of(model, 0)] == ["value", "up"]
    before = logits(model)
    fold_everywhere(model)
    assert_same(logits(model), before)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spill", [False, True])
def test_layers_run_alone_read_what_they_read_in_the_model(
    family: str, spill: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if spill:
        monkeypatch.setenv(SPILL_VARIABLE, str(tmp_path))
    model = tiny_model(family)
    wanted: dict[str, list[torch.Tensor]] = {site.path: [] for site in model.layout.linears}
    hooks = [
        model.module.get_submodule(path).register_forward_pre_hook(
            lambda module, arguments, seen=seen: seen.append(arguments[0].reshape(-1, arguments[0].shape[-1]))
        )
        for path, seen in wanted.items()
    ]
    with torch.no_grad():
        for ids in calibration().batches:
            model.body(input_ids=ids, use_cache=False)
    for handle in hooks:
        handle.remove()
    with LayerStream(model, calibration()) as stream:
        assert bool(list(tmp_path.rglob("*.safetensors"))) == spill
        for layer in range(len(model.layout.layers)):
            found = layer_moments(model, stream, second=True, rows=1000)
            stream.advance()
            for path, moments in found.items():
                x = torch.cat(wanted.pop(path))
                assert moments.tokens == len(x) == 8 * 24
                assert torch.equal(moments.rows, x)
                torch.testing.assert_close(moments.second, x.T @ x / len(x))
                torch.testing.assert_close(moments.mean, x.abs().mean(0))
                assert torch.equal(moments.largest, x.abs().amax(0))
            assert stream.layer == layer + 1
    assert not wanted
    hooked = [module for module in model.module.modules() if module._forward_pre_hooks]
    assert not hooked


def test_linears_that_read_one_tensor_share_their_moments() -> None:
    model = tiny_model("llama")
    found = layer_moments(model, LayerStream(model, calibration()))
    query, key, gate = (
        found[f"model.layers.0.{name}"] for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj")
    )
    assert query is key
    assert query is not gate


def test_spilled_states_are_gone_with_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SPILL_VARIABLE, str(tmp_path))
    with LayerStream(tiny_model("llama"), calibration()):
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


def test_a_pass_without_batches_is_an_error() -> None:
    with pytest.raises(QuantizationError, match="calibration batches"):
        LayerStream(tiny_model("llama"), Calibration())


def test_layers_that_do_not_read_the_layer_before_are_refused() -> None:
    model = tiny_model("llama")
    layer = model.module.get_submodule(model.layout.layers[1])
    layer.register_forward_pre_hook(lambda module, given: (given[0] * 2, *given[1:]))
    with pytest.raises(QuantizationError, match="cannot run alone"):
        LayerStream(model, calibration())
    assert "forward" not in vars(layer)
