"""The contract of a quantizer, and the settings that every recipe of ours shares."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Int, Int64
from torch import Tensor

from quant_bench.errors import SpecError
from quant_bench.model import LanguageModel

Execution = Literal["simulated", "integer", "classic"]
# of calibration, in the outlier papers' protocol
SEQUENCES_A_BATCH = 8


@dataclass(frozen=True)
class Calibration:
    """Token batches for ranges and second moments.

    Attributes:
        batches: token ids, shape (sequence, token) each; empty when a recipe needs none.
        sha256: digest of the ids, in order.
        description: text, split, sequence length and seed, for the record.
        usable: how many sequences were found long enough.
        wanted: how many were asked for.
    """

    batches: Sequence[Int[Tensor, "_batch _seq"]] = field(default_factory=tuple)
    sha256: str | None = None
    description: str = "none"
    usable: int = 0
    wanted: int = 0

    @classmethod
    def of(cls, rows: Int64[Tensor, "seq token"], description: str, wanted: int) -> "Calibration":
        """Batches of 8 of these sequences, the last of which may be smaller.

        Args:
            rows: token ids.
            description: where they come from.
            wanted: how many sequences were asked for.
        """
        sha256 = hashlib.sha256(rows.numpy().astype("<i8").tobytes()).hexdigest()
        return cls(torch.split(rows, SEQUENCES_A_BATCH), sha256, description, len(rows), wanted)


@dataclass(frozen=True)
class Quantizer(ABC):
    """A map from a model to a model. A file in `quantizers/` holds exactly one frozen dataclass that subclasses this.

    The file name is the name (`rtn`), the class is its CamelCase (`Rtn`), the fields are the settings with defaults,
    the docstring has a `Source:`. `version` goes up when results change. `keeps_embeddings` is False for a recipe that
    first rewrites the float model as an equal one (a rotation): embeddings and head then hold other values, and a tied
    head may be untied, which coverage must say.
    """

    version: ClassVar[int] = 1
    keeps_embeddings: ClassVar[bool] = True

    @property
    def calibration_sequences(self) -> int:
        """Number of calibration sequences that the recipe wants; 0 for none."""
        return 0

    @abstractmethod
    def quantize(self, model: LanguageModel, calibration: Calibration) -> LanguageModel:
        """Quantize; the model is given away and the one returned is used.

        Raises:
            QuantizationError: coverage, shapes or values do not allow it.
            NotApplicable: the settings make no sense together (integer execution of foreign formats, say).
        """


@dataclass(frozen=True)
class SchemeQuantizer(Quantizer):
    """A recipe over integer codes: what is rounded, how finely, over which range, and how it is executed.

    Attributes:
        weight_bits: 2 to 8; 16 leaves weights in float.
        weight_granularity: one scale for the tensor, each output channel, or each `group_size` inputs of a channel.
        weight_symmetric: codes around 0 on the restricted grid [-(2^(b-1)-1), 2^(b-1)-1]; else with a zero point.
        weight_range: `minmax`, or `mse`: the clip that minimizes the squared rounding error (100 candidates).
        activation_bits: 2 to 8; 16 leaves activations in float.
        activation_granularity: one scale for the tensor, each token, or each `group_size` features of a token.
        activation_symmetric: as for weights.
        activation_static: ranges from calibration (per tensor only) instead of from the tensor at hand.
        activation_range: `minmax`; static only: `running_minmax` (with momentum) of the `percentile` tails.
        percentile: upper tail in percent; the lower is 100 minus it. 100 means the extremes.
        momentum: weight of the old range in the running one.
        calibration_batches: batches for static ranges.
        group_size: of granularity `group`, in features.
        scope: `linear`: inputs and weights of the layers' matrix products. `full`: every activation tensor.
        kv_bits: of the key/value cache per token and head; 16 leaves it in float.
        execution: `simulated` (integers held in float32), `integer`, or `classic` (fake quantization).
    """

    weight_bits: int = 8
    weight_granularity: Literal["tensor", "channel", "group"] = "channel"
    weight_symmetric: bool = True
    weight_range: Literal["minmax", "mse"] = "minmax"
    activation_bits: int = 8
    activation_granularity: Literal["tensor", "token", "group"] = "token"
    activation_symmetric: bool = True
    activation_static: bool = False
    activation_range: Literal["minmax", "running_minmax"] = "minmax"
    percentile: float = 100.0
    momentum: float = 0.9
    calibration_batches: int = 4
    group_size: int = 128
    scope: Literal["linear", "full"] = "linear"
    kv_bits: int = 16
    execution: Execution = "simulated"

    def __post_init__(self) -> None:
        for name in ("weight_bits", "activation_bits", "kv_bits"):
            bits = getattr(self, name)
            if bits != 16 and not 2 <= bits <= 8:
                raise SpecError(f"{name} must be 2 to 8, or 16 for float; got {bits!r}")
        if self.activation_static and self.activation_granularity != "tensor":
            raise SpecError("activation_static needs activation_granularity=tensor: a static range belongs to a tensor")
        if self.activation_range != "minmax" and not self.activation_static:
            raise SpecError(f"activation_range={self.activation_range} needs activation_static=True")
        if not 50.0 < self.percentile <= 100.0:
            raise SpecError(f"percentile must be above 50 and at most 100; got {self.percentile!r}")
        if self.percentile != 100.0 and not self.activation_static:
            raise SpecError("percentile needs activation_static=True: a dynamic range is the tensor's own extremes")
        if not 0.0 <= self.momentum < 1.0:
            raise SpecError(f"momentum must lie in [0, 1); got {self.momentum!r}")
        if self.group_size < 1 or self.calibration_batches < 1:
            raise SpecError("group_size and calibration_batches must be at least 1")
        grouped = "group" in (self.weight_granularity, self.activation_granularity)
        if self.group_size != SchemeQuantizer.group_size and not grouped:
            raise SpecError(f"group_size={self.group_size} needs a granularity of group: w4a16g{self.group_size}, say")
        if self.scope == "full" and not self.activation_static:
            raise SpecError("scope=full needs activation_static=True: its protocol has static ranges only")
        if self.scope == "full" and self.activation_bits == 16:
            raise SpecError("scope=full quantizes activations: activation_bits must be 2 to 8")

    @property
    def calibration_sequences(self) -> int:
        """Batches times the protocol's 8 sequences a batch where ranges are static, else none."""
        return SEQUENCES_A_BATCH * self.calibration_batches if self.activation_static else 0
