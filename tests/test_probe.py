"""The probe against torch's own divergence, and its file."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from quant_bench.errors import DataError
from quant_bench.probe import ITEMS, Probe


def rows(count: int, seed: int, vocabulary: int = 50) -> torch.Tensor:
    return 3 * torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed))


def collected(path: Path, logits: torch.Tensor) -> None:
    probe = Probe.collect(path)
    for item, row in enumerate(logits):
        probe.offer(item, row[None])
    probe.offer_argmax(0, torch.tensor([1, 2, 3]))
    probe.offer_argmax(7, torch.tensor([4, 5]))
    probe.save()


def test_kl_and_top1_equal_torch_on_whole_distributions(tmp_path: Path) -> None:
    reference, other = rows(6, 0), rows(6, 0) + 0.3 * rows(6, 1)
    collected(tmp_path / "probe", reference)
    probe = Probe.compare(tmp_path / "probe")
    for item, row in enumerate(other):
        probe.offer(item, row[None])
    p, q = reference.double().log_softmax(1), other.double().log_softmax(1)
    wanted = functional.kl_div(q, p, log_target=True, reduction="none").sum(1)
    frame = probe.frame()
    assert frame["kl"].to_list() == pytest.approx(wanted.tolist(), abs=1e-6)
    assert frame["top1"].to_list() == (reference.argmax(1) == other.argmax(1)).double().tolist()


def test_a_model_has_no_divergence_from_itself(tmp_path: Path) -> None:
    logits = rows(4, 2)
    collected(tmp_path / "probe", logits)
    probe = Probe.compare(tmp_path / "probe")
    for item, row in enumerate(logits):
        probe.offer(item, row[None])
    assert probe.frame()["kl"].to_list() == [0.0] * 4


def test_a_token_that_the_float_model_rules_out_leaves_the_divergence_finite(tmp_path: Path) -> None:
    reference, other = rows(1, 0), rows(1, 1)
    reference[0, 3] = -torch.inf
    collected(tmp_path / "probe", reference)
    probe = Probe.compare(tmp_path / "probe")
    probe.offer(0, other)
    p, q = reference.double().softmax(1), other.double().softmax(1)
    wanted = float((torch.xlogy(p, p) - p * q.log()).sum())
    assert probe.frame()["kl"][0] == pytest.approx(wanted, abs=1e-6)


def test_order_of_items_does_not_change_what_is_found(tmp_path: Path) -> None:
    reference, other = rows(5, 0), rows(5, 1)
    collected(tmp_path / "probe", reference)
    forward, backward = Probe.compare(tmp_path / "probe"), Probe.compare(tmp_path / "probe")
    for item in range(5):
        forward.offer(item, other[item : item + 1])
        backward.offer(4 - item, other[4 - item : 5 - item])
    assert forward.frame().equals(backward.frame())


def test_only_the_first_position_of_the_first_offer_of_an_item_counts(tmp_path: Path) -> None:
    probe = Probe.collect(tmp_path / "probe")
    assert probe.wants(0)
    assert not probe.wants(ITEMS)
    assert not probe.wants(-1)
    first = rows(2, 0)
    probe.offer(0, first)
    assert not probe.wants(0)
    probe.offer(0, rows(2, 1))
    probe.save()
    again = Probe.compare(tmp_path / "probe")
    assert not again.wants(1)
    again.offer(0, first[:1])
    assert again.frame()["kl"].to_list() == [0.0]


def test_changed_choices_are_counted_at_all_positions(tmp_path: Path) -> None:
    collected(tmp_path / "probe", rows(1, 0))
    probe = Probe.compare(tmp_path / "probe")
    probe.offer_argmax(0, torch.tensor([1, 9, 3]))
    probe.offer_argmax(7, torch.tensor([4, 5]))
    probe.offer_argmax(8, torch.tensor([4]))
    assert probe.changes().to_dict("list") == {"item": [0, 7], "changed": [1, 0], "positions": [3, 2]}


def test_another_text_or_vocabulary_is_refused(tmp_path: Path) -> None:
    collected(tmp_path / "probe", rows(2, 0))
    probe = Probe.compare(tmp_path / "probe")
    with pytest.raises(DataError, match="another model"):
        probe.offer(0, rows(1, 0, vocabulary=49))
    with pytest.raises(DataError, match="not the same text"):
        probe.offer_argmax(0, torch.tensor([1, 2]))


def test_a_file_that_is_no_probe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "probe"
    path.write_bytes(b"\x00" * 100)
    with pytest.raises(DataError, match="cannot be read"):
        Probe.compare(path)


def test_nothing_is_written_before_save_and_nothing_but_the_file_remains(tmp_path: Path) -> None:
    folder = tmp_path / "probes"
    probe = Probe.collect(folder / "probe")
    probe.save()
    probe.offer(0, rows(1, 0))
    assert not Probe.sound(folder / "probe")
    probe.save()
    assert [path.name for path in folder.iterdir()] == ["probe"]
    assert Probe.sound(folder / "probe")


def test_a_probe_that_is_off_wants_nothing() -> None:
    probe = Probe.off()
    probe.offer(0, rows(1, 0))
    probe.offer_argmax(0, torch.tensor([1]))
    probe.save()
    assert not probe.wants(0)
    assert probe.frame().empty
    assert probe.changes().empty


def test_a_damaged_file_is_not_sound(tmp_path: Path) -> None:
    path = tmp_path / "probe"
    probe = Probe.collect(path)
    probe.offer(0, torch.randn(1, 5))
    probe.save()
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"junk" * 50):
        path.write_bytes(damaged)
        assert not Probe.sound(path)
