"""Scope full, key/value rounding, saturation and awkward models, against plain references."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from quant_bench.attention import causal_mask, sdpa
from quant_bench.errors import NotApplicable, QuantizationError
from quant_bench.lowbit.activation import ActivationRule, fake_quantize
from quant_bench.lowbit.codes import quantize_weight
from quant_bench.lowbit.linear import QuantLinear
from quant_bench.mechanisms import tiles
from quant_bench.model import LanguageModel
from quant_bench.numerics.integers import Grid, scale_and_zero
from quant_bench.numerics.tails import Range
from quant_bench.quantization import attention, saturation_shares
from quant_bench.quantization.full import full_sites
from quant_bench.quantization.keyvalue import KeyValueRounding
from quant_bench.quantization.rounding import StaticRounding, round_input_, round_output
from quant_bench.quantizer import Calibration, SchemeQuantizer
from quant_bench.registry import build
from quant_bench.testing import tiny_calibration, tiny_ids, tiny_model

STATIC = "w8a8-static(calibration_batches=1)"
STATIC_LINEAR = "rtn(activation_granularity=tensor,activation_static=True,calibration_batches=1)"


def _quantized(text: str, model: LanguageModel) -> LanguageModel:
    quantizer = build("quantizers", text)
    return quantizer.quantize(model, tiny_calibration(quantizer))


def _logits(model: LanguageModel, ids: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return model.module(input_ids=tiny_ids() if ids is None else ids, use_cache=False).logits


def _operands(batch: int, heads: int, kv_heads: int, queries: int, keys: int, width: int = 12) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    return tuple(torch.randn(batch, head, count, width, generator=generator) for head, count in shapes)


def _plain(operands: tuple[Tensor, ...], mask: Tensor, scaling: float, roundings: tuple[StaticRounding, ...]) -> Tensor:
    """Whole matrices, one step a line."""
    query, key, value = operands
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = roundings[0](query @ key.transpose(-1, -2) * scaling)
    probabilities = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    return roundings[2](roundings[1](probabilities) @ value)


@pytest.fixture
def roundings() -> tuple[StaticRounding, ...]:
    grid = Grid(8, symmetric=False)
    return tuple(StaticRounding(Range(low, high), grid) for low, high in ((-3.0, 2.5), (0.0, 0.8), (-2.0, 2.0)))


@pytest.mark.parametrize("tile", [1, 60, 1 << 19])
@pytest.mark.parametrize("shape", [(2, 6, 3, 17, 17), (1, 4, 1, 1, 9), (3, 2, 2, 5, 11)])
def test_tiled_attention_equals_whole_matrices(
    shape: tuple[int, ...], tile: int, roundings: tuple[StaticRounding, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "TILE", tile)
    operands = _operands(*shape)
    core = attention.RoundedAttention(*roundings, arm=None)
    batch, heads, _, queries, keys = shape
    causal = causal_mask(queries, keys, None, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    masks = [None, causal, causal_mask(queries, keys, 4, torch.device("cpu"))]
    for size in ((batch, 1), (1, heads), (batch, heads)):
        masks.append(torch.rand(*size, queries, keys, generator=generator) < 0.6)
    # a query that may see nothing
    masks[-1][0, 0, 0] = False
    for mask in masks:
        got = core(torch.nn.Module(), *operands, mask=mask, scaling=0.4)
        expected = _plain(operands, causal if mask is None else mask, 0.4, roundings)
        # float32 sums in another order: a few values may fall on the other side of a rounding border
        step = float(roundings[2].scale)
        assert float((got - expected).abs().max()) <= 1.01 * step
        assert float(((got - expected).abs() > 1e-6).float().mean()) < 0.02
    assert not got[0, 0, 0].any()


def test_tiled_attention_without_roundings_equals_sdpa() -> None:
    query, key, value = _operands(2, 4, 2, 33, 33)
    same = lambda tensor: tensor  # noqa: E731
    got = tiles.tiled_attention(
        (query, key, value), None, 0.3, at_scores=same, mechanism=tiles.softmax, at_probabilities=same
    )
    expected = sdpa(torch.nn.Module(), query, key, value, mask=None, scaling=0.3)
    assert torch.allclose(got, expected, atol=1e-6)


def test_static_rounding_equals_the_activation_rule_bit_for_bit() -> None:
    x = torch.randn(50, 33, generator=torch.Generator().manual_seed(0)) * 4
    for bits, symmetric in ((8, False), (8, True), (4, False), (2, True)):
        span, grid = Range(-3.0, 7.5), Grid(bits, symmetric)
        scale, zero = scale_and_zero(torch.tensor(span.low), torch.tensor(span.high), grid)
        rule = ActivationRule(bits, "tensor", symmetric, scale=scale, zero_point=zero)
        rounding = StaticRounding(span, grid)
        assert torch.equal(rounding(x), fake_quantize(x, rule))
        # what is rounded stays: a norm's output and the input of the next linear have one grid
        assert torch.equal(rounding(rounding(x)), rounding(x))


def test_static_rounding_keeps_its_scale_under_a_change_of_dtype() -> None:
    rounding = StaticRounding(Range(-1.0, 3.0), Grid(8, symmetric=False))
    before = rounding.scale.clone()
    assert torch.equal(rounding.half().float().scale, before)
    x = torch.randn(7, 5).half()
    assert rounding(x).dtype == torch.float16


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_keys_twice_changes_nothing(bits: int, dtype: torch.dtype) -> None:
    key = (torch.randn(2, 3, 200, 64, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    key[0, 0, 0] = 0
    rounding = KeyValueRounding(bits)
    once, value = rounding(key, key * 2)
    again = rounding(once, value)
    assert torch.equal(once, again[0])
    assert torch.equal(value, again[1])
    assert not once[0, 0, 0].any()


def test_keys_are_rounded_per_token_and_head() -> None:
    key = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1e3])[:, None, None]
    got, _ = KeyValueRounding(4)(key, key)
    for head in range(2):
        for token in range(5):
            vector = key[0, head, token]
            scale = vector.abs().max() / 7
            assert torch.allclose(got[0, head, token], (vector / scale).round() * scale, rtol=1e-6)


def test_key_value_scheme_rounds_what_every_attention_sees() -> None:
    model = _quantized("rtn(weight_bits=16,activation_bits=16,kv_bits=4)", tiny_model("llama"))
    seen: list[Tensor] = []

    def core(module, query, key, value, *, mask, scaling):  # type: ignore[no-untyped-def]
        seen.extend((key, value))
        return sdpa(module, query, key, value, mask=mask, scaling=scaling)

    for path in model.layout.attentions:
        model.module.get_submodule(path).attention_core = core
    _logits(model)
    assert len(seen) == 4
    for states in seen:
        codes = states / (states.abs().amax(-1, keepdim=True) / 7)
        assert torch.allclose(codes, codes.round(), atol=1e-4)
    assert any("rounded to 4 bits per token and head" in note for note in model.coverage.notes)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "gpt_neox", "opt"])
def test_full_scope_rounds_every_named_tensor(family: str) -> None:
    model = _quantized(STATIC, tiny_model(family))
    sites, seen = full_sites(model), {}

    def record(path: str) -> Any:
        def hook(module: Any, arguments: Any, output: Any) -> None:
            seen[path] = output[0] if isinstance(output, tuple) else output

        return hook

    for path in sites.outputs:
        model.module.get_submodule(path).register_forward_hook(record(path))
    _logits(model)
    assert set(seen) == set(sites.outputs)
    for path, values in seen.items():
        rounding = model.module.get_submodule(path).get_submodule("output_rounding")[-1]
        codes = values / rounding.scale
        assert torch.allclose(codes, codes.round(), atol=1e-3), path
        assert values.unique().numel() <= 256, path


def test_residual_sum_is_rounded_for_the_norm_and_for_the_stream() -> None:
    model = _quantized(STATIC, tiny_model("llama"))
    layer = model.module.get_submodule("model.layers.0")
    seen: dict[str, Tensor] = {}
    layer.post_attention_layernorm.register_forward_pre_hook(lambda module, args: seen.update(sum=args[0]))
    layer.mlp.register_forward_hook(lambda module, args, out: seen.update(mlp=out))
    # before the layer's own rounding hook
    layer.register_forward_hook(lambda module, args, out: seen.update(out=out), prepend=True)
    _logits(model)
    codes = seen["sum"] / layer.post_attention_layernorm.input_rounding.scale
    assert torch.allclose(codes, codes.round(), atol=1e-3)
    assert torch.equal(seen["out"], seen["sum"] + seen["mlp"])


@pytest.mark.parametrize(
    ("family", "overrides", "sums"),
    [
        ("llama", {}, ["model.layers.0.post_attention_layernorm", "model.layers.1.post_attention_layernorm"]),
        ("gemma3", {}, ["model.layers.0.pre_feedforward_layernorm", "model.layers.1.pre_feedforward_layernorm"]),
        ("gpt2", {}, ["transformer.h.0", "transformer.h.0.ln_2", "transformer.h.1.ln_2"]),
        ("gpt_neox", {}, []),
        (
            "gpt_neox",
            {"use_parallel_residual": False},
            ["gpt_neox.layers.0.post_attention_layernorm", "gpt_neox.layers.1.post_attention_layernorm"],
        ),
        (
            "opt",
            {"do_layer_norm_before": False},
            [
                "model.decoder.layers.0",
                "model.decoder.layers.0.self_attn_layer_norm",
                "model.decoder.layers.0.final_layer_norm",
                "model.decoder.layers.1.self_attn_layer_norm",
                "model.decoder.layers.1.final_layer_norm",
            ],
        ),
    ],
)
def test_residual_sums_lie_where_the_family_adds(family: str, overrides: dict[str, Any], sums: list[str]) -> None:
    model = tiny_model(family, **overrides)
    assert list(full_sites(model).sums) == sums
    logits = _logits(_quantized(STATIC, model))
    assert bool(logits.isfinite().all())


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_embedding_rows_are_those_of_rounded_weights(family: str) -> None:
    model = tiny_model(family)
    path = model.layout.embeddings[0]
    embedding = model.module.get_submodule(path)
    weight = embedding.weight.detach().clone()
    codes = quantize_weight(weight, bits=8, granularity="tensor", symmetric=True, search="mse")
    model = _quantized(STATIC, model)
    ids = torch.arange(97)[None]
    with torch.no_grad():
        got = embedding.output_rounding[0](torch.nn.functional.embedding(ids, weight) * _factor(embedding))
    expected = torch.nn.functional.embedding(ids, codes.dequantize()) * _factor(embedding)
    assert torch.allclose(got, expected, atol=1e-6)
    assert torch.equal(embedding.weight, weight)
    assert "static" in model.coverage.quantized[path]


def _factor(embedding: Any) -> Any:
    return getattr(embedding, "embed_scale", torch.tensor(1.0))


def test_full_scope_says_that_attention_products_are_simulated() -> None:
    for text in (STATIC, "w8a8-static-integer(calibration_batches=1)"):
        notes = " ".join(_quantized(text, tiny_model("llama")).coverage.notes)
        assert "run in float32 on rounded operands in every execution" in notes
        assert "never integer" in notes


def test_full_scope_needs_the_probabilities_of_an_arm() -> None:
    model = tiny_model("llama")
    for path in model.layout.attentions:
        model.module.get_submodule(path).attention_core = sdpa_twin
    with pytest.raises(NotApplicable, match="has no method `probabilities`"):
        _quantized(STATIC, model)


def sdpa_twin(*arguments: Any, **options: Any) -> Tensor:
    return sdpa(*arguments, **options)


class OffByOne(torch.nn.Module):
    """Softmax with a one in the denominator, as an arm would bring it."""

    def probabilities(self, module: torch.nn.Module, scores: Tensor, heads: Tensor | None = None) -> Tensor:
        return torch.cat([scores, torch.zeros_like(scores[..., :1])], -1).softmax(-1)[..., :-1]

    def forward(self, module: torch.nn.Module, *operands: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        query, key, value = operands
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        scores = query @ key.transpose(-1, -2) * scaling
        mask = causal_mask(query.shape[2], key.shape[2], None, query.device) if mask is None else mask
        return self.probabilities(module, scores.masked_fill(~mask, -torch.inf)) @ value


def test_full_scope_keeps_the_mechanism_of_an_arm() -> None:
    def with_arm() -> LanguageModel:
        model = tiny_model("llama")
        for path in model.layout.attentions:
            model.module.get_submodule(path).attention_core = OffByOne()
        return model

    arm = _logits(with_arm())
    assert float((arm - _logits(tiny_model("llama"))).std() / arm.std()) > 0.15
    quantized = _quantized(STATIC, with_arm())
    assert float((_logits(quantized) - arm).std() / arm.std()) < 0.1


def _outlier_model() -> tuple[LanguageModel, Tensor]:
    """A model in which one token id, that calibration never draws (ids start at 3), has one 1000 times larger feature.

    The feature exists for that token alone: nothing else writes it, and the first norm enlarges it.
    """
    feature = 9
    model = tiny_model("llama", tie_word_embeddings=False)
    with torch.no_grad():
        embedding = model.module.get_submodule("model.embed_tokens").weight
        embedding[:, feature] = 0
        embedding[2, feature] = 1
        for site in model.layout.linears:
            if site.role in ("output", "down"):
                model.module.get_submodule(site.path).weight[feature] = 0
        model.module.get_submodule("model.layers.0.input_layernorm").weight[feature] = 1000
    ids = tiny_ids()
    ids[:, 5] = 2
    return model, ids


def test_static_ranges_report_an_outlier_that_calibration_never_saw() -> None:
    ids = _outlier_model()[1]
    query = "model.layers.0.self_attn.q_proj"
    one_value = 1 / (ids.shape[1] * 48)
    # with scope full the norm's own rounding meets the outlier first
    for text, path in ((STATIC, "model.layers.0.input_layernorm.output_rounding.0"), (STATIC_LINEAR, query)):
        static = _quantized(text, _outlier_model()[0])
        usual, outlier = saturation_shares(static, tiny_ids()), saturation_shares(static, ids)
        assert outlier[path] >= usual[path] + 0.9 * one_value
        assert max(usual.values()) < 0.01
        linear = static.module.get_submodule(query)
        assert isinstance(linear, QuantLinear)
        assert not linear.observe_saturation
    assert saturation_shares(_quantized("w8a8", _outlier_model()[0]), ids) == {}


def test_dynamic_token_ranges_leave_other_tokens_alone_where_tensor_ranges_do_not() -> None:
    def damage(text: str) -> float:
        ids = _outlier_model()[1]
        exact, got = (
            _logits(_outlier_model()[0], ids)[:, :5],
            _logits(_quantized(text, _outlier_model()[0]), ids)[:, :5],
        )
        return float((got - exact).std() / exact.std())

    assert damage("w8a8") < 0.1
    assert damage("rtn(activation_granularity=tensor)") > 3 * damage("w8a8")


@pytest.mark.parametrize("text", ["w8a8", "w4a4g128-integer", STATIC, "w4a4-kv4"])
@pytest.mark.parametrize(
    "overrides",
    [
        {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6},
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 6},
        {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 10},
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "attention_bias": True, "mlp_bias": True},
    ],
    ids=["grouped", "one_kv_head", "head_dim", "biases"],
)
def test_head_shapes_and_biases_change_nothing_but_rounding(text: str, overrides: dict[str, Any]) -> None:
    reference = _logits(tiny_model("llama", **overrides))
    model = _quantized(text, tiny_model("llama", **overrides))
    error = (_logits(model) - reference).std() / reference.std()
    assert 0 < float(error) < (0.1 if "8" in text[:4] else 0.8)
    assert all(site.path in model.coverage.quantized for site in model.layout.linears)


@pytest.mark.parametrize("text", ["w8a8", "w8a8-integer", "w4a4g128", "rtn(weight_symmetric=False)", STATIC])
def test_all_zero_channel_stays_zero(text: str) -> None:
    def with_zeros() -> LanguageModel:
        model = tiny_model("llama", mlp_bias=False)
        with torch.no_grad():
            model.module.get_submodule("model.layers.0.mlp.up_proj").weight[7] = 0
            model.module.get_submodule("model.layers.1.self_attn.v_proj").weight.zero_()
        return model

    model = _quantized(text, with_zeros())
    seen: list[Tensor] = []
    linear = model.module.get_submodule("model.layers.0.mlp.up_proj")
    linear.register_forward_hook(lambda module, arguments, output: seen.append(output))
    logits = _logits(model)
    assert not seen[0][..., 7].any()
    assert float((logits - _logits(with_zeros())).std() / logits.std()) < 0.8


def test_integer_execution_of_float_weights_is_not_applicable() -> None:
    with pytest.raises(NotApplicable, match="integer weights"):
        build("quantizers", "rtn(weight_bits=16,execution=integer)").quantize(tiny_model("llama"), Calibration())


def test_static_ranges_are_the_same_for_every_execution() -> None:
    quantizer = build("quantizers", STATIC)
    assert isinstance(quantizer, SchemeQuantizer)
    states = []
    for execution in ("simulated", "integer", "classic"):
        changed: Any = dataclasses.replace(quantizer, execution=execution)
        states.append(changed.quantize(tiny_model("gpt2"), tiny_calibration(changed)).module.state_dict())
    for other in states[1:]:
        assert states[0].keys() == other.keys()
        assert all(torch.equal(states[0][key], other[key]) for key in other)


def test_rounding_hooks_take_tuples_and_keywords() -> None:
    class Pair(torch.nn.Module):
        def forward(self, hidden_states: Tensor) -> tuple[Tensor, str]:
            return hidden_states + 0.3, "rest"

    module, rounding = Pair(), StaticRounding(Range(0.0, 255.0), Grid(8, symmetric=False))
    round_output(module, rounding)
    round_input_(module, rounding)
    stream = torch.tensor([1.4, 7.6])
    output, rest = module(hidden_states=stream)
    assert rest == "rest"
    assert stream.tolist() == [1.0, 8.0]
    assert output.tolist() == [1.0, 8.0]


def test_unknown_module_is_not_taken_for_a_linear() -> None:
    model = tiny_model("llama")
    model.module.get_submodule("model.layers.0.mlp").up_proj = torch.nn.Identity()
    with pytest.raises(QuantizationError, match=r"up_proj: expected nn\.Linear or Conv1D, got Identity"):
        build("quantizers", "w8a8").quantize(model, Calibration())
