"""DepthArm: the settings that both forms of depth routing share."""

from dataclasses import dataclass
from typing import ClassVar

from quant_bench.arm import Arm
from quant_bench.depth.weigher import BETA, DepthRule, Normalizer


@dataclass(frozen=True)
class DepthArm(Arm):
    """An arm that changes what sublayers read; attention inside a layer stays as it is.

    The token normalizer is another arm's business: `softmax1+attnres_oasis(depth=softmax1)`.

    Attributes:
        depth: normalizer over sources: weights of `softmax1` may sum to less than 1, of `clipped` to anything.
        coupled: lower the score of sources whose attention went to the null; needs an arm with a null beside this one.
        centred: take the mean over sources off the null masses first.
        beta: strength of the coupling at the start; softplus(-5) as published.
        train_beta: whether it is learned; False freezes it.
        beta_rate: its learning rate over that of the other parameters. Adam moves a parameter by about its rate a step,
            so that the published start hardly moves in 500 steps.
        gamma: lower end of the stretch of `clipped`.
        zeta: its upper end.
    """

    attached_last: ClassVar[bool] = True

    depth: Normalizer = "softmax"
    coupled: bool = False
    centred: bool = True
    beta: float = BETA
    train_beta: bool = True
    beta_rate: float = 1.0
    gamma: float = -0.025
    zeta: float = 1.0

    def __post_init__(self) -> None:
        self.rule()

    def rule(self) -> DepthRule:
        """How scores become weights.

        Raises:
            SpecError: values out of range.
        """
        return DepthRule(
            normalizer=self.depth,
            coupled=self.coupled,
            centred=self.centred,
            beta=self.beta,
            train_beta=self.train_beta,
            beta_rate=self.beta_rate,
            gamma=self.gamma,
            zeta=self.zeta,
        )
