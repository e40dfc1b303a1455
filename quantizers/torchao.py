"""torchao: another library's codes and execution, as its users run it."""

from dataclasses import dataclass

from quant_bench.errors import SpecError
from quant_bench.model import LanguageModel
from quant_bench.quantization.engines import TorchaoScheme, torchao_linears
from quant_bench.quantizer import Calibration, Quantizer


@dataclass(frozen=True)
class Torchao(Quantizer):
    """Products executed by torchao: no integer or simulated twin, and no parity.

    Attributes:
        scheme: `w8a8`: int8 weights per channel, int8 inputs per token; `w8a16`, `w4a16`: weights only.
        group_size: columns a scale at 4 bits; must divide the columns of every product.

    Source: https://github.com/pytorch/ao.
    """

    scheme: TorchaoScheme = "w8a8"
    group_size: int = 32

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise SpecError("group_size must be at least 1")
        if self.group_size != Torchao.group_size and self.scheme != "w4a16":
            raise SpecError(f"group_size={self.group_size} needs scheme=w4a16: {self.scheme} has no groups")

    def quantize(self, model: LanguageModel, calibration: Calibration) -> LanguageModel:
        return torchao_linears(model, self.scheme, self.group_size)
