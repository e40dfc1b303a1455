"""The contract of arms, executable: `check_arm` raises AssertionError with what is broken."""

import copy
import dataclasses
import inspect
import tempfile
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quant_bench import attention, models, registry
from quant_bench.arm import Arm, Attended
from quant_bench.errors import NotApplicable
from quant_bench.mechanisms import undecayed
from quant_bench.model import LanguageModel
from quant_bench.packing import Memory, Segment, packed_hidden
from quant_bench.testing import promises
from quant_bench.testing.layers import watched_layers
from quant_bench.testing.promises import Finding, Named, Promise
from quant_bench.testing.tokens import tiny_calibration, tiny_ids
from quant_bench.tiny import CONFIGS, tiny_model

# float64 forward passes that differ in the order of sums
_EXACT = 1e-9
# relative error that a float32 epsilon of the narrower dtypes explains, through one attention layer
_NARROW = {torch.bfloat16: 6e-2, torch.float16: 1e-2}


def check_arm(arm: Arm, families: Iterable[str] = tuple(CONFIGS)) -> dict[str, str]:
    """Hold an arm to `PROMISES` on tiny random models of every layout, its parameters moved away from their start.

    Args:
        arm: an instance with any settings.
        families: layouts to check.

    Returns:
        Layouts that the arm refuses by NotApplicable, each with its reason.

    Raises:
        AssertionError: what is broken, with the layout. An error of the arm itself passes through.
        NotApplicable: it refuses all of them.
    """
    promises.require(promises.findings(promises.IDENTITY, [Named("arms", arm)]))
    return promises.require(findings(arm, families))


def findings(arm: Arm, families: Iterable[str] = tuple(CONFIGS)) -> Iterator[Finding]:
    """What a look at every promise finds, layout by layout."""
    return promises.findings(PROMISES, (Case(arm, family) for family in families))


class Case:
    """An arm on the tiny model of one layout."""

    def __init__(self, arm: Arm, family: str) -> None:
        self.arm, self.family = arm, family

    def __str__(self) -> str:
        return self.family

    @cached_property
    def model(self) -> LanguageModel:
        """The model with the arm."""
        return _moved(self.arm, self.family)


def _moved(arm: Arm, family: str) -> LanguageModel:
    """A tiny model with the arm, whose parameters have left their initial values."""
    plain = {name for name, _ in tiny_model(family).module.named_parameters()}
    model = models.attach(tiny_model(family), arm)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.module.named_parameters():
        if name.replace(".projection.", ".") not in plain:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def _error(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach(), wanted.detach()
    return float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-9))


def _attaches(case: Case) -> None:
    assert isinstance(case.model, LanguageModel), f"{case}: attach returned {type(case.model).__name__}"


def _reference(case: Case) -> None:
    """Every layer's output and gradients, in float64."""
    arm, family = case.arm, case.family
    model = dataclasses.replace(case.model, module=copy.deepcopy(case.model.module).double())
    own = [p for name, p in model.module.named_parameters() if name in undecayed(model.module)]
    for parameter in own:
        parameter.requires_grad_(True)
    with watched_layers(model) as layers:
        model.module(input_ids=tiny_ids(), use_cache=False)
    for index, layer in enumerate(layers):
        a, core = layer.attended(model.max_length), attention.core_of(layer.module)
        wanted = arm.reference(a).transpose(1, 2).flatten(2)
        error = _error(layer.operands["output"], wanted)
        assert error < _EXACT, f"{family}, layer {index}: output differs from `reference` by {error:.2g}"
        leaves = [a.query, a.key, layer.operands["value"]]
        leaves = [leaf.detach().requires_grad_(True) for leaf in leaves]
        mixed = core(layer.module, *leaves, mask=layer.operands["mask"], scaling=a.scaling)
        # the core sees gated values and the output is gated behind it: what is left of the arm is its weights
        plain = dataclasses.replace(a, query=leaves[0], key=leaves[1], value=leaves[2])
        truth = arm.weights(plain) @ plain.of_heads(leaves[2])
        factor = torch.randn(truth.shape, generator=torch.Generator().manual_seed(5), dtype=truth.dtype)
        trained = [p for p in layer.module.parameters() if p.requires_grad and p in set(own)]
        found = torch.autograd.grad((mixed * factor).sum(), [*leaves, *trained], allow_unused=True)
        expected = torch.autograd.grad((truth * factor).sum(), [*leaves, *trained], allow_unused=True)
        names = ("query", "key", "value", *("parameter",) * len(trained))
        for name, got, want in zip(names, found, expected, strict=True):
            assert (got is None) == (want is None), f"{family}, layer {index}: no gradient of {name}"
            if got is not None and want is not None:
                error = _error(got, want)
                assert error < 1e-6, f"{family}, layer {index}: gradient of {name} differs by {error:.2g}"


