"""The float model's moments are found once for recipes that ask the same, and never taken from another model."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quant_bench import registry
from quant_bench.model import LanguageModel
from quant_bench.models import attach
from quant_bench.quantization import float_pass
from quant_bench.quantization.layerwise import SPILL_VARIABLE
from quant_bench.quantization.moments import Moments
from quant_bench.quantizer import Calibration
from quant_bench.testing import tiny_calibration, tiny_ids, tiny_model

SETTINGS = "(calibration_batches=1)"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    float_pass.forget_moments()
    yield
    float_pass.forget_moments()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever the inputs of a layer are looked at."""
    seen: list[int] = []
    real = float_pass.layer_moments

    def counted(model: LanguageModel, stream: object, **options: object) -> dict[str, Moments]:
        seen.append(1)
        return real(model, stream, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(float_pass, "layer_moments", counted)
    return seen


def logits(text: str, model: LanguageModel | None = None, calibration: Calibration | None = None) -> Tensor:
    quantizer = registry.build("quantizers", text)
    given = calibration or tiny_calibration(quantizer)
    quantized = quantizer.quantize(model or tiny_model("llama"), given)
    with torch.no_grad():
        found: Tensor = quantized.module(input_ids=tiny_ids(), use_cache=False).logits
    return found


@pytest.mark.parametrize("second", ["smoothquant:w4a4", "awq:w3a16", "smoothquant:w8a8"])
def test_a_second_recipe_gives_what_it_gives_alone(second: str, looks: list[int]) -> None:
    alone = logits(second + SETTINGS)
    float_pass.forget_moments()
    logits("awq:w4a16" + SETTINGS)
    looks.clear()
    assert torch.equal(logits(second + SETTINGS), alone)
    assert not looks


def test_moments_are_found_again_for_all_that_differs(looks: list[int]) -> None:
    def passes(*arguments: object) -> int:
        looks.clear()
        logits(*arguments)  # type: ignore[arg-type]
        return len(looks) // 2

    smooth, awq = f"smoothquant{SETTINGS}", f"awq{SETTINGS}"
    given = tiny_calibration(registry.build("quantizers", smooth))
    assert passes(smooth) == 1
    assert passes(smooth) == 0
    # of second moments there were none, and of rows neither
    assert passes(awq) == 1
    assert passes(awq) == 0
    assert passes(smooth) == 0
    assert passes("smoothquant(calibration_batches=1,search=True)") == 1
    assert passes(smooth, tiny_model("llama", seed=3)) == 1
    assert passes(smooth, tiny_model("llama")) == 1
    other = dataclasses.replace(given, sha256="1" * 64)
    assert passes(smooth, None, other) == 1
    # text without a digest is no text to recognize
    assert passes(smooth, None, dataclasses.replace(given, sha256=None)) == 1
    assert passes(smooth, None, other) == 0
    # nothing is known of what an arm's core depends on
    assert passes(smooth, attach(tiny_model("llama"), "softmax1")) == 1
    assert passes(smooth, attach(tiny_model("llama"), "softmax1")) == 1


def test_what_is_kept_is_not_what_a_recipe_changes(looks: list[int]) -> None:
    first = logits(f"awq:w3a16{SETTINGS}")
    assert torch.equal(logits(f"awq:w3a16{SETTINGS}"), first)
    assert torch.equal(logits(f"awq:w3a16{SETTINGS}"), first)
    assert len(looks) == 2


def test_large_moments_are_not_kept(looks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    # second moments of a layer: query (48), output (48), gate (48), down (80) times themselves, with two vectors each
    values = 2 * sum(width * width + 2 * width for width in (48, 48, 48, 80))
    monkeypatch.setattr(float_pass, "MOST_BYTES", 4 * values - 1)
    logits(f"awq{SETTINGS}")
    logits(f"awq{SETTINGS}")
    assert len(looks) == 4
    monkeypatch.setattr(float_pass, "MOST_BYTES", 4 * values)
    logits(f"awq{SETTINGS}")
    logits(f"awq{SETTINGS}")
    assert len(looks) == 6


def test_spilling_keeps_no_second_moments_in_memory(
    looks: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = logits(f"awq{SETTINGS}")
    float_pass.forget_moments()
    looks.clear()
    monkeypatch.setenv(SPILL_VARIABLE, str(tmp_path))
    assert torch.equal(logits(f"awq{SETTINGS}"), alone)
    assert torch.equal(logits(f"awq{SETTINGS}"), alone)
    assert len(looks) == 4
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("recipe", ["gptq:w4a16", "quarot:w4a4(weights=gptq)", "omniquant:w4a4(epochs=1)"])
def test_recipes_that_run_rounded_layers_give_the_same_when_states_are_spilled(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantizer = dataclasses.replace(registry.build("quantizers", recipe), calibration_batches=1)
    text = registry.canonical("quantizers", quantizer)
    held = logits(text)
    monkeypatch.setenv(SPILL_VARIABLE, str(tmp_path))
    assert torch.equal(logits(text), held)
    assert not list(tmp_path.iterdir())
