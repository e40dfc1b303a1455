"""The committed records: what lies under results/ is true to its place, its names and its leaderboard."""

import json
from pathlib import Path

import pytest

from quant_bench import registry, report
from quant_bench.record import Record, Store
from quant_bench.record_json import validate

RESULTS = Path(__file__).parent.parent / "results"


@pytest.fixture(scope="module")
def store() -> Store:
    return Store.read(RESULTS)


def test_every_file_is_a_record_that_lies_where_its_content_says(store: Store) -> None:
    assert [str(problem) for problem in store.problems] == []


def test_every_record_is_written_back_byte_for_byte(store: Store) -> None:
    for record in store.records:
        path = record.cell.path(RESULTS)
        assert path.read_bytes() == record.to_text().encode(), path
        validate(json.loads(path.read_bytes()))


def test_every_name_exists_and_is_canonical(store: Store) -> None:
    kinds: tuple[tuple[registry.Kind, str], ...] = (("arms", "arm"), ("quantizers", "quantizer"), ("tasks", "task"))
    for record in store.records:
        for kind, part in kinds:
            text = getattr(record.cell, part)
            assert registry.canonical(kind, registry.build(kind, text)) == text


def test_no_record_is_of_a_newer_plugin_than_there_is(store: Store) -> None:
    for record in store.records:
        for kind, part in (("arms", "arm"), ("quantizers", "quantizer"), ("tasks", "task")):
            name = getattr(record.cell, part).partition("(")[0]
            assert record.versions[part] <= registry.load(kind, name).version


def test_no_committed_record_failed(store: Store) -> None:
    assert [record.cell for record in store.records if record.state == "failed"] == []


def test_every_quantized_score_has_its_float_cell(store: Store) -> None:
    cells = {record.cell for record in store.records}
    for record in store.records:
        if any(score.delta is not None for score in record.scores):
            reference = record.cell.__class__(
                record.cell.model, record.cell.arm, "none", record.cell.task, record.cell.seed
            )
            assert reference in cells


def test_the_leaderboard_is_what_the_records_say(store: Store) -> None:
    assert not report.stale(RESULTS, report.long_frame(store.records))


def test_a_store_with_a_stranger_does_not_pass(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "stranger.json").write_text("{}", encoding="utf-8")
    assert len(Store.read(tmp_path).problems) == 1
    with pytest.raises(Exception, match="stranger"):
        Record.read(tmp_path / "m" / "stranger.json")
