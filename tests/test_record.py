"""Records: the path follows from the content, and the file is the same after reading and writing."""

import json
import os
import re
import string
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quant_bench.errors import RecordError
from quant_bench.record import Cell, Record, Store
from quant_bench.record_json import schema
from quant_bench.score import Delta, Metric, Score
from quant_bench.spec import Spec

DIGEST = "a" * 64
QUIET = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@dataclass
class Found:
    """Stands for a task's Evaluation."""

    data_sha256: str = DIGEST
    convention: str = "P1 seq=2048"
    details: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Covered:
    """Stands for Coverage."""

    quantized: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=lambda: {"lm_head": "kept in float"})
    tied: dict[str, str] = field(default_factory=dict)
    mac_share: float = 0.5
    notes: tuple[str, ...] = ("a note",)


@dataclass
class Calibrated:
    """Stands for Calibration."""

    sha256: str | None = None
    description: str = "none"
    usable: int = 0
    wanted: int = 0


def blank(**changes: Any) -> Record:
    given: dict[str, Any] = {
        "state": "failed",
        "reason": "ValueError: no",
        "cell": Cell("org/model", "softmax", "rtn(weight_bits=4)", "wikitext2"),
        "settings": {"arm": {}, "quantizer": {"weight_bits": 4}, "task": {"limit": None}},
        "versions": {"arm": 1, "quantizer": 1, "task": 2, "torch": "2.13.0", "absent": None},
        "identity": {key: None for key in ("weights_sha256", "tokenizer_sha256", "data_sha256", "calibration_sha256")},
    }
    return Record(**{**given, **changes})


def measured(**changes: Any) -> Record:
    metric = Metric("token_perplexity", "1", "lower", "exp", 49152.0)
    delta = Delta(0.1, (0.05, 0.15), "none", None)
    plain = Score(Metric("max_inf_norm", "1", "lower"), 340.5)
    known = {"weights_sha256": DIGEST, "tokenizer_sha256": DIGEST, "data_sha256": None, "calibration_sha256": None}
    record = blank(state="measured", reason=None, identity=known).with_results(
        scores=[Score(metric, 19.03, 0.1, (18.8, 19.2), 141, delta, Delta(-0.2, (-0.3, -0.1), "softmax")), plain],
        evaluation=Found(details={"rows": ({"layer": 0},)}, settings={"seq_length": 2048}),
        coverage=Covered(),
        calibration=Calibrated(),
    )
    return replace(record.with_cost(1.5, 2**31, 0.25), **changes)


SPECS = st.builds(
    lambda name, given: str(Spec(name, given)),
    st.text(string.ascii_lowercase, min_size=1, max_size=8),
    st.dictionaries(
        st.sampled_from(["a", "b", "seed"]),
        st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=9), st.booleans()),
        max_size=2,
    ),
)
CELLS = st.builds(Cell, st.text(min_size=1, max_size=12), SPECS, SPECS, SPECS, st.integers(-3, 3))


@QUIET
@given(CELLS, CELLS)
def test_different_cells_have_different_paths(first: Cell, second: Cell) -> None:
    assert (first.path(Path("r")) == second.path(Path("r"))) == (first == second)


@QUIET
@given(CELLS)
def test_a_path_has_four_plain_parts(cell: Cell) -> None:
    parts = cell.path(Path("r")).parts
    assert len(parts) == 5
    for part in parts[1:]:
        assert re.fullmatch(r"[A-Za-z0-9_+,=%@-][A-Za-z0-9_.+,=%@~-]*", part)
        assert len(part.encode()) <= 230


@pytest.mark.parametrize(
    ("cell", "path"),
    [
        (
            Cell("smollm2-135m-instruct", "softmax", "rtn", "wikitext2"),
            "smollm2-135m-instruct/softmax/rtn/wikitext2.json",
        ),
        (
            Cell("org/Model-1.5", "softmax", "rtn(execution=integer,weight_bits=4)", "lambada(limit=1500)", 3),
            "org%2FModel-1.5/softmax/rtn,execution=integer,weight_bits=4/lambada,limit=1500@seed=3.json",
        ),
        (Cell("pypi:p==1", "softmax", "none", "t"), "pypi%3Ap%3D%3D1/softmax/none/t.json"),
        (Cell("../x", "softmax", "none", "t"), "%2E.%2Fx/softmax/none/t.json"),
        (Cell("m", "softmax", "none", "t(a=a/b)"), "m/softmax/none/t,a=a%2Fb.json"),
    ],
)
def test_a_path_is_readable(cell: Cell, path: str) -> None:
    assert cell.path(Path("results")) == Path("results") / path


