"""A rotated float model is the same function; outlier channels are gone; gates and arms go along."""

import copy
import dataclasses

import pytest
import torch
from torch import Tensor

from quant_bench import registry
from quant_bench.errors import NotApplicable
from quant_bench.mechanisms import undecayed
from quant_bench.model import LanguageModel
from quant_bench.models import attach
from quant_bench.numerics.hadamard import transform
from quant_bench.numerics.spread import weight_incoherence
from quant_bench.quantization.linears import weight_of
from quant_bench.quantization.rotation import Rotation, rotate
from quant_bench.quantization.sequential import GptqRule, gptq_encode
from quant_bench.quantizer import Calibration
from quant_bench.testing import check_quantizer, tiny_calibration, tiny_ids, tiny_model
from quant_bench.tiny import CONFIGS

FAMILIES = tuple(CONFIGS)
ARMS = (
    *("combo2", "projection_gate", "renorm", "renorm(gate=projection)", "norm_gate", "sink_logit", "output_gate"),
    *("output_gate(kind=headwise)", "gated", "gated(kind=mlp)", "gated(kind=all_features)", "sink_token", "softpick"),
    *("clipped_softmax", "sink_logit+output_gate"),
)


def logits(model: LanguageModel) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.module(input_ids=tiny_ids(), use_cache=False).logits
    return out


def wide(family: str, arm: str = "softmax", **overrides: object) -> LanguageModel:
    """A random float64 model whose arm's parameters are random too."""
    model = tiny_model(family, **overrides)
    model.module.double()
    model = attach(model, arm)
    generator = torch.Generator().manual_seed(5)
    names = undecayed(model.module)
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if name in names or "output_gate" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return model


def assert_unchanged(model: LanguageModel, rotation: Rotation) -> tuple[LanguageModel, tuple[str, ...]]:
    before = logits(model)
    rotated, notes = rotate(model, rotation)
    after = logits(rotated)
    # transformers' norms and rotary embeddings compute in float32 whatever the model's dtype
    assert float((after - before).abs().max()) < 1e-5 * float(before.abs().max())
    return rotated, notes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", ["residual", "heads", "down", "keys", "all"])
def test_each_rotation_leaves_the_float_logits_of_every_layout(family: str, part: str) -> None:
    chosen = {name: part in (name, "all") for name in ("residual", "heads", "down", "keys")}
    assert_unchanged(wide(family), Rotation(**chosen))


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rotation_leaves_the_float_logits_of_every_arm(family: str, arm: str) -> None:
    assert_unchanged(wide(family, arm), Rotation(keys=True))


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_neox", "opt"])
@pytest.mark.parametrize("arm", ["combo2", "renorm(gate=projection)", "output_gate"])
def test_rotation_leaves_gated_arms_of_other_layouts(family: str, arm: str) -> None:
    assert_unchanged(wide(family, arm), Rotation())


def test_sequential_gpt_neox_is_unchanged_too() -> None:
    assert_unchanged(wide("gpt_neox", use_parallel_residual=False), Rotation())


def test_heads_whose_number_has_no_hadamard_matrix_are_mixed_with_their_features() -> None:
    rotated, notes = assert_unchanged(
        wide("llama", num_attention_heads=3, num_key_value_heads=1, head_dim=16), Rotation()
    )
    assert rotated.module.get_submodule("model.layers.0.self_attn.o_proj").size == 48
    assert any("all features" in note for note in notes)


def test_elementwise_output_gate_keeps_value_heads_unrotated_and_says_so() -> None:
    model = wide("llama", "output_gate")
    value = model.module.get_submodule("model.layers.0.self_attn.v_proj").weight.detach().clone()
    rotated, notes = rotate(model, Rotation(residual=False))
    assert torch.equal(rotated.module.get_submodule("model.layers.0.self_attn.v_proj").weight, value)
    assert any("does not commute" in note for note in notes)
    _, notes = rotate(wide("llama", "output_gate(kind=headwise)"), Rotation())
    assert any(note.startswith("value heads rotated") for note in notes)


