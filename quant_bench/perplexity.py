"""Perplexity of a text and statistics of outliers on it: what the window tasks share."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from quant_bench.errors import SpecError
from quant_bench.model import LanguageModel
from quant_bench.outliers import METRICS as OUTLIER_METRICS
from quant_bench.outliers import summarize
from quant_bench.score import Metric
from quant_bench.scoring import CHUNK_TOKENS, logits
from quant_bench.stream import Prefix, Stream
from quant_bench.task import Context, Evaluation, Measure, Plain, Task
from quant_bench.training import own_data
from quant_bench.windows import Convention, Span, WindowPass, Windows, WindowSettings, announce, cut, window_pass

TOKEN_PERPLEXITY = Metric("token_perplexity", "1", "lower", "exp")
WORD_PERPLEXITY = Metric("word_perplexity", "1", "lower", "exp")
BITS_PER_BYTE = Metric("bits_per_byte", "bits/byte", "lower", "mean")
KL = Metric("kl", "nats/token", "lower", "mean")
TOP1_AGREEMENT = Metric("top1_agreement", "share", "higher", "mean")
MEAN_OF_BATCHES = Metric("token_perplexity_mean_of_batches", "1", "lower")
# the split that is evaluated
SPLITS = {"wikitext2": "test", "wiki40b": "validation", "python_docs": "test", "held_out": "validation"}
# not a text but what a model that was trained here has not seen
HELD_OUT = "held_out"
# the outlier papers' scripts average the loss over evaluation batches of this many blocks
_PUBLISHED_BATCH = 8


@dataclass(frozen=True)
class TextWindows:
    """Which windows of which text.

    Attributes:
        text: name of the text (`wikitext2`), or `held_out` for the sequences held out from a model trained here.
        split: of the text (`test`).
        settings: convention.
        limit: take the first so many windows; None for all.
    """

    text: str
    split: str
    settings: WindowSettings
    limit: int | None = None

    @classmethod
    def p1(cls, text: str, seq_length: int | None, limit: int | None) -> "TextWindows":
        """Windows of convention P1 over the split of a text that is evaluated."""
        return cls(text, SPLITS[text], WindowSettings(seq_length=seq_length), limit)

    def key(self, model: LanguageModel) -> tuple[Any, ...]:
        """What distinguishes these windows within one model's run."""
        return (self.text, self.split, self.settings.resolved(model), self.limit)

    def announce(self, model: LanguageModel, context: Context) -> None:
        """Ask for statistics of the pass over these windows, whichever task makes it."""
        announce(context, self.key(model))

    def cut(self, model: LanguageModel, context: Context) -> tuple[Windows, str]:
        """The windows, cut once for all quantizers of a float model, and where the text came from."""
        key = ("windows", *self.key(model)[:3])
        if key not in context.model_memo and self.text == HELD_OUT:
            context.model_memo[key] = held_out_windows(model, context, self.settings)
        if key not in context.model_memo:
            text = context.data.text(self.text, self.split)
            windows = cut(text.rows, model, self.settings, wikitext=self.text == "wikitext2")
            context.model_memo[key] = (windows, text.origin)
        windows, origin = context.model_memo[key]
        return replace(windows, spans=windows.spans[: self.limit]), origin

    def run(self, model: LanguageModel, context: Context, *, observe: bool) -> tuple[WindowPass, str]:
        """The forward pass over the windows, shared by the tasks of a model, and where the text came from."""
        windows, origin = self.cut(model, context)
        return window_pass(model, windows, context, self.key(model), observe=observe), origin


@dataclass(frozen=True)
class TextPerplexity(Task):
    """A task that is the perplexity of one text; a subclass names the text.

    Attributes:
        text: name of the text; see `SPLITS`.
        convention: p1, p2, p3 or p5; see `windows.WindowSettings`.
        seq_length: tokens a window; None: as the convention has it, or the model's context where that is shorter.
        stride: of p2, in tokens; None: 512.
        prefix: what stands before the text; `default` is what the tokenizer does by itself.
    """

    text: ClassVar[str]
    convention: Convention = "p1"
    seq_length: int | None = None
    stride: int | None = None
    prefix: Prefix = "default"

    def __post_init__(self) -> None:
        super().__post_init__()
        # settings that contradict each other are found before anything runs
        self._windows()

    def _windows(self) -> WindowSettings:
        return WindowSettings(self.convention, self.seq_length, self.stride, self.prefix)

    def evaluate(self, model: LanguageModel, context: Context) -> Evaluation:
        return perplexity(model, context, TextWindows(self.text, SPLITS[self.text], self._windows(), self.limit))


def held_out_windows(model: LanguageModel, context: Context, settings: WindowSettings) -> tuple[Windows, str]:
    """The beginnings of the sequences held out from a model that was trained here, and which tier they are of.

    Raises:
        NotApplicable: the model was not trained here.
        Blocked: the text of its training is missing.
        SpecError: the sequences are no windows of another convention than P1.
    """
    if settings.convention != "p1":
        raise SpecError(f"held-out sequences are windows of convention p1, not of {settings.convention}")
    settings = settings.resolved(model)
    found = own_data.held_out(model, context.data, context.cache)
    length, step = settings.seq_length, found.rows.shape[1]
    assert length is not None
    ids = found.rows.reshape(-1)
    # a sequence is read from its own beginning, however short the window
    spans = tuple(Span(first, first + length, first + 1) for first in range(0, len(ids), step))
    label = f"P1 seq={length} prefix=none"
    return Windows(Stream(ids, None, None, found.sha256), spans, None, label, settings), found.tier.text


