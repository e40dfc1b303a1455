"""Sensitivity against models rounded by hand, allocation against brute force, and the recipe and task made of them."""

import copy
import itertools
import re
from pathlib import Path

import pytest
import torch

from quant_bench import models, registry
from quant_bench.data import DataSource
from quant_bench.diagnostics.sensitivity import Widths, sensitivity
from quant_bench.diagnostics.sequences import Sequences
from quant_bench.errors import NotApplicable, QuantizationError, SpecError
from quant_bench.lowbit.codes import quantize_weight
from quant_bench.lowbit.floats import pack_float_linears_
from quant_bench.numerics.allocation import allocate
from quant_bench.probe import Probe
from quant_bench.quantization import mixed
from quant_bench.quantization.linears import weight_of
from quant_bench.quantization.sensitivity import divergence, sensitivities
from quant_bench.quantizer import Calibration
from quant_bench.statistics import score_of
from quant_bench.task import Context
from quant_bench.testing import check_quantizer, check_task, tiny_calibration, tiny_ids, tiny_model


def nearest(weight, bits):
    return quantize_weight(weight, bits=bits, granularity="group", group_size=16)


def logits_of(model, ids):
    with torch.no_grad():
        return model.module(input_ids=ids, use_cache=False).logits.double()


def kl(old, new):
    """Mean over positions of Σ p ln(p / q), in float64."""
    p, q = old.log_softmax(-1), new.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean(-1)


@pytest.mark.parametrize("seed", range(6))
def test_allocation_is_the_best_of_all(seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 30, (6,), generator=generator).tolist()
    # not monotonic, as measured losses need not be
    losses = [dict(zip((2, 3, 4, 8), torch.rand(4, generator=generator).tolist(), strict=True)) for _ in sizes]
    for budget in (2.0, 2.7, 4.0, 5.5, 8.0):
        capacity = int(budget * sum(sizes))
        chosen = allocate(sizes, losses, capacity)
        assert sum(size * bits for size, bits in zip(sizes, chosen, strict=True)) <= capacity
        best = min(
            sum(options[bits] for options, bits in zip(losses, each, strict=True))
            for each in itertools.product((2, 3, 4, 8), repeat=6)
            if sum(size * bits for size, bits in zip(sizes, each, strict=True)) <= capacity
        )
        assert sum(options[bits] for options, bits in zip(losses, chosen, strict=True)) == pytest.approx(
            best, rel=1e-12
        )


def test_allocation_of_a_language_model_is_quick_and_full():
    sizes = [3, 1, 1, 3, 8, 8, 8] * 30
    losses = [{bits: (1 + index % 7) * 4.0**-bits for bits in (2, 3, 4, 8)} for index in range(210)]
    chosen = allocate(sizes, losses, int(4.5 * sum(sizes)))
    taken = sum(size * bits for size, bits in zip(sizes, chosen, strict=True))
    assert 4.49 < taken / sum(sizes) <= 4.5


@pytest.mark.parametrize("hundredths", range(200, 800))
def test_a_budget_is_the_decimal_number_that_was_written(hundredths):
    rule = mixed.MixedRule(hundredths / 100, (2, 8), 1, 1)
    for weights in (51_200, 102_400, 106_954_752):
        assert rule.capacity(weights) == hundredths * weights // 100


def test_a_budget_below_all_choices_is_refused():
    with pytest.raises(ValueError, match="fewest bits"):
        allocate([10], [{3: 1.0, 4: 0.5}], 29)


def test_divergence_is_kl_and_keeps_small_ones():
    torch.manual_seed(0)
    old = torch.randn(5, 1000)
    for change in (1.0, 1e-3, 1e-5):
        new = old + change * torch.randn(5, 1000)
        found = divergence(old.log_softmax(-1), new.log_softmax(-1))
        p, q = old.double().log_softmax(-1), new.double().log_softmax(-1)
        want = (p.exp() * (p - q)).sum(-1)
        assert (found > 0).all()
        assert torch.allclose(found.double(), want, rtol=0.1 if change < 1e-4 else 1e-3, atol=0)
    ruled_out = torch.tensor([[0.0, -torch.inf]]), torch.tensor([[0.5, 0.5]]).log()
    assert divergence(*ruled_out).item() == pytest.approx(0.6931472)


def by_hand(model, path, bits, ids):
    """KL of each sequence with one matrix of a copy overwritten by its rounded values."""
    other = copy.deepcopy(model.module)
    weight = weight_of(other.get_submodule(path))
    with torch.no_grad():
        weight.copy_(nearest(weight.clone(), bits).dequantize())
        return kl(logits_of(model, ids), other(input_ids=ids, use_cache=False).logits.double())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "gpt_neox", "opt"])
