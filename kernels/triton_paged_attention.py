"""Paged attention for ragged batches in Triton: decode rows and prefill chunks in one launch.

FlashAttention-2 (Dao, 2023) over the pages of PagedAttention (Kwon et al., 2023). A program takes a few query tokens of
one row together with all query heads of one KV head (packed on the M axis of its products), so that a key is read once
for all of them. A decode row's long context is cut into splits of fixed positions, which run side by side and are
merged by a second kernel (FlashDecoding); how it is cut depends on nothing but its own context.

Pages are [num_blocks, num_kv_heads, block_size, head_dim], keys and values alike. Scores, softmax and sums are float32;
the two products take their operands in the pages' dtype (float32 ones without TF32 rounding), or in the queries' where
pages are quantized. Codes are widened in registers; a key's scale multiplies its scores, a value's scale its channels.
"""

# A Triton kernel's arguments are typed at its launch.
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ifb_kernels.layout import LayerKV, RaggedLayout
from ifb_kernels.triton_kv_quantization import widen_codes

SPLIT_TOKENS = 1024
_LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["num_rows", "table_stride", "window"])
def paged_attention_kernel(
    output,
    partials,
    queries,
    key_pages,
    value_pages,
    key_scales,
    value_scales,
    query_starts,
    context_lens,
    block_tables,
    num_rows,
    query_stride,
    table_stride,
    scale,
    window,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WIDEN: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """Program (b, h, s): the b-th block of query tokens, KV head h, split s of the context.

    `scale` includes log2(e); `window` is 0 for none. `partials` is float32 [num_rows, NUM_SPLITS, heads, HEAD_DIM + 2]:
    weighted values, maximum (in powers of two) and sum of a decode row's split. WIDEN: multiply in float32 whatever the
    pages hold. QUANTIZED: pages hold codes; otherwise the scales are not read.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    BLOCK_TOKENS: tl.constexpr = BLOCK_M // GROUP
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP

    # The row that owns this block: row r's blocks begin at query_starts[r] // BLOCK_TOKENS + r, which leaves room for
    # each row's last, partial block. The last row that begins at or before `block` is found by bisection.
    low = 0
    high = num_rows
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // BLOCK_TOKENS + middle <= block:
            low = middle + 1
        else:
            high = middle
    row = low - 1
    row_start = tl.load(query_starts + row)
    row_end = tl.load(query_starts + row + 1)
    first_token = row_start + (block - row_start // BLOCK_TOKENS - row) * BLOCK_TOKENS
    if first_token >= row_end:
        return

    context_len = tl.load(context_lens + row)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, PADDED_DIM)
    token = first_token + m // GROUP
    head = kv_head * GROUP + m % GROUP
    in_block = (m < BLOCK_TOKENS * GROUP) & (token < row_end)
    position = context_len - row_end + token
    last_token = tl.minimum(first_token + BLOCK_TOKENS, row_end) - 1

    # The keys that some query of the block sees, from a tile's border on.
    first_position = context_len - row_end + first_token
    first_key = tl.where(window > 0, tl.maximum(first_position - window + 1, 0), 0)
    begin = first_key // BLOCK_N * BLOCK_N
    end = context_len - row_end + last_token + 1
    num_splits = 1
    if NUM_SPLITS > 1:
        if row_end - row_start == 1:
            num_splits = (end - 1) // SPLIT - first_key // SPLIT + 1
            begin = tl.maximum(begin, split * SPLIT)
            end = tl.minimum(end, (split + 1) * SPLIT)
        elif split > 0:
            return
        if begin >= end:
            return

    q = tl.load(
        queries + token[:, None].to(tl.int64) * query_stride + head[:, None] * HEAD_DIM + d[None, :],
        mask=in_block[:, None] & (d[None, :] < HEAD_DIM),
        other=0.0,
    )
    narrow_type = queries.dtype.element_ty if QUANTIZED else key_pages.dtype.element_ty
    product_type = tl.float32 if WIDEN else narrow_type
    q = q.to(product_type)
    table = block_tables + row.to(tl.int64) * table_stride
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        # Other keys are never read: the rest of a page may hold anything, and a page before the window is another's.
        present = (key >= first_key) & (key < end)
        page = tl.load(table + key // PAGE_TOKENS, mask=present, other=0).to(tl.int64)
        at = ((page * NUM_KV_HEADS + kv_head) * PAGE_TOKENS + key % PAGE_TOKENS) * HEAD_DIM
        k = tl.load(key_pages + at[None, :] + d[:, None], mask=present[None, :] & (d[:, None] < HEAD_DIM), other=0.0)
        v = tl.load(value_pages + at[:, None] + d[None, :], mask=present[:, None] & (d[None, :] < HEAD_DIM), other=0.0)
        k = widen_codes(k, product_type)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if QUANTIZED:
            at = (page * NUM_KV_HEADS + kv_head) * PAGE_TOKENS + key % PAGE_TOKENS
            scores = scores * tl.load(key_scales + at, mask=present, other=0.0).to(tl.float32)[None, :]
            value_scale = tl.load(value_scales + at, mask=present, other=0.0).to(tl.float32)
            # Not the weights: in float16 they would fall below what it can tell from 0.
            v = widen_codes(v, tl.float32) * value_scale[:, None]
        v = v.to(product_type)
        visible = present[None, :] & (key[None, :] <= position[:, None])
        visible = visible & ((window <= 0) | (key[None, :] > position[:, None] - window))
        scores = tl.where(visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # finite where nothing is visible yet
        weights = tl.exp2(scores - shift[:, None])
        keep = tl.exp2(highest - shift)
        total = total * keep + tl.sum(weights, 1)
        weighted = weighted * keep[:, None]
        weighted = tl.dot(weights.to(product_type), v, weighted, input_precision="ieee")
        highest = new_highest

    store_mask = in_block[:, None] & (d[None, :] < HEAD_DIM)
    if num_splits == 1:
        total = tl.where(in_block, total, 1.0)
        target = output + (token[:, None].to(tl.int64) * NUM_HEADS + head[:, None]) * HEAD_DIM + d[None, :]
        tl.store(target, (weighted / total[:, None]).to(output.dtype.element_ty), mask=store_mask)
    else:
        partial = partials + ((row * NUM_SPLITS + split).to(tl.int64) * NUM_HEADS + head) * (HEAD_DIM + 2)
        tl.store(partial[:, None] + d[None, :], weighted, mask=store_mask)
        tl.store(partial + HEAD_DIM, highest, mask=in_block)
        tl.store(partial + HEAD_DIM + 1, total, mask=in_block)


@triton.jit(do_not_specialize=["window"])
def merge_splits_kernel(
    output,
    partials,
    query_starts,
    context_lens,
    window,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Program (r, h): merge the splits of decode row r, query head h, in order. Other rows are already whole."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_starts + row)
    if tl.load(query_starts + row + 1) - token != 1:
        return
    context_len = tl.load(context_lens + row)
    first_key = tl.where(window > 0, tl.maximum(context_len - window, 0), 0)
    first_split = first_key // SPLIT
    last_split = (context_len - 1) // SPLIT
    if first_split == last_split:
        return
    d = tl.arange(0, PADDED_DIM)
    highest = float("-inf")
    total = 0.0
    weighted = tl.zeros([PADDED_DIM], tl.float32)
    for split in range(first_split, last_split + 1):
        partial = partials + ((row * NUM_SPLITS + split).to(tl.int64) * NUM_HEADS + head) * (HEAD_DIM + 2)
        split_highest = tl.load(partial + HEAD_DIM)
        new_highest = tl.maximum(highest, split_highest)
        keep = tl.exp2(highest - new_highest)
        take = tl.exp2(split_highest - new_highest)
        total = total * keep + tl.load(partial + HEAD_DIM + 1) * take
        weighted = weighted * keep + tl.load(partial + d, mask=d < HEAD_DIM, other=0.0) * take
        highest = new_highest
    target = output + (token.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + d
    tl.store(target, (weighted / total).to(output.dtype.element_ty), mask=d < HEAD_DIM)


def tile_sizes(group: int, head_dim: int, dtype: torch.dtype, max_query_len: int) -> tuple[int, int]:
    """(BLOCK_M, BLOCK_N): query rows (token and head) and keys of a tile. 16 rows are the least a product takes."""
    least = max(16, triton.next_power_of_2(group))
    block_m = least if max_query_len == 1 else max(least, 32 if head_dim > 128 else 64)
    block_n = 64 if head_dim <= 128 else 32
    if dtype == torch.float32:
        block_n //= (
            2  # keeps a tile's keys and values within 64 KiB, the least shared memory of the GPUs we compile for
        )
    return block_m, block_n


def paged_attention(
    queries: torch.Tensor, pages: LayerKV, layout: RaggedLayout, scale: float, sliding_window: int | None = None
) -> torch.Tensor:
    """Launch the kernels. Arguments and result as in `AttentionBackend.attend`; heads of a token are contiguous."""
    num_tokens, num_heads, head_dim = queries.shape
    num_kv_heads, page_tokens = pages.keys.shape[1:3]
    group = num_heads // num_kv_heads
    num_rows = layout.context_lens.shape[0]
    window = sliding_window or 0
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    quantized = pages.key_scales is not None
    product_dtype = queries.dtype if quantized else pages.keys.dtype
    block_m, block_n = tile_sizes(group, head_dim, product_dtype, layout.max_query_len)
    num_splits = triton.cdiv(layout.max_context_len, SPLIT_TOKENS)
    num_splits = triton.next_power_of_2(num_splits)  # few distinct values: each is compiled once

    output = queries.new_empty(num_tokens, num_heads, head_dim)
    partials = output
    if num_splits > 1:
        shape = (num_rows, num_splits, num_heads, head_dim + 2)
        partials = torch.empty(shape, dtype=torch.float32, device=queries.device)
    grid = (num_tokens // (block_m // group) + num_rows, num_kv_heads, num_splits)
    paged_attention_kernel[grid](
        output,
        partials,
        queries,
        pages.keys,
        pages.values,
        pages.key_scales if quantized else pages.keys,
        pages.value_scales if quantized else pages.values,
        layout.query_starts,
        layout.context_lens,
        layout.block_tables,
        num_rows,
        queries.stride(0),
        layout.block_tables.stride(0),
        scale * _LOG2_E,
        window,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        PAGE_TOKENS=page_tokens,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        SPLIT=SPLIT_TOKENS,
        NUM_SPLITS=num_splits,
        # Tensors lie in main memory only in the interpreter, whose products do not know bfloat16 (triton#11584).
        WIDEN=queries.is_cpu and product_dtype == torch.bfloat16,
        QUANTIZED=quantized,
        num_warps=4,
        num_stages=2,
    )
    if num_splits > 1:
        merge_splits_kernel[(num_rows, num_heads)](
            output,
            partials,
            layout.query_starts,
            layout.context_lens,
            window,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            SPLIT=SPLIT_TOKENS,
            NUM_SPLITS=num_splits,
            num_warps=1,
        )
    return output
