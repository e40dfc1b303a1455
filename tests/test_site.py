"""The site as files: what stands in which column, what is copied, and that no text of a record does anything."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from quant_bench import report
from quant_bench.cli import main
from quant_bench.errors import SpecError
from quant_bench.record import Cell, Record, Store
from quant_bench.report import long_frame
from quant_bench.score import Better, Delta, Metric, Score
from quant_bench.site import models, write_site
from quant_bench.site.arms import attention_map, depth_map, paired
from quant_bench.site.arms import compared as compared_with_softmax
from quant_bench.site.board import Board, page_name
from quant_bench.site.figures import Heat
from quant_bench.site.filled import bits_of, made_board
from quant_bench.site.pages import leaderboard_data, question_tables
from quant_bench.site.pareto import frontier, pareto
from quant_bench.site.places import placed
from quant_bench.site.sensitivity import sensitivity_map
from quant_bench.site.write import script_json, script_text
from quant_bench.statistics import spread_of

RESULTS = Path(__file__).parent.parent / "results"
W4A4 = "rtn(activation_bits=4,weight_bits=4)"
NASTY = "../x</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e'\"&{{7*7}}"


def score(value: float, *, name: str = "acc", better: Better = "higher", n: int = 100, **more: Any) -> Score:
    metric = Metric(name, "share", better, "mean", more.pop("chance", None))
    return Score(metric, value, 0.01, more.pop("ci95", (value - 0.02, value + 0.02)), n, **more)


def record(quantizer: str, scores: Sequence[Score] = (), **changes: Any) -> Record:
    parts = {"model": "m", "arm": "softmax", "quantizer": quantizer, "task": "hellaswag", "seed": 0}
    parts |= {key: changes.pop(key) for key in list(changes) if key in parts}
    execution = "integer" if "execution=integer" in quantizer else "simulated"
    bits = 4 if "weight_bits=4" in quantizer else 8
    of_quantizer = {"execution": execution, "weight_bits": bits, "activation_bits": bits, "kv_bits": 16}
    made = Record(
        state="measured" if scores else "failed",
        reason=None if scores else "ValueError: broken",
        cell=Cell(**parts),
        settings={
            "model": {"dtype": "float32"},
            "arm": {},
            "quantizer": {} if quantizer == "none" else of_quantizer,
            "task": {},
        },
        versions={"arm": 1, "quantizer": 1, "task": 1},
        identity={f"{name}_sha256": "a" * 64 for name in ("weights", "tokenizer", "data", "calibration")},
        environment={"device": "a processor", "threads": 2},
        convention="lm-eval v1" if scores else None,
        coverage={"quantized": {"a": "W8"}, "skipped": {}, "tied": {}, "mac_share": 0.5, "notes": []}
        if scores
        else None,
        scores=tuple(scores),
        took_seconds=12.0,
    )
    return replace(made, **changes)


def board(*records: Record) -> Board:
    return made_board(long_frame(records), records)


def stored(folder: Path, *records: Record) -> Path:
    for one in records:
        one.write(folder)
    folder.mkdir(exist_ok=True)
    return folder


class Elements(HTMLParser):
    """Names of elements, handlers among attributes, and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.handlers: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.addresses += [value for name, value in attrs if name in ("href", "src") and value]


def test_the_site_of_the_committed_results_is_whole_and_the_same_twice(tmp_path: Path) -> None:
    first = write_site(RESULTS, tmp_path / "one")
    write_site(RESULTS, tmp_path / "two")
    files = {path.relative_to(tmp_path / "one"): path for path in (tmp_path / "one").rglob("*") if path.is_file()}
    assert first.index in files.values()
    for name, path in files.items():
        assert (tmp_path / "two" / name).read_bytes() == path.read_bytes(), name
    for page in (path for path in files.values() if path.suffix == ".html"):
        found = Elements()
        found.feed(page.read_text(encoding="utf-8"))
        for address in found.addresses:
            assert not re.match(r"[a-z]+:|//", address) or address.startswith("data:"), address
            if not address.startswith(("#", "data:")):
                assert (page.parent / unquote(address.partition("#")[0])).is_file(), address


