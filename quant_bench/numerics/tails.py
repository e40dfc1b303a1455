"""Percentiles of a batch of values, fed in pieces and exact, from its two tails alone."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

# a tail is looked for among the rows with the largest maxima; rows this long make the first scan a vector operation
_ROW = 64


class Range(NamedTuple):
    """Ends of a range of values."""

    low: float
    high: float


def largest(values: Float[Tensor, "..."], count: int) -> Float[Tensor, " value"]:
    """The `count` largest values, in descending order, at the cost of one scan.

    The rows with the `count` largest maxima hold them all: any other row's values are no larger than those maxima.
    """
    flat = values.reshape(-1)
    whole = flat.numel() // _ROW * _ROW
    if whole // _ROW <= 2 * count:
        return flat.topk(min(count, flat.numel())).values
    rows = flat[:whole].view(-1, _ROW)
    likely = rows.amax(1).topk(count).indices
    return torch.cat([rows[likely].reshape(-1), flat[whole:]]).topk(count).values


def smallest(values: Float[Tensor, "..."], count: int) -> Float[Tensor, " value"]:
    """The `count` smallest values, in ascending order; see `largest`."""
    flat = values.reshape(-1)
    whole = flat.numel() // _ROW * _ROW
    if whole // _ROW <= 2 * count:
        return flat.topk(min(count, flat.numel()), largest=False).values
    rows = flat[:whole].view(-1, _ROW)
    likely = rows.amin(1).topk(count, largest=False).indices
    return torch.cat([rows[likely].reshape(-1), flat[whole:]]).topk(count, largest=False).values


class Tails:
    """Both ends of a batch's values, fed in pieces: enough for its percentiles, and no more memory than that."""

    def __init__(self, percentile: float, total: int) -> None:
        # position of the lower percentile among the sorted values; the upper one mirrors it
        self.position = (total - 1) * (1.0 - percentile / 100.0)
        self.count = min(math.floor(self.position) + 2, total)
        self.high: Tensor | None = None
        self.minus_low: Tensor | None = None

    def add(self, values: Float[Tensor, "..."]) -> None:
        """Take in more values of the batch."""
        values = values.detach().float()
        if self.position == 0.0:
            low, high = values.aminmax()
            pair = (-low.reshape(1), high.reshape(1))
        else:
            pair = (-smallest(values, self.count), largest(values, self.count))
        self.minus_low = self._keep(self.minus_low, pair[0])
        self.high = self._keep(self.high, pair[1])

    def _keep(self, old: Tensor | None, new: Tensor) -> Tensor:
        both = new if old is None else torch.cat([old, new])
        return both.topk(min(self.count, both.numel())).values

    def range(self) -> Range:
        """Lower and upper percentile, linear between neighbours."""
        assert self.high is not None
        assert self.minus_low is not None
        return Range(-self._at(self.minus_low), self._at(self.high))

    def _at(self, descending: Tensor) -> float:
        index = math.floor(self.position)
        first = float(descending[index])
        second = float(descending[min(index + 1, descending.numel() - 1)])
        return first + (self.position - index) * (second - first)
