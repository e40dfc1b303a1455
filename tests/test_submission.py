"""Records from elsewhere: what is refused and why, and two trees that become one."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from quant_bench import registry, report
from quant_bench.cli import main
from quant_bench.record import Cell, Record
from quant_bench.score import Delta, Metric, Score

DIGEST = "a" * 64
ACC = Metric("acc", "share", "higher", "mean", 0.25)
PERPLEXITY = Metric("token_perplexity", "1", "lower", "exp")


def record(quantizer: str = "none", value: float = 0.5, **changes: Any) -> Record:
    """A record as a run of this version would write it."""
    cell = Cell(changes.pop("model", "m"), "softmax", quantizer, "hellaswag", 0)
    plugins = {part: registry.build(kind, getattr(cell, part)) for part, kind in registry_kinds().items()}
    delta = None if quantizer == "none" else Delta(value - 0.5, (value - 0.51, value - 0.49), "none", 0.5)
    digests = {key: DIGEST for key in ("weights_sha256", "tokenizer_sha256", "data_sha256", "calibration_sha256")}
    made = Record(
        state="measured",
        reason=None,
        cell=cell,
        settings={"model": {"dtype": "float32"}} | {part: registry.settings(one) for part, one in plugins.items()},
        versions={part: one.version for part, one in plugins.items()} | {"quant_bench": "0.1.0"},
        identity=digests | changes.pop("identity", {}),
        convention="lm-eval v1",
        coverage={"quantized": {}, "skipped": {}, "tied": {}, "mac_share": 0.5, "notes": []},
        scores=(Score(ACC, value, 0.01, (value - 0.02, value + 0.02), 100, delta),),
    )
    return replace(made, **changes)


def registry_kinds() -> dict[str, Any]:
    return {"arm": "arms", "quantizer": "quantizers", "task": "tasks"}


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def checked(tree: Path, *arguments: object) -> list[str]:
    """Problems that are listed; the exit code says whether there are any."""
    found = call("submit-check", tree, *arguments)
    listed = found.stdout.splitlines()
    assert found.exit_code == (1 if listed else 0), found.output
    assert "Traceback" not in found.output
    return listed


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "submitted"
    for one in (record(), record("rtn", 0.4)):
        one.write(folder)
    (folder / "LEADERBOARD.md").write_text("no record", encoding="utf-8")
    return folder


def only_file(tree: Path) -> Path:
    return tree / "m" / "softmax" / "rtn" / "hellaswag.json"


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a record behind its writer's back, written as records are."""
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document, sort_keys=True, indent=1) + "\n", encoding="utf-8")


def test_what_a_run_writes_is_sound(tree: Path) -> None:
    assert checked(tree) == []


def scored(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["scores"][0].update(values)


PERPLEX = {"metric": "token_perplexity", "reduction": "exp", "unit": "1", "better": "lower", "delta": None}
IMPLAUSIBLE: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (scored(value=1.2, ci95=None, delta=None), "acc: 1.2 is not between 0 and 1"),
    (scored(**PERPLEX, value=0.9, ci95=None), "token_perplexity: 0.9 is not between 1 and inf"),
    (scored(metric="kl", unit="nats/token", value=-0.1, ci95=None, delta=None), "kl: -0.1 is not between 0 and inf"),
    (scored(n=0), "acc: n is 0"),
    (scored(ci95=[0.1, 0.2]), "acc: its interval [0.1, 0.2] does not contain 0.4"),
    (lambda d: d["scores"][0]["delta"].update(ci95=[0.0, 0.1]), "delta interval [0.0, 0.1] does not contain"),
    (lambda d: d["scores"][0]["delta"].update(value=-0.2, ci95=None), "the records of the two cells differ by -0.0999"),
    (lambda d: d["scores"][0]["delta"].update(reference="rtn"), "is one to 'rtn', not to 'none'"),
    (lambda d: d["scores"].append(d["scores"][0]), "acc stands twice"),
    (scored(stderr=0.1), "does not go with the standard error 0.1"),
    (scored(stderr=0.001), "does not go with the standard error 0.001"),
    (scored(chance=0.9), "what acc means is not that of m/softmax/none/hellaswag.json"),
    (scored(unit="1", value=1.4, ci95=None), "what acc means is not that of m/softmax/none/hellaswag.json"),
    (scored(unit="1", value=0.3, ci95=None), "the records of the two cells differ by -0.2"),
    (lambda d: d["settings"]["model"].update(dtype="bfloat16"), "settings.model.dtype is not that of m/softmax/none"),
    (lambda d: d["identity"].update(calibration_sha256="b" * 64), "identity.calibration_sha256 is not that of"),
    (lambda d: d["identity"].update(weights_sha256="b" * 64), "identity.weights_sha256 is not that of m/softmax/none"),
    (lambda d: d["identity"].update(data_sha256="b" * 64), "identity.data_sha256 is not that of m/softmax/none"),
    (lambda d: d["identity"].update(tokenizer_sha256="A" * 64), "identity.tokenizer_sha256 is no sha256"),
    (lambda d: d["versions"].update(quantizer=99), "quantizer 'rtn' has version 1 here; the record is of 99"),
    (lambda d: d["settings"]["quantizer"].update(weight_bits=4), "settings.quantizer are not those of 'rtn'"),
]


