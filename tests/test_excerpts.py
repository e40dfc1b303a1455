"""Excerpts of the leaderboard in a README: what they show, and that they cannot go stale unnoticed."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from quant_bench import report
from quant_bench.cli import main
from quant_bench.errors import RecordError
from quant_bench.record import Cell, Record
from quant_bench.report.excerpts import filled, holds_excerpts
from quant_bench.score import Better, Delta, Metric, Score

DIGEST = "a" * 64
ASKED = "Before.\n\n<!-- leaderboard m: t(limit=2) ppl; u acc -->\nold\n<!-- /leaderboard -->\n\nAfter.\n"


def score(name: str, value: float, better: Better, delta: Delta | None = None) -> Score:
    return Score(Metric(name, "1", better, "mean"), value, 0.1, (value - 1, value + 1), 2, delta=delta)


def record(quantizer: str, task: str, one: Score, convention: str = "P1", model: str = "m") -> Record:
    keys = ("weights_sha256", "tokenizer_sha256", "data_sha256", "calibration_sha256")
    named = "integer" if "integer" in quantizer else "simulated"
    return Record(
        state="measured",
        reason=None,
        cell=Cell(model, "softmax", quantizer, task),
        settings={
            "model": {"dtype": "float32"},
            "arm": {},
            "quantizer": {} if quantizer == "none" else {"execution": named},
            "task": {},
        },
        versions={"arm": 1, "quantizer": 1, "task": 1},
        identity=dict.fromkeys(keys, DIGEST),
        convention=convention,
        coverage={"quantized": {}, "skipped": {}, "tied": {}, "mac_share": 0.5, "notes": []},
        scores=(one,),
    )


def records(simulated: float = 25.0) -> list[Record]:
    delta = Delta(5.0, (4.0, 6.0), "none")
    return [
        record("none", "t(limit=2)", score("ppl", 20.0, "lower")),
        record("rtn", "t(limit=2)", score("ppl", simulated, "lower", delta)),
        record("rtn(execution=integer)", "t(limit=2)", score("ppl", 25.0, "lower", delta)),
        record("rtn(execution=integer)", "u", score("acc", 0.5, "higher"), "other"),
        record("rtn(activation_bits=4,weight_bits=4)", "u", score("acc", 0.25, "higher"), "other"),
        record("none", "t(limit=2)", score("ppl", 1.0, "lower"), model="another"),
    ]


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]


def test_an_excerpt_has_the_columns_asked_for_best_first_with_differences_and_conventions() -> None:
    text = filled(ASKED, report.long_frame(records()), Path())
    assert text.startswith("Before.\n")
    assert text.endswith("\nAfter.\n")
    assert "old" not in text
    assert rows(text) == [
        "| quantizer | t: ppl ↓ \\[1\\] | u: acc ↑ \\[2\\] |",
        "| none | 20 | – |",
        "| w8a8 (integer = simulated) | 25<br>Δ +5 \\[+4, +6\\] | 0.5000 |",
        "| w4a4 (simulated) | – | 0.2500 |",
    ]
    assert "1. t(limit=2) · P1 · 2 items" in text
    assert "2. u · other · 2 items" in text


def test_an_excerpt_with_a_quantizer_has_a_row_for_each_arm_under_it() -> None:
    made = []
    for quantizer, values in (("none", (20.0, 18.0)), ("rtn", (30.0, 31.0)), ("rtn(execution=integer)", (40.0, 29.0))):
        for arm, value in zip(("softmax", "combo"), values, strict=True):
            one = record(quantizer, "t(limit=2)", score("ppl", value, "lower"))
            made.append(replace(one, cell=replace(one.cell, arm=arm)))
    shown = {}
    for name in ("none", "w8a8", "w8a8-integer"):
        asked = ASKED.replace(" m: t(limit=2) ppl; u acc", f" m with {name}: t(limit=2) ppl")
        shown[name] = rows(filled(asked, report.long_frame(made), Path()))
    head = "| arm | t: ppl ↓ \\[1\\] |"
    assert shown == {
        "none": [head, "| combo | 18 |", "| softmax | 20 |"],
        "w8a8": [head, "| softmax | 30 |", "| combo | 31 |"],
        "w8a8-integer": [head, "| combo | 29 |", "| softmax | 40 |"],
    }
    with pytest.raises(RecordError, match="of m with w4a4, and the records have no scores"):
        filled(ASKED.replace(" m: ", " m with w4a4: "), report.long_frame(made), Path())


def test_executions_that_differ_have_a_row_each() -> None:
    text = filled(ASKED, report.long_frame(records(simulated=25.5)), Path())
    assert [line.split(" | ")[0] for line in rows(text)[1:]] == [
        "| none",
        "| w8a8 (integer)",
        "| w8a8 (simulated)",
        "| w4a4 (simulated)",
    ]


def test_executions_are_equal_only_where_all_seeds_together_are() -> None:
    integer, simulated = "rtn(execution=integer)", "rtn"
    made = []
    for quantizer, values in ((simulated, (25.0, 26.0)), (integer, (24.0, 26.0))):
        for seed, value in enumerate(values):
            one = record(quantizer, "t(limit=2)", score("ppl", value, "lower"))
            made.append(replace(one, cell=replace(one.cell, seed=seed)))
    made.append(record(integer, "u", score("acc", 0.5, "higher"), "other"))
    shown = rows(filled(ASKED, report.long_frame(made), Path()))
    assert len(shown) == 3
    assert "25 ± " in shown[1]
    assert "25.50 ± " in shown[2]


def test_a_row_of_fewer_seeds_than_another_says_so() -> None:
    again = record("none", "t(limit=2)", score("ppl", 22.0, "lower"))
    both = [*records(), replace(again, cell=replace(again.cell, seed=1))]
    shown = rows(filled(ASKED.replace("; u acc", ""), report.long_frame(both), Path()))
    assert "(2 seeds)" in next(row for row in shown if row.startswith("| none"))
    assert "25 (1 of 2 seeds)" in next(row for row in shown if row.startswith("| w8a8"))


def test_filling_twice_changes_nothing() -> None:
    frame = report.long_frame(records())
    assert filled(filled(ASKED, frame, Path()), frame, Path()) == filled(ASKED, frame, Path())


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([], "no scores"),
        ([record("none", "t(limit=2)", score("ppl", 9.0, "lower"), "P2"), *records()], "several conventions"),
    ],
)
def test_a_column_that_is_missing_or_mixed_is_an_error(extra: list[Record], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        filled(ASKED, report.long_frame(extra), Path())


@pytest.mark.parametrize("wrong", ["no end", "no columns", "no line", "another inside", "another begins inside"])
def test_an_excerpt_that_cannot_be_read_is_an_error_and_takes_nothing_else_with_it(wrong: str, tmp_path: Path) -> None:
    broken = {
        "no end": ASKED.replace("<!-- /leaderboard -->", ""),
        "no columns": ASKED.replace(": t(limit=2) ppl; u acc", ""),
        "no line": ASKED.replace(" -->\nold", " --> old"),
        "another inside": ASKED.replace("old", "<!-- details m: u x -->\nkept\n<!-- /details -->"),
        "another begins inside": ASKED.replace("old", "<!-- details m: u x -->") + "kept\n<!-- /details -->\n",
    }[wrong]
    with pytest.raises(RecordError, match="ends with <!-- /leaderboard -->"):
        filled(broken + ASKED, report.long_frame(records()), Path())


def test_an_example_of_an_excerpt_is_none() -> None:
    for example in (
        f"    {ASKED.splitlines()[2]}\n    <!-- /leaderboard -->\n",
        f"Write `{ASKED.splitlines()[2]}` there.",
    ):
        assert not holds_excerpts(example)
        assert filled(example + "\n" + ASKED, report.long_frame(records()), Path()).startswith(example)


def test_lines_may_end_as_on_windows() -> None:
    assert "old" not in filled(ASKED.replace("\n", "\r\n"), report.long_frame(records()), Path())


LAYERS = [{"layer": 0, "w2": 0.5, "part": "a|b"}, {"layer": 1, "w2": None}]


@pytest.mark.parametrize("named", ["m", "m with w4a4"])
def test_a_table_of_a_records_details_stands_as_it_is(tmp_path: Path, named: str) -> None:
    for quantizer in ("none", "rtn(activation_bits=4,weight_bits=4)"):
        one = record(quantizer, "s(limit=2)", score("kl", 0.1, "lower"))
        of_layers = LAYERS if (quantizer == "none") == (named == "m") else [{"layer": 7}]
        replace(one, details={"layers": of_layers}).write(tmp_path)
    asked = f"<!-- details {named}: s(limit=2) layers -->\nold\n<!-- /details -->\n"
    assert holds_excerpts(asked)
    text = filled(asked, report.leaderboard(tmp_path), tmp_path)
    assert rows(text) == ["| layer | part | w2 |", "| 0 | a\\|b | 0.5000 |", "| 1 | – | – |"]
    assert "s(limit=2) · P1 · 2 items" in text
    assert "old" not in text
    assert filled(text, report.leaderboard(tmp_path), tmp_path) == text


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("m: s layers", "0 records"),
        ("m: s(limit=2) linears", "no table 'linears'"),
        ("m: s(limit=2) note", "no table 'note'"),
        ("two: s(limit=2) layers", "2 records"),
    ],
)
def test_details_that_are_no_table_of_one_record_are_an_error(tmp_path: Path, asked: str, message: str) -> None:
    one = record("none", "s(limit=2)", score("kl", 0.1, "lower"))
    made = [replace(one, details={"layers": LAYERS, "note": "text"})]
    made += [replace(one, cell=Cell("two", "softmax", "none", one.cell.task, seed)) for seed in (0, 1)]
    for each in made:
        each.write(tmp_path)
    with pytest.raises(RecordError, match=message):
        filled(f"<!-- details {asked} -->\n<!-- /details -->\n", report.leaderboard(tmp_path), tmp_path)


@pytest.mark.parametrize("name", ["README.md", "docs/findings.md"])
def test_the_command_writes_documents_beside_the_records_and_check_finds_them_stale(tmp_path: Path, name: str) -> None:
    results, readme = tmp_path / "results", tmp_path / name
    readme.parent.mkdir(exist_ok=True)
    for one in records():
        one.write(results)
    # a byte that is no text stays
    readme.write_bytes(ASKED.encode() + b"\xff")

    def call(*arguments: str) -> int:
        return CliRunner().invoke(main, ["report", "--results", str(results), *arguments]).exit_code

    assert call("--check") == 1
    assert call() == 0
    assert b"| w8a8 (integer = simulated) |" in readme.read_bytes()
    assert readme.read_bytes().endswith(b"\xff")
    assert call("--check") == 0
    readme.write_bytes(readme.read_bytes().replace(b"| 25<br>", b"| 24<br>"))
    assert call("--check") == 1


def test_a_readme_without_excerpts_is_left_alone(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("No table here.\r\n", newline="")
    records()[0].write(tmp_path / "results")
    report.write(tmp_path / "results", report.leaderboard(tmp_path / "results"))
    assert readme.read_bytes() == b"No table here.\r\n"
