"""Memory in large pages: tensors share chunks, which live as long as a tensor in them."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import pytest
import torch

from ifb_kernels import large_pages


def test_tensors_asked_for_one_after_another_lie_side_by_side_and_do_not_overlap() -> None:
    tensors = [large_pages.empty((1000 + i, 3), torch.float32).fill_(i) for i in range(20)]
    for i, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 4096 == 0
        assert torch.equal(tensor, torch.full((1000 + i, 3), float(i)))
    gaps = {b.data_ptr() - a.data_ptr() for a, b in pairwise(tensors)}
    assert gaps <= {12288, 16384}


@pytest.mark.parametrize("num_bytes", [10, 2**20, 40 * 2**20])
def test_a_chunk_is_freed_with_the_last_tensor_in_it(num_bytes: int) -> None:
    large_pages.empty((40 * 2**20,), torch.uint8)  # whatever chunk there was is full now, and this one gone
    first = large_pages.empty((num_bytes,), torch.uint8)
    second = large_pages.empty((num_bytes,), torch.uint8)
    chunk = large_pages._chunks._memory
    assert isinstance(chunk, weakref.ref)
    del first
    gc.collect()
    assert chunk() is not None
    del second
    gc.collect()
    assert chunk() is None


def test_zeros_are_zeros_and_a_copy_is_equal() -> None:
    assert not large_pages.zeros((3, 5), torch.bfloat16).any()
    turned = torch.arange(12).view(3, 4).T
    copied = large_pages.copy(turned)
    assert copied.is_contiguous()
    assert torch.equal(copied, turned)
