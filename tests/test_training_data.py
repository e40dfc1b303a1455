"""What a training reads: tiers by name, Bigram-Backcopy against its own rule, packed texts and what is held out."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from quant_bench.data import DataSource
from quant_bench.errors import Blocked, DataError, SpecError
from quant_bench.training.backcopy import BLOCK, Backcopy
from quant_bench.training.documents import SOURCES, documents
from quant_bench.training.material import TextMaterial, material_of
from quant_bench.training.packed import END, held_out, packed
from quant_bench.training.tiers import TIERS, Tier, changed, is_tier, tier_of

TEXT = "the cat sat on the mat; a bird (it was a thrush) sang, and nobody knew why it did so early in the day. " * 20


def silent(description: str, done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def source() -> Backcopy:
    return Backcopy.of_text([TEXT], vocabulary=22, context=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hundred documents that all differ."""
    place = tmp_path_factory.mktemp("text")
    rows = [
        json.dumps({"text": f"document number {index} says {index * 7919 % 1000} and ends"}) for index in range(400)
    ]
    (place / "many.jsonl").write_text("\n".join(rows) + "\n", encoding="utf8")
    (place / "one.txt").write_text("a document\nof two lines", encoding="utf8")
    (place / "ignored.bin").write_bytes(b"\xff\xfe")
    return place


def small(folder: Path) -> Tier:
    return replace(
        TIERS["micro"], context=16, batch=4, held_out=4, vocabulary=300, text=str(folder), tokens=3000, device_batch=4
    )


def test_a_tier_is_found_by_its_own_label() -> None:
    for name, tier in TIERS.items():
        assert tier_of(f"tier:{name}") == tier
        assert tier.label == f"tier:{name}"
        other = changed(tier, steps=7, text="python_docs", bf16=not tier.bf16)
        assert tier_of(other.label) == other != tier
        assert other.steps == 7
    assert is_tier("tier:toy")
    assert not is_tier("toy")


def test_budgets_that_give_the_same_steps_are_the_same_tier() -> None:
    toy = TIERS["toy"]
    assert changed(toy, tokens=3 * 4096 + 17) == changed(toy, steps=3)
    assert changed(toy, steps=toy.steps).label == "tier:toy"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tier:nano", "no tier 'nano'"),
        ("tier:toy(width=3)", "no setting 'width'"),
        ("tier:toy(steps=2,tokens=9000)", "the same thing"),
        ("tier:toy(tokens=9)", "a step of tier toy takes 4096"),
        ("tier:toy(steps=True)", "whole number"),
        ("tier:toy(bf16=1)", "bf16"),
    ],
)
def test_a_tier_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        tier_of(text)


def test_every_token_of_backcopy_follows_the_rule(source: Backcopy) -> None:
    rows = source.block(5, 0)
    assert rows.shape == (BLOCK, 24)
    triggers = {2, 3, 4}
    for row in rows[:200].tolist():
        assert row[0] == 0
        assert row[1] not in triggers
        for place in range(2, len(row)):
            if row[place - 1] in triggers:
                assert row[place] == row[place - 2]
            else:
                assert source.counts[row[place - 1] - 2, row[place] - 2] > 0
    assert (rows[:, 1:] >= 2).all()
    assert rows.max() < 2 + len(source.characters)


def test_bigrams_are_counted_as_the_text_has_them(source: Backcopy) -> None:
    text = TEXT.strip() + " "
    frequent = [c for c, _ in sorted(Counter(text).items(), key=lambda pair: (-pair[1], pair[0]))[:20]]
    assert list(source.characters) == frequent
    pairs = Counter(pairwise(text))
    expected = [[pairs[first, second] for second in frequent] for first in frequent]
    assert source.counts.tolist() == expected


def test_drawn_bigrams_have_the_frequencies_of_the_text(source: Backcopy) -> None:
    rows = source.block(0, 1) - 2
    first = source.characters.index("h")
    assert first >= 3
    drawn = rows[:, 2:][rows[:, 1:-1] == first]
    found = np.bincount(drawn, minlength=len(source.characters)) / len(drawn)
    expected = source.counts[first] / source.counts[first].sum()
    # five standard deviations of a share of so many draws
    assert np.abs(found - expected).max() < 5 * np.sqrt(0.25 / len(drawn))


def test_copies_and_surprise_of_backcopy_are_those_of_a_plain_loop(source: Backcopy) -> None:
    rows = source.block(1, 2, 3)[:50]
    totals = source.counts.sum(1)
    unigrams = source.counts.sum(0) + source.counts.sum(1)
    copies, surprise = source.copies(rows), source.surprise(rows)
    for row, is_copy, nats in zip(rows.tolist(), copies, surprise, strict=True):
        for place, token in enumerate(row):
            after_trigger = place > 1 and row[place - 1] in (2, 3, 4)
            assert is_copy[place] == after_trigger
            if place == 0 or after_trigger:
                assert nats[place] == 0.0
            elif place == 1:
                assert nats[place] == pytest.approx(-np.log(unigrams[token - 2] / unigrams[3:].sum()))
            else:
                before = row[place - 1] - 2
                assert nats[place] == pytest.approx(-np.log(source.counts[before, token - 2] / totals[before]))


