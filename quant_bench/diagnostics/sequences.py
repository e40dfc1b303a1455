"""Sequences: the token rows that a diagnosis runs on, whatever they come from."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int64
from torch import Tensor

from quant_bench.model import LanguageModel
from quant_bench.perplexity import TextWindows
from quant_bench.score import Metric
from quant_bench.task import Context, Evaluation, Measure


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

    def evaluation(
        self, samples: pd.DataFrame, metrics: Mapping[str, Metric], details: dict[str, Any], **settings: Any
    ) -> Evaluation:
        """What a diagnosis found, each score the mean over sequences of a column of the samples.

        Args:
            samples: one row a sequence, in order.
            metrics: column -> what it means; other columns are left out.
            details: tables.
            settings: in force, beside those of the sequences.
        """
        kept = samples[list(metrics)].copy()
        kept.insert(0, "item", range(len(kept)))
        kept.insert(1, "tokens", self.ids.shape[1])
        return Evaluation(
            measures=[Measure(metric, name) for name, metric in metrics.items()],
            samples=kept,
            data_sha256=self.sha256,
            convention=self.label,
            details={**details, "sequences": len(kept)},
            settings={**self.settings, **settings},
        )


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
