"""The contract of an arm: an attention mechanism that changes a float model before it is trained or evaluated."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from quant_bench.model import LanguageModel


@dataclass(frozen=True)
class Arm(ABC):
    """An attention mechanism. A file in `arms/` holds exactly one frozen dataclass that subclasses this.

    The file name is the name, the class is its CamelCase, the fields are the settings.
    """

    version: ClassVar[int] = 1

    @abstractmethod
    def attach(self, model: LanguageModel) -> LanguageModel:
        """Give the model this mechanism (in place or not) and return the model to use."""
