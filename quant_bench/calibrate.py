"""Calibration: token batches from a text, and static ranges of activations streamed over them."""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quant_bench.errors import DataError, QuantizationError
from quant_bench.model import LanguageModel
from quant_bench.numerics.tails import Range, Tails
from quant_bench.quantizer import SEQUENCES_A_BATCH, Calibration
from quant_bench.stream import prefix_ids

# tokens a calibration sequence in the outlier papers' protocol
SEQ_LENGTH = 512
# one sequence is cut out of this much more text than it needs on average, so that few cuts come out too short
_SPARE = 1.25
_SAMPLE_CHARACTERS = 1 << 16


@runtime_checkable
class CalibrationText(Protocol):
    """What `data.Text` offers: rows, a name and the digest of the text."""

    @property
    def rows(self) -> Sequence[str]:
        """Lines or documents, in order."""

    @property
    def name(self) -> str:
        """Name of the text."""

    @property
    def sha256(self) -> str:
        """Digest of the text."""


def token_batches(
    tokenizer: Any,
    text: CalibrationText,
    *,
    sequences: int = 32,
    seq_length: int = SEQ_LENGTH,
    seed: int = 0,
) -> Calibration:
    """Sequences of equal length from places of a text that the seed chooses; no two overlap.

    Only what is used is tokenized. Each sequence begins with what the tokenizer itself puts before a text (Gemma's
    and Llama's `<bos>`), as a model meets it.

    Args:
        tokenizer: a transformers tokenizer.
        text: rows are joined by a blank line.
        sequences: how many are wanted.
        seq_length: tokens a sequence, its prefix counted.
        seed: chooses the places and their order.

    Returns:
        Batches of 8 sequences, the last of which may be smaller. Fewer usable sequences than wanted give a warning with
        both counts, which are stored.

    Raises:
        DataError: the text is too short for even one sequence.
    """
    joined = "\n\n".join(row.strip("\n") for row in text.rows if row.strip())
    prefix = prefix_ids(tokenizer, "default")
    need = seq_length - len(prefix)
    sample = joined[:_SAMPLE_CHARACTERS]
    density = len(_encode(tokenizer, sample)) / max(len(sample), 1)
    span = math.ceil(need / density * _SPARE) if density else len(joined) + 1
    places = max(len(joined) // span, 1)
    chosen: list[list[int]] = []
    for place in torch.randperm(places, generator=torch.Generator().manual_seed(seed)).tolist():
        ids = _encode(tokenizer, _whole_words(joined, place * span, (place + 1) * span))[:need]
        if len(ids) == need:
            chosen.append(prefix + ids)
        if len(chosen) == sequences:
            break
    if not chosen:
        raise DataError(f"calibration text {text.name!r} has no sequence of {seq_length} tokens; use a longer text")
    if len(chosen) < sequences:
        message = f"calibration: only {len(chosen)} of {sequences} sequences of {seq_length} tokens in {text.name!r}"
        warnings.warn(message, stacklevel=2)
    rows = torch.tensor(chosen, dtype=torch.int64)
    where = f"{text.name} sha256={text.sha256[:12]} seq={seq_length} batch={SEQUENCES_A_BATCH} seed={seed}"
    return Calibration.of(rows, where, sequences)


def batches_for(model: LanguageModel, text: CalibrationText, *, sequences: int, seed: int) -> Calibration:
    """The protocol's sequences of 512 tokens, or of the model's context where that is shorter; see `token_batches`."""
    length = min(SEQ_LENGTH, model.max_length)
    return token_batches(model.tokenizer, text, sequences=sequences, seq_length=length, seed=seed)


def _whole_words(text: str, start: int, stop: int) -> str:
    """A piece of a text without the words that its ends cut in two."""
    first = text.find(" ", start, stop) + 1 if start > 0 else start
    last = text.rfind(" ", start, stop) if stop < len(text) else stop
    # a script without spaces has nothing to cut
    return text[max(first, start) : last if last > first else stop]


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


@dataclass(frozen=True)
class RangeRule:
    """How values become a range.

    Attributes:
        method: `minmax` over all batches, or `running_minmax`: new = momentum * old + (1 - momentum) * batch.
        percentile: upper tail in percent, the lower is 100 minus it; 100 means the extremes.
        momentum: weight of the old range; the first batch is taken whole.

    Source: the estimator of Bondarenko et al. 2023, https://arxiv.org/abs/2306.12929 (numpy's linear percentiles over
    the whole batch). Ours watches the float model rather than one that is already rounding, so that every execution
    of a scheme has the same ranges.
    """

    method: Literal["minmax", "running_minmax"] = "minmax"
    percentile: float = 100.0
    momentum: float = 0.9

    def merge(self, old: Range | None, new: Range) -> Range:
        """The range after one more batch."""
        if old is None:
            return new
        if self.method == "minmax":
            return Range(min(old.low, new.low), max(old.high, new.high))
        rest = 1.0 - self.momentum
        return Range(self.momentum * old.low + rest * new.low, self.momentum * old.high + rest * new.high)


class RangeWatch:
    """Ranges of named tensors over batches; a context manager whose exit removes every hook it placed."""

    def __init__(self, module: nn.Module, rule: RangeRule) -> None:
        self.module, self.rule = module, rule
        self.ranges: dict[str, Range] = {}
        self._tails: dict[str, Tails] = {}
        self._last: tuple[Tensor, Tails] | None = None
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> "RangeWatch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._last = None
        while self._undo:
            self._undo.pop()()

    def on_exit(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the watch ends (for what is watched by other means than hooks)."""
        self._undo.append(undo)

    def input(self, path: str) -> None:
        """Watch the first argument of a module, under the name `path:input`."""

        def hook(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            self.observe(f"{path}:input", first_tensor(arguments, options))

        handle = self.module.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)
        self._removed_at_exit(handle)

    def output(self, path: str) -> None:
        """Watch the first output of a module, under the name `path:output`."""

        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            self.observe(f"{path}:output", output[0] if isinstance(output, tuple) else output)

        self._removed_at_exit(self.module.get_submodule(path).register_forward_hook(hook))

    def _removed_at_exit(self, handle: RemovableHandle) -> None:
        self._undo.append(handle.remove)

    def observe(self, name: str, values: Float[Tensor, "..."], total: int | None = None) -> None:
        """Take in a tensor, or one piece of a tensor that has `total` values."""
        if total is None and self._last is not None and self._last[0] is values:
            # query, key and value projections read one and the same tensor: looked at once
            self._tails[name] = self._last[1]
            return
        tails = self._tails.get(name)
        if tails is None:
            tails = self._tails[name] = Tails(self.rule.percentile, total or values.numel())
        tails.add(values)
        if total is None:
            self._last = (values, tails)

    def close_batch(self) -> None:
        """Turn what was seen since the last call into the running ranges."""
        self._last = None
        for name, tails in self._tails.items():
            seen = tails.range()
            if not (math.isfinite(seen.low) and math.isfinite(seen.high)):
                raise QuantizationError(f"calibration: {name} is not finite")
            self.ranges[name] = self.rule.merge(self.ranges.get(name), seen)
        self._tails.clear()


def first_tensor(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """First positional argument of a module, or its `hidden_states`."""
    return arguments[0] if arguments else options["hidden_states"]


def static_ranges(
    model: LanguageModel,
    batches: Iterable[Int[Tensor, "_batch _seq"]],
    rule: RangeRule,
    *,
    inputs: Iterable[str] = (),
    extra: Callable[[RangeWatch], None] | None = None,
) -> dict[str, Range]:
    """Ranges of activations over batches, streamed: memory does not grow with their number, hooks are gone afterwards.

    Args:
        model: the float model; only its body runs.
        batches: token ids.
        rule: how values become a range.
        inputs: module paths whose first argument is watched, stored as `path:input`.
        extra: places further watches (of attention, say).

    Raises:
        QuantizationError: there is no batch, or a watched tensor is not finite.
    """
    with RangeWatch(model.module, rule) as watch, torch.no_grad():
        for path in inputs:
            watch.input(path)
        if extra is not None:
            extra(watch)
        for ids in batches:
            model.body(input_ids=ids.to(model.device), use_cache=False)
            watch.close_batch()
    if not watch.ranges:
        raise QuantizationError("static ranges need calibration batches, and there are none")
    return watch.ranges
