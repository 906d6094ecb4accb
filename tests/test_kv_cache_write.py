"""The KV-cache write on CPU against its definition: the same tokens lie in the same slots of the pages."""

from __future__ import annotations

import pytest
import torch

from ifb_kernels.backend import select_backend
from ifb_kernels.layout import LayerKV, RaggedLayout
from ifb_kernels.synthetic import synthetic_batch

CPU = torch.device("cpu")
ROWS = [(1, 1), (16, 16), (1, 17), (5, 40), (33, 64), (1, 128)]


def as_reference(pages: LayerKV, name: str) -> LayerKV:
    """The pages' values in the reference's order of axes: [num_blocks, block_size, num_kv_heads, head_dim]."""
    if name != "cpu":
        return pages
    return LayerKV(pages.keys.permute(0, 3, 1, 2), pages.values.permute(0, 2, 1, 3))


@pytest.mark.parametrize("name", ["cpu", "torch"])
@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize("head_dim", [64, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_lie_where_the_slots_say_and_nothing_else_changes(
    name: str, block_size: int, head_dim: int, dtype: torch.dtype, page_dtype: torch.dtype
) -> None:
    batch = synthetic_batch(ROWS, num_heads=3, num_kv_heads=3, head_dim=head_dim, block_size=block_size, dtype=dtype)
    written = {}
    for each in ("reference", name):
        pages = batch.fill(select_backend(CPU, each), page_dtype)
        written[each] = as_reference(pages, each)
    for actual, expected in zip(written[name].tensors(), written["reference"].tensors(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_keys_and_values_may_be_views_of_a_fused_projection(name: str) -> None:
    batch = synthetic_batch(ROWS, num_heads=2, num_kv_heads=2, head_dim=32)
    backend = select_backend(CPU, name)
    expected = batch.fill(backend)
    fused = torch.full((batch.keys.shape[0], 6 * 32), float("nan"))
    keys, values = fused[:, 64:128].view(-1, 2, 32), fused[:, 128:].view(-1, 2, 32)
    keys.copy_(batch.keys)
    values.copy_(batch.values)
    pages = LayerKV(torch.full_like(expected.keys, float("nan")), torch.full_like(expected.values, float("nan")))
    backend.write(keys, values, pages, batch.history)
    for actual, wanted in zip(pages.tensors(), expected.tensors(), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)


def test_scattered_slots_are_written_one_by_one() -> None:
    backend = select_backend(CPU, "cpu")
    (pages,) = backend.allocate(1, 4, 16, 1, 8, torch.float32, CPU)
    slots = torch.tensor([17, 16, 63, 0, 1, 2, 48])
    keys, values = torch.randn(7, 1, 8), torch.randn(7, 1, 8)
    nothing = torch.zeros(1, dtype=torch.int32)
    backend.write(keys, values, pages, RaggedLayout(nothing, nothing, nothing, slots, 1, 1))
    assert torch.equal(pages.keys.permute(0, 3, 1, 2).flatten(0, 1)[slots], keys)
    assert torch.equal(pages.values.permute(0, 2, 1, 3).flatten(0, 1)[slots], values)
    assert pages.keys.count_nonzero() == keys.numel()
