"""Perplexity of Wiki-40B (English)."""

from dataclasses import dataclass
from typing import ClassVar

from quant_bench.perplexity import TextPerplexity


@dataclass(frozen=True)
class Wiki40b(TextPerplexity):
    """Perplexity of the validation split of Wiki-40B (English).

    Settings are those of `perplexity.TextPerplexity`.

    Source: Guo et al. 2020, https://aclanthology.org/2020.lrec-1.297. The outlier papers use its validation split
    with `p5`.
    """

    text: ClassVar[str] = "wiki40b"
