"""Two quantizers or models against each other: intervals from answers in the cache, flips, and layers side by side."""

import csv
import io
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from scipy import stats

from quant_bench.cli import main
from quant_bench.record import Cell, Record
from quant_bench.report import long_frame
from quant_bench.report.compare import Comparison, compare
from quant_bench.report.paired import Columns
from quant_bench.samples import Samples, SampleStore, key_of
from quant_bench.score import Delta, Metric, Score
from quant_bench.site.filled import made_board
from quant_bench.site.pairs import paired_rows
from quant_bench.statistics import delta_of

DIGEST, OTHER = "a" * 64, "b" * 64
W8, W4 = "rtn", "rtn(activation_bits=4,weight_bits=4)"
ACC = Metric("acc", "share", "higher", "mean", 0.25)
PERPLEXITY = Metric("token_perplexity", "1", "lower", "exp")
PEAK = Metric("max_inf_norm", "1", "lower")


def record(quantizer: str = W8, scores: Mapping[Metric, float] | None = None, n: int = 200, **changes: Any) -> Record:
    digests = {key: DIGEST for key in ("weights_sha256", "tokenizer_sha256", "data_sha256", "calibration_sha256")}
    cell = Cell(changes.pop("model", "m"), changes.pop("arm", "softmax"), quantizer, changes.pop("task", "text"), 0)
    made = Record(
        state="measured",
        reason=None,
        cell=cell,
        settings={"model": {"name": cell.model, "dtype": "float32"}, "arm": {}, "quantizer": {}, "task": {}},
        versions={"arm": 1, "quantizer": 1, "task": 1, "quant_bench": "0.1.0"},
        identity=digests | changes.pop("identity", {}),
        convention=changes.pop("convention", "P1 seq=64"),
        coverage={"quantized": {}, "skipped": {}, "tied": {}, "mac_share": 0.0, "notes": []},
        scores=tuple(Score(metric, value, n=n) for metric, value in (scores or {}).items()),
    )
    return replace(made, **changes)


def answers(seed: int, n: int = 200) -> pd.DataFrame:
    """Items that are right or wrong, and log-likelihoods of windows, in part shared by every seed."""
    shared, own = np.random.default_rng(0), np.random.default_rng(seed)
    tokens = shared.integers(20, 60, n)
    nll = tokens * (shared.normal(3.0, 0.5, n) + own.normal(0.1 * seed, 0.05, n))
    right = (shared.random(n) + own.normal(0, 0.1, n) > 0.5).astype(float)
    return pd.DataFrame(
        {"item": range(n), "acc": right, "nll": nll, "tokens": tokens, "text": [f"q{i}" for i in range(n)]}
    )


def scores_of(frame: pd.DataFrame) -> dict[Metric, float]:
    return {ACC: frame["acc"].mean(), PERPLEXITY: math.exp(frame["nll"].sum() / frame["tokens"].sum())}


def kept(store: SampleStore, made: Record, frame: pd.DataFrame, **changes: Any) -> Record:
    """The record, with its answers in the cache."""
    key = key_of(vars(made.cell), made.identity, made.versions, made.identity["calibration_sha256"])
    store.write(key, Samples(frame, changes.get("data", DIGEST), False, made.convention))
    return made


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SampleStore:
    monkeypatch.setenv("QUANT_BENCH_CACHE", str(tmp_path / "cache"))
    return SampleStore(tmp_path / "cache")


@pytest.fixture
def pair(store: SampleStore) -> list[Record]:
    return [kept(store, record(name, scores_of(answers(i))), answers(i)) for i, name in ((1, W8), (2, W4))]


