"""Packed matrix products against torch's plain ones, in double precision."""

from __future__ import annotations

import pytest
import torch
from row_bits import assert_rows_keep_their_bits

from ifb_handler.models import linear as linear_module
from ifb_handler.models.linear import Linear, _rounded_up
from ifb_kernels.packed_linear import PackedLinear, can_pack

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.01}

needs_native = pytest.mark.skipif(not can_pack(torch.zeros(1, 1)), reason="the native library did not build here")


def random_layer(inputs: int, outputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return (torch.randn(outputs, inputs) / inputs**0.5).to(dtype), torch.randn(outputs).to(dtype)


def assert_is_the_product(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert y.dtype == weight.dtype
    assert y.shape == expected.shape
    torch.testing.assert_close(y.double(), expected, rtol=TOLERANCE[y.dtype], atol=TOLERANCE[y.dtype])


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_linear_is_a_matrix_product_and_a_bias(
    dtype: torch.dtype, with_bias: bool, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(linear_module, "can_pack", lambda weight: False)
    weight, bias = random_layer(48, 70, dtype)
    linear = Linear(weight, bias if with_bias else None)
    for rows in (0, 1, 2, 5, 16, 33):
        x = torch.randn(rows, 48).to(dtype)
        assert_is_the_product(linear(x), x, weight, bias if with_bias else None)
    assert linear.num_bytes == (48 * 70 + 70 * with_bias) * dtype.itemsize


@pytest.mark.parametrize("native", [True, False])
def test_a_packed_linear_lets_its_weight_go(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(linear_module, "can_pack", lambda weight: False)
    weight, _ = random_layer(48, 70, torch.float32)
    linear, x = Linear(weight), torch.randn(3, 48)
    before = linear(x)
    weight.zero_()
    assert linear.weight is None
    assert torch.equal(linear(x), before)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (48, 70), (577, 5), (576, 960), (1536, 576)])
def test_packed_weights_multiply_at_any_size_and_number_of_rows(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    weight, bias = random_layer(inputs, outputs, dtype)
    linear, x = PackedLinear(weight, bias), torch.randn(203, inputs).to(dtype)
    for rows in (0, 1, 7, 8, 9, 64, 100, 203):
        assert_is_the_product(linear(x[:rows]), x[:rows], weight, bias)


@needs_native
def test_weights_and_rows_may_be_strided() -> None:
    weight, _ = random_layer(64, 50, torch.float32)
    wide, x = torch.cat((weight, weight), dim=1), torch.randn(9, 80)
    assert_is_the_product(PackedLinear(wide[:, 32:96])(x[:, 3:67]), x[:, 3:67], wide[:, 32:96], None)
    assert_is_the_product(PackedLinear(weight)(x[:, :64].t().contiguous().t()), x[:, :64], weight, None)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_whoever_its_neighbours_are_and_however_many_threads_there_are(
    dtype: torch.dtype,
) -> None:
    weight, bias = random_layer(1200, 200, dtype)
    x = torch.randn(64, 1200).to(dtype)
    assert_rows_keep_their_bits(PackedLinear(weight, bias), x)


@needs_native
def test_a_weight_that_cannot_be_packed_is_refused() -> None:
    for weight in (torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, 4).t()[:, ::2]):
        assert not can_pack(weight)
        with pytest.raises(ValueError, match="cannot be packed"):
            PackedLinear(weight)


def test_onednn_meets_few_numbers_of_rows() -> None:
    sizes = [_rounded_up(rows) for rows in range(257)]
    assert all(size >= rows for rows, size in enumerate(sizes))
    assert all(size - rows < 32 and size <= 1.25 * rows + 3 for rows, size in enumerate(sizes))
    assert len(set(sizes)) < 30
    assert sizes == sorted(sizes)
