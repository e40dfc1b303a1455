"""Texts to score, laid out in packed rows: common beginnings once, the head only where a token is scored."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from quant_bench.model import LanguageModel
from quant_bench.packing import Memory, Segment, packed_hidden
from quant_bench.scoring import target_log_probs

ROW_TOKENS = 1024
# 128 MiB of float32 logits at a time: larger products are a few percent faster, and no longer fit a large vocabulary
HEAD_LOGITS = 1 << 25
# shorter shared beginnings are not worth a piece of attention of their own
SHORTEST_SHARED = 8
SHORTEST_PREFIX = 32
# a common prefix is cut to a multiple of this, so that a few items more or less seldom move the cut
PREFIX_STEP = 16


class Text(NamedTuple):
    """What the model reads and which tokens are scored: the targets are the next tokens at the last positions."""

    tokens: tuple[int, ...]
    targets: tuple[int, ...]

    @property
    def context(self) -> tuple[int, ...]:
        """Tokens up to the position that predicts the first target."""
        return self.tokens[: len(self.tokens) - len(self.targets) + 1]


class Answer(NamedTuple):
    """Score of a text.

    Attributes:
        place: of the text among those asked.
        log_likelihood: in nats, over all targets.
        greedy: whether greedy decoding gives just these targets.
        hidden: final hidden state at the end of the context.
        argmax: most probable token there.
    """

    place: int
    log_likelihood: float
    greedy: bool
    hidden: Float[Tensor, "position width"]
    argmax: Int64[Tensor, " position"]


class _Group(NamedTuple):
    """Texts, with their places, that share their first `shared` tokens; 0 for a text alone."""

    shared: int
    members: list[tuple[int, Text]]

    def size(self, prefix: int) -> int:
        """Tokens to compute behind a prefix."""
        base = max(self.shared, prefix)
        return base - prefix + sum(len(text.tokens) - base for _, text in self.members)


def shared_prefix(
    model: LanguageModel, beginnings: Sequence[tuple[int, ...]], memo: dict[tuple[int, ...], Memory]
) -> Memory | None:
    """Keys and values of the longest beginning that all have in common, where it is worth a pass of its own.

    Args:
        model: float or quantized.
        beginnings: of each text, the tokens that may be shared.
        memo: prefixes already computed with this model; a new one is added.
    """
    first, last = min(beginnings), max(beginnings)
    length = _common(first, last)
    tokens = first[: length - length % PREFIX_STEP]
    if first == last or len(tokens) < SHORTEST_PREFIX:
        return None
    if tokens not in memo:
        memory = Memory(len(tokens))
        packed_hidden(model, [Segment(tokens, memory, keep=True)])
        memo[tokens] = memory
    return memo[tokens]


def score(
    model: LanguageModel,
    texts: Sequence[Text],
    *,
    share: bool,
    prefix: Memory | None,
    batch_size: int | Literal["auto"],
) -> Iterator[list[Answer]]:
    """Score texts, longest first, a row at a time.

    Args:
        model: float or quantized; every text runs alone unless it is `token_independent`.
        texts: what to score.
        share: compute what texts of one context share only once.
        prefix: tokens with which every text's context starts, not reaching its last token.
        batch_size: contexts a row at most.
    """
    base = 0 if prefix is None else prefix.length
    groups = _grouped(texts, share and model.token_independent)
    most = 1 if not model.token_independent else len(groups) if batch_size == "auto" else batch_size
    chunk = max(1, HEAD_LOGITS // int(model.config.get_text_config().vocab_size))
    for row in _rows(groups, base, most):
        segments, places = _layout(row, prefix)
        members = [member for group in row for member in group.members]
        hidden = packed_hidden(model, segments)[torch.tensor(places, device=model.device)]
        targets = torch.tensor([target for _, text in members for target in text.targets], device=model.device)
        scored = target_log_probs(model, hidden, targets, chunk=chunk)
        answers, start = [], 0
        for index, text in members:
            piece, first = slice(start, start + len(text.targets)), slice(start, start + 1)
            total, greedy = float(scored.log_probs[piece].sum()), bool(scored.greedy[piece].all())
            answers.append(Answer(index, total, greedy, hidden[first], scored.argmax[first]))
            start = piece.stop
        yield answers


def _rows(groups: list[_Group], prefix: int, most: int) -> list[list[_Group]]:
    """Rows of at most ROW_TOKENS tokens (one group however long) and at most `most` groups."""
    rows: list[list[_Group]] = []
    room = 0
    for group in sorted(groups, key=lambda group: -group.size(prefix)):
        size = group.size(prefix)
        if not rows or size > room or len(rows[-1]) >= most:
            rows.append([])
            room = ROW_TOKENS
        rows[-1].append(group)
        room -= size
    return rows


def _layout(row: list[_Group], prefix: Memory | None) -> tuple[list[Segment], list[int]]:
    """Segments of a row, and where in it each scored token's prediction stands."""
    segments: list[Segment] = []
    places: list[int] = []
    base = 0 if prefix is None else prefix.length
    start = 0
    for group in row:
        above: int | Memory | None = prefix
        # token `at` of a text stands at `trunk + at` while it is shared, else at `start + at - split`
        trunk, split = start - base, max(group.shared, base)
        if split > base:
            above = len(segments)
            segments.append(Segment(group.members[0][1].tokens[base:split], prefix))
            start += split - base
        for _, text in group.members:
            scored = range(len(text.tokens) - len(text.targets), len(text.tokens))
            places += [trunk + at if at < split else start + at - split for at in scored]
            if len(text.tokens) > split:
                segments.append(Segment(text.tokens[split:], above))
                start += len(text.tokens) - split
    return segments, places


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(left), len(right)))


def _grouped(texts: Sequence[Text], share: bool) -> list[_Group]:
    """Texts of one context stand together, up to a row; where they part depends on themselves alone."""
    alone = [_Group(0, [(index, text)]) for index, text in enumerate(texts)]
    if not share:
        return alone
    groups: list[_Group] = []
    order = sorted(enumerate(texts), key=lambda pair: pair[1].context)
    for _, found in groupby(order, key=lambda pair: pair[1].context):
        members = list(found)
        ends = [text.tokens for _, text in members]
        shared = _common(min(ends), max(ends))
        if len(members) == 1 or shared < SHORTEST_SHARED:
            groups += [alone[index] for index, _ in members]
            continue
        groups.append(_Group(shared, []))
        for member in members:
            if groups[-1].members and groups[-1].size(0) + len(member[1].tokens) - shared > ROW_TOKENS:
                groups.append(_Group(shared, []))
            groups[-1].members.append(member)
    return groups
