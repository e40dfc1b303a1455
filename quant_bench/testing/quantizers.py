"""The contract of quantizers, executable: `check_quantizer` raises AssertionError with what is broken."""

import copy
import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from quant_bench.errors import ModelError, NotApplicable
from quant_bench.lowbit.linear import QuantLinear
from quant_bench.model import LanguageModel
from quant_bench.quantizer import Quantizer, SchemeQuantizer
from quant_bench.testing import promises
from quant_bench.testing.promises import Finding, Moot, Named, Promise
from quant_bench.testing.quantized import Case, logits_of
from quant_bench.tiny import CONFIGS

# 16 bits leave weights and activations in float; what other parts of a recipe (smoothing, rotation) add is rounding
_FLOAT_TOLERANCE = 1e-3
_REWRITTEN_TOLERANCE = 1e-4
_RISING_BITS = (3, 5, 8)
# scope full and static ranges exist only for rounded activations
_DYNAMIC: dict[str, Any] = {"activation_static": False, "activation_range": "minmax", "percentile": 100.0}
_FLOAT: dict[str, Any] = {"scope": "linear", "kv_bits": 16, "execution": "simulated", **_DYNAMIC}


def check_quantizer(quantizer: Quantizer, families: Iterable[str] = tuple(CONFIGS)) -> dict[str, str]:
    """Hold a quantizer to `PROMISES` on tiny random models of every layout; takes seconds.

    Args:
        quantizer: an instance with any settings.
        families: layouts to check.

    Returns:
        Layouts that the quantizer refuses by NotApplicable, each with its reason.

    Raises:
        AssertionError: what is broken, with the layout. An error of the quantizer itself passes through.
        NotApplicable: it refuses all of them.
        Blocked: something that it needs is missing.
    """
    promises.require(promises.findings(promises.IDENTITY, [Named("quantizers", quantizer)]))
    return promises.require(findings(quantizer, families))


def findings(quantizer: Quantizer, families: Iterable[str] = tuple(CONFIGS)) -> Iterator[Finding]:
    """What a look at every promise finds, layout by layout."""
    return promises.findings(PROMISES, (Case(quantizer, family) for family in families))


def _weight(model: LanguageModel, path: str) -> Tensor:
    weight: Any = model.module.get_submodule(path).weight
    return weight.detach()


def _quantizes(case: Case) -> None:
    assert isinstance(case.quantized, LanguageModel), f"{case}: quantize returned {type(case.quantized).__name__}"


def _output(case: Case) -> None:
    shape, wanted = tuple(case.logits.shape), tuple(case.reference.shape)
    assert shape == wanted, f"{case}: shape {shape}, not {wanted}"
    assert bool(case.logits.isfinite().all()), f"{case}: logits are not finite"


def _deterministic(case: Case) -> None:
    assert torch.equal(case.logits, logits_of(case.quantized)), f"{case}: a second forward pass gives other logits"
    again = logits_of(case.quantize(case.build()))
    assert torch.equal(case.logits, again), f"{case}: quantizing the same model again gives other logits"


def _changes(case: Case) -> None:
    same = torch.equal(case.logits, case.reference)
    if case.is_none:
        assert same, f"{case}: `none` changes the model"
    else:
        assert not same, f"{case}: nothing was quantized"


def _kept(case: Case) -> None:
    """Embeddings and head bit for bit; a tied head still shares its storage."""
    if not case.quantizer.keeps_embeddings:
        raise Moot("the recipe rewrites the float model (keeps_embeddings = False)")
    original, quantized = case.build(), case.quantized
    head = original.layout.head
    before, after = (
        {path: _weight(model, path) for path in (head, *original.layout.embeddings)} for model in (original, quantized)
    )
    for path, values in before.items():
        assert torch.equal(values, after[path]), f"{case}: {path} was changed"
    for path in original.layout.embeddings:
        if before[path].data_ptr() == before[head].data_ptr():
            tied = after[path].data_ptr() == after[head].data_ptr()
            assert tied, f"{case}: the head is no longer tied to {path}"
            assert quantized.coverage.tied == {head: path}, f"{case}: coverage does not say `tied`"


