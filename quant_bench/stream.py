"""Token streams: a text joined, tokenized with exactly the prefix asked for, and counted in words and bytes."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from quant_bench.errors import NotApplicable

Prefix = Literal["default", "none", "bos", "eos"]


@dataclass(frozen=True)
class Stream:
    """Tokens of a text.

    Attributes:
        ids: int64, one a token.
        words: how many white-space words begin in each token, or None when the tokenizer tells no positions.
        bytes: UTF-8 bytes of the text from each token's start to the next one's, or None likewise.
        sha256: digest of the text.
    """

    ids: np.ndarray
    words: np.ndarray | None
    bytes: np.ndarray | None
    sha256: str


def joined(rows: Sequence[str]) -> str:
    """Rows joined by two newlines, the text of conventions P1 and P2.

    Source: Frantar et al. 2022 (GPTQ), https://github.com/IST-DASLab/gptq, function `get_wikitext2`.
    """
    return "\n\n".join(rows)


def digest(texts: Sequence[str]) -> str:
    """SHA-256 of the UTF-8 text, or of texts parted by a zero byte."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def prefix_ids(tokenizer: Any, prefix: Prefix) -> list[int]:
    """Tokens that stand before a text.

    Args:
        tokenizer: a transformers tokenizer.
        prefix: `default` is what the tokenizer itself puts there (one beginning-of-sequence token, or nothing).

    Raises:
        NotApplicable: the tokenizer has no such token.
    """
    if prefix == "none":
        return []
    if prefix == "default":
        plain = _without_bos(tokenizer, tokenizer("a", add_special_tokens=False)["input_ids"])
        full = list(tokenizer("a")["input_ids"])
        starts = (index for index in range(len(full)) if full[index : index + len(plain)] == plain)
        before = full[: next(starts, 0)]
        return [tokenizer.bos_token_id, *_without_bos(tokenizer, before)] if _has_bos(tokenizer, before) else before
    token = getattr(tokenizer, f"{prefix}_token_id", None)
    if token is None:
        raise NotApplicable(f"prefix={prefix}: this tokenizer has no {prefix.upper()} token")
    return [int(token)]


def prefix_name(tokenizer: Any, ids: Sequence[int]) -> str:
    """Name of a prefix in force, for labels: `none`, `bos`, `eos`, or the token ids."""
    if not ids:
        return "none"
    for name in ("bos", "eos"):
        if list(ids) == [getattr(tokenizer, f"{name}_token_id", None)]:
            return name
    return "+".join(str(token) for token in ids)


def stream_of(tokenizer: Any, text: str, prefix: Sequence[int]) -> Stream:
    """Tokenize one text behind a prefix.

    Whatever the tokenizer adds on its own is left out, and beginning-of-sequence tokens at the start of the text are
    dropped, so the stream starts with the prefix and nothing else of that kind.
    """
    ids, words, sizes = _encode(tokenizer, text, prefix)
    return Stream(ids, words, sizes, digest([text]))


def block_stream(tokenizer: Any, documents: Sequence[str], prefix: Sequence[int], length: int) -> Stream:
    """Tokens of documents, each behind the prefix, cut to whole blocks after every 1,000 documents.

    Source: `group_texts` of transformers' run_clm.py over map's default batch of 1,000, as the outlier papers' scripts
    use it, https://github.com/Qualcomm-AI-research/outlier-free-transformers.
    """
    parts: list[tuple[np.ndarray, np.ndarray | None, np.ndarray | None]] = []
    for start in range(0, len(documents), 1000):
        encoded = [_encode(tokenizer, document, prefix) for document in documents[start : start + 1000]]
        ids = np.concatenate([part[0] for part in encoded])
        keep = len(ids) // length * length
        words, sizes = _concatenate([part[1] for part in encoded]), _concatenate([part[2] for part in encoded])
        parts.append((ids[:keep], None if words is None else words[:keep], None if sizes is None else sizes[:keep]))
    ids = np.concatenate([part[0] for part in parts])
    return Stream(ids, _concatenate([p[1] for p in parts]), _concatenate([p[2] for p in parts]), digest(documents))


def _concatenate(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if len(known) == len(parts) else None


def _encode(
    tokenizer: Any, text: str, prefix: Sequence[int]
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    places = bool(getattr(tokenizer, "is_fast", False))
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=places, verbose=False)
    ids = _without_bos(tokenizer, found["input_ids"])
    stream = np.array([*prefix, *ids], np.int64)
    if not places:
        return stream, None, None
    starts = np.array([start for start, _ in found["offset_mapping"]], np.int64)[len(found["input_ids"]) - len(ids) :]
    starts[:1] = 0
    # each token owns the text from its start to the next one's, so that every word and byte counts once
    edges = np.append(starts, len(text))
    words, sizes = (np.diff(_running(text, count)[edges]) for count in (_word_starts, _byte_counts))
    nothing = np.zeros(len(prefix), np.int64)
    return stream, np.concatenate((nothing, words)), np.concatenate((nothing, sizes))


def _running(text: str, count: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Count over the first n characters, for n from 0 to all."""
    characters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    return np.concatenate(([0], np.cumsum(count(characters))))


def _word_starts(characters: np.ndarray) -> np.ndarray:
    kinds, places = np.unique(characters, return_inverse=True)
    space = np.array([chr(kind).isspace() for kind in kinds], bool)[places]
    return ~space & np.concatenate(([True], space))[: len(space)]


def _byte_counts(characters: np.ndarray) -> np.ndarray:
    return 1 + (characters > 0x7F).astype(np.int64) + (characters > 0x7FF) + (characters > 0xFFFF)


def _has_bos(tokenizer: Any, ids: Sequence[int]) -> bool:
    return tokenizer.bos_token_id is not None and len(ids) > 0 and ids[0] == tokenizer.bos_token_id


def _without_bos(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    left = 0
    while _has_bos(tokenizer, ids[left : left + 1]):
        left += 1
    return list(ids[left:])
