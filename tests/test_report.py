"""The leaderboard: what is ranked with what, and text from elsewhere made harmless."""

import csv
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from quant_bench import report
from quant_bench.errors import RecordError
from quant_bench.record import Cell, Record
from quant_bench.report import text
from quant_bench.score import Better, Delta, Metric, Score

DIGEST = "a" * 64
W4A4 = "rtn(activation_bits=4,weight_bits=4)"
NASTY = "x|y\n`<b>[l](http://e.com) *_#\x1b[31m\u202e[/bold][red] {$%&~^}\\ @me"


def score(value: float, *, name: str = "acc", better: Better = "higher", n: int | None = 100, **more: Any) -> Score:
    metric = Metric(name, "share", better, "mean", more.pop("chance", None))
    return Score(metric, value, 0.01, more.pop("ci95", (value - 0.02, value + 0.02)), n, **more)


def record(quantizer: str, scores: Sequence[Score] = (), **changes: Any) -> Record:
    parts = {"model": "m", "arm": "softmax", "quantizer": quantizer, "task": "hellaswag", "seed": 0}
    parts |= {key: changes.pop(key) for key in list(changes) if key in parts}
    execution = "integer" if "execution=integer" in quantizer else "simulated"
    versions = {"arm": 1, "quantizer": 1, "task": 1} | changes.pop("versions", {})
    digests = {key: DIGEST for key in ("weights_sha256", "tokenizer_sha256", "data_sha256", "calibration_sha256")}
    made = Record(
        state="measured" if scores else "failed",
        reason=None if scores else "ValueError: broken",
        cell=Cell(**parts),
        settings={
            "model": {"dtype": changes.pop("dtype", "float32")},
            "arm": {},
            "quantizer": {} if quantizer == "none" else {"execution": execution},
            "task": {},
        },
        versions=versions,
        identity=digests | changes.pop("identity", {}),
        convention="lm-eval v1" if scores else None,
        coverage={"quantized": {}, "skipped": {}, "tied": {}, "mac_share": 0.5, "notes": []} if scores else None,
        scores=tuple(scores),
    )
    return replace(made, **changes)


def ranks(frame: pd.DataFrame) -> dict[tuple[str, str], float]:
    """Rank by quantizer and metric, without rows that have none."""
    ranked = frame.dropna(subset=["rank"])
    return {
        (row.quantizer, row.metric): row.rank for row in ranked[["quantizer", "metric", "rank"]].itertuples(index=False)
    }


def test_ranks_follow_the_better_direction_and_ties_share_one() -> None:
    cells = [("none", 0.5, 20.0), ("rtn", 0.4, 21.0), ("rtn(execution=integer)", 0.4, 21.0), (W4A4, 0.3, 19.0)]
    frame = report.long_frame(
        record(
            quantizer, [score(acc), score(ppl, name="ppl", better="lower"), score(1.0, name="size", better="neither")]
        )
        for quantizer, acc, ppl in cells
    )
    by_row = frame.set_index(["quantizer", "execution", "metric"])["rank"]
    assert by_row["none", "float", "acc"] == 1
    assert by_row["rtn", "simulated", "acc"] == by_row["rtn", "integer", "acc"] == 2
    assert by_row["rtn(activation_bits=4,weight_bits=4)", "simulated", "acc"] == 4
    assert by_row["rtn(activation_bits=4,weight_bits=4)", "simulated", "ppl"] == 1
    assert frame.loc[frame["metric"] == "size", "rank"].isna().all()


def test_nothing_is_ranked_by_a_maximum() -> None:
    highest = Score(Metric("max_inf_norm", "1", "lower"), 63.2)
    frame = report.long_frame(record(q, [highest, score(v)]) for q, v in (("none", 0.5), ("rtn", 0.4)))
    assert ranks(frame) == {("none", "acc"): 1.0, ("rtn", "acc"): 2.0}
    assert "| 2 | w8a8 | simulated | 63.20 | 0.4000" in report.rendered(frame, "markdown")


