"""Products whose outlier columns stay in float (LLM.int8)."""

from dataclasses import replace
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from quant_bench.errors import QuantizationError
from quant_bench.lowbit.codes import keep_dtype
from quant_bench.lowbit.linear import QuantLinear
from quant_bench.model import LanguageModel
from quant_bench.quantization.coverage import coverage_of
from quant_bench.rebuild import rebuildable


@rebuildable("threshold")
class OutlierLinear(nn.Module):
    """y = Q(x without its outlier columns) + (outlier columns of x) Wᵀ, the second product in float.

    A column is an outlier if any of its entries in the tensor at hand reaches the threshold, so what is rounded depends
    on all tokens of a forward pass.

    Args:
        products: the quantized product, over all columns.
        float_weight: weights (output, input), kept: this costs memory on top of the codes.
        threshold: absolute value; every execution sees the same columns.
    """

    float_weight: Tensor

    def __init__(self, products: QuantLinear, float_weight: Float[Tensor, "row col"], threshold: float) -> None:
        super().__init__()
        self.products, self.threshold = products, threshold
        self.register_buffer("float_weight", float_weight.detach().float().clone())

    def _apply(self, fn: Any, recurse: bool = True) -> "OutlierLinear":
        """Follow `fn` to its device, never to its dtype, as codes do."""
        super()._apply(lambda tensor: keep_dtype(fn, tensor), recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, x: Float[Tensor, "*batch col"]) -> Float[Tensor, "*batch row"]:
        outlier = (x.abs() >= self.threshold).flatten(0, -2).any(0)
        if not bool(outlier.any()):
            quantized: Tensor = self.products(x)
            return quantized
        columns = outlier.nonzero()[:, 0]
        rest: Tensor = self.products(x.masked_fill(outlier, 0.0))
        exact = functional.linear(x[..., columns].float(), self.float_weight[:, columns])
        return (rest + exact).to(x.dtype)


def keep_outliers(model: LanguageModel, weights: dict[str, Tensor], threshold: float) -> LanguageModel:
    """Let the quantized products of a model keep outlier columns in float.

    Args:
        model: quantized, given away.
        weights: float weights of each product, by path.
        threshold: see `OutlierLinear`.

    Raises:
        QuantizationError: a product is not quantized.
    """
    sites = []
    for site in model.layout.linears:
        products = model.module.get_submodule(site.path)
        if not isinstance(products, QuantLinear):
            raise QuantizationError(f"{site.path}: outlier columns are kept beside a quantized product only")
        kept = OutlierLinear(products, weights.pop(site.path), threshold).train(products.training)
        model.module.set_submodule(site.path, kept)
        sites.append(replace(site, path=f"{site.path}.products"))
    model.layout = replace(model.layout, linears=tuple(sites))
    model.token_independent = False
    note = f"columns with an entry of at least {threshold:g} run in float on float weights, kept beside the codes"
    coverage = coverage_of(model, (*model.coverage.notes, note))
    # any column may become an outlier, so all float weights are part of what the model stores
    model.coverage = replace(coverage, weight_bytes=coverage.weight_bytes + coverage.float_bytes)
    return model
