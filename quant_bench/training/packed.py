"""Packed: a text tokenized once into one array of ids, with a held-out part that no training sees."""

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from quant_bench.cache import folder_made_whole, listing_sha256, write_atomically
from quant_bench.data import DataSource
from quant_bench.errors import Blocked, DataError
from quant_bench.progress import ProgressReport
from quant_bench.samples import digest_of
from quant_bench.training.documents import documents, origin
from quant_bench.training.tiers import TIERS, Tier

END = "<|endoftext|>"
# goes up when the same text would be packed to something else
_PACKING = 1
_NOTE = "data.json"
_TRAIN, _HELD_OUT = "train.bin", "held_out.bin"
# one document in so many is held out
_HELD_OUT_ONE_IN = 32
# what a BPE learns its merges from, in characters
_BPE_CHARACTERS = 20_000_000
_AT_ONCE = 256

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Packed:
    """A packed text.

    Attributes:
        folder: where it lies, with its tokenizer.
        train: token ids; every document follows an end mark.
        held_out: likewise, of other documents.
        sha256: digest of both and of the tokenizer.
        note: counts, for the record of a training.
    """

    folder: Path
    train: np.ndarray
    held_out: np.ndarray
    sha256: str
    note: dict[str, Any]

    def tokenizer(self) -> Any:
        """The tokenizer of the ids (`PreTrainedTokenizerFast`)."""
        return PreTrainedTokenizerFast.from_pretrained(self.folder)


def packed(tier: Tier, data: DataSource, cache: Path, progress: ProgressReport) -> Packed:
    """The text of a tier, packed on first use and then found again.

    Which documents are held out follows from a digest of each, so neither their order nor their number can move one
    from one side to the other, and two equal documents are on one side.

    Args:
        tier: whose text, tokenizer and budget.
        data: where the text comes from.
        cache: cache folder.
        progress: called as progress(description, done, total).

    Raises:
        Blocked: the text must be fetched and cannot be.
        DataError: it is too short, or the packed files have changed.
    """
    folder = folder_of(tier, data, cache)
    if not folder.is_dir():
        log.info("packing %s into %s (once)", tier.text, folder)
        with folder_made_whole(folder) as work:
            _pack(tier, data, cache, work, progress)
    try:
        note = json.loads((folder / _NOTE).read_text(encoding="utf8"))
        whole = _sha256(folder, cache) == note["sha256"]
    except (OSError, ValueError, KeyError):
        whole = False
    if not whole:
        raise DataError(f"{folder} has changed since it was packed; delete the folder and it is made again")
    arrays = [np.memmap(folder / name, _dtype(tier.vocabulary), "r") for name in (_TRAIN, _HELD_OUT)]
    return Packed(folder, arrays[0], arrays[1], note["sha256"], note)


def folder_of(tier: Tier, data: DataSource, cache: Path) -> Path:
    """Where the packed text of a tier lies, or will; a shorter run reads the same packing as the tier's own."""
    parts = {
        "packing": _PACKING,
        "text": tier.text,
        "origin": origin(tier.text, data),
        "tokenizer": tier.base or tier.tokenizer,
        "vocabulary": tier.vocabulary,
        "tokens": _budget(tier),
        "held_out": tier.held_out * tier.context,
    }
    return cache / "training" / "data" / digest_of(parts)


def _budget(tier: Tier) -> int:
    return max(tier.tokens, TIERS[tier.name].tokens)


def _dtype(vocabulary: int) -> "np.dtype[Any]":
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


def _sha256(folder: Path, cache: Path | None) -> str:
    return listing_sha256([folder / name for name in (_TRAIN, _HELD_OUT, "tokenizer.json")], cache)


