"""Documents: where the text of a training comes from, one string a document; knows no torch."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from quant_bench.corpora import text_column
from quant_bench.data import DataSource
from quant_bench.errors import Blocked, DataError, SpecError
from quant_bench.hub_access import hub_stream
from quant_bench.mirror import packaged_digests

_SUFFIXES = (".txt", ".md", ".jsonl")


def _mirrored(prefix: str) -> Callable[[DataSource], Iterator[str]]:
    """Documents of the mirror's files whose names start so, in order of their names."""

    def documents(data: DataSource) -> Iterator[str]:
        for file in sorted(name for name in packaged_digests() if name.startswith(prefix)):
            content = None if data.mirror is None else data.mirror.read(file)
            if content is None:
                raise Blocked(
                    f"wanted: {file} (sha256 {packaged_digests()[file]}) in a folder named by --data DIR or "
                    "QUANT_BENCH_DATA; or train on another text: --text fineweb_edu (the hub's), --text FILE"
                )
            yield from text_column(content)

    return documents


def _hub(path: str, configuration: str | None) -> Callable[[DataSource], Iterator[str]]:
    """Documents of a data set of the hub, streamed."""

    def documents(data: DataSource) -> Iterator[str]:
        if not data.allow_hub:
            raise Blocked(f"the hub's {path} is wanted, and the hub may not be asked")
        return hub_stream(path, configuration, "train", "text")

    return documents


def _wikitext(data: DataSource) -> Iterator[str]:
    return iter(data.text("wikitext2", "validation").rows)


def _python_docs(data: DataSource) -> Iterator[str]:
    for split in ("test", "calibration"):
        yield from data.text("python_docs", split).rows


SOURCES: dict[str, Callable[[DataSource], Iterator[str]]] = {
    "fineweb_edu": _hub("HuggingFaceFW/fineweb-edu", "sample-10BT"),
    "wiki40b": _hub("google/wiki40b", "en"),
    "bookcorpus": _hub("rojagtap/bookcorpus", None),
    "wikipedia_en_2014": _mirrored("train_text/wikipedia_en_2014-"),
    "books_en_1885_1928": _mirrored("train_text/books_en_1885_1928-"),
    "wikitext2_validation": _wikitext,
    "python_docs": _python_docs,
}
"""Name -> documents; a file or folder is named by its path."""


def documents(text: str, data: DataSource) -> Iterator[str]:
    """The documents of a text, in their order, without empty ones; may be asked for again.

    Args:
        text: a key of `SOURCES`, or the path of a file or folder: a `.txt` or `.md` file is one document, a `.jsonl`
            file has one a line in its field `text`, a folder is read recursively in order of names.
        data: where data sets come from.

    Raises:
        Blocked: the text must be fetched and cannot be.
        SpecError: there is no such text.
        DataError: a file is not what its name says.
    """
    found = SOURCES[text](data) if text in SOURCES else _files(text)
    return (document for document in found if document.strip())


def origin(text: str, data: DataSource) -> str:
    """What tells a text from others of the same name before it is read: pinned digests, sizes and times of files."""
    if text in SOURCES:
        return data.text("python_docs", "test").origin if text == "python_docs" else "pinned or hub"
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in _paths(text)]
    return json.dumps(states)


def _paths(text: str) -> list[Path]:
    path = Path(text).expanduser()
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    files = [file for file in files if file.suffix in _SUFFIXES and file.is_file()]
    if not files:
        raise SpecError(
            f"no text {text!r}: it is none of {', '.join(SOURCES)}, and no file or folder with {', '.join(_SUFFIXES)}"
        )
    return files


def _files(text: str) -> Iterator[str]:
    for path in _paths(text):
        try:
            content = path.read_text(encoding="utf8")
            yield from text_column(content) if path.suffix == ".jsonl" else [content]
        except (ValueError, KeyError) as error:
            raise DataError(f"{path} is no {path.suffix} file with text in UTF-8: {error!r}") from error