def test_copies_of_the_records_are_a_results_tree_with_the_same_bytes(tmp_path: Path) -> None:
    written = write_site(RESULTS, tmp_path / "site")
    copies = Store.read(tmp_path / "site" / "records")
    assert copies.problems == ()
    assert copies.records == Store.read(RESULTS).records
    assert written.records == len(copies.records)


def test_an_earlier_site_is_replaced_and_hidden_files_stay(tmp_path: Path) -> None:
    results = stored(tmp_path / "results", record("none", [score(0.5)], model="old"))
    out = tmp_path / "site"
    write_site(results, out)
    (out / ".git").mkdir()
    old = out / "models" / page_name("old")
    assert old.is_file()
    for path in results.iterdir():
        path.rename(tmp_path / "gone")
    stored(results, record("none", [score(0.5)], model="new"))
    write_site(results, out)
    assert not old.exists()
    assert (out / "models" / page_name("new")).is_file()
    assert (out / ".git").is_dir()


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    results = stored(tmp_path / "results", record("none", [score(0.5)]))
    out = tmp_path / "mine"
    (out / "models").mkdir(parents=True)
    (out / "models" / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(SpecError, match="models"):
        write_site(results, out)
    assert (out / "models" / "thesis.txt").read_text(encoding="utf-8") == "years of work"


@pytest.mark.parametrize("out", ["results", "results/site", "."])
def test_site_and_records_may_not_lie_in_each_other(tmp_path: Path, out: str) -> None:
    results = stored(tmp_path / "results", record("none", [score(0.5)]))
    with pytest.raises(SpecError, match="must not lie in each other"):
        write_site(results, tmp_path / out)


def test_no_records_make_a_site_that_says_so(tmp_path: Path) -> None:
    written = write_site(stored(tmp_path / "results"), tmp_path / "site")
    assert "No records yet" in written.index.read_text(encoding="utf-8")


def test_the_command_names_what_is_no_record_and_writes_the_rest(tmp_path: Path) -> None:
    results = stored(tmp_path / "results", record("none", [score(0.5)]))
    (results / "m" / "note.json").write_text("{}", encoding="utf-8")
    done = CliRunner().invoke(main, ["site", "--out", str(tmp_path / "site"), "--results", str(results)])
    assert done.exit_code == 1
    assert "note.json" in done.stderr
    assert (tmp_path / "site" / "index.html").is_file()
    usage = CliRunner().invoke(main, ["site", "--out", str(results), "--results", str(results)])
    assert usage.exit_code == 2


def test_the_command_loads_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom quant_bench.cli import main\n"
        f"main(['site', '--out', {str(tmp_path / 'site')!r}, '--results', {str(RESULTS)!r}], standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_text_from_records_makes_no_element_and_no_file_elsewhere(tmp_path: Path) -> None:
    quantized = record(W4A4, [score(0.4, name=NASTY)], model=NASTY, convention=NASTY)
    broken = record("rtn", (), model=NASTY, reason=NASTY)
    nasty = replace(
        quantized,
        details={"tensors": {NASTY: {"kind": NASTY, "layer": 0, "inf_norm": 1.0}}},
        coverage={**(quantized.coverage or {}), "quantized": {NASTY: NASTY}, "notes": [NASTY]},
        identity={**quantized.identity, "note": NASTY},
        cell=replace(quantized.cell, task="outliers"),
    )
    results = stored(tmp_path / "results", record("none", [score(0.5)], model=NASTY), quantized, broken, nasty)
    before = {path for path in tmp_path.rglob("*") if "site" not in path.parts}
    write_site(results, tmp_path / "site")
    assert {path for path in tmp_path.rglob("*") if "site" not in path.parts} == before
    for page in (tmp_path / "site").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        found = Elements()
        found.feed(text)
        assert "img" not in found.names
        assert found.handlers == []
        assert "\u202e" not in text
        assert "49" not in re.findall(r"\D(49)\D", text)
        scripts = re.findall(r"<script[^>]*>", text)
        assert all("src=" in script or "application/json" in script for script in scripts)
    assert "alert(1)" in (tmp_path / "site" / "models" / page_name(NASTY)).read_text(encoding="utf-8")


@given(st.recursive(st.text() | st.floats(allow_nan=False, allow_infinity=False), lambda s: st.lists(s, max_size=3)))
def test_json_in_a_script_element_ends_no_element_and_is_read_back(value: Any) -> None:
    text = str(script_json(value))
    assert not set("<>&") & set(text)
    assert text.isascii()
    assert json.loads(text) == json.loads(script_text(value))


@given(st.lists(st.text(min_size=1), min_size=2, max_size=2, unique=True))
def test_page_names_are_safe_and_differ(names: list[str]) -> None:
    first, second = map(page_name, names)
    assert first != second
    assert re.fullmatch(r"[a-z0-9][a-z0-9-]{0,80}\.html", first)


def test_other_conventions_items_and_data_have_columns_of_their_own() -> None:
    same = [record("none", [score(0.5)]), record("rtn", [score(0.4)])]
    assert len(board(*same).columns) == 1
    for changes in (
        {"convention": "lm-eval v2"},
        {"task": "hellaswag(limit=10)"},
        {"versions": {"arm": 1, "quantizer": 1, "task": 2}},
        {"identity": same[0].identity | {"data_sha256": "b" * 64}},
    ):
        apart = board(same[0], record("rtn", [score(0.4)], **changes))
        assert len(apart.columns) == 2
        assert [len(row.numbers) for row in apart.rows] == [1, 1]
    assert len(board(same[0], record("rtn", [score(0.4, n=99)])).columns) == 2


def test_models_of_one_name_with_other_weights_have_rows_of_their_own() -> None:
    other = record("none", [score(0.4)], arm="softmax1")
    other = replace(other, identity=dict(other.identity) | {"weights_sha256": "b" * 64})
    found = board(record("none", [score(0.5)]), other)
    assert [model.weights for model in found.models] == ["weights aaaaaaaaaaaa", "weights bbbbbbbbbbbb"]
    assert sorted(row.model for row in found.rows) == [0, 1]


def test_a_blocked_cell_stands_beside_the_measured_ones_with_its_reason() -> None:
    blocked = record("rtn", state="blocked", reason="no data")
    nowhere = replace(blocked, identity=dict.fromkeys(blocked.identity), cell=replace(blocked.cell, task="gsm8k"))
    found = board(record("none", [score(0.5)]), blocked, nowhere)
    (model,) = found.models
    assert model.name == "m"
    row = next(row for row in found.rows if row.label == "w8a8")
    states = {found.columns[index].task: (number.state, number.reason) for index, number in row.numbers.items()}
    assert states == {"hellaswag": ("blocked", "no data"), "gsm8k": ("blocked", "no data")}
    (data,) = [entry[7] for entry in leaderboard_data(found)["rows"] if entry[3] == "w8a8"]
    assert [(cell["s"], cell["why"]) for cell in data.values()] == [("blocked", "no data")] * 2


def test_several_seeds_are_their_mean_with_the_interval_over_seeds_and_all_their_records() -> None:
    values = [0.40, 0.44, 0.45]
    records = [
        record("rtn", [score(v, delta=Delta(v - 0.5, (v - 0.6, v - 0.4), "none"))], seed=seed)
        for seed, v in enumerate(values)
    ]
    failed = record("rtn", seed=3)
    found = board(*records, failed)
    (number,) = found.rows[0].numbers.values()
    spread = spread_of(values)
    assert number.value is not None
    assert number.delta is not None
    assert number.value.value == pytest.approx(spread.mean)
    assert (number.value.low, number.value.high) == pytest.approx(spread.ci95)
    assert number.delta.value == pytest.approx(spread.mean - 0.5)
    assert number.paths == tuple(one.cell.path(Path()).as_posix() for one in (*records, failed))
    assert number.lost == 1


def test_marks_and_ranks_are_those_of_the_report() -> None:
    records = [record(q, [score(v, chance=0.25)]) for q, v in (("none", 0.26), ("rtn", 0.25), (W4A4, 0.24))]
    found = board(*records)
    assert {number.marks for row in found.rows for number in row.numbers.values()} == {"†"}
    assert all(number.rank is None for row in found.rows for number in row.numbers.values())
    (table,) = question_tables(
        board(*[record(q, [score(v)]) for q, v in (("none", 0.5), (W4A4, 0.3), ("rtn", 0.4))]), found.rows
    )
    assert table.title.startswith("hellaswag")
    again = board(*[record(q, [score(v)]) for q, v in (("none", 0.5), (W4A4, 0.3), ("rtn", 0.4))])
    (ranked,) = question_tables(again, again.rows)
    assert [(row.label, rank) for row, rank, _ in ranked.rows] == [("none", 1.0), ("w8a8", 2.0), ("w4a4", 3.0)]


def test_every_number_of_the_board_is_a_score_or_the_mean_of_its_seeds() -> None:
    records = Store.read(RESULTS).valid()
    found = made_board(report.long_frame(records), records)
    shown = {
        (frozenset(number.paths), found.columns[index].metric): number.value.value
        for row in found.rows
        for index, number in row.numbers.items()
        if number.value is not None
    }
    seeds: dict[tuple[str, str], dict[str, float]] = {}
    for one in records:
        path = one.cell.path(Path()).as_posix()
        for score in one.scores:
            seeds.setdefault((re.sub(r"@seed=\d+", "", path), score.metric.name), {})[path] = score.value
    wanted = {(frozenset(paths), metric): paths for (_, metric), paths in seeds.items()}
    assert shown.keys() == wanted.keys()
    for key, paths in wanted.items():
        assert shown[key] == pytest.approx(sum(paths.values()) / len(paths), rel=1e-12)


@pytest.mark.parametrize(
    ("quantizer", "given_settings", "bits"),
    [
        ("none", {}, "float"),
        ("rtn", {"weight_bits": 8, "activation_bits": 16, "kv_bits": 4}, "W8 A16 KV4"),
        ("torchao", {"scheme": "int8"}, "other"),
    ],
)
def test_bits_come_from_the_settings(quantizer: str, given_settings: dict[str, Any], bits: str) -> None:
    one = record("none", [score(0.5)])
    one = replace(
        one, cell=replace(one.cell, quantizer=quantizer), settings={**one.settings, "quantizer": given_settings}
    )
    assert bits_of(one) == bits


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12), st.booleans())
def test_the_frontier_is_what_no_other_point_beats(points: list[tuple[int, int]], higher: bool) -> None:
    plain = [(float(cost), float(value)) for cost, value in points]

    def beaten(one: tuple[float, float]) -> bool:
        gain = 1.0 if higher else -1.0
        return any(cost <= one[0] and gain * value >= gain * one[1] and (cost, value) != one for cost, value in plain)

    assert frontier(plain, higher) == sorted({one for one in plain if not beaten(one)})


