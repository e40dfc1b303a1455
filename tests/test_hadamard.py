"""Hadamard matrices are orthogonal and flat; the fast transform is the dense product."""

import numpy as np
import pytest
import torch

from quant_bench.numerics.hadamard import base_matrix, factors, hadamard_matrix, is_known, transform

FLAT = (1, 2, 12, 16, 20, 28, 36, 40, 48, 60, 64, 76, 80, 96, 108, 140, 148, 576, 768, 1536)
OTHER = (3, 9, 15, 18, 43, 90)


@pytest.mark.parametrize("n", FLAT + OTHER)
def test_matrix_is_orthogonal(n: int) -> None:
    matrix = hadamard_matrix(n)
    assert torch.allclose(matrix @ matrix.T, torch.eye(n, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("n", FLAT)
def test_entries_of_a_hadamard_matrix_are_equally_large(n: int) -> None:
    assert torch.allclose(hadamard_matrix(n).abs(), torch.full((n, n), n**-0.5, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("n", OTHER)
def test_entries_are_at_most_a_root_of_two_larger_where_no_hadamard_matrix_is_known(n: int) -> None:
    assert float(hadamard_matrix(n).abs().max()) <= (2.0 / n) ** 0.5 + 1e-12


def test_sizes_of_smollm2_are_split_as_documented() -> None:
    assert factors(576) == (1, 36, 16)
    assert factors(1536) == (8, 12, 16)


def test_orders_without_construction_are_not_called_known() -> None:
    assert not any(is_known(n) for n in (3, 9, 18, 92, 172))
    known = [n for n in range(4, 129, 4) if is_known(n)]
    for n in known:
        base = base_matrix(n)
        assert set(np.unique(base)) == {-1.0, 1.0}
        assert np.array_equal(base @ base.T, n * np.eye(n))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", FLAT + OTHER)
def test_fast_transform_equals_the_dense_product(n: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    dense = hadamard_matrix(n)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    assert torch.allclose(transform(x.to(dtype)).double(), x @ dense, atol=tolerance)
    assert torch.allclose(transform(x.to(dtype), inverse=True).double(), x @ dense.T, atol=tolerance)


@pytest.mark.parametrize(("heads", "dim"), [(4, 12), (9, 64), (12, 16), (2, 20), (32, 3)])
def test_heads_are_mixed_by_the_matrix_of_their_number(heads: int, dim: int) -> None:
    x = torch.randn(5, heads * dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    dense = torch.kron(hadamard_matrix(heads), torch.eye(dim, dtype=torch.float64))
    assert torch.allclose(transform(x, heads), x @ dense, atol=1e-12)
    assert torch.allclose(transform(x, heads, inverse=True), x @ dense.T, atol=1e-12)


@pytest.mark.parametrize("size", [None, 12])
def test_plain_form_agrees_and_lets_gradients_through(size: int | None) -> None:
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(0), requires_grad=True)
    out = transform(x, size)
    assert torch.allclose(out, transform(x.detach(), size), atol=1e-6)
    out.square().sum().backward()
    # an orthogonal map keeps the sum of squares, so its gradient is 2 x
    assert x.grad is not None
    assert torch.allclose(x.grad, 2 * x.detach(), atol=1e-5)


def test_a_row_does_not_depend_on_the_others() -> None:
    x = torch.randn(33, 1536, generator=torch.Generator().manual_seed(0))
    together = transform(x)
    assert torch.equal(together, torch.cat([transform(row[None]) for row in x]))


@pytest.mark.parametrize(
    ("width", "size"),
    [
        (1536, None),
        (15 * 64, None),
        (12 * 64, 12),
        (32 * 32, 32),
        (576, None),
        (2304, None),
        (7 * 64, None),
        (37 * 64, None),
    ],
)
@pytest.mark.parametrize("inverse", [False, True])
def test_vector_form_equals_the_scalar_one(width: int, size: int | None, inverse: bool) -> None:
    x = torch.randn(7, width, generator=torch.Generator().manual_seed(1))
    # float64 rows take the scalar loop
    scalar = transform(x.double(), size, inverse)
    assert float((transform(x, size, inverse) - scalar).abs().max()) < 3e-6


def test_rows_that_are_views_are_transformed_like_their_copies() -> None:
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(1)).T
    wide = torch.randn(4, 100, generator=torch.Generator().manual_seed(2))[:, 3:67]
    assert torch.equal(transform(x), transform(x.contiguous()))
    assert torch.equal(transform(wide), transform(wide.contiguous()))
    assert transform(x.new_zeros(0, 64)).shape == (0, 64)


def test_one_outlier_is_spread_over_all_channels() -> None:
    x = torch.zeros(1, 1536)
    x[0, 7] = 100.0
    assert float(transform(x).abs().max()) == pytest.approx(100.0 / 1536**0.5, rel=1e-5)
