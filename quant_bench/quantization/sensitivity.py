"""What rounding one matrix of weights does to a model's next-token distributions, measured one matrix at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Float32, Float64, Int
from torch import Tensor, nn

from quant_bench.errors import QuantizationError, SpecError
from quant_bench.lowbit.codes import WeightCodes
from quant_bench.lowbit.linear import QuantLinear
from quant_bench.model import LanguageModel
from quant_bench.quantization.linears import bias_of, weight_of
from quant_bench.scoring import CHUNK_TOKENS, final_hidden, logits

# weights of one matrix and bits -> codes
Encode = Callable[[Float[Tensor, "row col"], int], WeightCodes]
# path of a linear -> bits -> mean KL of each sequence, in nats a token
Table = dict[str, dict[int, Float64[Tensor, " sequence"]]]


def widths_of(digits: int) -> tuple[int, ...]:
    """Bit widths of a setting that has a digit for each, such as 2348.

    Raises:
        SpecError: they are not 2 to 8, or do not rise: one choice of widths has one name.
    """
    widths = tuple(bits for bits in range(2, 9) if str(bits) in str(digits))
    if not widths or "".join(map(str, widths)) != str(digits):
        raise SpecError(f"widths are rising digits from 2 to 8, such as 2348; got {digits}")
    return widths


@torch.no_grad()
def sensitivities(
    model: LanguageModel,
    ids: Int[Tensor, "sequence token"],
    bits: Sequence[int],
    encode: Encode,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Table:
    """KL(float || one matrix rounded) of next-token distributions, for every linear of the layers and every bit width.

    All other weights and all activations stay in float. What lies before a layer does not change with its weights, so
    a pass begins at that layer, from the inputs of the one float pass (a model whose layers read more than the layer
    before them is run whole). Cost: linears · bit widths passes over the tokens, each on average half the layers and
    the head.

    Args:
        model: a float model; it comes back as it was.
        ids: token ids; sequences of the calibration text.
        bits: widths to try.
        encode: how a matrix is rounded.
        progress: called as progress(passes done, passes in all).

    Raises:
        QuantizationError: a weight or the logits of a rounded model are not finite, with the linear's path.

    Source of KL(P || Q) = Σ p ln(p / q): Kullback and Leibler 1951, https://doi.org/10.1214/aoms/1177729694.
    """
    float_pass = _FloatPass(model, ids)
    linears = sorted(model.layout.linears, key=lambda site: site.layer)
    found: Table = {site.path: {} for site in model.layout.linears}
    total = len(linears) * len(bits)
    for done, (site, width) in enumerate(((site, width) for site in linears for width in bits), 1):
        linear = model.module.get_submodule(site.path)
        try:
            rounded = QuantLinear(encode(weight_of(linear), width), bias_of(linear), None, "simulated", site.path)
            with _in_place_of(model, site.path, rounded):
                found[site.path][width] = float_pass.divergence(site.layer)
        except QuantizationError as error:
            raise QuantizationError(f"{site.path}: {error}") from error
        progress(done, total)
    return found


@contextmanager
def _in_place_of(model: LanguageModel, path: str, module: nn.Module) -> Iterator[None]:
    before = model.module.get_submodule(path)
    model.module.set_submodule(path, module)
    try:
        yield
    finally:
        model.module.set_submodule(path, before)


class _FloatPass:
    """The float model's distributions, and the inputs of its layers to begin other passes from."""

    def __init__(self, model: LanguageModel, ids: Int[Tensor, "sequence token"]) -> None:
        self._model, self._ids = model, ids
        self._layers: list[Any] = [model.module.get_submodule(path) for path in model.layout.layers]
        self._inputs: list[Tensor] = []
        self._resumes = True
        hooks = [layer.register_forward_pre_hook(self._keep, with_kwargs=True) for layer in self._layers]
        try:
            hidden = final_hidden(model, ids)
        finally:
            for hook in hooks:
                hook.remove()
        self._log_probs = [[scores.log_softmax(-1) for scores in _logits(model, row)] for row in hidden]
        # layers that also read earlier ones (routers over depth) cannot begin in the middle
        self._resumes = torch.equal(self._hidden(len(self._layers) - 1), hidden)

    def _keep(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._inputs.append(arguments[0] if arguments else options["hidden_states"])

    def _hidden(self, layer: int) -> Float[Tensor, "sequence token width"]:
        """Final hidden states of the model as it is now, whose layers before this one are those of the float pass."""
        if not self._resumes or layer == 0:
            return final_hidden(self._model, self._ids)
        skipped = self._layers[:layer]
        for each in skipped:
            each.forward = lambda *arguments, **options: self._inputs[layer]
        try:
            return final_hidden(self._model, self._ids)
        finally:
            for each in skipped:
                del each.forward

    def divergence(self, layer: int) -> Float64[Tensor, " sequence"]:
        """Mean KL(float || the model as it is now) of each sequence, in nats a token."""
        means = []
        for reference, row in zip(self._log_probs, self._hidden(layer), strict=True):
            parts = zip(reference, _logits(self._model, row), strict=True)
            kl = torch.cat([divergence(old, new.log_softmax(-1)) for old, new in parts])
            if not bool(kl.isfinite().all()):
                raise QuantizationError("the logits of the rounded model are not finite")
            means.append(kl.double().mean())
        return torch.stack(means).cpu()


def _logits(model: LanguageModel, hidden: Float[Tensor, "token width"]) -> Iterable[Float32[Tensor, "part vocab"]]:
    return (logits(model, part) for part in torch.split(hidden, CHUNK_TOKENS))


def divergence(old: Float[Tensor, "token vocab"], new: Float[Tensor, "token vocab"]) -> Float[Tensor, " token"]:
    """KL(old || new) of log-probabilities, as Σ p (exp(d) - 1 - d) with d = new - old.

    The same sum for two distributions, but no term is negative: in float32 small divergences keep their digits.
    """
    difference = new - old
    terms = old.exp() * (difference.expm1() - difference)
    # a token that the old distribution rules out adds its new probability alone
    return torch.where(old == -torch.inf, new.exp(), terms).sum(-1)
