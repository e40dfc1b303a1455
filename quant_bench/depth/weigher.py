"""Weigher: from scores of sources to weights of sources, with the coupling to the attention's null mass."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from quant_bench.errors import SpecError
from quant_bench.mechanisms.normalizers import entmax15, safe_softmax, sparsemax, stretched

Normalizer = Literal["softmax", "softmax1", "sparsemax", "entmax15", "clipped"]
Scores = Float[Tensor, "*batch source"]

# softplus(-5), where the published coupling starts
BETA = math.log1p(math.exp(-5.0))
# the published code's bounds on beta and on coupled scores
LARGEST_BETA = 10.0
LARGEST_SCORE = 50.0


@dataclass(frozen=True)
class DepthRule:
    """How a router turns scores into weights.

    Attributes:
        normalizer: over the sources of a token; under `softmax1` and `clipped` weights may sum to less than 1.
        coupled: lower the score of a source whose attention went to the null.
        centred: take the mean over the sources off the null masses first.
        beta: strength of the coupling at the start.
        train_beta: whether it is learned.
        beta_rate: its learning rate over that of the other parameters.
        gamma, zeta: the stretch of `clipped`.
    """

    normalizer: Normalizer = "softmax"
    coupled: bool = False
    centred: bool = True
    beta: float = BETA
    train_beta: bool = True
    gamma: float = -0.025
    zeta: float = 1.0
    beta_rate: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.beta_rate < math.inf:
            raise SpecError(f"beta_rate must be above 0 and finite; got {self.beta_rate!r}")
        if self.gamma > 0 or self.zeta < 1:
            raise SpecError("clipped depth weights need gamma at most 0 and zeta at least 1")
        if not 0 <= self.beta <= LARGEST_BETA:
            raise SpecError(f"beta must lie between 0 and {LARGEST_BETA:g}; got {self.beta!r}")
        of_coupling = (self.centred, self.beta, self.train_beta, self.beta_rate)
        if not self.coupled and of_coupling != (True, BETA, True, 1.0):
            raise SpecError("centred, beta, train_beta and beta_rate are settings of coupled=True")
        if self.coupled and self.train_beta and self.beta == 0:
            raise SpecError("beta=0 cannot be learned (it is a softplus); set train_beta=False, or start above 0")


class Weigher(nn.Module):
    """weights = normalizer(scores - beta · (psi - mean psi)), in float32 or wider.

    psi of a source is the mass that its attention left on the null, mean over heads. beta = softplus(raw) <= 10.

    Source: token-to-depth coupling of arXiv 2605.17887 and its published code.
    """

    def __init__(self, rule: DepthRule, like: Tensor) -> None:
        super().__init__()
        self.rule = rule
        if not rule.coupled:
            return
        if rule.train_beta:
            raw = like.new_full((), math.log(math.expm1(rule.beta)))
            self.raw = nn.Parameter(raw, requires_grad=like.requires_grad)
            if rule.beta_rate != 1.0:
                self.learning_rates = {"raw": rule.beta_rate}
        else:
            self.register_buffer("fixed", like.new_full((), rule.beta), persistent=False)

    def beta(self) -> Float[Tensor, ""]:
        """Strength of the coupling; 0 where there is none."""
        if not self.rule.coupled:
            return torch.zeros(())
        if not self.rule.train_beta:
            fixed: Tensor = self.get_buffer("fixed")
            return fixed
        wide = self.raw.to(torch.promote_types(self.raw.dtype, torch.float32))
        return functional.softplus(wide).clamp_max(LARGEST_BETA)

    def forward(self, scores: Scores, psi: Scores | None) -> Scores:
        if self.rule.coupled:
            assert psi is not None
            null = psi.to(scores.dtype)
            if self.rule.centred:
                null = null - null.mean(-1, keepdim=True)
            scores = (scores - self.beta().to(scores.dtype) * null).clamp(-LARGEST_SCORE, LARGEST_SCORE)
        return self.normalized(scores)

    def normalized(self, scores: Scores) -> Scores:
        """Weights of scores that are what they should be."""
        match self.rule.normalizer:
            case "softmax":
                return safe_softmax(scores)
            case "softmax1":
                return safe_softmax(scores, torch.zeros_like(scores[..., :1]))
            case "sparsemax":
                return sparsemax(scores)
            case "entmax15":
                return entmax15(scores)
            case "clipped":
                return stretched(safe_softmax(scores), self.rule.gamma, self.rule.zeta)
