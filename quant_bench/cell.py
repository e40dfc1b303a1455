"""Cells: what the suite measures, and the path that follows from it; knows no torch."""

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final
from urllib.parse import quote

from quant_bench.errors import RecordError, SpecError
from quant_bench.spec import Spec, joined, written

# the arm that others are compared with: the model as it is
BASELINE_ARM: Final = "softmax"

# torch's CPU generator reads the lower 32 bits of a seed: a larger one would draw what a smaller one draws
SEEDS: Final = 1 << 32

_DEVICE = re.compile(r"cpu|cuda(:(0|[1-9][0-9]?))?")

# with `@seed=…` and `.json` behind it a name stays below the 255 bytes of common file systems
_LONGEST = 200


@dataclass(frozen=True)
class Cell:
    """What the suite measures: a task, asked of a quantized model.

    Attributes:
        model: as the user named it, with revision and dtype where they are not the default.
        arm, quantizer, task: canonical specs; of an arm also several, joined by `+`.
        seed: of calibration, bootstrap and anything drawn.
    """

    model: str
    arm: str
    quantizer: str
    task: str
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.model:
            raise RecordError("a cell needs a model")
        for part in ("arm", "quantizer", "task"):
            text = getattr(self, part)
            try:
                canonical = _canonical(text)
            except SpecError as error:
                raise RecordError(f"{part}: {error}") from error
            if canonical != text:
                raise RecordError(f"{part} of a cell is canonical: {canonical!r}, not {text!r}")

    def parts(self) -> tuple[str, str, str, str]:
        """Names of the folders and of the file at which the cell's record lies; different cells have different ones.

        A spec `rtn(weight_bits=4)` is written `rtn,weight_bits=4`; what a file system or shell could misread is
        percent-encoded; a seed other than 0 follows the task as `@seed=1`. A very long name is cut and closed by `~`
        and digits of its sha256.
        """
        seed = "" if self.seed == 0 else f"@seed={self.seed}"
        model = _shortened(_encoded(self.model, "@+,"))
        return model, _spec_name(self.arm), _spec_name(self.quantizer), f"{_spec_name(self.task)}{seed}.json"

    def path(self, root: Path) -> Path:
        """`<root>/<model>/<arm>/<quantizer>/<task>.json`, see `parts`."""
        return root.joinpath(*self.parts())


@lru_cache(4096)
def _canonical(text: str) -> str:
    return "+".join(str(Spec.parse(part)) for part in joined(text))


def _encoded(text: str, safe: str) -> str:
    # quote leaves ~ alone, which closes a shortened name
    encoded = quote(text, safe=safe, errors="surrogatepass").replace("~", "%7E")
    return "%2E" + encoded[1:] if encoded.startswith(".") else encoded


@lru_cache(4096)
def _spec_name(text: str) -> str:
    names: list[str] = []
    for spec in map(Spec.parse, joined(text)):
        settings = (f",{key}={_encoded(written(value), '+')}" for key, value in spec.settings.items())
        names.append(_encoded(spec.name, "") + "".join(settings))
    return _shortened("+".join(names))


def _shortened(name: str) -> str:
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST - 33]}~{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def check_places(cells: Iterable[Cell], root: Path) -> None:
    """Find out before hours of work whether the records of cells can lie where they belong.

    Raises:
        RecordError: something else lies there, or a folder on the way is none or cannot be written.
    """
    for cell in cells:
        path = cell.path(root)
        folder = next(parent for parent in path.parents if os.path.lexists(parent))
        # records in a folder that is a link are read by nobody
        linked = any(parent.is_symlink() for parent in path.parents[: len(cell.parts()) - 1])
        if linked or path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            what = path if path.is_dir() else folder
            raise RecordError(
                f"cannot write {str(path)!r}: {str(what)!r} is in the way, is a link, or may not be written"
            )


def require_device(name: str) -> None:
    """Refuse what is no device here.

    Raises:
        SpecError: it is none of cpu, cuda and cuda:N; torch takes the lower bits of a large N for another device.
    """
    if not _DEVICE.fullmatch(name):
        raise SpecError(f"a device is cpu, cuda or cuda:N; got {name!r}")


def require_seed(seed: int) -> None:
    """Refuse what is no seed.

    Raises:
        SpecError: it is no whole number, negative, or so large that a smaller one would draw the same numbers.
    """
    if type(seed) is not int or not 0 <= seed < SEEDS:
        raise SpecError(f"a seed is a whole number from 0 to 2^32 - 1; got {seed!r}")
