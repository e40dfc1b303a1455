"""Corpora: what each text and data set consists of, and how its rows are made from the files; knows no torch."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Text:
    """A text as rows.

    Attributes:
        rows: lines, articles or topics, as the data set has them.
        origin: `mirror`, `hub`, or `python 3.x.y`.
        sha256: of the rows joined by two newlines (for WikiText-2 the text of convention P1).
        name: text and split, such as `wikitext2 test`.
    """

    rows: list[str]
    origin: str
    sha256: str
    name: str

    @cached_property
    def joined(self) -> str:
        """The rows joined by two newlines."""
        return "\n\n".join(self.rows)


def make_text(rows: list[str], origin: str, name: str) -> Text:
    """A text with its digest."""
    return Text(rows, origin, hashlib.sha256("\n\n".join(rows).encode()).hexdigest(), name)


def raw_wikitext(rows: list[str]) -> str:
    """The raw WikiText file (convention P3) from the data set's rows: a blank line there is a space and a newline."""
    return "".join(row or " \n" for row in rows)


def lines_of(content: str) -> list[str]:
    """Lines with their newline; `str.splitlines` would also cut at characters that are part of the text."""
    parts = content.split("\n")
    return [f"{line}\n" for line in parts[:-1]] + parts[-1:] * bool(parts[-1])


def wikitext_rows(raw: str) -> list[str]:
    """The hub's rows from a raw WikiText file: the lines with their newline, a blank line as an empty row."""
    return [line if line.strip() else "" for line in lines_of(raw)]


def wikitext_pages(raw: str) -> list[Row]:
    """Documents (convention P4) from a raw WikiText file, each from its title line up to the next.

    A title has one equals sign on either side, a section title two or more; what stands before the first title (a blank
    line) is no document of its own, but a document keeps its blank lines.

    Source: EleutherAI/wikitext_document_level, the data set of lm-eval's task `wikitext`.
    """
    pages: list[list[str]] = [[]]
    for line in raw.split("\n"):
        bare = line.strip()
        title = bare.startswith("= ") and bare.endswith(" =") and not bare.startswith("= =")
        if title and "".join(pages[-1]).strip():
            pages.append([])
        elif title:
            pages[-1] = []
        pages[-1].append(line)
    return [{"page": "\n".join(lines)} for lines in pages]


def json_rows(content: str) -> list[Row]:
    """Rows of a JSON-lines file."""
    return [json.loads(line) for line in content.split("\n") if line]


def text_column(content: str) -> list[str]:
    """Column `text` of a JSON-lines file."""
    return [str(row["text"]) for row in json_rows(content)]


def plain_rows(content: str) -> list[Row]:
    """One row `text` a line."""
    return [{"text": line} for line in content.split("\n") if line]


def hellaswag_rows(content: str) -> list[Row]:
    """Official HellaSwag rows with the hub's columns and types (there the label is text)."""
    columns = ("ind", "activity_label", "ctx_a", "ctx_b", "ctx", "endings", "source_id", "split", "split_type")
    return [{**{name: row[name] for name in columns}, "label": str(row["label"])} for row in json_rows(content)]


def derived_hellaswag_rows(content: str) -> list[Row]:
    """Rows of the derived full set; its position in the file stands in `row`, since the official `ind` is lost."""
    columns = ("row", "activity_label", "ctx_a", "ctx_b", "ctx", "endings", "source")
    return [{**{name: row[name] for name in columns}, "label": str(row["label"])} for row in json_rows(content)]


@dataclass(frozen=True)
class TextSplit:
    """Where one split of a text comes from.

    Attributes:
        file: in a mirror.
        read: rows from the file's content.
        hub: (path, configuration, split) for `datasets`, or None.
        sha256: of the joined rows where it is pinned, whatever the origin.
    """

    file: str
    read: Callable[[str], list[str]]
    hub: tuple[str, str, str] | None = None
    sha256: str | None = None


_WIKITEXT = ("Salesforce/wikitext", "wikitext-2-raw-v1")
_WIKI40B = ("google/wiki40b", "en")

