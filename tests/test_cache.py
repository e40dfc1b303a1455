import hashlib
import os
from pathlib import Path

import pytest

from quant_bench.cache import cache_folder, file_sha256, folder_made_whole, listing_sha256, write_atomically


def test_of_two_makers_of_one_folder_the_first_to_finish_wins(tmp_path: Path) -> None:
    target = tmp_path / "made"
    with folder_made_whole(target) as slow:
        (slow / "who").write_text("slow")
        with folder_made_whole(target) as fast:
            (fast / "who").write_text("fast")
        assert (target / "who").read_text() == "fast"
    assert (target / "who").read_text() == "fast"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_folder_whose_maker_fails_is_not_there(tmp_path: Path) -> None:
    def make() -> None:
        with folder_made_whole(tmp_path / "made") as work:
            (work / "half").touch()
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        make()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_maker_left_is_deleted_after_a_day_and_not_before(tmp_path: Path) -> None:
    old, new, other = (
        tmp_path / name for name in (".made.0a1b2c3d.part", ".made.0a1b2c3e.part", ".else.0a1b2c3d.part")
    )
    for folder in (old, new, other):
        folder.mkdir()
    for folder in (old, other):
        os.utime(folder, (0, 0))
    with folder_made_whole(tmp_path / "made"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, new.name, "made"]


def test_hidden_files_of_the_user_stay(tmp_path: Path) -> None:
    kept = [tmp_path / name for name in (".env.local", ".env.20240101", ".env.0a1b2c3d")]
    for file in kept:
        file.write_text("mine")
        os.utime(file, (0, 0))
    with folder_made_whole(tmp_path / "env"):
        pass
    write_atomically(tmp_path / "env" / "x", b"")
    assert all(file.exists() for file in kept)


def test_a_folder_is_as_readable_as_others_are(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    with folder_made_whole(tmp_path / "made"):
        pass
    assert (tmp_path / "made").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_link_to_an_empty_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with folder_made_whole(tmp_path / "link") as work:
        (work / "file").touch()
    assert (tmp_path / "disk" / "file").exists()


def test_a_folder_that_cannot_take_its_place_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_arguments: object) -> None:
        raise OSError("device or resource busy")

    (tmp_path / "made").mkdir()
    monkeypatch.setattr(Path, "rename", busy)
    with pytest.raises(OSError, match="busy"), folder_made_whole(tmp_path / "made"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_who_must_not_lose_to_another_maker_is_told(tmp_path: Path) -> None:
    def make() -> None:
        with folder_made_whole(tmp_path / "made", only=True), folder_made_whole(tmp_path / "made", only=True) as fast:
            (fast / "who").write_text("fast")

    with pytest.raises(OSError, match="made"):
        make()
    assert (tmp_path / "made" / "who").read_text() == "fast"


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "file"
    write_atomically(path, b"old")

    def full(_handle: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_digest_is_read_again_when_the_note_of_it_cannot_be(tmp_path: Path) -> None:
    file, cache = tmp_path / "file", tmp_path / "cache"
    file.write_bytes(b"content")
    expected = hashlib.sha256(b"content").hexdigest()
    assert file_sha256(file, cache) == expected
    (note,) = (cache / "digests").iterdir()
    for damage in ("", "[]", '{"state": 1}', "\x00"):
        note.write_text(damage)
        assert file_sha256(file, cache) == expected


def test_digest_is_not_computed_twice(tmp_path: Path) -> None:
    file, cache = tmp_path / "file", tmp_path / "cache"
    file.write_bytes(b"content")
    file_sha256(file, cache)
    (note,) = (cache / "digests").iterdir()
    note.write_text(note.read_text().replace(hashlib.sha256(b"content").hexdigest(), "noted"))
    assert file_sha256(file, cache) == "noted"
    file.write_bytes(b"another")
    assert file_sha256(file, cache) == hashlib.sha256(b"another").hexdigest()


def test_listing_is_what_sha256sum_prints(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    lines = f"{hashlib.sha256(b'1').hexdigest()}  a\n"
    assert listing_sha256([tmp_path / "a"]) == hashlib.sha256(lines.encode()).hexdigest()


def test_cache_folder_is_the_given_the_named_or_the_user_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANT_BENCH_CACHE", str(tmp_path / "named"))
    assert cache_folder(tmp_path / "given") == tmp_path / "given"
    assert cache_folder() == tmp_path / "named"
    monkeypatch.delenv("QUANT_BENCH_CACHE")
    assert cache_folder().name == "quant-bench"


def test_what_killed_writers_left_is_swept_after_a_day(tmp_path: Path) -> None:
    target = tmp_path / "record[1].json"
    old, young, other = (
        tmp_path / f".{name}"
        for name in ("record[1].json.0000aaaa.part", "record[1].json.0000bbbb.part", "x.json.0000cccc.part")
    )
    for left in (old, young, other):
        left.write_text("half")
    for left in (old, other):
        os.utime(left, (1e9, 1e9))
    write_atomically(target, b"whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted((target.name, young.name, other.name))