def _rewritten(case: Case) -> None:
    """Other values, the same function: only a recipe that can leave every number in float can show it."""
    if case.quantizer.keeps_embeddings:
        raise Moot("the recipe keeps embeddings and head")
    original, quantized = case.build(), case.quantized
    for path in (original.layout.head, *original.layout.embeddings):
        assert _weight(original, path).shape == _weight(quantized, path).shape, f"{case}: {path} has another shape"
    head, tied = _weight(original, original.layout.head), _weight(quantized, original.layout.head)
    for path in original.layout.embeddings:
        was = _weight(original, path).data_ptr() == head.data_ptr()
        if was and _weight(quantized, path).data_ptr() != tied.data_ptr():
            said = any("untied" in note for note in quantized.coverage.notes)
            assert said, f"{case}: the head was untied and coverage does not say so"
    assert isinstance(case.quantizer, SchemeQuantizer), (
        f"{case}: embeddings changed, and no bits to show the same logits"
    )
    logits = logits_of(case.quantize(case.build(), weight_bits=16, activation_bits=16, **_FLOAT))
    gap = float((logits - case.reference).abs().max() / case.reference.abs().max())
    assert gap < _REWRITTEN_TOLERANCE, f"{case}: the rewritten float model's logits differ by {gap:.2g} of the largest"


def _covers(case: Case) -> None:
    quantized, coverage = case.quantized, case.quantized.coverage
    listed = {*coverage.quantized, *coverage.skipped}
    wanted = {*(site.path for site in quantized.layout.linears), *quantized.layout.embeddings, quantized.layout.head}
    assert not wanted - listed, f"{case}: coverage says nothing of {sorted(wanted - listed)}"
    assert not set(coverage.quantized) & set(coverage.skipped), f"{case}: both quantized and skipped"
    if not case.is_none:
        assert coverage.quantized, f"{case}: coverage says that nothing is quantized"
        assert 0.0 < coverage.mac_share <= 1.0, f"{case}: mac_share is {coverage.mac_share}"
        assert quantized.execution != "float", f"{case}: a quantized model says execution `float`"


def _state(case: Case) -> None:
    state = copy.deepcopy(case.quantized.module.state_dict())
    other = case.quantize(case.build(seed=1))
    assert not torch.equal(logits_of(other), case.logits), f"{case}: the second model is no other model"
    other.module.load_state_dict(state)
    assert torch.equal(logits_of(other), case.logits), f"{case}: loading saved state gives other logits"


def _comes_back(case: Case) -> None:
    try:
        loaded = case.reloaded()
    except NotApplicable as error:
        raise Moot(str(error)) from error
    except ModelError as error:
        raise AssertionError(f"{case}: {error}") from error
    assert torch.equal(logits_of(loaded), case.logits), f"{case}: the loaded model gives other logits"


def _copies(case: Case) -> None:
    if case.quantized.execution == "foreign":
        raise Moot("tensors of another library are its own: not all can be copied, and nothing here copies them")
    copied = dataclasses.replace(case.quantized, module=copy.deepcopy(case.quantized.module))
    assert torch.equal(logits_of(copied), case.logits), f"{case}: a deep copy gives other logits"


def _error(case: Case, bits: int, **other: Any) -> float:
    """Squared error of logits, relative to the float model's."""
    logits = logits_of(case.quantize(case.build(), weight_bits=bits, activation_bits=bits, **other)).double()
    reference = case.reference.double()
    return float((logits - reference).square().sum() / reference.square().sum())


def _nearly_float(case: Case) -> None:
    error = _error(case, 16, **_FLOAT)
    assert error < _FLOAT_TOLERANCE**2, f"{case}: at 16 bits the relative error is {error**0.5:.2g}"


def _falls(case: Case) -> None:
    errors = [_error(case, bits) for bits in _RISING_BITS]
    falls = all(few > many for few, many in itertools.pairwise(errors))
    assert falls, f"{case}: squared errors at {_RISING_BITS} bits do not fall: {errors}"


def _executions(case: Case) -> None:
    logits: list[Tensor] = []
    for execution in ("simulated", "integer"):
        asked = case.scheme.execution == execution
        try:
            model = case.quantized if asked else case.quantize(case.build(), execution=execution)
        except NotApplicable as error:
            raise Moot(str(error)) from error
        assert model.execution == execution, f"{case}: asked for {execution}, the model says {model.execution}"
        for path, module in model.module.named_modules():
            runs = module.execution if isinstance(module, QuantLinear) else execution
            assert runs == execution, f"{case}: asked for {execution}, {path} runs {runs}"
        logits.append(case.logits if asked else logits_of(model))
    gap = (logits[0] - logits[1]).abs().max()
    assert torch.equal(*logits), f"{case}: simulated and integer logits differ by {gap}"