def test_very_long_names_stay_apart_and_below_the_limit_of_file_systems() -> None:
    cells = [Cell("x" * 300 + end, "softmax", str(Spec("rtn", {"a": "é" * 200 + end})), "t") for end in "ab"]
    paths = [cell.path(Path()) for cell in cells]
    assert len(set(paths)) == 2
    assert max(len(part) for path in paths for part in path.parts) <= 255


@pytest.mark.parametrize("text", ["rtn(b=1,a=2)", "rtn()", "rtn (a=1)", "4", ""])
def test_a_cell_takes_canonical_specs_only(text: str) -> None:
    with pytest.raises(RecordError):
        Cell("m", "softmax", text, "t")


@pytest.mark.parametrize("record", [blank(), measured(), blank(state="blocked", reason="data é \x1b")])
def test_a_record_is_read_and_written_back_byte_for_byte(record: Record, tmp_path: Path) -> None:
    path = record.write(tmp_path)
    content = path.read_bytes()
    back = Record.read(path, tmp_path)
    assert back.to_text().encode() == content
    assert back.cell == record.cell
    assert back.scores == record.scores
    assert Record.read(path) == back
    assert back.write(tmp_path / "again").read_bytes() == content


def test_a_score_without_a_difference_to_softmax_has_no_field_for_it() -> None:
    with_one, without = json.loads(measured().to_text())["scores"]
    assert with_one["arm_delta"] == {"value": -0.2, "ci95": [-0.3, -0.1], "reference": "softmax", "p_value": None}
    assert "arm_delta" not in without


def test_the_file_is_strict_sorted_json_with_a_final_newline() -> None:
    text = measured(details={"b": 1, "a": {10: "x", 9: "y"}}).to_text()
    document = json.loads(text)
    assert text == json.dumps(document, sort_keys=True, indent=1, allow_nan=False) + "\n"
    assert text.isascii()
    assert document["scores"][0]["metric"] == "token_perplexity"
    assert document["settings"]["resolved"] == {"seq_length": 2048}
    assert document["identity"]["data_sha256"] == DIGEST


@pytest.mark.parametrize("number", [float("nan"), float("inf"), np.float64("nan"), np.int64(1), {1}, object()])
def test_what_strict_json_lacks_is_refused_and_named(number: object, tmp_path: Path) -> None:
    record = measured(details={"layers": [{"kurtosis": number}]})
    with pytest.raises(RecordError, match=r"details\.layers\[0\]\.kurtosis"):
        record.write(tmp_path)
    assert not list(tmp_path.rglob("*.json"))


def test_a_score_that_is_not_finite_is_refused_before_it_is_written() -> None:
    score = Score(Metric("max_inf_norm", "1", "lower"), float("inf"))
    with pytest.raises(RecordError, match=r"scores\[0\]\.value"):
        measured().with_results(scores=[score], evaluation=Found(), coverage=Covered(), calibration=Calibrated())


@pytest.mark.parametrize(
    "changes",
    [
        {"reason": "but why"},
        {"scores": ()},
        {"convention": None},
        {"coverage": None},
        {"coverage": {"quantized": {}}},
        {"took_seconds": -1.0},
        {"versions": {"arm": 1, "quantizer": 1}},
        {"identity": {"weights_sha256": None}},
        {"settings": {"arm": {}, "quantizer": {}, "task": {"a": [1]}}},
        {"settings": {"arm": {"sink_logit": {"a": [1]}, "renorm": {}}, "quantizer": {}, "task": {}}},
    ],
)
def test_content_outside_the_schema_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        measured(**changes).to_text()