@pytest.mark.parametrize(
    "changes",
    [
        {"convention": "lm-eval v2"},
        {"task": "hellaswag(limit=10)"},
        {"versions": {"task": 2}},
        {"identity": {"weights_sha256": "b" * 64}},
        {"identity": {"data_sha256": "b" * 64}},
        {"dtype": "bfloat16"},
        {"model": "other"},
    ],
)
def test_what_must_not_be_compared_is_not_ranked_together(changes: dict[str, Any]) -> None:
    frame = report.long_frame([record("none", [score(0.5)]), record("rtn", [score(0.4)], **changes)])
    assert frame["group"].nunique() == 2
    assert set(frame["rank"]) == {1.0}
    same = report.long_frame([record("none", [score(0.5)]), record("rtn", [score(0.4)])])
    assert list(same["rank"]) == [1.0, 2.0]


def test_other_item_counts_are_not_ranked_together() -> None:
    frame = report.long_frame([record("none", [score(0.5)]), record("rtn", [score(0.4, n=50)])])
    assert frame["group"].nunique() == 2
    second = [
        record("none", [score(0.5), score(0.6, name="kl")]),
        record("rtn", [score(0.4), score(0.7, name="kl", n=99)]),
    ]
    frame = report.long_frame(second)
    assert ranks(frame) == {("none", "acc"): 1.0, ("none", "kl"): 1.0, ("rtn", "acc"): 2.0}
    assert "0.7000* (n=99)" in report.rendered(frame, "table", 160)


def test_an_older_version_of_a_quantizer_is_shown_but_not_ranked() -> None:
    old, new = record("rtn", [score(0.9)]), record(W4A4, [score(0.4)], versions={"quantizer": 2})
    frame = report.long_frame([record("none", [score(0.5)]), old, new])
    assert ranks(frame) == {("none", "acc"): 1.0, (W4A4, "acc"): 2.0}
    assert "0.9000*" in report.rendered(frame, "table", 160)


@pytest.mark.parametrize(
    ("float_score", "informative"),
    [
        (score(0.26, chance=0.25), False),
        (score(0.24, chance=0.25), False),
        (score(0.26, chance=0.25, ci95=(0.251, 0.27)), True),
        (score(0.25, chance=0.25, ci95=None), False),
        (score(0.02, chance=0.0), False),
        (score(50_000.0, chance=49_152.0, better="lower"), False),
        (score(20.0, chance=49_152.0, better="lower"), True),
        (score(0.02), True),
    ],
)
def test_a_task_is_uninformative_where_the_float_model_is_at_chance(float_score: Score, informative: bool) -> None:
    frame = report.long_frame([record("none", [float_score]), record("rtn", [replace(float_score, value=0.7)])])
    assert set(frame["uninformative"]) == {not informative}
    assert frame["rank"].notna().all() == informative
    assert ("†" in report.rendered(frame, "markdown").partition("## m")[2]) != informative


@pytest.mark.parametrize(
    ("better", "interval", "p_value", "flagged"),
    [
        ("higher", (0.01, 0.05), None, True),
        ("higher", (0.01, 0.05), 0.01, True),
        ("higher", (0.01, 0.05), 0.2, False),
        ("higher", (-0.01, 0.05), None, False),
        ("higher", (-0.05, -0.01), None, False),
        ("lower", (-0.05, -0.01), None, True),
        ("lower", (0.01, 0.05), None, False),
        ("neither", (0.01, 0.05), None, False),
    ],
)
def test_significantly_better_than_float_is_flagged(
    better: Better, interval: tuple[float, float], p_value: float | None, flagged: bool
) -> None:
    delta = Delta(sum(interval) / 2, interval, "none", p_value)
    cells = [record("none", [score(0.5, better=better)]), record("rtn", [score(0.53, better=better, delta=delta)])]
    frame = report.long_frame(cells)
    assert list(frame["beats_float"]) == [False, flagged]
    assert ("‡" in report.rendered(frame, "markdown").partition("## m")[2]) == flagged


def test_a_metric_of_another_direction_or_unit_is_shown_but_not_ranked_or_averaged() -> None:
    turned = replace(score(0.9), metric=replace(score(0.9).metric, better="lower"))
    others = [record("rtn", [score(0.5)]), record("rtn", [turned], seed=1)]
    frame = report.long_frame([record("none", [score(0.6)]), *others])
    assert ranks(frame) == {("none", "acc"): 1.0, ("rtn", "acc"): 2.0}
    assert frame["other_items"].tolist() == [False, False, True]
    assert frame["seeds"].tolist() == [1, 1, 1]
    assert "0.5000 (1 of 2 seeds)" in report.rendered(frame, "markdown")


