"""Sequences: the token rows that a diagnosis runs on, whatever they come from."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from quant_bench.model import LanguageModel
from quant_bench.perplexity import TextWindows
from quant_bench.task import Context


@dataclass(frozen=True)
class Sequences:
    """Token rows of one length; each is run alone, so that none can influence another.

    Attributes:
        ids: token ids, one row a sequence.
        label: what must agree before two numbers may be compared (`wikitext2 P1 seq=256 prefix=none`).
        sha256: digest of the text or the items behind them.
        settings: where they come from, for the record.
    """

    ids: Int64[Tensor, "item seq"]
    label: str
    sha256: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        """What distinguishes these sequences within one model's run."""
        return self.label, hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()


def of_text(model: LanguageModel, context: Context, wanted: TextWindows) -> Sequences:
    """The windows of a text, as a perplexity task of the same settings reads them.

    Raises:
        Blocked: the text is missing.
    """
    windows, origin = wanted.cut(model, context)
    ids = torch.cat([windows.ids(index) for index in range(len(windows.spans))])
    settings = {
        "text": wanted.text,
        "split": wanted.split,
        "text_origin": origin,
        "seq_length": ids.shape[1],
        "prefix": windows.label.rpartition("prefix=")[2],
    }
    return Sequences(ids, f"{wanted.text} {windows.label}", windows.stream.sha256, settings)
