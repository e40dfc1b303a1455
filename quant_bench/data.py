"""DataSource: texts and data sets from an offline mirror, the hub, or the Python installation; knows no torch."""

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quant_bench.corpora import DATASETS, TEXTS, DatasetSplits, Row, make_text, python_docs
from quant_bench.corpora import DERIVED_HELLASWAG as DERIVED_HELLASWAG
from quant_bench.corpora import Text as Text
from quant_bench.corpora import raw_wikitext as raw_wikitext
from quant_bench.errors import Blocked, DataError
from quant_bench.hub_access import hub_access as hub_access
from quant_bench.hub_access import hub_rows
from quant_bench.mirror import Mirror, packaged_digests

if TYPE_CHECKING:
    from datasets import DatasetDict

DATA_VARIABLE = "QUANT_BENCH_DATA"


class DataSource:
    """Where texts and data sets come from: the mirror folder first, then the hub.

    Args:
        root: mirror folder; None for the one that `QUANT_BENCH_DATA` names, if any.
        allow_hub: whether the hub may be asked.

    Raises:
        DataError: the folder does not exist or its manifest cannot be read.
    """

    def __init__(self, root: Path | None = None, *, allow_hub: bool = True) -> None:
        named = os.environ.get(DATA_VARIABLE)
        if root is None and named:
            root = Path(named)
        self.mirror = None if root is None else Mirror(root)
        self.allow_hub = allow_hub
        self._texts: dict[tuple[str, str], Text] = {}
        self._datasets: dict[tuple[str, str | None], Any] = {}

    @property
    def root(self) -> Path | None:
        """The mirror folder."""
        return None if self.mirror is None else self.mirror.root

    def text(self, name: str, split: str = "test") -> Text:
        """A text.

        Args:
            name: `wikitext2`, `wiki40b`, `wikipedia_en_2018` or `python_docs`.
            split: `test`, `validation`, `train`, `calibration`, as the text has them.

        Raises:
            Blocked: it is neither in the mirror nor can the hub be asked; the message says how to supply it.
            DataError: there is no such text, or what was found is not it.
        """
        key = (name, split)
        if key not in self._texts:
            self._texts[key] = _python_text(split) if name == "python_docs" else self._corpus(name, split)
        return self._texts[key]

    def calibration_text(self) -> Text:
        """Text for ranges, disjoint from every text that a task evaluates.

        The part of WikiText-2's train split in the mirror, else the train split from the hub, else the part of the
        Python documentation that is set apart.
        """
        for name, split in (("wikitext2", "train_part"), ("wikitext2", "train")):
            try:
                return self.text(name, split)
            except Blocked:
                # the next one; the record states which text it was
                continue
        return self.text("python_docs", "calibration")

    def dataset(self, path: str, name: str | None) -> "DatasetDict | None":
        """A data set under lm-eval's names, from the mirror.

        Args:
            path: lm-eval's `dataset_path`, or `DERIVED_HELLASWAG`.
            name: lm-eval's `dataset_name`.

        Returns:
            Splits with the columns that lm-eval's task expects; None when the mirror has not all of its files (then
            lm-eval may ask the hub, inside `hub_access()`).

        Raises:
            DataError: a file is not what its name says.
        """
        key = (path, name)
        if key not in self._datasets:
            known = DATASETS.get(key)
            self._datasets[key] = None if known is None or self.mirror is None else _from_mirror(self.mirror, known)
        return self._datasets[key]

    def note(self, path: str, name: str | None) -> str:
        """What a reader of scores on a mirrored data set must know (a sample, derived rows), or ""."""
        return DATASETS[path, name].note if self.dataset(path, name) is not None else ""

    def wanted(self, path: str, name: str | None) -> str:
        """How to supply a data set that is missing, for a `blocked` record."""
        known = DATASETS.get((path, name))
        config = f" ({name})" if name else ""
        if known is None:
            return f"the hub's {path}{config} is wanted, and no mirror layout is known for it: go online once"
        return _wanted([file for file, _ in known.splits.values()], f"the hub's {path}{config}")

    def verify(self) -> list[tuple[str, str]]:
        """(file, state) of every known file; see `Mirror.verify`. Without a mirror every file is missing."""
        if self.mirror is None:
            return [(name, "missing") for name in sorted(packaged_digests())]
        return self.mirror.verify()

    def _corpus(self, name: str, split: str) -> Text:
        known = TEXTS.get((name, split))
        if known is None:
            names = ", ".join(sorted({f"{text} {part}" for text, part in TEXTS}))
            raise DataError(f"no text {name!r} with split {split!r}; there are {names}, python_docs test, calibration")
        content = None if self.mirror is None else self.mirror.read(known.file)
        if content is not None:
            text = make_text(known.read(content), "mirror", f"{name} {split}")
        elif known.hub is not None and self.allow_hub:
            try:
                text = make_text(hub_rows(*known.hub, column="text"), "hub", f"{name} {split}")
            except Blocked as error:
                raise Blocked(f"{error}; {_wanted([known.file], 'that data set')}") from error
        else:
            raise Blocked(_wanted([known.file], f"the hub's {known.hub[0]}" if known.hub else ""))
        if known.sha256 not in (None, text.sha256):
            raise DataError(f"{text.name} from {text.origin} has digest {text.sha256}, but {known.sha256} is pinned")
        return text


def _wanted(files: list[str], hub: str) -> str:
    """How to supply files."""
    digests = packaged_digests()
    parts = [
        f"{file} (sha256 {digests[file]})" if file in digests else f"{file} (with its sha256 in DIR/manifest.json)"
        for file in files
    ]
    online = f", or go online once for {hub}" if hub else ""
    return f"wanted: {' and '.join(parts)} in a folder named by --data DIR or {DATA_VARIABLE}{online}"


def _python_text(split: str) -> Text:
    from pydoc_data.topics import topics

    parts = python_docs(topics)
    if split not in parts:
        raise DataError(f"python_docs has the splits {', '.join(parts)}; got {split!r}")
    return make_text(parts[split], f"python {platform.python_version()}", f"python_docs {split}")


def _from_mirror(mirror: Mirror, known: DatasetSplits) -> "DatasetDict | None":
    import datasets

    rows: dict[str, list[Row]] = {}
    for split, (file, read) in known.splits.items():
        content = mirror.read(file)
        if content is None:
            return None
        rows[split] = read(content)
    splits = {split: datasets.Dataset.from_list(content) for split, content in rows.items()}
    features = next(iter(splits.values())).features
    for split in known.absent:
        splits[split] = datasets.Dataset.from_dict({column: [] for column in features}, features=features)
    return datasets.DatasetDict(splits)