def test_pareto_says_which_rows_have_no_cost_and_never_guesses_one() -> None:
    stored_bits = record("rtn", [score(0.4)])
    stored_bits = replace(stored_bits, coverage={**(stored_bits.coverage or {}), "weight_bytes": 10, "float_bytes": 40})
    found = pareto(board(record("none", [score(0.5)]), stored_bits, record(W4A4, [score(0.3)])))
    by_cost = {choice.keys[1]: choice.data() for choice in found.choices}
    bits = next(data for name, data in by_cost.items() if name.startswith("stored bits"))
    assert {point["name"]: point["x"] for point in bits["series"]}["simulated"] == [8.0]
    assert bits["missing"] == ["softmax · w4a4 simulated: its records do not hold this cost"]
    seconds = next(data for name, data in by_cost.items() if name.startswith("seconds"))
    assert "a processor, 2 threads" in seconds["keys"][1]
    assert seconds["missing"] == []


def test_pareto_names_every_scheme_of_one_arm_and_of_several_arms_only_what_is_best() -> None:
    coverage = {"quantized": {}, "skipped": {}, "tied": {}, "mac_share": 0, "notes": [], "float_bytes": 40}

    def named(*records: Record) -> set[str]:
        found = pareto(board(*records))
        bits = next(choice.data() for choice in found.choices if choice.keys[1].startswith("stored bits"))
        return {name for series in bits["series"] for name in series["label"] if name}

    def quantized(quantizer: str, size: int, value: float, arm: str = "softmax") -> Record:
        return record(quantizer, [score(value)], arm=arm, coverage=coverage | {"weight_bytes": size})

    one = [record("none", [score(0.5)]), quantized("rtn", 10, 0.4), quantized(W4A4, 10, 0.3)]
    assert named(*one) == {"none", "w8a8", "w4a4"}
    assert named(*one[:2], quantized("rtn", 10, 0.45, "softmax1")) == {"softmax none", "softmax1 w8a8"}