@pytest.mark.parametrize(("change", "problem"), IMPLAUSIBLE)
def test_a_number_that_cannot_be_is_named(change: Callable[[dict[str, Any]], object], problem: str, tree: Path) -> None:
    changed(only_file(tree), change)
    found = checked(tree)
    assert any(line.startswith("m/softmax/rtn/hellaswag.json: ") and problem in line for line in found), found


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (scored(stderr=-0.1), "-0.1 is less than the minimum"),
        (lambda d: d["cell"].update(task="lambada"), "its content says that it lies at m/softmax/rtn/lambada.json"),
        (lambda d: d.update(extra=1), "'extra' was unexpected"),
        (lambda d: d.update(details={"x": float("inf")}), "no strict JSON"),
    ],
)
def test_a_file_that_is_no_record_is_named(
    change: Callable[[dict[str, Any]], object], problem: str, tree: Path
) -> None:
    changed(only_file(tree), change)
    (found,) = checked(tree)
    assert found.startswith("m/softmax/rtn/hellaswag.json: ")
    assert problem in found


def test_a_plugin_that_this_version_lacks_is_named(tree: Path) -> None:
    unknown = replace(record("rtn").cell, quantizer="magic(bits=2)")
    replace(record("rtn", 0.4), cell=unknown).write(tree)
    (found,) = checked(tree)
    assert found.startswith("m/softmax/magic,bits=2/hellaswag.json: quantizer: no quantizer named 'magic'")


def test_a_record_is_written_as_records_are(tree: Path) -> None:
    text = only_file(tree).read_text(encoding="utf-8")
    only_file(tree).write_text(json.dumps(json.loads(text)), encoding="utf-8")
    (found,) = checked(tree)
    assert "not written as quant-bench writes records" in found


