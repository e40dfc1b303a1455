"""Cells end to end on a tiny saved model: resume, skipping, failures, differences to float."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quant_bench import calibrate, registry
from quant_bench.errors import RecordError, SpecError, UnknownPlugin
from quant_bench.identity import ModelIdentity
from quant_bench.model import LanguageModel
from quant_bench.plan import PlannedCell, planned_cells, sample_key
from quant_bench.quantizer import Calibration
from quant_bench.record import Record
from quant_bench.runner import Outcome, RunOptions, _check_writable, run_cells
from quant_bench.samples import SampleStore
from quant_bench.score import Delta
from quant_bench.weights import Weights

TASKS = ("python_docs(limit=3,seq_length=32)", "outliers(limit=3,seq_length=32,text=python_docs)")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pydoc_data import topics

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False)
    words.train_from_iterator([topics.topics["assert"]], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("tiny-llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def options(model_folder: Path, tmp_path: Path) -> RunOptions:
    return RunOptions(
        str(model_folder),
        quantizers=("none", "w8a8", "w4a4-integer"),
        tasks=TASKS,
        results=tmp_path / "results",
        cache=tmp_path / "cache",
    )


def texts(results: Path) -> dict[str, dict[str, Any]]:
    """Every record without what may differ between two runs of one cell."""
    found = {}
    for path in sorted(results.rglob("*.json")):
        record = Record.read(path, results)
        content = replace(record, environment={}, took_seconds=0.0, prepare_seconds=0.0, peak_memory_bytes=None)
        found[str(path.relative_to(results))] = content.to_text()
    return found


def by_task(outcomes: list[Outcome], quantizer: str, task: str) -> Record:
    (record,) = [o.record for o in outcomes if o.cell.quantizer == quantizer and o.cell.task.startswith(task)]
    assert record is not None
    return record


def test_every_cell_is_measured_once_and_then_skipped(options: RunOptions) -> None:
    first = run_cells(options)
    assert [o.state for o in first] == ["measured"] * 6
    assert not any(o.skipped for o in first)
    before = {path: path.read_bytes() for path in options.results.rglob("*.json")}
    second = run_cells(options)
    assert all(o.skipped for o in second)
    assert {path: path.read_bytes() for path in options.results.rglob("*.json")} == before


def test_a_cell_without_its_difference_to_float_says_so(options: RunOptions, caplog: pytest.LogCaptureFixture) -> None:
    alone = replace(options, quantizers=("w8a8",), tasks=TASKS[:1])
    run_cells(alone)
    assert "no difference to float: the cache has no answers of the quantizer none" in caplog.text
    caplog.clear()
    (_, again) = run_cells(replace(alone, quantizers=("none", "w8a8")))
    assert again.record is not None
    assert again.record.scores[0].delta is not None
    # from the cache
    run_cells(replace(alone, quantizers=("w4a4",)))
    assert caplog.text == ""


def test_quantizers_that_ask_for_as_many_sequences_share_them(
    options: RunOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = calibrate.batches_for

    def counted(model: LanguageModel, text: Any, *, sequences: int, seed: int) -> Calibration:
        asked.append(sequences)
        return real(model, text, sequences=sequences, seed=seed)

    monkeypatch.setattr(calibrate, "batches_for", counted)
    recipes = ("smoothquant:w8a8", "gptq:w4a16", "awq:w4a16(calibration_batches=1)", "w8a8")
    outcomes = run_cells(replace(options, quantizers=recipes, tasks=TASKS[:1]))
    assert sorted(asked) == [8, 32]
    records = {name: by_task(outcomes, name, "python_docs") for name in {o.cell.quantizer for o in outcomes}}
    found = {name.partition("(")[0]: record for name, record in records.items()}
    assert found["smoothquant"].identity["calibration_sha256"] == found["gptq"].identity["calibration_sha256"]
    given = {name: record.settings["calibration"] for name, record in found.items()}
    counts = {name: (known["usable"], known["wanted"]) for name, known in given.items()}
    assert counts == {"smoothquant": (32, 32), "gptq": (32, 32), "awq": (8, 8), "rtn": (0, 0)}


def test_the_same_cell_and_seed_give_the_same_record(options: RunOptions, tmp_path: Path) -> None:
    again = replace(options, results=tmp_path / "again", cache=tmp_path / "other cache")
    run_cells(options)
    run_cells(again)
    assert texts(options.results) == texts(again.results)


def test_a_quantized_score_carries_its_paired_difference_to_float(options: RunOptions) -> None:
    outcomes = run_cells(options)
    float_record = by_task(outcomes, "none", "python_docs")
    record = by_task(outcomes, "rtn", "python_docs")
    (base,) = [s for s in float_record.scores if s.metric.name == "token_perplexity"]
    (score,) = [s for s in record.scores if s.metric.name == "token_perplexity"]
    assert base.delta is None
    assert score.delta is not None
    assert score.delta.value == pytest.approx(score.value - base.value, rel=1e-9)
    assert {s.metric.name for s in record.scores} >= {"kl", "top1_agreement"}


def test_changed_weights_are_another_model(options: RunOptions, model_folder: Path, tmp_path: Path) -> None:
    run_cells(options)
    import shutil

    other = tmp_path / "copy" / model_folder.name
    shutil.copytree(model_folder, other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] += 0.5
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    # same results folder and even the same cell names: the records are found, and found to be of other weights
    moved = tmp_path / "away"
    model_folder.rename(moved)
    shutil.copytree(other, model_folder)
    try:
        outcomes = run_cells(options)
    finally:
        shutil.rmtree(model_folder)
        moved.rename(model_folder)
    assert not any(o.skipped for o in outcomes)


def test_sample_keys_differ_by_every_part_of_a_cell(options: RunOptions) -> None:
    cells = planned_cells(replace(options, seeds=(0, 1)))
    identity = ModelIdentity("name", "folder", None, "a", "b", "float32")
    keys = {sample_key(cell, identity, None) for cell in cells}
    assert len(keys) == len(cells)
    assert sample_key(cells[0], replace(identity, weights_sha256="c"), None) not in keys


def test_a_lost_reference_is_measured_again_before_a_difference(options: RunOptions) -> None:
    run_cells(replace(options, quantizers=("none",)))
    for path in (options.cache or Path()).rglob("*.parquet"):
        path.unlink()
    outcomes = run_cells(options)
    record = by_task(outcomes, "rtn", "python_docs")
    assert any(score.delta is not None for score in record.scores)


@pytest.mark.parametrize("folder", ["samples", "probes"])
@pytest.mark.parametrize("damage", ["gone", "cut", "overwritten"])
def test_a_damaged_cache_costs_time_and_no_difference(options: RunOptions, folder: str, damage: str) -> None:
    run_cells(replace(options, quantizers=("none",)))
    files = [path for path in ((options.cache or Path()) / folder).iterdir() if path.is_file()]
    assert files
    for path in files:
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-100] if damage == "cut" else b"junk" * 100)
    outcomes = run_cells(options)
    assert {o.state for o in outcomes} == {"measured"}
    record = by_task(outcomes, "rtn", "python_docs")
    assert any(score.delta is not None for score in record.scores)
    assert {score.metric.name for score in record.scores} >= {"kl", "top1_agreement"}
    assert all(o.skipped for o in run_cells(options))


def test_a_cell_measured_before_its_float_cell_gets_its_difference(options: RunOptions) -> None:
    (alone, _) = run_cells(replace(options, quantizers=("w8a8",)))
    assert alone.record is not None
    assert all(score.delta is None for score in alone.record.scores)
    both = replace(options, quantizers=("none", "w8a8"))
    record = by_task(run_cells(both), "rtn", "python_docs")
    assert any(score.delta is not None for score in record.scores)
    assert "kl" in {score.metric.name for score in record.scores}
    assert all(o.skipped for o in run_cells(both))


ARM = """
from dataclasses import dataclass