def test_tied_head_is_untied_and_coverage_says_so() -> None:
    model = registry.build("quantizers", "quarot").quantize(tiny_model("llama"), Calibration())
    embedding = model.module.get_submodule("model.embed_tokens").weight
    assert embedding.data_ptr() != model.head.weight.data_ptr()
    assert model.coverage.tied == {}
    assert any("untied from model.embed_tokens" in note for note in model.coverage.notes)
    untied = registry.build("quantizers", "quarot").quantize(tiny_model("qwen3"), Calibration())
    assert not any("untied" in note for note in untied.coverage.notes)


def test_post_norm_layers_are_not_applicable() -> None:
    with pytest.raises(NotApplicable, match="norms before the blocks"):
        rotate(tiny_model("opt", do_layer_norm_before=False), Rotation())


def with_outlier_channel() -> LanguageModel:
    """Llama whose residual and MLP have a channel 50 times the others, as trained models have."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.module.get_submodule("model.embed_tokens").weight[:, 5] *= 50.0
        for layer in model.layout.layers:
            for name in ("input_layernorm", "post_attention_layernorm"):
                model.module.get_submodule(f"{layer}.{name}").weight[7] *= 20.0
            model.module.get_submodule(f"{layer}.mlp.up_proj").weight[3] *= 50.0
    return model


def incoherence(model: LanguageModel) -> dict[str, float]:
    """max |x| over root mean square of the inputs of every product."""
    found: dict[str, float] = {}
    hooks = []
    for site in model.layout.linears:

        def keep(module: torch.nn.Module, arguments: tuple[Tensor, ...], path: str = site.path) -> None:
            tokens = arguments[0].flatten(0, -2)
            ratios = tokens.abs().amax(-1) / tokens.square().mean(-1).sqrt()
            found[path.removesuffix(".projection")] = float(ratios.mean())

        hooks.append(model.module.get_submodule(site.path).register_forward_pre_hook(keep))
    logits(model)
    for hook in hooks:
        hook.remove()
    return found


def test_incoherence_of_inputs_with_outlier_channels_drops() -> None:
    before = incoherence(with_outlier_channel())
    after = incoherence(rotate(with_outlier_channel(), Rotation())[0])
    assert before.keys() == after.keys()
    for path, value in before.items():
        if path.endswith(("q_proj", "gate_proj", "down_proj")):
            # a single channel carries nearly everything: sqrt(width) is 6.9 and 8.9
            assert value > 4.5, path
            assert after[path] < 3.5, path


def with_hidden_outliers() -> LanguageModel:
    """The tiny Llama's own function, with a norm gain and an MLP feature of 20 times the size that the weights undo."""
    model = tiny_model("llama")
    with torch.no_grad():
        for layer in model.layout.layers:
            block = model.module.get_submodule(layer)
            block.input_layernorm.weight[7] *= 20.0
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(block.self_attn, name).weight[:, 7] /= 20.0
            block.mlp.up_proj.weight[3] *= 20.0
            block.mlp.down_proj.weight[:, 3] /= 20.0
    return model


def test_rotation_helps_four_bits_where_there_are_outlier_channels() -> None:
    reference = logits(with_hidden_outliers())
    errors = []
    for text in ("w4a4", "quarot:w4a4"):
        model = registry.build("quantizers", text).quantize(with_hidden_outliers(), Calibration())
        errors.append(float((logits(model) - reference).norm()))
    assert errors[1] < 0.6 * errors[0]


def test_weights_become_incoherent() -> None:
    def worst(model: LanguageModel) -> float:
        weight = model.module.get_submodule("model.layers.0.self_attn.q_proj").weight.detach()
        return weight_incoherence(float(weight.abs().max()), float(weight.square().mean().sqrt()))

    model = with_outlier_channel()
    folded = copy.deepcopy(model)
    with torch.no_grad():
        gain = folded.module.get_submodule("model.layers.0.input_layernorm").weight
        folded.module.get_submodule("model.layers.0.self_attn.q_proj").weight.mul_(gain)
    assert worst(rotate(model, Rotation())[0]) < 0.5 * worst(folded)


@pytest.mark.parametrize(
    "text",
    [
        *("quarot:w4a4", "quarot:w4a4g16-kv4", "quarot:w4a16", "quarot(residual=False)"),
        "quarot:w4a4-kv4(weights=gptq,calibration_batches=1)",
    ],
)
def test_quarot_keeps_the_contract(text: str) -> None:
    check_quantizer(registry.build("quantizers", text), families=("llama", "gpt2"))


