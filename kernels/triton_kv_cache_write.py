"""The KV-cache write in Triton: each token's keys and values go to the slot its row's block table gives it."""

# A Triton kernel's arguments are typed at its launch.
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ifb_kernels.layout import LayerKV, RaggedLayout
from ifb_kernels.triton_kv_quantization import store_quantized


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


@triton.jit
def quantized_kv_cache_write_kernel(
    keys,
    values,
    key_pages,
    value_pages,
    key_scales,
    value_scales,
    slot_mapping,
    key_stride,
    value_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
):
    """Program (t, h): head h of token t. Scales are [num_blocks, NUM_KV_HEADS, PAGE_TOKENS]."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    place = (slot // PAGE_TOKENS * NUM_KV_HEADS + head) * PAGE_TOKENS + slot % PAGE_TOKENS
    d = tl.arange(0, PADDED_DIM)
    mask = d < HEAD_DIM
    k = tl.load(keys + token * key_stride + head * HEAD_DIM + d, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(values + token * value_stride + head * HEAD_DIM + d, mask=mask, other=0.0).to(tl.float32)
    store_quantized(k, key_pages + place * HEAD_DIM + d, key_scales + place, mask)
    store_quantized(v, value_pages + place * HEAD_DIM + d, value_scales + place, mask)


def kv_cache_write(keys: torch.Tensor, values: torch.Tensor, pages: LayerKV, layout: RaggedLayout) -> None:
    """Launch the kernel. Arguments as in `AttentionBackend.write`; heads of a token are contiguous."""
    num_tokens, num_kv_heads, head_dim = keys.shape
    if pages.key_scales is not None:
        quantized_kv_cache_write_kernel[(num_tokens, num_kv_heads)](
            keys,
            values,
            *pages.tensors(),
            layout.slot_mapping,
            keys.stride(0),
            values.stride(0),
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            PADDED_DIM=triton.next_power_of_2(head_dim),
            PAGE_TOKENS=pages.keys.shape[2],
            num_warps=1,
        )
        return
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