@pytest.mark.parametrize("said", ["float", [1], {"a": 1}, 5])
def test_no_setting_makes_a_quantizer_the_float_model(said: Any) -> None:
    made = record("rtn", [score(0.5)])
    made.settings["quantizer"]["execution"] = said
    frame = report.long_frame([made, record("q(execution=float)", [score(0.4)]), record("none", [score(0.6)])])
    assert set(frame.loc[frame["execution"] == "float", "quantizer"]) == {"none"}
    assert all(report.rendered(frame, how, 160) for how in report.FORMATS)


@pytest.mark.parametrize(
    ("state", "shown"), [("failed", "failed"), ("blocked", "blocked"), ("not_applicable", "not applicable")]
)
def test_a_cell_without_scores_is_shown_with_its_reason(state: Any, shown: str) -> None:
    unknown = {"weights_sha256": None, "data_sha256": None}
    lost = record("rtn", state=state, reason="gsm8k is missing: put it under DATA", identity=unknown)
    frame = report.long_frame([record("none", [score(0.5)]), lost])
    assert frame["group"].nunique() == 1
    for how in report.FORMATS:
        found = report.rendered(frame, how, 160)
        assert "gsm8k is missing" in found
        assert (state if how in ("csv", "json") else shown) in found


def test_cells_without_any_score_have_a_table_too() -> None:
    frame = report.long_frame([record("rtn", identity={"weights_sha256": None, "data_sha256": None})])
    for how in report.FORMATS:
        assert "broken" in report.rendered(frame, how, 160)


def test_rows_are_quantizer_and_execution_with_interval_and_difference() -> None:
    delta = Delta(-0.1, (-0.13, -0.07), "none", 0.001)
    cells = [record("none", [score(0.5)]), record("rtn(execution=integer)", [score(0.4, delta=delta)])]
    found = report.rendered(report.long_frame(cells), "markdown")
    assert r"| 1 | none | float | 0.5000<br>\[0.4800, 0.5200\] |" in found
    assert r"| 2 | w8a8 | integer | 0.4000<br>\[0.3800, 0.4200\]<br>Δ -0.1000 \[-0.1300, -0.0700\] |" in found
    assert "hellaswag · lm-eval v1 · 100 items · version 1 · data aaaaaaaaaaaa" in found


def test_many_metrics_are_cut_into_tables_that_fit() -> None:
    scores = [score(0.5, name=f"metric_{index}") for index in range(14)]
    found = report.rendered(report.long_frame([record("none", scores)]), "markdown")
    assert found.count("(continued)") == 3
    assert all(f"metric_{index} " in found for index in range(14))


def test_several_tasks_have_an_overview_with_one_column_each() -> None:
    cells = [record(q, [score(0.5)], task=task) for q in ("none", "rtn") for task in ("hellaswag", "lambada(limit=9)")]
    overview = report.rendered(report.long_frame(cells), "markdown").partition("### Overview")[2].partition("###")[0]
    assert "hellaswag: acc" in overview
    assert "lambada: acc" in overview
    assert "lambada(limit=9) · lm-eval v1" in overview
    assert "| w8a8 | simulated | 0.5000 | 0.5000 |" in overview


def test_a_row_with_many_poor_answers_does_not_lead_the_overview() -> None:
    values = {"none": 0.9, "rtn": 0.8, "gptq": 0.7, "rtn(activation_bits=4,weight_bits=4)": 0.1}
    cells = [record(spec, [score(value)]) for spec, value in values.items()]
    # two further questions, one of which the last of the first was asked with nobody ahead of it but the float model
    cells += [record(spec, [score(values[spec])], task="lambada") for spec in ("none", *list(values)[2:])]
    cells += [record(spec, [score(1.0)], task="parity") for spec in list(values)[2:]]
    overview = report.rendered(report.long_frame(cells), "markdown").partition("### Overview")[2].partition("###")[0]
    lines = [
        line.split(" | ")[0] for line in overview.splitlines() if " | simulated | " in line or " | float | " in line
    ]
    assert lines == ["| none", "| w8a8", "| gptq", "| w4a4"]


