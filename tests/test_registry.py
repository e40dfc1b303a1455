"""Plugins are found by the name of their file."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quant_bench import registry
from quant_bench._roots import use_plugins
from quant_bench.data import DataSource
from quant_bench.errors import PluginError, SpecError, UnknownPlugin
from quant_bench.probe import Probe
from quant_bench.statistics import score_of
from quant_bench.task import Context
from quant_bench.tiny import tiny_model

PLUGIN = '''"""A plugin of this test."""
from dataclasses import dataclass
from typing import Literal
from quant_bench.model import LanguageModel
from quant_bench.quantizer import Calibration, Quantizer, SchemeQuantizer
{extra}
@dataclass(frozen=True)
class {name}({base}):
    """Does nothing."""
    alpha: float = 0.5
    steps: int | None = None
    mode: Literal["fast", "slow"] = "fast"
    def quantize(self, model: LanguageModel, calibration: Calibration) -> LanguageModel:
        return model
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUANT_BENCH_PATH", str(tmp_path))
    (tmp_path / "quantizers").mkdir()
    return tmp_path / "quantizers"


def write(folder: Path, file: str, name: str, base: str = "Quantizer", extra: str = "") -> None:
    (folder / f"{file}.py").write_text(PLUGIN.format(name=name, base=base, extra=extra), encoding="utf-8")


def test_every_built_in_is_loaded_under_the_name_of_its_file() -> None:
    for kind in registry.KINDS:
        assert registry.names(kind)
        for name in registry.names(kind):
            assert registry.load(kind, name).__name__ == registry.class_name(name)
            assert registry.summary(kind, name)


def test_canonical_form_drops_defaults_and_coerces() -> None:
    texts = ["rtn", "w8a8", "rtn(weight_bits=8)", "rtn(percentile=100)", "rtn(weight_bits=8.0)", "rtn(scope='linear')"]
    assert {registry.canonical("quantizers", registry.build("quantizers", text)) for text in texts} == {"rtn"}
    other = registry.build("quantizers", "rtn(weight_bits=4.0,momentum=0)")
    assert registry.canonical("quantizers", other) == "rtn(momentum=0.0,weight_bits=4)"
    assert registry.settings(other)["momentum"] == 0.0
    assert registry.settings(other)["activation_bits"] == 8


def test_canonical_form_is_read_back() -> None:
    for text in ("none", "w4a4g128-kv8-integer", "w8a8-static", "rtn(weight_bits=4)"):
        built = registry.build("quantizers", text)
        assert registry.build("quantizers", registry.canonical("quantizers", built)) == built


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownPlugin, match="did you mean wikitext2"):
        registry.build("tasks", "wikitext")
    with pytest.raises(UnknownPlugin, match=r"there are .*none, .*rtn"):
        registry.build("quantizers", "xyzzy")


def test_an_unknown_setting_is_answered_with_the_known_ones() -> None:
    with pytest.raises(SpecError, match=r"no setting 'weight_bit'; did you mean weight_bits\? \(it has weight_bits, "):
        registry.build("quantizers", "rtn(weight_bit=4)")


@pytest.mark.parametrize(
    "text",
    ["rtn(weight_bits=four)", "rtn(scope=all)", "rtn(weight_symmetric=1)", "rtn(weight_bits=1)", "w4a4(group_size=64)"],
)
def test_a_wrong_value_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        registry.build("quantizers", text)


def test_a_third_party_file_is_a_quantizer(folder: Path) -> None:
    write(folder, "llm_int3", "LlmInt3")
    assert "llm_int3" in registry.names("quantizers")
    built = registry.build("quantizers", "llm_int3(alpha=1,mode=slow)")
    assert registry.canonical("quantizers", built) == "llm_int3(alpha=1.0,mode=slow)"
    assert registry.settings(built) == {"alpha": 1.0, "steps": None, "mode": "slow"}


def test_a_changed_folder_is_seen_at_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, "mine", "Mine")
    first = registry.load("quantizers", "mine")
    other = tmp_path / "other" / "quantizers"
    other.mkdir(parents=True)
    write(other, "mine", "Mine", extra="MARK = 2")
    monkeypatch.setenv("QUANT_BENCH_PATH", str(other.parent))
    assert registry.load("quantizers", "mine") is not first


def test_a_recipe_over_codes_takes_schemes_and_another_does_not(folder: Path) -> None:
    write(folder, "mine", "Mine", "SchemeQuantizer")
    write(folder, "plain", "Plain")
    built = registry.build("quantizers", "mine:w4a16g64-integer(alpha=1)")
    settings = "activation_bits=16,alpha=1.0,execution=integer,group_size=64,weight_bits=4,weight_granularity=group"
    assert registry.canonical("quantizers", built) == f"mine({settings})"
    with pytest.raises(SpecError, match="takes no scheme"):
        registry.build("quantizers", "plain:w4a4")


def test_a_recipe_must_not_change_what_schemes_mean(folder: Path) -> None:
    extra = "@dataclass(frozen=True)\nclass Base(SchemeQuantizer):\n    weight_bits: int = 4\n    x = 1\n"
    abstract = (
        extra + "    def quantize(self, model, calibration): raise NotImplementedError\n    __module__ = 'elsewhere'\n"
    )
    write(folder, "mine", "Mine", "Base", abstract)
    with pytest.raises(PluginError, match="weight_bits must keep its default 8"):
        registry.build("quantizers", "mine")


def test_a_name_that_hides_another_is_refused(folder: Path) -> None:
    write(folder, "rtn", "Rtn")
    with pytest.raises(PluginError, match="hides"):
        registry.names("quantizers")


def test_a_folder_named_twice_hides_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, "halve", "Halve")
    checkout = Path(__file__).parent.parent
    use_plugins([folder.parent, checkout])
    assert "halve" in registry.names("quantizers")
    assert "rtn" in registry.names("quantizers")


def test_a_folder_whose_path_would_be_parted_is_refused(folder: Path) -> None:
    with pytest.raises(OSError, match="cannot hold"):
        use_plugins([folder / f"a{os.pathsep}b"])


def test_a_name_that_hides_a_scheme_is_refused(folder: Path) -> None:
    write(folder, "w4a4", "W4a4")
    with pytest.raises(PluginError, match="hides the scheme"):
        registry.names("quantizers")


def test_a_file_with_two_plugins_is_refused(folder: Path) -> None:
    extra = PLUGIN.format(name="Other", base="Quantizer", extra="").partition("@dataclass")[2]
    write(folder, "mine", "Mine", extra=f"@dataclass{extra}")
    with pytest.raises(PluginError, match="exactly one concrete Quantizer; it holds Other, Mine"):
        registry.load("quantizers", "mine")


def test_a_class_of_another_name_is_refused(folder: Path) -> None:
    write(folder, "mine", "Yours")
    with pytest.raises(PluginError, match="named Mine, not Yours"):
        registry.load("quantizers", "mine")


def test_a_class_without_its_own_decorator_is_refused(folder: Path) -> None:
    write(folder, "mine", "Mine")
    text = (folder / "mine.py").read_text(encoding="utf-8").replace("@dataclass(frozen=True)", "")
    (folder / "mine.py").write_text(text, encoding="utf-8")
    with pytest.raises(PluginError, match=r"dataclass\(frozen=True\)"):
        registry.load("quantizers", "mine")


def test_an_error_of_a_plugin_is_its_own(folder: Path) -> None:
    write(folder, "mine", "Mine", extra="raise ZeroDivisionError('mine alone')")
    assert "mine" in registry.names("quantizers")
    with pytest.raises(ZeroDivisionError, match="mine alone"):
        registry.load("quantizers", "mine")


@pytest.mark.parametrize("value", ["quant_bench_fake.plugin", "quant_bench_fake.plugin:Mine"])
def test_an_entry_point_is_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    package = tmp_path / "quant_bench_fake"
    package.mkdir()
    (package / "__init__.py").touch()
    write(package, "plugin", "Mine")
    information = tmp_path / "quant_bench_fake-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: quant-bench-fake\nVersion: 1.0\n", encoding="utf-8"
    )
    (information / "entry_points.txt").write_text(f"[quant_bench.quantizers]\nmine = {value}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("quant_bench_fake")]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    assert registry.canonical("quantizers", registry.build("quantizers", "mine(alpha=2)")) == "mine(alpha=2.0)"


def test_listing_imports_no_plugin_and_no_torch() -> None:
    script = (
        "import sys; from quant_bench import registry\n"
        "for kind in registry.KINDS: [registry.summary(kind, name) for name in registry.names(kind)]\n"
        "print([name for name in sys.modules if name == 'torch' or name.startswith('quant_bench.quantizers')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("text", ["def (", "\x00"])
def test_a_broken_file_does_not_hide_the_others_from_a_list(folder: Path, text: str) -> None:
    (folder / "broken.py").write_text(text)
    summaries = {name: registry.summary("quantizers", name) for name in registry.names("quantizers")}
    assert summaries["broken"].startswith("(no Python: ")
    assert summaries["rtn"].startswith("Round to nearest")


def test_the_example_of_the_tasks_readme_is_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parent.parent / "tasks" / "README.md").read_text(encoding="utf-8")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "copying.py").write_text(
        text.partition("```python\n")[2].partition("```")[0], encoding="utf-8"
    )
    monkeypatch.setenv("QUANT_BENCH_PATH", str(tmp_path))
    task = registry.build("tasks", "copying(limit=3)")
    context = Context(data=DataSource(allow_hub=False), cache=tmp_path, probe=Probe.off())
    found = task.evaluate(tiny_model("llama"), context)
    scores = [score_of(measure, found.samples, 0) for measure in found.measures]
    assert [(score.metric.name, score.n) for score in scores] == [("acc", 3), ("nll", 3)]


def test_the_tasks_readme_names_every_task() -> None:
    text = (Path(__file__).parent.parent / "tasks" / "README.md").read_text(encoding="utf-8")
    for file in (Path(__file__).parent.parent / "tasks").glob("*.py"):
        assert f"    {file.name} " in text


@pytest.mark.parametrize("name", ["w1a8", "w9a9", "w8a8-stat", "rtn:w4a99"])
def test_what_looks_like_a_scheme_is_told_what_schemes_are(name: str) -> None:
    with pytest.raises(UnknownPlugin, match="2 to 8 or 16 bits"):
        registry.build("quantizers", name)


@pytest.mark.parametrize("text", ["python_docs(seq_length=0)", "wiki40b(stride=4)", "wikitext2(seq_length=1)"])
def test_window_settings_that_make_no_sense_are_usage_errors(text: str) -> None:
    with pytest.raises(SpecError):
        registry.build("tasks", text)