def test_columns_of_most_models_come_first_then_those_of_the_first_model() -> None:
    def asked(model: str, task: str, quantizer: str = "none") -> Record:
        return record(quantizer, [score(0.5)], model=model, task=task)

    of_two = [asked("b", "t(limit=2)", quantizer) for quantizer in ("none", "rtn", W4A4)]
    both = [asked("a", "t(limit=3)"), asked("b", "t(limit=3)")]
    found = board(asked("a", "t(limit=4)"), *of_two, *both)
    assert [column.question.partition(" ")[0] for column in found.columns] == ["t(limit=3)", "t(limit=4)", "t(limit=2)"]


def test_a_task_on_all_items_comes_before_its_part_whatever_another_model_was_asked() -> None:
    part = [record(quantizer, [score(0.5, n=40)], task="t(limit=40)") for quantizer in ("none", "rtn", W4A4)]
    elsewhere = record("none", [score(0.5, n=1024)], model="n", task="t(text=other)")
    found = board(*part, record("none", [score(0.5, n=148)], task="t"), elsewhere)
    assert [column.question.partition(" ")[0] for column in found.columns] == ["t", "t(limit=40)", "t(text=other)"]


def test_a_cell_that_failed_makes_a_question_neither_a_part_nor_informative() -> None:
    def asked(quantizer: str, task: str, n: int, value: float = 0.5) -> Record:
        return record(quantizer, [score(value, n=n, chance=0.25)], task=task)

    # in the order of its rows, the whole question has the cell that failed first
    whole = [record("none", task="t"), asked("rtn", "t", 1000)]
    part = [asked(quantizer, "t(limit=10)", 10) for quantizer in ("none", "rtn", W4A4)]
    at_chance = [asked(quantizer, "at_chance", 10, 0.2) for quantizer in ("none", W4A4)]
    found = board(
        *(asked(quantizer, "a", 9) for quantizer in ("none", "rtn")),
        *whole,
        *part,
        *at_chance,
        record("rtn", task="at_chance"),
    )
    names = list(dict.fromkeys(column.question.partition(" ")[0] for column in found.columns))
    assert names == ["a", "t", "t(limit=10)", "at_chance"]


