"""The package index: a wheel fetched so that a killed or broken download goes on where it stopped; knows no torch."""

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urljoin

import orjson
from filelock import FileLock

from quant_bench.cache import file_sha256
from quant_bench.errors import Blocked, DataError
from quant_bench.progress import bytes_bar

_LISTING = "application/vnd.pypi.simple.v1+json"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SECONDS = 60.0
_UNSATISFIABLE = 416


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
    stem = f"{re.sub(r'[-_.]+', '_', package).lower()}-{version}-"
    try:
        with urllib.request.urlopen(_request(page, {"Accept": _LISTING}), timeout=_SECONDS) as answer:
            files = orjson.loads(answer.read())["files"]
            fitting = [file for file in files if str(file["filename"]).lower().startswith(stem.lower())]
            for file in fitting:
                sha256 = str(file["hashes"].get("sha256")).lower()
                # the digest names a file here, so it must be one
                if str(file["filename"]).endswith("-none-any.whl") and _SHA256.fullmatch(sha256):
                    return Listed(Path(file["filename"]).name, urljoin(answer.url, file["url"]), sha256)
    except (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError):
        # the network, or a listing of another kind: pip asks again, and says what is wrong
        return None
    return None


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
            # a server that knows no ranges sends the whole file again
            start = had if answer.status == 206 else 0
            length = answer.headers["Content-Length"]
            total = None if length is None else start + int(length)
            with part.open("ab" if start else "wb") as sink, bytes_bar(file.name, start, total) as advance:
                while block := answer.read(1 << 18):
                    sink.write(block)
                    advance(len(block))
        if total is None or part.stat().st_size >= total:
            return True
    except (OSError, HTTPException) as error:
        if had and isinstance(error, urllib.error.HTTPError) and error.code == _UNSATISFIABLE:
            return True
        broken = error
    if not part.exists() or part.stat().st_size <= had:
        raise Blocked(f"{file.url} cannot be downloaded ({broken}); run again: it goes on after {had:,} bytes")
    return False


def _address() -> str | None:
    """The index that pip uses, without its further indexes and links; None where pip is told to use none."""
    if os.environ.get("PIP_NO_INDEX"):
        return None
    named = os.environ.get("PIP_INDEX_URL")
    if named:
        return named
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "https://pypi.org/simple"


def _request(url: str, headers: dict[str, str]) -> urllib.request.Request:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url} is no web address")
    return urllib.request.Request(url, headers=headers)
