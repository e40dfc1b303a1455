"""GPTQ: columns of a weight matrix are rounded one after the other; those to come make up for each error."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from quant_bench.errors import QuantizationError
from quant_bench.numerics.integers import Grid, round_to_grid

# columns whose errors reach the rest of the matrix in one product
BLOCK = 128

Scales = tuple[Tensor, Tensor]
FindScales = Callable[[Tensor], Scales]


def inverse_factor(second: Float[Tensor, "col col"], damping: float) -> Float[Tensor, "col col"]:
    """Upper Cholesky factor of the inverse of second moments, whose diagonal is raised by `damping` times its mean.

    A feature that was 0 in every calibration token has no second moment: it gets the mean of the others on the
    diagonal, so that its weights are rounded to the nearest, pass no error on, and leave the damping as it is.

    Raises:
        QuantizationError: the damped matrix is not positive definite.
    """
    matrix = second.double().clone()
    diagonal = matrix.diagonal()
    unused = diagonal == 0
    diagonal[unused] = 1.0 if bool(unused.all()) else diagonal[~unused].mean()
    diagonal += damping * diagonal.mean()
    # of the matrix read backwards: its factor, read backwards, is upper, and that one's inverse is what is wanted
    lower, failed = torch.linalg.cholesky_ex(matrix.flip(0, 1))
    if int(failed) or not bool(lower.isfinite().all()):
        raise QuantizationError(
            f"second moments are not positive definite at damping {damping}; raise damping, or calibrate on more tokens"
        )
    return _inverse(lower.flip(0, 1))


def _inverse(upper: Float[Tensor, "col col"]) -> Float[Tensor, "col col"]:
    """Inverse of an upper triangular matrix by halves: a third of the work of solving for every unit vector."""
    size = len(upper)
    if size <= BLOCK:
        unit = torch.eye(size, dtype=upper.dtype, device=upper.device)
        return torch.linalg.solve_triangular(upper, unit, upper=True)
    half = size // 2
    first, last = _inverse(upper[:half, :half]), _inverse(upper[half:, half:])
    result = torch.zeros_like(upper)
    result[:half, :half], result[half:, half:] = first, last
    result[:half, half:] = -(first @ upper[:half, half:]) @ last
    return result


def gptq_codes(
    weight: Float[Tensor, "row col"],
    second: Float[Tensor, "col col"],
    grid: Grid,
    find: FindScales,
    *,
    group: int | None = None,
    act_order: bool = False,
    damping: float = 0.01,
) -> tuple[Int[Tensor, "row col"], Float[Tensor, "row group"], Int[Tensor, "row group"]]:
    """Codes whose products with inputs of these second moments are nearly those of the weights.

    Args:
        weight: output channels in rows.
        second: second moments of the inputs, to any factor.
        grid: codes.
        find: rows of weights -> scale and zero point of each row.
        group: columns a scale; None: one scale a row, found before anything is rounded. Without `act_order` a group's
            scales are found when its turn comes, on weights that make up for the errors so far; with it, at first, so
            that groups stay neighbours in storage whatever the order.
        act_order: round columns in falling order of their second moment.
        damping: see `inverse_factor`.

    Returns:
        Codes on the grid, scales and zero points (row, group).

    Raises:
        QuantizationError: see `inverse_factor`.

    Source: Frantar et al. 2022, algorithm 1, https://arxiv.org/abs/2210.17323; act-order and groups found at first
    are those of its code.
    """
    rows, columns = weight.shape
    size = columns if group is None else group
    groups = -(-columns // size)
    order = torch.arange(columns, device=weight.device)
    if act_order:
        order = torch.argsort(second.diagonal(), descending=True, stable=True)
    upper = inverse_factor(second[order][:, order], damping).float()
    # a column is a row here, so that it is contiguous
    work = weight.float().T[order].contiguous()
    scale = weight.new_ones(groups, rows, dtype=torch.float32)
    zero = torch.zeros(groups, rows, dtype=torch.int32, device=weight.device)
    at_first = act_order or group is None
    for index in range(groups if at_first else 0):
        scale[index], zero[index] = find(weight[:, index * size : (index + 1) * size].float())
    codes = torch.empty_like(work)
    owners = (order // size).tolist()
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        errors = torch.empty_like(work[start:stop])
        for column in range(start, stop):
            index = owners[column]
            if not at_first and column % size == 0:
                # what earlier columns of this block left to the rest of the group has not arrived there yet
                late = work[column : column + size].clone()
                if column + size > stop:
                    late[stop - column :] -= upper[start:column, stop : column + size].T @ errors[: column - start]
                scale[index], zero[index] = find(late.T)
            value = work[column]
            codes[column] = round_to_grid(value, scale[index], zero[index], grid)
            error = (value - (codes[column] - zero[index]) * scale[index]) / upper[column, column]
            work[column + 1 : stop] -= upper[column, column + 1 : stop, None] * error
            errors[column - start] = error
        work[stop:] -= upper[start:stop, stop:].T @ errors
    result = torch.empty_like(codes)
    result[order] = codes
    return result.T.contiguous().to(torch.int32), scale.T.contiguous(), zero.T.contiguous()
