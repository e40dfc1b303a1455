"""OmniQuant: where it starts, what it learns, and that the float model stays the same function."""

import dataclasses

import pytest
import torch
from torch import Tensor

from quant_bench import registry
from quant_bench.errors import QuantizationError, SpecError
from quant_bench.lowbit.activation import ActivationRule, fake_quantize
from quant_bench.lowbit.codes import quantize_weight
from quant_bench.model import LanguageModel
from quant_bench.models import attach
from quant_bench.numerics.integers import Grid
from quant_bench.quantization.folding import fold, folds_of
from quant_bench.quantization.linears import weight_of
from quant_bench.quantization.omniquant import Learned, OmniquantRule, omniquant
from quant_bench.quantization.straight import rounded_activation, straight_through
from quant_bench.quantizer import Calibration
from quant_bench.testing import check_quantizer, tiny_calibration, tiny_ids, tiny_model
from quant_bench.tiny import CONFIGS

FAMILIES = tuple(CONFIGS)
FEW = "epochs=2,calibration_batches=1"
FAST = OmniquantRule(epochs=6, clip_rate=0.05, transform_rate=0.03)


def logits(model: LanguageModel) -> Tensor:
    with torch.no_grad():
        return model.module(input_ids=tiny_ids(), use_cache=False).logits


def quantized(text: str, model: LanguageModel) -> LanguageModel:
    quantizer = registry.build("quantizers", text)
    return quantizer.quantize(model, tiny_calibration(quantizer))


def learned(text: str, model: LanguageModel, rule: OmniquantRule) -> Learned:
    quantizer = registry.build("quantizers", text)
    return omniquant(model, quantizer, tiny_calibration(quantizer), rule)


def with_outliers(family: str) -> LanguageModel:
    """A model whose norms scale three channels up thirtyfold, in front of weights that scale them down again."""
    model = tiny_model(family)
    with torch.no_grad():
        for layer in range(2):
            for place in folds_of(model, layer):
                if place.kind == "norm":
                    channels = torch.tensor([3, 17, 30])
                    model.module.get_submodule(place.producer).weight[channels] *= 30
                    for site in place.consumers:
                        weight_of(model.module.get_submodule(site.path))[:, channels] /= 30
    return model


def test_with_nothing_to_learn_it_is_rounding_to_nearest() -> None:
    found = quantized("omniquant:w4a4(clip=False,transform=False,calibration_batches=1)", tiny_model("llama"))
    assert torch.equal(logits(found), logits(quantized("w4a4", tiny_model("llama"))))


@pytest.mark.parametrize("family", FAMILIES)
def test_before_the_first_epoch_factors_are_those_of_smoothquant(family: str) -> None:
    text = "omniquant:w4a4(clip=False,epochs=0,alpha=0.6,calibration_batches=1)"
    smooth = "smoothquant:w4a4(alpha=0.6,calibration_batches=1)"
    assert torch.equal(logits(quantized(text, tiny_model(family))), logits(quantized(smooth, tiny_model(family))))


@pytest.mark.parametrize("symmetric", [True, False])
def test_before_the_first_epoch_ranges_are_clipped_as_published(symmetric: bool) -> None:
    settings = f"transform=False,epochs=0,calibration_batches=1,weight_symmetric={symmetric}"
    model, before = tiny_model("llama"), tiny_model("llama")
    rule = OmniquantRule(transform=False, epochs=0)
    codes = learned(f"omniquant:w4a4({settings})", model, rule).codes
    for site in before.layout.linears:
        weight = weight_of(before.module.get_submodule(site.path)).double()
        low, high = (
            ends[:, None] / (1 + torch.tensor(-4.0).exp().double()) for ends in (weight.amin(1), weight.amax(1))
        )
        if symmetric:
            scale = torch.maximum(-low, high) / 7
            expected = (weight / scale).round().clamp(-7, 7) * scale
        else:
            scale = (high - low) / 15
            zero = (-low / scale).round()
            expected = (((weight / scale).round() + zero).clamp(0, 15) - zero) * scale
        error = (codes[site.path].dequantize() - expected).abs()
        # a tie may fall to the other side in float32
        assert float((error > 1e-5).float().mean()) < 0.001, site.path


