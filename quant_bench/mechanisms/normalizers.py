"""Maps from scores to weights beside softmax; disallowed scores are -inf, and a row of nothing else gives zeros."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

Rows = Float[Tensor, "*rows key"]
# Newton steps until a threshold stands; about ten are needed
_MOST_STEPS = 50


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
    """Euclidean projection of the scores onto the simplex: relu(s - tau), many exact zeros.

    Source: Martins and Astudillo 2016, https://arxiv.org/abs/1602.02068.
    """
    return _sparse(scores, 1)


def entmax15(scores: Rows) -> Rows:
    """The alpha = 1.5 member between softmax (1) and sparsemax (2): relu(s/2 - tau)^2.

    Source: Peters, Niculae and Martins 2019, https://arxiv.org/abs/1905.05702.
    """
    return _sparse(scores / 2, 2)


def _sparse(scores: Rows, power: int) -> Rows:
    apply: Any = _Sparse.apply
    weights: Tensor = apply(scores, power)
    return weights


class _Sparse(torch.autograd.Function):
    """weights = relu(scores - tau)^power with tau such that each row sums to 1, for powers 1 and 2.

    The sum is convex and falls in tau, so Newton's method from tau = largest - 1 (where it is at least 1) never
    oversteps; a handful of steps reach the last bit. Sorting, as in the papers, takes 3 times as long here.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, power: int) -> Tensor:
        largest = scores.amax(-1, keepdim=True)
        empty = largest == -torch.inf
        shifted = scores - torch.where(empty, torch.zeros_like(largest), largest)
        tau = torch.full_like(largest, -1.0)
        for _ in range(_MOST_STEPS):
            above = torch.relu(shifted - tau)
            if power == 1:
                excess, slope = above.sum(-1, keepdim=True) - 1, (above > 0).sum(-1, keepdim=True)
            else:
                excess, slope = above.square().sum(-1, keepdim=True) - 1, 2 * above.sum(-1, keepdim=True)
            # an empty row has no slope and stays where it is
            step = (excess / slope.clamp_min(torch.finfo(scores.dtype).tiny)).masked_fill(empty, 0.0)
            tau = tau + step
            if float(step.max()) <= torch.finfo(scores.dtype).eps:
                break
        weights = torch.relu(shifted - tau) ** power
        ctx.save_for_backward(weights)
        ctx.power = power
        return weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (weights,) = ctx.saved_tensors
        # derivative of relu(x)^power at the weight
        slopes = (weights > 0).to(weights.dtype) if ctx.power == 1 else 2 * weights.sqrt()
        total = slopes.sum(-1, keepdim=True)
        mean = (gradients[0] * slopes).sum(-1, keepdim=True) / torch.where(total == 0, torch.ones_like(total), total)
        return slopes * (gradients[0] - mean), None
