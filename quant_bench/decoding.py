"""Greedy decoding of many prompts without padding: each keeps its own keys and values, new ones join as others end."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import RepetitionPenaltyLogitsProcessor

from quant_bench.errors import NotApplicable
from quant_bench.mechanisms.install import shape_of
from quant_bench.model import LanguageModel
from quant_bench.packing import Memory, Segment, packed_hidden
from quant_bench.scoring import logits

Reason = Literal["eos", "stop", "length"]

ROW_TOKENS = 1024
MEMORY_BYTES = 1 << 30
MOST_STREAMS = 32

# generation settings that change which token is chosen, with the values that leave it alone
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "bad_words_ids": (None, []),
    "sequence_bias": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1, 1.0),
    "stop_strings": (None, []),
    "penalty_alpha": (None, 0, 0.0),
    "watermarking_config": (None,),
}


@dataclass(frozen=True)
class Rules:
    """How tokens are chosen and when a text ends.

    Attributes:
        eos: token ids that end a text.
        stop: stop strings, each with the number of last tokens in which it is looked for.
        repetition_penalty: 1.0 for none.
    """

    eos: frozenset[int]
    stop: tuple[tuple[str, int], ...]
    repetition_penalty: float = 1.0


@dataclass(eq=False)
class Stream:
    """One text being written.

    Attributes:
        prompt: token ids, the shared prefix included.
        most: new tokens that it may have.
        rules: how they are chosen.
        new: what was generated, the end-of-sequence token included.
        reason: why it ended; None while it goes on.
    """

    prompt: Sequence[int]
    most: int
    rules: Rules
    new: list[int] = field(default_factory=list)
    reason: Reason | None = None
    memory: Memory | None = None


def rules_of(model: LanguageModel, stop: Sequence[str], asked: dict[str, Any]) -> Rules:
    """Rules that transformers' `generate` would follow: the model's own generation settings under those asked for.

    A stop string is looked for in as many last tokens as it has itself, and two more, as lm-eval does.

    Raises:
        NotApplicable: they ask for more than greedy decoding.
    """
    own = getattr(model.module, "generation_config", None) or model.config

    def setting(name: str) -> Any:
        return asked[name] if name in asked else getattr(own, name, None)

    if asked.get("do_sample"):
        raise NotApplicable("the task samples (do_sample=True); generation here is greedy, so that it can be repeated")
    for name, neutral in _NEUTRAL.items():
        if (value := setting(name)) not in neutral:
            raise NotApplicable(f"generation setting {name}={value!r} is not supported: only greedy decoding is")
    ends = setting("eos_token_id")
    eos = frozenset(ends if isinstance(ends, list | tuple) else [] if ends is None else [ends])
    lengths = [(text, len(model.tokenizer.encode(text, add_special_tokens=False)) + 2) for text in stop]
    return Rules(eos, tuple(lengths), float(setting("repetition_penalty") or 1.0))


def bytes_per_token(model: LanguageModel) -> int:
    """Bytes of keys and values that one token keeps over all layers."""
    shape = shape_of(model)
    size = next((x.element_size() for x in model.tensors() if x.is_floating_point()), 4)
    return 2 * len(model.layout.layers) * shape.kv_heads * shape.dim * size


def streams_at_once(model: LanguageModel, streams: Sequence[Stream], batch_size: int | Literal["auto"]) -> int:
    """How many texts are written at once; one where tokens of other texts would change a score."""
    if not model.token_independent:
        return 1
    if batch_size != "auto":
        return max(1, batch_size)
    longest = max(len(stream.prompt) + stream.most for stream in streams)
    return max(1, min(MOST_STREAMS, MEMORY_BYTES // (longest * bytes_per_token(model))))


@torch.inference_mode()
def decode(
    model: LanguageModel,
    streams: Sequence[Stream],
    *,
    prefix: Memory | None = None,
    at_once: int = 1,
    ended: Callable[[], None] = lambda: None,
) -> None:
    """Write all texts, in place.

    One row a step: the next token of every running text and, where there is room, the whole prompts of new ones.

    Args:
        model: float or quantized.
        streams: texts to write; longest prompts should come first.
        prefix: keys and values of the tokens with which every prompt starts.
        at_once: texts that run at the same time.
        ended: called once a finished text.
    """
    waiting, running = deque(streams), list[Stream]()
    while waiting or running:
        segments = [Segment(stream.new[-1:], stream.memory, keep=True) for stream in running]
        fresh = _admit(waiting, at_once - len(running), ROW_TOKENS - len(running), prefix)
        running += [stream for stream, _ in fresh]
        segments += [segment for _, segment in fresh]
        hidden = packed_hidden(model, segments)
        last = torch.tensor([len(segment.tokens) for segment in segments], device=hidden.device).cumsum(0) - 1
        for stream, row in zip(running, logits(model, hidden[last]), strict=True):
            stream.new.append(_choose(stream, row))
            stream.reason = _reason(model, stream)
            if stream.reason is not None:
                stream.memory = None
                ended()
        running = [stream for stream in running if stream.reason is None]


def _admit(waiting: deque[Stream], room: int, budget: int, prefix: Memory | None) -> list[tuple[Stream, Segment]]:
    """Prompts that join now: as many as there is room for, at least one however long."""
    shared = 0 if prefix is None else prefix.length
    fresh: list[tuple[Stream, Segment]] = []
    while waiting and len(fresh) < room and (not fresh or len(waiting[0].prompt) - shared <= budget):
        stream = waiting.popleft()
        # the last token chosen is never fed, so it needs no room
        stream.memory = Memory(len(stream.prompt) + stream.most - 1, prefix)
        fresh.append((stream, Segment(stream.prompt[shared:], stream.memory, keep=True)))
        budget -= len(stream.prompt) - shared
    return fresh


def _choose(stream: Stream, row: torch.Tensor) -> int:
    if stream.rules.repetition_penalty != 1.0:
        seen = torch.tensor([[*stream.prompt, *stream.new]], device=row.device)
        row = RepetitionPenaltyLogitsProcessor(stream.rules.repetition_penalty)(seen, row[None].clone())[0]
    return int(row.argmax())


def _reason(model: LanguageModel, stream: Stream) -> Reason | None:
    if stream.new[-1] in stream.rules.eos:
        return "eos"
    if any(text in model.tokenizer.decode(stream.new[-count:]) for text, count in stream.rules.stop):
        return "stop"
    return "length" if len(stream.new) >= stream.most else None
