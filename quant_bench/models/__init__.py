"""Models: from a name to a `LanguageModel`; looking one up needs no torch, so the parts that do are imported late."""

from typing import TYPE_CHECKING, Any

from quant_bench.cache import cache_folder as cache_folder
from quant_bench.models.sources import ALIASES as ALIASES
from quant_bench.models.sources import LoadOptions as LoadOptions
from quant_bench.models.sources import find as find
from quant_bench.models.sources import identify as identify

if TYPE_CHECKING:
    from quant_bench.models.arms import arm_of as arm_of
    from quant_bench.models.arms import attach as attach
    from quant_bench.models.arms import attach_to_trained as attach_to_trained
    from quant_bench.models.layouts import layout_of as layout_of
    from quant_bench.models.loading import from_module as from_module
    from quant_bench.models.loading import load_model as load_model
    from quant_bench.models.recipe import quantize_with as quantize_with
    from quant_bench.models.saving import save as save

__all__ = [
    *(
        "ALIASES",
        "LoadOptions",
        "arm_of",
        "attach",
        "attach_to_trained",
        "cache_folder",
        "find",
        "from_module",
        "identify",
        "layout_of",
    ),
    *("load_model", "quantize_with", "save"),
]


def __getattr__(name: str) -> Any:
    """Import what needs torch on first use."""
    if name == "layout_of":
        from quant_bench.models.layouts import layout_of

        return layout_of
    if name in ("attach", "attach_to_trained", "arm_of"):
        from quant_bench.models import arms

        return getattr(arms, name)
    if name in ("load_model", "from_module"):
        from quant_bench.models import loading

        return getattr(loading, name)
    if name == "save":
        from quant_bench.models.saving import save

        return save
    if name == "quantize_with":
        from quant_bench.models.recipe import quantize_with

        return quantize_with
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
