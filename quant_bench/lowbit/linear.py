"""QuantLinear: one linear layer on integer codes, with three executions of the same codes."""

from collections.abc import Callable
from typing import Any, get_args

import torch
from jaxtyping import Float, Int32, Int64, Shaped
from torch import Tensor, nn
from torch.nn import functional

from quant_bench.errors import QuantizationError
from quant_bench.lowbit import cpu, plain
from quant_bench.lowbit.activation import ActivationRule, encode, fake_quantize, saturation
from quant_bench.lowbit.codes import WeightCodes, keep_dtype
from quant_bench.lowbit.kernels import VNNI, choose_kernel
from quant_bench.lowbit.operands import FloatOperand, IntegerOperand
from quant_bench.quantizer import Execution
from quant_bench.rebuild import Parts, rebuildable


@rebuildable()
class QuantLinear(nn.Module):
    """y = x Wᵀ + b on integer codes. Inference only: no gradient flows through it.

    `simulated` holds the integers in float32, `integer` multiplies int8 into int32; both end in the same epilogue in
    the same order, so they agree bit for bit. `classic` multiplies dequantized weights with dequantized activations.
    Without an activation rule all executions multiply x with dequantized weights.

    Args:
        weight: codes, scales and zero points; shared by every execution.
        bias: added last, or None.
        activation: how x is rounded; None leaves it in float.
        execution: `simulated`, `integer` or `classic`.
        name: module path, for messages.

    Attributes:
        observe_saturation: measure `saturation` at each call (static ranges only; costs a pass over x).
        saturation: share of values clamped in the last observed call, or None.

    Raises:
        QuantizationError: there is no such execution, group sizes of weight and activation differ, or int32 could
            overflow.
    """

    bias: Tensor | None
    activation_scale: Tensor | None
    activation_zero: Tensor | None

    def __init__(
        self,
        weight: WeightCodes,
        bias: Tensor | None,
        activation: ActivationRule | None,
        execution: Execution,
        name: str = "",
    ) -> None:
        super().__init__()
        self.weight = weight
        self.execution: Execution = execution
        self.name = name
        self.in_features, self.out_features = weight.columns, weight.rows
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())
        static = activation is not None and activation.static
        self.register_buffer("activation_scale", activation.scale if activation and static else None)
        self.register_buffer("activation_zero", activation.zero_point if activation and static else None)
        self._rule = activation
        self.observe_saturation = False
        self.saturation: float | None = None
        self._derived: dict[str, Any] = {}
        self._check()

    def _check(self) -> None:
        if self.execution not in get_args(Execution):
            raise QuantizationError(f"{self.name}: no execution {self.execution!r}; there are {get_args(Execution)}")
        if self._rule is None:
            return
        sizes = {size for size in (self.weight.group_size, self._rule.group) if size is not None}
        if len(sizes) > 1:
            raise QuantizationError(f"{self.name}: weights and activations have different groups: {sorted(sizes)}")
        # codes minus zero points reach 2^bits - 1 on an asymmetric grid
        limits = [
            (1 << bits) if asymmetric else (1 << (bits - 1))
            for bits, asymmetric in (
                (self.weight.bits, self.weight.zero_point is not None),
                (self._rule.bits, not self._rule.symmetric),
            )
        ]
        columns = min(self.in_features, *sizes) if sizes else self.in_features
        if limits[0] * limits[1] * columns >= 1 << 31:
            raise QuantizationError(f"{self.name}: {columns} columns can overflow int32 accumulators; use groups")

    def settings(self) -> dict[str, Any]:
        """What is needed beside the tensors to make the layer again."""
        rule = None if self._rule is None else self._rule.settings()
        return {"activation": rule, "execution": self.execution, "name": self.name}

    @classmethod
    def rebuilt(cls, parts: Parts) -> "QuantLinear":
        """The same layer again."""
        settings, tensors = parts.settings, parts.tensors
        weight: Any = parts.children["weight"]
        rule = settings["activation"]
        if rule is not None:
            scale, zero = tensors.get("activation_scale"), tensors.get("activation_zero")
            rule = ActivationRule(**rule, scale=scale, zero_point=zero)
        return cls(weight, tensors.get("bias"), rule, settings["execution"], settings["name"])

    @property
    def activation(self) -> ActivationRule | None:
        """The activation rule, its static range on the layer's device."""
        rule = self._rule
        if rule is None or self.activation_scale is None:
            return rule
        return ActivationRule(
            rule.bits, "tensor", rule.symmetric, rule.group_size, self.activation_scale, self.activation_zero
        )

    @property
    def group(self) -> int | None:
        """Columns an accumulator runs over, or None for all."""
        return self.weight.group_size or (self._rule.group if self._rule else None)

    @property
    def kernel(self) -> str:
        """Name of the product that the layer runs on its device."""
        if self._rule is None or self.execution == "classic":
            return "F.linear"
        if self.execution == "simulated":
            return "integers in float32"
        return choose_kernel(self.weight.scale.device).name

    def describe(self) -> str:
        """Such as `W8 per channel x A8 per token, int32 accumulators by torch._int_mm`."""
        weight = self.weight
        fineness = f"group of {weight.group_size}" if weight.granularity == "group" else weight.granularity
        zero = weight.zero_point
        kind = "" if zero is None else " with real zero points" if zero.is_floating_point() else " asymmetric"
        text = f"W{weight.bits} per {fineness}{kind}"
        if self._rule is None:
            return f"{text}; float product: activations are not quantized"
        how = {
            "integer": f"int32 accumulators by {self.kernel}",
            "simulated": "the same integers in float32",
            "classic": "dequantized operands (fake quantization)",
        }[self.execution]
        return f"{text} x {self._rule.describe()}, {how}"

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.execution}: {self.describe()}"

    def forward(self, x: Float[Tensor, "*batch col"]) -> Float[Tensor, "*batch row"]:
        """Apply the layer; the result has x's dtype."""
        x = x.detach()
        if self.observe_saturation and self._rule is not None and self._rule.static:
            self.saturation = saturation(x, self._quantized())
        # found once: looking up buffers and kernels takes as long as a product with a single token
        run = self._derived.get(self.execution) or self.prepare()
        return run(x)

    def prepare(self) -> Callable[[Tensor], Tensor]:
        """Choose the kernel and lay the operands out, which the first forward pass does otherwise.

        There they would come to lie between that pass's results and split the heap for good; docs/performance.md has
        what that cost.

        Returns:
            What `forward` calls.
        """
        run = self._derived[self.execution] = self._runner()
        return run

    def _runner(self) -> Callable[[Tensor], Tensor]:
        rule = self.activation
        if rule is None:
            self._float_weight()
            return self._float_product
        if self.execution == "classic":
            self._float_weight()
            return lambda x: self._float_product(fake_quantize(x, rule))
        flat = self._on_cpu(rule) if self.weight.scale.device.type == "cpu" else self._anywhere(rule)
        columns, rows = self.in_features, self.out_features

        def run(x: Tensor) -> Tensor:
            if x.dtype == torch.float32 and x.dim() == 2 and x.shape[0]:
                return flat(x)
            tokens = x.reshape(-1, columns).float()
            out = flat(tokens) if tokens.shape[0] else tokens.new_empty(0, rows)
            return out.to(x.dtype).reshape(*x.shape[:-1], rows)

        return run

    def _on_cpu(self, rule: ActivationRule) -> Callable[[Tensor], Tensor]:
        """Compiled loops around a product."""
        layer = cpu.prepare(self.weight, rule, self.bias)
        if self.execution == "simulated":
            operand = FloatOperand(self.weight, layer.group)
            return lambda x: cpu.tiled_linear(x, layer, rule, operand)
        kernel = choose_kernel("cpu")
        # the epilogue of its tiles knows integer zero points only
        if kernel.name == VNNI and layer.rest is None:
            return cpu.VnniLinear(layer, rule)
        weight = self.weight
        return lambda x: cpu.tiled_linear(x, layer, rule, IntegerOperand(weight, layer.group, kernel.product))

    def _anywhere(self, rule: ActivationRule) -> Callable[[Tensor], Tensor]:
        """The definition in plain torch."""
        weight, bias = self.weight, self.bias
        if self.execution == "integer":
            return lambda x: plain.integer_linear(x, weight, rule, bias)
        centred = weight.centred()
        return lambda x: plain.simulated_linear(x, centred, weight, rule, bias)

    def accumulators(self, x: Float[Tensor, "*batch col"]) -> Int32[Tensor, "group token row"]:
        """Integer accumulators Σ (a - z_a)(w - z_w) of each group, by the kernel that the layer runs."""
        return plain.accumulators(encode(self._flat(x), self._quantized()), self.weight, self.group)

    def reference_accumulators(self, x: Float[Tensor, "*batch col"]) -> Int64[Tensor, "group token row"]:
        """The same sums by plain int64 arithmetic on the same codes."""
        return plain.reference_accumulators(encode(self._flat(x), self._quantized()), self.weight, self.group)

    def _quantized(self) -> ActivationRule:
        rule = self.activation
        if rule is None:
            raise QuantizationError(f"{self.name}: a float product has no integer accumulators")
        return rule

    def _flat(self, x: Shaped[Tensor, "*batch col"]) -> Float[Tensor, "token col"]:
        return x.detach().reshape(-1, x.shape[-1]).float()

    def _float_product(self, x: Float[Tensor, "*batch col"]) -> Float[Tensor, "*batch row"]:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.linear(x, self._float_weight().to(x.dtype), bias)

    def _float_weight(self) -> Float[Tensor, "row col"]:
        """The weights that the codes stand for; under `integer` the packed codes stay the only storage."""
        weight: Tensor | None = self._derived.get("dequantized")
        if weight is None:
            weight = self.weight.dequantize()
            if self.execution != "integer":
                self._derived["dequantized"] = weight
        return weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantLinear":
        """Follow `fn` to its device, never to its dtype."""
        self._derived = {}
        super()._apply(lambda tensor: keep_dtype(fn, tensor), recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._derived = {}
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_derived": {}}
