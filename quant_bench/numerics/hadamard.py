"""Hadamard transforms of any size: orthogonal, every entry (nearly) equally large, and fast."""

from functools import lru_cache
from math import isqrt
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from quant_bench.numerics.compiled import compiled
from quant_bench.numerics.hadamard_vectors import LANES, transform_rows

# largest order that is multiplied as a matrix
_DENSE = 160


class Factors(NamedTuple):
    """n = blocks · order · lanes, and the matrix is Sylvester(blocks) ⊗ base(order) ⊗ Sylvester(lanes).

    Attributes:
        blocks: a power of two.
        order: 1, or the order of `base_matrix`.
        lanes: a power of two, at most 16.
    """

    blocks: int
    order: int
    lanes: int


@lru_cache(256)
def factors(n: int) -> Factors:
    """How a size is split: 576 = 1 · 36 · 16, 1536 = 8 · 12 · 16."""
    odd, twos = n, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    order, used = odd, 0
    if odd > 1:
        known = [j for j in range(twos + 1) if odd << j <= _DENSE and is_known(odd << j)]
        used = known[0] if known else 0
        order = odd << used
    lanes = min(LANES, 1 << (twos - used))
    return Factors((1 << (twos - used)) // lanes, order, lanes)


def is_known(order: int) -> bool:
    """Whether Sylvester's or Paley's constructions give a Hadamard matrix of this order (but for products)."""
    return order & (order - 1) == 0 or _first_paley(order) or _second_paley(order)


def _first_paley(order: int) -> bool:
    return (order - 1) % 4 == 3 and _prime(order - 1)


def _second_paley(order: int) -> bool:
    return order % 4 == 0 and (order // 2 - 1) % 4 == 1 and _prime(order // 2 - 1)


def _prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, isqrt(number) + 1))


def _sylvester(order: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < order:
        matrix = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix


def _residues(prime: int) -> np.ndarray:
    """Q[i, j] = 1, -1 or 0, as i - j is a square, none, or 0 modulo a prime."""
    character = -np.ones(prime)
    character[np.arange(1, prime) ** 2 % prime] = 1.0
    character[0] = 0.0
    places = np.arange(prime)
    return character[(places[:, None] - places[None]) % prime]


@lru_cache(64)
def base_matrix(order: int) -> np.ndarray:
    """Orthogonal matrix B with B Bᵀ = order · I, of entries 1 and -1 where a construction is known.

    Otherwise the discrete Hartley transform, whose entries are at most √2: deterministic, and flatter than an
    orthogonalized Gaussian, which QuaRot falls back to.

    Source: Paley 1933, constructions I and II, https://doi.org/10.1002/sapm1933121311; Bracewell 1983 (Hartley),
    https://doi.org/10.1364/JOSA.73.001832.
    """
    if order & (order - 1) == 0:
        return _sylvester(order)
    if _first_paley(order):
        border = np.ones((order, order))
        border[1:, 0] = -1.0
        border[1:, 1:] = _residues(order - 1)
        border[0, 0] = 0.0
        return border + np.eye(order)
    if _second_paley(order):
        half = order // 2
        conference = np.ones((half, half))
        conference[1:, 1:] = _residues(half - 1)
        conference[0, 0] = 0.0
        return np.kron(conference, [[1.0, 1.0], [1.0, -1.0]]) + np.kron(np.eye(half), [[1.0, -1.0], [-1.0, -1.0]])
    angle = 2.0 * np.pi * (np.outer(np.arange(order), np.arange(order)) % order) / order
    return np.cos(angle) + np.sin(angle)


def hadamard_matrix(n: int) -> Float[Tensor, "n n"]:
    """The dense orthogonal matrix H (H Hᵀ = I) that `transform` multiplies rows with, float64."""
    split = factors(n)
    dense = np.kron(np.kron(_sylvester(split.blocks), base_matrix(split.order)), _sylvester(split.lanes))
    return torch.from_numpy(dense / np.sqrt(n))


def transform(
    x: Float[Tensor, "*batch width"], size: int | None = None, inverse: bool = False
) -> Float[Tensor, "*batch width"]:
    """Each row times H, or the leading part of its index times H.

    A row of the result depends on that row alone, bit for bit.

    Args:
        x: rows; a new tensor is returned.
        size: order n of H; where it is smaller than the width, the row is read as (n, width / n) and H mixes the n
            (heads, say). None: the whole row.
        inverse: multiply with Hᵀ.
    """
    width = x.shape[-1]
    n = width if size is None else size
    split, rest = factors(n), width // n
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64) or x.requires_grad:
        return _plain(x, split, rest, inverse)
    rows = x.detach().reshape(-1, width).contiguous()
    out = torch.empty_like(rows)
    base = _base(split, rest, x.dtype, inverse)
    lanes = split.lanes if rest == 1 else rest
    if x.dtype == torch.float32 and lanes % LANES == 0:
        transform_rows(rows.numpy(), base, lanes, rest == 1, out.numpy())
    else:
        _rows(rows.numpy(), base, _inner(split.lanes if rest == 1 else 1, x.dtype), lanes, out.numpy())
    return out.reshape(x.shape)


