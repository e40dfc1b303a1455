"""The contract of an arm: an attention mechanism that changes a float model before it is trained or evaluated."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from quant_bench.errors import SpecError
from quant_bench.model import LanguageModel

Heads = Float[Tensor, "batch head query dim"]
Reads = Float[Tensor, "batch kv_head key dim"]


@dataclass(frozen=True)
class Attended:
    """What one attention layer is given: the operands of an arm's reference.

    Attributes:
        query: queries after position encoding.
        key: keys after position encoding; `kv_head` divides `head`.
        value: reads: values as the value projection left them, before any gate.
        hidden: input of the attention layer (what the query projection reads).
        mask: True where a query may attend, broadcastable to (batch, head, query, key).
        scaling: factor on the scores (queries that a model scales itself are given without that).
        length: longest context in tokens of the model's configuration.
        parameters: the attention module's own tensors, by name below it (`attention_core.null.logit`).
    """

    query: Heads
    key: Reads
    value: Reads
    hidden: Float[Tensor, "batch query width"]
    mask: Bool[Tensor, "..."]
    scaling: float
    length: int
    parameters: Mapping[str, Tensor]

    def of_heads(self, reads: Float[Tensor, "batch kv_head *rest"]) -> Float[Tensor, "batch head *rest"]:
        """What belongs to key/value heads, repeated for the query heads that share them."""
        return reads.repeat_interleave(self.query.shape[1] // reads.shape[1], dim=1)

    def parameter(self, name: str) -> Tensor:
        """The one parameter whose dotted name ends in `name`.

        Raises:
            KeyError: there is none, or more than one.
        """
        found = [value for path, value in self.parameters.items() if f".{path}".endswith(f".{name}")]
        if len(found) != 1:
            raise KeyError(f"{len(found)} parameters end in {name!r}; there are {', '.join(self.parameters)}")
        return found[0]


@dataclass(frozen=True)
class Arm(ABC):
    """An attention mechanism. A file in `arms/` holds exactly one frozen dataclass that subclasses this.

    The file name is the name, the class is its CamelCase, the fields are the settings.

    `attach` installs the fast form (see `quant_bench.mechanisms`). The other methods are its plain definition, written
    with T × T matrices for every layer and head at once; they are what tests hold the fast form to. An arm overrides
    only those in which it differs from softmax attention:

        weights = normalize(scores + key_bias)        scores = scaling · query·key
        mixed   = weights @ gated_read                (a row of weights sums to 1 or to less)
        output  = gated_output(mixed)

    The alternative, one `reference` a file, would repeat the softmax in every gate and could not be composed.
    """

    version: ClassVar[int] = 1
    # attached behind the others of a composition, whose parts it looks at
    attached_last: ClassVar[bool] = False

    @abstractmethod
    def attach(self, model: LanguageModel) -> LanguageModel:
        """Give the model this mechanism (in place or not) and return the model to use.

        Raises:
            NotApplicable: the mechanism makes no sense for this model, or beside what is attached already.
        """

    def key_bias(self, a: Attended) -> Float[Tensor, "batch kv_head key"] | None:
        """What is added to the logit of each key; None for nothing."""
        return None

    def normalize(self, a: Attended, scores: Float[Tensor, "batch head query key"]) -> Tensor:
        """Weights from masked scores (-inf where not allowed); same shape; a fully masked row gives zeros."""
        return torch.softmax(scores, -1).nan_to_num(0.0)

    def gated_read(self, a: Attended) -> Reads:
        """What is averaged, and cached, in place of the value."""
        return a.value

    def gated_output(self, a: Attended, mixed: Heads) -> Heads:
        """What goes on to the output projection in place of the average."""
        return mixed

    def weights(self, a: Attended) -> Float[Tensor, "batch head query key"]:
        """How much each query takes from each key."""
        scores = a.query @ a.of_heads(a.key).transpose(-1, -2) * a.scaling
        bias = self.key_bias(a)
        if bias is not None:
            scores = scores + a.of_heads(bias)[:, :, None]
        return self.normalize(a, scores.masked_fill(~a.mask, -torch.inf))

    def reference(self, a: Attended) -> Heads:
        """The whole mechanism: input of the output projection, one row a head."""
        return self.gated_output(a, self.weights(a) @ a.of_heads(self.gated_read(a)))


@dataclass(frozen=True)
class Composed(Arm):
    """Several arms on one model: each adds its own part to the mechanism.

    Attributes:
        parts: at least two arms, no two of which change the same part.
    """

    parts: tuple[Arm, ...]

    def __post_init__(self) -> None:
        # goes up when any part's does
        object.__setattr__(self, "version", sum(arm.version for arm in self.parts))
        for part in ("key_bias", "normalize", "gated_read", "gated_output"):
            users = [type(arm).__name__ for arm in self.parts if getattr(type(arm), part) is not getattr(Arm, part)]
            if len(users) > 1:
                raise SpecError(f"arms {' and '.join(users)} cannot be composed: both define {part}")

    def attach(self, model: LanguageModel) -> LanguageModel:
        for arm in sorted(self.parts, key=lambda arm: arm.attached_last):
            model = arm.attach(model)
        return model

    def key_bias(self, a: Attended) -> Float[Tensor, "batch kv_head key"] | None:
        found = [bias for arm in self.parts if (bias := arm.key_bias(a)) is not None]
        return found[0] if found else None

    def normalize(self, a: Attended, scores: Float[Tensor, "batch head query key"]) -> Tensor:
        owner = next((arm for arm in self.parts if type(arm).normalize is not Arm.normalize), self.parts[0])
        return owner.normalize(a, scores)

    def gated_read(self, a: Attended) -> Reads:
        for arm in self.parts:
            a = replace(a, value=arm.gated_read(a))
        return a.value

    def gated_output(self, a: Attended, mixed: Heads) -> Heads:
        for arm in self.parts:
            mixed = arm.gated_output(a, mixed)
        return mixed
