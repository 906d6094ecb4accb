"""Packed matrix products against torch's plain ones."""

from __future__ import annotations

import pytest
import torch

from ifb_handler.models.linear import Linear, gemm_rows, pad_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_linear_is_a_matrix_product_and_a_bias(dtype: torch.dtype, with_bias: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(70, 48).to(dtype), torch.randn(70).to(dtype) if with_bias else None
    linear = Linear(weight, bias)
    for rows in (0, 1, 2, 5, 16, 33):
        x = torch.randn(rows, 48).to(dtype)
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        y = linear(x)
        assert y.dtype == dtype
        tolerance = 1e-4 if dtype == torch.float32 else 0.2
        assert y.shape == (rows, 70)
        assert torch.allclose(y.double(), expected, rtol=0, atol=tolerance)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    linear, x = Linear(torch.randn(200, 96)), torch.randn(64, 96)
    whole = linear(x)
    for rows in (1, 2, 3, 7, 16, 33):
        assert (linear(x[:rows]) - whole[:rows]).abs().max() < 1e-5


def test_rows_are_rounded_up_to_few_sizes_only_where_weights_are_packed() -> None:
    assert all(gemm_rows(rows, packed=False) == rows for rows in range(300))
    sizes = [gemm_rows(rows, packed=True) for rows in range(257)]
    assert all(size >= rows for rows, size in enumerate(sizes))
    assert all(size <= 1.125 * rows + 3 or size - rows < 32 for rows, size in enumerate(sizes))
    assert len(set(sizes)) < 30
    assert sizes == sorted(sizes)


def test_padding_adds_zeros_and_nothing_where_nothing_is_missing() -> None:
    x = torch.ones(3, 2)
    assert pad_rows(x, 3) is x
    assert torch.equal(pad_rows(x, 5), torch.tensor([[1.0, 1.0]] * 3 + [[0.0, 0.0]] * 2))
