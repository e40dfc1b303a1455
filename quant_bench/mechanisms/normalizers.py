"""Maps from scores to weights beside softmax; disallowed scores are -inf, and a row of nothing else gives zeros."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

Rows = Float[Tensor, "*rows key"]
Normalize = Callable[[Rows], Rows]


def safe_softmax(scores: Rows, null: Float[Tensor, "*#rows 1"] | None = None) -> Rows:
    """Softmax, with one more logit that takes weight and has no key where `null` is given."""
    largest = scores.amax(-1, keepdim=True)
    if null is not None:
        largest = torch.maximum(largest, null)
    # a row of -inf only: subtracting 0 leaves exp(-inf) = 0 everywhere
    largest = torch.where(largest == -torch.inf, torch.zeros_like(largest), largest).detach()
    raised = torch.exp(scores - largest)
    total = raised.sum(-1, keepdim=True)
    if null is not None:
        total = total + torch.exp(null - largest)
    return raised / torch.where(total == 0, torch.ones_like(total), total)


def stretched(weights: Rows, gamma: float, zeta: float) -> Rows:
    """Weights stretched to [gamma, zeta] and clipped to [0, 1], so that small ones become exact zeros.

    Source: clipped softmax, equation 4 of Bondarenko et al. 2023, https://arxiv.org/abs/2306.12929.
    """
    # a disallowed key has weight 0, and gamma <= 0 keeps it there
    return (weights * (zeta - gamma) + gamma).clamp(0.0, 1.0)


def softpick(scores: Rows) -> Rows:
    """relu(exp(s) - 1) / sum |exp(s) - 1|: a score below 0 takes no weight, a row may sum to less than 1.

    Source: Zuhri et al. 2025, https://arxiv.org/abs/2504.20966.
    """
    largest = scores.amax(-1, keepdim=True).clamp_min(0.0)
    allowed = scores != -torch.inf
    # multiplied by exp(-largest), above and below
    raised = torch.exp(scores - largest) - torch.exp(-largest)
    total = torch.where(allowed, raised.abs(), torch.zeros_like(raised)).sum(-1, keepdim=True)
    # the paper's epsilon, which decides where every score of a row is 0
    return torch.relu(raised) / (total + 1e-6)


def sparsemax(scores: Rows) -> Rows:
    """Euclidean projection of the scores onto the simplex: many exact zeros.

    Source: Martins and Astudillo 2016, algorithm 1, https://arxiv.org/abs/1602.02068.
    """
    return _sparse(scores, _sparsemax_threshold, lambda rest: rest, lambda weights: weights > 0)


def entmax15(scores: Rows) -> Rows:
    """The alpha = 1.5 member between softmax (1) and sparsemax (2): relu(s/2 - tau)^2.

    Source: Peters, Niculae and Martins 2019, algorithm 2, https://arxiv.org/abs/1905.05702.
    """
    return _sparse(scores / 2, _entmax15_threshold, torch.square, torch.sqrt)


def _sparse(scores: Rows, threshold: Normalize, power: Normalize, slope: Normalize) -> Rows:
    apply: Any = _Sparse.apply
    weights: Tensor = apply(scores, threshold, power, slope)
    return weights


class _Sparse(torch.autograd.Function):
    """weights = power(relu(scores - tau)), whose gradient needs the weights alone.

    With slope s_i = d power at the weight (up to a factor): gradient_i = s_i (g_i - sum_j s_j g_j / sum_j s_j).
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, threshold: Callable[..., Tensor], power: Normalize, slope: Normalize
    ) -> Tensor:
        largest = scores.amax(-1, keepdim=True)
        empty = largest == -torch.inf
        shifted = scores - torch.where(empty, torch.zeros_like(largest), largest)
        ordered = shifted.sort(-1, descending=True).values
        weights = power(torch.relu(shifted - threshold(ordered))).masked_fill(empty, 0.0)
        ctx.save_for_backward(weights)
        ctx.slope, ctx.doubled = slope, power is torch.square
        return weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (weights,) = ctx.saved_tensors
        slopes = ctx.slope(weights).to(weights.dtype)
        total = slopes.sum(-1, keepdim=True)
        mean = (gradients[0] * slopes).sum(-1, keepdim=True) / torch.where(total == 0, torch.ones_like(total), total)
        result = slopes * (gradients[0] - mean)
        # of relu(x)^2 the slope is 2 relu(x)
        return (2 * result if ctx.doubled else result), None, None, None


def _ranks(ordered: Rows) -> Tensor:
    return torch.arange(1, ordered.shape[-1] + 1, dtype=ordered.dtype, device=ordered.device)


def _finite(ordered: Rows) -> Rows:
    """Disallowed scores so low that they are never in a support (the largest is 0), and sums stay finite."""
    return ordered.clamp_min(-4.0)


def _sparsemax_threshold(ordered: Rows) -> Float[Tensor, "*rows 1"]:
    """Tau with sum relu(score - tau) = 1; scores are sorted, the largest is 0, and tau is at least -1."""
    ordered, ranks = _finite(ordered), _ranks(ordered)
    sums = ordered.cumsum(-1)
    support = (1 + ranks * ordered > sums).sum(-1, keepdim=True).clamp_min(1)
    return (sums.gather(-1, support - 1) - 1) / support


def _entmax15_threshold(ordered: Rows) -> Float[Tensor, "*rows 1"]:
    """Tau with sum relu(score - tau)^2 = 1; scores are sorted, the largest is 0, and tau is at least -1."""
    ordered, ranks = _finite(ordered), _ranks(ordered)
    mean = ordered.cumsum(-1) / ranks
    mean_square = ordered.square().cumsum(-1) / ranks
    # the smaller root of rank * (mean of (score - tau)^2) = 1
    inside = ((1 - ranks * (mean_square - mean.square())) / ranks).clamp_min(0.0)
    candidates = mean - inside.sqrt()
    support = (candidates <= ordered).sum(-1, keepdim=True).clamp_min(1)
    return candidates.gather(-1, support - 1)
