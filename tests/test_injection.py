"""Injection against damage written out, closed forms and identities."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers import context_of
from quant_bench.diagnostics.injection import InjectionSettings, injection
from quant_bench.diagnostics.junk import donor_places, unit
from quant_bench.diagnostics.reads import read_sites
from quant_bench.errors import NotApplicable, SpecError
from quant_bench.model import LanguageModel
from quant_bench.quantizer import Calibration
from quant_bench.registry import build
from quant_bench.scoring import final_hidden
from quant_bench.statistics import score_of
from quant_bench.task import Evaluation
from quant_bench.tiny import tiny_model
from watched import ITEMS, LENGTH, accounts, armed, caught, sequences, tokens_before


def damages(found: Evaluation) -> dict[float, np.ndarray]:
    columns = [column for column in found.samples if column.startswith("injection_damage_")]
    return {float(column.rpartition("_")[2]): found.samples[column].to_numpy() for column in columns}


@pytest.mark.parametrize("junk", ["structured", "gaussian", "random_direction"])
@pytest.mark.parametrize("arm", ["softmax", "combo", "combo2", "sink_token", "renorm", "clipped_softmax"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_a_dose_of_zero_is_the_clean_loss_exactly(family: str, arm: str, junk: str) -> None:
    settings = InjectionSettings(junk=junk)  # type: ignore[arg-type]
    found = injection(armed(arm, family), context_of(), sequences(), settings, (0.0, 1.6))
    assert damages(found)[0.0].tolist() == [0.0] * ITEMS
    assert (damages(found)[1.6] != 0).all()


@torch.no_grad()
def clean_loss(model: LanguageModel, ids: Tensor) -> float:
    logits = model.module(input_ids=ids[None], use_cache=False).logits[0, :-1].double()
    return float(nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))


@pytest.mark.parametrize("arm", ["softmax", "projection_gate", "norm_gate", "sink_token"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "opt"])
@pytest.mark.parametrize("settings", [InjectionSettings(), InjectionSettings("p50", "gaussian", "out", "sequence")])
def test_damage_equals_an_injection_written_out(settings: InjectionSettings, family: str, arm: str) -> None:
    model, rows, seed, dose = armed(arm, family), sequences(), 5, 0.8
    first, definition = tokens_before(model), build("arms", arm)
    reads = [torch.stack([a.reads[:, first:] for a in accounts(model, definition, ids)]) for ids in rows.ids]
    # item, layer, head, position, dim
    pooled = torch.stack(reads)
    norms = pooled.norm(dim=-1).numpy()
    axes = (0, 3) if settings.pooling == "all" else (3,)
    percent = {"p25": 25, "p50": 50}[settings.cutoff]
    quiet = norms < np.percentile(norms, percent, axis=axes, keepdims=True)
    middle = np.broadcast_to(np.median(norms, axis=axes, keepdims=True), norms.shape)
    if settings.position0 == "out":
        quiet[..., 0] = False
    found = injection(model, context_of(seed=seed), rows, settings, (dose,))
    for item, ids in enumerate(rows.ids):
        handles = []
        for site in model.layout.linears:
            if site.role not in ("value", "query_key_value"):
                continue
            layer, (_, _, heads, _, dim) = site.layer, pooled.shape
            if settings.junk == "structured":
                owners, places = donor_places(seed, layer, item, range(ITEMS), (heads, LENGTH))
                unit_vectors = np.stack(
                    [
                        [pooled[owners[h, t], layer, h, places[h, t]].numpy() for t in range(LENGTH)]
                        for h in range(heads)
                    ]
                )
            else:
                unit_vectors = np.random.default_rng([seed, layer, item]).standard_normal(
                    (heads, LENGTH, dim), np.float32
                )
            unit_vectors = unit_vectors / np.linalg.norm(unit_vectors, axis=-1, keepdims=True)
            added = torch.from_numpy(
                dose * unit_vectors * middle[item, layer][..., None] * quiet[item, layer][..., None]
            )

            def act(module: nn.Module, arguments: Any, output: Tensor, added: Tensor = added) -> Tensor:
                changed = output.clone()
                for h in range(added.shape[0]):
                    start = {
                        "gpt2": 2 * 48 + h * added.shape[2],
                        "gpt_neox": (3 * h + 2) * added.shape[2],
                    }.get(family, h * added.shape[2])
                    changed[0, first:, start : start + added.shape[2]] += added[h].float()
                return changed

            handles.append(model.module.get_submodule(site.path).register_forward_hook(act))
        injected = clean_loss(model, ids)
        for handle in handles:
            handle.remove()
        wanted = injected - clean_loss(model, ids)
        assert damages(found)[dose][item] == pytest.approx(wanted, rel=1e-3, abs=2e-4)
        assert abs(wanted) > 0.01


def test_donors_are_other_sequences_and_the_same_for_every_arm() -> None:
    members = [8, 9, 10, 11]
    owners, places = donor_places(3, 1, 9, members, (4, 500))
    assert set(np.unique(owners)) == {0, 2, 3}
    assert places.min() >= 0
    assert places.max() == 499
    again = donor_places(3, 1, 9, members, (4, 500))
    assert np.array_equal(owners, again[0])
    assert np.array_equal(places, again[1])
    for other in ((4, 1, 9), (3, 2, 9), (3, 1, 10)):
        assert not np.array_equal(places, donor_places(*other, members, (4, 500))[1])
    counts = np.bincount(owners.ravel(), minlength=4)
    assert counts[[0, 2, 3]] == pytest.approx(2000 / 3, abs=100)


def test_junk_reaches_the_gate_and_not_the_queries_of_its_layer() -> None:
    model, rows = armed("projection_gate"), sequences()
    with caught(model) as clean:
        final_hidden(model, rows.ids[0][None])
        before = [dict(layer) for layer in clean]
    seen: list[dict[str, Any]] = []
    site = read_sites(model)[0]

    def look(module: nn.Module, arguments: Any, output: Any) -> None:
        seen.append({"read": arguments[0].clone(), "passed": output.clone()})

    handle = site.gate.register_forward_hook(look)  # type: ignore[union-attr]
    with caught(model) as hit:
        injection(model, context_of(), rows, InjectionSettings("p50", "random_direction", layer=0), (1.6,))
    handle.remove()
    # the last pass is the last sequence's injected one; its gate was computed from the read with junk
    gate: Any = site.gate
    read, passed = seen[-1]["read"], seen[-1]["passed"]
    wanted = read * torch.sigmoid((read * gate.weight).sum(-1) + gate.bias)[..., None]
    torch.testing.assert_close(passed, wanted)
    with caught(model) as plain:
        final_hidden(model, rows.ids[-1][None])
    assert torch.equal(hit[0]["query"], plain[0]["query"])
    assert torch.equal(hit[0]["key"], plain[0]["key"])
    assert not torch.equal(hit[0]["value"], plain[0]["value"])
    assert before


def test_the_first_read_gets_junk_only_when_asked() -> None:
    model, rows = armed("softmax"), sequences()
    inside = injection(model, context_of(), rows, InjectionSettings("p50", "gaussian"), (0.8,))
    outside = injection(model, context_of(), rows, InjectionSettings("p50", "gaussian", "out"), (0.8,))
    shares = [found.details["layers"][0]["quiet_share"] for found in (inside, outside)]
    assert shares[0] == pytest.approx(0.5, abs=0.01)
    assert shares[1] < shares[0]


def test_directions_of_gates_need_a_trained_projection_gate() -> None:
    settings = InjectionSettings(junk="gate_direction")
    with pytest.raises(NotApplicable, match="projection gate"):
        injection(armed("norm_gate"), context_of(), sequences(), settings)
    fresh = build("arms", "projection_gate").attach(tiny_model("llama"))
    with pytest.raises(NotApplicable, match="still 0"):
        injection(fresh, context_of(), sequences(), settings)


def test_junk_along_the_gate_direction_opens_the_gate() -> None:
    model, rows = armed("projection_gate"), sequences()
    site, found = read_sites(model)[1], []
    gate: Any = site.gate
    gate.register_forward_hook(lambda module, arguments, output: found.append(module.argument(arguments[0])))
    injection(model, context_of(), rows, InjectionSettings("p50", "gate_direction", layer=1), (0.0, 1.6))
    closed, opened = found[-2], found[-1]
    assert float((opened - closed).min()) >= 0
    assert float(((opened - closed) > 0).float().mean()) == pytest.approx(0.5, abs=0.1)


def test_one_layer_or_all_can_be_hit() -> None:
    model, rows = armed("softmax"), sequences()
    first, second, both = (
        damages(injection(model, context_of(), rows, InjectionSettings(layer=layer), (0.8,)))[0.8]
        for layer in (0, 1, None)
    )
    assert not np.allclose(first, both)
    assert not np.allclose(second, both)
    with pytest.raises(SpecError, match="layers 0 to 1"):
        injection(model, context_of(), rows, InjectionSettings(layer=2))


def test_groups_hold_at_least_two_sequences() -> None:
    found = injection(armed("softmax"), context_of(), sequences(5), InjectionSettings(group=2), (0.4,))
    assert len(found.samples) == 5
    with pytest.raises(NotApplicable, match="at least 2 sequences"):
        injection(armed("softmax"), context_of(), sequences(1), InjectionSettings())
    with pytest.raises(SpecError, match="group"):
        InjectionSettings(group=1)


def test_cells_share_the_clean_pass_and_repeat_exactly() -> None:
    model, rows, context = armed("combo"), sequences(), context_of()
    one = injection(model, context, rows, InjectionSettings())
    keys = list(context.pass_memo)
    calls: list[int] = []
    model.body.register_forward_hook(lambda *_: calls.append(1))
    gaussian = injection(model, context, rows, InjectionSettings(junk="gaussian"))
    # four doses, no clean pass
    assert len(calls) == 4 * ITEMS
    assert list(context.pass_memo) == keys
    again = injection(model, context_of(), rows, InjectionSettings())
    assert again.samples.equals(one.samples)
    assert [m.metric.name for m in one.measures] == [
        *(f"injection_damage_{dose}" for dose in (0.2, 0.4, 0.8, 1.6)),
        "clean_loss",
    ]
    assert not gaussian.samples.equals(one.samples)
    other = injection(model, context_of(seed=1), rows, InjectionSettings())
    assert (other.samples["nll"] == one.samples["nll"]).all()
    assert not other.samples.equals(one.samples)


def test_damage_is_in_nats_a_token_with_an_interval() -> None:
    found = injection(armed("softmax"), context_of(), sequences(), InjectionSettings("p50"), (1.6,))
    score = score_of(found.measures[0], found.samples, 0)
    assert score.metric.unit == "nats/token"
    assert score.value == pytest.approx(damages(found)[1.6].sum() / (ITEMS * (LENGTH - 1)))
    assert score.ci95 is not None


@pytest.mark.parametrize("quantizer", ["w8a8", "rtn(execution=integer)"])
def test_quantized_models_take_junk_too(quantizer: str) -> None:
    model = build("quantizers", quantizer).quantize(armed("combo2"), Calibration())
    found = injection(model, context_of(), sequences(), InjectionSettings("p50"), (0.0, 1.6))
    assert damages(found)[0.0].tolist() == [0.0] * ITEMS
    assert np.abs(damages(found)[1.6]).min() > 0


def test_task_injection_takes_the_first_windows_and_states_doses() -> None:
    numbers = np.random.default_rng(0).integers(30, 90, 400)
    context = context_of([" ".join(f"w{number}" for number in numbers)])
    task = build("tasks", "injection(text=python_docs,seq_length=16,limit=4,junk=gaussian)")
    found = task.evaluate(tiny_model("llama"), context)
    assert len(found.samples) == 4
    assert found.settings["doses"] == [0.2, 0.4, 0.8, 1.6]


def test_vectors_without_length_have_no_direction() -> None:
    assert torch.equal(unit(torch.zeros(2, 4)), torch.zeros(2, 4))
    assert unit(torch.tensor([[3.0, 4.0]])).tolist() == [[pytest.approx(0.6), pytest.approx(0.8)]]
