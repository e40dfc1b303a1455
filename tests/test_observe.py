"""The observer against statistics computed here, in float64, from hidden tensors that transformers itself returns."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn

from quant_bench import models
from quant_bench.errors import QuantizationError
from quant_bench.model import LanguageModel
from quant_bench.numerics.moments import Channels, Moments
from quant_bench.numerics.places import Places
from quant_bench.numerics.spread import Incoherence
from quant_bench.observe import MEDIAN_STRIDE, Observer, Point, Statistics, points_of
from quant_bench.outliers import METRICS, summarize
from quant_bench.scoring import final_hidden
from quant_bench.tiny import CONFIGS, tiny_model

FAMILIES = sorted(CONFIGS)


def some_ids(count: int, batch: int = 1, seed: int = 1) -> Tensor:
    return torch.randint(3, 97, (batch, count), generator=torch.Generator().manual_seed(seed))


def tensors_of(model: LanguageModel, ids: Tensor) -> dict[tuple[str, str], np.ndarray]:
    """Every observed tensor of a one-sequence batch, gathered by hooks written here."""
    found: dict[tuple[str, str], np.ndarray] = {}
    handles = []
    for point in points_of(model):
        module = model.module.get_submodule(point.path)

        def keep(value: Any, key: tuple[str, str]) -> None:
            tensor = value[0] if isinstance(value, tuple) else value
            found[key] = tensor.detach().double().reshape(-1, tensor.shape[-1]).numpy().copy()

        key = (point.kind, point.path)
        if point.is_input:
            handles.append(module.register_forward_pre_hook(lambda m, a, key=key: keep(a, key)))
        else:
            handles.append(module.register_forward_hook(lambda m, a, out, key=key: keep(out, key)))
    with torch.no_grad():
        model.body(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def hooks_of(module: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_site_and_product_input_has_the_statistics_of_its_tensor(family: str) -> None:
    model, ids = tiny_model(family), some_ids(40)
    tensors = tensors_of(model, ids)
    with Observer(model) as observer:
        final_hidden(model, ids)
    assert len(observer.statistics) == len(model.layout.sites) + 2 * len(model.layout.layers)
    for statistics in observer.statistics:
        row, values = statistics.row(), tensors[statistics.point.kind, statistics.point.path]
        if statistics.point.is_site:
            assert row["inf_norm"] == pytest.approx(np.abs(values).max(), rel=1e-6)
            assert row["kurtosis"] == pytest.approx(scipy.stats.kurtosis(values.ravel(), fisher=False), rel=1e-6)
            by_token = scipy.stats.kurtosis(values, axis=1, fisher=False)
            assert row["token_kurtosis"] == pytest.approx(by_token.mean(), rel=1e-6)
            beyond = np.abs(values - values.mean()) > 6 * values.std()
            assert row["outlier_6sigma_share"] == pytest.approx(beyond.mean(), abs=1e-12)
        if statistics.point.feeds_product:
            channels = np.abs(values).max(0)
            if np.median(channels) > 0:
                assert row["channel_absmax_ratio"] == pytest.approx(channels.max() / np.median(channels), rel=1e-6)
            squares = (values**2).mean(0)
            assert row["channel_rms_kurtosis"] == pytest.approx((squares**2).mean() / squares.mean() ** 2, rel=1e-6)
            norms = np.sqrt((values**2).mean(1))
            assert row["incoherence"] == pytest.approx((np.abs(values).max(1) / norms).mean(), rel=1e-6)


def test_sequences_are_averaged_and_channels_run_over_all_of_them() -> None:
    model = tiny_model("llama")
    batches = [some_ids(30, seed=seed) for seed in range(5)]
    gathered = [tensors_of(model, ids) for ids in batches]
    with Observer(model) as observer:
        for ids in batches:
            final_hidden(model, ids)
    for statistics in observer.statistics:
        key = (statistics.point.kind, statistics.point.path)
        values = [tensors[key] for tensors in gathered]
        row = statistics.row()
        assert statistics.sequences == 5
        assert statistics.tokens == 150
        if statistics.point.is_site:
            assert row["inf_norm"] == pytest.approx(np.mean([np.abs(v).max() for v in values]), rel=1e-6)
            each = [scipy.stats.kurtosis(v.ravel(), fisher=False) for v in values]
            assert row["kurtosis"] == pytest.approx(np.mean(each), rel=1e-6)
            pooled = scipy.stats.kurtosis(np.concatenate(values).ravel(), fisher=False)
            assert row["pooled_kurtosis"] == pytest.approx(pooled, rel=1e-6)
        if statistics.point.feeds_product:
            channels = np.abs(np.concatenate(values)).max(0)
            assert row["channel_absmax_ratio"] == pytest.approx(channels.max() / np.median(channels), rel=1e-6)


def largest(table: dict[int, list[float]], reduce: Callable[[list[float]], float]) -> dict[str, float]:
    """The three largest of a table of lists."""
    values = {name: reduce(found) for name, found in table.items()}
    return {str(name): values[name] for name in sorted(values, key=lambda name: -values[name])[:3]}


def test_places_are_the_channels_positions_and_tokens_that_stand_out() -> None:
    model = tiny_model("llama")
    batches = [some_ids(count, seed=count) for count in (90, 30, 60)]
    gathered = [tensors_of(model, ids) for ids in batches]
    with Observer(model) as observer:
        for ids in batches:
            final_hidden(model, ids)
    placed = 0
    for statistics in observer.statistics:
        row = statistics.row()
        if statistics.point.kind not in ("layer_output", *(one.kind for one in points_of(model) if one.feeds_product)):
            assert "top_channels" not in row
            continue
        placed += 1
        tables: tuple[dict[int, list[float]], ...] = ({}, {}, {})
        for tensors, ids in zip(gathered, batches, strict=True):
            values = np.abs(tensors[statistics.point.kind, statistics.point.path])
            for position, token in enumerate(ids[0].tolist()):
                tables[1].setdefault(position, []).append(values[position].max())
                tables[2].setdefault(token, []).append(values[position].max())
            for channel in range(values.shape[1]):
                tables[0].setdefault(channel, []).append(values[:, channel].max())
        assert row["top_channels"] == pytest.approx(largest(tables[0], max), rel=1e-5)
        assert row["top_positions"] == pytest.approx(largest(tables[1], lambda found: float(np.mean(found))), rel=1e-5)
        assert row["top_tokens"] == pytest.approx(largest(tables[2], max), rel=1e-5)
    assert placed == 5 * len(model.layout.layers)


def test_the_outliers_of_tokens_are_told_with_their_texts() -> None:
    model = tiny_model("llama")
    with Observer(model) as observer:
        final_hidden(model, some_ids(40))
    details = summarize(observer.statistics, model)[1]
    tokens = {token for row in details["tensors"].values() for token in row.get("top_tokens", ())}
    assert tokens
    assert details["token_texts"] == {token: model.tokenizer.decode([int(token)]) for token in tokens}


@pytest.mark.parametrize("arm", ["softmax", "sink_token"])
@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_padding_counts_nowhere_and_a_batch_equals_its_sequences(family: str, arm: str) -> None:
    model = models.attach(tiny_model(family), arm)
    long, short = some_ids(30, seed=1), some_ids(17, seed=2)
    with Observer(model) as alone:
        final_hidden(model, long)
        final_hidden(model, short)
    padded = torch.cat((long, torch.cat((short, torch.zeros(1, 13, dtype=torch.int64)), 1)))
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[1, 17:] = False
    with Observer(model) as together:
        together.mask = mask
        # right padding: causal attention keeps real tokens from seeing it
        final_hidden(model, padded)
    for one, other in zip(alone.statistics, together.statistics, strict=True):
        # products read the sink token of each sequence, so it counts
        assert other.tokens == 47 + 2 * (arm == "sink_token")
        left, right = one.row(), other.row()
        for name in ("inf_norm", "kurtosis", "token_kurtosis", "channel_absmax_ratio", "incoherence"):
            assert right[name] == (None if left[name] is None else pytest.approx(left[name], rel=1e-4))
        if "top_tokens" in left:
            assert right["top_tokens"] == pytest.approx(left["top_tokens"], rel=1e-4)
            assert bool(left["top_tokens"]) == (arm != "sink_token")
            assert right["top_positions"] == pytest.approx(left["top_positions"], rel=1e-4)


def test_hooks_are_gone_after_use_and_after_an_error() -> None:
    model, ids = tiny_model("llama"), some_ids(10)
    before = hooks_of(model.module)
    with Observer(model):
        assert hooks_of(model.module) > before
        final_hidden(model, ids)
    assert hooks_of(model.module) == before
    with pytest.raises(RuntimeError, match="stop"), Observer(model):
        raise RuntimeError("stop")
    assert hooks_of(model.module) == before


def size_of(value: object) -> int:
    """Numbers kept in an object, wherever they lie."""
    if isinstance(value, np.ndarray):
        return int(value.size)
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, dict):
        return sum(size_of(part) for part in value.values())
    if isinstance(value, list | tuple):
        return sum(size_of(part) for part in value)
    if isinstance(value, Statistics | Moments | Point | Channels | Incoherence | Places):
        return size_of(vars(value))
    return 1


def test_memory_does_not_grow_with_the_number_of_batches() -> None:
    model = tiny_model("llama")
    sizes = []
    with Observer(model) as observer:
        for step in range(6):
            final_hidden(model, some_ids(25 - step, seed=step))
            # the ids of the batch at hand are gone with the next one
            kept = {name: value for name, value in vars(observer).items() if name not in ("model", "_tokens")}
            sizes.append(size_of(kept))
    assert len(set(sizes)) == 1


def test_an_activation_that_is_not_finite_is_an_error_that_names_the_tensor() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.module.get_submodule("model.layers.1.mlp.down_proj").weight[3, 4] = torch.inf
    with (
        pytest.raises(QuantizationError, match=r"mlp_output of 'model\.layers\.1\.mlp\.down_proj'"),
        Observer(model) as o,
    ):
        final_hidden(model, some_ids(10))
    assert o.statistics


def test_massive_activations_need_both_conditions() -> None:
    point = Point("layer", 0, "layer_output")
    # every token has the median 0.1, so 1,000 medians are 100
    values = torch.linspace(0.05, 0.15, 64).repeat(128, 1)
    values[3, 5], values[7, 9], values[100, 2] = 150.0, -130.0, 99.0
    statistics = Statistics(point)
    statistics.add(values)
    row = statistics.row()
    assert row["above_100"] == 2
    assert row["above_1000_medians"] == 2
    assert row["massive_activations"] == 2
    assert row["median"] == pytest.approx(0.1)
    assert row["massive_ratio"] == pytest.approx(1500.0)
    halved = Statistics(point)
    halved.add(values * 0.5)
    assert halved.row()["massive_activations"] == 0
    assert halved.row()["above_1000_medians"] == 2
    assert halved.row()["above_100"] == 0


def test_medians_are_taken_at_tokens_that_move_on_with_each_sequence() -> None:
    statistics = Statistics(Point("norm", 0, "mlp_norm"))
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randn(130, 32, generator=generator) for _ in range(3)]
    expected = []
    for index, values in enumerate(sequences):
        statistics.add(values)
        taken = values[index::MEDIAN_STRIDE].abs().double().numpy()
        expected.append((taken.max(1) / np.median(taken, axis=1)).mean())
    assert statistics.row()["max_median_ratio"] == pytest.approx(np.mean(expected), rel=1e-6)


def test_channels_and_tokens_without_a_median_leave_the_ratio_undefined() -> None:
    statistics = Statistics(Point("down", 0, "mlp_output_input", is_input=True))
    values = torch.zeros(70, 8)
    values[:, 0] = 3.0
    statistics.add(values)
    row = statistics.row()
    assert row["max_median_ratio"] is None
    assert row["channel_absmax_ratio"] is None
    assert row["channel_rms_kurtosis"] == pytest.approx(8.0)
    assert row["incoherence"] == pytest.approx(8**0.5)
    assert row["incoherence_p999"] == pytest.approx(8**0.5, rel=0.005)


def test_high_percentile_of_incoherence_is_right_to_the_width_of_a_bin() -> None:
    values = torch.randn(5000, 64, generator=torch.Generator().manual_seed(0))
    statistics = Statistics(Point("norm", 0, "mlp_norm"))
    statistics.add(values)
    wide = values.double().numpy()
    mu = np.abs(wide).max(1) / np.sqrt((wide**2).mean(1))
    assert statistics.row()["incoherence_p999"] == pytest.approx(np.quantile(mu, 0.999), rel=0.01)


def test_scores_reduce_over_the_stated_tensors() -> None:
    model, ids = tiny_model("llama"), some_ids(40)
    tensors = tensors_of(model, ids)
    with Observer(model) as observer:
        final_hidden(model, ids)
    plain, details = summarize(observer.statistics, model)
    scores = {one.metric.name: one.value for one in plain}
    sites = {key: values for key, values in tensors.items() if not key[0].endswith("_input")}
    assert scores["max_inf_norm"] == pytest.approx(max(np.abs(v).max() for v in sites.values()), rel=1e-6)
    blocks = [np.abs(v).max() for key, v in sites.items() if key[0] == "layer_output"]
    assert scores["max_inf_norm_block"] == pytest.approx(max(blocks), rel=1e-6)
    kurtosis = [scipy.stats.kurtosis(v.ravel(), fisher=False) for v in sites.values()]
    assert scores["max_kurtosis"] == pytest.approx(max(kurtosis), rel=1e-6)
    assert observer.latest()["avg_kurtosis"] == pytest.approx(np.mean(kurtosis), rel=1e-6)
    assert set(scores) | {"avg_kurtosis", "avg_kurtosis_published"} == set(METRICS)
    weights = [model.module.get_submodule(site.path).weight for site in model.layout.linears]
    each = [float(w.abs().max() / w.double().square().mean().sqrt()) for w in weights]
    assert scores["incoherence_weight"] == pytest.approx(np.mean(each), rel=1e-6)
    assert len(details["tensors"]) == len(observer.statistics)
