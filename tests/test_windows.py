"""Windows by hand, words and bytes, prefixes, and perplexity against transformers' own loss."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import PreTrainedTokenizerFast

from helpers import context_of
from quant_bench.errors import DataError, NotApplicable, SpecError
from quant_bench.model import LanguageModel
from quant_bench.perplexity import TextWindows, outliers, perplexity
from quant_bench.probe import ITEMS, Probe
from quant_bench.quantizer import Calibration
from quant_bench.registry import build
from quant_bench.scoring import final_hidden
from quant_bench.statistics import score_of
from quant_bench.stream import Stream, block_stream, prefix_ids, prefix_name, stream_of
from quant_bench.task import Evaluation
from quant_bench.tiny import tiny_model, tiny_tokenizer
from quant_bench.windows import Span, Windows, WindowSettings, cut, window_pass

# words w1… and w2… would meet the tiny tokenizer's special tokens
ALLOWED = [number for number in range(3, 97) if str(number)[0] not in "12"]


def words(count: int, seed: int = 0) -> str:
    picks = np.random.default_rng(seed).choice(ALLOWED, count)
    return " ".join(f"w{pick}" for pick in picks)


def spans(count: int, settings: WindowSettings, model: LanguageModel) -> list[tuple[int, int, int]]:
    return [(s.first, s.last, s.scored) for s in cut([words(count)], model, settings).spans]


def adding_tokenizer(*, at_end: bool = False) -> Any:
    """A tokenizer that puts BOS (w1) in front by itself, and EOS (w2) behind if asked."""
    inner = Tokenizer(WordLevel({f"w{index}": index for index in range(97)}, unk_token="w0"))
    inner.pre_tokenizer = WhitespaceSplit()
    template = "w1 $A w2" if at_end else "w1 $A"
    inner.post_processor = TemplateProcessing(single=template, special_tokens=[("w1", 1), ("w2", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", bos_token="w1", eos_token="w2")


# boundaries by hand


def test_p1_windows_lie_beside_each_other_and_drop_the_tail() -> None:
    settings = WindowSettings(seq_length=8)
    assert spans(27, settings, tiny_model("llama")) == [(0, 8, 1), (8, 16, 9), (16, 24, 17)]


def test_p2_windows_score_only_new_tokens_and_keep_the_tail() -> None:
    settings = WindowSettings("p2", seq_length=8, stride=3)
    wanted = [(0, 8, 1), (3, 11, 8), (6, 14, 11), (9, 16, 14)]
    assert spans(16, settings, tiny_model("llama")) == wanted


def test_p2_scores_every_token_but_the_first_exactly_once() -> None:
    for total in range(2, 40):
        scored = [
            target
            for first, last, start in spans(total, WindowSettings("p2", seq_length=8, stride=5), tiny_model("gpt2"))
            for target in range(start, last)
            if start > first
        ]
        assert scored == list(range(1, total))


def test_p2_with_a_stride_of_the_whole_window_leaves_out_tokens_without_context() -> None:
    settings = WindowSettings("p2", seq_length=8, stride=8)
    assert spans(20, settings, tiny_model("llama")) == [(0, 8, 1), (8, 16, 9), (16, 20, 17)]


def test_p3_scores_the_second_half_behind_bos() -> None:
    model = tiny_model("llama")
    windows = cut([words(20)], model, WindowSettings("p3", seq_length=8))
    # the second half has 4 tokens, and llama.cpp scores what positions 4 to 6 predict
    assert [(s.first, s.last, s.scored) for s in windows.spans] == [(0, 8, 5), (8, 16, 13)]
    assert windows.ids(1)[0].tolist() == [1, *windows.stream.ids[9:16].tolist()]
    assert windows.label == "P3 seq=8 prefix=bos"


def test_p3_of_wikitext_reads_the_raw_file() -> None:
    rows = ["", "w3 w4\n", "", "w5\n"]
    model = tiny_model("llama")
    raw = cut(rows, model, WindowSettings("p3", seq_length=2), wikitext=True)
    assert raw.stream.sha256 == stream_of(model.tokenizer, " \nw3 w4\n \nw5\n", []).sha256


def test_p5_cuts_blocks_after_every_thousand_documents() -> None:
    documents = [words(7, seed) for seed in range(1003)]
    stream = block_stream(tiny_tokenizer(), documents, [1], 512)
    # 8 tokens a document: 8,000 tokens give 15 blocks and a dropped rest; the last 3 documents give none
    assert len(stream.ids) == 15 * 512
    assert stream.ids[0] == 1
    assert (stream.ids == 1).sum() == 15 * 512 // 8
    few = block_stream(tiny_tokenizer(), documents, [1], 8)
    assert len(few.ids) == 1003 * 8
    assert few.words is not None
    assert few.words.sum() == 1003 * 7


def test_p5_windows_are_512_tokens_unless_the_context_is_shorter() -> None:
    model = tiny_model("llama")
    windows = cut([words(50, seed) for seed in range(4)], model, WindowSettings("p5", prefix="bos"))
    assert windows.label == "P5 seq=64 prefix=bos"
    assert windows.spans == (Span(0, 64, 1), Span(64, 128, 65), Span(128, 192, 129))


def test_default_length_is_2048_or_the_context_where_that_is_shorter() -> None:
    model = tiny_model("llama")
    assert WindowSettings().resolved(model).seq_length == 64
    model.config.max_position_embeddings = 8192
    assert WindowSettings().resolved(model).seq_length == 2048
    assert WindowSettings("p3").resolved(model).seq_length == 512
    assert WindowSettings("p2").resolved(model).stride == 512


# settings that do not fit


def test_fewer_tokens_than_one_window_are_an_error_with_both_numbers() -> None:
    with pytest.raises(DataError, match="13 tokens; one window needs 64"):
        cut([words(13)], tiny_model("llama"), WindowSettings())


def test_settings_that_make_no_sense_are_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(SpecError, match="context of 64"):
        WindowSettings(seq_length=65).resolved(model)
    with pytest.raises(SpecError, match="at least 2"):
        WindowSettings(seq_length=1)
    with pytest.raises(SpecError, match="belongs to convention=p2"):
        WindowSettings("p1", stride=4)
    with pytest.raises(SpecError, match="above seq_length=8"):
        WindowSettings("p2", seq_length=8, stride=9).resolved(model)


# prefixes


@pytest.mark.parametrize("at_end", [False, True])
def test_a_tokenizer_that_adds_bos_gives_exactly_one(at_end: bool) -> None:
    tokenizer = adding_tokenizer(at_end=at_end)
    for prefix in ("default", "bos"):
        stream = stream_of(tokenizer, "w3 w4 w5", prefix_ids(tokenizer, prefix))
        assert stream.ids.tolist() == [1, 3, 4, 5]
    text_with_bos = stream_of(tokenizer, "w1 w3 w4", prefix_ids(tokenizer, "default"))
    assert text_with_bos.ids.tolist() == [1, 3, 4]


def test_every_prefix_is_named_and_nothing_is_added_silently() -> None:
    adding, plain = adding_tokenizer(), tiny_tokenizer()
    found = {
        (name, prefix): prefix_name(tokenizer, prefix_ids(tokenizer, prefix))
        for name, tokenizer in (("adding", adding), ("plain", plain))
        for prefix in ("default", "none", "bos", "eos")
    }
    assert found["adding", "default"] == "bos"
    assert found["plain", "default"] == "none"
    for name in ("adding", "plain"):
        assert [found[name, prefix] for prefix in ("none", "bos", "eos")] == ["none", "bos", "eos"]
    assert stream_of(adding, "w3 w4", prefix_ids(adding, "none")).ids.tolist() == [3, 4]
    assert prefix_name(plain, [7, 8]) == "7+8"


def test_a_prefix_that_the_tokenizer_lacks_is_not_applicable() -> None:
    inner = Tokenizer(WordLevel({"w0": 0}, unk_token="w0"))
    inner.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0")
    with pytest.raises(NotApplicable, match="no BOS token"):
        prefix_ids(tokenizer, "bos")


def test_labels_tell_conventions_lengths_and_prefixes_apart() -> None:
    model = tiny_model("llama")
    options = [
        WindowSettings(),
        WindowSettings(seq_length=32),
        WindowSettings(prefix="bos"),
        WindowSettings(prefix="eos"),
        WindowSettings("p2", seq_length=32, stride=8),
        WindowSettings("p2", seq_length=32, stride=16),
        WindowSettings("p3"),
        WindowSettings("p5"),
    ]
    labels = [cut([words(200)], model, settings).label for settings in options]
    assert len(set(labels)) == len(options)
    assert labels[0] == "P1 seq=64 prefix=none"


# words and bytes


def test_words_and_bytes_of_tokens_add_up_to_the_text() -> None:
    text = "w3  w4\n\nw5\u00a0w66 w7\U0001f600 w8 é"
    stream = stream_of(tiny_tokenizer(), text, [1])
    assert stream.words is not None
    assert stream.bytes is not None
    assert stream.words.sum() == len(text.split())
    assert stream.bytes.sum() == len(text.encode())
    assert stream.words[0] == stream.bytes[0] == 0


# perplexity


def hf_losses(model: LanguageModel, windows: Windows) -> list[float]:
    losses = []
    for index in range(len(windows.spans)):
        ids = windows.ids(index)
        with torch.no_grad():
            losses.append(float(model.module(input_ids=ids, labels=ids).loss))
    return losses


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_neox"])
def test_p1_perplexity_equals_exp_of_the_mean_loss_of_transformers(family: str) -> None:
    model, rows = tiny_model(family), [words(40, seed) for seed in range(20)]
    wanted = TextWindows("wikitext2", "test", WindowSettings())
    found = perplexity(model, context_of(rows), wanted)
    losses = hf_losses(model, cut(rows, model, WindowSettings()))
    score = score_of(found.measures[0], found.samples, 0)
    assert score.metric.name == "token_perplexity"
    assert math.log(score.value) == pytest.approx(np.mean(losses), abs=1e-5)
    assert found.samples["nll"].to_list() == pytest.approx([63 * loss for loss in losses], abs=1e-3)
    assert found.convention == "P1 seq=64 prefix=none"


def test_word_and_token_perplexity_and_bits_are_one_likelihood() -> None:
    rows = ["w3 w4 w5\n", "", words(300)]
    found = perplexity(tiny_model("llama"), context_of(rows), TextWindows("wikitext2", "test", WindowSettings()))
    scores = {m.metric.name: score_of(m, found.samples, 0).value for m in found.measures}
    sums = found.samples[["nll", "tokens", "words", "bytes"]].sum()
    nll = math.log(scores["token_perplexity"]) * sums["tokens"]
    assert math.log(scores["word_perplexity"]) * sums["words"] == pytest.approx(nll, rel=1e-12)
    assert scores["bits_per_byte"] * math.log(2) * sums["bytes"] == pytest.approx(nll, rel=1e-12)
    assert nll == pytest.approx(sums["nll"], rel=1e-12)


def test_p5_adds_the_published_mean_of_batch_means() -> None:
    rows = [words(63, seed) for seed in range(11)]
    found = perplexity(
        tiny_model("llama"), context_of(rows), TextWindows("wiki40b", "validation", WindowSettings("p5", prefix="bos"))
    )
    losses = (found.samples["nll"] / found.samples["tokens"]).to_numpy()
    assert len(losses) == 11
    extra = next(one for one in found.plain if one.metric.name == "token_perplexity_mean_of_batches")
    assert extra.value == pytest.approx(math.exp((losses[:8].mean() + losses[8:].mean()) / 2), rel=1e-12)
    assert extra.value != pytest.approx(score_of(found.measures[0], found.samples, 0).value, rel=1e-6)


def test_limit_takes_the_first_windows() -> None:
    rows, model = [words(400)], tiny_model("llama")
    settings = WindowSettings()
    whole = perplexity(model, context_of(rows), TextWindows("wikitext2", "test", settings)).samples
    first = perplexity(model, context_of(rows), TextWindows("wikitext2", "test", settings, limit=2)).samples
    assert len(whole) == 6
    assert first.equals(whole[:2])


def count_forwards(model: LanguageModel) -> list[int]:
    counted: list[int] = []

    def note(module: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        counted.append(named["input_ids"].shape[1])

    model.body.register_forward_pre_hook(note, with_kwargs=True)
    return counted


@pytest.mark.parametrize("order", [("wikitext2", "outliers"), ("outliers", "wikitext2")])
def test_one_pass_serves_perplexity_and_outliers_in_either_order(order: tuple[str, str]) -> None:
    model, memo = tiny_model("llama"), {}
    counted = count_forwards(model)
    context = context_of([words(400)], pass_memo=memo)
    tasks = {name: build("tasks", name) for name in order}
    for task in tasks.values():
        task.prepare(model, context)
    found = {name: task.evaluate(model, context) for name, task in tasks.items()}
    assert counted == [64] * 6
    assert "avg_kurtosis" in found["outliers"].samples
    alone = build("tasks", "wikitext2").evaluate(tiny_model("llama"), context_of([words(400)]))
    assert found["wikitext2"].samples["nll"].equals(alone.samples["nll"])


def test_tasks_on_other_windows_do_not_share_a_pass() -> None:
    model = tiny_model("llama")
    counted = count_forwards(model)
    context = context_of([words(400)])
    perplexity(model, context, TextWindows("wikitext2", "test", WindowSettings(seq_length=32)))
    outliers(model, context, TextWindows("wikitext2", "test", WindowSettings()))
    assert counted == [32] * 12 + [64] * 6


def run_with(probe: Probe, quantizer: str, rows: list[str]) -> Evaluation:
    model = build("quantizers", quantizer).quantize(tiny_model("llama"), Calibration())
    found = build("tasks", "wikitext2").evaluate(model, context_of(rows, probe))
    probe.save()
    return found


def test_divergence_and_agreement_equal_those_of_whole_distributions(tmp_path: Path) -> None:
    rows = [words(200)]
    run_with(Probe.collect(tmp_path / "probe"), "none", rows)
    found = run_with(Probe.compare(tmp_path / "probe"), "w4a4", rows)
    scores = {m.metric.name: score_of(m, found.samples, 0) for m in found.measures}

    float_model = tiny_model("llama")
    quantized = build("quantizers", "w4a4").quantize(tiny_model("llama"), Calibration())
    windows = cut(rows, float_model, WindowSettings())
    divergences, same = [], []
    for index in range(len(windows.spans)):
        with torch.no_grad():
            p = float_model.module(input_ids=windows.ids(index)).logits[0, :-1].double().log_softmax(-1)
            q = quantized.module(input_ids=windows.ids(index)).logits[0, :-1].double().log_softmax(-1)
        divergences.append((p.exp() * (p - q)).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
    # 3 windows have fewer positions than the probe has items, so it sees them all
    assert len(windows.spans) * 63 < ITEMS
    assert found.samples["kl_positions"].to_list() == [63] * 3
    assert scores["kl"].value == pytest.approx(float(torch.cat(divergences).mean()), abs=1e-5)
    assert scores["top1_agreement"].value == pytest.approx(float(torch.cat(same).double().mean()), abs=1e-12)
    assert 0 < scores["top1_agreement"].value < 1


def test_the_probe_of_many_windows_looks_at_the_whole_text_and_at_every_position() -> None:
    model, length = tiny_model("llama"), 9
    windows = cut([words(2 * ITEMS * length)], model, WindowSettings(seq_length=length))
    done = window_pass(model, windows, context_of([]), ("many",), observe=False)
    assert len(windows.spans) > ITEMS
    assert len(set(done.sampled_window)) == ITEMS
    assert (done.sampled_window[0], done.sampled_window[-1]) == (0, len(windows.spans) - 1)
    places = []
    for window, state in zip(done.sampled_window, done.sampled, strict=True):
        away = (final_hidden(model, windows.ids(window))[0, :-1] - state).abs().amax(-1)
        assert float(away.min()) == 0.0
        places.append(int(away.argmin()))
    shares = np.bincount(places, minlength=length - 1) / ITEMS
    assert len(shares) == length - 1
    # both ends get half of what the others get
    assert bool((shares > 0.4 / (length - 2)).all())


def test_the_float_model_agrees_with_itself(tmp_path: Path) -> None:
    rows = [words(3000)]
    run_with(Probe.collect(tmp_path / "probe"), "none", rows)
    found = run_with(Probe.compare(tmp_path / "probe"), "none", rows)
    assert found.samples["kl"].dropna().eq(0.0).all()
    assert found.samples["kl_positions"].sum() == ITEMS
    assert found.samples["same_argmax"].equals(found.samples["tokens"])


def test_scores_under_dynamic_ranges_of_the_whole_tensor_do_not_depend_on_the_batch_size() -> None:
    rows = [words(200)]
    scores = []
    for batch_size in (1, 8):
        quantizer = build("quantizers", "rtn(activation_granularity=tensor)")
        model = quantizer.quantize(tiny_model("llama"), Calibration())
        context = context_of(rows)
        context.batch_size = batch_size
        scores.append(build("tasks", "wikitext2").evaluate(model, context).samples)
    assert scores[0].equals(scores[1])


@pytest.mark.parametrize("setting", ["seq_length=32", "stride=4", "prefix=bos"])
def test_p4_refuses_settings_that_lm_eval_would_not_see(setting: str) -> None:
    with pytest.raises(SpecError, match="p4 is lm-eval's"):
        build("tasks", f"wikitext2(convention=p4,{setting})")


def test_stream_of_a_tokenizer_without_positions_knows_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    stream = stream_of(tokenizer, "w3 w4", [])
    assert isinstance(stream, Stream)
    assert stream.ids.tolist() == [3, 4]
    assert stream.words is None
    assert stream.bytes is None