def _with(path: str, value: object) -> str:
    """The text of a record in which one value is another."""
    document = json.loads(measured().to_text())
    place: Any = document
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    for key in parents:
        place = place[key]
    place[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schema", 2),
        ("state", "done"),
        ("cell.seed", "0"),
        ("cell.model", ""),
        ("cell.extra", 1),
        ("scores.0.value", "19"),
        ("scores.0.value", True),
        ("scores.0.better", "bigger"),
        ("scores.0.reduction", "sum"),
        ("convention", None),
        ("coverage", None),
        ("scores.0.ci95", [1.0]),
        ("scores.0.n", 1.5),
        ("scores.0.delta", {"value": 1.0}),
        ("scores.0.arm_delta", {"value": 1.0}),
        ("scores.0.arm_delta", None),
        ("scores.0.arm_delta", {"value": 1.0, "ci95": [0.0], "reference": "softmax", "p_value": None}),
        ("scores", {}),
        ("details", []),
        ("extra", 1),
        ("scores.0.value", 10**400),
        ("scores.0.ci95", [0.0, 10**400]),
        ("scores.0.n", 1 << 63),
        ("cell.seed", 1 << 63),
        ("versions.task", 1 << 63),
        ("versions", {}),
        ("identity", {}),
        ("identity.note", ["a", "list"]),
        ("identity.note", True),
        ("identity.weights_sha256", None),
        ("identity.data_sha256", 5),
        ("identity.training_sha256", False),
        ("settings.model", {"dtype": 5}),
        ("scores.0.metric", ""),
        ("scores.0.metric", "max_inf_norm"),
        ("scores.0.value", -1.0),
        ("scores.0.value", 1e151),
        ("scores.0.ci95", [2.0, 1.0]),
        ("scores.0.delta.ci95", [2.0, 1.0]),
        ("scores.0.unit", "x" * 10_001),
        ("convention", "x" * 10_001),
        ("settings.quantizer", "rtn"),
        ("settings.model", {"dtype": ["a", "list"]}),
        ("coverage.mac_share", 2),
    ],
)
def test_a_changed_file_is_refused(path: str, value: object, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    file.write_text(_with(path, value), encoding="utf-8")
    with pytest.raises(RecordError, match=re.escape(str(file))):
        Record.read(file)


@pytest.mark.parametrize("share", ["x", [1], True, 2, None])
def test_a_cell_without_scores_has_no_coverage_that_a_report_could_not_read(share: object) -> None:
    document = json.loads(blank().to_text())
    document["coverage"] = {"quantized": {}, "skipped": {}, "tied": {}, "mac_share": share, "notes": []}
    with pytest.raises(RecordError, match=r"coverage"):
        Record.from_text(json.dumps(document))


def test_a_chance_is_written_back_whatever_equal_one_another_record_has(tmp_path: Path) -> None:
    for place, chance in enumerate((0.0, -0.0, 1.0)):
        metric = Metric("acc", "share", "higher", "mean", chance)
        one = measured(scores=(Score(metric, 0.5),), cell=Cell("m", "softmax", "none", f"t(a={place})"))
        one.write(tmp_path)
    found = Store.read(tmp_path).valid()
    assert [repr(one.scores[0].metric.chance) for one in found] == ["0.0", "-0.0", "1.0"]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": NaN}', "\x00", "[" * 100_000])
def test_a_foreign_or_cut_file_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecordError, match=re.escape(str(path))):
        Record.read(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
def test_a_pipe_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "record.json")
    with pytest.raises(RecordError, match="no regular file"):
        Record.read(tmp_path / "record.json")


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    with path.open("wb") as file:
        file.truncate(50 << 20)
    with pytest.raises(RecordError, match="52,428,800 bytes"):
        Record.read(path)


def test_half_a_surrogate_pair_is_refused_by_writer_and_reader() -> None:
    with pytest.raises(RecordError, match="reason"):
        blank(reason="a name of a file: \udcff").to_text()
    with pytest.raises(RecordError, match="surrogate"):
        Record.from_text(blank(reason="PLACE").to_text().replace("PLACE", "\\ud800"))


def test_what_a_reader_refuses_is_not_written() -> None:
    twice = replace(measured(), scores=measured().scores[:1] * 2)
    with pytest.raises(RecordError, match="token_perplexity stands twice"):
        twice.to_text()
    backwards = replace(measured().scores[0], ci95=(2.0, 1.0))
    with pytest.raises(RecordError, match="ends before it begins"):
        replace(measured(), scores=(backwards,)).to_text()


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    text = measured().to_text()
    for length in range(0, len(text) - 2, 97):
        with pytest.raises(RecordError):
            Record.from_text(text[:length])


def test_numbers_too_large_for_a_float_are_refused() -> None:
    with pytest.raises(RecordError):
        Record.from_text(measured().to_text().replace("19.03", "1e999"))


def test_a_record_in_the_wrong_place_is_refused(tmp_path: Path) -> None:
    path = measured().write(tmp_path)
    moved = path.with_name("lambada.json")
    path.rename(moved)
    with pytest.raises(RecordError, match="its content says"):
        Record.read(moved, tmp_path)
    with pytest.raises(RecordError, match="its content says"):
        Record.read(moved)


def test_a_store_reads_what_it_can_and_names_the_rest(tmp_path: Path) -> None:
    path = measured().write(tmp_path)
    blank(cell=Cell("other", "softmax", "none", "gsm8k")).write(tmp_path)
    (tmp_path / "LEADERBOARD.md").write_text("no record", encoding="utf-8")
    (path.parent / ".0.tmp").write_text("left by a killed process", encoding="utf-8")
    (path.parent / "notes.txt").write_text("foreign", encoding="utf-8")
    (tmp_path / "other" / "cut.json").write_text(measured().to_text()[:100], encoding="utf-8")
    store = Store.read(tmp_path)
    assert [record.cell.model for record in store.records] == ["org/model", "other"]
    assert [re.search(r"[a-z]+\.(txt|json)", str(problem))[0] for problem in store.problems] == [
        "notes.txt",
        "cut.json",
    ]  # type: ignore[index]
    with pytest.raises(RecordError, match=r"(?s)notes\.txt.*cut\.json"):
        store.valid()


def test_a_store_names_folders_that_it_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blank().write(tmp_path)
    (tmp_path / "elsewhere").symlink_to(tmp_path / "org%2Fmodel")
    (tmp_path / ".git").symlink_to(tmp_path / "org%2Fmodel")
    (problem,) = Store.read(tmp_path).problems
    assert "elsewhere" in str(problem)
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        if str(path).endswith("softmax"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    store = Store.read(tmp_path)
    assert store.records == ()
    assert any(str(problem).endswith("softmax: Permission denied") for problem in store.problems)


@pytest.mark.parametrize("target", ["nowhere", "/" + "x" * 300, "model"])
def test_a_model_that_is_a_link_without_a_target_is_not_taken_for_absent(target: str, tmp_path: Path) -> None:
    blank().write(tmp_path)
    (tmp_path / "model").symlink_to(target)
    store = Store.read(tmp_path)
    assert len(store.records) == 1
    assert [str(tmp_path / "model") in str(problem) for problem in store.problems] == [True]


def test_reading_writes_nothing(tmp_path: Path) -> None:
    path = measured().write(tmp_path)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    Store.read(tmp_path)
    Record.read(path)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before


def test_an_interrupted_write_leaves_the_old_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = measured().write(tmp_path)
    old = path.read_bytes()

    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        measured(took_seconds=9.0).write(tmp_path)
    assert path.read_bytes() == old
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file", encoding="utf-8")
    with pytest.raises(OSError, match="results"):
        measured().write(tmp_path / "results")


def _described(node: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """(field, description) of every field of the schema that has a name."""
    found: list[tuple[str, str]] = []
    for name, inner in node.get("properties", {}).items():
        found.append((f"{prefix}{name}", inner["description"]))
        branches = [inner, inner.get("items", {}), *inner.get("oneOf", [])]
        for branch in branches:
            found += _described(branch, f"{prefix}{name}.")
    return found


def test_the_documentation_has_every_field_with_its_description() -> None:
    text = (Path(__file__).parent.parent / "docs" / "record.md").read_text(encoding="utf-8")
    expected = [f"| `{name}` | {description} |" for name, description in _described(schema())]
    assert [line for line in text.splitlines() if line.startswith("| `")] == expected
    assert len(expected) > 50


def test_the_example_in_the_documentation_is_a_record() -> None:
    text = (Path(__file__).parent.parent / "docs" / "record.md").read_text(encoding="utf-8")
    example = text.partition("```json\n")[2].partition("```")[0]
    assert Record.from_text(example).to_text() == example