from quant_bench.arm import Arm


@dataclass(frozen=True)
class Louder(Arm):
    \"\"\"Attention times a factor.

    Source: this test.
    \"\"\"

    factor: float = 1.5

    def attach(self, model):
        for path in model.layout.attentions:
            projection = model.module.get_submodule(path).o_proj
            projection.weight.data = projection.weight.data * self.factor
        return model
"""


@pytest.fixture
def armed(options: RunOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunOptions:
    """A run that names a third party's arm, too."""
    (tmp_path / "plugins" / "arms").mkdir(parents=True)
    (tmp_path / "plugins" / "arms" / "louder.py").write_text(ARM, encoding="utf-8")
    monkeypatch.setenv("QUANT_BENCH_PATH", str(tmp_path / "plugins"))
    return replace(options, arms=("louder", "softmax"), quantizers=("none", "w8a8-static"), tasks=TASKS[:1])


def arm_deltas(outcomes: list[Outcome]) -> dict[tuple[str, str], Delta | None]:
    """Difference to softmax of the perplexity, by arm and recipe."""
    return {
        (o.cell.arm, o.cell.quantizer.partition("(")[0]): o.record.scores[0].arm_delta
        for o in outcomes
        if o.record is not None
    }


def perplexity(outcomes: list[Outcome], arm: str, quantizer: str) -> float:
    (record,) = [o.record for o in outcomes if o.cell.arm == arm and o.cell.quantizer.startswith(quantizer)]
    assert record is not None
    assert record.scores[0].metric.name == "token_perplexity"
    return record.scores[0].value


