"""Rows of a Q8_0 tensor are widened to the bits that the `gguf` package makes of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from ifb_kernels.q8_0 import widen_q8_0, widen_q8_0_reference


@pytest.mark.parametrize("widen", [widen_q8_0, widen_q8_0_reference])
@pytest.mark.parametrize("shape", [(1, 32), (7, 576)])
def test_rows_widen_to_the_bits_of_the_gguf_package(
    widen: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, int]
) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    values[1:2] *= 1e-7  # scales below float16's normal numbers
    stored = quantize(values, GGMLQuantizationType.Q8_0)
    expected = torch.from_numpy(dequantize(stored, GGMLQuantizationType.Q8_0))
    assert torch.equal(widen(torch.from_numpy(stored)), expected)