def test_the_site_has_the_digits_of_the_comparison_for_any_two_rows(store: SampleStore, pair: list[Record]) -> None:
    made = [*pair, kept(store, record("none", scores_of(answers(3))), answers(3))]
    board = made_board(long_frame(made), made)
    rows = {row.label: row.key for row in board.rows}
    expected = by_metric(compare(pair, W8, W4, by="quantizer", store=store))
    for column, pairs in zip(board.columns, paired_rows(board, store), strict=True):
        assert len(pairs) == 3
        found = {frozenset(keys): (keys, one) for keys, one in pairs.items()}
        keys, one = found[frozenset((rows["w8a8"], rows["w4a4"]))]
        row = expected[column.metric]
        ends = (row["difference"], row["low"], row["high"])
        mirrored = (-row["difference"], -row["high"], -row["low"])
        assert one[:3] == pytest.approx(ends if keys[0] == rows["w8a8"] else mirrored, rel=1e-12)
    assert [len(pairs) for pairs in paired_rows(board, None)] == [0] * len(board.columns)
    # rows of other weights are not compared, and neither are answers that are gone
    other = replace(made[0], identity=made[0].identity | {"weights_sha256": OTHER})
    apart = made_board(long_frame([other, *made[1:]]), [other, *made[1:]])
    assert {len(pairs) for pairs in paired_rows(apart, store)} == {1}
    next(store.folder.glob("*.parquet")).unlink()
    assert {len(pairs) for pairs in paired_rows(board, store)} == {1}


@pytest.mark.parametrize("other", ["none", W4])
def test_b_minus_a_is_a_minus_b_with_its_sign_turned_in_the_terminal_and_on_the_site(
    store: SampleStore, other: str
) -> None:
    for seed in (5, 6):
        frames = {W8: answers(1), other: answers(seed)}
        made = [kept(store, record(name, scores_of(frame)), frame) for name, frame in frames.items()]
        there, back = (
            by_metric(compare(made, *names, by="quantizer", store=store)) for names in ((W8, other), (other, W8))
        )
        assert {name: (row["low"], row["high"]) for name, row in there.items()} == {
            name: (-row["high"], -row["low"]) for name, row in back.items()
        }
        board = made_board(long_frame(made), made)
        quantizers = {row.key: row.quantizer for row in board.rows}
        for column, pairs in zip(board.columns, paired_rows(board, store), strict=True):
            (((first, _), one),) = pairs.items()
            row = (there if quantizers[first] == W8 else back)[column.metric]
            assert one == (row["difference"], row["low"], row["high"], 1)
        if other == "none":
            # as the record would have it
            ends = delta_of(Columns(ACC, "acc", None), *frames.values(), 0, "none").ci95
            assert (there["acc"]["low"], there["acc"]["high"]) == ends


def test_rows_whose_common_arm_has_two_versions_are_not_subtracted(store: SampleStore) -> None:
    versions = {"quantizer": 1, "task": 1, "quant_bench": "0.1.0"}
    for several in (False, True):
        made = [
            kept(store, replace(one, cell=replace(one.cell, seed=seed)), answers(index))
            for index, name in ((1, W8), (2, W4))
            for seed in range(1 + several)
            for one in [record(name, scores_of(answers(index)), versions=versions | {"arm": index})]
        ]
        assert compare(made, W8, W4, by="quantizer", store=store).frame.empty
        board = made_board(long_frame(made), made)
        assert [len(pairs) for pairs in paired_rows(board, store)] == [0] * len(board.columns)


def test_answers_in_another_order_are_paired_by_item_on_the_site_too(store: SampleStore) -> None:
    frames = {W8: answers(1), W4: answers(2).iloc[::-1]}
    made = [kept(store, record(name, scores_of(frame)), frame) for name, frame in frames.items()]
    board = made_board(long_frame(made), made)
    expected = by_metric(compare(made, W8, W4, by="quantizer", store=store))
    for column, pairs in zip(board.columns, paired_rows(board, store), strict=True):
        (one,) = pairs.values()
        row = expected[column.metric]
        assert sorted(map(abs, one[1:3])) == sorted(map(abs, (row["low"], row["high"])))


def test_questions_from_elsewhere_are_shown_as_they_are_while_pairs_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    made = [record(name, {ACC: 0.5}, convention="x[/b] \x1b]0;title\x07") for name in (W8, W4)]
    assert len(paired_rows(made_board(long_frame(made), made), None)) == 1
    assert "x[/b]" in terminal.getvalue()
    assert "\x1b]" not in terminal.getvalue()


