"""The KV-cache write in Triton: each token's keys and values go to the slot its row's block table gives it."""

# A Triton kernel's arguments are typed at its launch.
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ifb_kernels.layout import LayerKV, RaggedLayout


@triton.jit
def kv_cache_write_kernel(
    keys,
    values,
    key_pages,
    value_pages,
    slot_mapping,
    key_stride,
    value_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program t: token t, all its heads. Pages are [num_blocks, NUM_KV_HEADS, PAGE_TOKENS, HEAD_DIM]."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    i = tl.arange(0, BLOCK)
    mask = i < NUM_KV_HEADS * HEAD_DIM
    head = i // HEAD_DIM
    page = slot // PAGE_TOKENS * NUM_KV_HEADS + head
    target = (page * PAGE_TOKENS + slot % PAGE_TOKENS) * HEAD_DIM + i % HEAD_DIM
    k = tl.load(keys + token * key_stride + i, mask=mask)
    v = tl.load(values + token * value_stride + i, mask=mask)
    tl.store(key_pages + target, k.to(key_pages.dtype.element_ty), mask=mask)
    tl.store(value_pages + target, v.to(value_pages.dtype.element_ty), mask=mask)


def kv_cache_write(keys: torch.Tensor, values: torch.Tensor, pages: LayerKV, layout: RaggedLayout) -> None:
    """Launch the kernel. Arguments as in `AttentionBackend.write`; heads of a token are contiguous."""
    num_tokens, num_kv_heads, head_dim = keys.shape
    kv_cache_write_kernel[(num_tokens,)](
        keys,
        values,
        pages.keys,
        pages.values,
        layout.slot_mapping,
        keys.stride(0),
        values.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_TOKENS=pages.keys.shape[2],
        BLOCK=triton.next_power_of_2(num_kv_heads * head_dim),
    )
