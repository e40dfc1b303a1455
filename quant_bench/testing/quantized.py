"""A quantizer on the tiny model of one layout: what the contract of quantizers looks at."""

import dataclasses
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from quant_bench import models, registry
from quant_bench.model import LanguageModel
from quant_bench.quantizer import Quantizer, SchemeQuantizer
from quant_bench.testing.promises import Moot
from quant_bench.testing.tokens import tiny_calibration, tiny_ids
from quant_bench.tiny import tiny_model


class Case:
    """A quantizer on the tiny model of one layout."""

    def __init__(self, quantizer: Quantizer, family: str) -> None:
        self.quantizer, self.family = quantizer, family

    def __str__(self) -> str:
        return self.family

    def build(self, seed: int = 0) -> LanguageModel:
        """The float model."""
        return tiny_model(self.family, seed=seed)

    def quantize(self, model: LanguageModel, **changes: Any) -> LanguageModel:
        """A model quantized, with some settings changed."""
        quantizer = dataclasses.replace(self.scheme, **changes) if changes else self.quantizer
        return quantizer.quantize(model, tiny_calibration(quantizer))

    @cached_property
    def quantized(self) -> LanguageModel:
        """The quantized model."""
        return self.quantize(self.build())

    def reloaded(self) -> LanguageModel:
        """The quantized model, saved to a folder and loaded from it."""
        model = models.quantize_with(self.quantizer, self.build(), tiny_calibration(self.quantizer))
        with tempfile.TemporaryDirectory() as place:
            models.save(model, Path(place) / "model")
            return models.load_model(str(Path(place) / "model"))

    @cached_property
    def logits(self) -> Float[Tensor, "batch seq vocab"]:
        """Its logits."""
        return logits_of(self.quantized)

    @cached_property
    def reference(self) -> Float[Tensor, "batch seq vocab"]:
        """Logits of the float model."""
        return logits_of(self.build())

    @property
    def is_none(self) -> bool:
        """Whether the quantizer is the float model."""
        return registry.canonical("quantizers", self.quantizer) == "none"

    @property
    def scheme(self) -> SchemeQuantizer:
        """The quantizer, if it has bits and executions.

        Raises:
            Moot: it has none.
        """
        if isinstance(self.quantizer, SchemeQuantizer):
            return self.quantizer
        raise Moot("the recipe is no SchemeQuantizer: it has no bits and executions to compare")


def logits_of(model: LanguageModel) -> Float[Tensor, "batch seq vocab"]:
    """Logits of the tiny token ids."""
    with torch.no_grad():
        logits: Tensor = model.module(input_ids=tiny_ids(), use_cache=False).logits
    return logits
