"""Parity: do the executions of a quantized model agree, layer by layer and end to end?"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from quant_bench.errors import NotApplicable
from quant_bench.lowbit.linear import QuantLinear
from quant_bench.model import LanguageModel
from quant_bench.perplexity import TextWindows
from quant_bench.quantizer import Execution
from quant_bench.score import Metric
from quant_bench.scoring import CHUNK_TOKENS, final_hidden, logits
from quant_bench.task import Context, Evaluation, Measure, Plain
from quant_bench.windows import Windows

WRONG = Metric("wrong_accumulators", "accumulators", "lower")
CHECKED = Metric("checked_accumulators", "accumulators", "neither")
LINEARS_EQUAL = Metric("linears_equal", "share", "higher")
HIDDEN_EQUAL = Metric("hidden_equal", "share", "higher", "mean")
LOGITS_EQUAL = Metric("logits_equal", "share", "higher", "mean")
CLASSIC_NATS = Metric("classic_nll_difference", "nats/token", "neither", "mean")
CLASSIC_ABSOLUTE = Metric("classic_nll_absolute_difference", "nats/token", "lower", "mean")
CLASSIC_CHANGED = Metric("classic_changed_argmax", "share", "lower", "mean")
CLASSIC_PERPLEXITY = Metric("classic_perplexity_difference", "1", "neither")
# tokens of a window whose accumulators are checked: int64 products have no fast kernel
REFERENCE_TOKENS = 64


@dataclass
class LayerParity:
    """What was found at one layer; `first` is (window, token, row) of the first unequal output, or None.

    A layer that no forward pass reached was not compared, and is not equal.
    """

    kernel: str
    checked: int = 0
    wrong: int = 0
    outputs: int = 0
    unequal: int = 0
    first: tuple[int, int, int] | None = None

    @property
    def faultless(self) -> bool:
        """Whether accumulators and outputs were compared, and all were right and equal."""
        return self.checked > 0 and self.wrong == 0 and self.equal

    @property
    def equal(self) -> bool:
        """Whether outputs were compared, and all were equal."""
        return self.outputs > 0 and self.unequal == 0


@dataclass
class _Found:
    layers: dict[str, LayerParity]
    rows: list[dict[str, Any]] = field(default_factory=list)
    first_hidden: tuple[int, int] | None = None
    first_logits: tuple[int, int] | None = None


def integer_layers(model: LanguageModel) -> dict[str, QuantLinear]:
    """Layers whose products are integer products, by path.

    Raises:
        NotApplicable: the model has none; the message says why.
    """
    layers = {path: module for path, module in model.module.named_modules() if isinstance(module, QuantLinear)}
    if not layers:
        what = "a float model has" if model.execution == "float" else f"execution {model.execution!r} has"
        raise NotApplicable(f"parity compares executions of the same codes, and {what} no layer of ours with codes")
    integer = {path: layer for path, layer in layers.items() if layer.activation is not None}
    if not integer:
        raise NotApplicable("weight-only: activations stay in float, so there are no integer products to compare")
    return integer


@contextmanager
def executing(layers: dict[str, QuantLinear], execution: Execution) -> Iterator[None]:
    """Switch the execution of layers, on the same codes and scales, and switch it back."""
    before = {path: layer.execution for path, layer in layers.items()}
    for layer in layers.values():
        layer.execution = execution
    try:
        yield
    finally:
        for path, layer in layers.items():
            layer.execution = before[path]


def parity(model: LanguageModel, context: Context, wanted: TextWindows) -> Evaluation:
    """Compare the executions of a quantized model over windows of a text.

    - Accumulators: every integer layer's int32 accumulators against int64 arithmetic on the same codes, bit for bit, at
      up to 64 evenly spread tokens of each window. The kernel runs on the whole window, as in a forward pass; where a
      dynamic range belongs to the whole tensor it runs on these tokens alone, which then are their own tensor.
    - Layers: outputs of `simulated` and `integer` on the same input, `torch.equal`, every token and row; a layer that
      no pass reached counts as unequal. One layer at a time, so no more than one layer's outputs are held; operands
      that layers derive from their codes for the other executions stay until the end.
    - End to end: final hidden states of two whole forward passes, and the logits at the scored positions (all but a
      window's last), `torch.equal`; where they differ, the first layer, window and position.
    - `classic` against `integer`: nats, perplexity and most probable tokens.

    Source: Jacob et al. 2018, section 2, https://arxiv.org/abs/1712.05877 (integer arithmetic that a simulation must
    reproduce); Krishnamoorthi 2018, https://arxiv.org/abs/1806.08342 (fake quantization).

    Raises:
        NotApplicable: the model has no integer products.
        Blocked: the text is missing.
    """
    layers = integer_layers(model)
    windows, origin = wanted.cut(model, context)
    try:
        found = _run(model, layers, windows, context)
    finally:
        for layer in layers.values():
            # operands that a layer derived from its codes for the other executions go when it is moved
            layer.to(layer.weight.scale.device)
            layer.prepare()
    return _evaluation(found, windows, wanted, origin)


def _run(model: LanguageModel, layers: dict[str, QuantLinear], windows: Windows, context: Context) -> _Found:
    found = _Found({path: LayerParity(_kernel(layer)) for path, layer in layers.items()})
    for index in range(len(windows.spans)):
        hidden: dict[Execution, Tensor] = {}
        with executing(layers, "integer"), _checking(layers, found.layers, index, model.token_independent):
            hidden["integer"] = final_hidden(model, windows.ids(index))[0]
        others: tuple[Execution, ...] = ("simulated", "classic")
        for execution in others:
            with executing(layers, execution):
                hidden[execution] = final_hidden(model, windows.ids(index))[0]
        found.rows.append(_compare(model, layers, windows, index, hidden, found))
        context.progress("parity", index + 1, len(windows.spans))
    return found


def _kernel(layer: QuantLinear) -> str:
    with executing({"": layer}, "integer"):
        return layer.kernel


@contextmanager
def _checking(
    layers: dict[str, QuantLinear],
    found: dict[str, LayerParity],
    window: int,
    token_independent: bool,
    start: int = 0,
) -> Iterator[None]:
    """Check every layer on its input while a forward pass runs, which is of the tokens from `start` on."""

    def hook(path: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def check(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            x = arguments[0].reshape(-1, arguments[0].shape[-1])
            _check_accumulators(layers[path], found[path], x, token_independent)
            _check_outputs(layers[path], found[path], x, (window, start))

        return check

    handles = [layer.register_forward_hook(hook(path)) for path, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_accumulators(
    layer: QuantLinear, found: LayerParity, x: Float[Tensor, "token col"], token_independent: bool
) -> None:
    places = np.unique(np.linspace(0, len(x) - 1, REFERENCE_TOKENS).round().astype(np.int64))
    taken = torch.from_numpy(places).to(x.device)
    sample = x[taken]
    # the kernel sees the whole window, as in a forward pass, unless a range would change with it
    got = layer.accumulators(x)[:, taken] if token_independent else layer.accumulators(sample)
    wrong = got.to(torch.int64) != layer.reference_accumulators(sample)
    found.checked += wrong.numel()
    found.wrong += int(wrong.sum())


def _check_outputs(
    layer: QuantLinear, found: LayerParity, x: Float[Tensor, "token col"], place: tuple[int, int]
) -> None:
    outputs = []
    executions: tuple[Literal["simulated", "integer"], ...] = ("simulated", "integer")
    for execution in executions:
        with executing({"": layer}, execution):
            outputs.append(layer.forward(x))
    found.outputs += outputs[0].numel()
    if torch.equal(*outputs):
        return
    unequal = outputs[0] != outputs[1]
    found.unequal += int(unequal.sum())
    if found.first is None:
        token, row = unequal.nonzero()[0].tolist()
        window, start = place
        found.first = (window, start + token, row)


def _compare(
    model: LanguageModel,
    layers: dict[str, QuantLinear],
    windows: Windows,
    index: int,
    hidden: dict[Execution, Tensor],
    found: _Found,
) -> dict[str, Any]:
    """One row of the samples: equality of the ends, and what classic execution changes."""
    span, targets = windows.spans[index], windows.targets(index).to(model.device)
    same_hidden = torch.equal(hidden["simulated"], hidden["integer"])
    if not same_hidden and found.first_hidden is None:
        found.first_hidden = (index, int((hidden["simulated"] != hidden["integer"]).any(1).nonzero()[0, 0]))
    # a recipe may round the head, too
    heads = {path: layer for path, layer in layers.items() if f"{path}.".startswith(f"{model.layout.head}.")}
    nll = dict.fromkeys(hidden, 0.0)
    same_logits, changed, absolute = True, 0, 0.0
    first = span.scored - span.first - 1
    for start in range(first, span.last - span.first - 1, CHUNK_TOKENS):
        stop = min(start + CHUNK_TOKENS, span.last - span.first - 1)
        scores: dict[Execution, Tensor] = {}
        for name, states in hidden.items():
            checked = heads if name == "integer" else {}
            with executing(heads, name), _checking(checked, found.layers, index, model.token_independent, start):
                scores[name] = logits(model, states[start:stop])
        if not torch.equal(scores["simulated"], scores["integer"]):
            same_logits = False
            place = int((scores["simulated"] != scores["integer"]).any(1).nonzero()[0, 0])
            found.first_logits = found.first_logits or (index, start + place)
        picked = targets[start - first : stop - first, None]
        losses = {name: _losses(values, picked) for name, values in scores.items()}
        for name, values in losses.items():
            nll[name] += float(values.sum())
        absolute += float((losses["classic"] - losses["integer"]).abs().sum())
        changed += int((scores["classic"].argmax(1) != scores["integer"].argmax(1)).sum())
    return {
        "item": index,
        "tokens": len(targets),
        "hidden_equal": float(same_hidden),
        "logits_equal": float(same_logits),
        "nll_integer": nll["integer"],
        "nll_simulated": nll["simulated"],
        "nll_classic": nll["classic"],
        "classic_difference": nll["classic"] - nll["integer"],
        "classic_absolute": absolute,
        "classic_changed": changed,
    }


def _losses(scores: Float[Tensor, "token vocab"], picked: Tensor) -> Float[Tensor, " token"]:
    return torch.logsumexp(scores, 1).double() - scores.gather(1, picked)[:, 0].double()


def _evaluation(found: _Found, windows: Windows, wanted: TextWindows, origin: str) -> Evaluation:
    frame = pd.DataFrame(found.rows)
    layers = found.layers
    tokens = frame["tokens"].sum()
    perplexity = {name: float(np.exp(frame[f"nll_{name}"].sum() / tokens)) for name in ("integer", "classic")}
    faulty = next((path for path, layer in layers.items() if not layer.faultless), None)
    equal = sum(layer.equal for layer in layers.values()) / len(layers)
    checked = sum(layer.checked for layer in layers.values())
    return Evaluation(
        measures=[
            Measure(HIDDEN_EQUAL, "hidden_equal"),
            Measure(LOGITS_EQUAL, "logits_equal"),
            Measure(CLASSIC_NATS, "classic_difference", "tokens"),
            Measure(CLASSIC_ABSOLUTE, "classic_absolute", "tokens"),
            Measure(CLASSIC_CHANGED, "classic_changed", "tokens"),
        ],
        samples=frame,
        data_sha256=windows.stream.sha256,
        convention=f"{wanted.text} {windows.label}",
        plain=[
            Plain(WRONG, float(sum(layer.wrong for layer in layers.values())), len(frame)),
            Plain(CHECKED, float(checked), len(frame)),
            Plain(LINEARS_EQUAL, equal, len(frame)),
            Plain(CLASSIC_PERPLEXITY, perplexity["classic"] - perplexity["integer"], len(frame)),
        ],
        details={
            "layers": {path: {**vars(layer)} for path, layer in layers.items()},
            "first_faulty_layer": faulty,
            "first_unequal_hidden": found.first_hidden,
            "first_unequal_logits": found.first_logits,
            "reference_tokens_per_window": REFERENCE_TOKENS,
        },
        settings={"text": wanted.text, "split": wanted.split, "text_origin": origin, **vars(windows.settings)},
    )
