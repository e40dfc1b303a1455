"""Quantizing a model so that it knows what was done to it."""

from quant_bench import registry
from quant_bench.errors import ModelError
from quant_bench.model import LanguageModel, Recipe
from quant_bench.quantizer import Calibration, Quantizer


def quantize_with(quantizer: Quantizer, model: LanguageModel, calibration: Calibration, seed: int = 0) -> LanguageModel:
    """Quantize, and note the recipe in the model. Errors as for `Quantizer.quantize`.

    Args:
        quantizer: what to do; `none` leaves the model a float one without a recipe.
        model: given away.
        calibration: token batches, where the quantizer wants some.
        seed: that chose them.

    Raises:
        ModelError: the model has a recipe already; two would stand under the name of the second.
    """
    if model.recipe is not None:
        raise ModelError(f"{model.identity.name!r} is quantized already ({model.recipe.quantizer}): load it anew")
    model = quantizer.quantize(model, calibration)
    text = registry.canonical("quantizers", quantizer)
    if text != "none":
        model.recipe = Recipe(
            quantizer=text,
            settings=registry.settings(quantizer),
            version=quantizer.version,
            seed=seed,
            calibration_sha256=calibration.sha256,
            calibration=calibration.description,
            usable=calibration.usable,
            wanted=calibration.wanted,
        )
    return model


def calibration_of(recipe: Recipe) -> Calibration:
    """The account of a recipe's calibration; its batches are not kept."""
    return Calibration((), recipe.calibration_sha256, recipe.calibration, recipe.usable, recipe.wanted)
