"""Arms against each other: paired differences over seeds, and the 2×2 of a sink logit and a gate."""

import csv
import io
import json
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner, Result

from quant_bench import report
from quant_bench.cli import main
from quant_bench.plan import RunOptions, planned_cells
from quant_bench.record import Cell, Record
from quant_bench.report.commands import command_for
from quant_bench.report.compare import compare
from quant_bench.report.redundancy import redundancy
from quant_bench.runner import run_cells
from quant_bench.samples import SampleStore
from quant_bench.schemes import DEFAULTS
from quant_bench.score import Better, Delta, Metric, Score
from quant_bench.tiny import tiny_model

DIGEST = "a" * 64
STATIC = (
    "rtn(activation_granularity=tensor,activation_range=running_minmax,activation_static=True,"
    "activation_symmetric=False,percentile=99.999,scope=full,weight_granularity=tensor,weight_range=mse)"
)
# upper 2.5 % points of Student's distribution by degrees of freedom, from a printed table
T = {1: 12.7062, 2: 4.30265}
LOSS = Metric("loss", "nats/token", "lower", "mean")
# four arms of arXiv 2609.22005 at 10M: validation losses in nats
PAPER = {"softmax": 4.2118, "sink_logit": 4.1933, "norm_gate": 4.2081, "combo": 4.1941}


def record(arm: str, values: Mapping[Metric, float], seed: int = 0, **changes: Any) -> Record:
    """A measured record; `softmax=` gives the values of the softmax cell to which it carries differences."""
    softmax: Mapping[Metric, float] = changes.pop("softmax", {})
    cell = Cell(changes.pop("model", "m"), arm, changes.pop("quantizer", "none"), changes.pop("task", "text"), seed)
    n = changes.pop("n", 100)

    def scored(metric: Metric, value: float) -> Score:
        if metric not in softmax:
            return Score(metric, value, n=n)
        difference = value - softmax[metric]
        return Score(metric, value, n=n, arm_delta=Delta(difference, (difference - 0.02, difference + 0.01), "softmax"))

    digests = {key: DIGEST for key in ("weights_sha256", "tokenizer_sha256", "data_sha256", "calibration_sha256")}
    made = Record(
        state="measured",
        reason=None,
        cell=cell,
        settings={
            "model": {"name": "m", "dtype": changes.pop("dtype", "float32"), "revision": None},
            "arm": {},
            "quantizer": {},
            "task": {},
        },
        versions={"arm": 1, "quantizer": 1, "task": 1} | changes.pop("versions", {}),
        identity=digests | changes.pop("identity", {}),
        convention="P1 seq=64",
        coverage={"quantized": {}, "skipped": {}, "tied": {}, "mac_share": 0.0, "notes": []},
        scores=tuple(scored(metric, value) for metric, value in values.items()),
    )
    return replace(made, **changes)


def of_seeds(losses: Mapping[str, Sequence[float]], metric: Metric = LOSS, **changes: Any) -> list[Record]:
    """One record an arm and seed."""
    softmax = losses.get("softmax", ())
    return [
        record(
            arm, {metric: value}, seed,
            softmax={metric: softmax[seed]} if arm != "softmax" and seed < len(softmax) else {}, **changes,
        )
        for arm, values in losses.items()
        for seed, value in enumerate(values)
    ]  # fmt: skip


def only_row(frame: pd.DataFrame) -> dict[str, Any]:
    (row,) = frame.drop_duplicates("mean").to_dict("records")
    return dict(row)


