"""Parity finds agreement where there is agreement, and says where there is none."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from helpers import context_of
from quant_bench.errors import NotApplicable
from quant_bench.lowbit.activation import ActivationRule
from quant_bench.lowbit.codes import quantize_weight
from quant_bench.lowbit.linear import QuantLinear
from quant_bench.lowbit.ready import make_ready_
from quant_bench.model import LanguageModel
from quant_bench.parity import executing, integer_layers
from quant_bench.quantizer import Calibration
from quant_bench.registry import build
from quant_bench.statistics import score_of
from quant_bench.task import Evaluation
from quant_bench.tiny import CONFIGS, tiny_model

ALLOWED = [number for number in range(3, 97) if str(number)[0] not in "12"]


def quantized(scheme: str, family: str = "llama") -> LanguageModel:
    return build("quantizers", scheme).quantize(tiny_model(family), Calibration())


def evaluate(model: LanguageModel) -> Evaluation:
    words = " ".join(f"w{pick}" for pick in np.random.default_rng(0).choice(ALLOWED, 200))
    return build("tasks", "parity").evaluate(model, context_of([words]))


def scores_of(found: Evaluation) -> dict[str, float]:
    measured = {m.metric.name: score_of(m, found.samples, 0).value for m in found.measures}
    return measured | {one.metric.name: one.value for one in found.plain}


SCHEMES = [
    "w8a8",
    "w8a8-integer",
    "w4a4",
    "w4a4g16",
    "w4a8",
    "rtn(activation_granularity=tensor)",
    "rtn(activation_symmetric=False,weight_symmetric=False)",
]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_executions_agree_bit_for_bit(scheme: str) -> None:
    found = evaluate(quantized(scheme))
    scores = scores_of(found)
    assert scores["wrong_accumulators"] == 0
    assert scores["linears_equal"] == scores["hidden_equal"] == scores["logits_equal"] == 1.0
    assert found.details["first_faulty_layer"] is None
    assert found.details["first_unequal_hidden"] is None
    assert len(found.samples) == 2


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_executions_agree_in_every_layout(family: str) -> None:
    scores = scores_of(evaluate(quantized("w8a8", family)))
    assert scores["wrong_accumulators"] == 0
    assert scores["linears_equal"] == scores["logits_equal"] == 1.0


def test_every_accumulator_of_every_layer_is_checked_in_short_windows() -> None:
    model = quantized("w8a8")
    found = evaluate(model)
    layers = found.details["layers"]
    assert set(layers) == {site.path for site in model.layout.linears}
    for path, layer in layers.items():
        rows = model.module.get_submodule(path).out_features
        # 2 windows of 64 tokens
        assert layer["checked"] == layer["outputs"] == 2 * 64 * rows
        assert layer["first"] is None


def test_classic_differs_from_integer_and_the_difference_is_measured() -> None:
    model = quantized("w4a4")
    found = evaluate(model)
    scores, frame = scores_of(found), found.samples
    assert frame["nll_integer"].equals(frame["nll_simulated"])
    assert scores["classic_nll_absolute_difference"] > 0
    tokens = frame["tokens"].sum()
    integer, classic = (np.exp(frame[f"nll_{name}"].sum() / tokens) for name in ("integer", "classic"))
    assert scores["classic_perplexity_difference"] == pytest.approx(classic - integer)
    # rounding order changes float32's last digits, not the model
    assert abs(classic / integer - 1) < 1e-2


def with_fault(layer: QuantLinear, name: str, change: Callable[[Tensor], Tensor]) -> None:
    original = getattr(layer, name)
    setattr(layer, name, lambda x: change(original(x)))


def test_one_wrong_accumulator_is_counted_in_its_layer() -> None:
    model = quantized("w8a8")
    path = "model.layers.1.mlp.up_proj"

    def off_by_one(accumulators: Tensor) -> Tensor:
        changed = accumulators.clone()
        changed[0, 5, 7] += 1
        return changed

    with_fault(model.module.get_submodule(path), "accumulators", off_by_one)
    found = evaluate(model)
    assert scores_of(found)["wrong_accumulators"] == 2
    assert found.details["layers"][path]["wrong"] == 2
    assert sum(layer["wrong"] for layer in found.details["layers"].values()) == 2
    assert found.details["first_faulty_layer"] == path


def test_the_first_unequal_output_is_named_with_layer_window_token_and_row() -> None:
    model = quantized("w8a8")
    path = "model.layers.0.mlp.gate_proj"
    layer = model.module.get_submodule(path)
    original = layer.forward

    def forward(x: Tensor) -> Tensor:
        out = original(x)
        if layer.execution == "integer":
            out = out.clone()
            out.reshape(-1, out.shape[-1])[9, 4] += 25.0
        return out

    layer.forward = forward
    found = evaluate(model)
    scores = scores_of(found)
    assert found.details["first_faulty_layer"] == path
    assert found.details["layers"][path]["first"] == (0, 9, 4)
    assert found.details["layers"][path]["unequal"] == 2
    assert scores["linears_equal"] == pytest.approx(1 - 1 / len(found.details["layers"]))
    assert scores["hidden_equal"] == scores["logits_equal"] == 0.0
    assert found.details["first_unequal_hidden"] == (0, 9)
    assert found.details["first_unequal_logits"] == (0, 9)


def test_a_layer_that_no_pass_reaches_is_not_called_equal() -> None:
    model = quantized("w8a8")
    model.module.spare = copy.deepcopy(model.module.get_submodule("model.layers.0.mlp.up_proj"))
    found = evaluate(model)
    count = len(found.details["layers"])
    assert scores_of(found)["linears_equal"] == pytest.approx(1 - 1 / count)
    assert found.details["first_faulty_layer"] == "spare"


@pytest.mark.parametrize("fault", [0.0, 1.0])
def test_a_rounded_head_is_compared_too(fault: float) -> None:
    model = quantized("w8a8", "qwen3")
    codes = quantize_weight(model.head.weight.detach(), bits=8)
    head = model.module.lm_head = QuantLinear(codes, None, ActivationRule(8), "simulated", "lm_head")
    original = head.forward

    def forward(x: Tensor) -> Tensor:
        out = original(x)
        if head.execution == "integer" and len(x) > 1:
            out[-1, 4] += fault
        return out

    head.forward = forward
    found = evaluate(model)
    scores, layer = scores_of(found), found.details["layers"]["lm_head"]
    # two windows of 63 scored positions, 97 tokens of a vocabulary
    assert layer["outputs"] == 2 * 63 * 97
    assert layer["checked"] == 2 * 63 * 97
    assert scores["logits_equal"] == 1.0 - fault
    assert layer["first"] == ((0, 62, 4) if fault else None)
    assert found.details["first_faulty_layer"] == ("lm_head" if fault else None)


def test_layers_are_as_ready_after_the_task_as_before() -> None:
    model = quantized("w8a8-integer")
    make_ready_(model.module)
    evaluate(model)
    assert all(list(layer._derived) == ["integer"] for layer in integer_layers(model).values())


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-integer", "w8a8-classic"])
def test_the_model_is_left_as_it_was(scheme: str) -> None:
    model = quantized(scheme)
    layers = integer_layers(model)
    before = {path: (layer.execution, layer.weight.codes.data_ptr()) for path, layer in layers.items()}
    hooks = sum(len(part._forward_hooks) for part in model.module.modules())
    evaluate(model)
    assert {path: (layer.execution, layer.weight.codes.data_ptr()) for path, layer in layers.items()} == before
    assert sum(len(part._forward_hooks) for part in model.module.modules()) == hooks


def test_switching_the_execution_ends_with_an_error_too() -> None:
    layers = integer_layers(quantized("w8a8"))

    def fail() -> None:
        with executing(layers, "classic"):
            assert {layer.execution for layer in layers.values()} == {"classic"}
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert {layer.execution for layer in layers.values()} == {"simulated"}


def test_a_model_without_integer_products_is_not_applicable() -> None:
    with pytest.raises(NotApplicable, match="float model"):
        evaluate(tiny_model("llama"))
    with pytest.raises(NotApplicable, match="weight-only"):
        evaluate(quantized("w8a16"))


def test_equal_codes_serve_every_execution() -> None:
    model = quantized("w4a4g16")
    layers: dict[str, Any] = integer_layers(model)
    codes = {path: layer.weight for path, layer in layers.items()}
    for execution in ("integer", "simulated", "classic"):
        with executing(layers, execution):
            assert all(layer.weight is codes[path] for path, layer in layers.items())