def _extremes(case: Case) -> None:
    """Logits of ±100, rows that may see nothing, and narrow dtypes, for the core of the first layer."""
    arm, model, family = case.arm, case.model, case.family
    with watched_layers(model) as layers, torch.no_grad():
        model.module(input_ids=tiny_ids(), use_cache=False)
    a = layers[0].attended(model.max_length)
    generator = torch.Generator().manual_seed(7)
    mask = torch.rand(a.query.shape[0], 1, a.query.shape[2], a.key.shape[2], generator=generator) < 0.5
    mask[0, 0, 0] = False
    largest = float((a.query @ a.of_heads(a.key).transpose(-1, -2) * a.scaling).abs().max())
    for scale, masks in ((100.0 / largest, (a.mask, mask)), (1.0, (mask,))):
        for allowed in masks:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                narrow = copy.deepcopy(layers[0].module).to(dtype)
                narrowed = dataclasses.replace(
                    a,
                    query=(a.query * scale).to(dtype),
                    key=a.key.to(dtype),
                    value=a.value.to(dtype),
                    mask=allowed,
                )
                leaves = [part.detach().requires_grad_(True) for part in (narrowed.query, narrowed.key, narrowed.value)]
                mixed = attention.core_of(narrow)(narrow, *leaves, mask=allowed, scaling=a.scaling)
                gradients = torch.autograd.grad(mixed.float().square().sum(), leaves)
                where = f"{family}, {dtype}, logits up to {largest * scale:.0f}"
                assert all(bool(part.isfinite().all()) for part in (mixed, *gradients)), f"{where}: not finite"
                if allowed is mask:
                    assert not mixed[0, :, 0].any(), f"{where}: a query that may see nothing reads something"
                if scale == 1.0:
                    _near(arm, narrowed, narrow, mixed, where)


def _near(arm: Arm, case: Attended, module: nn.Module, mixed: Tensor, where: str) -> None:
    """A narrow dtype against the reference on the same operands, in float64."""
    wide = {name: part.double() for name, part in (*module.named_parameters(), *module.named_buffers())}
    exact = dataclasses.replace(
        case, query=case.query.double(), key=case.key.double(), value=case.value.double(), parameters=wide
    )
    error = _error(mixed.double(), arm.weights(exact) @ exact.of_heads(exact.value))
    assert error < _NARROW.get(mixed.dtype, 1e-4), f"{where}: differs from `reference` by {error:.2g}"


@torch.no_grad()
def _hidden(model: LanguageModel, ids: Tensor, **options: Any) -> Tensor:
    body: Any = model.body
    hidden: Tensor = body(input_ids=ids, **options).last_hidden_state
    return hidden


@torch.no_grad()
def _paths(case: Case) -> None:
    """Every way of running a model gives the hidden states of a plain forward pass."""
    model, family = case.model, case.family
    ids = tiny_ids()
    plain = _hidden(model, ids, use_cache=False)
    assert bool(plain.isfinite().all()), f"{family}: hidden states are not finite"
    again = _hidden(model, ids[:1], use_cache=False)
    assert _error(again, plain[:1]) < 1e-5, f"{family}: hidden states depend on the batch"
    body: Any = model.body
    first = body(input_ids=ids[:, :9], use_cache=True)
    # the cache's name before and after transformers 5.2x
    name = "cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"
    options = {name: first.past_key_values, "use_cache": True}
    steps = [body(input_ids=ids[:, 9:11], **options).last_hidden_state]
    for step in range(11, ids.shape[1]):
        steps.append(body(input_ids=ids[:, step : step + 1], **options).last_hidden_state)
    error = _error(torch.cat(steps, 1), plain[:, 9:])
    assert error < 1e-4, f"{family}: decoding with a cache differs from the full forward pass by {error:.2g}"
    error = _error(_left_padded(model, ids), plain[1])
    assert error < 1e-4, f"{family}: left padding changes hidden states by {error:.2g}"
    row = ids[0].tolist()
    memory = Memory(len(row))
    packed = [packed_hidden(model, [Segment(row[:9]), Segment(row[9:], 0), Segment(ids[1].tolist())])]
    packed += [packed_hidden(model, [Segment(row[:9], memory, keep=True)])]
    packed += [packed_hidden(model, [Segment([token], memory, keep=True)]) for token in row[9:]]
    error = _error(packed[0], torch.cat((plain[0], plain[1])))
    assert error < 1e-4, f"{family}: a packed row differs from plain forward passes by {error:.2g}"
    error = _error(torch.cat(packed[1:]), plain[0])
    assert error < 1e-4, f"{family}: packed decoding differs from the full forward pass by {error:.2g}"