def test_sensitivity_is_the_divergence_of_a_model_with_one_matrix_rounded(family):
    model, ids = tiny_model(family), tiny_ids(3, 12)
    before = logits_of(model, ids)
    table = sensitivities(model, ids, (2, 4), nearest)
    assert torch.equal(logits_of(model, ids), before)
    assert set(table) == {site.path for site in model.layout.linears}
    for path in (model.layout.linears[0].path, model.layout.linears[-1].path):
        for bits in (2, 4):
            assert torch.allclose(table[path][bits], by_hand(model, path, bits, ids), rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("arm", ["sink_token", "gated", "attnres", "attnres_oasis"])
def test_sensitivity_is_that_of_the_whole_model_under_arms(arm):
    def build():
        return models.attach(tiny_model("llama"), registry.build("arms", arm), 0)

    model, ids = build(), tiny_ids(2, 10)
    table = sensitivities(model, ids, (3,), nearest)
    reference = logits_of(build(), ids)
    for site in (model.layout.linears[0], model.layout.linears[-1]):
        other = build()
        weight = weight_of(other.module.get_submodule(site.path))
        with torch.no_grad():
            weight.copy_(nearest(weight.clone(), 3).dequantize())
        assert torch.allclose(table[site.path][3], kl(reference, logits_of(other, ids)), rtol=1e-3, atol=1e-9)


def test_a_pass_begins_at_the_layer_that_is_rounded():
    model, calls = tiny_model("llama"), [0, 0]
    for layer in (0, 1):

        def count(module, arguments, output, layer=layer):
            calls[layer] += 1

        model.module.model.layers[layer].input_layernorm.register_forward_hook(count)
    sensitivities(model, tiny_ids(2, 8), (3, 4), nearest)
    # the float pass, seven matrices of either layer at two widths, and one pass that tries to begin at the last layer
    assert calls == [1 + 14, 1 + 14 + 14 + 1]


def test_a_failure_leaves_the_model_as_it_was_and_names_the_matrix():
    model = tiny_model("llama")
    path = "model.layers.1.mlp.up_proj"
    modules = dict(model.module.named_modules())

    def refuse(weight, bits):
        if weight.shape == (80, 48) and len(seen) > 9:
            raise QuantizationError("no range")
        seen.append(bits)
        return nearest(weight, bits)

    seen = []
    with pytest.raises(QuantizationError, match=rf"{re.escape('model.layers.1.mlp')}.*no range"):
        sensitivities(model, tiny_ids(2, 8), (4,), refuse)
    assert dict(model.module.named_modules()) == modules
    assert "forward" not in vars(model.module.get_submodule("model.layers.0"))
    assert path in modules


def quantized(text, family="llama"):
    quantizer = registry.build("quantizers", text)
    return quantizer.quantize(tiny_model(family), tiny_calibration(quantizer))


def bits_of(model):
    return {site.path: model.module.get_submodule(site.path).weight.bits for site in model.layout.linears}


@pytest.mark.parametrize(
    ("text", "budget"), [("mixed:w4a16(budget=4.5)", 4.5), ("mixed:w3a8", 3.0), ("mixed:w5a16", 5.0)]
)
def test_bits_keep_the_budget_and_are_the_best_of_the_measured_table(text, budget):
    model = quantized(text)
    bits = bits_of(model)
    sizes = {
        site.path: weight_of(tiny_model("llama").module.get_submodule(site.path)).numel()
        for site in model.layout.linears
    }
    assert sum(sizes[path] * width for path, width in bits.items()) <= budget * sum(sizes.values())
    assert len(set(bits.values())) > 1
    losses = []
    for path, width in bits.items():
        how = model.coverage.quantized[path]
        assert how.startswith(f"W{width} per group of 128")
        table = how.partition("sensitivity in nats/token: ")[2]
        losses.append({int(w): float(v) for w, v in re.findall(r"W(\d) (\S+?)(?:,|$)", table)})
        assert set(losses[-1]) == {2, 3, 4, 8}
    again = allocate(list(sizes.values()), losses, int(budget * sum(sizes.values())))
    best, ours = (
        sum(options[width] for options, width in zip(losses, each, strict=True)) for each in (again, bits.values())
    )
    # the table is shown with three digits
    assert ours == pytest.approx(best, rel=1e-2)


def test_coverage_says_average_counts_and_how_sensitivity_was_measured():
    notes = " ".join(quantized("mixed:w4a16(budget=4.5)").coverage.notes)
    assert re.search(r"weights have 4\.\d+ bits on average of a budget of 4\.5; matrices: \d+ at \d", notes)
    # what there was, not what was asked for
    assert "4 sequences of 24 tokens" in notes


def uneven():
    """A model with one matrix whose outliers take its range."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.module.get_submodule("model.layers.0.mlp.down_proj").weight[:, ::40] *= 30
    return model


def test_a_matrix_that_rounding_harms_gets_more_bits_and_the_model_comes_nearer_to_float():
    ids = tiny_ids(4, 24, seed=7)
    reference = logits_of(uneven(), ids)
    divergences = {}
    for text in ("w4a16", "mixed:w4a16"):
        quantizer = registry.build("quantizers", text)
        model = quantizer.quantize(uneven(), tiny_calibration(quantizer))
        divergences[text] = kl(reference, logits_of(model, ids)).mean()
    assert bits_of(model)["model.layers.0.mlp.down_proj"] == 8
    assert divergences["mixed:w4a16"] < 0.85 * divergences["w4a16"]


@pytest.mark.parametrize("text", ["mixed:w4a16", "mixed:w4a8"])
def test_recipe_keeps_the_contract(text):
    check_quantizer(registry.build("quantizers", text), families=("llama", "gpt2"))


def test_the_most_bits_need_no_measurement():
    model = registry.build("quantizers", "mixed").quantize(tiny_model("llama"), Calibration())
    assert set(bits_of(model).values()) == {8}
    with pytest.raises(QuantizationError, match="calibration batches"):
        registry.build("quantizers", "mixed:w4a16").quantize(tiny_model("llama"), Calibration())


def test_a_second_budget_of_one_model_measures_nothing_again(monkeypatch):
    counted = []

    def counting(*arguments):
        counted.append(1)
        return sensitivities(*arguments)

    monkeypatch.setattr(mixed, "sensitivities", counting)
    monkeypatch.setattr(mixed, "_tables", {})
    quantized("mixed:w4a16")
    quantized("mixed:w5a8(budget=5.5)")
    assert len(counted) == 1
    quantized("mixed:w4a16(tokens=8)")
    quantized("mixed:w4a16(weight_symmetric=False)")
    assert len(counted) == 3


@pytest.mark.parametrize(
    "text",
    [
        "mixed:w4a16(budget=4.0)",
        "mixed:w4a16(budget=5.5)",
        "mixed(budget=4.5)",
        "mixed:w3a16(choices=48)",
        "mixed(choices=19)",
        "mixed(choices=-2348)",
        "mixed(choices=8432)",
        "mixed(choices=23348)",
        "mixed(tokens=0)",
    ],
)
def test_settings_that_mean_nothing_are_refused(text):
    with pytest.raises(SpecError):
        registry.build("quantizers", text)


def asked(model, bits=(2, 4)):
    sequences = Sequences(tiny_ids(3, 12), "random seq=12", "0" * 64)
    context = Context(DataSource(), Path("unused"), Probe.off())
    return sensitivity(model, context, sequences, Widths(bits, "group", 16))


def test_task_has_the_mean_over_matrices_and_a_row_for_each():
    model = tiny_model("llama")
    table = sensitivities(model, tiny_ids(3, 12), (2, 4), nearest)
    found = asked(model)
    scores = {measure.metric.name: score_of(measure, found.samples, 0).value for measure in found.measures}
    for bits in (2, 4):
        means = [float(each[bits].mean()) for each in table.values()]
        assert scores[f"sensitivity_w{bits}"] == pytest.approx(sum(means) / len(means), rel=1e-6)
        assert {plain.metric.name: plain.value for plain in found.plain}[f"max_sensitivity_w{bits}"] == max(means)
    rows = found.details["linears"]
    assert [row["linear"] for row in rows] == list(table)
    assert rows[3]["w2"] == float(table[rows[3]["linear"]][2].mean())
    spread = table[rows[3]["linear"]][2].std() / 3**0.5
    assert rows[3]["w2_stderr"] == pytest.approx(float(spread))
    first = [row["w4"] for row in rows if row["layer"] == 0]
    assert found.details["layers"][0]["w4"] == pytest.approx(sum(first))


def test_task_reads_packed_layers_and_refuses_quantized_models():
    packed = tiny_model("llama")
    pack_float_linears_(packed.module)
    plain, through = (asked(model).details["linears"] for model in (tiny_model("llama"), packed))
    assert [row["w4"] for row in through] == pytest.approx([row["w4"] for row in plain], rel=1e-2)
    with pytest.raises(NotApplicable, match="quantizer none"):
        asked(registry.build("quantizers", "w8a8").quantize(tiny_model("llama"), Calibration()))


def test_task_keeps_the_contract():
    found = check_task(registry.build("tasks", "sensitivity(bits=4,limit=2,seq_length=16,text=python_docs)"))
    assert found.convention == "python_docs P1 seq=16 prefix=none weights=g128"


@pytest.mark.parametrize(
    "setting",
    ["bits=9", "bits=14", "bits=-4", "bits=42", "bits=44", "group_size=0", "group_size=32,weight_granularity=channel"],
)
def test_task_refuses_settings_that_mean_nothing_before_it_runs(setting):
    with pytest.raises(SpecError):
        registry.build("tasks", f"sensitivity({setting})")
