"""Outlier scores: from statistics per tensor to the numbers of a record, each with its reduction over tensors."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quant_bench.lowbit.floats import PackedLinear
from quant_bench.lowbit.formats import FormatLinear
from quant_bench.lowbit.linear import QuantLinear
from quant_bench.model import LanguageModel
from quant_bench.numerics.moments import measure
from quant_bench.numerics.spread import weight_incoherence
from quant_bench.observe import MEDIAN_STRIDE, Statistics
from quant_bench.score import Metric
from quant_bench.task import Plain

_UNITS = {
    "max_inf_norm": "1",
    "max_inf_norm_block": "1",
    "avg_kurtosis": "1",
    "avg_kurtosis_published": "1",
    "max_kurtosis": "1",
    "token_kurtosis": "1",
    "channel_absmax_ratio": "1",
    "channel_rms_kurtosis": "1",
    "max_median_ratio": "1",
    "outlier_6sigma_share": "share",
    "massive_activations": "entries/sequence",
    "massive_activation_ratio": "1",
    "incoherence_weight": "1",
    "incoherence_activation": "1",
    "incoherence_activation_p999": "1",
}
# none has a better direction: clipped softmax lowered the infinity norm of OPT-125m 5 times, and W8A8 got worse
# (Bondarenko et al. 2023, https://arxiv.org/abs/2306.12929)
METRICS = {
    name: Metric(name, unit, "neither", "mean" if name.startswith("avg_") else "none") for name, unit in _UNITS.items()
}

# metric -> (column of the table, which tensors, how they are reduced)
_REDUCTIONS: dict[str, tuple[str, str, str]] = {
    "max_inf_norm": ("inf_norm", "sites", "max"),
    "max_inf_norm_block": ("inf_norm", "layers", "max"),
    "max_kurtosis": ("kurtosis", "sites", "max"),
    "token_kurtosis": ("token_kurtosis", "sites", "mean"),
    "outlier_6sigma_share": ("outlier_6sigma_share", "sites", "mean"),
    "channel_absmax_ratio": ("channel_absmax_ratio", "inputs", "mean"),
    "channel_rms_kurtosis": ("channel_rms_kurtosis", "inputs", "mean"),
    "max_median_ratio": ("max_median_ratio", "inputs", "mean"),
    "massive_activations": ("massive_activations", "layers", "max"),
    "massive_activation_ratio": ("massive_ratio", "layers", "max"),
    "incoherence_activation": ("incoherence", "inputs", "mean"),
    "incoherence_activation_p999": ("incoherence_p999", "inputs", "max"),
}


def summarize(statistics: Sequence[Statistics], model: LanguageModel) -> tuple[list[Plain], dict[str, Any]]:
    """Scores over tensors, and the table per layer and site.

    `sites` are the protocol sites of `observe`, `layers` the layer outputs, `inputs` the inputs of matrix products.

    - max_inf_norm: per site max|x| of a sequence, averaged over sequences; maximum over sites (`_block`: over layers).
    - avg_kurtosis, max_kurtosis: per site mean((x - μ)⁴) / σ⁴ of a sequence's entries, averaged over sequences; mean
      and maximum over sites. `_published` adds 1e-6 to σ⁴.
      Source of these: Bondarenko et al. 2023, section 3, https://arxiv.org/abs/2306.12929.
    - token_kurtosis: the kurtosis of one token's entries, averaged over tokens, then sequences, then sites.
    - outlier_6sigma_share: share of a sequence's entries more than 6σ from its mean; mean over sequences and sites.
      Source: Bondarenko et al. 2021, https://arxiv.org/abs/2109.12948.
    - massive_activations: entries of a layer output with |x| > 100 and |x| ≥ 1000 medians of |x|, counted per
      sequence, averaged over sequences, maximum over layers. massive_activation_ratio: max|x| / median, likewise.
      Source: Sun et al. 2024, section 2, https://arxiv.org/abs/2402.17762. Median over every 64th token.
    - channel_absmax_ratio: max_c a_c / median_c a_c with a_c the largest |x| of channel c over all tokens; mean over
      inputs. Source: the channel view of Xiao et al. 2023, https://arxiv.org/abs/2211.10438.
    - channel_rms_kurtosis: mean_c r_c⁴ / (mean_c r_c²)² with r_c the root mean square of channel c over all tokens,
      from 1 to the width; mean over inputs. max_median_ratio: max_c|x_c| / median_c|x_c| of a token, averaged over
      every 64th token whose median is not 0, then over sequences and inputs.
      Source: He et al. 2024, https://arxiv.org/abs/2405.19279.
    - incoherence_activation: √d · max|x| / ‖x‖₂ of a token, averaged over tokens and inputs; `_p999`: its 99.9th
      percentile over tokens (histogram, 0.5 percent wide), maximum over inputs.
    - incoherence_weight: √(mn) · max|W| / ‖W‖_F, mean over the matrices of the layers; a quantized matrix counts with
      the weights that its codes stand for. Source of both: Chee et al. 2023, https://arxiv.org/abs/2307.13304.

    Of layer outputs and product inputs the table also says where outliers sit: the channels and the tokens with the
    largest |x| anywhere, and the positions whose largest |x|, averaged over sequences, is largest.

    A score that no tensor defines is left out.
    """
    groups = {
        "sites": [one.row() for one in statistics if one.point.is_site],
        "layers": [one.row() for one in statistics if one.point.kind == "layer_output"],
        "inputs": [one.row() for one in statistics if one.point.feeds_product],
    }
    sequences = statistics[0].sequences
    plain: list[Plain] = []
    for name, (column, group, reduction) in _REDUCTIONS.items():
        values = [float(row[column]) for row in groups[group] if row[column] is not None]
        if values:
            value = max(values) if reduction == "max" else sum(values) / len(values)
            plain.append(Plain(METRICS[name], value, sequences))
    weights = _weight_incoherence(model)
    if weights:
        plain.append(Plain(METRICS["incoherence_weight"], sum(weights.values()) / len(weights), len(weights)))
    tensors = {f"{one.point.kind} {one.point.path}": one.row() for one in statistics}
    tokens = {token for row in tensors.values() for token in row.get("top_tokens", ())}
    details = {
        "sequences": sequences,
        "tokens": statistics[0].tokens,
        "median_stride": MEDIAN_STRIDE,
        "tensors": tensors,
        "token_texts": {token: model.tokenizer.decode([int(token)]) for token in sorted(tokens, key=int)},
        "incoherence_weight": weights,
    }
    return plain, details


def _weight_incoherence(model: LanguageModel) -> dict[str, float]:
    """Of every matrix of the layers whose weights can be read; an engine's packed weights are what they stand for."""
    found: dict[str, float] = {}
    for site in model.layout.linears:
        weight = _weight(model.module.get_submodule(site.path))
        if weight is not None:
            swept = measure(weight.detach(), moments=False)
            found[site.path] = weight_incoherence(
                float(swept.absmax.max()), float(swept.squares.sum() / weight.numel()) ** 0.5
            )
    return found


def _weight(module: nn.Module) -> Tensor | None:
    if isinstance(module, QuantLinear | FormatLinear):
        return module.weight.dequantize()
    if not isinstance(module, nn.Linear | Conv1D | PackedLinear):
        return None
    weight: Tensor = module.weight
    # an engine's packed weight is a tensor of its own kind, in a module that is a linear layer all the same
    return weight if type(weight) in (Tensor, nn.Parameter) else weight.dequantize()
