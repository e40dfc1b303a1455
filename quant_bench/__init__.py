"""quant-bench: does this language model survive W8A8 and W4A4, and why?

The public surface is this list; importing it is cheap, torch comes with the first use:

- `load_model`, `attach`, `quantize`, `evaluate`: one model, one step at a time; `save` writes one, float or quantized.
- `train`: one arm of a matched tier.
- `run`: cells end to end, with records.
- `leaderboard`: the table of a folder of records.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = ["LanguageModel", "attach", "evaluate", "leaderboard", "load_model", "quantize", "run", "save", "train"]

_HOME = {
    "LanguageModel": "quant_bench.model",
    "attach": "quant_bench.models",
    "evaluate": "quant_bench.api",
    "leaderboard": "quant_bench.api",
    "load_model": "quant_bench.models",
    "quantize": "quant_bench.api",
    "run": "quant_bench.api",
    "save": "quant_bench.models",
    "train": "quant_bench.api",
}

if TYPE_CHECKING:
    from quant_bench.api import evaluate, leaderboard, quantize, run, train
    from quant_bench.model import LanguageModel
    from quant_bench.models import attach, load_model, save


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'quant_bench' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
