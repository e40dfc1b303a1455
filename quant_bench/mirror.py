"""Mirror: a folder of data files, each checked against a pinned SHA-256 before a byte of it is used; knows no torch."""

import bz2
import gzip
import hashlib
import json
import lzma
from collections.abc import Callable
from pathlib import Path

from quant_bench.errors import DataError

MANIFEST = "manifest.json"
_OPENERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".xz": lzma.decompress,
    ".bz2": bz2.decompress,
}


def _read_manifest(path: Path) -> dict[str, str]:
    """Relative file name -> sha256, from `{"files": {"NAME": {"sha256": "…"}}}`."""
    try:
        files = json.loads(path.read_text(encoding="utf8"))["files"]
        return {str(name): str(entry["sha256"]) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        form = '{"files": {"NAME": {"sha256": "…"}}}'
        raise DataError(f"{path} is no manifest of the form {form}: {error!r}") from error


def packaged_digests() -> dict[str, str]:
    """The SHA-256 of every data file that this package knows; it holds digests only, no data."""
    return _read_manifest(Path(__file__).with_name("data_manifest.json"))


class Mirror:
    """A folder of data files in the layout that `docs/data.md` describes.

    Which digest a file must have is stated by the package, or, for files that the package does not know, by a
    `manifest.json` in the folder. A file may lie there compressed (`.gz`, `.xz`, `.bz2`) under the pinned name plus
    that ending; then its content is what the digest is compared with.

    Args:
        root: the folder.

    Raises:
        DataError: there is no such folder, or its manifest cannot be read or contradicts the package.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().resolve()
        if not self.root.is_dir():
            raise DataError(f"the data folder {root} does not exist")
        self.digests = packaged_digests()
        own = self.root / MANIFEST
        for name, sha256 in (_read_manifest(own) if own.is_file() else {}).items():
            if self.digests.setdefault(name, sha256) != sha256:
                raise DataError(f"{own} gives {name} the sha256 {sha256}, but {self.digests[name]} is pinned")

    def find(self, name: str) -> Path | None:
        """The file of that name, or a compressed one; None when it is not there or nobody pins its digest."""
        if name not in self.digests:
            return None
        paths = [self.root / f"{name}{ending}" for ending in ("", *_OPENERS)]
        return next((path for path in paths if path.is_file()), None)

    def read(self, name: str) -> str | None:
        """Text of a file after its digest was checked, uncompressed; None when it is not there.

        Raises:
            DataError: the file is not what its name says.
        """
        path = self.find(name)
        if path is None:
            return None
        data = path.read_bytes()
        self._check(name, path, data)
        content = _unpacked(path, data)
        return content.decode("utf8")

    def verify(self) -> list[tuple[str, str]]:
        """Every pinned file and every other file in the folder, each with its state.

        Returns:
            (relative name, state) sorted by name; the state is `ok`, `missing`, `wrong: …`, or `not listed` for a file
            that no manifest knows, and which is therefore never read.
        """
        states: dict[str, str] = {}
        listed = {self.root / MANIFEST}
        for name in self.digests:
            path = self.find(name)
            if path is None:
                states[name] = "missing"
                continue
            listed.add(path)
            try:
                self._check(name, path, path.read_bytes())
                states[name] = "ok"
            except DataError as error:
                states[name] = f"wrong: {error}"
        for path in self.root.rglob("*"):
            if path.is_file() and path not in listed and path.name != "README.md":
                states[path.relative_to(self.root).as_posix()] = "not listed"
        return sorted(states.items())

    def _check(self, name: str, path: Path, data: bytes) -> None:
        content = data if path.name == Path(name).name else _unpacked(path, data)
        found = hashlib.sha256(content).hexdigest()
        if found != self.digests[name]:
            raise DataError(f"{path} is not {name}: its sha256 is {found}, but {self.digests[name]} is pinned")


def _unpacked(path: Path, data: bytes) -> bytes:
    """Content of a file, uncompressed where its name says that it is compressed."""
    opener = _OPENERS.get(path.suffix)
    if opener is None:
        return data
    try:
        return opener(data)
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be uncompressed: {error}") from error
