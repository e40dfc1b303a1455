"""Probe: next-token distributions of the float model, kept on disk and compared with a quantized model's."""

import logging
from pathlib import Path
from typing import Literal

import pandas as pd
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quant_bench.cache import file_made_whole
from quant_bench.errors import DataError

ITEMS = 512
_FORMAT = "quant-bench probe 1"

log = logging.getLogger(__name__)


class Probe:
    """Collects the float model's distributions, or compares a quantized model's with them, or does nothing.

    Two things are kept, each by item:

    - the whole next-token distribution at one position of each of the items 0 to 511 (`offer`), for the exact
      KL(float || quantized); what counts does not depend on the order in which items arrive;
    - the most probable token at all positions of any item (`offer_argmax`), for the share of changed choices.

    The distributions are float32 log-probabilities: 512 × vocab × 4 bytes on disk, read row by row.

    Source of KL(P || Q) = Σ p ln(p / q): Kullback and Leibler 1951, https://doi.org/10.1214/aoms/1177729694. It is
    summed as Σ p ln(p / q) - p + q, which is the same for two distributions and where rounding makes no term negative.
    """

    def __init__(self, mode: Literal["off", "collect", "compare"], path: Path | None) -> None:
        self.mode = mode
        self.path = path
        self._rows: dict[int, Tensor] = {}
        self._argmax: dict[int, Tensor] = {}
        self._kl: dict[int, tuple[float, float]] = {}
        self._changed: dict[int, tuple[int, int]] = {}
        self._stored: dict[int, int] = {}
        if mode == "compare":
            self._read()

    @classmethod
    def off(cls) -> "Probe":
        """A probe that wants nothing."""
        return cls("off", None)

    @classmethod
    def collect(cls, path: Path) -> "Probe":
        """Collect the float model's distributions; `save` writes them to `path`."""
        return cls("collect", path)

    @classmethod
    def compare(cls, path: Path) -> "Probe":
        """Compare with the distributions at `path`.

        Raises:
            DataError: `path` is not a probe's file.
        """
        return cls("compare", path)

    @staticmethod
    def sound(path: Path) -> bool:
        """Whether distributions were collected at `path` and can be read."""
        if not path.is_file():
            return False
        try:
            Probe.compare(path)
        except DataError as error:
            log.warning("%s", error)
            return False
        return True

    def wants(self, item: int) -> bool:
        """Whether the distribution of this item is still wanted."""
        if self.mode == "collect":
            return 0 <= item < ITEMS and item not in self._rows
        return self.mode == "compare" and item in self._stored and item not in self._kl

    def offer(self, item: int, logits: Float[Tensor, "position vocab"]) -> None:
        """Hand in the logits of an item's positions; the first one is used, and only the first time.

        Raises:
            DataError: the collected distributions have another vocabulary.
        """
        if not self.wants(item):
            return
        row = torch.log_softmax(logits[0].detach().double().cpu(), 0).float()
        if self.mode == "collect":
            self._rows[item] = row
            return
        assert self.path is not None
        with safe_open(self.path, framework="pt") as file:
            reference = file.get_slice("log_probs")[self._stored[item]]
        if reference.shape != row.shape:
            raise DataError(
                f"{self.path}: distributions over {len(reference)} tokens, but this model has {len(row)}; "
                "the file belongs to another model"
            )
        p, q = reference.double(), row.double()
        # a token that the float model rules out (logit -inf) adds q alone; 0 · inf would be NaN
        terms = torch.where(p == -torch.inf, 0.0, p.exp() * (p - q)) - p.exp() + q.exp()
        divergence = float(terms.sum())
        self._kl[item] = (divergence, float(reference.argmax() == row.argmax()))

    def offer_argmax(self, item: int, argmax: Int[Tensor, " position"]) -> None:
        """Hand in the most probable token at each of an item's positions.

        Raises:
            DataError: the float model had another number of positions for this item.
        """
        found = argmax.detach().cpu().to(torch.int32)
        if self.mode == "collect":
            self._argmax[item] = found
        elif self.mode == "compare" and item in self._argmax:
            reference = self._argmax[item]
            if len(reference) != len(found):
                raise DataError(
                    f"{self.path}: item {item} had {len(reference)} positions, now {len(found)}; not the same text"
                )
            self._changed[item] = (int((reference != found).sum()), len(found))

    def frame(self) -> pd.DataFrame:
        """One row a compared item: `item`, `kl` in nats, `top1` (1.0 where the most probable token is the same)."""
        rows = [(item, *self._kl[item]) for item in sorted(self._kl)]
        return pd.DataFrame(rows, columns=["item", "kl", "top1"])

    def changes(self) -> pd.DataFrame:
        """One row a compared item: `item`, `changed` most probable tokens, of how many `positions`."""
        rows = [(item, *self._changed[item]) for item in sorted(self._changed)]
        return pd.DataFrame(rows, columns=["item", "changed", "positions"])

    def save(self) -> None:
        """Write what was collected, atomically; nothing to do unless this probe collects and was offered something."""
        if self.mode != "collect" or self.path is None or not (self._rows or self._argmax):
            return
        items, owners = sorted(self._rows), sorted(self._argmax)
        empty = torch.empty(0, 0)
        tensors = {
            "items": torch.tensor(items, dtype=torch.int64),
            "log_probs": torch.stack([self._rows[item] for item in items]) if items else empty,
            "owners": torch.tensor(owners, dtype=torch.int64),
            "lengths": torch.tensor([len(self._argmax[item]) for item in owners], dtype=torch.int64),
            "argmax": torch.cat([self._argmax[item] for item in owners]) if owners else empty.flatten().int(),
        }
        with file_made_whole(self.path) as work:
            save_file(tensors, work, metadata={"format": _FORMAT})

    def _read(self) -> None:
        assert self.path is not None
        try:
            with safe_open(self.path, framework="pt") as file:
                if (file.metadata() or {}).get("format") != _FORMAT:
                    raise DataError(f"{self.path} is not a probe's file ({_FORMAT})")
                items, owners = file.get_tensor("items").tolist(), file.get_tensor("owners").tolist()
                lengths, argmax = file.get_tensor("lengths").tolist(), file.get_tensor("argmax")
        except (OSError, SafetensorError) as error:
            raise DataError(f"{self.path} cannot be read as a probe's file: {error}") from error
        self._stored = {item: row for row, item in enumerate(items)}
        self._argmax = dict(zip(owners, argmax.split(lengths), strict=True)) if owners else {}
