"""Exports of the leaderboard: bold in LaTeX, Parquet, and a model card's metadata."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner, Result
from huggingface_hub import ModelCard

from quant_bench import report
from quant_bench.cli import main
from quant_bench.record import Cell, Record
from quant_bench.report.best import BOLD
from quant_bench.score import Delta, Metric, Score

DIGEST = "a" * 64
ACC = Metric("acc", "share", "higher", "mean", 0.25)
W8, W4, TWIN = "rtn", "rtn(activation_bits=4,weight_bits=4)", "rtn(execution=integer)"


def score(value: float, half: float | None, delta: tuple[float, float] | None = None, metric: Metric = ACC) -> Score:
    ci95 = None if half is None else (value - half, value + half)
    difference = None if delta is None else Delta(sum(delta) / 2, delta, "none")
    return Score(metric, value, 0.01, ci95, 100, difference)


def record(quantizer: str, *scores: Score, **changes: Any) -> Record:
    digests = {key: DIGEST for key in ("weights_sha256", "tokenizer_sha256", "data_sha256", "calibration_sha256")}
    return Record(
        state="measured",
        reason=None,
        cell=Cell(changes.get("model", "m"), changes.get("arm", "softmax"), quantizer, "hellaswag", 0),
        settings={"model": {"dtype": "float32"}, "arm": {}, "quantizer": {}, "task": {}},
        versions={"arm": 1, "quantizer": changes.get("version", 1), "task": 1},
        identity=digests,
        convention="lm-eval v1",
        coverage={"quantized": {}, "skipped": {}, "tied": {}, "mac_share": 0.5, "notes": []},
        scores=scores,
    )


def bold(cells: Mapping[str, Score]) -> list[str]:
    found = report.rendered(report.long_frame(record(name, made) for name, made in cells.items()), "latex")
    assert (BOLD in found) == (r"\textbf" in found)
    return re.findall(r"\\textbf\{([^}]*)\}", found)


def test_the_best_quantized_number_is_bold_where_intervals_lie_apart() -> None:
    assert bold({"none": score(0.6, 0.02), W8: score(0.5, 0.02), W4: score(0.4, 0.02)}) == ["0.5000"]


def test_no_number_is_bold_where_intervals_overlap_or_are_unknown() -> None:
    assert bold({"none": score(0.6, 0.02), W8: score(0.5, 0.05), W4: score(0.45, 0.05)}) == []
    assert bold({"none": score(0.6, 0.02), W8: score(0.5, None), W4: score(0.4, 0.02)}) == []
    assert bold({"none": score(0.6, 0.02), W8: score(0.5, 0.02)}) == []


def test_differences_to_float_that_lie_apart_are_enough() -> None:
    apart = {W8: score(0.5, 0.05, (-0.11, -0.09)), W4: score(0.45, 0.05, (-0.16, -0.14))}
    assert bold({"none": score(0.6, 0.05)} | apart) == ["0.5000"]
    touching = {W8: score(0.5, 0.05, (-0.15, -0.05)), W4: score(0.45, 0.05, (-0.20, -0.10))}
    assert bold({"none": score(0.6, 0.05)} | touching) == []


def test_differences_to_float_cells_of_two_arms_say_nothing_about_each_other() -> None:
    cells = [
        record(name, made, arm=arm)
        for arm, worse in (("softmax", 0.0), ("gated", 0.1))
        for name, made in (
            ("none", score(0.6 - worse, 0.3)),
            (W8, score(0.5, 0.3, (-0.11, -0.09)) if arm == "softmax" else score(0.49, 0.3, (-0.02, -0.0))),
        )
    ]
    assert r"\textbf" not in report.rendered(report.long_frame(cells), "latex")


def test_equal_executions_are_bold_together() -> None:
    assert bold({W8: score(0.5, 0.02), TWIN: score(0.5, 0.02), W4: score(0.4, 0.02)}) == ["0.5000", "0.5000"]


def test_the_lower_perplexity_is_bold() -> None:
    metric = Metric("token_perplexity", "1", "lower", "exp")
    assert bold({W8: score(20.5, 1.0, metric=metric), W4: score(30.5, 1.0, metric=metric)}) == ["20.50"]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["report", *(str(argument) for argument in arguments)])


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    record("none", score(0.6, 0.02)).write(folder)
    record(TWIN, score(0.5, 0.02, (-0.12, -0.08)), Score(Metric("peak", "1", "lower"), 3.0, n=100)).write(folder)
    record(W4, score(0.1, 0.02), model="x: [y]\u202e #").write(folder)
    return folder


def test_parquet_holds_what_json_holds(results: Path, tmp_path: Path) -> None:
    out = tmp_path / "scores.parquet"
    assert call("--format", "parquet", "--out", out, "--results", results).exit_code == 0
    found = pd.read_parquet(out)
    printed = json.loads(call("--format", "json", "--results", results).stdout)
    rows = found.astype(object).where(found.notna(), None).to_dict("records")
    assert rows == printed
    assert len(rows) == 4


def test_a_pipe_of_another_encoding_gets_every_number(results: Path) -> None:
    # as on a Windows whose pages have neither a delta nor an arrow
    found = CliRunner(charset="cp1252").invoke(main, ["report", "--format", "markdown", "--results", str(results)])
    assert found.exit_code == 0, found.output
    assert "\\u0394 -0.1000" in found.stdout


def test_a_format_goes_to_a_file_and_may_be_of_one_model(results: Path, tmp_path: Path) -> None:
    out = tmp_path / "one.csv"
    assert call("--format", "csv", "--out", out, "--model", "m", "--results", results).exit_code == 0
    printed = call("--format", "csv", "--model", "m", "--results", results).stdout
    assert out.read_text(encoding="utf-8") == printed
    assert len(printed.splitlines()) == 4


def test_a_model_card_has_every_mean_with_quantizer_convention_and_interval(results: Path) -> None:
    found = call("--format", "model-index", "--model", "m", "--results", results)
    assert found.exit_code == 0, found.output
    card = ModelCard(f"---\n{found.stdout}---\n")
    assert card.data.model_name == "m"
    by_quantizer = {one.metric_args["quantizer"]: one for one in card.data.eval_results}
    assert by_quantizer.keys() == {"none", "rtn"}
    one = by_quantizer["rtn"]
    assert (one.metric_type, one.metric_value, one.dataset_type) == ("accuracy", 0.5, "Rowan/hellaswag")
    assert one.dataset_args == {
        "task": "hellaswag",
        "task_version": 1,
        "convention": "lm-eval v1",
        "data_sha256": DIGEST,
    }
    assert one.metric_args["weights_sha256"] == DIGEST
    assert one.metric_args["execution"] == "integer"
    assert (one.metric_args["low"], one.metric_args["high"], one.metric_args["n"]) == (0.48, 0.52, 100)
    assert (one.metric_args["delta_low"], one.metric_args["delta_high"]) == (-0.12, -0.08)


def test_questions_of_one_data_set_keep_their_conventions_in_a_card(tmp_path: Path) -> None:
    one = record("none", score(0.5, 0.1))
    replace(one, convention="P1").write(tmp_path)
    other = replace(one, convention="P4", scores=(score(0.25, 0.1),))
    replace(other, cell=Cell("m", "softmax", "none", "hellaswag(num_fewshot=5)")).write(tmp_path)
    found = call("--format", "model-index", "--model", "m", "--results", tmp_path)
    card = ModelCard(f"---\n{found.stdout}---\n")
    told = {made.metric_value: made.dataset_args["convention"] for made in card.data.eval_results}
    assert told == {0.5: "P1", 0.25: "P4"}
    # the hub's library writes one entry a data set: its metrics still say what they were asked
    again = ModelCard(f"---\n{card.data.to_yaml()}\n---\n")
    told = {made.metric_value: made.metric_args["convention"] for made in again.data.eval_results}
    assert told == {0.5: "P1", 0.25: "P4"}


def test_a_model_of_any_name_is_text_in_its_card(results: Path) -> None:
    found = call("--format", "model-index", "--model", "x: [y]\u202e #", "--results", results)
    assert ModelCard(f"---\n{found.stdout}---\n").data.model_name == "x: [y]<U+202E> #"


def test_an_outdated_number_is_in_no_card(tmp_path: Path) -> None:
    record("rtn", score(0.5, 0.1)).write(tmp_path)
    record(TWIN, score(0.4, 0.1), version=2).write(tmp_path)
    found = call("--format", "model-index", "--model", "m", "--results", tmp_path)
    (one,) = ModelCard(f"---\n{found.stdout}---\n").data.eval_results
    assert one.metric_value == 0.4


@pytest.mark.parametrize(
    "arguments",
    [
        ("--format", "parquet"),
        ("--format", "model-index"),
        ("--model", "m"),
        ("--out", "x.md"),
        ("--check", "--out", "x.md"),
        ("--check", "--format", "csv", "--model", "m"),
    ],
)
def test_what_is_not_understood_is_exit_code_two(arguments: tuple[str, ...], results: Path) -> None:
    assert call(*arguments, "--results", results).exit_code == 2


@pytest.mark.parametrize("how", ["model-index", "csv", "markdown"])
def test_a_model_without_records_is_an_error_that_names_those_that_have_some(how: str, results: Path) -> None:
    found = call("--format", how, "--model", "n", "--results", results)
    assert found.exit_code == 1
    assert "records are of m, x" in found.stderr
    assert "\u202e" not in found.stderr
