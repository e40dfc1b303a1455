"""A folder with a quantized model is a model: its cells are those of the float model and of its recipe."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from quant_bench import models, registry
from quant_bench.cli import main
from quant_bench.errors import ModelError, SpecError
from quant_bench.models.manifest import MANIFEST
from quant_bench.plan import RunOptions
from quant_bench.record import Record
from quant_bench.runner import Outcome, run_cells
from quant_bench.tiny import tiny_model

TASKS = ("python_docs(limit=3,seq_length=32)", "parity(text=python_docs)")
RECIPE = "rtn(activation_bits=4,execution=integer,kv_bits=8,weight_bits=4)"


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pydoc_data import topics

    words = Tokenizer(BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False)
    words.train_from_iterator([topics.topics["assert"]], trainer)
    model = tiny_model("llama", vocab_size=300)
    model.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    folder = tmp_path_factory.mktemp("float")
    models.save(model, folder)
    return folder


@pytest.fixture(scope="module")
def saved(floats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "saved"
    done = call("quantize", floats, "--quantizer", RECIPE, "--out", folder)
    assert done.exit_code == 0, done.output
    assert RECIPE in done.output
    return folder


@pytest.fixture
def options(tmp_path: Path) -> RunOptions:
    return RunOptions("", tasks=TASKS, results=tmp_path / "results", cache=tmp_path / "cache")


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def measured(outcomes: list[Outcome]) -> dict[str, Record]:
    found = {}
    for outcome in outcomes:
        assert outcome.record is not None
        assert outcome.record.state == "measured", outcome.record.reason
        found[outcome.cell.task] = outcome.record
    return found


def test_it_gives_the_scores_of_quantizing_again(floats: Path, saved: Path, options: RunOptions) -> None:
    asked = dataclasses.replace(options, model=str(floats), quantizers=("none", RECIPE))
    direct = run_cells(asked)
    first = measured([outcome for outcome in direct if outcome.cell.quantizer != "none"])
    outcomes = run_cells(dataclasses.replace(options, model=str(saved)))
    loaded = measured(outcomes)
    digest = hashlib.sha256((saved / MANIFEST).read_bytes()).hexdigest()
    for task, record in loaded.items():
        assert record.cell == first[task].cell
        assert record.scores == first[task].scores
        assert any(score.delta is not None for score in record.scores) == ("parity" not in task)
        assert record.coverage == first[task].coverage
        assert record.settings["quantizer"] == first[task].settings["quantizer"]
        assert record.identity == {**first[task].identity, "quantized_sha256": digest}
        assert "quantized_sha256" not in first[task].identity
    again = run_cells(dataclasses.replace(options, model=str(saved)))
    assert all(outcome.skipped for outcome in again)
    # weights from a folder are a source of their own: the float model's own cell is measured again, its float cell not
    back = run_cells(asked)
    assert {outcome.cell.quantizer for outcome in back if not outcome.skipped} == {RECIPE}
    assert measured([outcome for outcome in back if outcome.cell.quantizer != "none"]).keys() == first.keys()


def test_what_the_folder_has_may_be_named(saved: Path, options: RunOptions) -> None:
    named = dataclasses.replace(options, model=str(saved), quantizers=(RECIPE,), arms=("softmax",), dry_run=True)
    (plan,) = run_cells(dataclasses.replace(named, tasks=TASKS[:1]))
    assert (plan.state, plan.cell.quantizer) == ("planned", RECIPE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantizers": ("w8a8",)}, "its quantizer is rtn.*not rtn; name its float model"),
        ({"quantizers": ("none", "gptq")}, "its quantizer is rtn.*not gptq"),
        ({"arms": ("softmax1",)}, "its arm is softmax, not softmax1"),
        ({"seeds": (0, 3)}, "its seed is 0, not 3"),
        ({"dtype": "bfloat16"}, "its dtype is float32, not bfloat16"),
    ],
)
def test_another_cell_is_refused(saved: Path, options: RunOptions, change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        run_cells(dataclasses.replace(options, model=str(saved), **change))


def test_arm_seed_and_dtype_come_from_the_folder(floats: Path, tmp_path: Path, options: RunOptions) -> None:
    folder = tmp_path / "saved"
    rest = ("--arm", "softmax1", "--seed", "5", "--dtype", "bfloat16", "--out", folder)
    done = call("quantize", floats, "--quantizer", "w8a8", *rest)
    assert done.exit_code == 0, done.output
    (outcome,) = run_cells(dataclasses.replace(options, model=str(folder), tasks=TASKS[:1]))
    assert outcome.cell.model == f"{floats} bfloat16"
    assert (outcome.cell.arm, outcome.cell.seed) == ("softmax1", 5)
    record = measured([outcome])[outcome.cell.task]
    assert record.settings["model"]["dtype"] == "bfloat16"
    assert "attached to weights trained without it" in str(record.identity["note"])


def test_the_calibration_of_the_folder_stands_in_the_record(floats: Path, tmp_path: Path, options: RunOptions) -> None:
    from quant_bench.testing.tokens import tiny_calibration

    static = registry.build("quantizers", "rtn(activation_granularity=tensor,activation_static=True)")
    calibration = dataclasses.replace(tiny_calibration(static), sha256="c" * 64, description="these words", usable=2)
    models.save(models.quantize_with(static, models.load_model(str(floats)), calibration), tmp_path / "saved")
    outcomes = run_cells(dataclasses.replace(options, model=str(tmp_path / "saved"), tasks=TASKS[:1]))
    (record,) = measured(outcomes).values()
    assert record.identity["calibration_sha256"] == "c" * 64
    assert record.settings["calibration"]["description"] == "these words"


@pytest.mark.parametrize("change", [{"version": 0}, {"settings": {}}])
def test_a_recipe_that_changed_since_is_not_run(
    saved: Path, tmp_path: Path, options: RunOptions, change: dict[str, Any]
) -> None:
    import shutil

    folder = tmp_path / "old"
    shutil.copytree(saved, folder)
    content = json.loads((folder / MANIFEST).read_text())
    content["recipe"].update(change)
    (folder / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(ModelError, match="quantize the model again"):
        run_cells(dataclasses.replace(options, model=str(folder)))
    assert models.load_model(str(folder)).recipe is not None


def test_a_damaged_folder_is_one_line_and_exit_code_1(saved: Path, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "damaged"
    shutil.copytree(saved, folder)
    (folder / "config.json").write_text("{}")
    done = call("run", folder, "--task", TASKS[0], "--results", tmp_path / "results")
    assert done.exit_code == 1
    assert done.output.splitlines()[-1].endswith("quantize the model again")
    assert "Traceback" not in done.output


def test_quantize_refuses_before_it_works(floats: Path, saved: Path, tmp_path: Path) -> None:
    done = call("quantize", floats, "--quantizer", "w8a8", "--out", saved)
    assert (done.exit_code, "there already" in done.output) == (1, True)
    done = call("quantize", floats, "--quantizer", "none", "--out", tmp_path / "out")
    assert (done.exit_code, "leaves the model in float" in done.output) == (2, True)
    done = call("quantize", saved, "--quantizer", "w8a8", "--out", tmp_path / "out")
    assert (done.exit_code, "quantized already" in done.output) == (2, True)
    done = call("quantize", floats, "--quantizer", "w8a9", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_quantize_exports_where_the_format_can_say_it(floats: Path, tmp_path: Path) -> None:
    export = ("--format", "compressed-tensors", "--out", tmp_path / "out")
    done = call("quantize", floats, "--quantizer", "w4a4", *export)
    assert (done.exit_code, "W8A8 can be exported" in done.output) == (1, True)
    assert not (tmp_path / "out").exists()
    done = call("quantize", floats, "--quantizer", "w8a8", *export)
    assert done.exit_code == 0, done.output
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["format"] == "int-quantized"
    )


def test_a_folder_on_the_hub_is_fetched_whole(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fnmatch import fnmatch

    import huggingface_hub

    def snapshot(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        for file in saved.iterdir():
            assert any(fnmatch(file.name, pattern) for pattern in allow_patterns), file.name
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    found = models.identify("someone/quantized", models.LoadOptions(cache=tmp_path))
    assert found == models.identify(str(saved), models.LoadOptions(cache=tmp_path))
