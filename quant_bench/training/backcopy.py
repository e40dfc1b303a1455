"""Bigram-Backcopy: sequences in which most tokens need the last one only and a few need the one before; no torch."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from quant_bench.errors import DataError

BOS, UNKNOWN = 0, 1
_SPECIAL = 2
TRIGGERS = 3
# sequences drawn at once; part of what a seed means
BLOCK = 4096


@dataclass(frozen=True, eq=False)
class Backcopy:
    """The source of the sequences.

    A sequence starts with BOS and a character that is no trigger. After a trigger comes a copy of the character before
    it, after any other character one drawn from the text's bigrams. So no trigger ever follows a trigger.

    Source: Guo et al. 2024, section 2, https://arxiv.org/abs/2410.13835.

    Attributes:
        characters: tokens from 2 on, the most frequent first; the first three are the triggers.
        counts: how often the text has one character (row) before another (column).
        context: tokens a sequence, BOS counted.
    """

    characters: tuple[str, ...]
    counts: np.ndarray
    context: int

    @classmethod
    def of_text(cls, documents: Iterable[str], vocabulary: int, context: int) -> "Backcopy":
        """The source over a text's most frequent characters.

        Args:
            documents: of the text; line breaks are no characters here.
            vocabulary: tokens, BOS and the one for unknown characters counted.
            context: tokens a sequence.

        Raises:
            DataError: the text has too few different characters.
        """
        text = np.concatenate([_codes(" ".join(document.split())) for document in documents] or [_codes("")])
        kinds, places, totals = np.unique(text, return_inverse=True, return_counts=True)
        wanted = vocabulary - _SPECIAL
        if len(kinds) <= TRIGGERS:
            raise DataError(f"Bigram-Backcopy needs a text of more than {TRIGGERS} different characters")
        # of equally frequent characters the one with the lower code point comes first
        order = np.argsort(-totals, kind="stable")[:wanted]
        rank = np.full(len(kinds), len(order))
        rank[order] = np.arange(len(order))
        known = rank[places]
        pairs = known[:-1] * (len(order) + 1) + known[1:]
        table = np.bincount(pairs, minlength=(len(order) + 1) ** 2).reshape(len(order) + 1, -1)
        return cls(tuple(chr(kinds[place]) for place in order), table[:-1, :-1].astype(np.int64), context)

    @cached_property
    def sha256(self) -> str:
        """Digest of everything that the sequences depend on but the seed."""
        text = f"{''.join(self.characters)} {self.context} {BLOCK} {TRIGGERS}"
        return hashlib.sha256(text.encode() + self.counts.astype("<i8").tobytes()).hexdigest()

    @cached_property
    def table(self) -> np.ndarray:
        """Probability of a character (column) after a character (row); a row that was never seen is the unigrams."""
        totals = self.counts.sum(1, keepdims=True)
        return np.where(totals > 0, self.counts / np.maximum(totals, 1), self._unigrams)

    @cached_property
    def first(self) -> np.ndarray:
        """Probability of each character behind BOS."""
        weights = self._unigrams.copy()
        weights[:TRIGGERS] = 0.0
        return weights / weights.sum()

    @cached_property
    def _unigrams(self) -> np.ndarray:
        weights = self.counts.sum(1) + self.counts.sum(0)
        return weights / weights.sum()

    def block(self, *seed: int) -> np.ndarray:
        """`BLOCK` sequences of token ids.

        Args:
            seed: numbers that choose the block; equal numbers give equal sequences.

        Returns:
            int64, one row a sequence.
        """
        draws = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).random((self.context, BLOCK))
        rows = np.empty((self.context, BLOCK), np.int64)
        rows[0] = BOS - _SPECIAL
        first, table = np.cumsum(self.first), np.cumsum(self.table, axis=1)
        for place in range(1, self.context):
            draw, before = draws[place], rows[place - 1]
            # the last bound is left out: rounding may leave it below a draw
            bounds = first[None, :-1] if place == 1 else table[before, :-1]
            rows[place] = (draw[:, None] >= bounds).sum(1)
            if place > 1:
                rows[place] = np.where(before < TRIGGERS, rows[place - 2], rows[place])
        return np.ascontiguousarray(rows.T) + _SPECIAL

    def copies(self, rows: np.ndarray) -> np.ndarray:
        """True at each token that is the copy after a trigger.

        Args:
            rows: token ids, one row a sequence.
        """
        trigger = (rows >= _SPECIAL) & (rows < _SPECIAL + TRIGGERS)
        return np.concatenate((np.zeros_like(trigger[:, :1]), trigger[:, :-1]), axis=1)

    def surprise(self, rows: np.ndarray) -> np.ndarray:
        """Nats of each token under the source itself, the least that any model can have; 0 for BOS and copies.

        Args:
            rows: token ids, one row a sequence.
        """
        found = np.zeros(rows.shape)
        found[:, 1] = -np.log(self.first[rows[:, 1] - _SPECIAL])
        with np.errstate(divide="ignore"):
            found[:, 2:] = -np.log(self.table[rows[:, 1:-1] - _SPECIAL, rows[:, 2:] - _SPECIAL])
        found[self.copies(rows)] = 0.0
        return found


def _codes(text: str) -> np.ndarray:
    """Code points of a text, and a space."""
    return np.frombuffer(f"{text} ".encode("utf-32-le"), "<u4")