def test_softmax_goes_first_and_the_other_arms_carry_their_paired_difference_to_it(armed: RunOptions) -> None:
    outcomes = run_cells(armed)
    assert [o.cell.arm for o in outcomes] == ["softmax", "softmax", "louder", "louder"]
    deltas = arm_deltas(outcomes)
    for quantizer in ("none", "rtn"):
        assert deltas["softmax", quantizer] is None
        delta = deltas["louder", quantizer]
        assert delta is not None
        difference = perplexity(outcomes, "louder", quantizer) - perplexity(outcomes, "softmax", quantizer)
        assert delta.value == pytest.approx(difference, rel=1e-9)
        assert delta.reference == "softmax"
        assert delta.ci95 is not None
        assert delta.ci95[0] < delta.value < delta.ci95[1]
    assert deltas["louder", "none"] != deltas["louder", "rtn"]
    assert all(o.skipped for o in run_cells(armed))


def test_a_later_run_of_an_arm_finds_the_softmax_cells_of_an_earlier_one(armed: RunOptions) -> None:
    together = arm_deltas(run_cells(replace(armed, results=armed.results / "together")))
    cells = replace(armed, cache=armed.results / "cache")
    run_cells(replace(cells, arms=("softmax",)))
    later = arm_deltas(run_cells(replace(cells, arms=("louder",))))
    assert later["louder", "rtn"] is not None
    assert later == {key: delta for key, delta in together.items() if key[0] == "louder"}


def test_lost_softmax_samples_are_measured_again_where_both_are_named(armed: RunOptions) -> None:
    run_cells(replace(armed, arms=("softmax",)))
    for path in (armed.cache or Path()).rglob("*.parquet"):
        path.unlink()
    alone = arm_deltas(run_cells(replace(armed, arms=("louder",))))
    assert alone == {("louder", "none"): None, ("louder", "rtn"): None}
    again = run_cells(armed)
    assert not any(o.skipped for o in again)
    assert arm_deltas(again)["louder", "rtn"] is not None
    assert all(o.skipped for o in run_cells(armed))


def test_a_softmax_cell_that_runs_again_for_another_arm_keeps_its_difference_to_float(armed: RunOptions) -> None:
    run_cells(replace(armed, arms=("softmax",)))
    lost = list((armed.cache or Path()).rglob("*.parquet"))
    run_cells(replace(armed, arms=("louder",), quantizers=("none",)))
    for path in lost:
        path.unlink()
    outcomes = run_cells(armed)
    assert [o.cell.arm for o in outcomes if o.skipped] == ["louder"]
    (record,) = [o.record for o in outcomes if o.cell.arm == "softmax" and o.cell.quantizer != "none"]
    assert record is not None
    assert record.scores[0].delta is not None


