"""Material: the sequences of a tier, to train on in an order that the seed alone decides, and held out."""

from abc import ABC, abstractmethod
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from quant_bench.data import DataSource
from quant_bench.progress import ProgressReport
from quant_bench.training.backcopy import BLOCK, BOS, UNKNOWN, Backcopy
from quant_bench.training.documents import documents
from quant_bench.training.packed import Packed, folder_of, packed
from quant_bench.training.tiers import Tier

# first numbers of a seed sequence, so that the two kinds of sequences are never drawn alike
_TRAINED, _HELD_OUT = 0, 1


class Material(ABC):
    """The sequences of a tier.

    Attributes:
        sha256: digest of everything but the seed that they depend on.
        note: counts, for the record of a training.
    """

    sha256: str
    note: dict[str, Any]

    @abstractmethod
    def row(self, seed: int, index: int) -> np.ndarray:
        """A sequence to train on.

        Args:
            seed: chooses the order, and for drawn sequences themselves.
            index: from 0; there is no last one (a text is read again in another order).

        Returns:
            int64 token ids, as many as the tier's context.
        """

    @abstractmethod
    def held_out(self) -> np.ndarray:
        """Sequences that no seed trains on, one a row; the same for all seeds."""

    @abstractmethod
    def tokenizer(self) -> Any:
        """The tokenizer of the ids."""


def material_of(
    tier: Tier, data: DataSource, cache: Path, progress: ProgressReport = lambda description, done, total: None
) -> Material:
    """The sequences of a tier; its text is packed on first use.

    Raises:
        Blocked: the text must be fetched and cannot be.
        DataError: it is too short, or packed files have changed.
    """
    if tier.task == "backcopy":
        return ToyMaterial(tier, data)
    return TextMaterial(tier, packed(tier, data, cache, progress))


def is_at_hand(tier: Tier, data: DataSource, cache: Path) -> bool:
    """Whether `material_of` has no text to pack first."""
    return tier.task == "backcopy" or folder_of(tier, data, cache).is_dir()


class TextMaterial(Material):
    """Pieces of a packed text beside each other, in an order of their own for every time that it is read."""

    def __init__(self, tier: Tier, text: Packed) -> None:
        self.context, self.text = tier.context, text
        self.sha256, self.note = text.sha256, text.note
        self._rows = len(text.train) // tier.context
        self._order = lru_cache(2)(self._shuffled)

    def _shuffled(self, seed: int, time: int) -> np.ndarray:
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((_TRAINED, seed, time))))
        return generator.permutation(self._rows)

    def row(self, seed: int, index: int) -> np.ndarray:
        time, place = divmod(index, self._rows)
        start = int(self._order(seed, time)[place]) * self.context
        return np.asarray(self.text.train[start : start + self.context], np.int64)

    def held_out(self) -> np.ndarray:
        rows = len(self.text.held_out) // self.context
        return np.asarray(self.text.held_out[: rows * self.context], np.int64).reshape(rows, -1)

    def tokenizer(self) -> Any:
        return self.text.tokenizer()


class ToyMaterial(Material):
    """Sequences of Bigram-Backcopy, drawn in blocks."""

    def __init__(self, tier: Tier, data: DataSource) -> None:
        self.source = Backcopy.of_text(documents(tier.text, data), tier.vocabulary, tier.context)
        self.vocabulary, self._count = tier.vocabulary, tier.held_out
        self.sha256 = self.source.sha256
        self.note = {"text": tier.text, "characters": "".join(self.source.characters)}
        self._block = lru_cache(2)(self.source.block)

    def row(self, seed: int, index: int) -> np.ndarray:
        block, place = divmod(index, BLOCK)
        return np.asarray(self._block(_TRAINED, seed, block)[place])

    def held_out(self) -> np.ndarray:
        blocks = [self.source.block(_HELD_OUT, block) for block in range(-(-self._count // BLOCK))]
        return np.concatenate(blocks)[: self._count]

    def tokenizer(self) -> Any:
        """One token a character; BOS before a text, line breaks dropped."""
        words = {"<s>": BOS, "<unk>": UNKNOWN, **{c: place for place, c in enumerate(self.source.characters, 2)}}
        # a text with fewer kinds of characters leaves rows of the embedding without a name
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Replace(Regex(r"\n"), "")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        tokenizer.decoder = decoders.Fuse()
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")