def test_a_row_is_only_half_ahead_of_its_twin_in_the_overview() -> None:
    twins = ("rtn", "rtn(execution=integer)")
    cells = [record(spec, [score(0.7)]) for spec in twins] + [record("gptq(weight_bits=4)", [score(0.1)])]
    # 0.75 of the others for each twin (not 1), 0.8 for the second of six
    cells += [record(f"rtn(weight_bits={7 - i})", [score(0.9 - i / 10)], task="lambada") for i in range(6)]
    overview = report.rendered(report.long_frame(cells), "markdown").partition("### Overview")[2].partition("###")[0]
    places = [overview.index(f"| {name} |") for name in ("rtn(weight_bits=6)", "w8a8", "rtn(weight_bits=5)")]
    assert places == sorted(places)


def test_a_note_on_the_model_is_shown() -> None:
    noted = record("none", [score(0.5)], identity={"note": "dequantized from a Q4_1 GGUF file"})
    for how in ("table", "markdown", "csv", "json"):
        assert "dequantized from a Q4_1 GGUF file" in report.rendered(report.long_frame([noted]), how, 160)


def nasty() -> pd.DataFrame:
    bad = record("none", [score(0.5, name=NASTY)], model=NASTY, convention=NASTY, task=f"t(a={json.dumps(NASTY)})")
    failed = record(f"q(a={json.dumps(NASTY)})", model=NASTY, task=f"t(a={json.dumps(NASTY)})", reason=NASTY)
    return report.long_frame([bad, failed])


@pytest.mark.parametrize("how", report.FORMATS)
def test_no_format_lets_control_characters_through(how: report.Format) -> None:
    found = report.rendered(nasty(), how, 160)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", found)


def test_markdown_takes_no_markup_from_records() -> None:
    found = report.rendered(nasty(), "markdown").partition("## ")[2]
    assert "<b>" not in found
    assert set(re.findall(r"<[a-z]+>", found)) <= {"<br>"}
    # what starts markup in the record is escaped; the table's own bars are counted below
    assert not re.search(r"(?<!\\)[`\[\]$@*~]", found.replace("0.5000*", ""))
    tables = [line for line in found.splitlines() if line.startswith("|") and "---" not in line]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in tables} == {5}
    assert "http\\://" in found


def test_the_terminal_shows_rich_markup_as_text() -> None:
    assert "[/bold][red]" in report.rendered(nasty(), "table", 300)


def test_latex_takes_no_command_from_records() -> None:
    found = report.rendered(nasty(), "latex")
    body = "\n".join(line for line in found.splitlines() if not line.startswith("%"))
    commands = set(re.findall(r"\\([A-Za-z]+)", body))
    known = "begin caption toprule midrule bottomrule end par footnotesize shortstack cdot dag ddag uparrow Delta ldots"
    assert commands <= {*known.split(), "symbol", *re.findall("text[a-z]+", " ".join(commands))}
    assert body.count("\\begin{tabular}") == body.count("\\end{tabular}") == 1
    unescaped = re.sub(r"\\[\\{}$&#%_]", "", body)
    assert unescaped.count("{") == unescaped.count("}")
    assert "%" not in unescaped
    assert "#" not in unescaped


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex with booktabs")
def test_the_latex_table_compiles_with_booktabs_alone(tmp_path: Path) -> None:
    cells = [record("none", [score(0.5)]), record("rtn", [score(0.4, delta=versus(-0.1))])]
    tables = (report.long_frame(cells), nasty())
    body = "\n".join(report.rendered(table, "latex") for table in tables)
    packages = r"\documentclass{article}\usepackage{booktabs}\usepackage[landscape]{geometry}"
    (tmp_path / "table.tex").write_text(packages + r"\begin{document}" + body + r"\end{document}", encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, errors="replace")
    assert done.returncode == 0, done.stdout[-2000:]


def test_csv_has_no_formula_and_is_read_back() -> None:
    frame = report.long_frame([record("none", [score(-0.5, name="=1+1")], model="@SUM(A1)", convention="-x")])
    rows = list(csv.DictReader(io.StringIO(report.rendered(frame, "csv"))))
    assert (rows[0]["metric"], rows[0]["model"], rows[0]["convention"]) == ("'=1+1", "'@SUM(A1)", "'-x")
    assert float(rows[0]["value"]) == -0.5
    assert float(rows[0]["low"]) == -0.52


