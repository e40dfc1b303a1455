"""Replacing the matrix products of a model, whichever module they are written with."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from quant_bench.errors import QuantizationError
from quant_bench.lowbit.floats import PackedLinear
from quant_bench.model import LanguageModel, LinearSite
from quant_bench.rebuild import Parts, rebuildable

Make = Callable[[LinearSite, nn.Module], nn.Module]


def weight_of(linear: nn.Module) -> Float[Tensor, "row col"]:
    """Weights as (output, input), a view (of a packed layer a copy): GPT-2's Conv1D keeps them the other way round.

    Raises:
        QuantizationError: the module is neither a linear layer of floats nor `Conv1D`.
    """
    if isinstance(linear, nn.Linear | PackedLinear):
        return linear.weight.detach()
    if isinstance(linear, Conv1D):
        return linear.weight.detach().T
    raise QuantizationError(f"expected nn.Linear or Conv1D, got {type(linear).__name__}")


def bias_of(linear: nn.Module) -> Float[Tensor, " row"] | None:
    """Bias, or None."""
    bias = getattr(linear, "bias", None)
    return None if bias is None else bias.detach()


def as_linear(linear: nn.Module) -> nn.Linear:
    """The same product as an `nn.Linear`: the module itself, or for a `Conv1D` a new one with a copy of its weights.

    Raises:
        QuantizationError: the module is neither.
    """
    if isinstance(linear, nn.Linear):
        return linear
    weight, bias = weight_of(linear), bias_of(linear)
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype)
    made.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def replace_linears(model: LanguageModel, make: Make) -> LanguageModel:
    """Put `make(site, linear)` in the place of every matrix product of the decoder layers, in order of execution.

    One at a time, so that float weights are freed as codes are made. Head and embeddings are not touched.

    Args:
        model: given away.
        make: gets the site and its `nn.Linear` or `Conv1D` (see `weight_of`, `bias_of`); may return it unchanged.

    Raises:
        QuantizationError: what `make` raised of this kind, with the module's path in front.
    """
    for site in model.layout.linears:
        parent_path, _, name = site.path.rpartition(".")
        parent = model.module.get_submodule(parent_path)
        try:
            replacement = make(site, getattr(parent, name))
        except QuantizationError as error:
            raise QuantizationError(f"{site.path}: {error}") from error
        setattr(parent, name, replacement.train(model.module.training))
    return model


@rebuildable("text")
class RoundedLinear(nn.Module):
    """A product of float weights with rounded activations: what is left of a scheme whose weights stay in float."""

    def __init__(self, linear: nn.Module, rounding: nn.Module, text: str) -> None:
        super().__init__()
        # a product with Conv1D's transposed view may differ in the last bit from one with the same weights loaded
        self.weight = nn.Parameter(weight_of(linear).contiguous(), requires_grad=False)
        bias = bias_of(linear)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.rounding = rounding
        self.text = text

    def forward(self, x: Float[Tensor, "*batch col"]) -> Float[Tensor, "*batch row"]:
        return functional.linear(self.rounding(x), self.weight, self.bias)

    @classmethod
    def rebuilt(cls, parts: Parts) -> "RoundedLinear":
        """The same layer again."""
        weight, bias = parts.tensors["weight"], parts.tensors.get("bias")
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias, requires_grad=False)
        return cls(linear, parts.children["rounding"], parts.settings["text"])

    def describe(self) -> str:
        """How it is quantized, for the coverage report."""
        return self.text