@pytest.mark.parametrize("metric", [ACC, PEAK])
def test_rows_of_several_seeds_differ_by_students_interval_over_the_seeds(metric: Metric) -> None:
    values = {"none": (0.5, 0.6, 0.4), W8: (0.45, 0.5, 0.41), W4: (0.2, 0.25, 0.3)}
    made = [
        replace(one, cell=replace(one.cell, seed=seed))
        for name, numbers in values.items()
        for seed, value in enumerate(numbers)
        for one in [record(name, {metric: value})]
    ]
    board = made_board(long_frame(made), made)
    (pairs,) = paired_rows(board, None)
    quantizers = {row.key: row.quantizer for row in board.rows}
    assert len(pairs) == 3
    for (first, second), one in pairs.items():
        differences = np.subtract(values[quantizers[first]], values[quantizers[second]])
        half = stats.t.ppf(0.975, 2) * differences.std(ddof=1) / math.sqrt(3)
        mean = differences.mean()
        assert one == pytest.approx((mean, mean - half, mean + half, 3))


def test_rows_of_other_seeds_differ_over_those_that_both_have_as_the_terminal_says(store: SampleStore) -> None:
    made = []
    for number, (name, seeds) in enumerate((("none", (0, 1, 2)), (W8, (1, 2)), (W4, (2,)), ("gptq", (3,)))):
        for seed in seeds:
            frame = answers(10 * number + seed)
            one = record(name, scores_of(frame))
            made.append(kept(store, replace(one, cell=replace(one.cell, seed=seed)), frame))
    board = made_board(long_frame(made), made)
    quantizers = {row.key: row.quantizer for row in board.rows}
    for column, pairs in zip(board.columns, paired_rows(board, store), strict=True):
        named = {tuple(quantizers[key] for key in keys): one for keys, one in pairs.items()}
        assert {frozenset(names) for names in named} == {
            frozenset(two) for two in (("none", W8), ("none", W4), (W8, W4))
        }
        for (first, second), one in named.items():
            row = by_metric(compare(made, first, second, by="quantizer", store=store))[column.metric]
            of = ("mean", "mean_low", "mean_high") if row["seeds"] > 1 else ("difference", "low", "high")
            assert one == pytest.approx((*(row[part] for part in of), row["seeds"]), rel=1e-12)
    # of two seeds no answers are needed, and of one the record's own difference is enough
    delta = Delta(made[5].scores[0].value - made[2].scores[0].value, (-1.0, 1.0), "none")
    made[5] = replace(made[5], scores=(replace(made[5].scores[0], delta=delta), *made[5].scores[1:]))
    found = paired_rows(made_board(long_frame(made), made), None)
    assert [sorted(one.seeds for one in pairs.values()) for pairs in found] == [[1, 2], *[[2]] * (len(found) - 1)]


def by_metric(found: Comparison) -> dict[str, dict[str, Any]]:
    return {row["metric"]: row for row in found.frame.to_dict("records")}


def of_ratio(first: pd.DataFrame, second: pd.DataFrame) -> tuple[float, float]:
    """Normal 95 % interval of the difference of two perplexities by linearization, paired by item."""
    parts = []
    for frame in (first, second):
        ratio = frame["nll"].sum() / frame["tokens"].sum()
        parts.append(math.exp(ratio) * (frame["nll"] - ratio * frame["tokens"]) / frame["tokens"].sum())
    n = len(first)
    half = 1.96 * math.sqrt(n / (n - 1) * ((parts[0] - parts[1]) ** 2).sum())
    difference = scores_of(first)[PERPLEXITY] - scores_of(second)[PERPLEXITY]
    return difference - half, difference + half


def test_intervals_of_two_quantizers_are_paired_over_the_answers_in_the_cache(
    store: SampleStore, pair: list[Record]
) -> None:
    found = by_metric(compare(pair, W8, W4, by="quantizer", store=store))
    first, second = answers(1), answers(2)
    accuracy = found["acc"]
    apart = first["acc"] - second["acc"]
    half = 1.96 * apart.std() / math.sqrt(len(apart))
    assert accuracy["difference"] == pytest.approx(apart.mean())
    assert (accuracy["low"], accuracy["high"]) == pytest.approx((apart.mean() - half, apart.mean() + half), abs=0.01)
    perplexity = found["token_perplexity"]
    expected = of_ratio(first, second)
    width = expected[1] - expected[0]
    assert (perplexity["low"], perplexity["high"]) == pytest.approx(expected, abs=0.1 * width)
    assert {row["interval"] for row in found.values()} == {"samples"}
    assert {row["arm"] for row in found.values()} == {"softmax"}


