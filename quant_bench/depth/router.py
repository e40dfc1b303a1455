"""Router: what stands behind every sublayer in place of the residual sum, and the state of one forward pass."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from quant_bench.depth.weigher import DepthRule, Weigher

State = Float[Tensor, "batch seq width"]
Psi = Float[Tensor, "batch seq"]


@dataclass(frozen=True)
class Read:
    """One read of a router.

    Attributes:
        weights: of each source; they may sum to less than 1.
        psi: null mass of each source's attention, mean over heads; None where attention has no null.
        names: of the sources, in order: `embedding`, `0.attention`, `0.mlp`, `0.layer`, `block 1`, …
        state: what the next sublayer reads.
    """

    weights: Float[Tensor, "batch seq source"]
    psi: Float[Tensor, "batch seq source"] | None
    names: tuple[str, ...]
    state: State


class Router(nn.Module, ABC):
    """Reads earlier states behind one sublayer; the next sublayer sees what it returns.

    Attributes:
        place: which sublayer it stands behind, from 0: attention of layer l is 2l, its MLP 2l + 1.
        weigher: scores to weights.
        observer: sees every read; None costs nothing.
    """

    def __init__(self, place: int, rule: DepthRule, like: Tensor) -> None:
        super().__init__()
        self.place = place
        self.weigher = Weigher(rule, like)
        self.observer: Callable[[Read], None] | None = None

    @property
    def wants_psi(self) -> bool:
        """Whether the null mass of attention is needed."""
        return self.weigher.rule.coupled or self.observer is not None

    @abstractmethod
    def begin(self, routers: "Sequence[Router]", embedding: State) -> "Pass":
        """State of a forward pass through these routers (all of one kind, in order) that starts from an embedding."""

    def combine(
        self,
        scores: Float[Tensor, "batch seq source"],
        sources: Sequence[State],
        psi: Sequence[Psi] | None,
        names: Sequence[str],
    ) -> State:
        """Weigh the sources and add them up."""
        nulls = None if psi is None else torch.stack(list(psi), -1)
        weights = self.weigher(scores, nulls)
        state = mix(weights, sources)
        if self.observer is not None:
            self.observer(Read(weights, nulls, tuple(names), state))
        return state


class Pass(ABC):
    """What one forward pass remembers from sublayer to sublayer."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pass":
        """A pass that goes on by itself; states are shared, since nothing changes them."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list):
                setattr(other, name, [*value])
            elif isinstance(value, Pass):
                setattr(other, name, copy.deepcopy(value, memo))
        return other

    @abstractmethod
    def read(self, router: Router, state: State, output: State, psi: Psi | None) -> State:
        """The state after a sublayer.

        Args:
            router: the one behind the sublayer.
            state: what the sublayer was given.
            output: what it made of it.
            psi: null mass of its attention (an MLP has that of the attention before it), or None.
        """


def mix(weights: Float[Tensor, "batch seq source"], sources: Sequence[State]) -> State:
    """Weighted sum of sources, which are read where they lie.

    Stacking them first costs six times as much. In place is safe for gradients: addcmul keeps its factors, never the
    sum.
    """
    parts = weights.to(sources[-1].dtype)[..., None].unbind(-2)
    total = parts[0] * sources[0]
    for part, source in zip(parts[1:], sources[1:], strict=True):
        total.addcmul_(part, source)
    return total


def wide(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """In float32, or as it is where it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