def test_links_hidden_files_and_what_attacks_a_reader_only_appear(tree: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret", encoding="utf-8")
    folder = only_file(tree).parent
    (folder / "link.json").symlink_to(secret)
    (tree / "linked").symlink_to(tmp_path)
    (folder / ".hidden.json").write_text("{}", encoding="utf-8")
    (folder / "\x1b[2Jclear\u202e.json").write_text("{}", encoding="utf-8")
    (folder / "deep.json").write_text("[" * 200_000, encoding="utf-8")
    deep = json.loads(only_file(tree).read_text(encoding="utf-8"))
    nested = json.dumps(deep | {"details": {"x": "HERE"}}).replace('"HERE"', "[" * 1_000 + "]" * 1_000)
    only_file(tree).write_text(nested, encoding="utf-8")
    (folder / "huge.json").write_text('{"schema": ' + "9" * 5000 + "}", encoding="utf-8")
    with (folder / "large.json").open("wb") as file:
        file.truncate(50 << 20)
    os.mkfifo(folder / "pipe.json")
    found = checked(tree)
    names = ("link.json", "linked", ".hidden.json", "clear", "deep.json", "huge.json", "large.json", "pipe.json")
    names += ("rtn/hellaswag.json: it is not written as quant-bench writes records",)
    assert all(any(name in line for line in found) for name in names), found
    assert len(found) == len(names)
    text = "\n".join(found)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "secret" not in text.replace(str(secret), "")


def test_a_model_named_like_a_path_stays_in_its_folder(tree: Path) -> None:
    path = record(model="../../x\x1b").write(tree)
    assert path.resolve().is_relative_to(tree.resolve())
    assert checked(tree) == []


@pytest.fixture
def base(tree: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    for one in (record(), record("rtn", 0.4)):
        one.write(folder)
    return folder


def test_nothing_may_be_deleted(tree: Path, base: Path) -> None:
    assert checked(tree, "--against", base) == []
    only_file(tree).unlink()
    assert checked(tree, "--against", base) == ["m/softmax/rtn/hellaswag.json: it was deleted"]


def test_a_measured_value_may_not_change_in_silence(tree: Path, base: Path) -> None:
    record("rtn", 0.4001).write(tree)
    (found,) = checked(tree, "--against", base)
    assert "acc was 0.4 and is 0.4001, with the same versions and digests" in found
    assert checked(tree, "--against", base, "--tolerance", "0.001") == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (scored(ci95=[0.389, 0.411], stderr=0.01), "acc low was 0.38 and is 0.389, with the same versions and digests"),
        (scored(ci95=None), "acc low was 0.38 and is None"),
        (scored(stderr=0.009), "acc stderr was 0.01 and is 0.009"),
        (scored(n=101), "acc n was 100 and is 101"),
        (scored(delta=None), "acc delta was -0.0999"),
        (lambda d: d["scores"][0]["delta"].update(ci95=[-0.101, -0.099]), "acc delta low was -0.1099"),
        (lambda d: d["scores"][0]["delta"].update(p_value=0.01), "acc delta p_value was 0.5 and is 0.01"),
        (scored(better="lower"), "acc was Metric(name='acc', unit='share', better='higher'"),
        (lambda d: d["coverage"].update(mac_share=0.9), "coverage.mac_share was 0.5 and is 0.9"),
    ],
)
def test_what_is_said_of_a_value_may_not_change_in_silence(
    change: Callable[[dict[str, Any]], object], problem: str, tree: Path, base: Path
) -> None:
    changed(only_file(tree), change)
    found = checked(tree, "--against", base)
    assert any(line.startswith("m/softmax/rtn/hellaswag.json: ") and problem in line for line in found), found


def test_what_another_draw_of_resamples_or_a_later_difference_changes_is_no_silent_change(
    tree: Path, base: Path
) -> None:
    changed(only_file(base), scored(delta=None))
    changed(only_file(tree), scored(ci95=[0.3805, 0.4195]))
    assert checked(tree, "--against", base) == []


def test_a_base_without_any_record_is_another_folder_than_was_meant(tree: Path, base: Path) -> None:
    found = call("submit-check", tree, "--against", base.parent)
    assert found.exit_code == 1
    assert "what was there before has no record" in found.stderr
    empty = base.parent / "empty"
    empty.mkdir()
    assert checked(tree, "--against", empty) == []


