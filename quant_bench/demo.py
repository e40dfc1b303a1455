"""The demo: the main job on a real model, small enough for two cores and a coffee."""

from pathlib import Path

from quant_bench.data import DataSource
from quant_bench.errors import Blocked
from quant_bench.plan import RunOptions

MODEL = "smollm2-135m-instruct"
SCHEMES = ("w8a8", "w8a8-static", "w4a4", "w4a4g128")
WINDOWS = 8
SEQ_LENGTH = 512


def demo_options(data: Path | None, results: Path) -> tuple[RunOptions, str]:
    """What the demo runs, and a sentence on the text it reads.

    WikiText-2 when a mirror or the hub has it; otherwise the documentation text that every CPython ships, named as
    what it is: the numbers of the two are never comparable.
    """
    try:
        text = DataSource(data).text("wikitext2", "test")
        name, sentence = "wikitext2", f"WikiText-2 test split, from the {text.origin}"
    except Blocked as error:
        name, sentence = "python_docs", f"Python's own documentation (pydoc_data.topics), because {error}"
    quantizers = [spec for scheme in SCHEMES for spec in (scheme, f"{scheme}-integer")]
    options = RunOptions(
        model=MODEL,
        quantizers=("none", *quantizers),
        tasks=(name, f"outliers(text={name})", f"parity(text={name},limit=1)"),
        limit=WINDOWS,
        seq_length=SEQ_LENGTH,
        data=data,
        results=results,
    )
    return options, sentence