def test_layer_maps_show_the_table_of_the_record() -> None:
    tensors = {
        f"layer_output model.layers.{layer}": {"kind": "layer_output", "layer": layer, "inf_norm": 10.0**layer}
        for layer in range(3)
    }
    one = record("rtn", [score(1.0, better="neither")], task="outliers", details={"tensors": tensors})
    size, place = models.layer_maps(board(one), board(one).rows)
    (choice,) = size.choices
    assert isinstance(choice.content, Heat)
    assert choice.content.z == [[1.0, 10.0, 100.0]]
    assert (choice.content.x, choice.content.y, choice.content.log) == ([0, 1, 2], ["layer output"], True)
    assert place.choices == []


def test_the_sweep_has_a_series_for_each_recipe_and_a_place_for_each_scheme() -> None:
    four = "activation_bits=4,weight_bits=4"
    specs = ["none", "rtn(execution=integer)", "rtn", f"quarot({four},weights=gptq)", f"rtn({four})", "quanto"]
    found = board(*(record(spec, [score(1.0 + place)]) for place, spec in enumerate(specs)))
    (choice,) = models.sweep(found, found.rows).choices
    assert isinstance(choice.content, list)
    # of 8 bits both, in the order of their names
    assert choice.order == ["none", "quanto", "w8a8", "w4a4"]
    assert {series.name: sorted(zip(series.x, series.y, strict=True)) for series in choice.content} == {
        "rtn": [("w4a4", 5.0), ("w8a8", 2.0), ("w8a8", 3.0)],
        "none": [("none", 1.0)],
        "quanto": [("quanto", 6.0)],
        "quarot(weights=gptq)": [("w4a4", 4.0)],
    }