def test_sequences_follow_from_seed_and_index_alone(tmp_path: Path) -> None:
    tier = changed(TIERS["toy"], text="python_docs")
    first, second = (material_of(tier, DataSource(allow_hub=False), tmp_path) for _ in range(2))
    # asked for in another order, over the edge of a block
    places = [0, 7, BLOCK - 1, BLOCK, 2 * BLOCK + 3]
    rows = {place: first.row(3, place) for place in places}
    for place in reversed(places):
        assert second.row(3, place).tolist() == rows[place].tolist()
    assert first.row(4, 7).tolist() != rows[7].tolist()
    assert first.sha256 == second.sha256
    kept = {tuple(row) for row in first.held_out().tolist()}
    assert len(first.held_out()) == tier.held_out
    # only what cannot help coming out alike, such as ", , , ,", is in both
    both = kept & {tuple(first.row(0, index).tolist()) for index in range(BLOCK)}
    assert len(both) < len(kept) / 10
    for row in both:
        assert len(set(row)) <= tier.context / 8


def test_the_tokenizer_of_characters_gives_the_sequences_back(tmp_path: Path) -> None:
    material = material_of(changed(TIERS["toy"], text="python_docs"), DataSource(allow_hub=False), tmp_path)
    tokenizer = material.tokenizer()
    row = material.row(0, 0).tolist()
    text = tokenizer.decode(row)
    assert text.startswith("<s>")
    assert tokenizer(text.removeprefix("<s>"))["input_ids"] == row
    # line breaks are nothing, strangers are one token
    assert tokenizer("e\n\n☃")["input_ids"] == [0, tokenizer.convert_tokens_to_ids("e"), 1]


def test_a_packed_text_is_its_documents_each_behind_an_end_mark(folder: Path, tmp_path: Path) -> None:
    tier = small(folder)
    found = packed(tier, DataSource(allow_hub=False), tmp_path, silent)
    tokenizer = found.tokenizer()
    everything = list(documents(str(folder), DataSource(allow_hub=False)))
    assert len(everything) == 401
    trained = [text for text in everything if not held_out(text)]
    assert 0 < len(everything) - len(trained) < 40
    read = tokenizer.decode(found.train.tolist()).split(END)
    assert read[0] == ""
    # the last one is cut where the budget ends
    assert read[1:-1] == trained[: len(read) - 2]
    assert trained[len(read) - 2].startswith(read[-1])
    kept = tokenizer.decode(found.held_out.tolist()).split(END)[1:-1]
    assert kept == [text for text in everything if held_out(text)][: len(kept)]
    assert len(found.held_out) == tier.held_out * tier.context


def test_a_text_is_packed_once_and_to_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    data = DataSource(allow_hub=False)
    first = packed(small(folder), data, tmp_path / "a", silent)
    times = [path.stat().st_mtime_ns for path in sorted(first.folder.iterdir())]
    again = packed(small(folder), data, tmp_path / "a", silent)
    assert [path.stat().st_mtime_ns for path in sorted(again.folder.iterdir())] == times
    elsewhere = packed(small(folder), data, tmp_path / "b", silent)
    assert elsewhere.sha256 == first.sha256
    assert elsewhere.train.tolist() == first.train.tolist()


def test_changed_packed_files_are_not_read(folder: Path, tmp_path: Path) -> None:
    found = packed(small(folder), DataSource(allow_hub=False), tmp_path, silent)
    file = found.folder / "train.bin"
    file.write_bytes(file.read_bytes()[:-2] + b"\x05\x00")
    with pytest.raises(DataError, match="delete the folder"):
        packed(small(folder), DataSource(allow_hub=False), tmp_path, silent)


def test_a_text_too_short_for_a_step_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("nothing much", encoding="utf8")
    tier = replace(small(tmp_path), text=str(tmp_path / "short.txt"))
    with pytest.raises(DataError, match="too short"):
        packed(tier, DataSource(allow_hub=False), tmp_path / "cache", silent)


def test_each_reading_of_a_text_takes_every_piece_once_in_its_own_order(folder: Path, tmp_path: Path) -> None:
    tier = small(folder)
    text = packed(tier, DataSource(allow_hub=False), tmp_path, silent)
    material = TextMaterial(tier, text)
    count = len(text.train) // tier.context
    pieces = sorted(text.train[: count * tier.context].reshape(count, -1).tolist())
    readings = [[material.row(0, time * count + place).tolist() for place in range(count)] for time in (0, 1)]
    assert sorted(readings[0]) == sorted(readings[1]) == pieces
    assert readings[0] != readings[1]
    assert [material.row(1, place).tolist() for place in range(count)] != readings[0]


def test_missing_texts_say_how_to_supply_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUANT_BENCH_DATA", raising=False)
    data = DataSource(allow_hub=False)
    with pytest.raises(Blocked, match=r"wikipedia_en_2014-00000.*--data DIR"):
        next(documents("wikipedia_en_2014", data))
    with pytest.raises(Blocked, match="fineweb-edu"):
        next(documents("fineweb_edu", data))
    with pytest.raises(SpecError, match="no text 'no-such-place'"):
        next(documents("no-such-place", data))
    assert {tier.text for tier in TIERS.values()} <= set(SOURCES)