def student(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean."""
    half = T[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def test_differences_are_paired_by_seed_and_spread_over_seeds() -> None:
    losses = {"softmax": [3.0, 3.5, 4.0], "gated": [2.9, 3.45, 3.99]}
    found = compare(of_seeds(losses), "gated", "softmax")
    differences = [-0.1, -0.05, -0.01]
    assert found.frame["difference"].tolist() == pytest.approx(differences)
    assert found.frame["seed"].tolist() == [0, 1, 2]
    row = only_row(found.frame)
    assert row["mean"] == pytest.approx(statistics.fmean(differences))
    assert row["deviation"] == pytest.approx(statistics.stdev(differences))
    assert (row["mean_low"], row["mean_high"]) == pytest.approx(student(differences), rel=1e-5)
    assert row["seeds"] == 3
    assert not found.missing
    assert not found.notes


def test_the_interval_over_items_is_the_records_and_turns_with_the_sign() -> None:
    cells = of_seeds({"softmax": [3.0], "gated": [2.9]})
    ahead = only_row(compare(cells, "gated", "softmax").frame)
    assert (ahead["low"], ahead["difference"], ahead["high"]) == pytest.approx((-0.12, -0.1, -0.09))
    behind = only_row(compare(cells, "softmax", "gated").frame)
    assert (behind["low"], behind["difference"], behind["high"]) == pytest.approx((0.09, 0.1, 0.12))
    assert math.isnan(ahead["mean_low"])


def test_two_arms_without_softmax_have_a_spread_over_seeds_but_no_interval_over_items() -> None:
    cells = of_seeds({"softmax": [3.0, 3.5], "combo": [2.8, 3.4], "gated": [2.9, 3.45]})
    found = compare(cells, "combo", "gated").frame
    assert found["difference"].tolist() == pytest.approx([-0.1, -0.05])
    assert found["low"].isna().all()
    assert found["mean_low"].notna().all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"convention": "P1 seq=32"}, "convention"),
        ({"identity": {"data_sha256": "b" * 64}}, "data_sha256"),
        ({"identity": {"weights_sha256": "b" * 64}}, "matched_sha256"),
        ({"n": 99}, "items"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"versions": {"task": 2}}, "task_version"),
        ({"versions": {"quantizer": 2}}, "quantizer_version"),
    ],
)
def test_what_was_asked_otherwise_is_not_compared_and_named(changes: dict[str, Any], said: str) -> None:
    cells = [record("softmax", {LOSS: 3.0}), record("gated", {LOSS: 2.9}, **changes)]
    found = compare(cells, "gated", "softmax")
    assert found.frame.empty
    (note,) = found.notes
    assert said in note
    assert len(compare([cells[0], record("gated", {LOSS: 2.9})], "gated", "softmax").frame) == 1


def test_seeds_of_other_conventions_are_compared_but_not_averaged() -> None:
    cells = of_seeds({"softmax": [3.0, 3.5], "gated": [2.9, 3.45]})
    apart = [one if one.cell.seed == 0 else replace(one, convention="P1 seq=32") for one in cells]
    assert compare(apart, "gated", "softmax").frame["seeds"].tolist() == [1, 1]
    assert compare(cells, "gated", "softmax").frame["seeds"].tolist() == [2, 2]


def test_a_second_metric_with_other_items_is_left_out() -> None:
    other = Metric("kl", "nats/token", "lower", "mean")
    first, second = record("gated", {LOSS: 2.9, other: 0.1}), record("softmax", {LOSS: 3.0, other: 0.2})
    second = replace(second, scores=(second.scores[0], replace(second.scores[1], n=50)))
    found = compare([first, second], "gated", "softmax")
    assert found.frame["metric"].tolist() == ["loss"]
    assert "50" in found.notes[0]


def test_arms_trained_with_other_weights_are_compared_where_their_training_was_the_same() -> None:
    def trained(arm: str, value: float, letter: str, training: str) -> Record:
        identity = {"weights_sha256": letter * 64, "training_sha256": training * 64}
        return record(arm, {LOSS: value}, model="tier:toy", identity=identity)

    softmax, gated = trained("softmax", 3.0, "b", "t"), trained("gated", 2.9, "c", "t")
    assert only_row(compare([softmax, gated], "gated", "softmax").frame)["mean"] == pytest.approx(-0.1)
    assert compare([softmax, trained("gated", 2.9, "c", "u")], "gated", "softmax").frame.empty


def test_a_difference_to_a_softmax_cell_that_is_gone_is_not_shown() -> None:
    cells = [record("softmax", {LOSS: 3.2}), record("gated", {LOSS: 2.9}, softmax={LOSS: 3.0})]
    found = compare(cells, "gated", "softmax")
    assert found.frame.empty
    assert "--force" in found.notes[0]


@pytest.mark.parametrize("quantizer", ["none", STATIC, "rtn(execution=integer)"])
def test_a_missing_cell_is_named_with_the_command_that_measures_it(quantizer: str) -> None:
    cells = [record("softmax", {LOSS: 3.0}, quantizer=quantizer, task="python_docs(limit=3)", seed=2)]
    (missing,) = compare(cells, "clipped_softmax", "softmax", Path("else where")).missing
    assert missing.cell == replace(cells[0].cell, arm="clipped_softmax")
    words = shlex.split(missing.command)
    assert words[:3] == ["quant-bench", "run", "m"]
    with main.commands["run"].make_context("run", words[2:]) as context:
        options = {key: value for key, value in context.params.items() if key != "plugins"}
    planned = [one.cell for one in planned_cells(RunOptions(**options))]
    assert planned == [cells[0].cell, missing.cell]
    assert options["results"] == Path("else where")


def test_seeds_of_another_unit_are_compared_but_not_averaged() -> None:
    percent = replace(LOSS, unit="percent")
    made = [
        record(arm, {LOSS if seed else percent: 3.0 + seed}, seed) for arm in ("gated", "softmax") for seed in (0, 1)
    ]
    found = compare(made, "gated", "softmax").frame
    assert (found["seeds"].tolist(), sorted(found["unit"])) == ([1, 1], sorted([LOSS.unit, "percent"]))


def test_a_model_that_is_named_like_an_option_is_none_in_a_command() -> None:
    made = record("softmax", {LOSS: 3.0})
    made = replace(made, cell=replace(made.cell, model="--force"), settings={**made.settings, "model": {}})
    words = shlex.split(command_for(made, ["softmax"]))
    with main.commands["run"].make_context("run", words[2:]) as context:
        assert (context.params["model"], context.params["force"]) == ("--force", False)


def test_a_failed_cell_is_missing_and_says_why_and_what_makes_no_sense_is_neither() -> None:
    softmax = record("softmax", {LOSS: 3.0})
    lost = {"scores": (), "convention": None, "coverage": None}
    failed = replace(record("gated", {}), state="failed", reason="ValueError: broken", **lost)
    (missing,) = compare([softmax, failed], "gated", "softmax").missing
    assert "ValueError: broken" in str(missing)
    senseless = replace(failed, state="not_applicable")
    assert compare([softmax, senseless], "gated", "softmax").missing == ()


def test_redundancy_is_that_of_the_paper() -> None:
    frame = redundancy(report.long_frame(record(arm, {LOSS: value}) for arm, value in PAPER.items()))
    row = frame.to_dict("records")[0]
    gains = (row["gain_sink"], row["gain_gate"], row["gain_both"], row["redundancy"])
    assert gains == pytest.approx((0.0185, 0.0037, 0.0177, 0.0045), abs=1e-9)
    assert (row["form"], row["seeds"], row["unit"]) == ("norm", 1, "nats/token")
    assert math.isnan(row["redundancy_low"])


def test_redundancy_of_seeds_has_their_spread_and_each_form_its_own_rows() -> None:
    losses = {
        "softmax": [4.0, 4.1, 4.3],
        "sink_logit": [3.9, 4.0, 4.1],
        "norm_gate": [3.95, 4.0, 4.2],
        "combo": [3.85, 3.95, 4.1],
        "projection_gate": [3.9, 4.0],
        "combo2": [3.8, 3.9],
    }
    frame = redundancy(report.long_frame(of_seeds(losses)))
    forms = (("norm", "norm_gate", "combo", 3), ("projection", "projection_gate", "combo2", 2))
    expected = {
        form: [
            losses["softmax"][seed] - losses["sink_logit"][seed] - losses[gate][seed] + losses[both][seed]
            for seed in range(seeds)
        ]
        for form, gate, both, seeds in forms
    }
    for form, values in expected.items():
        rows = frame[frame["form"] == form]
        assert rows["redundancy"].tolist() == pytest.approx(values)
        assert rows["redundancy_mean"].iloc[0] == pytest.approx(statistics.fmean(values))
        interval = (rows["redundancy_low"].iloc[0], rows["redundancy_high"].iloc[0])
        assert interval == pytest.approx(student(values), rel=1e-5, abs=1e-9)
        assert set(rows["seeds"]) == {len(values)}


@pytest.mark.parametrize("better", ["higher", "lower", "neither"])
def test_a_gain_is_positive_where_the_arm_is_better(better: Better) -> None:
    metric = Metric("share", "share", better, "mean")
    values = {"softmax": 0.5, "sink_logit": 0.6, "norm_gate": 0.55, "combo": 0.62}
    frame = redundancy(report.long_frame(record(arm, {metric: value}) for arm, value in values.items()))
    if better == "neither":
        assert frame.empty
    else:
        sign = 1 if better == "higher" else -1
        assert frame["gain_sink"].tolist() == pytest.approx([sign * 0.1])
        assert frame["redundancy"].tolist() == pytest.approx([sign * 0.03])


def test_a_perplexity_gains_what_its_loss_gains() -> None:
    perplexity = Metric("perplexity", "1", "lower", "exp")
    cells = [record(arm, {LOSS: value, perplexity: math.exp(value)}) for arm, value in PAPER.items()]
    frame = redundancy(report.long_frame(cells)).set_index("metric")
    for gain in ("gain_sink", "gain_gate", "gain_both", "redundancy"):
        assert frame.loc["perplexity", gain] == pytest.approx(frame.loc["loss", gain], abs=1e-12)
    assert frame.loc["perplexity", "unit"] == "nats"


@pytest.mark.parametrize("lost", sorted(PAPER))
def test_no_redundancy_without_all_four_arms_at_one_seed(lost: str) -> None:
    cells = [record(arm, {LOSS: value}, seed=int(arm == lost)) for arm, value in PAPER.items()]
    frame = report.long_frame(cells)
    assert redundancy(frame).empty
    assert "2×2" not in report.rendered(frame, "markdown")
    other = [record(arm, {LOSS: value}, n=99 if arm == lost else 100) for arm, value in PAPER.items()]
    assert redundancy(report.long_frame(other)).empty


@pytest.mark.parametrize("how", ["table", "markdown", "latex"])
def test_the_leaderboard_has_the_redundancy_where_all_four_arms_are(how: report.Format) -> None:
    frame = report.long_frame(record(arm, {LOSS: value}) for arm, value in PAPER.items())
    found = report.rendered(frame, how, 200)
    assert "+0.0045" in found
    assert "gain(sink)" in found


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["compare", *(str(argument) for argument in arguments)])


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two arms of two quantizers and two seeds, and one cell that only softmax has."""
    losses = {"softmax": [3.0, 3.5], "gated": [2.9, 3.45]}
    for one in [*of_seeds(losses), *of_seeds(losses, quantizer=STATIC), record("softmax", {LOSS: 1.0}, task="other")]:
        one.write(tmp_path)
    return tmp_path


@pytest.mark.parametrize("how", report.FORMATS)
def test_every_format_has_the_difference_and_the_missing_cell_is_said_beside_it(how: str, results: Path) -> None:
    found = call("gated", "softmax", "--results", results, "--format", how)
    assert found.exit_code == 1
    assert "missing: gated of m, none, other" in found.stderr
    assert "quant-bench run m --arm gated --arm softmax --quantizer none --task other" in found.stderr
    if how == "csv":
        rows = list(csv.DictReader(io.StringIO(found.stdout)))
        assert [float(row["difference"]) for row in rows] == pytest.approx([-0.1, -0.05] * 2)
        assert [float(row["mean"]) for row in rows] == pytest.approx([-0.075] * 4)
    elif how == "json":
        assert {row["quantizer"] for row in json.loads(found.stdout)} == {"none", STATIC}
        assert {row["seeds"] for row in json.loads(found.stdout)} == {2}
    else:
        assert "-0.0750" in found.stdout
        assert "w8a8-static" in found.stdout


def test_filters_choose_records_by_name_or_shorthand(results: Path) -> None:
    found = call("gated", "softmax", "--results", results, "--task", "text", "--format", "json")
    assert found.exit_code == 0
    assert len(json.loads(found.stdout)) == 4
    found = call("gated", "softmax", "--results", results, "--quantizer", "w8a8-static", "--format", "json")
    assert {row["label"] for row in json.loads(found.stdout)} == {"w8a8-static"}
    found = call("gated", "softmax", "--results", results, "--model", "n")
    assert found.exit_code == 1
    assert "no record" in found.stderr


def test_a_recipe_at_its_default_bits_is_named_and_found_as_in_the_leaderboard(tmp_path: Path) -> None:
    for arm, quantizer in (("softmax", "smoothquant"), ("softmax", "none"), ("gated", "smoothquant")):
        given = dict.fromkeys(DEFAULTS) if quantizer == "smoothquant" else {}
        made = record(arm, {LOSS: 3.0}, quantizer=quantizer)
        replace(made, settings={**made.settings, "quantizer": given}).write(tmp_path)
    for sides in (("smoothquant:w8a8", "none"), ("softmax", "gated", "--quantizer", "smoothquant:w8a8")):
        found = call(*sides, "--task", "text", "--results", tmp_path, "--format", "markdown")
        assert "smoothquant:w8a8" in found.stdout, found.output


def test_a_tier_is_chosen_however_its_settings_are_written(tmp_path: Path) -> None:
    for arm, value in (("softmax", 3.0), ("gated", 2.5)):
        made = record(arm, {LOSS: value})
        replace(made, cell=replace(made.cell, model="tier:toy(tokens=12288)")).write(tmp_path)
    for name in ("tier:toy(steps=3)", "tier:toy(tokens=12288)"):
        found = call("gated", "softmax", "--results", tmp_path, "--model", name)
        assert found.exit_code == 0, found.output
    assert call("gated", "softmax", "--results", tmp_path, "--model", "tier:toy").exit_code == 1
    assert call("gated", "softmax", "--results", tmp_path, "--model", "tier:none").exit_code == 2


def test_nothing_to_compare_names_what_to_run(results: Path) -> None:
    found = call("gated", "softmax", "--results", results, "--task", "other")
    assert found.exit_code == 1
    assert "quant-bench run m --arm gated --arm softmax --quantizer none --task other" in found.stderr
    assert found.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("gated",),
        ("gated", "softmax", "combo"),
        ("gated", "gated"),
        ("gated", "softmaxx"),
        ("gated", "softmax", "--table", "2x2"),
        ("gated", "softmax", "--table", "3x3"),
        ("gated", "softmax", "--quantizer", "rtm"),
    ],
)
def test_what_is_not_understood_is_exit_code_two(arguments: tuple[str, ...], results: Path) -> None:
    found = call(*arguments, "--results", results)
    assert found.exit_code == 2
    assert "Traceback" not in found.output