def test_no_character_hides_in_a_text() -> None:
    hidden = "\u00ad\u034f\u115f\u180e\u200b\u206a\u3164\ufe0f\ufffb\U000e0041"
    shown = text.visible(f"a{hidden}b")
    assert re.fullmatch(r"a(<U\+[0-9A-F]{4,5}>){10}b", shown)
    assert text.csv("\uff1d1+1") == "'\uff1d1+1"


def test_no_address_in_markdown_is_a_link() -> None:
    shown = text.markdown("www.1evil.example http://e.example WWW.a.b")
    assert shown == r"www\.1evil\.example http\://e\.example WWW\.a\.b"


def test_texts_escaped_together_come_out_as_each_alone() -> None:
    # beginnings and ends are places of their own, and what looks like an end of a line is none
    texts = ["- a", "_b_", "", "1. c", "d\ne", "\n", "www.", "x.", "y", "http:", "/", "[19, 21]", "+1", "z\u2028- q"]
    assert text.markdown_lines(texts) == [text.markdown(each) for each in texts]


def test_json_is_strict_and_has_every_score() -> None:
    cells = [record("none", [score(0.5), score(3.0, name="ppl", better="lower")]), record("rtn")]
    rows = json.loads(report.rendered(report.long_frame(cells), "json"), parse_constant=pytest.fail)
    found = {(row["quantizer"], row["metric"], row["value"], row["n"]) for row in rows}
    assert found == {("none", "acc", 0.5, 100), ("none", "ppl", 3.0, 100), ("rtn", None, None, None)}
    assert rows[0]["beats_float"] is False


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"), (-0.0, "0"), (3.0, "3"), (29.9412, "29.94"), (0.32561, "0.3256"), (4136.2, "4,136"),
        (5.4713, "5.471"), (1.3e-5, "1.30e-05"), (2.5e8 + 0.5, "2.50e+08"), (1000.0, "1,000"), (-0.012, "-0.0120"),
    ],
)  # fmt: skip
def test_numbers_have_about_four_digits(value: float, shown: str) -> None:
    assert text.number(value) == shown


def test_the_order_of_records_does_not_matter() -> None:
    cells = [record(q, [score(v)], task=t) for q, v in (("none", 0.5), ("rtn", 0.4), (W4A4, 0.4)) for t in ("a", "b")]
    for how in report.FORMATS:
        assert report.rendered(report.long_frame(cells), how) == report.rendered(report.long_frame(cells[::-1]), how)


def test_the_file_is_stale_when_a_record_changes(tmp_path: Path) -> None:
    assert not report.stale(tmp_path, report.leaderboard(tmp_path))
    record("none", [score(0.5)]).write(tmp_path)
    assert report.stale(tmp_path, report.leaderboard(tmp_path))
    report.write(tmp_path, report.leaderboard(tmp_path))
    assert not report.stale(tmp_path, report.leaderboard(tmp_path))
    record("rtn", [score(0.4)]).write(tmp_path)
    assert report.stale(tmp_path, report.leaderboard(tmp_path))


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    path = record("none", [score(0.5)]).write(tmp_path)
    path.with_name("other.json").write_text("{}", encoding="utf-8")
    with pytest.raises(RecordError, match=r"other\.json"):
        report.leaderboard(tmp_path)


@pytest.mark.parametrize("how", report.FORMATS)
def test_an_empty_store_is_reported(how: report.Format, tmp_path: Path) -> None:
    found = report.rendered(report.leaderboard(tmp_path), how, 80)
    assert found.endswith("\n")
    assert how in ("csv", "json", "latex") or "No records yet" in found


