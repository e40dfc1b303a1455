"""Bits of many matrices under one budget: the choice with the least summed loss, exactly."""

from collections.abc import Mapping, Sequence

import numpy as np


def allocate(sizes: Sequence[int], losses: Sequence[Mapping[int, float]], capacity: int) -> list[int]:
    """Bits of each matrix with the least Σ loss under Σ size · bits ≤ capacity.

    A multiple-choice knapsack by dynamic programming: after each matrix, of all partial sums only those stay that no
    cheaper one beats. Their number is at most the number of different sums of bits (960 matrices of one size and bits
    up to 8: 7,681), and what stays contains an optimum.

    Args:
        sizes: number of weights of each matrix.
        losses: of each matrix, bits -> loss.
        capacity: bits that all weights may take together.

    Raises:
        ValueError: not even the fewest bits fit.

    Source: Kellerer, Pferschy & Pisinger 2004, Knapsack Problems, section 11.5 (dynamic programming, dominance).
    """
    fewest = [size * min(options) for size, options in zip(sizes, losses, strict=True)]
    if sum(fewest) > capacity:
        raise ValueError(f"the fewest bits take {sum(fewest)}, more than {capacity}")
    cost, loss = np.zeros(1, np.int64), np.zeros(1)
    steps: list[tuple[list[int], np.ndarray, np.ndarray]] = []
    rest = sum(fewest)
    for size, options, least in zip(sizes, losses, fewest, strict=True):
        rest -= least
        bits = sorted(options)
        costs = (np.array(bits, np.int64)[:, None] * size + cost).ravel()
        totals = (np.array([options[b] for b in bits])[:, None] + loss).ravel()
        order = np.lexsort((totals, costs))
        order = order[costs[order] <= capacity - rest]
        # one that costs more must lose less than every one before it
        before = np.minimum.accumulate(np.concatenate(([np.inf], totals[order][:-1])))
        order = order[totals[order] < before]
        steps.append((bits, order // len(cost), order % len(cost)))
        cost, loss = costs[order], totals[order]
    chosen: list[int] = []
    place = len(cost) - 1
    for bits, option, parent in reversed(steps):
        chosen.append(bits[option[place]])
        place = parent[place]
    return chosen[::-1]
