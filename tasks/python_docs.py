"""Perplexity of the documentation that every CPython ships."""

from dataclasses import dataclass
from typing import ClassVar

from quant_bench.perplexity import TextPerplexity


@dataclass(frozen=True)
class PythonDocs(TextPerplexity):
    """Perplexity of the documentation that every CPython ships: English text that needs no download.

    The text belongs to a Python version, so numbers of two versions are not comparable (their data digests differ).
    Settings are those of `perplexity.TextPerplexity`.

    Source: https://docs.python.org/3/library/pydoc.html (`pydoc_data.topics` of the Python that runs the benchmark).
    """

    text: ClassVar[str] = "python_docs"