def test_without_answers_the_interval_is_unknown_and_the_commands_to_know_it_are_said(store: SampleStore) -> None:
    cells = [record(name, {ACC: 0.5, PEAK: 3.0}) for name in (W8, W4)]
    found = compare(cells, W8, W4, by="quantizer", store=store)
    assert found.frame["low"].isna().all()
    assert found.frame["interval"].isna().all()
    assert found.frame["difference"].tolist() == [0.0, 0.0]
    (note,) = found.notes
    assert "the cache does not have the answers of both" in note
    assert "quant-bench run m --arm softmax --quantizer w8a8 --quantizer w4a4 --task text --seed 0 --force" in note


@pytest.mark.parametrize("wrong", ["value", "n", "data"])
def test_answers_that_are_not_the_record_s_give_no_interval(wrong: str, store: SampleStore, pair: list[Record]) -> None:
    frame = answers(2)
    if wrong == "value":
        frame["acc"], frame["nll"] = 1 - frame["acc"], frame["nll"] * 1.001
    elif wrong == "n":
        frame = frame.iloc[:100]
    kept(store, pair[1], frame, data=OTHER if wrong == "data" else DIGEST)
    found = compare(pair, W8, W4, by="quantizer", store=store)
    assert found.frame["low"].isna().all()
    assert len(found.notes) == 1


def test_an_item_that_stands_twice_or_a_weight_without_end_gives_no_interval(store: SampleStore) -> None:
    twice = [pd.concat([answers(i), answers(i).iloc[:1].assign(acc=np.nan, nll=np.nan)]) for i in (1, 2)]
    endless = [answers(i)[["item"]].assign(value=1.0, weight=np.inf) for i in (1, 2)]
    for frames, metric, value in ((twice, ACC, answers(1)["acc"].mean()), (endless, replace(ACC, name="other"), 0.0)):
        cells = [
            kept(store, record(name, {metric: value}), frame) for name, frame in zip((W8, W4), frames, strict=True)
        ]
        found = compare(cells, W8, W4, by="quantizer", store=store)
        assert found.frame["low"].isna().all()
        assert "no column of the answers" in found.notes[0]


@pytest.mark.parametrize("damage", [b"{", b'{"columns": [{"name": "acc"}]}', b"[]"])
def test_a_file_of_answers_that_is_damaged_anywhere_is_as_if_it_were_not_there(
    damage: bytes, store: SampleStore, pair: list[Record]
) -> None:
    path = next(store.folder.glob("*.parquet"))
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata(table.schema.metadata | {b"pandas": damage}), path)
    found = compare(pair, W8, W4, by="quantizer", store=store)
    assert "the cache does not have the answers of both" in found.notes[0]


def test_two_columns_that_give_the_same_numbers_give_no_interval(store: SampleStore) -> None:
    frames = [answers(seed).rename(columns={"acc": "first_try"}) for seed in (1, 2)]
    shuffled = [frame.assign(second_try=frame["first_try"].to_numpy()[::-1]) for frame in frames]
    cells = [
        kept(store, record(name, {ACC: frame["first_try"].mean()}), frame)
        for name, frame in zip((W8, W4), shuffled, strict=True)
    ]
    found = compare(cells, W8, W4, by="quantizer", store=store)
    assert found.frame["low"].isna().all()
    assert "no column of the answers" in found.notes[0]


def test_the_difference_to_float_is_that_of_the_record(store: SampleStore) -> None:
    delta = Delta(-0.1, (-0.2, -0.05), "none", 0.01)
    cells = [record("none", {ACC: 0.6}), replace(record(W8), scores=(Score(ACC, 0.5, n=200, delta=delta),))]
    for names, ends in (((W8, "none"), (-0.2, -0.05)), (("none", W8), (0.05, 0.2))):
        row = by_metric(compare(cells, *names, by="quantizer", store=store))["acc"]
        assert (row["low"], row["high"]) == ends
        assert (row["interval"], row["p_value"]) == ("record", 0.01)


