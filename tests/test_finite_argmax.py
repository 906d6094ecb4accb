"""The greedy choice by the native kernel, against torch's argmax."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from ifb_kernels.finite_argmax import finite_argmax, finite_argmax_reference


@pytest.mark.parametrize("size", [1, 7, 16, 17, 1023, 1024, 1025, 5000, 49_152])
def test_it_is_the_first_of_the_highest(size: int) -> None:
    values = torch.randn(9, size, generator=torch.Generator().manual_seed(size))
    coarse = values.round()  # many are equally high; -0.0 and 0.0 are
    for each in (values, coarse, -values.abs(), coarse * 0, torch.full_like(values, -1e38)):
        assert torch.equal(finite_argmax(each), each.argmax(-1))
    for column in {0, size // 2, size - 1}:
        higher = values.index_fill(1, torch.tensor([column]), 9.0)
        assert finite_argmax(higher).tolist() == [column] * 9


@pytest.mark.parametrize("choose", [finite_argmax, finite_argmax_reference])
@pytest.mark.parametrize("size", [1, 19, 3000])
def test_a_row_that_leaves_no_choice_has_none_and_the_others_are_as_ever(
    choose: Callable[[torch.Tensor], torch.Tensor], size: int
) -> None:
    values = torch.randn(6, size, generator=torch.Generator().manual_seed(1))
    expected = values.argmax(-1)
    expected[:4] = -1
    for column in {0, size // 2, size - 1}:
        spoilt = values.clone()
        spoilt[0, column] = math.nan
        spoilt[1, column] = -math.nan
        spoilt[2, column] = math.inf
        spoilt[3] = -math.inf
        assert torch.equal(choose(spoilt), expected)
    masked = torch.full((1, size), -math.inf)
    masked[0, -1] = -5.0
    assert choose(masked).tolist() == [size - 1]


def test_rows_may_lie_apart_and_there_may_be_none() -> None:
    wide = torch.randn(5, 100)
    assert torch.equal(finite_argmax(wide[:, 20:70]), wide[:, 20:70].argmax(-1))
    assert torch.equal(finite_argmax(wide.T), wide.T.argmax(-1))
    assert finite_argmax(wide[:0]).shape == (0,)
