"""The contract of quantizers, executable: `check_quantizer` raises AssertionError with what is broken."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from quant_bench import registry
from quant_bench.errors import NotApplicable
from quant_bench.model import LanguageModel
from quant_bench.quantizer import Quantizer, SchemeQuantizer
from quant_bench.testing.tokens import tiny_calibration, tiny_ids
from quant_bench.tiny import CONFIGS, tiny_model

Build = Callable[[], LanguageModel]

# 16 bits leave weights and activations in float; what other parts of a recipe (smoothing, rotation) add is rounding
_FLOAT_TOLERANCE = 1e-3
_REWRITTEN_TOLERANCE = 1e-4
_RISING_BITS = (3, 5, 8)


def check_quantizer(quantizer: Quantizer, families: Iterable[str] = tuple(CONFIGS)) -> None:
    """Hold a quantizer to its contract on tiny random models of every layout; takes seconds.

    - the output keeps its shape, is finite, the same each time, and differs from the float model's (but for `none`);
    - a recipe with bits: 16 of them are nearly float, and the error falls as they rise;
    - a recipe with executions: simulated and integer logits are equal, bit for bit;
    - head and embeddings keep their values, and a tied head its shared storage; a recipe that says it rewrites the
      float model (`keeps_embeddings = False`) must instead give equal float logits at 16 bits, to 1e-4 of the largest,
      keep the shapes, and say in its coverage notes that it untied a tied head;
    - every weight matrix is in the coverage report;
    - state saved from one quantized model and loaded into another gives the first one's logits;
    - the settings survive being written as text; the docstring has a `Source:`.

    Args:
        quantizer: an instance with any settings.
        families: layouts to check.

    Raises:
        AssertionError: what is broken, with the layout.
    """
    _check_identity(quantizer)
    for family in families:

        def build(family: str = family) -> LanguageModel:
            return tiny_model(family)

        quantized = _quantize(quantizer, build())
        _check_output(quantizer, build, quantized, family)
        if quantizer.keeps_embeddings:
            _check_kept(build(), quantized, family)
        else:
            _check_rewritten(quantizer, build, quantized, family)
        _check_coverage(quantizer, quantized, family)
        _check_state(quantizer, quantized, family)
        if isinstance(quantizer, SchemeQuantizer):
            _check_bits(quantizer, build, family)
            _check_executions(quantizer, build, family)


def _quantize(quantizer: Quantizer, model: LanguageModel) -> LanguageModel:
    return quantizer.quantize(model, tiny_calibration(quantizer))


def _logits(model: LanguageModel) -> Float[Tensor, "batch seq vocab"]:
    with torch.no_grad():
        logits: Tensor = model.module(input_ids=tiny_ids(), use_cache=False).logits
    return logits


def _check_identity(quantizer: Quantizer) -> None:
    plugin = type(quantizer)
    assert "Source:" in (plugin.__doc__ or ""), f"{plugin.__name__}: the docstring has no `Source:`"
    text = registry.canonical("quantizers", quantizer)
    assert registry.build("quantizers", text) == quantizer, f"{text!r} does not give the same settings back"


def _is_none(quantizer: Quantizer) -> bool:
    return registry.canonical("quantizers", quantizer) == "none"


def _check_output(quantizer: Quantizer, build: Build, quantized: LanguageModel, family: str) -> None:
    reference, logits = _logits(build()), _logits(quantized)
    assert logits.shape == reference.shape, f"{family}: shape {tuple(logits.shape)}, not {tuple(reference.shape)}"
    assert bool(logits.isfinite().all()), f"{family}: logits are not finite"
    assert torch.equal(logits, _logits(quantized)), f"{family}: a second forward pass gives other logits"
    again = _logits(_quantize(quantizer, build()))
    assert torch.equal(logits, again), f"{family}: quantizing the same model again gives other logits"
    if _is_none(quantizer):
        assert torch.equal(logits, reference), f"{family}: `none` changes the model"
    else:
        assert not torch.equal(logits, reference), f"{family}: nothing was quantized"


def _check_kept(original: LanguageModel, quantized: LanguageModel, family: str) -> None:
    """Embeddings and head bit for bit; a tied head still shares its storage."""
    kept = (original.layout.head, *original.layout.embeddings)
    before, after = ({path: _weight(model, path) for path in kept} for model in (original, quantized))
    for path in kept:
        assert torch.equal(before[path], after[path]), f"{family}: {path} was changed"
    for path in original.layout.embeddings:
        if before[path].data_ptr() == before[original.layout.head].data_ptr():
            tied = after[path].data_ptr() == after[original.layout.head].data_ptr()
            assert tied, f"{family}: the head is no longer tied to {path}"
            assert quantized.coverage.tied == {original.layout.head: path}, f"{family}: coverage does not say `tied`"


def _check_rewritten(quantizer: Quantizer, build: Build, quantized: LanguageModel, family: str) -> None:
    """Other values, the same function: only a recipe that can leave every number in float can show it."""
    original = build()
    for path in (original.layout.head, *original.layout.embeddings):
        assert _weight(original, path).shape == _weight(quantized, path).shape, f"{family}: {path} has another shape"
    head, tied = _weight(original, original.layout.head), _weight(quantized, original.layout.head)
    for path in original.layout.embeddings:
        was = _weight(original, path).data_ptr() == head.data_ptr()
        if was and _weight(quantized, path).data_ptr() != tied.data_ptr():
            said = any("untied" in note for note in quantized.coverage.notes)
            assert said, f"{family}: the head was untied and coverage does not say so"
    assert isinstance(quantizer, SchemeQuantizer), f"{family}: embeddings changed, and no bits to show the same logits"
    # 16 bits everywhere; scope full and static ranges exist only for rounded activations
    exact: dict[str, Any] = {"weight_bits": 16, "activation_bits": 16, "kv_bits": 16, "execution": "simulated"}
    exact |= {"scope": "linear", "activation_static": False, "activation_range": "minmax", "percentile": 100.0}
    reference, logits = _logits(original), _logits(_quantize(dataclasses.replace(quantizer, **exact), build()))
    gap = float((logits - reference).abs().max() / reference.abs().max())
    assert gap < _REWRITTEN_TOLERANCE, (
        f"{family}: the rewritten float model's logits differ by {gap:.2g} of the largest"
    )


def _weight(model: LanguageModel, path: str) -> Tensor:
    weight: Any = model.module.get_submodule(path).weight
    return weight.detach()


def _check_coverage(quantizer: Quantizer, quantized: LanguageModel, family: str) -> None:
    coverage = quantized.coverage
    listed = {*coverage.quantized, *coverage.skipped}
    wanted = {*(site.path for site in quantized.layout.linears), *quantized.layout.embeddings, quantized.layout.head}
    assert not wanted - listed, f"{family}: coverage says nothing of {sorted(wanted - listed)}"
    assert not set(coverage.quantized) & set(coverage.skipped), f"{family}: both quantized and skipped"
    if not _is_none(quantizer):
        assert coverage.quantized, f"{family}: coverage says that nothing is quantized"
        assert 0.0 < coverage.mac_share <= 1.0, f"{family}: mac_share is {coverage.mac_share}"
        assert quantized.execution != "float", f"{family}: a quantized model says execution `float`"


def _check_state(quantizer: Quantizer, quantized: LanguageModel, family: str) -> None:
    state = copy.deepcopy(quantized.module.state_dict())
    other = _quantize(quantizer, tiny_model(family, seed=1))
    assert not torch.equal(_logits(other), _logits(quantized)), f"{family}: the second model is no other model"
    other.module.load_state_dict(state)
    assert torch.equal(_logits(other), _logits(quantized)), f"{family}: loading saved state gives other logits"
    copied = dataclasses.replace(quantized, module=copy.deepcopy(quantized.module))
    assert torch.equal(_logits(copied), _logits(quantized)), f"{family}: a deep copy gives other logits"


def _check_bits(quantizer: SchemeQuantizer, build: Build, family: str) -> None:
    reference = _logits(build()).double()

    def error(bits: int, **other: Any) -> float:
        changed = dataclasses.replace(quantizer, weight_bits=bits, activation_bits=bits, **other)
        logits = _logits(_quantize(changed, build())).double()
        return float((logits - reference).square().sum() / reference.square().sum())

    # scope full and static ranges exist only for rounded activations
    dynamic: dict[str, Any] = {"activation_static": False, "activation_range": "minmax", "percentile": 100.0}
    full = error(16, scope="linear", kv_bits=16, execution="simulated", **dynamic)
    assert full < _FLOAT_TOLERANCE**2, f"{family}: at 16 bits the relative error is {full**0.5:.2g}"
    errors = [error(bits) for bits in _RISING_BITS]
    falls = all(few > many for few, many in itertools.pairwise(errors))
    assert falls, f"{family}: squared errors at {_RISING_BITS} bits do not fall: {errors}"


def _check_executions(quantizer: SchemeQuantizer, build: Build, family: str) -> None:
    logits: list[Tensor] = []
    for execution in ("simulated", "integer"):
        try:
            changed = dataclasses.replace(quantizer, execution=execution)
            model = _quantize(changed, build())
        except NotApplicable:
            return
        assert model.execution == execution, f"{family}: asked for {execution}, the model says {model.execution}"
        logits.append(_logits(model))
    assert torch.equal(*logits), (
        f"{family}: simulated and integer logits differ by {(logits[0] - logits[1]).abs().max()}"
    )
