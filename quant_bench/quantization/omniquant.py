"""OmniQuant: factors between channels and clips of weights, learned one decoder layer after the other."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from quant_bench.errors import QuantizationError
from quant_bench.lowbit.codes import WeightCodes, quantize_in_ranges, weight_blocks
from quant_bench.model import LanguageModel, LinearSite
from quant_bench.numerics.integers import Grid
from quant_bench.quantization.folding import Fold, changes, fold, folds_of
from quant_bench.quantization.layerwise import LayerStream
from quant_bench.quantization.linears import weight_of
from quant_bench.quantization.moments import layer_moments
from quant_bench.quantization.scheme import nearest
from quant_bench.quantization.smoothing import smoothing_scale
from quant_bench.quantization.straight import input_rounding, straight_through
from quant_bench.quantizer import Calibration, SchemeQuantizer

# a range starts at sigmoid(4) = 0.982 of its extremes, as published
_OPEN = 4.0


@dataclass(frozen=True)
class OmniquantRule:
    """What is learned, and how.

    Attributes:
        clip: learn the ends of each weight range.
        transform: learn a factor for each channel of every place of `folds_of`.
        epochs: passes over the calibration sequences, one step each.
        alpha: of the SmoothQuant factors that the learned ones start from.
        clip_rate: learning rate of clips (of their logits).
        transform_rate: learning rate of factors (of their logarithms).
    """

    clip: bool = True
    transform: bool = True
    epochs: int = 20
    alpha: float = 0.5
    clip_rate: float = 1e-2
    transform_rate: float = 5e-3


@dataclass(frozen=True)
class Learned:
    """What was learned of a model.

    Attributes:
        codes: of each linear, by path; empty where weights stay in float.
        factors: what was folded into the model, in order.
        losses: mean squared error of each layer's output before learning and after it, on the calibration sequences.
        notes: statements for the coverage report.
    """

    codes: dict[str, WeightCodes]
    factors: list[tuple[Fold, Tensor]]
    losses: list[tuple[float, float]]
    notes: tuple[str, ...]


def omniquant(model: LanguageModel, scheme: SchemeQuantizer, calibration: Calibration, rule: OmniquantRule) -> Learned:
    """Learn factors and clips of every layer; factors go into the model, and weights become what their codes stand for.

    A layer is trained with AdamW, one sequence a step, so that its output with rounded weights and inputs nears that of
    the float layer. It reads what the rounded layers before it give; the float layer reads what float layers give.
    Rounding passes gradients straight through; ranges and scales pass their own. Ranges of static schemes are those of
    the sequence at hand while training, and only inputs and weights of linears are rounded there.

    Source: Shao et al. 2023, section 3, https://arxiv.org/abs/2308.13137. Without its shifts and its factors between
    queries and keys; factors are learned as logarithms, and up -> down has some wherever they are exact.

    Args:
        model: changed in place.
        scheme: what is rounded, how finely.
        calibration: token batches; one sequence of them is a step.
        rule: what is learned, and how.

    Raises:
        QuantizationError: no calibration, or a loss or weight that is not finite.
    """
    rows = [row for ids in calibration.batches for row in torch.split(ids, 1)]
    singles = replace(calibration, batches=tuple(rows))
    learned = Learned({}, [], [], ())
    with LayerStream(model, singles) as plain, LayerStream(model, singles) as rounded:
        for index in range(len(model.layout.layers)):
            factors = _initial(model, plain, rule.alpha) if rule.transform else []
            plain.advance()
            layer = _Layer(model, scheme, rule, index, factors)
            learned.losses.extend(layer.train(rounded, plain))
            learned.factors.extend(layer.fold())
            for site in layer.sites if scheme.weight_bits < 16 else ():
                weight = weight_of(model.module.get_submodule(site.path))
                if not bool(weight.isfinite().all()):
                    raise QuantizationError(f"{site.path}: a weight is not finite: no range covers it")
                learned.codes[site.path] = codes = layer.codes(site, weight)
                weight.copy_(codes.dequantize())
            with layer.rounded_inputs():
                rounded.advance()
    return replace(learned, notes=_notes(model, rule, learned))


def _initial(model: LanguageModel, stream: LayerStream, alpha: float) -> list[tuple[Fold, Tensor]]:
    moments = layer_moments(model, stream)
    places = folds_of(model, stream.layer)
    return [(place, smoothing_scale(model, place, moments[place.consumers[0].path], alpha)) for place in places]


def _notes(model: LanguageModel, rule: OmniquantRule, learned: Learned) -> tuple[str, ...]:
    notes: list[str] = []
    if rule.transform:
        reached = {site.path for place, _ in learned.factors for site in place.consumers}
        missed = sorted({site.role for site in model.layout.linears if site.path not in reached})
        notes.append("learned factors are folded into norms and linears; the float model computes the same")
        if missed:
            notes.append(f"no factors in front of {', '.join(missed)}: nothing before it commutes with them exactly")
    if learned.losses:
        first, last = (sum(losses) for losses in zip(*learned.losses, strict=True))
        share = f"{last / first:.3f} of" if first else "as"
        kept = sum(after == before for before, after in learned.losses)
        stayed = f"; {kept} layers came no nearer and keep their start" if kept else ""
        notes.append(f"{rule.epochs} epochs; squared errors of layer outputs: {share} those before learning{stayed}")
    return tuple(notes)


class _Layer:
    """The learnable numbers of one decoder layer."""

    def __init__(
        self,
        model: LanguageModel,
        scheme: SchemeQuantizer,
        rule: OmniquantRule,
        index: int,
        factors: list[tuple[Fold, Tensor]],
    ) -> None:
        self.model, self.scheme, self.rule = model, scheme, rule
        self.module = model.module.get_submodule(model.layout.layers[index])
        self.names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        self.sites = [site for site in model.layout.linears if site.layer == index]
        self.factors = [(place, scale, torch.zeros_like(scale, requires_grad=True)) for place, scale in factors]
        self.clips: dict[str, Tensor] = {}
        if rule.clip and scheme.weight_bits < 16:
            for site in self.sites:
                weight = weight_of(model.module.get_submodule(site.path))
                blocks = len(weight_blocks(weight, scheme.weight_granularity, scheme.group_size))
                start = torch.full((2, blocks), _OPEN, device=weight.device)
                self.clips[site.path] = start.requires_grad_()

    def train(self, inputs: LayerStream, targets: LayerStream) -> Iterator[tuple[float, float]]:
        """Learn; yields the mean loss before and after, or nothing where there is nothing to learn.

        What makes the loss no smaller is not kept.
        """
        logarithms = [logarithm for *_, logarithm in self.factors]
        numbers = [*logarithms, *self.clips.values()]
        if not numbers or not self.rule.epochs or min(self.scheme.weight_bits, self.scheme.activation_bits) == 16:
            return
        groups = [
            {"params": logarithms, "lr": self.rule.transform_rate},
            {"params": list(self.clips.values()), "lr": self.rule.clip_rate},
        ]
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=0.0)
        before, start = self._mean_loss(inputs, targets), [number.detach().clone() for number in numbers]
        for _ in range(self.rule.epochs):
            for batch in range(inputs.batches):
                loss = self._loss(inputs, targets, batch)
                for number, gradient in zip(numbers, torch.autograd.grad(loss, numbers), strict=True):
                    number.grad = gradient
                optimizer.step()
        after = self._mean_loss(inputs, targets)
        if not math.isfinite(before + after):
            raise QuantizationError(f"the error of layer {inputs.layer} is not finite while it is learned")
        if after >= before:
            after = before
            with torch.no_grad():
                for number, kept in zip(numbers, start, strict=True):
                    number.copy_(kept)
        yield before, after

    @torch.no_grad()
    def _mean_loss(self, inputs: LayerStream, targets: LayerStream) -> float:
        return sum(float(self._loss(inputs, targets, batch)) for batch in range(inputs.batches)) / inputs.batches

    def _loss(self, inputs: LayerStream, targets: LayerStream, batch: int) -> Tensor:
        arguments, options = inputs.call(batch)
        with self.rounded_inputs():
            output = functional_call(self.module, self._values(), (inputs.state(batch), *arguments), options)
        output = output[0] if isinstance(output, tuple) else output
        return (output.float() - targets.state(batch).float()).square().mean()

    def _values(self) -> dict[str, Tensor]:
        """Parameters of the layer with factors folded in and weights rounded; gradients reach what is learned."""
        found: dict[str, Tensor] = {}
        for place, start, logarithm in self.factors:
            for parameter, change in changes(self.model, place, start * logarithm.exp()):
                name = self.names[id(parameter)]
                found[name] = change(found.get(name, parameter.detach())).to(parameter.dtype)
        for site in self.sites if self.scheme.weight_bits < 16 else ():
            linear: Any = self.model.module.get_submodule(site.path)
            name = self.names[id(linear.weight)]
            weight = found.get(name, linear.weight.detach())
            turned = isinstance(linear, Conv1D)
            rounded = self._rounded_weight(site, weight.T if turned else weight)
            found[name] = rounded.T if turned else rounded
        return found

    def _ranges(self, site: LinearSite, blocks: Float[Tensor, "block size"]) -> tuple[Tensor, Tensor]:
        low, high = blocks.amin(-1), blocks.amax(-1)
        if site.path not in self.clips:
            return low, high
        open_low, open_high = torch.sigmoid(self.clips[site.path])
        return low * open_low, high * open_high

    def _rounded_weight(self, site: LinearSite, weight: Float[Tensor, "row col"]) -> Float[Tensor, "row col"]:
        scheme = self.scheme
        blocks = weight_blocks(weight.float(), scheme.weight_granularity, scheme.group_size)
        ranges = self._ranges(site, blocks)
        rounded = straight_through(blocks, *ranges, Grid(scheme.weight_bits, scheme.weight_symmetric))
        return rounded.reshape(len(weight), -1)[:, : weight.shape[1]].to(weight.dtype)

    @torch.no_grad()
    def fold(self) -> list[tuple[Fold, Tensor]]:
        """Put the learned factors into the model."""
        found = [(place, start * logarithm.exp()) for place, start, logarithm in self.factors]
        for place, scale in found:
            fold(self.model, place, scale)
        return found

    @torch.no_grad()
    def codes(self, site: LinearSite, weight: Float[Tensor, "row col"]) -> WeightCodes:
        """Codes of a linear with the learned clips, or with the scheme's own range."""
        scheme = self.scheme
        if site.path not in self.clips:
            return nearest(weight, scheme)
        blocks = weight_blocks(weight.float(), scheme.weight_granularity, scheme.group_size)
        grid = Grid(scheme.weight_bits, scheme.weight_symmetric)
        ranges = self._ranges(site, blocks)
        return quantize_in_ranges(weight, ranges, grid, scheme.weight_granularity, scheme.group_size)

    @contextmanager
    def rounded_inputs(self) -> Iterator[None]:
        """Round the inputs of the layer's linears while the context lasts."""
        hooks = []
        if self.scheme.activation_bits < 16:
            before = input_rounding(self.scheme)
            hooks = [
                self.model.module.get_submodule(site.path).register_forward_pre_hook(before) for site in self.sites
            ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
