"""The lm-eval model: log-likelihoods, rolling log-likelihoods and greedy generation on packed forward passes.

Texts, truncation, prefixes and stop rules are lm-eval's own (`TemplateLM._encode_pair` and `lm_eval.models.utils`), so
per-item results equal its plain `hf` model; only what is computed how often differs.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from quant_bench import decoding
from quant_bench.errors import DataError, NotApplicable
from quant_bench.model import LanguageModel
from quant_bench.packing import Memory
from quant_bench.scoring import logits
from quant_bench.task import Context
from quant_bench.texts import Answer, Text, score, shared_prefix

logger = logging.getLogger(__name__)


class Generation(NamedTuple):
    """A generated text after lm-eval's cuts, why it ended, and its number of tokens."""

    text: str
    reason: decoding.Reason
    tokens: int


class HarnessLM(TemplateLM):  # type: ignore[misc]
    """A quant-bench model as lm-eval sees it.

    Args:
        model: float or quantized.
        context: probe, memos, batch size and progress; None for none of them.
        share: compute common beginnings once. Never done where a token's values depend on other tokens.
    """

    def __init__(self, model: LanguageModel, context: Context | None = None, *, share: bool = True) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = model.tokenizer
        self.generations: list[Generation] = []
        self._context = context
        self._batch = "auto" if context is None else context.batch_size
        self._share = share and model.token_independent
        memo = {} if context is None else context.model_memo
        self._encoded = memo.setdefault(("encodings", model.identity.tokenizer_sha256), {})
        kept = {} if context is None else context.pass_memo
        self._prefixes: dict[tuple[int, ...], Memory] = kept.setdefault("prefixes", {})

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: beginning of sequence, else end of sequence."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def max_length(self) -> int:
        """Longest input in tokens."""
        return self.model.max_length

    @property
    def max_gen_toks(self) -> int:
        """New tokens where a task says nothing."""
        return 256

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return str(self.tokenizer.apply_chat_template(chat_history, tokenize=False, **options))

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; the tokenizer adds its special tokens unless the text starts with the prefix token already."""
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **options))

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        texts = [self._once("pair", request.args, self._pair) for request in requests]
        asked = [request.doc_id if request.idx == 0 else None for request in requests]
        results = self._score(texts, asked, share=self._share)
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, result)
        return results

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        texts = [self._text(context, continuation) for _, context, continuation in requests]
        return self._score(texts, [None] * len(texts), share=self._share)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows = [self._once("rolling", request.args, self._windows) for request in requests]
        texts = [text for document in windows for text in document]
        scores = iter(self._score(texts, [None] * len(texts), share=False))
        totals = [sum(next(scores)[0] for _ in document) for document in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy texts; how each ended stays in `generations`, in the order of the requests."""
        plans = [self._stream(*request.args) for request in requests]
        streams = [stream for stream, _ in plans]
        order = sorted(range(len(streams)), key=lambda index: (-len(streams[index].prompt), index))
        prefix = self._prefix([tuple(stream.prompt[:-1]) for stream in streams])
        report, done = self._reporter("generating", len(streams)), [0]

        def ended() -> None:
            done[0] += 1
            report(done[0])

        at_once = decoding.streams_at_once(self.model, streams, self._batch)
        decoding.decode(self.model, [streams[i] for i in order], prefix=prefix, at_once=at_once, ended=ended)
        self.generations = [self._generation(stream, until) for stream, until in plans]
        for request, generation in zip(requests, self.generations, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, generation.text)
        return [generation.text for generation in self.generations]

    def _once(self, kind: str, arguments: tuple[str, ...], make: Callable[..., Any]) -> Any:
        """Requests are tokenized once for all quantizers of a model."""
        key = (kind, *arguments, self.max_length)
        if key not in self._encoded:
            self._encoded[key] = make(*arguments)
        return self._encoded[key]

    def _text(self, context: Sequence[int], continuation: Sequence[int]) -> Text:
        if not 0 < len(continuation) <= self.max_length:
            raise NotApplicable(
                f"a continuation of {len(continuation)} tokens does not fit: 1 to {self.max_length} can be scored"
            )
        kept = (*context, *continuation)[-(self.max_length + 1) :]
        if len(kept) < len(context) + len(continuation):
            logger.warning("a text of %d tokens was cut from the left", len(context) + len(continuation))
        return Text(kept[:-1], tuple(continuation))

    def _pair(self, context: str, continuation: str) -> Text:
        if context:
            return self._text(*self._encode_pair(context, continuation))
        ids = self.tok_encode(continuation, add_special_tokens=False)
        if not ids:
            raise DataError(f"the continuation {continuation!r} has no token to score")
        # a text that brings the prefix token itself is not given a second one
        return (
            self._text(ids[:1], ids[1:]) if ids[0] == self.prefix_token_id else self._text([self.prefix_token_id], ids)
        )

    def _windows(self, string: str) -> list[Text]:
        options = {"prefix_token": self.prefix_token_id, "max_seq_len": self.max_length, "context_len": 1}
        windows = get_rolling_token_windows(token_list=self.tok_encode(string), **options)
        return [self._text(*make_disjoint_window(window)) for window in windows]

    def _stream(self, prompt: str, asked: dict[str, Any]) -> tuple[decoding.Stream, list[str]]:
        options = dict(normalize_gen_kwargs(asked, self.max_gen_toks))
        eos = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        until = handle_stop_sequences(options.pop("until", None), eos=eos)
        most = int(options.pop("max_gen_toks"))
        if not 0 < most < self.max_length:
            raise NotApplicable(f"{most} new tokens do not fit into a context of {self.max_length}")
        ids = self._once("prompt", (prompt,), self._prompt)[-(self.max_length - most) :]
        most = int(options.pop("max_length", len(ids) + most)) - len(ids)
        return decoding.Stream(ids, most, decoding.rules_of(self.model, until, options)), until

    def _prompt(self, prompt: str) -> list[int]:
        begun = has_bos_prefix(prompt, getattr(self.tokenizer, "bos_token", None))
        return list(self.tokenizer(prompt, **({"add_special_tokens": False} if begun else {}))["input_ids"])

    def _generation(self, stream: decoding.Stream, until: list[str]) -> Generation:
        written = self.tokenizer.decode(stream.new, skip_special_tokens=True)
        text = postprocess_generated_text(generation=written, stop=until, think_end_token=None)
        assert stream.reason is not None
        return Generation(text, "stop" if len(text) < len(written) else stream.reason, len(stream.new))

    def _prefix(self, beginnings: Sequence[tuple[int, ...]]) -> Memory | None:
        return shared_prefix(self.model, beginnings, self._prefixes) if self._share and beginnings else None

    def _score(self, texts: Sequence[Text], asked: Sequence[int | None], *, share: bool) -> list[tuple[float, bool]]:
        """Score all texts; `asked` names the item of which a text's distribution is offered to the probe."""
        prefix = self._prefix([text.context[:-1] for text in texts]) if share else None
        results: dict[int, tuple[float, bool]] = {}
        report = self._reporter("scoring", len(texts))
        for row in score(self.model, texts, share=share, prefix=prefix, batch_size=self._batch):
            for answer in row:
                results[answer.place] = answer.log_likelihood, answer.greedy
                self._offer(asked[answer.place], answer)
            report(len(results))
        return [results[index] for index in range(len(texts))]

    def _offer(self, item: int | None, answer: Answer) -> None:
        """Hand the probe an item's next-token distribution at the end of its context."""
        if item is None or self._context is None:
            return
        self._context.probe.offer_argmax(item, answer.argmax)
        if self._context.probe.wants(item):
            self._context.probe.offer(item, logits(self.model, answer.hidden))

    def _reporter(self, description: str, total: int) -> Callable[[int], None]:
        if self._context is None:
            return lambda done: None
        progress = self._context.progress
        return lambda done: progress(description, done, total)
