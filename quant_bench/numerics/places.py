"""Places: which positions and which tokens of the vocabulary carry the largest entries, over a stream of sequences."""

from typing import NamedTuple

import numpy as np

KEPT = 3


class Tokens(NamedTuple):
    """The token ids of a sequence, prepared once for all of its tensors.

    Attributes:
        ids: the different ids.
        which: for each position, which of them stands there.
    """

    ids: np.ndarray
    which: np.ndarray

    @classmethod
    def of(cls, ids: np.ndarray) -> "Tokens":
        """From the ids of a sequence, one a position."""
        return cls(*np.unique(ids, return_inverse=True))


class Places:
    """Running maxima of one tensor by position and by token; the size depends on the longest sequence alone."""

    def __init__(self) -> None:
        self._sums = np.zeros(0)
        self._counts = np.zeros(0, np.int64)
        self._tokens: dict[int, float] = {}

    def add(self, absmax: np.ndarray, tokens: Tokens | None) -> None:
        """Take in one sequence.

        Args:
            absmax: largest absolute entry of each position.
            tokens: what stands there, or None where that is not known (embeddings without ids).
        """
        longer = len(absmax) - len(self._sums)
        if longer > 0:
            self._sums = np.pad(self._sums, (0, longer))
            self._counts = np.pad(self._counts, (0, longer))
        self._sums[: len(absmax)] += absmax
        self._counts[: len(absmax)] += 1
        if tokens is None or len(tokens.which) != len(absmax):
            return
        largest = np.zeros(len(tokens.ids), absmax.dtype)
        np.maximum.at(largest, tokens.which, absmax)
        for token, value in _first(tokens.ids, largest).items():
            self._tokens[token] = max(value, self._tokens.get(token, 0.0))
        # who falls behind comes back with a larger value or not at all, so the first ones stay exact
        self._tokens = _first(np.array(list(self._tokens)), np.array(list(self._tokens.values())))

    @property
    def positions(self) -> dict[int, float]:
        """The `KEPT` positions whose largest absolute entry, averaged over sequences, is largest."""
        return _first(np.arange(len(self._sums)), self._sums / np.maximum(self._counts, 1))

    @property
    def tokens(self) -> dict[int, float]:
        """The `KEPT` token ids with the largest absolute entry at any of their positions."""
        return dict(self._tokens)


def largest_channels(absmax: np.ndarray) -> dict[int, float]:
    """The `KEPT` channels with the largest absolute entry, from that of each channel."""
    return _first(np.arange(len(absmax)), absmax)


def _first(names: np.ndarray, values: np.ndarray) -> dict[int, float]:
    """The largest values by their names, largest first; of equal ones the lower name."""
    order = np.lexsort((names, -values))[:KEPT] if len(names) <= 64 else _few(names, values)
    return {int(names[index]): float(values[index]) for index in order}


def _few(names: np.ndarray, values: np.ndarray) -> np.ndarray:
    """As a full sort would order them, but only those that reach the last kept value are sorted."""
    reach = np.flatnonzero(values >= np.partition(values, -KEPT)[-KEPT])
    return reach[np.lexsort((names[reach], -values[reach]))[:KEPT]]