def _pack(tier: Tier, data: DataSource, cache: Path, work: Path, progress: ProgressReport) -> None:
    budget = _budget(tier)
    tokenizer = _tokenizer(tier, data, cache)
    if len(tokenizer) > tier.vocabulary:
        raise DataError(f"the tokenizer has {len(tokenizer)} tokens, tier {tier.name} only {tier.vocabulary} rows")
    tokenizer.save_pretrained(work)
    wanted = {_TRAIN: budget, _HELD_OUT: tier.held_out * tier.context}
    found = dict.fromkeys(wanted, 0)
    count = 0
    with (work / _TRAIN).open("wb") as train, (work / _HELD_OUT).open("wb") as held_out:
        files: dict[str, BinaryIO] = {_TRAIN: train, _HELD_OUT: held_out}
        stream = documents(tier.text, data)
        while some := list(islice(stream, _AT_ONCE)):
            count += len(some)
            for name, ids in _encoded(tokenizer, some, {name for name in wanted if found[name] < wanted[name]}):
                kept = np.array(ids[: wanted[name] - found[name]], _dtype(tier.vocabulary))
                files[name].write(kept.tobytes())
                found[name] += len(kept)
            progress(f"packing {tier.text}", found[_TRAIN], budget)
            if all(found[name] == wanted[name] for name in wanted):
                break
    if min(found.values()) < tier.batch * tier.context or found[_HELD_OUT] < tier.context:
        raise DataError(
            f"the text {tier.text!r} is too short: {count} documents give {found[_TRAIN]} tokens to train on and "
            f"{found[_HELD_OUT]} to hold out; a step takes {tier.tokens_a_step}"
        )
    note = {"text": tier.text, "documents": count, "train_tokens": found[_TRAIN], "held_out_tokens": found[_HELD_OUT]}
    content = json.dumps(note | {"sha256": _sha256(work, None)}, sort_keys=True, indent=1) + "\n"
    write_atomically(work / _NOTE, content.encode())


def _encoded(tokenizer: Any, some: list[str], open_parts: set[str]) -> Iterator[tuple[str, list[int]]]:
    """(file, ids behind an end mark) of each document whose file still has room."""
    placed = [(_HELD_OUT if held_out(document) else _TRAIN, document) for document in some]
    placed = [(name, document) for name, document in placed if name in open_parts]
    # a base that knows no such mark ends documents as it ends its answers
    end = tokenizer.get_vocab().get(END, tokenizer.eos_token_id)
    encodings = tokenizer.backend_tokenizer.encode_batch([text for _, text in placed], add_special_tokens=False)
    for (name, _), encoding in zip(placed, encodings, strict=True):
        yield name, [end, *encoding.ids]


def held_out(document: str) -> bool:
    """Whether a document belongs to the held-out part."""
    return int.from_bytes(hashlib.sha256(document.encode()).digest()[:4], "big") % _HELD_OUT_ONE_IN == 0


def _tokenizer(tier: Tier, data: DataSource, cache: Path) -> Any:
    match tier.tokenizer:
        case "bpe":
            return _bpe(tier, data)
        case "gpt2":
            return _gpt2(data)
        case "base":
            from quant_bench.models import LoadOptions, load_model

            return load_model(tier.base, LoadOptions(cache=cache)).tokenizer
    raise AssertionError(f"tier {tier.name} has no text to pack")


def _bpe(tier: Tier, data: DataSource) -> Any:
    """A byte-level BPE with GPT-2's word split, trained on the beginning of what is trained on.

    Source: Sennrich et al. 2016, https://arxiv.org/abs/1508.07909; bytes as in GPT-2.
    """

    def beginning() -> Iterator[str]:
        left = _BPE_CHARACTERS
        for document in documents(tier.text, data):
            if left <= 0:
                return
            if not held_out(document):
                left -= len(document)
                yield document

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=tier.vocabulary, special_tokens=[END], initial_alphabet=sorted(alphabet), show_progress=False
    )
    words.train_from_iterator(beginning(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token=END, eos_token=END)


def _gpt2(data: DataSource) -> Any:
    """GPT-2's tokenizer, from the mirror or the hub."""
    from transformers import AutoTokenizer, GPT2TokenizerFast

    if data.mirror is not None:
        vocabulary, merges = (data.mirror.read(f"tokenizer_gpt2/{name}") for name in ("vocab.json", "merges.txt"))
        if vocabulary is not None and merges is not None:
            # the first line of merges.txt is its version
            pairs = [tuple(line.split(" ")) for line in merges.split("\n")[1:] if line]
            return GPT2TokenizerFast(vocab=json.loads(vocabulary), merges=pairs)
    try:
        return AutoTokenizer.from_pretrained("openai-community/gpt2")
    except OSError as error:
        raise Blocked(
            "wanted: tokenizer_gpt2/vocab.json and tokenizer_gpt2/merges.txt in a folder named by --data DIR, or the "
            f"hub's openai-community/gpt2 ({error})"
        ) from error