def _key_values(case: Case) -> None:
    """Bits of the cache are applied in every attention, and to nothing else."""
    model = case.quantize(case.build(), kv_bits=4) if case.scheme.kv_bits != 4 else case.quantized
    attentions = [model.module.get_submodule(path) for path in model.layout.attentions]
    rounded = [path for path, module in zip(model.layout.attentions, attentions, strict=True) if _rounds(module)]
    missing = sorted(set(model.layout.attentions) - set(rounded))
    assert not missing, f"{case}: kv_bits=4 leaves the keys and values of {missing} in float"
    if case.scheme.kv_bits == 16:
        assert not torch.equal(logits_of(model), case.logits), f"{case}: kv_bits=4 changes nothing"


def _rounds(attention: Any) -> bool:
    """Whether an attention rounds the keys that it is given."""
    transform = getattr(attention, "key_value_transform", None)
    if transform is None:
        return False
    states = torch.linspace(-1.0, 1.0, 20).reshape(1, 1, 1, 20)
    return bool((transform(states, states)[0] != states).any())


PROMISES = (
    Promise(
        "a model of the layout can be quantized",
        "a LanguageModel, or NotApplicable with the reason",
        "change the products by replace_linears or apply_scheme, and return the model",
        _quantizes,
        opening=True,
    ),
    Promise(
        "logits keep their shape and are finite",
        "the float model's shape, no NaN and no infinity",
        "a scale of 0 or a division by it is the usual reason; GPT-2 keeps weights the other way round: use weight_of",
        _output,
    ),
    Promise(
        "the same model gives the same logits each time",
        "equal logits of two forward passes, and of two quantizations",
        "draw random numbers from a torch.Generator that a setting seeds",
        _deterministic,
    ),
    Promise(
        "something is quantized",
        "logits other than the float model's",
        "did `quantize` return the model that it changed, and put the new modules in place?",
        _changes,
    ),
    Promise(
        "embeddings and head keep their values",
        "equal bits, and a tied head that still shares its storage",
        "change layout.linears only; a recipe that rewrites the float model sets keeps_embeddings = False",
        _kept,
    ),
    Promise(
        "a rewritten float model is the same function",
        f"at 16 bits logits within {_REWRITTEN_TOLERANCE:g} of the largest, and a note where a head was untied",
        "every factor that is folded into one matrix must be taken out of another",
        _rewritten,
    ),
    Promise(
        "coverage accounts for every weight matrix",
        "each is listed as quantized or as skipped; share of the products above 0; an execution other than `float`",
        "replacing modules need `describe()`; set model.coverage = coverage_of(model) and model.execution",
        _covers,
    ),
    Promise(
        "saved state gives the same logits in another model",
        "equal logits after load_state_dict",
        "keep codes, scales and ranges in buffers, and nothing that is derived from them outside",
        _state,
    ),
    Promise(
        "a folder gives the same model back",
        "equal logits after saving and loading; NotApplicable if another engine executes the model",
        "declare module classes of your own with @rebuildable (docs/saving.md)",
        _comes_back,
    ),
    Promise(
        "a deep copy gives the same logits",
        "equal logits",
        "modules must not hold references to the model that they were made in",
        _copies,
    ),
    Promise(
        "16 bits are nearly float",
        f"a relative error of the logits below {_FLOAT_TOLERANCE:g}",
        "weight_bits=16 and activation_bits=16 must leave weights and activations in float",
        _nearly_float,
    ),
    Promise(
        "the error falls as bits rise",
        f"a smaller squared error of the logits at each of {_RISING_BITS} bits",
        "do the codes use the whole grid of weight_bits, and the scale its end?",
        _falls,
    ),
    Promise(
        "simulated and integer execution agree",
        "equal logits, bit for bit",
        "decide codes and scales only: QuantLinear executes them",
        _executions,
    ),
    Promise(
        "kv_bits rounds keys and values",
        "every attention rounds its keys and values at kv_bits=4",
        "apply_scheme does it; a recipe that does not use it calls quantization.keyvalue.round_key_values",
        _key_values,
    ),
)
