"""Attention diagnostics against plain T × T references, closed forms and identities."""

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from helpers import context_of
from quant_bench import registry
from quant_bench.attention import causal_mask
from quant_bench.diagnostics.attention import AttentionSettings, attention, quiet_reads
from quant_bench.diagnostics.masses import Weighing, masses, uniform_masses
from quant_bench.diagnostics.reads import read_sites
from quant_bench.diagnostics.sequences import Sequences
from quant_bench.diagnostics.watch import AttentionWatch
from quant_bench.errors import NotApplicable, SpecError
from quant_bench.model import LanguageModel
from quant_bench.quantization.rotation import Rotation, rotate
from quant_bench.quantizer import Calibration
from quant_bench.registry import build
from quant_bench.scoring import final_hidden
from quant_bench.statistics import score_of
from quant_bench.tiny import CONFIGS, tiny_model
from watched import ITEMS, LENGTH, accounts, armed, caught, sequences, tokens_before

FAMILIES = sorted(CONFIGS)
ARMS = [
    *registry.names("arms"),
    "renorm(gate=projection)",
    "gated(kind=mlp)",
    "gated(fine_tuning=True)",
    "output_gate(kind=headwise)",
    "sink_logit+projection_gate",
    "sink_token+softmax1",
]


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_readings_equal_whole_matrices_for_every_arm_and_layout(family: str, arm: str) -> None:
    model = armed(arm, family)
    definition = build("arms", arm)
    ids = sequences().ids[0]
    with AttentionWatch(model) as watch:
        readings = watch.read(ids)
    first = tokens_before(model)
    for reading, wanted in zip(readings, accounts(model, definition, ids), strict=True):
        # the rows of a sink token's own query are no text
        weights = wanted.weights[:, first:]
        close = {"rtol": 2e-4, "atol": 2e-6}
        torch.testing.assert_close(reading.masses.received, weights[..., first:].mean(1), **close)
        torch.testing.assert_close(reading.masses.first, weights[..., first], **close)
        null = torch.zeros(len(weights)).double() if wanted.null is None else wanted.null[:, first:].mean(1)
        torch.testing.assert_close(reading.masses.phantom, null, **close)
        if first:
            torch.testing.assert_close(reading.masses.sink_token, weights[..., 0].mean(1), **close)
        allowed = wanted.allowed[first:, first:].double()
        torch.testing.assert_close(reading.uniform, (allowed / allowed.sum(1, keepdim=True)).mean(0))
        norms = wanted.reads.norm(dim=-1)
        torch.testing.assert_close(reading.norms.double(), norms[:, first:], rtol=1e-5, atol=1e-6)
        averaged = wanted.averaged.norm(dim=-1)
        torch.testing.assert_close(reading.gated_norms.double(), averaged[:, first:], rtol=1e-5, atol=1e-6)
        # what a value gate lets through is what is averaged over what was projected
        torch.testing.assert_close(reading.passed.double(), (averaged / norms)[:, first:], rtol=1e-4, atol=1e-5)
        assert (reading.output_gate is None) == (wanted.output_factor is None)