@lru_cache(64)
def _base(split: Factors, rest: int, dtype: torch.dtype, inverse: bool) -> np.ndarray:
    """The dense factor, normalized for all factors together."""
    base = base_matrix(split.order)
    if rest > 1:
        # what follows the index that is mixed fills the vector registers; all factors but the blocks are dense
        base = np.kron(base, _sylvester(split.lanes))
    base = (base.T if inverse else base) / np.sqrt(split.blocks * split.order * split.lanes)
    kind = np.float64 if dtype == torch.float64 else np.float32
    return np.ascontiguousarray(base.astype(kind))


@lru_cache(16)
def _inner(lanes: int, dtype: torch.dtype) -> np.ndarray:
    return _sylvester(lanes).astype(np.float64 if dtype == torch.float64 else np.float32)


def _plain(x: Tensor, split: Factors, rest: int, inverse: bool) -> Tensor:
    """The same in torch, for other devices and dtypes; sums run in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = x.to(wide).reshape(-1, split.blocks, split.order, split.lanes, rest)
    base = torch.from_numpy(base_matrix(split.order))
    matrices = [torch.from_numpy(_sylvester(split.blocks)), base.T if inverse else base]
    matrices.append(torch.from_numpy(_sylvester(split.lanes)))
    a, b, c = (matrix.to(x.device, wide) for matrix in matrices)
    mixed: Tensor = torch.einsum("taklr,ab,km,ln->tbmnr", parts, a, b, c)
    return (mixed / (split.blocks * split.order * split.lanes) ** 0.5).reshape(x.shape).to(x.dtype)


@compiled()
def _rows(x: np.ndarray, base: np.ndarray, inner: np.ndarray, lanes: int, out: np.ndarray) -> None:
    """The same for float64 and for fewer lanes than a vector has."""
    tokens, width = x.shape
    order, small = base.shape[0], inner.shape[0]
    step = order * lanes
    chunk = np.empty(lanes, x.dtype)
    for token in range(tokens):
        row, result = x[token], out[token]
        for start in range(0, width, step):
            for column in range(order):
                for lane in range(lanes):
                    chunk[lane] = 0
                for line in range(order):
                    factor = base[line, column]
                    source = row[start + line * lanes : start + (line + 1) * lanes]
                    for lane in range(lanes):
                        chunk[lane] += factor * source[lane]
                target = result[start + column * lanes : start + (column + 1) * lanes]
                if small == 1:
                    for lane in range(lanes):
                        target[lane] = chunk[lane]
                else:
                    for lane in range(lanes):
                        target[lane] = 0
                    for line in range(small):
                        factor = chunk[line]
                        for lane in range(lanes):
                            target[lane] += factor * inner[line, lane]
        span = step
        while span < width:
            for start in range(0, width, 2 * span):
                left = result[start : start + span]
                right = result[start + span : start + 2 * span]
                for place in range(span):
                    a, b = left[place], right[place]
                    left[place], right[place] = a + b, a - b
            span *= 2