@pytest.mark.parametrize("how", report.FORMATS)
def test_the_2x2_is_printed_in_every_format(how: str, tmp_path: Path) -> None:
    for arm, value in PAPER.items():
        record(arm, {LOSS: value}).write(tmp_path)
    found = call("--table", "2x2", "--results", tmp_path, "--format", how)
    assert found.exit_code == 0
    if how == "json":
        assert json.loads(found.stdout)[0]["redundancy"] == pytest.approx(0.0045)
    elif how == "csv":
        (row,) = csv.DictReader(io.StringIO(found.stdout))
        assert float(row["redundancy"]) == pytest.approx(0.0045)
    else:
        assert "+0.0045" in found.stdout


def test_a_2x2_without_its_arms_says_which_are_needed(results: Path) -> None:
    found = call("--table", "2x2", "--results", results)
    assert found.exit_code == 1
    assert "sink_logit, projection_gate, combo2" in found.stderr
    assert "quant-bench run m --arm softmax --arm sink_logit --arm norm_gate --arm combo" in found.stderr


def test_two_arms_of_a_model_are_compared_end_to_end(tmp_path: Path) -> None:
    """The differences of the command are those that the samples of the cells give by hand."""
    model = tiny_model("llama", num_hidden_layers=1)
    model.module.save_pretrained(tmp_path / "model")
    model.tokenizer.save_pretrained(tmp_path / "model")
    options = RunOptions(
        str(tmp_path / "model"),
        arms=("norm_gate", "softmax", "sink_logit"),
        quantizers=("none", "w8a8"),
        tasks=("python_docs(limit=3,seq_length=32)",),
        results=tmp_path / "results",
        cache=tmp_path / "cache",
    )
    outcomes = run_cells(options)
    assert {outcome.state for outcome in outcomes} == {"measured"}
    store, by_hand = SampleStore(tmp_path / "cache"), set()
    for path in store.folder.glob("*.parquet"):
        samples = store.read(path.stem)
        assert samples is not None
        by_hand.add(round(math.exp(samples.frame["nll"].sum() / samples.frame["tokens"].sum()), 6))
    for first, second in (("norm_gate", "softmax"), ("norm_gate", "sink_logit")):
        found = call(first, second, "--results", options.results, "--format", "json")
        assert found.exit_code == 0, found.output
        rows = [row for row in json.loads(found.stdout) if row["metric"] == "token_perplexity"]
        assert {row["label"] for row in rows} == {"none", "w8a8"}
        for row in rows:
            assert {round(row["first_value"], 6), round(row["second_value"], 6)} <= by_hand
            assert row["difference"] == row["first_value"] - row["second_value"] != 0
            assert (row["low"] is None) == (second != "softmax")
            # the tiny tokenizer knows no word of a text, so that all windows are alike and the interval has no width
            assert row["low"] is None or row["low"] <= row["difference"] <= row["high"]
    found = report.rendered(report.leaderboard(options.results), "markdown")
    assert found.count("vs softmax +") + found.count("vs softmax -") > 4
