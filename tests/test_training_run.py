"""A run over a tier: each arm and seed is asked of its own checkpoint, and what was held out from it is the same."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from quant_bench import models, registry
from quant_bench.cli import main
from quant_bench.data import DataSource
from quant_bench.errors import ModelError, NotApplicable
from quant_bench.probe import Probe
from quant_bench.record import Record
from quant_bench.runner import Outcome, RunOptions, run_cells
from quant_bench.task import Context
from quant_bench.tiny import tiny_model
from quant_bench.training import checkpoints, own_data
from quant_bench.training.checkpoints import Order, find_or_train
from quant_bench.training.material import ToyMaterial, material_of
from quant_bench.training.tiers import tier_of
from quant_bench.weights import calibration_of

MODEL = "tier:toy(text=python_docs,tokens=8192)"
TASKS = ("validation(limit=6)", "python_docs(limit=2)", "outliers(limit=3,text=held_out)")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def options(cache: Path, tmp_path: Path) -> RunOptions:
    return RunOptions(
        MODEL,
        arms=("softmax", "sink_logit"),
        quantizers=("none", "w4a4-integer"),
        tasks=TASKS,
        results=tmp_path / "results",
        cache=cache,
    )


def never(*_: Any) -> Any:
    """In place of `checkpoints.fit`."""
    raise ModelError("nothing was to be trained")


def records(outcomes: list[Outcome]) -> dict[tuple[str, str, str, int], Record]:
    found = {}
    for outcome in outcomes:
        assert outcome.record is not None
        cell = outcome.cell
        found[cell.arm, cell.quantizer.partition("(")[0], cell.task.partition("(")[0], cell.seed] = outcome.record
    return found


def test_cells_are_asked_of_the_checkpoint_of_their_arm_and_seed(options: RunOptions, cache: Path) -> None:
    outcomes = run_cells(replace(options, seeds=(0, 1)))
    assert {outcome.state for outcome in outcomes} == {"measured"}
    found = records(outcomes)
    for seed in (0, 1):
        for arm in options.arms:
            order = Order(tier_of(MODEL), registry.build("arms", arm), seed, DataSource(), cache)
            folder = find_or_train(order).folder
            expected = models.identify(str(folder), models.LoadOptions(cache=cache)).weights_sha256
            ours = {
                record.identity["weights_sha256"] for key, record in found.items() if key[0] == arm and key[3] == seed
            }
            assert ours == {expected}
            (note,) = {record.identity["note"] for key, record in found.items() if key[0] == arm and key[3] == seed}
            assert note == f"trained here with arm {arm} and seed {seed} (cpu, threads 1, torch {torch.__version__})"
    weights = {record.identity["weights_sha256"] for record in found.values()}
    assert len(weights) == 4
    # what is held out depends on neither arm nor seed, so every difference is paired
    validations = [record for key, record in found.items() if key[2] == "validation"]
    assert len({record.identity["data_sha256"] for record in validations}) == 1
    for (arm, quantizer, task, _), record in found.items():
        if task == "validation":
            scores = {score.metric.name: score for score in record.scores}
            assert (scores["loss"].arm_delta is not None) == (arm != "softmax")
            assert (scores["loss"].delta is not None) == (quantizer != "none")


def test_arms_that_are_joined_have_records_with_the_settings_of_each(options: RunOptions) -> None:
    arms = ("softmax", "renorm(gate=projection)+output_gate")
    found = records(run_cells(replace(options, arms=arms, quantizers=("none",), tasks=TASKS[:1])))
    record = found["output_gate+renorm(gate=projection)", "none", "validation", 0]
    assert record.settings["arm"] == {"output_gate": {"kind": "elementwise"}, "renorm": {"gate": "projection"}}
    assert all(score.arm_delta is not None for score in record.scores)
    assert Record.read(record.cell.path(options.results), options.results).settings == record.settings


def test_a_second_run_trains_and_measures_nothing(options: RunOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    again = replace(options, model="tier:toy(text=python_docs,steps=2)")
    assert {outcome.state for outcome in run_cells(options)} == {"measured"}
    monkeypatch.setattr(checkpoints, "fit", never)
    # the same tier, written in another way
    assert all(outcome.skipped for outcome in run_cells(again))


def test_a_dry_run_trains_nothing(options: RunOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "fit", never)
    outcomes = run_cells(replace(options, dry_run=True, cache=tmp_path / "empty"))
    assert {outcome.state for outcome in outcomes} == {"planned"}
    assert not list((tmp_path / "empty").rglob("model.safetensors"))


def test_a_training_that_fails_costs_its_own_cells_only(options: RunOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {outcome.state for outcome in run_cells(options)} == {"measured"}
    fit = checkpoints.fit

    def fail(model: Any, *rest: Any) -> Any:
        if models.arm_of(model) == "norm_gate":
            raise ModelError("diverged")
        return fit(model, *rest)

    monkeypatch.setattr(checkpoints, "fit", fail)
    outcomes = run_cells(replace(options, arms=("norm_gate", "softmax1"), quantizers=("none",)))
    assert {(outcome.cell.arm, outcome.state) for outcome in outcomes} == {
        ("norm_gate", "failed"),
        ("softmax1", "measured"),
    }
    failed = next(outcome.record for outcome in outcomes if outcome.state == "failed")
    assert failed is not None
    assert failed.reason == "ModelError: diverged"


def test_a_training_that_fails_leaves_what_was_measured(
    options: RunOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {str(outcome.path): outcome.path.read_text() for outcome in run_cells(options)}
    monkeypatch.setattr(checkpoints, "fit", never)
    outcomes = run_cells(replace(options, cache=tmp_path / "empty"))
    assert {outcome.state for outcome in outcomes} == {"failed"}
    assert {str(outcome.path): outcome.path.read_text() for outcome in outcomes} == before


def test_validation_is_the_loss_that_transformers_gives_and_its_parts(cache: Path) -> None:
    data = DataSource(allow_hub=False)
    made = find_or_train(Order(tier_of(MODEL), registry.build("arms", "sink_logit"), 0, data, cache))
    model = models.load_model(str(made.folder))
    context = Context(data=data, cache=cache, probe=Probe.off())
    found = registry.build("tasks", "validation(limit=5)").evaluate(model, context)
    rows = torch.from_numpy(own_data.held_out(model, data, cache).rows[:5])
    module: Any = model.module
    losses = []
    for index, row in enumerate(rows):
        expected = float(module(input_ids=row[None], labels=row[None]).loss)
        assert found.samples["nll"][index] / found.samples["tokens"][index] == pytest.approx(expected, rel=1e-5)
        scores = module(input_ids=row[None]).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(scores, row[1:], reduction="none").numpy())
    material = material_of(tier_of(MODEL), data, cache)
    assert isinstance(material, ToyMaterial)
    triggers = {2, 3, 4}
    copies = [loss[place] for row, loss in zip(rows.tolist(), losses, strict=True)
              for place in range(len(loss)) if row[place] in triggers]  # fmt: skip
    assert found.samples["copies"].sum() == len(copies)
    assert found.samples["copy_nll"].sum() == pytest.approx(float(np.sum(copies)), rel=1e-5)
    total = float(np.sum(losses))
    assert found.samples["other_nll"].sum() == pytest.approx(total - float(np.sum(copies)), rel=1e-5)
    least = material.source.surprise(rows.numpy()).sum()
    assert found.samples["excess_nll"].sum() == pytest.approx(total - float(np.sum(copies)) - least, rel=1e-4)


def test_models_trained_here_are_calibrated_on_their_own_training_sequences(cache: Path) -> None:
    data = DataSource(allow_hub=False)
    seen = []
    for arm in ("softmax", "sink_logit"):
        made = find_or_train(Order(tier_of(MODEL), registry.build("arms", arm), 0, data, cache))
        seen.append(calibration_of(models.load_model(str(made.folder)), data, cache, 16, 3))
    first, second = seen
    assert first.sha256 == second.sha256
    rows = torch.cat(first.batches)
    assert rows.shape == (16, 64)
    assert (rows[:, 0] == 0).all()
    kept = {tuple(row) for row in own_data.held_out(models.load_model(str(made.folder)), data, cache).rows.tolist()}
    # only what cannot help coming out alike, such as ", , , ,", is in both
    assert all(row[3:] == row[1:-2] for row in kept & {tuple(row) for row in rows.tolist()})


def test_other_models_have_nothing_held_out(cache: Path) -> None:
    context = Context(data=DataSource(allow_hub=False), cache=cache, probe=Probe.off())
    with pytest.raises(NotApplicable, match="not trained here"):
        registry.build("tasks", "validation").evaluate(tiny_model("llama"), context)


def test_a_tier_has_no_revision(options: RunOptions) -> None:
    with pytest.raises(ModelError, match="no revision"):
        run_cells(replace(options, revision="main"))


def test_the_command_trains_every_arm_and_seed(cache: Path) -> None:
    arguments = ["train", "--tier", "toy", "--text", "python_docs", "--max-steps", "2", "--cache", str(cache)]
    arguments += ["--arm", "softmax", "--arm", "sink_logit", "--seed", "0", "--seed", "1"]
    found = CliRunner().invoke(main, arguments)
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    assert [line.split()[:4] for line in lines] == [
        ["trained", arm, "seed", seed] for seed in ("0", "1") for arm in ("softmax", "sink_logit")
    ]
    folders = [Path(line.split()[-1]) for line in lines]
    assert len(set(folders)) == 4
    assert all((folder / "model.safetensors").is_file() for folder in folders)


@pytest.mark.parametrize(
    ("extra", "code", "message"),
    [
        (["--tier", "nano"], 2, "'nano' is not one of"),
        (["--tier", "toy", "--text", "no-such-text"], 2, "no text 'no-such-text'"),
        (["--tier", "toy", "--arm", "nothing"], 2, "no arm named 'nothing'"),
        (["--tier", "toy", "--seed", str(1 << 32)], 2, "4294967295"),
        (["--tier", "toy", "--device", "tpu"], 2, "a device is cpu, cuda or cuda:N"),
    ],
)
def test_the_command_says_what_it_does_not_understand(extra: list[str], code: int, message: str, cache: Path) -> None:
    found = CliRunner().invoke(main, ["train", "--cache", str(cache), *extra])
    assert found.exit_code == code
    assert message in " ".join(found.output.split())


def test_the_command_ends_with_1_when_a_training_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "fit", never)
    arguments = ["train", "--tier", "toy", "--text", "python_docs", "--max-steps", "2", "--cache", str(tmp_path)]
    found = CliRunner().invoke(main, arguments)
    assert found.exit_code == 1
    assert found.stdout.startswith("failed")