@pytest.mark.parametrize("family", FAMILIES)
def test_learned_factors_change_no_float_model(family: str) -> None:
    rule = OmniquantRule(epochs=2, transform_rate=0.05)
    found = learned("omniquant:w4a4(calibration_batches=1)", tiny_model(family), rule)
    model = tiny_model(family)
    before = logits(model)
    start = {place.producer for place, _ in found.factors}
    assert len(start) == len(found.factors) >= 6
    for place, scale in found.factors:
        fold(model, place, scale)
    after = logits(model)
    assert not torch.equal(after, before)
    assert float((after - before).abs().max()) < 1e-4


@pytest.mark.parametrize(
    "arm", ["combo2", "output_gate", "gated", "renorm", "sink_token", "clipped_softmax", "softpick"]
)
def test_learned_factors_change_no_arm(arm: str) -> None:
    def build() -> LanguageModel:
        torch.manual_seed(0)
        return attach(tiny_model("llama"), arm)

    found = learned("omniquant:w4a4(calibration_batches=1)", build(), OmniquantRule(epochs=1, transform_rate=0.05))
    model = build()
    before = logits(model)
    for place, scale in found.factors:
        fold(model, place, scale)
    assert float((logits(model) - before).abs().max()) < 1e-4
    assert bool(logits(quantized(f"omniquant:w4a4({FEW})", build())).isfinite().all())


def test_places_without_an_exact_transformation_are_named() -> None:
    def notes(family: str, arm: str = "softmax") -> str:
        return "; ".join(quantized(f"omniquant:w4a4({FEW})", attach(tiny_model(family), arm)).coverage.notes)

    assert "no factors in front of down" in notes("gpt2")
    assert "no factors in front of output" in notes("llama", "norm_gate")
    assert "no factors in front" not in notes("llama")


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_outputs_come_nearer_to_float_than_by_rounding_to_nearest(family: str) -> None:
    quantizer = registry.build("quantizers", "omniquant:w4a4(epochs=3,calibration_batches=1,transform_rate=0.02)")
    calibration = tiny_calibration(quantizer)

    def outputs(model: LanguageModel) -> Tensor:
        with torch.no_grad():
            layer = model.module.get_submodule(model.layout.layers[0])
            seen: list[Tensor] = []
            handle = layer.register_forward_hook(
                lambda module, given, out: seen.append(out[0] if isinstance(out, tuple) else out)
            )
            model.body(input_ids=torch.cat(list(calibration.batches)), use_cache=False)
            handle.remove()
        return seen[0]

    reference = outputs(with_outliers(family))
    error = (outputs(quantizer.quantize(with_outliers(family), calibration)) - reference).square().sum()
    nearest = (outputs(quantized("w4a4", with_outliers(family))) - reference).square().sum()
    assert float(error) < 0.8 * float(nearest)


def test_the_error_of_every_layer_falls_while_it_is_learned() -> None:
    found = learned("omniquant:w4a4(calibration_batches=1)", with_outliers("llama"), FAST)
    assert len(found.losses) == 2
    for first, last in found.losses:
        assert last < 0.98 * first


def test_what_learning_makes_worse_is_not_kept() -> None:
    far = quantized(
        "omniquant:w4a4(epochs=2,calibration_batches=1,clip_rate=1.0,transform_rate=1.0)", tiny_model("llama")
    )
    start = quantized("omniquant:w4a4(epochs=0,calibration_batches=1)", tiny_model("llama"))
    assert "1.000 of those before learning; 2 layers came no nearer and keep their start" in far.coverage.notes[-1]
    assert torch.equal(logits(far), logits(start))


def test_each_part_learns_by_itself() -> None:
    for rule in (dataclasses.replace(FAST, clip=False), dataclasses.replace(FAST, transform=False)):
        found = learned("omniquant:w3a16(calibration_batches=1)", tiny_model("llama"), rule)
        assert bool(found.factors) == rule.transform
        assert all(last < first for first, last in found.losses)


