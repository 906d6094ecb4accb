"""Linear layers in 8-bit integers: against double precision, whatever the shape, the batch and the threads."""

from __future__ import annotations

import math

import pytest
import torch
from row_bits import assert_rows_keep_their_bits

from ifb_kernels import native
from ifb_kernels.int8_linear import (
    BLOCK,
    LARGEST_CODE,
    Int8Linear,
    int8_linear_reference,
    quantize_rows,
    quantize_weight,
    rotate,
)

SHAPES = [(1, 1), (3, 100), (48, 70), (577, 5), (576, 960), (1536, 576)]


def random_layer(inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)


@pytest.mark.parametrize("inputs", [1, 64, 100, 192])
def test_a_rotation_is_hadamards_matrix_over_blocks_and_its_own_inverse(inputs: int) -> None:
    x = torch.randn(5, inputs, dtype=torch.float64)
    blocks = -(-inputs // BLOCK)
    padded = torch.nn.functional.pad(x, (0, blocks * BLOCK - inputs))
    # Row i and column j meet with the sign of how many bits i and j have in common.
    signs = [[(-1) ** (i & j).bit_count() for j in range(BLOCK)] for i in range(BLOCK)]
    matrix = torch.block_diag(*[torch.tensor(signs, dtype=torch.float64) / math.sqrt(BLOCK)] * blocks)
    torch.testing.assert_close(rotate(x).double(), padded @ matrix, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rotate(rotate(x))[:, :inputs].double(), x, rtol=1e-5, atol=1e-5)


def test_a_code_is_the_nearest_to_its_value() -> None:
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 500).unsqueeze(1)
    codes, scales = quantize_rows(x)
    assert ((codes * scales.unsqueeze(1) - x).abs() <= scales.unsqueeze(1) * (0.5 + 1e-5)).all()
    assert codes.abs().amax(dim=1).eq(LARGEST_CODE).all()


@pytest.mark.parametrize("native_kernel", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_the_product_is_as_near_as_codes_can_be(
    inputs: int, outputs: int, native_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native_kernel:
        monkeypatch.setattr(native, "library", lambda: None)
    weight, bias = random_layer(inputs, outputs)
    linear, x = Int8Linear(weight, bias), torch.randn(203, inputs)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    for rows in (0, 1, 7, 8, 9, 64, 203):
        y = linear(x[:rows])
        assert y.shape == (rows, outputs)
        assert y.dtype == torch.float32
        # Half a step in each channel of a row and of a weight, at worst; independent errors add up as their root.
        step = x[:rows].norm(dim=1, keepdim=True) * weight.norm(dim=1) * (2 / LARGEST_CODE / math.sqrt(inputs)) * 4
        assert ((y.double() - exact[:rows]).abs() <= step + 1e-5).all()


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_native_code_computes_the_definition(inputs: int, outputs: int) -> None:
    if native.library() is None:
        pytest.skip("the native library did not build here")
    weight, bias = random_layer(inputs, outputs)
    x = torch.randn(33, inputs)
    expected = int8_linear_reference(x, *quantize_weight(weight), bias)
    # A value halfway between two codes may be rounded to either.
    assert (Int8Linear(weight, bias)(x) - expected).norm() < 1e-3 * expected.norm()


def test_codes_at_their_limits_do_not_overflow_or_saturate() -> None:
    weight = torch.ones(50, 4096)
    weight[1::2] *= -1
    for x in (torch.ones(9, 4096), -torch.ones(9, 4096)):
        spread = rotate(x)  # one channel a block holds all of it
        expected = torch.nn.functional.linear(x.double(), weight.double())
        torch.testing.assert_close(Int8Linear(weight)(x).double(), expected, rtol=1e-5, atol=1e-3)
        # Rotated back, every channel is at the limit.
        expected = torch.nn.functional.linear(spread.double(), rotate(weight).double())
        torch.testing.assert_close(Int8Linear(rotate(weight))(spread).double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("native_kernel", [True, False])
def test_a_row_is_the_same_bits_whoever_its_neighbours_are_and_however_many_threads_there_are(
    native_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native_kernel:
        monkeypatch.setattr(native, "library", lambda: None)
    weight, bias = random_layer(1200, 200)
    x = torch.randn(64, 1200) * torch.logspace(-3, 3, 64).unsqueeze(1)
    assert_rows_keep_their_bits(Int8Linear(weight, bias), x)


def test_rows_of_zeros_give_the_bias() -> None:
    weight, bias = random_layer(70, 30)
    weight[3] = 0
    x = torch.randn(4, 70)
    x[1] = 0
    y = Int8Linear(weight, bias)(x)
    assert torch.equal(y[1], bias)
    assert (y[:, 3] == bias[3]).all()


@pytest.mark.parametrize("native_kernel", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_does_not_come_back_as_one_and_hurts_no_other_row(
    bad: float, native_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native_kernel:
        monkeypatch.setattr(native, "library", lambda: None)
    weight, bias = random_layer(100, 60)
    x = torch.randn(3, 100)
    x[1, 70] = bad
    y = Int8Linear(weight, bias)(x)
    assert not y[1].isfinite().any()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_may_be_strided_and_in_half_precision(dtype: torch.dtype) -> None:
    weight, bias = random_layer(64, 50)
    linear, x = Int8Linear(weight, bias), torch.randn(9, 80)
    assert torch.equal(linear(x[:, 3:67]), linear(x[:, 3:67].contiguous()))
    assert torch.equal(linear(x[:, :64].t().contiguous().t()), linear(x[:, :64]))
    half = x[:, :64].to(dtype)
    assert linear(half).dtype == dtype
    assert torch.equal(linear(half), linear(half.float()).to(dtype))


def test_a_weight_takes_a_quarter_of_float32() -> None:
    linear = Int8Linear(torch.randn(960, 576), torch.randn(960))
    assert linear.num_bytes == 960 * 576 + 2 * 4 * 960
