"""Static rounding of activations at any place of a model: small modules, so that they move, copy and save with it."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from quant_bench.lowbit.activation import ActivationRule, fake_quantize
from quant_bench.lowbit.codes import keep_dtype
from quant_bench.numerics.integers import Grid, scale_and_zero
from quant_bench.numerics.tails import Range
from quant_bench.rebuild import Parts, hooks_child, rebuildable


@rebuildable()
class StaticRounding(nn.Module):
    """Rounds a tensor to the codes of one fixed range: clamp(round(x / scale), low - zero, high - zero) · scale.

    Attributes:
        scale: float32 scalar.
        low, high: ends of the grid minus the zero point, as float32 scalars.
    """

    scale: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, span: Range, grid: Grid) -> None:
        super().__init__()
        scale, zero = scale_and_zero(torch.tensor(span.low), torch.tensor(span.high), grid)
        self.register_buffer("scale", scale)
        self.register_buffer("low", (grid.low - zero).float())
        self.register_buffer("high", (grid.high - zero).float())
        self._ends: tuple[float, float] | None = None

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return self.round_(x.to(torch.float32, copy=True)).to(x.dtype)

    def round_(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Round a float32 tensor in place."""
        if self._ends is None:
            # numbers clamp several times faster than tensors do
            self._ends = (float(self.low), float(self.high))
        return x.div_(self.scale).round_().clamp_(*self._ends).mul_(self.scale)

    @classmethod
    def rebuilt(cls, parts: Parts) -> "StaticRounding":
        """The same range again."""
        made = cls(Range(0.0, 0.0), Grid(8, symmetric=True))
        for name in ("scale", "low", "high"):
            getattr(made, name).copy_(parts.tensors[name])
        return made

    def saturated(self, x: Float[Tensor, "*shape"]) -> float:
        """Share of the values that fall off the grid."""
        codes = torch.div(x.float(), self.scale).round_()
        return float(((codes < self.low) | (codes > self.high)).float().mean())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StaticRounding":
        """Follow `fn` to its device, never to its dtype: a rounded scale would be another quantization."""
        super()._apply(lambda tensor: keep_dtype(fn, tensor), recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        self._ends = None
        super()._load_from_state_dict(*arguments, **options)


@rebuildable()
class DynamicRounding(nn.Module):
    """Rounds a tensor to ranges of its own."""

    def __init__(self, rule: ActivationRule) -> None:
        super().__init__()
        self.rule = rule

    def forward(self, x: Float[Tensor, "*batch col"]) -> Float[Tensor, "*batch col"]:
        return fake_quantize(x, self.rule)

    def settings(self) -> dict[str, Any]:
        """The rule."""
        return self.rule.settings()

    @classmethod
    def rebuilt(cls, parts: Parts) -> "DynamicRounding":
        """The same rule again."""
        return cls(ActivationRule(**parts.settings))


@rebuildable()
class OutputRoundings(nn.Sequential):
    """Roundings of a module's output, one after the other."""

    @classmethod
    def rebuilt(cls, parts: Parts) -> "OutputRoundings":
        """The same roundings again."""
        return cls(*(parts.children[name] for name in sorted(parts.children, key=int)))


def round_output(module: nn.Module, *roundings: nn.Module) -> None:
    """Round the first output of a module from now on, by each of `roundings` in turn.

    The hook is a plain function and its state a child module, so a deep copy or a loaded state has its own.
    """
    module.add_module("output_rounding", OutputRoundings(*roundings))
    _hook_output(module)


@hooks_child("output_rounding")
def _hook_output(module: nn.Module) -> None:
    module.register_forward_hook(_round_output)


def _round_output(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
    rounding = module.get_submodule("output_rounding")
    return (rounding(output[0]), *output[1:]) if isinstance(output, tuple) else rounding(output)


def round_input_(module: nn.Module, rounding: StaticRounding) -> None:
    """Round the first argument of a module from now on, *in place*.

    In place because a residual stream goes two ways: into the norm and around it. Both must see the rounded sum.
    """
    module.add_module("input_rounding", rounding)
    _hook_input(module)


@hooks_child("input_rounding")
def _hook_input(module: nn.Module) -> None:
    module.register_forward_pre_hook(_round_input, with_kwargs=True)


def _round_input(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    stream = arguments[0] if arguments else options["hidden_states"]
    stream.copy_(module.get_submodule("input_rounding")(stream))
