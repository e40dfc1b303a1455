"""SmoothQuant and AWQ: equations, float equivalence before rounding, and what they are worth on outliers."""

import dataclasses

import pytest
import torch

from quant_bench import registry
from quant_bench.errors import QuantizationError, SpecError
from quant_bench.lowbit.codes import quantize_weight
from quant_bench.model import LanguageModel
from quant_bench.quantization.awq import CLIPS, RATIOS, best_scale, clipped_codes
from quant_bench.quantization.folding import folds_of
from quant_bench.quantization.layerwise import LayerStream
from quant_bench.quantization.linears import weight_of
from quant_bench.quantization.moments import layer_moments
from quant_bench.quantization.smoothing import best_alpha, product_error, smooth, smoothing_scale
from quant_bench.quantizer import Calibration
from quant_bench.testing import check_quantizer, tiny_calibration, tiny_ids, tiny_model

FAMILIES = ("llama", "qwen3", "gemma3", "gpt2", "gpt_neox", "opt")
RECIPES = ("smoothquant", "awq")


def logits(model: LanguageModel) -> torch.Tensor:
    with torch.no_grad():
        return model.module(input_ids=tiny_ids(), use_cache=False).logits


def with_outliers(family: str = "llama") -> LanguageModel:
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


def squared_error(text: str, model: LanguageModel, float_logits: torch.Tensor) -> float:
    quantizer = registry.build("quantizers", text)
    return float((logits(quantizer.quantize(model, tiny_calibration(quantizer))) - float_logits).square().sum())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", ["smoothquant", "smoothquant(search=True)", "smoothquant(places=norms)"])
def test_smoothing_leaves_the_float_model_as_it_is(recipe: str, family: str) -> None:
    quantizer, model = registry.build("quantizers", recipe), tiny_model(family)
    before = logits(model)
    alpha = None if quantizer.search else quantizer.alpha
    used = smooth(model, quantizer, tiny_calibration(quantizer), alpha, quantizer.places == "norms")
    assert len(used) >= 4
    after = logits(model)
    assert not torch.equal(after, before)
    assert float((after - before).abs().max()) < 1e-5 * float(before.abs().max())


