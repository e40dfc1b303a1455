"""The commands: options, exit codes, one-line errors."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import quant_bench.runner
from quant_bench import report
from quant_bench.cli import main
from quant_bench.commands.common import outcome_lines
from quant_bench.errors import ModelError, QuantBenchError, RecordError, SpecError
from quant_bench.record import Cell, Record
from quant_bench.runner import Outcome, RunOptions
from quant_bench.score import Metric, Score

DIGEST = "a" * 64


def record(state: Any = "measured", task: str = "wikitext2") -> Record:
    measured = state == "measured"
    return Record(
        state=state,
        reason=None if measured else "ValueError: it\x1b[31m broke",
        cell=Cell("m", "softmax", "none", task),
        settings={"arm": {}, "quantizer": {}, "task": {}},
        versions={"arm": 1, "quantizer": 1, "task": 1},
        identity={key: DIGEST for key in ("weights_sha256", "tokenizer_sha256", "data_sha256", "calibration_sha256")},
        convention="P1" if measured else None,
        coverage={"quantized": {}, "skipped": {}, "tied": {}, "mac_share": 0, "notes": []} if measured else None,
        scores=(Score(Metric("token_perplexity", "1", "lower", "exp"), 19.03, n=3),) if measured else (),
    )


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[RunOptions]]:
    """Replaces `run_cells`: gives back these states, or raises; the options asked for are kept."""

    def prepare(*states: str, error: BaseException | None = None) -> list[RunOptions]:
        found: list[RunOptions] = []

        def run_cells(options: RunOptions, show: Callable[[Outcome], None]) -> list[Outcome]:
            found.append(options)
            if error is not None:
                raise error
            outcomes = []
            for state in states:
                made = None if state == "planned" else record(state)
                outcomes.append(Outcome(record().cell, state, Path("x.json"), made, False))
                show(outcomes[-1])
            return outcomes

        monkeypatch.setattr(quant_bench.runner, "run_cells", run_cells)
        return found

    return prepare


def commands(group: click.Group = main, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield prefix
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*prefix, name))
        else:
            yield (*prefix, name)


def paths() -> Iterator[tuple[str, click.Parameter]]:
    for command in commands():
        found: click.Command = main
        for name in command:
            assert isinstance(found, click.Group)
            found = found.commands[name]
        yield from ((" ".join(command), one) for one in found.params if isinstance(one.type, click.Path))


@pytest.mark.parametrize(
    ("command", "parameter"), [pytest.param(*one, id=f"{one[0]} {one[1].name}") for one in paths()]
)
def test_no_path_may_be_the_empty_text_of_a_variable_that_is_not_set(command: str, parameter: click.Parameter) -> None:
    with pytest.raises(click.BadParameter):
        parameter.type.convert("", parameter, click.Context(click.Command(command)))


@pytest.mark.parametrize("command", list(commands()), ids=lambda command: " ".join(command) or "quant-bench")
def test_every_help_ends_with_an_example(command: tuple[str, ...]) -> None:
    result = call(*command, "--help")
    assert result.exit_code == 0
    last = result.output.rstrip().splitlines()[-1].strip()
    assert last.startswith(" ".join(("quant-bench", *command)))


def test_run_passes_every_option_on(asked: Callable[..., list[RunOptions]], tmp_path: Path) -> None:
    found = asked("measured")
    options = "--arm softmax --quantizer none --quantizer w8a8 --task lambada --task wikitext2 --seed 1 --seed 2"
    options += " --limit 3 --batch-size 4 --seq-length 512 --dtype bfloat16 --device cuda:1 --dry-run --force"
    options += " --revision abc"
    result = call("run", "m", *options.split(), "--trust-remote-code", "--data", tmp_path, "--results", tmp_path / "r")
    assert result.exit_code == 0, result.output
    expected = RunOptions(
        model="m", arms=("softmax",), quantizers=("none", "w8a8"), tasks=("lambada", "wikitext2"), seeds=(1, 2),
        limit=3, batch_size=4, seq_length=512, dtype="bfloat16", device="cuda:1", data=tmp_path, results=tmp_path / "r",
        dry_run=True, force=True, trust_remote_code=True, revision="abc",
    )  # fmt: skip
    assert found == [expected]


def test_run_without_options_has_the_defaults_of_python(asked: Callable[..., list[RunOptions]]) -> None:
    found = asked("measured")
    assert call("run", "m").exit_code == 0
    assert found == [RunOptions("m")]


def test_a_line_a_cell_goes_to_standard_output(asked: Callable[..., list[RunOptions]]) -> None:
    asked("measured", "blocked", "planned")
    result = call("run", "m")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["measured", "blocked", "planned"]
    assert "token_perplexity 19.03" in result.stdout
    assert "\x1b" not in result.stdout
    assert "1 measured, 1 blocked, 1 planned" in result.stderr


def test_a_long_reason_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    reasons = ["wanted: " + "a very long path " * 12, "another reason " * 12]
    show = outcome_lines()
    for reason in (reasons[0], reasons[1], reasons[0]):
        blocked = replace(record("blocked"), reason=reason)
        show(Outcome(blocked.cell, "blocked", Path("x.json"), blocked, False))
    first, second, again = capsys.readouterr().out.splitlines()
    assert first.endswith(reasons[0].rstrip())
    assert second.endswith(reasons[1].rstrip())
    assert again.endswith("…")
    assert first.startswith(again.removesuffix(" …"))
    assert len(again) < 160


@pytest.mark.parametrize(
    ("states", "code"),
    [(["measured"], 0), (["blocked", "not_applicable"], 0), (["measured", "failed"], 1), (["planned"], 0)],
)
def test_a_failed_cell_is_exit_code_one(asked: Callable[..., list[RunOptions]], states: list[str], code: int) -> None:
    asked(*states)
    assert call("run", "m").exit_code == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelError("no model 'x'"), 1),
        (RecordError("cannot write records"), 1),
        (OSError(28, "No space left on device"), 1),
        (SpecError("cannot read 'rtn('"), 2),
        (QuantBenchError("line\x1b[31m one"), 1),
    ],
)
def test_our_errors_are_one_line_and_no_traceback(
    asked: Callable[..., list[RunOptions]], error: Exception, code: int
) -> None:
    asked(error=error)
    result = call("run", "m")
    assert result.exit_code == code
    assert "Traceback" not in result.output
    assert "\x1b" not in result.output
    assert result.stderr.splitlines()[-1].startswith("Error: ")


def test_a_bug_keeps_its_traceback(asked: Callable[..., list[RunOptions]]) -> None:
    asked(error=ZeroDivisionError())
    assert isinstance(call("run", "m").exception, ZeroDivisionError)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["run", "m", "--limit", "0"],
        ["run", "m", "--batch-size", "0"],
        ["run", "m", "--batch-size", "many"],
        ["run", "m", "--device", "tpu"],
        # torch takes 256 for 0
        ["run", "m", "--device", "cuda:256"],
        ["run", "m", "--device", "cuda:01"],
        ["train", "micro", "--device", "cuda:256"],
        ["run", "m", "--dtype", "int8"],
        ["run", "m", "--data", "there-is-no-such-folder"],
        ["run", "m", "--seed", "x"],
        ["report", "--format", "html"],
        ["report", "--results", "there-is-no-such-folder"],
        ["list", "models-and-more"],
        ["data", "verify"],
        ["nothing"],
    ],
)
def test_what_is_not_understood_is_exit_code_two(arguments: list[str]) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_an_unknown_quantizer_is_exit_code_two(tmp_path: Path) -> None:
    result = call("run", "m", "--quantizer", "rtm", "--results", tmp_path)
    assert result.exit_code == 2
    assert "did you mean rtn" in result.stderr


def test_report_writes_and_check_compares(tmp_path: Path) -> None:
    record().write(tmp_path)
    assert call("report", "--check", "--results", tmp_path).exit_code == 1
    shown = call("report", "--results", tmp_path)
    assert shown.exit_code == 0
    assert "19.03" in shown.stdout
    assert "19.03" in (tmp_path / report.FILE).read_text(encoding="utf-8")
    assert call("report", "--check", "--results", tmp_path).exit_code == 0
    replace(record("failed"), cell=Cell("m", "softmax", "rtn", "wikitext2")).write(tmp_path)
    stale = call("report", "--check", "--results", tmp_path)
    assert stale.exit_code == 1
    assert "stale" in stale.stderr


@pytest.mark.parametrize("how", report.FORMATS)
def test_report_in_a_format_prints_and_writes_nothing(how: str, tmp_path: Path) -> None:
    record().write(tmp_path)
    result = call("report", "--format", how, "--results", tmp_path)
    assert result.exit_code == 0
    assert "19.03" in result.stdout
    assert not (tmp_path / report.FILE).exists()


def test_report_names_a_foreign_file_and_shows_the_rest(tmp_path: Path) -> None:
    path = record().write(tmp_path)
    path.with_name("cut.json").write_text("{", encoding="utf-8")
    result = call("report", "--results", tmp_path)
    assert result.exit_code == 1
    assert "cut.json" in result.stderr
    assert "19.03" in result.stdout


def test_list_names_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    result = call("list")
    assert result.exit_code == 0
    for name in ("softmax", "rtn", "wikitext2", "smollm2-135m-instruct", "w8a8-static"):
        assert name in result.output


def test_list_finds_plugins_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANT_BENCH_PATH", "")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mine.py").write_text('"""A task of mine."""\n', encoding="utf-8")
    result = call("list", "tasks", "--plugins", tmp_path)
    assert "A task of mine." in result.output
    assert os.environ["QUANT_BENCH_PATH"] == str(tmp_path)


def test_list_and_report_need_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom quant_bench.cli import main\n"
        f"for arguments in (['list'], ['report', '--results', {str(tmp_path)!r}]):\n"
        "    main(arguments, standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_doctor_says_what_is_there_and_how_to_supply_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUANT_BENCH_DATA", raising=False)
    result = call("doctor")
    assert result.exit_code == 0, result.output
    for word in ("python", "torch", "processor", "threads", "kernel", "why", "rtn", "missing", "--data DIR"):
        assert word in result.output


def test_verify_refuses_a_wrong_file_under_the_right_name(tmp_path: Path) -> None:
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "wiki.test.raw").write_text("not WikiText", encoding="utf-8")
    result = call("data", "verify", tmp_path)
    assert result.exit_code == 1
    assert "wikitext2/wiki.test.raw: wrong" in result.output
