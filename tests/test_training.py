"""Matched training: arms of a tier and seed differ in nothing else; a killed run ends with the same weights."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quant_bench import models, registry
from quant_bench.data import DataSource
from quant_bench.errors import ModelError, NotApplicable, SpecError
from quant_bench.model import LanguageModel
from quant_bench.tiny import tiny_model
from quant_bench.training import checkpoints, loop
from quant_bench.training.building import build, parameter_counts
from quant_bench.training.checkpoints import Order, find, find_or_train, key_of
from quant_bench.training.loop import MatchedTrainer, fit, last_checkpoint
from quant_bench.training.material import Material, material_of
from quant_bench.training.tiers import TIERS, Tier, changed

GPT2 = replace(
    changed(TIERS["toy-3"], text="python_docs"),
    layers=2,
    width=16,
    heads=2,
    inner=32,
    batch=4,
    device_batch=4,
    tokens=8 * 4 * 64,
    warmup=0.25,
)
LLAMA = replace(GPT2, layout="llama", name="toy-rope")


def silent(description: str, done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def data() -> DataSource:
    return DataSource(allow_hub=False)


@pytest.fixture(scope="module")
def material(data: DataSource, tmp_path_factory: pytest.TempPathFactory) -> Material:
    return material_of(GPT2, data, tmp_path_factory.mktemp("unused"))


def fresh(tier: Tier, material: Material, arm: str = "softmax", seed: int = 0) -> LanguageModel:
    return build(tier, registry.build("arms", arm), seed, material.tokenizer())


def weights(model: LanguageModel) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.module.named_parameters()}


def trained(tier: Tier, material: Material, work: Path, arm: str = "softmax") -> dict[str, Tensor]:
    model = fresh(tier, material, arm)
    fit(model, material, tier, 0, work, silent)
    return weights(model)


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("tier", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("arm", registry.names("arms"))
def test_every_arm_starts_from_the_same_shared_parameters(tier: Tier, arm: str, material: Material) -> None:
    shared = weights(fresh(tier, material))
    try:
        fresh(tier, material, arm)
    except NotApplicable as reason:
        # depth routers know Llama's layers alone, and no arm refuses those
        if tier is LLAMA:
            raise
        pytest.skip(str(reason))
    # a gate on the reads stands around the projection that it gates
    ours = {name.replace("_proj.projection", "_proj").replace("c_attn.projection", "c_attn"): tensor
            for name, tensor in weights(fresh(tier, material, arm)).items()}  # fmt: skip
    for name, tensor in shared.items():
        assert torch.equal(ours[name], tensor), name
    again = weights(fresh(tier, material, arm))
    assert_equal(weights(fresh(tier, material, arm)), again)
    other = weights(fresh(tier, material, seed=1))
    assert not torch.equal(next(iter(other.values())), next(iter(shared.values())))


@pytest.mark.parametrize("tier", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("arm", ["sink_token", "output_gate"])
def test_an_arm_draws_no_number_that_a_shared_parameter_has(tier: Tier, arm: str, material: Material) -> None:
    # both are normal with deviation 0.02, so numbers of one draw would be equal
    shared, ours = weights(fresh(tier, material)), weights(fresh(tier, material, arm))
    drawn = torch.cat([value.flatten() for name, value in ours.items() if name not in shared])
    kept = torch.cat([value.flatten() for value in shared.values()])
    assert drawn.unique().numel() > 10
    assert float(torch.isin(drawn, kept).double().mean()) < 0.01


def test_a_seed_that_draws_what_a_smaller_one_draws_is_refused(data: DataSource, tmp_path: Path) -> None:
    small, large = (torch.rand(3, generator=torch.Generator().manual_seed(seed)) for seed in (5, (1 << 32) + 5))
    assert torch.equal(small, large)
    with pytest.raises(SpecError, match="seed"):
        Order(GPT2, registry.build("arms", "softmax"), (1 << 32) + 5, data, tmp_path)


def test_the_activation_of_a_toy_is_that_of_gpt2(material: Material) -> None:
    module: Any = fresh(GPT2, material).module.eval()
    plain = type(module)._from_config(
        type(module.config)(**{**module.config.to_dict(), "activation_function": "gelu_new"})
    )
    plain.load_state_dict(module.state_dict())
    ids = torch.from_numpy(material.row(0, 0))[None]
    torch.testing.assert_close(module(input_ids=ids).logits, plain.eval()(input_ids=ids).logits, rtol=1e-5, atol=1e-6)


def test_every_parameter_of_a_fresh_arm_is_trained(material: Material) -> None:
    model = fresh(LLAMA, material, "combo2")
    assert model.module.training
    assert all(parameter.requires_grad for parameter in model.module.parameters())


def test_arms_read_the_same_tokens_in_the_same_order(
    material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[list[list[int]]]] = {}
    for arm in ("softmax", "combo2"):
        model = fresh(LLAMA, material, arm)
        batches = seen.setdefault(arm, [])
        embedding = model.module.get_submodule(model.layout.embeddings[0])
        embedding.register_forward_pre_hook(lambda module, inputs, kept=batches: kept.append(inputs[0].tolist()))
        fit(model, material, LLAMA, 5, tmp_path / arm, silent)
    assert seen["softmax"] == seen["combo2"]
    expected = [[material.row(5, step * 4 + place).tolist() for place in range(4)] for step in range(LLAMA.steps)]
    assert seen["softmax"] == expected


def test_only_matrices_decay_and_nothing_that_an_arm_excludes(material: Material, tmp_path: Path) -> None:
    model = fresh(LLAMA, material, "combo2")
    trainer = MatchedTrainer(model=model.module, args=loop.arguments(LLAMA, 0, tmp_path, "cpu"))
    trainer.create_optimizer()
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    decay = {names[id(p)]: g["weight_decay"] for g in trainer.optimizer.param_groups for p in g["params"]}
    assert decay.keys() == set(names.values())
    for name, value in decay.items():
        plain = name.endswith("proj.weight") or name.endswith("projection.weight") or "embed_tokens" in name
        assert value == (LLAMA.weight_decay if plain else 0.0), name
    # the gate's directions are a matrix, and a rule by shape would have decayed them
    assert any(name.endswith("gate.weight") or ".gate." in name for name in decay if decay[name] == 0.0)
    assert {group["betas"] for group in trainer.optimizer.param_groups} == {(0.9, 0.95)}


def test_a_parameter_with_a_rate_of_its_own_keeps_its_ratio_and_the_others_theirs(
    material: Material, tmp_path: Path
) -> None:
    arm = "softmax1+attnres_oasis(coupled=True,beta=0.5,beta_rate=50.0,depth=softmax1)"
    model = fresh(LLAMA, material, arm)
    trainer = MatchedTrainer(model=model.module, args=loop.arguments(LLAMA, 0, tmp_path, "cpu"))
    trainer.create_optimizer_and_scheduler(LLAMA.steps)
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    for _ in range(3):
        found = [
            (names[id(p)], group["lr"], group["weight_decay"])
            for group in trainer.optimizer.param_groups
            for p in group["params"]
        ]
        assert sorted(name for name, *_ in found) == sorted(names.values())
        (rate,) = {rate for name, rate, _ in found if not name.endswith(".raw")}
        assert {(rate, decay) for name, rate, decay in found if name.endswith(".raw")} == {(50.0 * rate, 0.0)}
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert rate > 0


def test_a_published_coupling_hardly_moves_and_one_with_its_own_rate_does(material: Material, tmp_path: Path) -> None:
    betas = {}
    for rate in (1.0, 100.0):
        arm = f"softmax1+attnres_oasis(coupled=True,depth=softmax1,beta_rate={rate})"
        state = trained(LLAMA, material, tmp_path / str(rate), arm)
        raw = torch.stack([tensor for name, tensor in state.items() if name.endswith(".raw")])
        betas[rate] = (torch.nn.functional.softplus(raw) - math.log1p(math.exp(-5.0))).abs().max().item()
    # Adam moves a parameter by its rate a step at most (nearly), and softplus is flat at -5
    assert betas[1.0] <= 8 * LLAMA.learning_rate * 0.0068
    assert betas[100.0] > 10 * betas[1.0]


def test_a_base_keeps_its_weights_until_it_is_trained_on_and_has_its_own_tokenizer(
    data: DataSource, tmp_path: Path
) -> None:
    pretrained, folder = tiny_model("llama"), tmp_path / "base"
    models.save(pretrained, folder)
    tier = replace(
        LLAMA, layout="base", base=str(folder), tokenizer="base", task="text", vocabulary=97, held_out=4, context=16
    )
    material = material_of(tier, data, tmp_path)
    assert material.tokenizer().get_vocab() == pretrained.tokenizer.get_vocab()
    shared = pretrained.module.state_dict()
    for arm in ("softmax", "attnres_oasis(draw=zero_query,recency=last,rho=12.0)"):
        state = build(tier, registry.build("arms", arm), 0, material.tokenizer(), tmp_path).module.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in shared.items())
    order = Order(tier, registry.build("arms", "sink_logit"), 0, data, tmp_path)
    loaded = models.load_model(str(find_or_train(order).folder))
    assert models.arm_of(loaded) == "sink_logit"
    assert not all(torch.equal(loaded.module.state_dict()[name], tensor) for name, tensor in shared.items())
    before = key_of(order, material.sha256)
    models.save(tiny_model("llama", seed=1), folder)
    assert key_of(order, material.sha256) != before


def test_the_learning_rate_rises_and_falls_to_a_tenth(material: Material, tmp_path: Path) -> None:
    tier = replace(GPT2, learning_rate=0.02)
    history = fit(fresh(tier, material), material, tier, 0, tmp_path, silent)
    assert [entry["step"] for entry in history] == list(range(1, 9))
    peak, warm, steps = 0.02, 2, 8
    for entry in history:
        done = entry["step"] - 1
        if done < warm:
            expected = peak * done / warm
        else:
            cosine = 0.5 * (1.0 + math.cos(math.pi * (done - warm) / (steps - warm)))
            expected = peak * (0.1 + 0.9 * cosine)
        assert entry["learning_rate"] == pytest.approx(expected, rel=1e-9)
    assert history[0]["loss"] == pytest.approx(math.log(64), rel=0.05)
    assert history[-1]["loss"] < history[0]["loss"] - 0.3


def test_one_step_is_a_plain_step_of_adamw_with_clipping(material: Material, tmp_path: Path) -> None:
    tier = replace(LLAMA, tokens=2 * 4 * 64, warmup=0.5, weight_decay=0.1)
    assert (tier.steps, tier.warmup_steps) == (2, 1)
    reference: Any = fresh(tier, material).module
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in reference.parameters():
        groups[parameter.dim() >= 2].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": 0.1}, {"params": groups[False], "weight_decay": 0.0}],
        lr=0.0,
        betas=(0.9, 0.95),
    )
    for step, rate in enumerate((0.0, tier.learning_rate)):
        ids = torch.stack([torch.from_numpy(material.row(0, step * 4 + place)) for place in range(4)])
        scores = reference(input_ids=ids).logits[:, :-1].flatten(0, 1)
        torch.nn.functional.cross_entropy(scores, ids[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    found = trained(tier, material, tmp_path)
    for name, parameter in reference.named_parameters():
        # the loss is summed and divided elsewhere; a first step of Adam turns rounding into a share of the step
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-4, atol=2e-5)


def test_accumulated_gradients_are_those_of_the_whole_batch(material: Material, tmp_path: Path) -> None:
    whole = trained(LLAMA, material, tmp_path / "whole")
    parts = trained(replace(LLAMA, device_batch=1), material, tmp_path / "parts")
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-3, atol=1e-4)


class Interrupted(Exception):
    """Stands for a killed process."""


@pytest.mark.parametrize(("tier", "arm"), [(GPT2, "softmax"), (LLAMA, "combo2"), (GPT2, "output_gate")])
def test_a_run_that_was_interrupted_ends_with_the_same_weights(
    tier: Tier, arm: str, material: Material, tmp_path: Path
) -> None:
    def stop(description: str, done: int, total: int) -> None:
        if done == 6:
            raise Interrupted

    expected = trained(tier, material, tmp_path / "whole", arm)
    with pytest.raises(Interrupted):
        fit(fresh(tier, material, arm), material, tier, 0, tmp_path / "parts", stop)
    before = last_checkpoint(tmp_path / "parts")
    assert before is not None
    assert before.name == "checkpoint-5"
    assert_equal(trained(tier, material, tmp_path / "parts", arm), expected)


def test_a_half_written_checkpoint_is_passed_over(tmp_path: Path) -> None:
    for step in (3, 9):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text('{"global_step": 3}', encoding="utf8")
    (tmp_path / "checkpoint-9" / "trainer_state.json").write_text('{"global_', encoding="utf8")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-3"
    assert not (tmp_path / "checkpoint-9").exists()
    assert last_checkpoint(tmp_path / "nothing") is None


def test_a_checkpoint_is_trained_once_and_loads_with_its_arm(
    data: DataSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = Order(LLAMA, registry.build("arms", "combo2"), 3, data, tmp_path)
    assert find(order) is None
    made = find_or_train(order)
    note = made.note
    assert (note["arm"], note["seed"], note["steps"], note["tokens"]) == ("combo2", 3, 8, 2048)
    assert len(note["losses"]) == 8
    assert {"config.json", "model.safetensors", "tokenizer.json", "training.json"} <= {
        path.name for path in made.folder.iterdir()
    }
    assert json.loads((made.folder / "config.json").read_text(encoding="utf8"))["quant_bench_arm"] == "combo2"
    assert not list(tmp_path.rglob("checkpoint-*"))

    def never(*_: Any) -> Any:
        raise AssertionError("trained again")

    monkeypatch.setattr(checkpoints, "fit", never)
    assert find_or_train(order) == find(order) == made
    model = models.load_model(str(made.folder))
    assert models.arm_of(model) == "combo2"
    assert parameter_counts(model) == {key: note[key] for key in ("parameters", "parameters_without_embeddings")}


def test_whatever_decides_the_weights_is_in_the_key(data: DataSource, tmp_path: Path) -> None:
    softmax, other = registry.build("arms", "softmax"), registry.build("arms", "clipped_softmax(gamma=-0.05)")
    base = Order(GPT2, softmax, 0, data, tmp_path)
    changes = (
        base,
        replace(base, arm=other),
        replace(base, arm=registry.build("arms", "clipped_softmax")),
        replace(base, seed=1),
        replace(base, tier=replace(GPT2, bf16=True)),
        replace(base, tier=replace(GPT2, learning_rate=1e-4)),
    )
    keys = [key_of(order, "data") for order in changes] + [key_of(base, "other data")]
    assert len(set(keys)) == len(keys)
    assert key_of(replace(base, cache=tmp_path / "elsewhere"), "data") == keys[0]


def test_a_training_that_diverges_leaves_no_checkpoint(data: DataSource, tmp_path: Path) -> None:
    order = Order(replace(GPT2, learning_rate=1e30), registry.build("arms", "softmax"), 0, data, tmp_path)
    with pytest.raises(ModelError, match="diverged"):
        find_or_train(order)
    assert find(order) is None


def test_a_training_leaves_the_seeds_of_its_process_alone(material: Material, tmp_path: Path) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    trained(GPT2, material, tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_parameters_are_counted_without_embeddings(material: Material) -> None:
    micro = TIERS["micro"]
    counts = parameter_counts(fresh(replace(micro, vocabulary=64), material))
    assert counts["parameters_without_embeddings"] == _without_embeddings(micro)
    # a tied head is no further parameter
    assert counts["parameters"] == _without_embeddings(micro) + 64 * micro.width
    text = {name: tier for name, tier in TIERS.items() if tier.task == "text" and not tier.base}
    sizes = {name: round(_without_embeddings(tier) / 1e6, 1) for name, tier in text.items()}
    assert sizes == {"micro": 1.0, "10m": 10.6, "50m": 49.6, "124m": 85.0, "350m": 303.6}


def _without_embeddings(tier: Tier) -> int:
    layer = 4 * tier.width**2 + 3 * tier.width * tier.inner + 2 * tier.width
    return tier.layers * layer + tier.width


@pytest.mark.slow
def test_a_killed_process_goes_on_to_the_same_weights_bit_for_bit(tmp_path: Path) -> None:
    arguments = ["train", "--tier", "toy", "--arm", "sink_logit", "--text", "python_docs", "--max-steps", "40"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def command(cache: str) -> list[str]:
        return [sys.executable, "-m", "quant_bench", *arguments, "--cache", str(tmp_path / cache)]

    subprocess.run(command("whole"), env=environment, check=True)
    process = subprocess.Popen(command("killed"), env=environment)
    limit = time.monotonic() + 300
    while not list((tmp_path / "killed").rglob("checkpoint-1*/trainer_state.json")):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < limit
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not list((tmp_path / "killed").rglob("training.json"))
    subprocess.run(command("killed"), env=environment, check=True)
    (whole,) = (tmp_path / "whole").rglob("model.safetensors")
    (resumed,) = (tmp_path / "killed").rglob("model.safetensors")
    assert whole.parent.name == resumed.parent.name
    assert_equal(load_file(whole), load_file(resumed))
    notes = [json.loads((path.parent / "training.json").read_text(encoding="utf8")) for path in (whole, resumed)]
    assert notes[0]["losses"] == notes[1]["losses"]