def test_flips_are_the_items_that_one_answers_and_the_other_does_not(store: SampleStore, pair: list[Record]) -> None:
    found = compare(pair, W8, W4, by="quantizer", store=store)
    first, second = answers(1)["acc"], answers(2)["acc"]
    assert found.flips["item"].tolist() == first.index[first != second].tolist()
    assert found.flips["first"].tolist() == first[first != second].tolist()
    assert found.flips["text"].tolist() == [f"q{item}" for item in found.flips["item"]]
    row = by_metric(found)["acc"]
    assert row["first_only"] == ((first == 1) & (second == 0)).sum() > 0
    assert row["second_only"] == ((first == 0) & (second == 1)).sum() > 0
    assert pd.isna(by_metric(found)["token_perplexity"]["first_only"])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"convention": "P1 seq=32"}, "convention"),
        ({"n": 100}, "items"),
        ({"identity": {"data_sha256": OTHER}}, "data_sha256"),
        ({"identity": {"weights_sha256": OTHER}}, "matched_sha256"),
        ({"versions": {"arm": 2, "quantizer": 1, "task": 1}}, "arm_version"),
        ({"versions": {"arm": 1, "quantizer": 1, "task": 2}}, "task_version"),
    ],
)
def test_quantizers_are_compared_only_where_all_else_agrees(changes: dict[str, Any], reason: str) -> None:
    cells = [record(W8, {ACC: 0.5}), record(W4, {ACC: 0.4}, **changes)]
    found = compare(cells, W8, W4, by="quantizer")
    assert found.frame.empty
    assert reason in found.notes[0]


def test_models_are_compared_on_the_same_questions_whatever_their_weights(store: SampleStore) -> None:
    cells = []
    for seed, model in ((1, "m"), (2, "n")):
        made = record(W8, scores_of(answers(seed)), model=model, identity={"weights_sha256": str(seed) * 64})
        cells.append(kept(store, made, answers(seed)))
    found = compare(cells, "m", "n", by="model", store=store)
    apart = answers(1)["acc"].mean() - answers(2)["acc"].mean()
    row = by_metric(found)["acc"]
    assert row["difference"] == pytest.approx(apart)
    assert row["low"] < apart < row["high"]
    assert (row["label"], row["arm"]) == ("w8a8", "softmax")
    assert pd.isna(row["model"])
    cells[1] = replace(cells[1], identity=dict(cells[1].identity) | {"data_sha256": OTHER})
    assert compare(cells, "m", "n", by="model").frame.empty


def test_windows_of_other_tokens_are_not_compared_but_documents_are() -> None:
    def cells(convention: str) -> list[Record]:
        other = {"tokenizer_sha256": OTHER}
        return [
            record(W8, {ACC: 0.5}, convention=convention),
            record(W8, {ACC: 0.4}, model="n", identity=other, convention=convention),
        ]

    windows = compare(cells("P1 seq=64"), "m", "n", by="model")
    assert windows.frame.empty
    assert "tokenizer_sha256" in windows.notes[0]
    assert len(compare(cells("lm-eval 0.4 hellaswag"), "m", "n", by="model").frame) == 1


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["compare", *(str(argument) for argument in arguments)])


@pytest.fixture
def results(tmp_path: Path, pair: list[Record]) -> Path:
    folder = tmp_path / "results"
    tensors = {
        f"layer_output model.layers.{layer}": {"kind": "layer_output", "layer": layer, "inf_norm": 10.0 * layer + 1}
        for layer in (0, 1)
    }
    for index, name in enumerate((W8, W4)):
        held = {key: {**value, "inf_norm": value["inf_norm"] + index} for key, value in tensors.items()}
        record(name, {PEAK: 11.0 + index}, task="outliers", details={"tensors": held}).write(folder)
    for one in pair:
        one.write(folder)
    return folder


def test_the_command_compares_two_quantizers_by_their_short_names(results: Path) -> None:
    found = call("w8a8", "w4a4", "--task", "text", "--flips", 2, "--results", results)
    assert found.exit_code == 0, found.output
    assert "w8a8" in found.stdout
    assert "right in" in found.stdout
    assert "4 of" in found.stdout
    assert found.stderr == ""


def test_the_site_s_command_says_how_many_pairs_the_answers_gave(
    results: Path, tmp_path: Path, store: SampleStore
) -> None:
    command = ["site", "--results", str(results), "--out", str(tmp_path / "site")]
    found = CliRunner().invoke(main, [*command, "--pairs"])
    assert (found.exit_code, found.stderr) == (0, f"2 paired intervals from the answers in {store.folder}\n")
    shutil.rmtree(store.folder)
    assert CliRunner().invoke(main, [*command, "--pairs"]).stderr.startswith("0 paired intervals")
    assert CliRunner().invoke(main, command).stderr == ""


