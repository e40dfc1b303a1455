"""Windows of a token stream under the conventions of perplexity, and the one forward pass that tasks share.

A batch is one window, so the batch size can't matter, and a quantizer's dynamic ranges never see another window.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float64, Int32, Int64
from torch import Tensor

from quant_bench.data import raw_wikitext
from quant_bench.errors import DataError, SpecError
from quant_bench.model import LanguageModel
from quant_bench.observe import Observer
from quant_bench.probe import ITEMS
from quant_bench.scoring import final_hidden, target_log_probs
from quant_bench.stream import Prefix, Stream, block_stream, joined, prefix_ids, prefix_name, stream_of
from quant_bench.task import Context

Convention = Literal["p1", "p2", "p3", "p5"]
_LONGEST = {"p1": 2048, "p2": 2048, "p3": 512, "p5": 512}
_STRIDE = 512


@dataclass(frozen=True)
class WindowSettings:
    """How a text is cut.

    - p1: windows beside each other, the tail dropped, every token but a window's first scored. Source: Frantar et al.
      2022, https://arxiv.org/abs/2210.17323, whose code most tables follow.
    - p2: each window starts `stride` tokens after the last, only its new tokens are scored, the tail included.
      Source: https://huggingface.co/docs/transformers/perplexity.
    - p3: windows of the raw text beside each other, each one's first token overwritten by BOS, second half scored.
      Source: https://github.com/ggml-org/llama.cpp, tools/perplexity.
    - p5: blocks of documents; see `stream.block_stream`. Every token but a block's first is scored.

    Attributes:
        convention: as above.
        seq_length: tokens a window; None: 2,048 (p3 and p5: 512) or the model's context where that is shorter.
        stride: of p2; None: 512, or half the window where that is less.
        prefix: before the stream (p5: each document; p3: in place of each window's first token). `default` is what the
            tokenizer does by itself, for p3 BOS where it has one.
    """

    convention: Convention = "p1"
    seq_length: int | None = None
    stride: int | None = None
    prefix: Prefix = "default"

    def __post_init__(self) -> None:
        if self.seq_length is not None and self.seq_length < 2:
            raise SpecError(f"seq_length must be at least 2: one token to see, one to score; got {self.seq_length!r}")
        if self.stride is not None and self.convention != "p2":
            raise SpecError(f"stride belongs to convention=p2; convention={self.convention} has none")
        if self.stride is not None and self.stride < 1:
            raise SpecError(f"stride must be at least 1; got {self.stride!r}")

    def resolved(self, model: LanguageModel) -> "WindowSettings":
        """The settings in force for a model.

        Raises:
            SpecError: the window is longer than the model's context, or the stride longer than the window.
        """
        longest = model.max_length
        length = self.seq_length or min(_LONGEST[self.convention], longest)
        if length > longest:
            raise SpecError(f"seq_length={length} is longer than this model's context of {longest} tokens")
        stride = (self.stride or min(_STRIDE, max(1, length // 2))) if self.convention == "p2" else None
        if stride is not None and stride > length:
            raise SpecError(f"stride={stride} is above seq_length={length}: tokens would be seen by no window")
        return replace(self, seq_length=length, stride=stride)


@dataclass(frozen=True)
class Span:
    """One window: ids first to last (exclusive), of which those from `scored` on are targets."""

    first: int
    last: int
    scored: int


@dataclass(frozen=True)
class Windows:
    """A text cut into windows for one model.

    Attributes:
        stream: the tokens.
        spans: the windows, in order.
        lead: token that overwrites each window's first one, or None.
        label: convention in force, as a label of numbers: `P1 seq=2048 prefix=none`.
        settings: in force.
    """

    stream: Stream
    spans: tuple[Span, ...]
    lead: int | None
    label: str
    settings: WindowSettings

    def ids(self, index: int) -> Int64[Tensor, "one seq"]:
        """Token ids that the model sees in a window."""
        span = self.spans[index]
        ids = torch.from_numpy(self.stream.ids[span.first : span.last].copy())
        if self.lead is not None:
            ids[0] = self.lead
        return ids[None]

    def targets(self, index: int) -> Int64[Tensor, " token"]:
        """Token ids that are scored in a window."""
        span = self.spans[index]
        return torch.from_numpy(self.stream.ids[span.scored : span.last].copy())


def cut(rows: Sequence[str], model: LanguageModel, settings: WindowSettings, *, wikitext: bool = False) -> Windows:
    """Cut a text into windows.

    Args:
        rows: rows or documents.
        model: whose tokenizer and context are used.
        settings: convention.
        wikitext: whether the rows are lines of a raw WikiText file (p3 puts the file together again).

    Raises:
        SpecError: the settings do not fit the model.
        DataError: the text is shorter than one window.
        NotApplicable: the tokenizer lacks the prefix asked for.
    """
    settings = settings.resolved(model)
    tokenizer, kind, length = model.tokenizer, settings.convention, settings.seq_length
    assert length is not None
    prefix = prefix_ids(tokenizer, settings.prefix)
    lead = None
    if kind == "p5":
        stream = block_stream(tokenizer, rows, prefix, length)
    else:
        stream = stream_of(tokenizer, raw_wikitext(list(rows)) if kind == "p3" and wikitext else joined(rows), prefix)
    if kind == "p3":
        has_bos = settings.prefix == "default" and tokenizer.bos_token_id is not None
        prefix = prefix_ids(tokenizer, "bos") if has_bos else prefix
        lead = prefix[0] if prefix else None
    spans = tuple(_spans(len(stream.ids), settings))
    if not spans:
        raise DataError(f"the text has {len(stream.ids)} tokens; one window needs {2 if kind == 'p2' else length}")
    stride = "" if settings.stride is None else f" stride={settings.stride}"
    label = f"{kind.upper()} seq={length}{stride} prefix={prefix_name(tokenizer, prefix)}"
    return Windows(stream, spans, lead, label, settings)


def _spans(total: int, settings: WindowSettings) -> list[Span]:
    length, stride = settings.seq_length, settings.stride
    assert length is not None
    if stride is None:
        skipped = length // 2 + 1 if settings.convention == "p3" else 1
        return [Span(first, first + length, first + skipped) for first in range(0, total - length + 1, length)]
    spans: list[Span] = []
    scored = 1
    for first in range(0, total, stride):
        last = min(first + length, total)
        # a window's first token has no context: with stride = seq_length it is left out, as in p1
        target = max(scored, first + 1)
        if last > target:
            spans.append(Span(first, last, target))
        scored = last
        if last == total:
            break
    return spans


@dataclass
class WindowPass:
    """What one forward pass over all windows found.

    Attributes:
        windows: the windows that ran.
        frame: one row a window: `item`, `nll` in nats, `tokens`, and `words` and `bytes` where they are known; with
            observation also `avg_kurtosis` and `avg_kurtosis_published`.
        log_probs: natural log of the probability of each scored token, one tensor a window.
        argmax: most probable token at each scored position, one tensor a window.
        sampled: final hidden states for the probe, one for each of its items, in order.
        sampled_window: the window of each of them.
        observer: the statistics, or None.
    """

    windows: Windows
    frame: pd.DataFrame
    log_probs: list[Float64[Tensor, " token"]]
    argmax: list[Int32[Tensor, " token"]]
    sampled: Float[Tensor, "item width"]
    sampled_window: list[int]
    observer: Observer | None


def announce(context: Context, key: tuple[Any, ...]) -> None:
    """Say before any pass runs that the pass over these windows is to be observed."""
    context.pass_memo[("observe", key)] = True


def window_pass(
    model: LanguageModel, windows: Windows, context: Context, key: tuple[Any, ...], *, observe: bool
) -> WindowPass:
    """Score every window, and observe the same forward pass if this task or an announced one wants statistics.

    The pass is kept in `context.pass_memo` under `key`, so each window is run once for all tasks of a model.

    Args:
        model: float or quantized.
        windows: of the text.
        context: of the task.
        key: what distinguishes these windows within one model's run.
        observe: whether statistics are needed.

    Raises:
        QuantizationError: a value is not finite.
    """
    done: WindowPass | None = context.pass_memo.get(("pass", key))
    if done is not None and (done.observer is not None or not observe):
        return done
    if observe or context.pass_memo.get(("observe", key)):
        with Observer(model) as observer:
            found = _run(model, windows, context, observer)
    else:
        found = _run(model, windows, context, None)
    context.pass_memo[("pass", key)] = found
    return found


def _run(model: LanguageModel, windows: Windows, context: Context, observer: Observer | None) -> WindowPass:
    rows: list[dict[str, Any]] = []
    log_probs: list[Tensor] = []
    argmax: list[Tensor] = []
    sampled: list[Tensor] = []
    owners: list[int] = []
    count = len(windows.spans)
    for index, span in enumerate(windows.spans):
        hidden = final_hidden(model, windows.ids(index))[0, span.scored - span.first - 1 : -1]
        scored = target_log_probs(model, hidden, windows.targets(index))
        row: dict[str, Any] = {"item": index, "nll": -float(scored.log_probs.sum()), "tokens": len(hidden)}
        for name, counts in (("words", windows.stream.words), ("bytes", windows.stream.bytes)):
            if counts is not None:
                row[name] = int(counts[span.scored : span.last].sum())
        rows.append(row | (observer.latest() if observer is not None else {}))
        log_probs.append(scored.log_probs.cpu())
        argmax.append(scored.argmax.to(torch.int32).cpu())
        keep = _probed(index, count, len(hidden))[: max(0, ITEMS - len(owners))]
        sampled.append(hidden[torch.from_numpy(keep).to(hidden.device)].cpu())
        owners += [index] * len(keep)
        context.progress(windows.label, index + 1, count)
    return WindowPass(windows, pd.DataFrame(rows), log_probs, argmax, torch.cat(sampled), owners, observer)


def _probed(index: int, count: int, length: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Positions of a window that the probe sees.

    Of few windows each has several, from its first to its last. Of many windows 512 have one, in turn from the first
    position to the last: the same one in all would be a single context where windows begin alike.

    Args:
        index: of the window.
        count: windows of the text.
        length: scored positions of the window.
    """
    if count < ITEMS:
        return np.unique(np.linspace(0, length - 1, -(-ITEMS // count)).round().astype(np.int64))
    (turns,) = np.nonzero(np.linspace(0, count - 1, ITEMS).round() == index)
    return (turns * (length - 1) / (ITEMS - 1)).round().astype(np.int64)