@pytest.mark.parametrize("family", FAMILIES)
def test_masses_equal_the_weights_that_transformers_itself_returns(family: str) -> None:
    model, ids = tiny_model(family), sequences().ids[0]
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), attn_implementation="eager")
    plain.load_state_dict(model.module.state_dict())
    with torch.no_grad():
        weights = plain.eval()(input_ids=ids[None], output_attentions=True, use_cache=False).attentions
    with AttentionWatch(model) as watch:
        readings = watch.read(ids)
    for reading, wanted in zip(readings, weights, strict=True):
        torch.testing.assert_close(reading.masses.received, wanted[0].double().mean(1), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(reading.masses.first, wanted[0, :, :, 0].double(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("arm", ARMS)
def test_what_is_on_tokens_on_the_null_and_missing_is_everything(arm: str) -> None:
    model = armed(arm)
    definition = build("arms", arm)
    ids = sequences().ids[0]
    with AttentionWatch(model) as watch:
        readings = watch.read(ids)
    for reading, wanted in zip(readings, accounts(model, definition, ids), strict=True):
        mass, first = reading.masses, tokens_before(model)
        missing = 1 - wanted.weights[:, first:].sum(2).mean(1)
        missing = missing - (0 if wanted.null is None else wanted.null[:, first:].mean(1))
        torch.testing.assert_close(mass.missing, missing, rtol=1e-4, atol=1e-6)
        if not arm.startswith(("clipped", "softpick")):
            assert float(mass.missing.abs().max()) < 1e-6
        else:
            assert float(mass.missing.min()) > 0.01


def test_a_watched_model_answers_as_before_and_is_left_as_it_was() -> None:
    for arm in ("softmax", "combo2", "clipped_softmax", "sink_token", "gated"):
        model = armed(arm)
        ids = sequences().ids[0]
        before, names = final_hidden(model, ids[None]), sorted(name for name, _ in model.module.named_modules())
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.module.modules())
        with AttentionWatch(model) as watch:
            during = final_hidden(model, ids[None])
            watch.read(ids)
        assert torch.equal(during, before)
        assert torch.equal(final_hidden(model, ids[None]), before)
        assert sorted(name for name, _ in model.module.named_modules()) == names
        assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.module.modules()) == hooks
        with pytest.raises(RuntimeError, match="stop"), AttentionWatch(model):
            raise RuntimeError("stop")
        assert torch.equal(final_hidden(model, ids[None]), before)


@pytest.mark.parametrize("tokens", [1, 2, 64, 1023])
def test_even_weights_put_the_harmonic_mean_on_position_zero(tokens: int) -> None:
    wanted = sum(1 / n for n in range(1, tokens + 1)) / tokens
    assert float(uniform_masses(None, tokens, 0)[0]) == pytest.approx(wanted, rel=1e-12)
    assert float(uniform_masses(None, tokens, 0).sum()) == pytest.approx(1.0, rel=1e-12)
    mask = causal_mask(tokens, tokens, None, torch.device("cpu"))
    torch.testing.assert_close(uniform_masses(mask, tokens, 0), uniform_masses(None, tokens, 0))


def test_the_null_of_position_zero_has_the_published_values() -> None:
    for tokens, share in ((256, 0.0239), (512, 0.0133), (1024, 0.00733), (2048, 0.00400)):
        assert float(uniform_masses(None, tokens, 0)[0]) == pytest.approx(share, rel=5e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_without_preference_gives_the_null_everywhere(family: str) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        for site in model.layout.linears:
            if site.role in ("query", "query_key_value"):
                module: Any = model.module.get_submodule(site.path)
                part = slice(None)
                if family == "gpt2":
                    part = slice(0, 48)
                    module.weight[:, part] = 0.0
                elif family == "gpt_neox":
                    module.weight.view(4, 3, 12, 48)[:, 0] = 0.0
                else:
                    module.weight[part] = 0.0
                if module.bias is not None:
                    bias = module.bias.view(4, 3, 12)[:, 0] if family == "gpt_neox" else module.bias[part]
                    bias.zero_()
    found = attention(model, context_of(), sequences(), AttentionSettings())
    frame = found.samples
    null = float(frame["position0_mass_null"][0])
    assert frame["position0_mass"].to_numpy() == pytest.approx(null, rel=1e-5)
    assert frame["exposure"].to_numpy() == pytest.approx(frame["exposure_null"].to_numpy(), rel=1e-5)
    if family != "gemma3":
        # gemma3's first layer sees a window only
        assert null == pytest.approx(sum(1 / n for n in range(1, LENGTH + 1)) / LENGTH)


def test_tiles_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = sequences().ids[0]
    for arm in ("softmax", "combo", "clipped_softmax1", "sink_token"):
        model = armed(arm)
        with AttentionWatch(model) as watch:
            whole = watch.read(ids)
        monkeypatch.setattr("quant_bench.mechanisms.tiles.TILE", 7 * LENGTH)
        with AttentionWatch(model) as watch:
            tiled = watch.read(ids)
        monkeypatch.undo()
        for one, other in zip(whole, tiled, strict=True):
            torch.testing.assert_close(one.masses.received, other.masses.received, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(one.masses.first, other.masses.first, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(one.masses.phantom, other.masses.phantom, rtol=1e-5, atol=1e-7)


def numbers(model: LanguageModel, arm: str, rows: Sequences, settings: AttentionSettings) -> dict[str, float]:
    """The scores of the task `attention`, from whole matrices."""
    definition, first = build("arms", arm), tokens_before(model)
    all_accounts = [accounts(model, definition, ids) for ids in rows.ids]
    length = min(settings.sink_length, rows.ids.shape[1])
    found: dict[str, list[float]] = {}
    for layer in range(len(model.layout.layers)):
        layers = [item[layer] for item in all_accounts]
        norms = np.stack([a.reads.norm(dim=-1).numpy()[:, first:] for a in layers])
        kept = np.stack([a.averaged.norm(dim=-1).numpy()[:, first:] for a in layers])
        for head in range(layers[0].weights.shape[0]):
            kv = head // (layers[0].weights.shape[0] // norms.shape[1])
            pooled = np.percentile(norms[:, kv], settings.quiet)
            for item, a in enumerate(layers):
                w = a.weights[head, first:, first:].numpy()
                limit = pooled if settings.pooling == "all" else np.percentile(norms[item, kv], settings.quiet)
                quiet = norms[item, kv] < limit
                gate = kept[item, kv] / norms[item, kv]
                reduce = np.median if settings.typical == "median" else np.mean
                row = {
                    "position0_mass": w[:, 0].mean(),
                    "sink_rate": float(w[:length, 0].mean() > settings.sink_threshold),
                    "sink_rate_context": float(w[:, 0].mean() > settings.sink_threshold),
                    "exposure": w[:, quiet].sum(1).mean(),
                    "exposure_gated": (w * gate)[:, quiet].sum(1).mean(),
                    "read_norm_ratio": norms[item, kv, 0] / reduce(norms[item, kv, 1:]),
                    "read_norm_ratio_gated": kept[item, kv, 0] / reduce(kept[item, kv, 1:]),
                }
                for name, value in row.items():
                    found.setdefault(name, []).append(float(value))
    return {name: float(np.mean(values)) for name, values in found.items()}


@pytest.mark.parametrize("settings", [AttentionSettings(), AttentionSettings(40.0, "sequence", "mean", 0.12, 9)])
@pytest.mark.parametrize(
    ("arm", "family"),
    [("softmax", "llama"), ("combo2", "gpt_neox"), ("norm_gate", "qwen3"), ("sink_token", "gpt2"), ("combo", "opt")],
)
def test_scores_follow_their_definitions(arm: str, family: str, settings: AttentionSettings) -> None:
    model, rows = armed(arm, family), sequences()
    found = attention(model, context_of(), rows, settings)
    scores = {m.metric.name: score_of(m, found.samples, 0) for m in found.measures}
    for name, value in numbers(model, arm, rows, settings).items():
        assert scores[name].value == pytest.approx(value, rel=2e-4, abs=1e-7), name
        assert scores[name].n == ITEMS
    table = found.details["layers"]
    assert [row["layer"] for row in table] == [0, 1]
    for name in ("position0_mass", "exposure", "read_norm_ratio"):
        assert np.mean([row[name] for row in table]) == pytest.approx(scores[name].value)
    other = "mean" if settings.typical == "median" else "median"
    assert f"read_norm_ratio_to_{other}" in table[0]


def test_both_readings_of_open_choices_stand_side_by_side() -> None:
    model, rows = armed("norm_gate"), sequences()
    one = attention(model, context_of(), rows, AttentionSettings())
    other = attention(model, context_of(), rows, AttentionSettings(pooling="sequence", typical="mean"))
    for here, there in zip(one.details["layers"], other.details["layers"], strict=True):
        assert here["exposure_pooling_sequence"] == pytest.approx(there["exposure"])
        assert here["exposure"] == pytest.approx(there["exposure_pooling_all"])
        assert here["read_norm_ratio_to_mean"] == pytest.approx(there["read_norm_ratio"])
        assert here["read_norm_ratio"] == pytest.approx(there["read_norm_ratio_to_median"])


def test_the_sink_rate_of_a_beginning_is_that_of_the_beginning_alone() -> None:
    model, rows = armed("sink_logit"), sequences()
    settings = AttentionSettings(sink_threshold=0.1, sink_length=16)
    whole = attention(model, context_of(), rows, settings)
    start = attention(model, context_of(), dataclasses.replace(rows, ids=rows.ids[:, :16]), settings)
    assert whole.samples["sink_rate"].tolist() == start.samples["sink_rate_context"].tolist()
    assert whole.settings["sink_length"] == 16
    assert 0 < whole.samples["sink_rate"].mean() < 1


def test_a_model_made_to_abstain_shows_it() -> None:
    model = armed("sink_logit")
    for path in model.layout.attentions:
        with torch.no_grad():
            model.module.get_submodule(path).attention_core.null.logit.fill_(30.0)
    frame = attention(model, context_of(), sequences(), AttentionSettings()).samples
    assert frame["phantom_mass"].min() > 0.999
    assert frame["phantom_rate"].to_numpy() == pytest.approx(1.0)
    assert frame["position0_mass"].max() < 1e-6


def test_gates_are_counted_as_they_stand() -> None:
    model, rows = armed("projection_gate"), sequences(1)
    with torch.no_grad():
        for site in read_sites(model):
            assert site.gate is not None
            site.gate.weight.zero_()
            site.gate.bias.copy_(torch.tensor([math.log(0.2 / 0.8), math.log(0.9 / 0.1)]))
    found = attention(model, context_of(), rows, AttentionSettings())
    row = found.samples.iloc[0]
    assert row["gate_mean"] == pytest.approx(0.55)
    assert row["gate_below_half"] == pytest.approx(0.5)
    assert row["gate_min"] == pytest.approx(0.2)
    softmax = attention(armed("softmax"), context_of(), rows, AttentionSettings())
    assert "gate_mean" not in softmax.samples


@pytest.mark.parametrize("arm", ["gated", "gated(fine_tuning=True)", "output_gate", "output_gate(kind=headwise)"])
def test_output_gates_lie_between_zero_and_one(arm: str) -> None:
    model, ids = armed(arm), sequences().ids[0]
    definition = build("arms", arm)
    with AttentionWatch(model) as watch:
        readings = watch.read(ids)
    for reading, wanted in zip(readings, accounts(model, definition, ids), strict=True):
        assert wanted.output_factor is not None
        assert reading.output_gate is not None
        sigmoid = wanted.output_factor * (0.25 if "fine_tuning" in arm else 1.0)
        assert reading.output_gate.mean == pytest.approx(float(sigmoid.mean()), rel=1e-5)
        assert reading.output_gate.least == pytest.approx(float(sigmoid.min()), rel=1e-5)
        assert reading.output_gate.below_half == pytest.approx(float((sigmoid < 0.5).float().mean()))


def test_a_constant_factor_of_an_output_gate_is_left_out_behind_a_rotation() -> None:
    model, ids = armed("gated(fine_tuning=True)"), sequences().ids[0]
    with AttentionWatch(model) as watch:
        before = watch.read(ids)
    model, _ = rotate(model, Rotation())
    with AttentionWatch(model) as watch:
        after = watch.read(ids)
    for one, other in zip(before, after, strict=True):
        assert one.output_gate is not None
        assert other.output_gate is not None
        assert other.output_gate.mean == pytest.approx(one.output_gate.mean, rel=1e-4)


@pytest.mark.parametrize("quantizer", ["w8a8", "w4a4", "rtn(kv_bits=4)", "rtn(execution=integer)"])
@pytest.mark.parametrize("arm", ["softmax", "combo2", "renorm", "clipped_softmax"])
def test_quantized_models_are_watched_with_their_own_weights(arm: str, quantizer: str) -> None:
    definition = build("arms", arm)
    recipe = build("quantizers", quantizer)
    calibration = Calibration.of(sequences(max(8, recipe.calibration_sequences), 24, seed=3).ids, "random", 8)
    model = recipe.quantize(armed(arm), calibration)
    ids = sequences().ids[0]
    with AttentionWatch(model) as watch:
        readings = watch.read(ids)
    for reading, wanted in zip(readings, accounts(model, definition, ids), strict=True):
        torch.testing.assert_close(reading.masses.received, wanted.weights.mean(1), rtol=2e-4, atol=2e-6)
        averaged = wanted.averaged.norm(dim=-1)
        torch.testing.assert_close(reading.gated_norms.double(), averaged, rtol=1e-5, atol=1e-6)


def test_rounded_probabilities_are_what_scope_full_computes() -> None:
    recipe = build("quantizers", "w8a8-static")
    calibration = Calibration.of(sequences(16, 24, seed=3).ids, "random", 16)
    for arm in ("softmax", "sink_logit", "clipped_softmax1"):
        model = recipe.quantize(armed(arm), calibration)
        ids = sequences().ids[0]
        with caught(model) as layers:
            final_hidden(model, ids[None])
        with AttentionWatch(model) as watch:
            readings = watch.read(ids)
        for index, (layer, reading) in enumerate(zip(layers, readings, strict=True)):
            core: Any = model.module.get_submodule(model.layout.attentions[index]).attention_core
            mask = causal_mask(LENGTH, LENGTH, None, ids.device)
            scores = layer["query"] @ layer["key"].repeat_interleave(2, 1).transpose(-1, -2) * layer["scaling"]
            scores = core.scores(scores.float()).masked_fill(~mask, -torch.inf)
            null = torch.full((4,), -torch.inf) if core.arm is None else core.arm.null.logit.detach()
            padded = torch.cat((scores, null[None, :, None, None].expand(1, 4, LENGTH, 1)), -1)
            weights, taken = torch.softmax(padded, -1).split([LENGTH, 1], -1)
            if arm == "clipped_softmax1":
                weights = (weights * 1.025 - 0.025).clamp(0, 1)
            rounded = core.probabilities(weights)
            torch.testing.assert_close(reading.masses.received, rounded[0].double().mean(1), rtol=1e-3, atol=2e-4)
            torch.testing.assert_close(reading.masses.phantom, taken[0, ..., 0].double().mean(1), rtol=1e-4, atol=1e-6)


def test_a_core_whose_weights_cannot_be_seen_is_not_applicable() -> None:
    model = tiny_model("llama")

    def opaque(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return query

    model.module.get_submodule(model.layout.attentions[0]).attention_core = opaque
    with pytest.raises(NotApplicable, match="probabilities"):
        attention(model, context_of(), sequences(), AttentionSettings())


def test_task_attention_reads_a_text_and_states_its_choices() -> None:
    numbers = np.random.default_rng(0).integers(30, 90, 400)
    context = context_of([" ".join(f"w{number}" for number in numbers)])
    task = build("tasks", "attention(text=python_docs,seq_length=32,limit=5)")
    found = task.evaluate(tiny_model("llama"), context)
    assert len(found.samples) == 5
    assert found.convention.startswith("python_docs P1 seq=32")
    assert found.settings["seq_length"] == 32
    assert found.settings["sink_length"] == 32
    assert registry.settings(task)["pooling"] == "all"


@pytest.mark.parametrize("wrong", ["attention(quiet=0)", "attention(sink_threshold=1)", "attention(sink_length=0)"])
def test_impossible_settings_are_refused(wrong: str) -> None:
    with pytest.raises(SpecError):
        build("tasks", wrong).evaluate(tiny_model("llama"), context_of(["w30 " * 200]))


def test_quiet_reads_lie_below_the_percentile_of_their_own_head() -> None:
    norms = torch.rand(3, 2, 40, generator=torch.Generator().manual_seed(0))
    pooled, alone = quiet_reads(norms, 25.0, "all"), quiet_reads(norms, 25.0, "sequence")
    for head in range(2):
        limit = np.percentile(norms[:, head].double().numpy(), 25)
        assert torch.equal(pooled[:, head], norms[:, head] < limit)
        assert int(pooled[:, head].sum()) == 30
        for item in range(3):
            assert int(alone[item, head].sum()) == 10
    assert not torch.equal(pooled, alone)


# injection


def test_weights_of_a_long_sequence_never_lie_in_memory_at_once() -> None:
    """The largest tensor that a weighing sees is a tile, whatever the length."""
    sizes: list[int] = []

    def normalize(scores: Tensor, heads: Tensor) -> Tensor:
        sizes.append(scores.numel())
        return torch.softmax(scores, -1)

    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, 2048, 8, generator=generator) for heads in (4, 2))
    masses(Weighing(None, normalize), nn.Identity(), (query, key, key), None, 0.3, 0)
    assert max(sizes) <= 1 << 19
    assert len(sizes) > 8


def test_position0_by_head_is_the_heat_map_of_readings() -> None:
    model = armed("sink_logit")
    evaluation = attention(model, context_of(), sequences(), AttentionSettings())
    with AttentionWatch(model) as watch:
        found = [torch.stack([reading.masses.first.mean(1) for reading in watch.read(ids)]) for ids in sequences().ids]
    wanted = torch.stack(found).mean(0)
    layers = evaluation.details["layers"]
    assert torch.allclose(torch.tensor([layer["position0_mass_by_head"] for layer in layers]), wanted.float())
    for layer, heads in zip(layers, wanted, strict=True):
        assert layer["position0_mass"] == pytest.approx(float(heads.mean()))