def test_layers_read_what_rounded_layers_give() -> None:
    """The second layer's learning depends on how the first was rounded."""
    few = OmniquantRule(transform=False, epochs=1)
    text = "omniquant:w4a4(calibration_batches=1)"
    other = tiny_model("llama")
    first = {site.path for site in other.layout.linears if site.layer == 0}
    plain = learned(text, tiny_model("llama"), few).losses[1][0]
    coarse = registry.build("quantizers", text)
    with torch.no_grad():
        for path in first:
            linear = other.module.get_submodule(path)
            linear.weight.copy_(quantize_weight(linear.weight, bits=2).dequantize())
    assert omniquant(other, coarse, tiny_calibration(coarse), few).losses[1][0] != plain


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["token", "group", "tensor"])
def test_inputs_are_rounded_as_the_quantized_model_rounds_them(granularity: str, symmetric: bool) -> None:
    size = ",group_size=20" if granularity == "group" else ""
    scheme = registry.build(
        "quantizers",
        f"rtn(activation_bits=4,activation_granularity={granularity},activation_symmetric={symmetric}{size})",
    )
    x = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(0)) ** 3
    rule = ActivationRule(4, granularity, symmetric, 20)
    assert torch.equal(rounded_activation(x, scheme), fake_quantize(x, rule))


def test_gradients_pass_rounding_and_reach_ranges() -> None:
    values = torch.tensor([[0.9, -2.3, 4.2, 7.7]], requires_grad=True)
    high = torch.tensor([7.0], requires_grad=True)
    weights = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    out = straight_through(values, -high, high, Grid(4, True))
    assert torch.equal(out.detach(), torch.tensor([[1.0, -2.0, 4.0, 7.0]]))
    (out * weights).sum().backward()
    assert values.grad is not None
    assert high.grad is not None
    # the last value is clipped
    torch.testing.assert_close(values.grad, torch.tensor([[1.0, 2.0, 3.0, 0.0]]))
    # y = s round(x / s): dy/ds = round(x / s) - x / s inside, the end of the grid outside; s = high / 7
    slope = 1.0 * (1 - 0.9) + 2.0 * (-2 + 2.3) + 3.0 * (4 - 4.2) + 4.0 * 7
    torch.testing.assert_close(high.grad, torch.tensor([slope / 7]))


@pytest.mark.parametrize(
    "text",
    [
        f"omniquant:w4a4({FEW})",
        f"omniquant:w4a4g16-kv4({FEW},weight_symmetric=False,activation_symmetric=False)",
        f"omniquant:w4a16({FEW})",
    ],
)
def test_recipe_keeps_the_contract(text: str) -> None:
    check_quantizer(registry.build("quantizers", text), families=("gpt2",))


@pytest.mark.parametrize("arm", ["attnres", "attnres_oasis", "combo2"])
def test_executions_are_equal_on_routers_and_gates(arm: str) -> None:
    found = [
        logits(quantized(f"omniquant:w4a4{execution}({FEW})", attach(tiny_model("llama"), arm)))
        for execution in ("", "-integer")
    ]
    assert torch.equal(*found)


def test_static_scheme_with_full_scope_is_quantized() -> None:
    quantizer = registry.build("quantizers", f"omniquant:w8a8-static({FEW})")
    # the clip search of the static preset costs minutes
    quantizer = dataclasses.replace(quantizer, weight_range="minmax")
    model = quantizer.quantize(tiny_model("llama"), tiny_calibration(quantizer))
    assert model.coverage.mac_share > 0.8
    assert float((logits(model) - logits(tiny_model("llama"))).square().mean()) < 0.1


def test_recipe_without_calibration_is_an_error() -> None:
    with pytest.raises(QuantizationError, match="calibration batches"):
        registry.build("quantizers", "omniquant").quantize(tiny_model("llama"), Calibration())


@pytest.mark.parametrize("setting", ["epochs=-1", "alpha=1.5", "clip_rate=-1.0"])
def test_settings_out_of_range_are_usage_errors(setting: str) -> None:
    with pytest.raises(SpecError, match="must"):
        registry.build("quantizers", f"omniquant({setting})")