def test_a_folder_that_cannot_be_read_is_not_taken_for_empty(
    tree: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        if str(path) == str(tree / "m" / "softmax"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert checked(tree) == ["m/softmax: Permission denied"]
    found = call("merge", tree, base, "--out", tmp_path / "out")
    assert found.exit_code == 1
    assert "Permission denied" in found.stderr
    assert not (tmp_path / "out").exists()


def test_a_value_may_change_with_the_data_that_it_was_measured_on(tree: Path, base: Path) -> None:
    for one in (
        record("none", identity={"data_sha256": "b" * 64}),
        record("rtn", 0.3, identity={"data_sha256": "b" * 64}),
    ):
        one.write(tree)
    assert checked(tree, "--against", base) == []


@pytest.mark.parametrize("name", ["quantized_sha256", "made_up_sha256"])
def test_a_digest_that_says_nothing_of_the_measurement_is_no_reason(name: str, tree: Path, base: Path) -> None:
    record("rtn", 0.45, identity={name: "b" * 64}).write(tree)
    (found,) = checked(tree, "--against", base)
    assert "acc was 0.4 and is 0.45, with the same versions and digests" in found


def test_a_result_may_not_become_a_failure(tree: Path, base: Path) -> None:
    lost = {"scores": (), "convention": None, "coverage": None}
    replace(record("rtn"), state="failed", reason="ValueError: x", **lost).write(tree)
    assert checked(tree, "--against", base) == ["m/softmax/rtn/hellaswag.json: it was measured and is failed"]


def test_what_was_there_before_is_not_asked_again(tree: Path, base: Path) -> None:
    for folder in (tree, base):
        changed(only_file(folder), lambda document: document["versions"].update(quantizer=99))
    assert len(checked(tree)) == 1
    assert checked(tree, "--against", base) == []


def test_the_committed_records_are_sound() -> None:
    from quant_bench.submission.check import Tree, check

    tree = Tree.read(Path(__file__).parent.parent / "results")
    assert tree.records
    # plugins may have moved on since these were measured: everything else must hold
    assert [str(one) for one in check(tree) if "has version" not in one.what] == []


def test_two_trees_become_one_that_loses_nothing(tree: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    for one in (record(), record("rtn(weight_bits=4)", 0.3), record(model="n")):
        one.write(other)
    found = call("merge", tree, other, "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    assert "4 records" in found.stdout
    assert "1 only of A, 2 only of B" in found.stdout
    expected = {file.relative_to(root): file.read_bytes() for root in (other, tree) for file in root.rglob("*.json")}
    out = tmp_path / "out"
    assert {file.relative_to(out): file.read_bytes() for file in out.rglob("*.json")} == expected
    assert not report.stale(out, report.leaderboard(out))


def test_a_conflict_is_named_and_nothing_is_written(tree: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    record("rtn", 0.3).write(other)
    found = call("merge", tree, other, "--out", tmp_path / "out")
    assert found.exit_code == 1
    assert "m/softmax/rtn/hellaswag.json: acc is 0.4 and 0.3" in found.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "submitted"]


def test_a_conflict_without_other_values_says_what_differs(tree: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    record("rtn", 0.4, took_seconds=77.0, environment={"device": "another"}).write(other)
    found = call("merge", tree, other, "--out", tmp_path / "out")
    assert "rtn/hellaswag.json: the same values, but other environment and took_seconds" in found.stderr


@pytest.mark.parametrize(("prefer", "value"), [("a", 0.4), ("b", 0.3)])
def test_a_conflict_is_decided_by_whom_is_preferred(prefer: str, value: float, tree: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    record("rtn", 0.3).write(other)
    found = call("merge", tree, other, "--out", tmp_path / "out", "--prefer", prefer)
    assert found.exit_code == 0, found.output
    assert f"kept that of {prefer}: m/softmax/rtn/hellaswag.json" in found.stderr
    assert Record.read(only_file(tmp_path / "out")).scores[0].value == value


def test_a_merge_writes_its_folder_and_nothing_else(tree: Path, base: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("<!-- leaderboard m: hellaswag acc -->\nold\n<!-- /leaderboard -->\n", encoding="utf-8")
    assert call("merge", tree, base, "--out", tmp_path / "out").exit_code == 0
    assert "old" in readme.read_text(encoding="utf-8")
    plain = tmp_path / "plain"
    plain.mkdir()
    assert (tmp_path / "out").stat().st_mode == plain.stat().st_mode
    found = call("merge", tree, base, "--out", base / "both")
    assert found.exit_code == 2
    assert "name a folder outside of both" in found.stderr


def test_a_merge_replaces_no_folder_and_takes_no_foreign_file(tree: Path, tmp_path: Path) -> None:
    found = call("merge", tree, tree, "--out", tree)
    assert found.exit_code == 1
    assert "not empty" in found.stderr
    (tree / "m" / "notes.txt").write_text("foreign", encoding="utf-8")
    found = call("merge", tree, tree, "--out", tmp_path / "out")
    assert found.exit_code == 1
    assert "notes.txt" in found.stderr
