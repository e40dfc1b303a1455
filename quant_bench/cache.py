"""Cache folder, atomic writing and file digests; knows no torch."""

import glob
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

CACHE_VARIABLE = "QUANT_BENCH_CACHE"
_DAY = 86_400.0


def cache_folder(given: Path | None = None) -> Path:
    """Where downloads and conversions are kept: `given`, `QUANT_BENCH_CACHE`, or the user's cache folder."""
    from platformdirs import user_cache_dir

    if given is not None:
        return given.expanduser().resolve()
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser().resolve() if named else Path(user_cache_dir("quant-bench"))


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that readers see the old content or the new, never a part, even if this process is killed."""
    with file_made_whole(path) as work, work.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def file_made_whole(target: Path) -> Iterator[Path]:
    """Yield the path of a new file that takes the place of `target` when the block ends without error.

    A killed process leaves a file whose name starts with a dot and that nobody reads.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    work = _beside(target)
    try:
        yield work
        work.replace(target)
    finally:
        work.unlink(missing_ok=True)


def _beside(target: Path) -> Path:
    """A new name beside `target`, for what will take its place; what killed processes left there is swept."""
    # the ending makes it ours: a user's `.env.local` lies beside a model that is saved as `env`
    sweep(target.parent, f".{glob.escape(target.name)}.{'[0-9a-f]' * 8}.part")
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")


def sweep(parent: Path, pattern: str) -> None:
    """Delete what killed processes left: files and folders of these names, unchanged for a day."""
    for left in parent.glob(pattern):
        try:
            if time.time() - left.stat().st_mtime <= _DAY:
                continue
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()
        except FileNotFoundError:
            # another process swept it
            continue


@contextmanager
def folder_made_whole(target: Path, *, only: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` when the block ends without error.

    Two processes may do this at once: the first to finish wins, the other throws its copy away. A killed one leaves a
    folder whose name starts with a dot and that nobody reads.

    Args:
        target: may be there as an empty folder, or a link to one.
        only: what the other process made is not the same, so losing to it is an error.

    Raises:
        OSError: the folder cannot be put in its place.
    """
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    work = _beside(target)
    work.mkdir()
    try:
        yield work
        try:
            work.rename(target)
        except OSError:
            # not empty: another process was faster; anything else is a real error
            if only or not target.is_dir() or not any(target.iterdir()):
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def tensor_files(folder: Path) -> Iterator[None]:
    """What goes wrong with safetensors files that the block writes into a folder is an error of the file system.

    They become as readable as the folder; safetensors lets only their owner read them.
    """
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"{folder}: {error}") from error
    for file in folder.glob("*.safetensors"):
        file.chmod(folder.stat().st_mode & 0o666)


def file_sha256(path: Path, cache: Path | None = None) -> str:
    """SHA-256 of a file; with `cache`, computed again only when size, times or inode of the file changed."""
    if cache is None:
        return _digest(path)
    path = path.resolve()
    stat = path.stat()
    state = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    note = cache / "digests" / f"{hashlib.sha256(str(path).encode()).hexdigest()}.json"
    try:
        known = json.loads(note.read_text())
        if known["state"] == state:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        # no note, or one that cannot be read: compute
        pass
    sha256 = _digest(path)
    write_atomically(note, json.dumps({"path": str(path), "state": state, "sha256": sha256}).encode())
    return sha256


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def listing_sha256(files: list[Path], cache: Path | None = None) -> str:
    """SHA-256 of the lines that `sha256sum NAME…` prints for the files, in the order given."""
    lines = "".join(f"{file_sha256(path, cache)}  {path.name}\n" for path in files)
    return hashlib.sha256(lines.encode()).hexdigest()