@pytest.mark.parametrize(
    ("label", "recipe", "scheme"),
    [
        ("w4a16", "rtn", "w4a16"),
        ("mxfp4", "rtn", "mxfp4"),
        ("none", "none", "none"),
        ("smoothquant:w8a8(alpha=0.7,scope=full)", "smoothquant(alpha=0.7)", "w8a8(scope=full)"),
    ],
)
def test_a_label_is_a_recipe_at_a_scheme(label: str, recipe: str, scheme: str) -> None:
    assert models.recipe_and_scheme(label) == (recipe, scheme)


def test_sensitivity_maps_have_a_row_for_each_role_and_a_map_for_each_width() -> None:
    linears = [
        {"linear": f"model.layers.{layer}.{role}", "layer": layer, "role": role, "w2": 0.5 + layer, "w4": value}
        for layer, values in ((0, (0.25, 0.0)), (1, (0.125, None)))
        for role, value in zip(("query", "mlp_down"), values, strict=True)
    ]
    one = record("none", [score(0.1, better="lower")], task="sensitivity", details={"linears": linears})
    two, four = sensitivity_map(board(one), board(one).rows).choices
    assert [choice.keys[0] for choice in (two, four)] == ["2 bits", "4 bits"]
    assert four.data()["heat"]["y"] == ["query", "mlp down"]
    assert four.data()["heat"]["z"] == [[0.25, 0.125], [0.0, None]]
    # a logarithm has no place for 0
    assert [choice.data()["heat"]["log"] for choice in (two, four)] == [True, False]


def test_places_name_channels_positions_and_tokens_largest_first() -> None:
    tensors = {
        f"layer_output model.layers.{layer}": {
            "kind": "layer_output",
            "layer": layer,
            "top_channels": {"7": 3.0, "213": 20000.0 + layer},
            "top_positions": {"0": 5.0},
            "top_tokens": {"198": 9.0, "4": 1.0},
        }
        for layer in (10, 2)
    }
    tensors["mlp_norm model.layers.0"] = {"kind": "mlp_norm", "layer": 0, "top_channels": {"1": 1.0}}
    details = {"tensors": tensors, "token_texts": {"198": "\n"}}
    without = record("rtn:w4a4", [score(1.0, better="neither")], task="outliers")
    found = board(record("rtn", [score(1.0, better="neither")], task="outliers", details=details), without)
    (one,) = placed(found, found.rows)
    assert [line.layer for line in one.lines] == [2, 10]
    assert one.lines[0].channels == ("213: 20,002", "7: 3")
    assert one.lines[0].tokens == ('"\\n": 9', "4: 1")
    assert one.lines[0].positions == ("0: 5",)


def test_attention_and_depth_maps_show_the_tables_of_the_records() -> None:
    layers = [{"layer": 1, "position0_mass_by_head": [0.5]}, {"layer": 0, "position0_mass_by_head": [0.1, 0.9]}]
    # records sort their keys as texts
    routers = [
        {"router": "0.mlp", "sources": {"embedding": 1.0}},
        {"router": "1.mlp", "sources": {"0.attention": 0.5, "0.mlp": 0.25, "10.mlp": 0.1, "9.mlp": 0.15}},
    ]
    scores = [score(0.5, better="neither")]
    found = board(
        record("rtn", scores, task="attention", details={"layers": layers}),
        record("rtn", scores, task="depth", details={"routers": routers}),
    )
    (attention,) = attention_map(found, "softmax").choices
    assert attention.data()["heat"]["z"] == [[0.1, 0.9], [0.5, None]]
    (depth,) = depth_map(found, "softmax").choices
    assert depth.data()["heat"]["x"] == ["embedding", "0.attention", "0.mlp", "9.mlp", "10.mlp"]
    assert depth.data()["heat"]["z"] == [[1.0, None, None, None, None], [None, 0.5, 0.25, 0.15, 0.1]]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["tensors", "kind", "layer", "layers", "inf_norm", "routers", "router", "sources"])
            | st.sampled_from(["role", "w4"])
            | st.sampled_from(["position0_mass_by_head", "top_channels", "top_tokens"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["tensors", "layers", "routers", "token_texts", "linears"]), ANYTHING),
    st.sampled_from(["outliers", "attention", "depth", "sensitivity"]),
)
@settings(max_examples=60, deadline=None)
def test_no_table_of_a_record_can_stop_the_site(details: dict[str, Any], task: str) -> None:
    found = board(record("rtn", [score(0.5, better="neither")], task=task, details=details))
    made = [*models.layer_maps(found, found.rows), attention_map(found, "softmax"), depth_map(found, "softmax")]
    made.append(sensitivity_map(found, found.rows))
    for figure in made:
        json.dumps(figure.data(), allow_nan=False)
    placed(found, found.rows)