def test_reporting_a_thousand_records_reads_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(1000):
        record(f"rtn(group_size={index + 1})", [score(index / 2000), score(9.0, name="ppl", better="lower")]).write(
            tmp_path
        )
    read: list[Path] = []
    original = Path.read_bytes

    def counting(path: Path, *arguments: Any, **options: Any) -> bytes:
        read.append(path)
        return original(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_bytes", counting)
    frame = report.leaderboard(tmp_path)
    assert len(read) == len(set(read)) == 1000
    assert len(frame) == 2000
    assert sys.getsizeof(report.rendered(frame, "markdown")) > 100_000


def versus(value: float, half: float = 0.01) -> Delta:
    return Delta(value, (value - half, value + half), "softmax")


def armed(values: dict[str, Sequence[float]], quantizer: str = "none", **changes: Any) -> list[Record]:
    """One record an arm and seed; perplexities, and their difference to softmax."""
    made = []
    for arm, numbers in values.items():
        for seed, value in enumerate(numbers):
            other = values.get("softmax", ())
            delta = versus(value - other[seed]) if arm != "softmax" and seed < len(other) else None
            found = score(value, name="ppl", better="lower", arm_delta=delta)
            made.append(record(quantizer, [found], arm=arm, seed=seed, **changes))
    return made


def rows_of(frame: pd.DataFrame, heading: str = "### hellaswag") -> list[list[str]]:
    """Entries of the rows of the Markdown table under a heading."""
    after = report.rendered(frame, "markdown").partition(heading)[2].partition("\n#")[0]
    lines = [line for line in after.splitlines() if line.startswith("| ")]
    return [[entry.strip().replace("\\", "") for entry in line.strip("|").split("|")] for line in lines[2:]]


def test_arms_stand_together_for_each_quantizer_with_their_difference_to_softmax() -> None:
    cells = armed({"softmax": [20.0], "sink_logit": [19.5], "gated": [21.0]})
    cells += armed({"softmax": [25.0], "sink_logit": [20.5], "gated": [19.8]}, W4A4)
    rows = rows_of(report.long_frame(cells))
    assert [row[1] for row in rows] == ["none"] * 3 + ["w4a4"] * 3
    assert [row[3] for row in rows] == [
        "sink_logit", "softmax", "gated", "gated", "sink_logit", "softmax",
    ]  # fmt: skip
    assert [row[0] for row in rows] == ["1", "3", "5", "2", "4", "6"]
    (best,) = [row[4] for row in rows if row[3] == "sink_logit" and row[1] == "w4a4"]
    assert best == "20.50<br>[20.48, 20.52]<br>vs softmax -4.500 [-4.510, -4.490]"
    assert "vs softmax is the paired difference" in report.rendered(report.long_frame(cells), "markdown")
    assert "vs softmax" not in report.rendered(report.long_frame(cells[:1]), "markdown")


def test_seeds_of_a_row_are_shown_as_mean_and_spread_and_ranked_once() -> None:
    cells = armed({"softmax": [20.0, 22.0, 21.0], "gated": [19.0, 22.0, 19.0]})
    cells += armed({"softmax": [25.0, 26.0, 30.0]}, "rtn")
    frame = report.long_frame(cells)
    rows = rows_of(frame)
    assert [(row[0], row[1], row[3], row[4]) for row in rows] == [
        ("1", "none", "gated", "0, 1, 2"), ("2", "none", "softmax", "0, 1, 2"), ("3", "w8a8", "softmax", "0, 1, 2"),
    ]  # fmt: skip
    # t(0.975, 2 degrees of freedom) = 4.302653, from a printed table
    half = 4.302653 * 1.0 / 3**0.5
    assert rows[1][5] == f"21 ± 1 (3 seeds)<br>[{21 - half:.2f}, {21 + half:.2f}]"
    mean, deviation = -1.0, 1.0
    assert rows[0][5].startswith("20 ± 1.732 (3 seeds)<br>")
    half = 4.302653 * deviation / 3**0.5
    assert rows[0][5].endswith(f"vs softmax {mean:.0f} [{mean - half:.3f}, +{mean + half:.3f}]")
    seeds = frame.groupby(["arm", "quantizer"])[["seeds", "mean", "rank"]].agg(["min", "max"])
    assert (seeds.xs("min", axis=1, level=1) == seeds.xs("max", axis=1, level=1)).all(axis=None)
    parsed = json.loads(report.rendered(frame, "json"))
    assert [row["value"] for row in parsed if row["arm"] == "gated"] == [19.0, 22.0, 19.0]
    assert {row["arm_seeds"] for row in parsed if row["arm"] == "gated"} == {3}


def test_a_seed_of_another_item_count_or_convention_is_not_averaged() -> None:
    first, second = armed({"softmax": [20.0, 30.0]})
    frame = report.long_frame([first, replace(second, convention="lm-eval v2")])
    assert set(frame["seeds"]) == {1}
    assert "seeds)" not in report.rendered(frame, "markdown")
    other = replace(second, scores=(replace(second.scores[0], n=50),))
    assert set(report.long_frame([first, other])["seeds"]) == {1}
    assert set(report.long_frame([first, second])["seeds"]) == {2}


def test_a_difference_that_some_seeds_lack_says_so() -> None:
    cells = armed({"softmax": [20.0, 22.0], "gated": [19.0, 21.5, 22.0]})
    (row,) = [row for row in rows_of(report.long_frame(cells)) if row[3] == "gated"]
    assert row[5].startswith("20.83 ± 1.607 (3 seeds)")
    assert "vs softmax -0.7500 [-3.927, +2.427] (2 of 3 seeds)" in row[5]


def test_a_row_of_fewer_seeds_than_another_says_so() -> None:
    cells = armed({"softmax": [20.0, 22.0], "gated": [19.0]})
    shown = {row[3]: row[5].partition("<br>")[0] for row in rows_of(report.long_frame(cells))}
    assert shown == {"softmax": "21 ± 1.414 (2 seeds)", "gated": "19 (1 of 2 seeds)"}


def test_a_seed_without_scores_has_a_row_of_its_own() -> None:
    cells = [*armed({"softmax": [20.0, 22.0]}), record("none", seed=2)]
    rows = rows_of(report.long_frame(cells))
    assert [(row[3], row[4]) for row in rows][1] == ("2", "failed [1]")
    assert rows[0][3] == "0, 1"


def test_a_model_trained_for_each_arm_is_one_section_whatever_its_weights() -> None:
    def cells(**identity: str) -> list[Record]:
        made = armed({"softmax": [20.0], "gated": [19.0]}, model="tier:toy")
        return [
            replace(one, identity={**one.identity, "weights_sha256": letter * 64, **identity})
            for one, letter in zip(made, "ab", strict=True)
        ]

    frame = report.long_frame(cells())
    assert frame["group"].nunique() == 1
    assert list(frame.sort_values("rank")["arm"]) == ["gated", "softmax"]
    assert "seed 0" not in report.rendered(report.long_frame(cells(note="trained with seed 0")), "markdown")
    assert "## tier:toy · trained for each arm and seed · float32" in report.rendered(frame, "markdown")
    apart = report.long_frame([cells(training_sha256="c" * 64)[0], cells(training_sha256="d" * 64)[1]])
    assert apart["group"].nunique() == 2
    assert report.rendered(apart, "markdown").count("## tier:toy · training ") == 2


@pytest.mark.parametrize(("deltas", "flagged"), [((-0.3, -0.31, -0.29), True), ((-0.3, -0.9, 0.2), False)])
def test_several_seeds_beat_float_only_beyond_their_spread(deltas: tuple[float, ...], flagged: bool) -> None:
    cells = [
        record("rtn", [score(20.0, name="ppl", better="lower", delta=Delta(d, (-1.0, -0.1), "none"))], seed=seed)
        for seed, d in enumerate(deltas)
    ]
    assert set(report.long_frame(cells)["beats_float"]) == {flagged}


def test_the_overview_of_arms_has_their_differences_to_softmax() -> None:
    cells = armed({"softmax": [20.0, 21.0], "gated": [19.0, 20.5]})
    cells += armed({"softmax": [0.5, 0.6], "gated": [0.4, 0.3]}, task="wikitext2")
    rows = rows_of(report.long_frame(cells), "### Overview")
    assert [row[2] for row in rows] == ["gated", "softmax"]
    assert rows[0][4] == "19.75 ± 1.061 (2 seeds)<br>vs softmax -0.7500 [-3.927, +2.427]"
    assert rows[1][5] == "0.5500 ± 0.0707 (2 seeds)"


@pytest.mark.parametrize("how", report.FORMATS)
def test_every_format_shows_arms_and_seeds(how: report.Format) -> None:
    found = report.rendered(report.long_frame(armed({"softmax": [20.0, 21.0], "gated": [19.0, 20.5]})), how, 200)
    assert "gated" in found
    assert ("-0.75" if how in ("csv", "json") else "-0.7500") in found