def test_logits_are_unchanged_to_a_ten_thousandth_before_quantization_in_float32() -> None:
    quantizer = dataclasses.replace(registry.build("quantizers", "quarot"), weight_bits=16, activation_bits=16)
    for family in FAMILIES:
        reference = logits(tiny_model(family))
        rotated = logits(quantizer.quantize(tiny_model(family), Calibration()))
        assert float((rotated - reference).abs().max()) < 1e-4, family


@pytest.mark.parametrize("arm", ["combo2", "output_gate", "sink_token", "gated"])
def test_executions_are_equal_on_arms(arm: str) -> None:
    found = [
        logits(
            registry.build("quantizers", f"quarot:w4a4{end}").quantize(attach(tiny_model("llama"), arm), Calibration())
        )
        for end in ("", "-integer")
    ]
    assert torch.equal(*found)


def test_rotation_helps_a_four_bit_cache_where_keys_have_an_outlier_channel() -> None:
    def with_large_key_channel() -> LanguageModel:
        model = tiny_model("opt")
        with torch.no_grad():
            for path in model.layout.attentions:
                module = model.module.get_submodule(path)
                module.k_proj.weight[5] *= 20.0
                module.q_proj.weight[5] /= 20.0
                module.q_proj.bias[5] /= 20.0
        return model

    reference = logits(with_large_key_channel())
    errors = []
    for keys in (False, True):
        settings = f"quarot:w16a16-kv4(residual=False,heads=False,down=False,keys={keys})"
        model = registry.build("quantizers", settings).quantize(with_large_key_channel(), Calibration())
        errors.append(float((logits(model) - reference).norm()))
    assert errors[1] < 0.7 * errors[0]


def test_gptq_after_rotation_reads_transformed_inputs() -> None:
    quantizer = registry.build("quantizers", "quarot:w4a4(weights=gptq,calibration_batches=1)")
    calibration = tiny_calibration(quantizer)
    quantized = quantizer.quantize(tiny_model("llama"), calibration)
    rotated, _ = rotate(tiny_model("llama"), Rotation())
    seen: list[Tensor] = []
    down = rotated.module.get_submodule("model.layers.0.mlp.down_proj")
    # the inputs of a whole layer are looked at once, with its weights in float
    down.register_forward_pre_hook(lambda module, given: seen.append(given[0].flatten(0, 1)))
    with torch.no_grad():
        for ids in calibration.batches:
            rotated.body(input_ids=ids, use_cache=False)
    x = transform(torch.cat(seen))
    expected = gptq_encode(weight_of(down.projection), x.T @ x / len(x), quantizer, GptqRule())
    found = quantized.module.get_submodule("model.layers.0.mlp.down_proj.projection").weight
    assert float((found.unpacked() == expected.unpacked()).float().mean()) > 0.99


@pytest.mark.parametrize("family", FAMILIES)
def test_gptq_on_the_rotated_model_is_nearer_to_float_than_rounding_to_nearest(family: str) -> None:
    quantizer = registry.build("quantizers", "quarot:w4a16(weights=gptq)")
    calibration = tiny_calibration(quantizer)

    def outputs(model: LanguageModel) -> Tensor:
        with torch.no_grad():
            return model.module(input_ids=torch.cat(list(calibration.batches)), use_cache=False).logits

    reference = outputs(tiny_model(family))
    errors = []
    for weights in ("rtn", "gptq"):
        changed = dataclasses.replace(quantizer, weights=weights)
        errors.append(float((outputs(changed.quantize(tiny_model(family), calibration)) - reference).norm()))
    assert errors[1] < 0.95 * errors[0]


@pytest.mark.parametrize("arm", ["combo2", "output_gate"])
def test_gptq_on_the_rotated_model_takes_arms(arm: str) -> None:
    quantizer = registry.build("quantizers", "quarot:w4a4(weights=gptq,calibration_batches=1)")
    model = quantizer.quantize(attach(tiny_model("llama"), arm), tiny_calibration(quantizer))
    assert model.coverage.mac_share > 0.8
