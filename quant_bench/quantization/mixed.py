"""Bits of each matrix from its measured sensitivity, under a budget of bits a weight."""

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from jaxtyping import Int
from torch import Tensor, nn

from quant_bench.errors import QuantizationError
from quant_bench.lowbit.codes import WeightCodes
from quant_bench.model import LanguageModel, LinearSite
from quant_bench.numerics.allocation import allocate
from quant_bench.quantization.fingerprint import fingerprint
from quant_bench.quantization.linears import weight_of
from quant_bench.quantization.scheme import apply_scheme, nearest
from quant_bench.quantization.sensitivity import sensitivities
from quant_bench.quantizer import Calibration, SchemeQuantizer

# path -> bits -> KL in nats a token
Means = dict[str, dict[int, float]]


@dataclass(frozen=True)
class MixedRule:
    """How bits are shared out.

    Attributes:
        budget: bits a weight on average over the matrices of the layers, scales and zero points not counted.
        choices: bits that a matrix may get.
        sequences: calibration sequences that sensitivity is measured on.
        tokens: tokens of each, from its beginning.
    """

    budget: float
    choices: tuple[int, ...]
    sequences: int
    tokens: int

    def capacity(self, weights: int) -> int:
        """Bits that so many weights may take together."""
        # a budget of 2.01 means 201/100, which no float is
        return int(Fraction(str(self.budget)) * weights)


def apply_mixed(
    model: LanguageModel, scheme: SchemeQuantizer, calibration: Calibration, rule: MixedRule
) -> LanguageModel:
    """Round to nearest as a scheme says, but for the bits of weights, which the budget's best allocation gives.

    Sensitivities are taken to add up: the allocation has the least sum of the single divergences that the budget
    allows, exactly. Where the most bits fit for all, nothing is measured.

    Args:
        model: given away.
        scheme: everything but the bits of weights.
        calibration: token batches.
        rule: budget, choices, and what sensitivity is measured on.

    Raises:
        QuantizationError: there are no calibration batches, or a value is not finite.
    """
    sizes = {site.path: weight_of(model.module.get_submodule(site.path)).numel() for site in model.layout.linears}
    capacity = rule.capacity(sum(sizes.values()))
    means: Means = {}
    how: tuple[str, ...] = ()
    if max(rule.choices) <= rule.budget:
        bits = dict.fromkeys(sizes, max(rule.choices))
    else:
        ids = _tokens(calibration, rule)
        means = _measured(model, scheme, ids, rule)
        bits = dict(zip(sizes, allocate(list(sizes.values()), [means[path] for path in sizes], capacity), strict=True))
        how = (_measurement(ids, sum(means[path][width] for path, width in bits.items())),)

    def weights(site: LinearSite, linear: nn.Module) -> WeightCodes:
        return nearest(weight_of(linear), scheme, bits[site.path])

    model = apply_scheme(model, scheme, calibration, weights)
    quantized = dict(model.coverage.quantized)
    for path, found in means.items():
        table = ", ".join(f"W{width} {value:.3g}" for width, value in sorted(found.items()))
        quantized[path] = f"{quantized[path]}; sensitivity in nats/token: {table}"
    notes = (*model.coverage.notes, _shares(sizes, bits, rule), *how)
    model.coverage = replace(model.coverage, quantized=quantized, notes=notes)
    return model


def _shares(sizes: dict[str, int], bits: dict[str, int], rule: MixedRule) -> str:
    average = sum(sizes[path] * width for path, width in bits.items()) / sum(sizes.values())
    counts = ", ".join(f"{count} at {width}" for width, count in sorted(Counter(bits.values()).items()))
    return f"weights have {average:.4g} bits on average of a budget of {rule.budget:g}; matrices: {counts} bits"


def _measurement(ids: Int[Tensor, "sequence token"], total: float) -> str:
    return (
        "sensitivity: KL of next-token distributions, float against one matrix rounded, activations in float, "
        f"{ids.shape[0]} sequences of {ids.shape[1]} tokens; the chosen add up to {total:.3g} nats/token"
    )


_KEPT = 4
_tables: dict[object, Means] = {}


def _measured(
    model: LanguageModel, scheme: SchemeQuantizer, ids: Int[Tensor, "sequence token"], rule: MixedRule
) -> Means:
    """Sensitivity of every linear at every choice; kept for the next budget of the same float model."""
    weights = fingerprint(model)
    how = (scheme.weight_granularity, scheme.weight_symmetric, scheme.weight_range, scheme.group_size)
    key = (weights, tuple(ids.shape), hashlib.sha256(ids.numpy().tobytes()).hexdigest(), rule.choices, how)
    if weights is not None and key in _tables:
        return _tables[key]
    found = sensitivities(model, ids.to(model.device), rule.choices, lambda weight, bits: nearest(weight, scheme, bits))
    means = {path: {bits: float(kl.mean()) for bits, kl in each.items()} for path, each in found.items()}
    if weights is not None:
        if len(_tables) >= _KEPT:
            _tables.clear()
        _tables[key] = means
    return means


def _tokens(calibration: Calibration, rule: MixedRule) -> Int[Tensor, "sequence token"]:
    if not calibration.batches:
        raise QuantizationError("this recipe needs calibration batches, and there are none")
    return torch.cat([batch.cpu() for batch in calibration.batches])[: rule.sequences, : rule.tokens].contiguous()
