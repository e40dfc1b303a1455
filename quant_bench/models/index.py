"""The package index: a wheel fetched so that a killed or broken download goes on where it stopped; knows no torch."""

import ast
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import orjson
from filelock import FileLock

from quant_bench.cache import file_sha256
from quant_bench.errors import Blocked, DataError
from quant_bench.progress import bytes_bar

_LISTING = "application/vnd.pypi.simple.v1+json"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RANGE = re.compile(r"bytes ([0-9]+)-[0-9]+/([0-9]+|\*)")
_SECONDS = 60.0
_NO = ("0", "n", "no", "f", "false", "off")
_PARTIAL, _UNSATISFIABLE = 206, 416


@dataclass(frozen=True)
class Listed:
    """A file that an index lists."""

    name: str
    url: str
    sha256: str


def wheel(package: str, version: str) -> Listed | None:
    """The wheel for every platform that pip's own index lists, or None where only pip can know the way.

    That is so without such a wheel, and for an index that does not answer in JSON or not without pip's settings
    (certificates, keyring). Source: the simple repository API in JSON, PEP 691.
    """
    index = _address()
    if index is None:
        return None
    page = f"{index.rstrip('/')}/{re.sub(r'[-_.]+', '-', package).lower()}/"
    try:
        with urllib.request.urlopen(_request(page, {"Accept": _LISTING}), timeout=_SECONDS) as answer:
            files = orjson.loads(answer.read())["files"]
            for file in files:
                name = str(file["filename"])
                if not (tags_of(name, package, version) or "").endswith("-none-any"):
                    continue
                sha256 = str(file["hashes"].get("sha256")).lower()
                # the digest, too, names a file here
                if _SHA256.fullmatch(sha256):
                    return Listed(name, urljoin(answer.url, file["url"]), sha256)
    except (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError):
        # the network, or a listing of another kind: pip asks again, and says what is wrong
        return None
    return None


def tags_of(file: str, package: str, version: str) -> str | None:
    """What stands behind name and version in the name of a package's wheel; None for the name of any other file.

    In a package's name upper case and each run of `-_.` mean nothing, and old wheels have them as their makers wrote
    them.
    """
    name = "[-_.]+".join(map(re.escape, re.split(r"[-_.]+", package)))
    match = re.fullmatch(rf"{name}-{re.escape(version)}-([\w.-]{{1,80}})\.whl", file, re.IGNORECASE | re.ASCII)
    return None if match is None else match[1]


def fetch(file: Listed, folder: Path) -> Path:
    """Download a file into `folder`; what is there of an earlier try is kept, and the rest asked for.

    The part stands in a file named by the digest that the index states, so only the very same file goes on. Another
    process that fetches it at the same time waits.

    Raises:
        Blocked: the connection fails, or breaks and brings nothing more when tried again.
        DataError: the file is not the one that the index states.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part, target = folder / f".{file.sha256}.part", folder / file.name
    with FileLock(part.with_suffix(".lock")):
        if target.is_file():
            return target
        while not _more(file, part):
            pass
        if file_sha256(part) != file.sha256:
            part.unlink()
            raise DataError(f"{file.url} is not the file with sha256 {file.sha256} that the index states; run again")
        part.replace(target)
    return target


def _more(file: Listed, part: Path) -> bool:
    """Ask for what is missing of the part; whether it is whole now. Raises Blocked when it did not grow."""
    had = part.stat().st_size if part.exists() else 0
    broken: object = "it ended early"
    try:
        request = _request(file.url, {"Range": f"bytes={had}-"} if had else {})
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            start, total = _place(answer, had)
            with part.open("r+b" if had else "wb") as sink, bytes_bar(file.name, start, total) as advance:
                sink.seek(start)
                while block := answer.read(1 << 18):
                    sink.write(block)
                    advance(len(block))
                if total is None or sink.tell() >= total:
                    # not before: what is there already stays when an answer from the start breaks sooner
                    sink.truncate()
                    return True
    except (OSError, HTTPException, ValueError) as error:
        # the network, the disk, or an address or a number that is none
        if had and isinstance(error, urllib.error.HTTPError) and error.code == _UNSATISFIABLE:
            return True
        broken = error
    if not part.exists() or part.stat().st_size <= had:
        raise Blocked(f"{file.url} cannot be downloaded ({broken}); run again: it goes on after {had:,} bytes")
    return False


def _place(answer: Any, had: int) -> tuple[int, int | None]:
    """Where in the file an answer begins, and how long the file is, None where that is not said.

    A server that knows no ranges sends the file from the start; one may also send less than the rest. What it says is
    not trusted further than the digest goes, which is compared in the end.

    Source: RFC 9110, section 14.4.
    """
    length = answer.headers["Content-Length"]
    size = None if length is None else int(length)
    start = had if answer.status == _PARTIAL else 0
    said = _RANGE.fullmatch(answer.headers["Content-Range"] or "") if start else None
    if said is not None:
        return min(int(said[1]), had), None if said[2] == "*" else int(said[2])
    return start, None if size is None else start + size


def _address() -> str | None:
    """The index that pip uses, without its further indexes and links; None where pip is told to use none."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    said = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False).stdout
    found = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    settings = {"index-url": "https://pypi.org/simple", "no-index": "no"}
    for name in settings:
        # the later counts, as for pip; without pip its variables still say something
        for section in ("global", "download"):
            if f"{section}.{name}" in found:
                settings[name] = str(ast.literal_eval(found[f"{section}.{name}"]))
        settings[name] = os.environ.get(f"PIP_{name.replace('-', '_').upper()}") or settings[name]
    return settings["index-url"] if settings["no-index"].lower() in _NO else None


def _request(url: str, headers: dict[str, str]) -> urllib.request.Request:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url} is no web address")
    return urllib.request.Request(url, headers=headers)