def perplexity(model: LanguageModel, context: Context, wanted: TextWindows) -> Evaluation:
    """Token perplexity, and word perplexity and bits per byte over the words and bytes of the scored tokens.

    All three are the same negative log-likelihood: perplexity is exp(Σ nll / Σ tokens) over windows, so windows count
    by their tokens. A word counts where it begins (white space parts words). Against a float model there are also the
    exact KL(float || quantized) at the probe's positions and the share of unchanged most probable tokens everywhere.

    Source: Jelinek et al. 1977, https://doi.org/10.1121/1.2016299 (perplexity).

    Raises:
        Blocked: the text is missing.
    """
    done, origin = wanted.run(model, context, observe=False)
    frame, measures = done.frame.copy(), [Measure(TOKEN_PERPLEXITY, "nll", "tokens")]
    if "words" in frame:
        frame["bits"] = frame["nll"] / np.log(2.0)
        measures += [Measure(WORD_PERPLEXITY, "nll", "words"), Measure(BITS_PER_BYTE, "bits", "bytes")]
    frame, compared = _compared(frame, done, model, context)
    plain = []
    if done.windows.settings.convention == "p5":
        plain.append(Plain(MEAN_OF_BATCHES, _mean_of_batches(frame), len(frame)))
    return Evaluation(
        measures=measures + compared,
        samples=frame,
        data_sha256=done.windows.stream.sha256,
        convention=done.windows.label,
        plain=plain,
        details={"windows": len(frame), "tokens_in_text": len(done.windows.stream.ids)},
        settings=_settings(wanted, done, origin),
    )


def outliers(model: LanguageModel, context: Context, wanted: TextWindows) -> Evaluation:
    """Outlier statistics of the forward pass over the windows; see `outliers.summarize` for each definition.

    Raises:
        Blocked: the text is missing.
    """
    done, origin = wanted.run(model, context, observe=True)
    assert done.observer is not None
    plain, details = summarize(done.observer.statistics, model)
    columns = ["avg_kurtosis", "avg_kurtosis_published"]
    return Evaluation(
        measures=[Measure(OUTLIER_METRICS[name], name) for name in columns],
        samples=done.frame[["item", "tokens", *columns]].copy(),
        data_sha256=done.windows.stream.sha256,
        convention=f"{wanted.text} {done.windows.label}",
        plain=plain,
        details=details,
        settings=_settings(wanted, done, origin),
    )


def _settings(wanted: TextWindows, done: WindowPass, origin: str) -> dict[str, Any]:
    """Settings in force."""
    settings = done.windows.settings
    return {
        "text": wanted.text,
        "split": wanted.split,
        "text_origin": origin,
        "seq_length": settings.seq_length,
        "stride": settings.stride,
        "prefix": done.windows.label.rpartition("prefix=")[2],
    }


def _compared(
    frame: pd.DataFrame, done: WindowPass, model: LanguageModel, context: Context
) -> tuple[pd.DataFrame, list[Measure]]:
    """Hand the pass to the probe; columns and measures of the comparison, if it compares."""
    probe = context.probe
    if probe.mode == "off":
        return frame, []
    for window, argmax in enumerate(done.argmax):
        probe.offer_argmax(window, argmax)
    for start in range(0, len(done.sampled), CHUNK_TOKENS):
        scores = logits(model, done.sampled[start : start + CHUNK_TOKENS].to(model.device))
        for row, score in enumerate(scores):
            probe.offer(start + row, score[None])
    found, changes = probe.frame(), probe.changes()
    measures: list[Measure] = []
    if len(found):
        windows = pd.Series(done.sampled_window).iloc[found["item"]].to_numpy()
        by_window = found["kl"].groupby(windows)
        frame["kl"] = frame["item"].map(by_window.sum())
        frame["kl_positions"] = frame["item"].map(by_window.size())
        measures.append(Measure(KL, "kl", "kl_positions"))
    if len(changes):
        same = (changes["positions"] - changes["changed"]).set_axis(changes["item"])
        frame["same_argmax"] = frame["item"].map(same)
        measures.append(Measure(TOP1_AGREEMENT, "same_argmax", "tokens"))
    return frame, measures


def _mean_of_batches(frame: pd.DataFrame) -> float:
    """Exp of the unweighted mean over batches of 8 windows of their mean loss, which the outlier papers' tables show.

    It differs from the perplexity only where the last batch is not full.
    """
    losses = (frame["nll"] / frame["tokens"]).to_numpy()
    batches = [losses[start : start + _PUBLISHED_BATCH].mean() for start in range(0, len(losses), _PUBLISHED_BATCH)]
    return float(np.exp(np.mean(batches)))