TEXTS: dict[tuple[str, str], TextSplit] = {
    ("wikitext2", "test"): TextSplit(
        "wikitext2/wiki.test.raw",
        wikitext_rows,
        (*_WIKITEXT, "test"),
        "696cca6b65a171b0a358a4be6732cdfdf2dd6164a32e20fd70e3c13fc4dfae83",
    ),
    ("wikitext2", "validation"): TextSplit(
        "wikitext2/wiki.valid.raw",
        wikitext_rows,
        (*_WIKITEXT, "validation"),
        "b44fb967f92b525731216a507d1fbc44b97446b7ef0a2b4d1a893f81f1bbc29e",
    ),
    ("wikitext2", "train"): TextSplit("wikitext2/wiki.train.raw", wikitext_rows, (*_WIKITEXT, "train")),
    # the first megabyte, blank lines dropped: for calibration, no stand-in for the split
    ("wikitext2", "train_part"): TextSplit("wikitext2/wiki.train.first1MB.txt", lines_of),
    ("wiki40b", "validation"): TextSplit("wiki40b/en.validation.jsonl", text_column, (*_WIKI40B, "validation")),
    ("wiki40b", "test"): TextSplit("wiki40b/en.test.jsonl", text_column, (*_WIKI40B, "test")),
    ("wikipedia_en_2018", "test"): TextSplit("train_text/wikipedia_en_2018_heldout.jsonl.xz", text_column),
}


@dataclass(frozen=True)
class DatasetSplits:
    """A data set as lm-eval names it, made from mirror files.

    Attributes:
        splits: split -> (file, reader).
        absent: splits that the task mentions and the mirror has not; they are given without rows, so that drawing
            few-shot examples from them fails instead of taking others.
        note: what a reader of its scores must know, or "".
    """

    splits: dict[str, tuple[str, Callable[[str], list[Row]]]]
    absent: tuple[str, ...] = ()
    note: str = ""


DERIVED_HELLASWAG = "quant-bench/hellaswag_derived"

DATASETS: dict[tuple[str, str | None], DatasetSplits] = {
    ("EleutherAI/lambada_openai", "default"): DatasetSplits({"test": ("lambada/lambada_test.jsonl", json_rows)}),
    ("cimec/lambada", None): DatasetSplits(
        {"test": ("lambada/lambada_test_plain_text.txt", plain_rows)}, absent=("validation",)
    ),
    ("Rowan/hellaswag", None): DatasetSplits(
        {"validation": ("hellaswag/hellaswag_val_1000_official_rows.jsonl.gz", hellaswag_rows)},
        absent=("train",),
        note="1,000 official rows of the 10,042 of HellaSwag validation, not a representative sample (913 ActivityNet)",
    ),
    (DERIVED_HELLASWAG, None): DatasetSplits(
        {"validation": ("hellaswag/hellaswag_val.jsonl.gz", derived_hellaswag_rows)},
        absent=("train",),
        note="all 10,042 items of HellaSwag validation, derived: white space differs from lm-eval's in 46% of rows",
    ),
    ("openai/gsm8k", "main"): DatasetSplits(
        {"train": ("gsm8k/train.jsonl", json_rows), "test": ("gsm8k/test.jsonl", json_rows)}
    ),
    ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1"): DatasetSplits(
        {
            "validation": ("wikitext2/wiki.valid.raw", wikitext_pages),
            "test": ("wikitext2/wiki.test.raw", wikitext_pages),
        },
        absent=("train",),
    ),
}


def python_docs(topics: dict[str, str]) -> dict[str, list[str]]:
    """The language reference that CPython ships (`pydoc_data.topics`), parted for evaluation and calibration.

    Topics quote each other's sections, so a paragraph of more than 80 characters is kept only where it stands first,
    and evaluation comes first: no such paragraph is in both parts, or twice in one.

    Args:
        topics: topic -> text.

    Returns:
        `test` and `calibration`: one row a topic, sorted by topic; about a quarter of the topics is for calibration.
    """
    parts: dict[str, list[str]] = {"test": [], "calibration": []}
    chosen = {name: hashlib.sha256(name.encode()).digest()[0] < 64 for name in topics}
    seen: set[str] = set()
    for name in sorted(topics, key=lambda name: (chosen[name], name)):
        kept: list[str] = []
        for paragraph in re.split(r"\n{2,}", topics[name].strip()):
            known = paragraph.strip() in seen
            if len(paragraph.strip()) > 80:
                seen.add(paragraph.strip())
            if not known:
                kept.append(paragraph)
        if kept:
            parts["calibration" if chosen[name] else "test"].append("\n\n".join(kept) + "\n")
    return parts
