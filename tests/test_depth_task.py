"""Task `depth` against weights that are known, and against a plain recount."""

import math
from typing import Any

import pytest
import torch

from helpers import context_of
from quant_bench import models
from quant_bench.depth import routers_of
from quant_bench.diagnostics.depth import DepthSettings, DepthWatch, depth
from quant_bench.diagnostics.sequences import Sequences
from quant_bench.errors import QuantizationError, SpecError
from quant_bench.model import LanguageModel
from quant_bench.registry import build
from quant_bench.scoring import final_hidden
from quant_bench.task import Evaluation
from quant_bench.testing.tokens import tiny_calibration
from quant_bench.tiny import tiny_model


def sequences(items: int = 3, length: int = 20) -> Sequences:
    ids = torch.randint(3, 97, (items, length), generator=torch.Generator().manual_seed(1))
    return Sequences(ids, f"random seq={length}", "0" * 64)


def measured(model: LanguageModel, items: int = 3, **settings: Any) -> Evaluation:
    return depth(model, context_of(), sequences(items), DepthSettings(**settings))


def scores(evaluation: Evaluation) -> dict[str, float]:
    return {m.column: float(evaluation.samples[m.column].mean()) for m in evaluation.measures}


def test_equal_weights_give_their_closed_forms() -> None:
    found = scores(measured(models.attach(tiny_model("llama"), "attnres")))
    even = [1 / n for n in (2, 3, 4, 5)]
    assert found["depth_top_weight"] == pytest.approx(sum(even) / 4)
    assert found["depth_top_weight_uniform"] == pytest.approx(sum(even) / 4)
    assert found["depth_entropy"] == pytest.approx(sum(math.log(n) for n in (2, 3, 4, 5)) / 4, abs=1e-6)
    assert found["depth_null_mass"] == pytest.approx(0.0, abs=1e-6)
    assert found["depth_collapsed"] == 0.0
    assert "depth_psi" not in found


def test_depth_null_and_beta_are_reported() -> None:
    model = models.attach(
        tiny_model("llama"), "attnres(beta=0.5,coupled=True,depth=softmax1,train_beta=False)+softmax1"
    )
    found = scores(measured(model))
    # beta moves weights by far less than this
    assert found["depth_null_mass"] == pytest.approx(sum(1 / (n + 1) for n in (2, 3, 4, 5)) / 4, abs=0.02)
    assert found["depth_beta"] == 0.5
    assert 0 < found["depth_psi"] < 1


def test_a_router_that_reads_one_source_counts_as_collapsed() -> None:
    text = "attnres_oasis(draw=zero_query,recency=last,rho=12.0)"
    evaluation = measured(models.attach(tiny_model("llama"), text))
    assert scores(evaluation)["depth_collapsed"] == 1.0
    assert scores(evaluation)["depth_top_weight"] == pytest.approx(1.0, abs=1e-4)
    last = evaluation.details["routers"][-1]
    assert last["router"] == "1.mlp"
    assert list(last["sources"]) == ["embedding", "0.layer", "1.attention", "1.mlp"]
    assert last["sources"]["1.mlp"] == pytest.approx(1.0, abs=1e-4)
    assert scores(measured(models.attach(tiny_model("llama"), text), collapsed=0.999999))["depth_collapsed"] < 1.0


def test_sizes_of_states_are_those_of_transformers_hidden_states() -> None:
    model = models.attach(tiny_model("llama"), "attnres_oasis")
    evaluation = measured(model, items=1)
    body: Any = model.body
    with torch.no_grad():
        hidden = body(input_ids=sequences(1).ids, output_hidden_states=True, use_cache=False).hidden_states[1]
    layer = evaluation.details["layers"][0]
    assert layer["state_max"] == pytest.approx(float(hidden.abs().max()), rel=1e-5)
    assert layer["state_rms"] == pytest.approx(float(hidden.square().mean(-1).sqrt().mean()), rel=1e-5)


def test_details_are_means_over_sequences() -> None:
    model = models.attach(tiny_model("llama"), "attnres_oasis+softmax1")
    evaluation = measured(model)
    single = []
    with DepthWatch(model).open() as watch:
        for ids in sequences().ids:
            single.append(watch.read(ids)[0][2])
    wanted = torch.stack([seen.weights for seen in single]).mean(0).tolist()
    assert list(evaluation.details["routers"][2]["sources"].values()) == pytest.approx(wanted)
    psi = sum(seen.numbers["depth_psi"] for seen in single) / 3
    assert evaluation.details["routers"][2]["depth_psi"] == pytest.approx(psi)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_without_routers_has_sizes_only(family: str) -> None:
    evaluation = measured(tiny_model(family))
    assert set(scores(evaluation)) == {"state_rms", "state_growth"}
    assert evaluation.details["routers"] == []


def test_watching_changes_nothing_and_leaves_nothing() -> None:
    model = models.attach(tiny_model("llama"), "attnres+sink_logit")
    before = final_hidden(model, sequences().ids[:1])
    with DepthWatch(model).open():
        inside = final_hidden(model, sequences().ids[:1])
    assert torch.allclose(before, inside, atol=1e-5)
    assert torch.equal(before, final_hidden(model, sequences().ids[:1]))
    assert all(router.observer is None for router in routers_of(model.body))


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-integer", "w4a4-static(calibration_batches=1)"])
def test_quantized_models_are_asked_for_their_own_weights(scheme: str) -> None:
    quantizer = build("quantizers", scheme)
    model = models.attach(tiny_model("llama"), "attnres_oasis(coupled=True,depth=softmax1)+softmax1")
    float_psi = scores(measured(model))["depth_psi"]
    model = quantizer.quantize(model, tiny_calibration(quantizer))
    psi = scores(measured(model))["depth_psi"]
    assert psi == pytest.approx(float_psi, abs=0.1)
    assert psi != float_psi


def test_values_that_are_not_finite_are_an_error() -> None:
    model = models.attach(tiny_model("llama"), "attnres")
    routers_of(model.body)[0].get_parameter("query").data.fill_(float("nan"))
    with pytest.raises(QuantizationError, match="not finite"):
        measured(model)


def test_settings_out_of_range_are_usage_errors() -> None:
    with pytest.raises(SpecError):
        DepthSettings(collapsed=1.0)
