import bz2
import gzip
import hashlib
import json
import lzma
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quant_bench import hub_access
from quant_bench.corpora import TEXTS
from quant_bench.data import DataSource
from quant_bench.errors import Blocked, DataError
from quant_bench.mirror import Mirror, packaged_digests

PRESSES: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks the real hub or sees the user's folder."""
    monkeypatch.delenv("QUANT_BENCH_DATA", raising=False)
    monkeypatch.setattr(hub_access, "hub_answers", lambda: False)


def own_mirror(folder: Path, files: dict[str, bytes], digests: dict[str, str] | None = None) -> Path:
    """A mirror with its own manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    listed = digests or {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    manifest = {"files": {name: {"sha256": sha256} for name, sha256 in listed.items()}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


# U+2028 is part of a text, no end of a line
WIKI40B = b'{"text": "one\xe2\x80\xa8still one"}\n{"text": "two"}\n'


def test_a_wrong_file_under_the_right_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "wiki.test.raw").write_text(" = A title = \n")
    found = hashlib.sha256(b" = A title = \n").hexdigest()
    pinned = packaged_digests()["wikitext2/wiki.test.raw"]
    source = DataSource(tmp_path)
    with pytest.raises(DataError, match=f"{found}, but {pinned} is pinned"):
        source.text("wikitext2", "test")
    with pytest.raises(DataError, match=pinned):
        source.dataset("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1") or source.text("wikitext2")
    states = dict(source.verify())
    assert states["wikitext2/wiki.test.raw"].startswith("wrong: ")
    assert states["gsm8k/test.jsonl"] == "missing"


@pytest.mark.parametrize("ending", ["", ".gz", ".xz", ".bz2"])
def test_a_mirror_s_own_manifest_admits_files_compressed_or_not(tmp_path: Path, ending: str) -> None:
    name = "wiki40b/en.validation.jsonl"
    press = PRESSES.get(ending, bytes)
    root = own_mirror(
        tmp_path / "data", {f"{name}{ending}": press(WIKI40B)}, {name: hashlib.sha256(WIKI40B).hexdigest()}
    )
    text = DataSource(root).text("wiki40b", "validation")
    assert text.rows == ["one\u2028still one", "two"]
    assert dict(DataSource(root).verify())[name] == "ok"
    (root / f"{name}{ending}").write_bytes(press(WIKI40B.replace(b"two", b"six")))
    with pytest.raises(DataError, match="is pinned"):
        DataSource(root).text("wiki40b", "validation")


def test_a_file_that_no_manifest_lists_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "wiki40b").mkdir()
    (tmp_path / "wiki40b" / "en.validation.jsonl").write_bytes(WIKI40B)
    source = DataSource(tmp_path)
    with pytest.raises(Blocked, match=r"manifest\.json"):
        source.text("wiki40b", "validation")
    assert dict(source.verify())["wiki40b/en.validation.jsonl"] == "not listed"


def test_a_manifest_cannot_overrule_a_pinned_digest(tmp_path: Path) -> None:
    root = own_mirror(tmp_path, {"wikitext2/wiki.test.raw": b"mine"})
    with pytest.raises(DataError, match="is pinned"):
        Mirror(root)


@pytest.mark.parametrize("content", ["[]", "{", '{"files": {"a": {}}}', '{"files": 3}'])
def test_a_manifest_that_cannot_be_read_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=r"manifest\.json is no manifest"):
        Mirror(tmp_path)


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2"])
def test_a_damaged_archive_is_an_error(tmp_path: Path, ending: str) -> None:
    name = "wiki40b/en.test.jsonl"
    half = PRESSES[ending](WIKI40B)[:-9]
    root = own_mirror(tmp_path, {f"{name}{ending}": half}, {name: hashlib.sha256(WIKI40B).hexdigest()})
    with pytest.raises(DataError, match="cannot be uncompressed"):
        DataSource(root).text("wiki40b", "test")


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        DataSource(tmp_path / "nowhere")
    monkeypatch.setenv("QUANT_BENCH_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="nowhere does not exist"):
        DataSource()


def test_every_pinned_text_has_a_pinned_file() -> None:
    pinned = {split.file for split in TEXTS.values() if split.sha256 is not None}
    assert pinned <= set(packaged_digests())


def test_mirror_is_never_written_to(tmp_path: Path) -> None:
    root = own_mirror(tmp_path / "data", {"wiki40b/en.test.jsonl": WIKI40B})
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    source = DataSource(root)
    source.text("wiki40b", "test")
    source.verify()
    assert sorted(path.relative_to(root) for path in root.rglob("*")) == sorted(
        path.relative_to(copy) for path in copy.rglob("*")
    )


def test_the_documentation_names_every_pinned_file() -> None:
    text = (Path(__file__).parent.parent / "docs" / "data.md").read_text(encoding="utf8")
    folders = ("train_text/", "tokenizer_gpt2/")
    missing = [name for name in packaged_digests() if f"`{name}`" not in text and not name.startswith(folders)]
    assert missing == []
    assert "696cca6b65a171b0a358a4be6732cdfdf2dd6164a32e20fd70e3c13fc4dfae83" in text