@pytest.mark.parametrize("arm", ["combo2", "output_gate", "gated", "norm_gate"])
def test_smoothing_leaves_arms_as_they_are(arm: str) -> None:
    torch.manual_seed(0)
    model = registry.build("arms", arm).attach(tiny_model("llama"))
    quantizer = registry.build("quantizers", "smoothquant")
    before = logits(model)
    smooth(model, quantizer, tiny_calibration(quantizer), 0.7, False)
    assert float((logits(model) - before).abs().max()) < 1e-5 * float(before.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_of_awq_leave_the_float_model_as_it_is(family: str) -> None:
    quantizer, model = registry.build("quantizers", "awq:w3a16"), tiny_model(family)
    before = logits(model)
    codes = quantizer_codes(quantizer, model)
    after = logits(model)
    assert not torch.equal(after, before)
    assert float((after - before).abs().max()) < 1e-5 * float(before.abs().max())
    assert set(codes) == {site.path for site in model.layout.linears}


def quantizer_codes(quantizer: object, model: LanguageModel) -> dict[str, object]:
    from quant_bench.quantization.awq import awq_weights

    encode = awq_weights(model, quantizer, tiny_calibration(quantizer), scales=True, clip=True)  # type: ignore[arg-type]
    return {site.path: encode(site, torch.nn.Identity()) for site in model.layout.linears}


def test_smoothing_scale_is_the_published_one() -> None:
    model, calibration = tiny_model("llama"), tiny_calibration(registry.build("quantizers", "smoothquant"))
    with LayerStream(model, calibration) as stream:
        moments = layer_moments(model, stream)
    norm, *_ = folds_of(model, 0)
    layer = model.module.model.layers[0]
    seen: list[torch.Tensor] = []
    layer.self_attn.q_proj.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    with torch.no_grad():
        model.body(input_ids=torch.cat(list(calibration.batches)), use_cache=False)
    largest = seen[0].abs().amax((0, 1))
    weights = torch.cat([getattr(layer.self_attn, f"{name}_proj").weight for name in "qkv"]).abs().amax(0)
    scale = smoothing_scale(model, norm, moments[norm.consumers[0].path], 0.3)
    torch.testing.assert_close(scale, largest**0.3 / weights.detach() ** 0.7)


def test_heads_that_share_a_value_share_its_scale() -> None:
    model = tiny_model("llama")
    place = next(place for place in folds_of(model, 0) if place.kind == "value")
    columns = torch.arange(48.0)
    gathered = place.gather(columns)
    # four query heads of 12 on two value heads
    assert torch.equal(gathered, torch.cat([torch.arange(12.0, 24.0), torch.arange(36.0, 48.0)]))
    assert torch.equal(place.spread(gathered), torch.cat([gathered[:12], gathered[:12], gathered[12:], gathered[12:]]))


def test_searched_strength_has_the_least_error() -> None:
    model, scheme = with_outliers(), registry.build("quantizers", "smoothquant:w4a4")
    with LayerStream(model, tiny_calibration(scheme)) as stream:
        moments = layer_moments(model, stream, rows=64)
    for place in folds_of(model, 0):
        inputs = moments[place.consumers[0].path]

        def error(alpha: float, place=place, inputs=inputs) -> float:  # type: ignore[no-untyped-def]
            scale = place.spread(smoothing_scale(model, place, inputs, alpha))
            weights = [weight_of(model.module.get_submodule(site.path)) for site in place.consumers]
            return sum(product_error(weight, inputs.rows, scale, scheme) for weight in weights)

        errors = [error(alpha / 10) for alpha in range(11)]
        assert best_alpha(model, place, inputs, scheme) == errors.index(min(errors)) / 10
        assert len(set(errors)) > 5


def test_error_of_a_product_is_that_of_its_rounded_operands() -> None:
    scheme = registry.build("quantizers", "smoothquant(weight_bits=4,activation_bits=8)")
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(10, 16, generator=generator), torch.randn(6, 16, generator=generator)
    scale = torch.rand(16, generator=generator) + 0.5
    x, w = rows / scale, weight * scale
    a, s = x.abs().amax(1, keepdim=True) / 127, w.abs().amax(1, keepdim=True) / 7
    expected = ((x / a).round() * a) @ ((w / s).round() * s).T - rows @ weight.T
    assert product_error(weight, rows, scale, scheme) == pytest.approx(float(expected.square().sum()), rel=1e-3)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("recipe", ["smoothquant", "smoothquant(search=True)"])
def test_smoothing_repairs_outliers_behind_norms(recipe: str, family: str) -> None:
    float_logits = logits(with_outliers(family))
    spec = recipe.partition("(")
    settings = "(weight_bits=4,activation_bits=4,activation_granularity=tensor" + (",search=True)" if spec[1] else ")")
    smoothed = squared_error(f"smoothquant{settings}", with_outliers(family), float_logits)
    rounded = squared_error(
        "rtn(weight_bits=4,activation_bits=4,activation_granularity=tensor)", with_outliers(family), float_logits
    )
    assert smoothed < 0.6 * rounded


# the static preset but for its clip search, which costs minutes
STATIC = {
    "weight_granularity": "tensor",
    "activation_granularity": "tensor",
    "activation_symmetric": False,
    "activation_static": True,
    "activation_range": "running_minmax",
    "percentile": 99.999,
    "calibration_batches": 1,
}
FIRST = 3


def with_massive(where: str) -> LanguageModel:
    """A model of which one channel is 100 or more times the others, in one place."""
    model = tiny_model("llama")
    with torch.no_grad():
        if where == "residual sum":
            # of one token, as in trained models: the first
            model.module.get_submodule("model.embed_tokens").weight[FIRST, 5] = 500.0
        for layer in range(2):
            for place in folds_of(model, layer):
                if (where, place.kind) == ("norm", "norm"):
                    model.module.get_submodule(place.producer).weight[7] *= 100
                elif (where, place.kind) == ("down", "up"):
                    weight_of(model.module.get_submodule(place.producer))[7] *= 100
                else:
                    continue
                for site in place.consumers:
                    weight_of(model.module.get_submodule(site.path))[:, 7] /= 100
    return model


def static_error(recipe: str, where: str, scope: str) -> float:
    """Squared error of the logits behind the first token, relative to their variance."""
    ids = [tiny_ids(8, seed=seed) for seed in (2, 5)]
    for batch in ids:
        batch[:, 0] = FIRST
    quantizer = dataclasses.replace(registry.build("quantizers", recipe), scope=scope, **STATIC)
    models = (with_massive(where), quantizer.quantize(with_massive(where), Calibration((ids[0],), sha256="1" * 64)))
    with torch.no_grad():
        reference, found = (model.module(input_ids=ids[1], use_cache=False).logits[:, 1:] for model in models)
    return float((found - reference).square().mean() / reference.var())


@pytest.mark.parametrize(("where", "places"), [("norm", "norms"), ("norm", "all"), ("down", "all")])
@pytest.mark.parametrize("scope", ["full", "linear"])
def test_smoothing_repairs_static_ranges_of_what_it_can_scale(where: str, places: str, scope: str) -> None:
    assert static_error("rtn", where, scope) > 0.1
    assert static_error(f"smoothquant(places={places})", where, scope) < 0.02


@pytest.mark.parametrize("recipe", ["smoothquant", "smoothquant(places=norms)", "smoothquant(search=True)"])
def test_smoothing_cannot_repair_residual_sums_which_scope_full_rounds(recipe: str) -> None:
    rounded = static_error("rtn", "residual sum", "full")
    assert rounded > 0.3
    assert static_error(recipe, "residual sum", "full") > 0.7 * rounded
    # products read what a norm made of the sums: where sums are in float, nothing needs repair
    assert static_error("rtn", "residual sum", "linear") < 0.01
    assert static_error(recipe, "residual sum", "linear") < 0.01


def test_scale_of_awq_is_the_best_of_its_candidates() -> None:
    model, scheme = with_outliers(), registry.build("quantizers", "awq:w3a16g16")
    with LayerStream(model, tiny_calibration(scheme)) as stream:
        moments = layer_moments(model, stream, second=True, rows=10_000)
    place = next(iter(folds_of(model, 0)))
    inputs = moments[place.consumers[0].path]

    def error(scale: torch.Tensor) -> float:
        total = 0.0
        for site in place.consumers:
            weight = weight_of(model.module.get_submodule(site.path))
            rounded = quantize_weight(weight * scale, bits=3, granularity="group", group_size=16).dequantize() / scale
            total += float((inputs.rows @ (rounded - weight).T).square().sum())
        return total

    candidates = [inputs.mean**ratio for ratio in RATIOS]
    candidates = [scale / (scale.max() * scale.min()).sqrt() for scale in candidates]
    errors = [error(scale) for scale in candidates]
    torch.testing.assert_close(best_scale(model, place, inputs, scheme), candidates[errors.index(min(errors))])
    assert min(errors) < errors[0]


@pytest.mark.parametrize("symmetric", [True, False])
def test_clips_of_awq_are_the_best_of_their_candidates(symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(200, 20, generator=generator), torch.randn(5, 20, generator=generator) ** 3
    scheme = registry.build("quantizers", f"awq:w3a16g8(weight_symmetric={symmetric})")
    found = clipped_codes(weight, x.T @ x / 200, scheme)
    clipped = 0
    for row in range(5):
        for index, start in enumerate((0, 8, 16)):
            part, inputs = weight[row, start : start + 8], x[:, start : start + 8]
            errors = []
            for ratio in CLIPS:
                low, high = min(float(part.min()), 0.0) * ratio, max(float(part.max()), 0.0) * ratio
                scale = max(-low, high) / 3 if symmetric else (high - low) / 7
                zero = 0 if symmetric else round(-low / scale)
                codes = (part / scale).round() + zero
                codes = codes.clamp(-3, 3) if symmetric else codes.clamp(0, 7)
                errors.append((float((inputs @ ((codes - zero) * scale - part)).square().sum()), scale))
            assert float(found.scale[row, index]) == pytest.approx(min(errors)[1], rel=1e-4)
            clipped += min(errors)[1] != errors[0][1]
    assert clipped > 3


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_awq_is_nearer_to_float_than_rounding_to_nearest(family: str) -> None:
    float_logits = logits(with_outliers(family))
    errors = [squared_error(f"{recipe}:w3a16", with_outliers(family), float_logits) for recipe in ("awq", "rtn")]
    assert errors[0] < 0.9 * errors[1]


def test_awq_without_its_parts_is_rounding_to_nearest() -> None:
    quantizer = registry.build("quantizers", "awq:w4a16(scales=False,clip=False)")
    rtn = registry.build("quantizers", "w4a16")
    found = logits(quantizer.quantize(tiny_model("llama"), tiny_calibration(quantizer)))
    assert torch.equal(found, logits(rtn.quantize(tiny_model("llama"), Calibration())))


@pytest.mark.parametrize(
    "text",
    [
        *("smoothquant:w8a8-static(calibration_batches=1)", "smoothquant(places=norms,search=True)"),
        *("awq:w4a16g16(calibration_batches=1)", "awq(clip=False,weight_symmetric=False)"),
    ],
)
def test_recipe_keeps_the_contract(text: str) -> None:
    quantizer = registry.build("quantizers", text)
    # the clip search of the static preset costs minutes
    if getattr(quantizer, "weight_range", "") == "mse":
        quantizer = dataclasses.replace(quantizer, weight_range="minmax")
    check_quantizer(quantizer, families=("gpt2",))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("arm", ["combo2", "output_gate", "sink_token"])
def test_recipe_takes_arms(recipe: str, arm: str) -> None:
    torch.manual_seed(0)
    model = registry.build("arms", arm).attach(tiny_model("llama"))
    quantizer = registry.build("quantizers", f"{recipe}:w4a4")
    assert quantizer.quantize(model, tiny_calibration(quantizer)).coverage.mac_share > 0.8


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_without_calibration_is_an_error(recipe: str) -> None:
    with pytest.raises(QuantizationError, match="calibration batches"):
        registry.build("quantizers", recipe).quantize(tiny_model("llama"), Calibration())


def test_strength_out_of_range_is_a_usage_error() -> None:
    with pytest.raises(SpecError, match="alpha"):
        registry.build("quantizers", "smoothquant(alpha=1.5)")
