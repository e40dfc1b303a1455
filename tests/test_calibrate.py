"""Calibration batches and static ranges against plain references."""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch

from quant_bench.attention import sdpa
from quant_bench.calibrate import RangeRule, batches_for, static_ranges, token_batches
from quant_bench.errors import DataError, QuantizationError
from quant_bench.model import LanguageModel
from quant_bench.numerics.tails import Range, Tails, largest, smallest
from quant_bench.quantization import apply_scheme, scheme
from quant_bench.quantization.full import full_sites, watch_full
from quant_bench.quantizer import Calibration
from quant_bench.registry import build
from quant_bench.testing import tiny_calibration, tiny_ids, tiny_model, tiny_tokenizer

STATIC = "w8a8-static(calibration_batches=1)"


@dataclass(frozen=True)
class Words:
    """A text of words."""

    rows: list[str]
    name: str = "words"
    sha256: str = "ab" * 32


def _text(count: int, seed: int = 0) -> Words:
    drawn = torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    words = [f"w{index}" for index in drawn]
    return Words([" ".join(words[start : start + 50]) for start in range(0, count, 50)])


def test_batches_hold_whole_sequences_of_the_text() -> None:
    text = _text(20_000)
    got = token_batches(tiny_tokenizer(), text, sequences=20, seq_length=32, seed=3)
    assert [tuple(batch.shape) for batch in got.batches] == [(8, 32), (8, 32), (4, 32)]
    assert (got.usable, got.wanted) == (20, 20)
    words = " ".join(text.rows).split()
    places = [
        next(i for i in range(len(words)) if words[i : i + 32] == [f"w{index}" for index in row])
        for row in torch.cat(list(got.batches)).tolist()
    ]
    ordered = sorted(places)
    assert all(later - earlier >= 32 for earlier, later in itertools.pairwise(ordered))


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_sequences_are_no_longer_than_the_model_s_context(family: str) -> None:
    model = tiny_model(family)
    calibration = batches_for(model, _text(20_000), sequences=8, seed=0)
    assert [tuple(batch.shape) for batch in calibration.batches] == [(8, model.max_length)]
    # learned positions have no row beyond the context, and rotary ones were never trained there
    assert build("quantizers", STATIC).quantize(model, calibration).execution == "simulated"


def test_batches_and_digest_follow_from_text_and_seed() -> None:
    tokenizer, text = tiny_tokenizer(), _text(20_000)
    first, again, other = (token_batches(tokenizer, text, sequences=4, seq_length=32, seed=seed) for seed in (1, 1, 2))
    assert first.sha256 == again.sha256
    assert all(torch.equal(a, b) for a, b in zip(first.batches, again.batches, strict=True))
    assert first.sha256 != other.sha256
    assert "seed=1" in first.description
    assert "words" in first.description


def test_too_few_sequences_are_told_with_both_counts() -> None:
    with pytest.warns(UserWarning, match="only 3 of 128 sequences of 64 tokens in 'words'"):
        got = token_batches(tiny_tokenizer(), _text(260), sequences=128, seq_length=64)
    assert (got.usable, got.wanted) == (3, 128)


def test_text_without_one_sequence_is_an_error() -> None:
    with pytest.raises(DataError, match="'words' has no sequence of 64 tokens"):
        token_batches(tiny_tokenizer(), _text(50), seq_length=64)
    with pytest.raises(DataError, match="no sequence"):
        token_batches(tiny_tokenizer(), Words([]), seq_length=64)


def test_sequences_begin_with_the_tokenizers_own_prefix() -> None:
    tokenizer = tiny_tokenizer()
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    (batch,) = token_batches(tokenizer, _text(20_000), sequences=4, seq_length=16).batches
    assert batch[:, 0].tolist() == [1, 1, 1, 1]
    assert not ((batch[:, 1:] == 1) | (batch == 2)[:, 1:]).any()