def test_publishing_a_folder_keeps_the_pairs_that_were_asked_for(results: Path, tmp_path: Path) -> None:
    out, site = tmp_path / "public", tmp_path / "site"
    for command in (["publish", "--to", out], ["site", "--out", site]):
        found = CliRunner().invoke(main, [*map(str, command), "--results", str(results), "--pairs"])
        assert found.exit_code == 0, found.output
    assert (out / "assets/pairs.js").read_bytes() == (site / "assets/pairs.js").read_bytes()
    refused = CliRunner().invoke(main, ["publish", "--to", "hub:org/data", "--pairs", "--results", str(results)])
    assert refused.exit_code == 2


def test_flips_and_layers_are_tables_for_programs_too(results: Path) -> None:
    printed = json.loads(call("w8a8", "w4a4", "--flips", 1, "--format", "json", "--results", results).stdout)
    first, second = answers(1)["acc"], answers(2)["acc"]
    assert [row["item"] for row in printed] == first.index[first != second].tolist()
    printed = list(
        csv.DictReader(io.StringIO(call("w8a8", "w4a4", "--layers", "--format", "csv", "--results", results).stdout))
    )
    told = [(row["layer"], float(row["first_value"]), float(row["second_value"])) for row in printed]
    assert told == [("0", 1.0, 2.0), ("1", 11.0, 12.0)]
    shown = call("w8a8", "w4a4", "--layers", "--format", "markdown", "--results", results).stdout
    assert "| 1 | 11 | 12 |" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ("w8a8", "softmax"),
        ("w8a8", "m"),
        ("w8a8", "nothing"),
        ("w8a8", "rtn"),
        ("w8a8", "w4a4", "--quantizer", "w8a8"),
        ("w8a8", "w4a4", "--flips", "1", "--layers", "--format", "csv"),
    ],
)
def test_names_that_are_not_two_of_a_kind_are_exit_code_two(arguments: tuple[str, ...], results: Path) -> None:
    found = call(*arguments, "--results", results)
    assert found.exit_code == 2, found.output
    assert "Traceback" not in found.output


def test_a_quantizer_s_missing_cell_is_named_with_its_command(results: Path) -> None:
    record(W8, {ACC: 0.5}, task="other").write(results)
    found = call("w8a8", "w4a4", "--results", results)
    assert found.exit_code == 1
    assert "missing: softmax of m, w4a4, other: there is no record" in found.stderr
    assert "quant-bench run m --arm softmax --quantizer w8a8 --quantizer w4a4 --task other" in found.stderr


def test_layers_that_anybody_may_have_written_are_numbers_or_left_out(tmp_path: Path, store: SampleStore) -> None:
    for name in (W8, W4):
        odd = {"a": {"layer": 0, "inf_norm": True, "kurtosis": "x"}, "b": 3, "c": {"layer": "x", "inf_norm": 1.0}}
        record(name, {PEAK: 1.0}, details={"tensors": odd}).write(tmp_path / "results")
    found = call("w8a8", "w4a4", "--layers", "--format", "json", "--results", tmp_path / "results")
    assert [(row["tensor"], row["layer"]) for row in json.loads(found.stdout)] == [("c", None)]


def test_answers_with_values_of_different_items_give_no_interval_and_no_flips(store: SampleStore) -> None:
    frames = [answers(1), answers(2)]
    for frame, items in zip(frames, ([0, 1], [1, 2]), strict=True):
        frame.loc[frame["item"].isin(items), "acc"] = np.nan
    cells = [
        kept(store, record(name, {ACC: frame["acc"].mean()}, n=198), frame)
        for name, frame in zip((W8, W4), frames, strict=True)
    ]
    found = compare(cells, W8, W4, by="quantizer", store=store)
    assert found.frame["low"].isna().all()
    assert found.flips.empty
    assert "on the same items" in found.notes[0]


def test_a_metric_that_means_two_things_is_not_compared_and_named() -> None:
    percent = replace(ACC, unit="percent")
    found = compare([record(W8, {ACC: 0.5, PEAK: 1.0}), record(W4, {percent: 50.0, PEAK: 2.0})], W8, W4, by="quantizer")
    assert found.frame["metric"].tolist() == ["max_inf_norm"]
    assert "acc is not compared: its unit, direction, reduction or chance is another one in each" in found.notes[0]
