"""Metric and Score: what a number means, and the number with its uncertainty; knows no torch."""

from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower", "neither"]


@dataclass(frozen=True)
class Metric:
    """What a number means.

    Attributes:
        name: snake_case; lm-eval's name where it has one.
        unit: such as `nats/token`, `share`, `1`.
        better: the direction in which a model is better; `neither` for a description.
        reduction: how per-item values become the score. `mean`: Σ value / Σ weight. `exp`: exp(Σ value / Σ weight), a
            perplexity when value is a negative log-likelihood. `none`: no mean of items (a maximum, a count).
        chance: the score of a model that knows nothing, if there is one; at or below it a task is uninformative.
    """

    name: str
    unit: str
    better: Better
    reduction: Literal["mean", "exp", "none"] = "none"
    chance: float | None = None


@dataclass(frozen=True)
class Delta:
    """Difference of two scores of one metric on the same items: this cell minus the reference.

    Attributes:
        value: difference in the metric's unit.
        ci95: paired bootstrap interval over items, or None where there are no items.
        reference: what the reference cell has instead: its canonical quantizer (`none`) or arm (`softmax`).
        p_value: exact McNemar test for 0/1 items, else None.
    """

    value: float
    ci95: tuple[float, float] | None
    reference: str
    p_value: float | None = None


@dataclass(frozen=True)
class Score:
    """One number of a record.

    Attributes:
        metric: what it means.
        value: in the metric's unit.
        stderr: standard error over items; None where there is none (a maximum has none).
        ci95: bootstrap interval over items, or None.
        n: number of items behind it.
        delta: against the float cell, or None (the float cell itself, or no reference at hand).
        arm_delta: against the same cell with softmax attention, or None (that cell itself, or no reference at hand).
    """

    metric: Metric
    value: float
    stderr: float | None = None
    ci95: tuple[float, float] | None = None
    n: int | None = None
    delta: Delta | None = None
    arm_delta: Delta | None = None