@pytest.mark.parametrize("percentile", [100.0, 99.999, 99.9, 97.3, 60.0])
@pytest.mark.parametrize("size", [1, 2, 63, 64, 1000, 200_003])
def test_tails_equal_numpys_percentiles_whatever_the_pieces(percentile: float, size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)).mul_(3).exp()
    # many ties at the low end, as attention probabilities have
    values[::3] = 0.0
    tails = Tails(percentile, size)
    for piece in values.split(max(1, size // 7)):
        tails.add(piece)
    low, high = numpy.percentile(values.double().numpy(), [100 - percentile, percentile])
    assert tails.range().low == pytest.approx(low, rel=1e-6, abs=1e-12)
    assert tails.range().high == pytest.approx(high, rel=1e-6)


def test_largest_and_smallest_equal_sorting_with_ties() -> None:
    generator = torch.Generator().manual_seed(0)
    for size, count in ((1, 1), (64 * 40 + 7, 3), (5000, 60), (70_000, 12)):
        values = torch.randint(0, 50, (size,), generator=generator).float()
        assert torch.equal(largest(values, count), values.sort(descending=True).values[:count])
        assert torch.equal(smallest(values, count), values.sort().values[:count])


def test_running_range_follows_the_momentum_and_minmax_keeps_extremes() -> None:
    spans = [Range(-1.0, 2.0), Range(-3.0, 1.0), Range(0.0, 10.0)]
    running, extremes = RangeRule("running_minmax", momentum=0.9), RangeRule("minmax")
    old_running = old_extremes = None
    for span in spans:
        old_running, old_extremes = running.merge(old_running, span), extremes.merge(old_extremes, span)
    assert old_running is not None
    assert old_running.low == pytest.approx(0.9 * (0.9 * -1.0 + 0.1 * -3.0) + 0.1 * 0.0)
    assert old_running.high == pytest.approx(0.9 * (0.9 * 2.0 + 0.1 * 1.0) + 0.1 * 10.0)
    assert old_extremes == Range(-3.0, 10.0)


def _hooks(model: LanguageModel) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs")
    return sum(len(getattr(module, kind)) for module in model.module.modules() for kind in kinds)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_ranges_leave_no_hook_and_no_core_behind(family: str) -> None:
    model = tiny_model(family)
    before, text = _hooks(model), str(model.module)
    sites = full_sites(model)
    inputs = [site.path for site in model.layout.linears]
    ranges = static_ranges(
        model, [tiny_ids()], RangeRule(), inputs=inputs, extra=lambda watch: watch_full(watch, sites)
    )
    assert len(ranges) == len(inputs) + len(sites.outputs) + len(sites.sums) + 3 * len(sites.attentions)
    assert (_hooks(model), str(model.module)) == (before, text)
    assert all("attention_core" not in vars(model.module.get_submodule(path)) for path in sites.attentions)
    with pytest.raises(IndexError):
        static_ranges(model, [tiny_ids() + 1000], RangeRule(), inputs=inputs)
    assert _hooks(model) == before


def test_ranges_of_tensors_equal_a_plain_recording() -> None:
    model = tiny_model("llama")
    path = "model.layers.1.mlp.down_proj"
    seen: list[torch.Tensor] = []
    handle = model.module.get_submodule(path).register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    batches = [tiny_ids(seed=seed) for seed in (1, 2, 3)]
    with torch.no_grad():
        for ids in batches:
            model.body(input_ids=ids)
    handle.remove()
    expected = None
    for values in seen:
        low, high = numpy.percentile(values.double().numpy(), [1, 99])
        new = (float(low), float(high))
        expected = new if expected is None else tuple(0.9 * o + 0.1 * n for o, n in zip(expected, new, strict=True))
    got = static_ranges(model, batches, RangeRule("running_minmax", 99.0, 0.9), inputs=[path])
    assert got[f"{path}:input"] == pytest.approx(expected, rel=1e-5)


def test_attention_ranges_are_those_of_whole_matrices() -> None:
    model = tiny_model("llama")
    path = model.layout.attentions[0]
    attention = model.module.get_submodule(path)
    recorded: dict[str, torch.Tensor] = {}

    def core(module, query, key, value, *, mask, scaling):  # type: ignore[no-untyped-def]
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        scores = query @ key.transpose(-1, -2) * scaling
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        probabilities = scores.masked_fill(future, -torch.inf).softmax(-1)
        recorded.update(scores=scores, probabilities=probabilities, context=probabilities @ value)
        return recorded["context"]

    attention.attention_core = core
    with torch.no_grad():
        model.body(input_ids=tiny_ids())
    del attention.attention_core
    sites = full_sites(model)
    got = static_ranges(model, [tiny_ids()], RangeRule(percentile=99.9), extra=lambda watch: watch_full(watch, sites))
    for name, values in recorded.items():
        expected = numpy.percentile(values.double().numpy(), [0.1, 99.9])
        assert got[f"{path}:{name}"] == pytest.approx(expected, rel=1e-4, abs=1e-6), name


def test_value_that_is_not_finite_is_named() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.module.get_submodule("model.layers.0.mlp.up_proj").weight[0, 0] = torch.inf
    with pytest.raises(QuantizationError, match=r"model\.layers\.0\.mlp\.down_proj:input is not finite"):
        static_ranges(model, [tiny_ids()], RangeRule(), inputs=[site.path for site in model.layout.linears])


def test_only_the_stated_number_of_batches_is_used() -> None:
    quantizer = build("quantizers", "w8a8-static(calibration_batches=2)")
    given = tiny_calibration(build("quantizers", "w8a8-static"))
    assert (len(given.batches), quantizer.calibration_sequences) == (4, 16)
    two = Calibration(batches=given.batches[:2])
    ids = tiny_ids()
    logits = []
    for calibration in (given, two):
        model = apply_scheme(tiny_model("llama"), quantizer, calibration)  # type: ignore[arg-type]
        with torch.no_grad():
            logits.append(model.module(input_ids=ids).logits)
    assert torch.equal(*logits)


def test_ranges_are_reused_only_for_the_same_float_model_and_text(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    real = scheme.static_ranges

    def counted(*arguments: Any, **options: Any) -> dict[str, Range]:
        passes.append(1)
        return real(*arguments, **options)

    monkeypatch.setattr(scheme, "static_ranges", counted)
    scheme.forget_ranges()
    quantizer = build("quantizers", STATIC)
    given = tiny_calibration(quantizer)

    def runs(text: str = STATIC, calibration: Calibration = given, **change: Any) -> int:
        passes.clear()
        model = tiny_model("llama", **change)
        if "core" in change:
            model.module.get_submodule(model.layout.attentions[0]).attention_core = change["core"]
        build("quantizers", text).quantize(model, calibration)
        return len(passes)

    assert runs() == 1
    assert runs() == 0
    assert runs(STATIC.replace("static", "static-integer")) == 0
    assert runs(calibration=dataclasses.replace(given, sha256="1" * 64)) == 1
    assert runs(STATIC.replace("=1)", "=1,kv_bits=8)")) == 0
    assert runs("rtn(activation_granularity=tensor,activation_static=True,calibration_batches=1)") == 1
    assert runs(seed=7) == 1
    assert runs(rms_norm_eps=0.5) == 1
    # nothing is known of what an arm's core depends on
    assert [runs(core=Plus()) for _ in range(2)] == [1, 1]
    unsigned = dataclasses.replace(given, sha256=None)
    assert [runs(calibration=unsigned) for _ in range(2)] == [1, 1]


class Plus:
    """A core that an arm could bring."""

    def probabilities(self, module: torch.nn.Module, scores: torch.Tensor, heads: Any) -> torch.Tensor:
        return scores.softmax(-1)

    def __call__(self, *operands: Any, **options: Any) -> torch.Tensor:
        return sdpa(*operands, **options)