def test_arms_that_have_weights_of_their_own_are_compared(armed: RunOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    identity, load = Weights.identity, Weights.load

    def own(weights: Weights, planned: PlannedCell) -> ModelIdentity | None:
        found = identity(weights, planned)
        return None if found is None else replace(found, weights_sha256=planned.cell.arm.ljust(64, "0"))

    def loaded(weights: Weights, planned: PlannedCell) -> LanguageModel:
        model, found = load(weights, planned), own(weights, planned)
        assert found is not None
        model.identity = found
        return model

    monkeypatch.setattr(Weights, "identity", own)
    monkeypatch.setattr(Weights, "load", loaded)
    outcomes = run_cells(armed)
    deltas = arm_deltas(outcomes)
    for quantizer in ("none", "rtn"):
        delta = deltas["louder", quantizer]
        assert delta is not None
        difference = perplexity(outcomes, "louder", quantizer) - perplexity(outcomes, "softmax", quantizer)
        assert delta.value == pytest.approx(difference, rel=1e-9)
    assert all(o.skipped for o in run_cells(armed))


def test_softmax_samples_of_another_convention_are_not_compared_with(armed: RunOptions) -> None:
    run_cells(replace(armed, arms=("softmax",)))
    store = SampleStore(armed.cache or Path())
    for path in store.folder.glob("*.parquet"):
        samples = store.read(path.stem)
        assert samples is not None
        assert samples.convention == "P1 seq=32 prefix=none"
        store.write(path.stem, replace(samples, convention="P1 seq=31 prefix=none"))
    deltas = arm_deltas(run_cells(replace(armed, arms=("louder",))))
    assert deltas == {("louder", "none"): None, ("louder", "rtn"): None}


def test_a_missing_corpus_blocks_its_cell_and_no_other(options: RunOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("QUANT_BENCH_DATA", raising=False)
    mirror = options.results.parent / "empty mirror"
    mirror.mkdir()
    outcomes = run_cells(replace(options, quantizers=("none",), tasks=("wikitext2(limit=1)", *TASKS), data=mirror))
    states = {o.cell.task.partition("(")[0]: o.state for o in outcomes}
    assert states == {"wikitext2": "blocked", "python_docs": "measured", "outliers": "measured"}
    blocked = by_task(outcomes, "none", "wikitext2")
    assert "wiki.test.raw" in (blocked.reason or "")


def test_a_failure_does_not_cost_a_finished_result(options: RunOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = replace(options, quantizers=("none",), tasks=TASKS[:1])
    (outcome,) = run_cells(alone)
    before = outcome.path.read_bytes()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("quant_bench.models.load_model", broken)
    (again,) = run_cells(replace(alone, force=True))
    assert again.state == "failed"
    assert outcome.path.read_bytes() == before


def test_a_failed_cell_says_why_and_is_tried_again(
    options: RunOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alone = replace(options, quantizers=("none",), tasks=TASKS[:1])
    # with half a surrogate pair, as in a name of a file that is no text, and longer than a record may be
    error = RuntimeError("out of luck \udcff" + "!" * 20_000)
    with monkeypatch.context() as patch:
        patch.setattr("quant_bench.models.load_model", lambda *_: (_ for _ in ()).throw(error))
        (failed,) = run_cells(alone)
    assert failed.state == "failed"
    assert failed.record is not None
    assert failed.record.reason is not None
    assert failed.record.reason.startswith("RuntimeError: out of luck \\udcff!")
    assert len(failed.record.reason) == 10_000
    assert "out of luck \\udcff" in caplog.text
    (again,) = run_cells(alone)
    assert (again.state, again.skipped) == ("measured", False)


def test_results_that_cannot_be_written_are_found_before_the_work(options: RunOptions, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    with pytest.raises(RecordError, match="cannot write"):
        run_cells(replace(options, results=file / "results"))


def test_what_stands_where_a_record_belongs_is_found_before_the_work(options: RunOptions) -> None:
    *_, last = planned_cells(options)
    place = last.cell.path(options.results)
    place.mkdir(parents=True)
    with pytest.raises(RecordError, match="is in the way"):
        run_cells(options)
    place.rmdir()
    place.parent.rmdir()
    place.parent.write_text("a file")
    with pytest.raises(RecordError, match="is in the way"):
        run_cells(options)
    place.parent.unlink()
    place.parent.symlink_to(options.results, target_is_directory=True)
    with pytest.raises(RecordError, match="is a link"):
        run_cells(options)
    assert not list(options.results.rglob("*.json"))


def test_looking_whether_results_can_be_written_disturbs_no_other_run(tmp_path: Path) -> None:
    results = tmp_path / "results"

    def look() -> None:
        for _ in range(200):
            _check_writable(results)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(look) for _ in range(4)]:
            done.result()
    assert list(results.iterdir()) == []


def test_a_task_that_cannot_prepare_costs_its_own_cell(options: RunOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(registry.load("tasks", "outliers"), "prepare", broken)
    outcomes = run_cells(replace(options, quantizers=("none",)))
    states = {o.cell.task.partition("(")[0]: o.state for o in outcomes}
    assert states == {"python_docs": "measured", "outliers": "failed"}


def test_a_missing_device_blocks_its_cells(options: RunOptions) -> None:
    outcomes = run_cells(replace(options, device="cuda:99"))
    assert {o.state for o in outcomes} == {"blocked"}
    assert all("CUDA devices" in o.record.reason for o in outcomes if o.record is not None and o.record.reason)


def test_a_damaged_record_of_a_cell_that_fails_under_force_is_replaced_and_stops_no_other(
    options: RunOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = replace(options, quantizers=("none",), force=True)
    first, _ = planned_cells(alone)
    path = first.cell.path(options.results)
    path.parent.mkdir(parents=True)
    path.write_text("{")

    def broken(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(registry.load("tasks", "python_docs"), "evaluate", broken)
    assert [outcome.state for outcome in run_cells(alone)] == ["failed", "measured"]
    assert Record.read(path, options.results).state == "failed"


def test_a_seed_named_twice_is_one_cell(options: RunOptions) -> None:
    assert len(planned_cells(replace(options, seeds=(0, 1, 0)))) == 2 * len(planned_cells(options))


def test_a_key_knows_the_dtype_and_not_the_name(options: RunOptions) -> None:
    def key(model: str, dtype: str) -> str:
        (planned, *_) = planned_cells(replace(options, model=model, dtype=dtype))  # type: ignore[arg-type]
        return sample_key(planned, ModelIdentity(model, "folder", None, "w", "t", dtype), None)

    assert key("my model", "float32") == key("m", "float32")
    assert key("my model", "bfloat16") == key("m", "bfloat16") != key("m", "float32")


@pytest.mark.parametrize("seed", [-1, 1 << 32])
def test_a_seed_that_no_generator_takes_is_refused_at_once(options: RunOptions, seed: int) -> None:
    with pytest.raises(SpecError, match="seed"):
        run_cells(replace(options, seeds=(0, seed)))


def test_an_error_of_ours_has_no_traceback(options: RunOptions, caplog: pytest.LogCaptureFixture) -> None:
    (outcome,) = run_cells(replace(options, quantizers=("none",), tasks=("python_docs(seq_length=5000)",)))
    assert outcome.state == "failed"
    assert "Traceback" not in caplog.text


def test_a_dry_run_writes_nothing(options: RunOptions) -> None:
    outcomes = run_cells(replace(options, dry_run=True))
    assert {o.state for o in outcomes} == {"planned"}
    assert not options.results.exists()


def test_two_names_of_one_quantizer_are_one_cell(options: RunOptions) -> None:
    cells = planned_cells(replace(options, quantizers=("w8a8", "rtn", "rtn(weight_bits=8)")))
    assert len({cell.cell for cell in cells}) == len(cells) == 2


def test_an_unknown_quantizer_is_named_before_anything_runs(options: RunOptions) -> None:
    with pytest.raises(UnknownPlugin, match="rtm"):
        run_cells(replace(options, quantizers=("rtm",)))


@pytest.mark.slow
def test_a_killed_run_continues_to_the_same_table(options: RunOptions, model_folder: Path, tmp_path: Path) -> None:
    whole = replace(options, results=tmp_path / "whole", cache=tmp_path / "whole cache")
    run_cells(whole)
    command = [sys.executable, "-m", "quant_bench", "run", str(model_folder), "--results", str(options.results)]
    for quantizer in options.quantizers:
        command += ["--quantizer", quantizer]
    for task in options.tasks:
        command += ["--task", task]
    environment = {**os.environ, "QUANT_BENCH_CACHE": str(options.cache)}
    for records in (1, 3):
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while len(list(options.results.rglob("*.json"))) < records and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert texts(options.results) == texts(whole.results)


def test_free_memory_is_looked_after_at_every_step_of_a_task(
    options: RunOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = []
    monkeypatch.setattr("quant_bench.runner.HeapWatch.check", lambda watch: checks.append(watch))
    run_cells(replace(options, quantizers=("none",), tasks=TASKS[:1]))
    assert len(checks) == 3
    assert len(set(map(id, checks))) == 1