def test_paired_differences_have_the_intervals_of_the_records_and_name_both() -> None:
    ours = [
        record("rtn", [score(v, arm_delta=Delta(v - 0.4, (v - 0.45, v - 0.35), "softmax"))], arm="softmax1", seed=seed)
        for seed, v in ((0, 0.5), (1, 0.46))
    ]
    theirs = [record("rtn", [score(0.4)], seed=seed) for seed in (0, 1)]
    (row,) = paired(compared_with_softmax(board(*ours, *theirs), "softmax1"))
    assert [(one.seed, one.difference.value) for one in row.seeds] == [
        (0, pytest.approx(0.1)),
        (1, pytest.approx(0.06)),
    ]
    assert row.seeds[1].difference.low == pytest.approx(0.01)
    spread = spread_of([0.1, 0.06])
    assert (row.difference.value, row.difference.low, row.difference.high) == pytest.approx((spread.mean, *spread.ci95))
    assert row.seeds[0].paths == (ours[0].cell.path(Path()).as_posix(), theirs[0].cell.path(Path()).as_posix())


def test_a_table_too_large_for_a_page_is_no_map() -> None:
    places = [{"kind": f"k{i}", "layer": 0, "inf_norm": 1.0} for i in range(1_500)]
    places += [{"kind": "k0", "layer": i, "inf_norm": 1.0} for i in range(1_500)]
    layers = [{"layer": i, "position0_mass_by_head": [0.5]} for i in range(1_500)]
    layers.append({"layer": 1_500, "position0_mass_by_head": [0.5] * 1_500})
    routers = [{"router": str(i), "sources": {"a": 1.0}} for i in range(1_500)]
    routers.append({"router": "last", "sources": {str(i): 1.0 for i in range(1_500)}})
    scores = [score(0.5, better="neither")]
    found = board(
        record("rtn", scores, task="outliers", details={"tensors": {str(i): one for i, one in enumerate(places)}}),
        record("rtn", scores, task="attention", details={"layers": layers}),
        record("rtn", scores, task="depth", details={"routers": routers}),
    )
    made = [*models.layer_maps(found, found.rows), attention_map(found, "softmax"), depth_map(found, "softmax")]
    assert [list(figure.choices) for figure in made] == [[], [], [], []]


@pytest.mark.parametrize("sizes", [(1e299, 1e-299), (-5, 8), (5, -8), (5, 0)])
def test_bytes_that_cannot_be_are_no_cost(sizes: tuple[float, float]) -> None:
    said = {"mac_share": 0.5, "weight_bytes": sizes[0], "float_bytes": sizes[1]}
    one = record("rtn", [score(0.4)], coverage=said)
    found = pareto(board(one, record("none", [score(0.5)])))
    assert not any("bytes" in choice.keys[1] or "memory" in choice.keys[1] for choice in found.choices)
    json.dumps(found.data(), allow_nan=False)


def test_the_name_of_a_column_in_an_address_has_no_sign_that_ends_it() -> None:
    names = ["exact_match,strict", "-a&b=c", "exact_match;strict", "x" * 500]
    keys = [column.key for column in board(record("rtn", [score(0.5, name=name) for name in names])).columns]
    assert len(set(keys)) == len(names)
    assert all(re.fullmatch(r"hellaswag\.[A-Za-z0-9_.-]{1,80}", key) for key in keys)
