"""`quant-bench check`: a verdict for each promise of a plugin's contract, and what it says of broken ones."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from quant_bench import registry
from quant_bench.cli import main
from quant_bench.errors import NotApplicable
from quant_bench.testing import check_quantizer, promises
from quant_bench.testing.promises import Moot, Promise

# floors instead of rounding; `{line}` is where each test breaks it
RECIPE = '''"""Floors weights."""

from dataclasses import dataclass

import torch

from quant_bench.errors import NotApplicable
from quant_bench.lowbit.codes import WeightCodes
from quant_bench.model import LanguageModel
from quant_bench.quantization import apply_scheme, weight_of
from quant_bench.quantizer import Calibration, SchemeQuantizer


@dataclass(frozen=True)
class {name}(SchemeQuantizer):
    """Floors weights to codes, one scale a channel.

    Source: none; a test.
    """

    def quantize(self, model: LanguageModel, calibration: Calibration) -> LanguageModel:
        def weights(site, linear):
            weight = weight_of(linear).float()
            scale = weight.abs().amax(1, keepdim=True) / (2 ** (self.weight_bits - 1) - 1)
            return WeightCodes((weight / scale).floor().char(), scale, None, bits=self.weight_bits)

        {before}
        model = apply_scheme(model, self, calibration, weights)
        {after}
        return model
'''


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANT_BENCH_PATH", "")


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["check", *map(str, arguments)])


def written(folder: Path, name: str, before: str = "", after: str = "") -> Path:
    file = folder / "quantizers" / f"{name}.py"
    file.parent.mkdir(exist_ok=True)
    text = RECIPE.replace("{name}", registry.class_name(name)).replace("{before}", before).replace("{after}", after)
    file.write_text(text, encoding="utf-8")
    return file


def test_a_file_that_keeps_its_contract_passes_every_promise(tmp_path: Path) -> None:
    result = call(written(tmp_path, "floor_one"), "--layout", "llama", "--layout", "gpt2")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "quantizer floor_one"
    assert "  pass  simulated and integer execution agree" in lines
    assert "FAIL" not in result.output
    assert lines[-1] == "15 kept, 0 broken, 1 not looked at"


def test_a_name_in_a_plugin_folder_with_settings_is_checked(tmp_path: Path) -> None:
    written(tmp_path, "floor_two")
    result = call("floor_two(weight_bits=4)", "--plugins", tmp_path, "--layout", "llama")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("quantizer floor_two(weight_bits=4)\n")


@pytest.mark.parametrize(
    ("after", "promise", "seen"),
    [
        (
            "with torch.no_grad(): model.head.weight.mul_(0.5)",
            "embeddings and head keep their values",
            "llama: lm_head was changed",
        ),
        (
            "for p in model.layout.attentions: model.module.get_submodule(p)._modules.pop('key_value_transform', 0)",
            "kv_bits rounds keys and values",
            "llama: kv_bits=4 leaves the keys and values of",
        ),
        ("model.execution = 'float'", "coverage accounts for every weight matrix", "says execution `float`"),
        ("1 / 0", "a model of the layout can be quantized", "llama: ZeroDivisionError: division by zero ("),
    ],
)
def test_a_broken_promise_says_what_was_expected_what_was_seen_and_a_hint(
    after: str, promise: str, seen: str, tmp_path: Path
) -> None:
    file = written(tmp_path, "broken", after=after)
    result = call(file, "--layout", "llama")
    assert result.exit_code == 1
    lines = result.output.splitlines()
    place = lines.index(f"  FAIL  {promise}")
    assert [line.split()[0] for line in lines[place + 1 : place + 4]] == ["expected", "seen", "hint"]
    assert seen in lines[place + 2]


def test_what_follows_a_model_that_cannot_be_quantized_is_not_looked_at(tmp_path: Path) -> None:
    result = call(written(tmp_path, "raises_first", before="1 / 0"), "--layout", "llama")
    assert "  ?     the error falls as bits rise" in result.output.splitlines()
    assert result.output.splitlines()[-1] == "2 kept, 1 broken, 13 not looked at"


def test_a_refused_layout_is_named_with_its_reason(tmp_path: Path) -> None:
    before = "if model.layout.family == 'gpt2': raise NotApplicable('no Conv1D here')"
    file = written(tmp_path, "refuses_one", before=before)
    result = call(file, "--layout", "llama", "--layout", "gpt2")
    assert result.exit_code == 0, result.output
    assert "refuses gpt2: no Conv1D here" in result.output
    quantizer = registry.build("quantizers", "refuses_one")
    assert check_quantizer(quantizer, ("llama", "gpt2")) == {"gpt2": "no Conv1D here"}
    with pytest.raises(NotApplicable, match="no Conv1D here"):
        check_quantizer(quantizer, ("gpt2",))
    assert call(file, "--layout", "gpt2").exit_code == 1


def test_an_execution_that_is_only_said_is_seen(tmp_path: Path) -> None:
    before = "asked, self = self.execution, __import__('dataclasses').replace(self, execution='simulated')"
    result = call(written(tmp_path, "says_one", before, "model.execution = asked"), "--layout", "llama")
    assert result.exit_code == 1
    assert "asked for integer, model.layers.0.self_attn.q_proj runs simulated" in result.output


def test_a_file_that_is_no_plugin_says_what_one_is(tmp_path: Path) -> None:
    file = written(tmp_path, "no_plugin")
    file.write_text(file.read_text(encoding="utf-8").replace("@dataclass(frozen=True)", ""), encoding="utf-8")
    result = call(file)
    assert result.exit_code == 1
    assert "FAIL  the file holds one plugin, named after it" in result.output
    assert "must be decorated with @dataclass(frozen=True)" in result.output
    other = file.with_name("no_python.py")
    other.write_text("class NoPython(:\n", encoding="utf-8")
    assert "SyntaxError" in call(other).output


def test_an_arm_and_a_task_are_checked_too() -> None:
    arm = call("softmax1", "--layout", "llama")
    assert arm.exit_code == 0, arm.output
    assert "pass  every layer gives what `reference` says" in arm.output
    task = call("python_docs(seq_length=16)")
    assert task.exit_code == 0, task.output
    assert "pass  the same questions get the same answers" in task.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rtm"], "no quantizer, arm or task named 'rtm'"),
        (["rtn(weight_bites=4)"], "did you mean weight_bits"),
        (["w9a9"], "schemes have 2 to 8 or 16 bits"),
        (["nowhere.py"], "there is no file"),
        (["rtn", "--layout", "mamba"], "no layout mamba; there are llama"),
        (["softmax", "--kind", "tasks"], "no task named 'softmax'"),
    ],
)
def test_what_is_not_understood_is_exit_code_two(arguments: list[str], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_file_outside_a_plugin_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lonely.py").write_text("", encoding="utf-8")
    result = call(tmp_path / "lonely.py")
    assert result.exit_code == 2
    assert "a plugin lies in a folder named arms, quantizers, tasks" in result.stderr


def test_a_name_of_two_kinds_asks_which_one(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "rtn.py").write_text('"""A task."""\n', encoding="utf-8")
    result = call("rtn", "--plugins", tmp_path)
    assert result.exit_code == 2
    assert "quantizers and tasks: choose by --kind" in result.stderr


def test_a_refusal_counts_only_where_a_promise_allows_it() -> None:
    def refuse(case: object) -> None:
        raise NotApplicable("never mind")

    def moot(case: object) -> None:
        raise Moot("nothing there")

    later = Promise("later", "", "", refuse)
    with pytest.raises(NotApplicable, match="never mind"):
        promises.require(promises.findings([later], ["a"]))
    first = Promise("first", "", "", refuse, opening=True)
    with pytest.raises(NotApplicable, match="never mind"):
        promises.require(promises.findings([first, later], ["a", "b"]))
    assert promises.require(promises.findings([Promise("moot", "", "", moot)], ["a"])) == {}