def _left_padded(model: LanguageModel, ids: Tensor) -> Tensor:
    """Hidden states of the second sequence behind five tokens of padding."""
    pad = 5
    padded = torch.cat((torch.zeros(2, pad, dtype=ids.dtype), ids[:2]), 1)
    padded[0] = ids[2].repeat(2)[: padded.shape[1]]
    mask = torch.ones_like(padded)
    mask[1, :pad] = 0
    options: dict[str, Any] = {"attention_mask": mask}
    if model.layout.family != "opt":
        # OPT counts positions from the mask by itself
        options["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    return _hidden(model, padded, use_cache=False, **options)[1, pad:]


@torch.no_grad()
def _storage(case: Case) -> None:
    arm, model, family = case.arm, case.model, case.family
    ids = tiny_ids()
    logits = model.module(input_ids=ids, use_cache=False).logits
    with tempfile.TemporaryDirectory() as folder:
        models.save(model, folder)
        loaded = models.load_model(folder, models.LoadOptions(cache=Path(folder) / "cache"))
    assert models.arm_of(loaded) == registry.canonical("arms", arm), f"{family}: the arm is not noted in config.json"
    assert torch.equal(logits, loaded.module(input_ids=ids, use_cache=False).logits), f"{family}: loaded, it differs"
    copied = copy.deepcopy(model.module)
    assert torch.equal(logits, copied(input_ids=ids, use_cache=False).logits), f"{family}: a deep copy differs"
    assert models.attach(loaded, arm) is loaded, f"{family}: the arm is attached twice"


@torch.no_grad()
def _quantized(case: Case) -> None:
    """W8A8 in both executions and in scope full, with every product accounted for."""
    family = case.family
    logits: list[Tensor] = []
    for text in ("w8a8", "w8a8-integer", "w8a8-static(calibration_batches=1)"):
        quantizer = registry.build("quantizers", text)
        try:
            model = quantizer.quantize(_moved(case.arm, family), tiny_calibration(quantizer))
        except NotApplicable:
            continue
        logits.append(model.module(input_ids=tiny_ids(), use_cache=False).logits)
        assert bool(logits[-1].isfinite().all()), f"{family}: logits under {text} are not finite"
        listed = {*model.coverage.quantized, *model.coverage.skipped}
        for path, module in model.module.named_modules():
            if isinstance(module, nn.Linear) or (list(module.parameters(recurse=False)) and "gate" in path):
                known = path in listed or path.rpartition(".")[0] in listed
                assert known, f"{family}: coverage under {text} says nothing of {path}"
    assert torch.equal(logits[0], logits[1]), f"{family}: simulated and integer logits differ"


PROMISES = (
    Promise(
        "the arm can be attached to the layout",
        "a LanguageModel, or NotApplicable with the reason",
        "`attach` changes the model by what quant_bench.mechanisms offers, and returns it",
        _attaches,
        opening=True,
    ),
    Promise(
        "every layer gives what `reference` says, and so do its gradients",
        f"in float64 outputs within {_EXACT:g} of the largest, gradients within 1e-06, some for each parameter",
        "is `normalize` (or `bias`, `gate`, `output`) the same formula as what `attach` installs?",
        _reference,
    ),
    Promise(
        "extreme scores and narrow dtypes stay finite and near the reference",
        "scores of ±100 and rows that may see nothing: finite, nothing read; bfloat16 and float16 near float64",
        "subtract the largest score before exp, and let rows without a score be 0, not NaN",
        _extremes,
    ),
    Promise(
        "a cache, left padding and packed rows give a plain forward pass's hidden states",
        "hidden states within 1e-04 of the largest",
        "a mechanism may know a token's scores and positions only, never its place in the batch",
        _paths,
    ),
    Promise(
        "a saved model is loaded with equal logits",
        "equal logits after saving and loading and of a deep copy; attached once only",
        "keep parameters in modules of the layer, named as they are after `attach`",
        _storage,
    ),
    Promise(
        "simulated and integer W8A8 agree, and coverage accounts for every product",
        "equal logits, bit for bit; every matrix and gate is listed",
        "new products are nn.Linear in the layout; what must stay in float says why (`float_because`)",
        _quantized,
    ),
)
