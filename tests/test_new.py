"""`quant-bench new`: what it writes keeps its contract, and nothing is overwritten."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from quant_bench import registry
from quant_bench.cli import main
from quant_bench.scaffold import scaffold

ROOT = Path(__file__).resolve().parent.parent
WORDS = ("arm", "quantizer", "task")


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANT_BENCH_PATH", "")


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.mark.parametrize("word", WORDS)
def test_what_is_written_keeps_its_contract(word: str, tmp_path: Path) -> None:
    written = call("new", word, f"fresh_{word}", "--dir", tmp_path)
    assert written.exit_code == 0, written.output
    layouts = () if word == "task" else ("--layout", "llama", "--layout", "gpt2")
    checked = call("check", tmp_path / f"{word}s" / f"fresh_{word}.py", *layouts)
    assert checked.exit_code == 0, checked.output
    assert " 0 broken" in checked.output


def test_what_is_written_passes_our_own_lint_and_its_own_tests(tmp_path: Path) -> None:
    for word in WORDS:
        assert call("new", word, f"clean_{word}", "--dir", tmp_path / "mine").exit_code == 0
    options = ["--config", str(ROOT / "pyproject.toml"), "--quiet"]
    # docstrings of tests are not asked for in this project either, but by a path that is not here
    for command in (["check", "--ignore", "D103"], ["format", "--check"]):
        subprocess.run([sys.executable, "-m", "ruff", *command, *options, str(tmp_path)], check=True)
    tests = [str(tmp_path / "mine" / "tests" / f"test_clean_{word}.py") for word in ("arm", "task")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_a_checkout_gets_its_files_where_ours_lie(tmp_path: Path) -> None:
    (tmp_path / "quant_bench").mkdir()
    (tmp_path / "quant_bench" / "_roots.py").touch()
    files = scaffold("arms", "fresh", tmp_path).files
    assert list(files) == [tmp_path / "quant_bench" / "arms" / "fresh.py", tmp_path / "tests" / "test_fresh.py"]
    # the registry knows a checkout's folders by itself
    assert "QUANT_BENCH_PATH" not in files[tmp_path / "tests" / "test_fresh.py"]
    assert tmp_path / "quantizers" / "fresh.py" in scaffold("quantizers", "fresh", tmp_path).files


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    test = tmp_path / "tests" / "test_mine.py"
    test.parent.mkdir()
    test.write_text("mine", encoding="utf-8")
    result = call("new", "quantizer", "mine", "--dir", tmp_path)
    assert result.exit_code == 2
    assert "test_mine.py exists already" in result.stderr
    assert test.read_text(encoding="utf-8") == "mine"
    assert not (tmp_path / "quantizers").exists()


@pytest.mark.parametrize(
    ("word", "name", "message"),
    [
        ("quantizer", "Mine", "a lower-case word"),
        ("quantizer", "../mine", "a lower-case word"),
        ("quantizer", "_mine", "a lower-case word"),
        ("arm", "lambda", "a lower-case word"),
        ("quantizer", "w4a4mine", "reads like a scheme"),
        ("quantizer", "rtn", "there is a quantizer named 'rtn' already"),
        ("task", "metric", "the class Metric would hide what the file imports"),
        ("model", "mine", "is not one of"),
    ],
)
def test_a_name_that_cannot_work_is_refused(word: str, name: str, message: str, tmp_path: Path) -> None:
    result = call("new", word, name, "--dir", tmp_path)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not any(tmp_path.iterdir())


def test_every_kind_has_a_template(tmp_path: Path) -> None:
    for kind in registry.KINDS:
        plugin = scaffold(kind, "fresh", tmp_path).files[tmp_path / kind / "fresh.py"]
        assert "class Fresh(" in plugin
        assert "Source:" in plugin
