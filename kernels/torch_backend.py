"""Paged attention in plain torch on any device: gather each row's pages, then scaled dot product attention.

What runs where neither the native library nor Triton can. Pages are [num_blocks, block_size, num_kv_heads, head_dim].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ifb_kernels.backend import AttentionBackend
from ifb_kernels.kv_quantization import dequantize, quantize
from ifb_kernels.layout import LayerKV, RaggedLayout, zero_pages

# Decode rows are gathered and attended together, as many at a time as keep the gathered copy this small.
_GATHERED_TOKENS = 16_384


class TorchBackend(AttentionBackend):
    """Gather + SDPA."""

    name = "torch"

    def allocate(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[LayerKV]:
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        return zero_pages(num_layers, shape, shape, shape[:3], dtype, device)

    def write(self, keys: torch.Tensor, values: torch.Tensor, pages: LayerKV, layout: RaggedLayout) -> None:
        _write_one(keys, pages.keys, pages.key_scales, layout.slot_mapping)
        _write_one(values, pages.values, pages.value_scales, layout.slot_mapping)

    def attend(
        self,
        queries: torch.Tensor,
        pages: LayerKV,
        layout: RaggedLayout,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        query_lens = layout.query_starts.diff()
        decoding = (query_lens == 1).nonzero().flatten()
        group_size = max(1, _GATHERED_TOKENS // max(1, layout.max_context_len))
        for rows in decoding.split(group_size) if decoding.numel() else ():
            tokens = layout.query_starts[rows].long()
            output[tokens] = _attend_rows(queries[tokens].unsqueeze(1), rows, pages, layout, scale, sliding_window)[
                :, 0
            ]
        for row in (query_lens > 1).nonzero():
            start, end = layout.query_starts[row.item()].item(), layout.query_starts[row.item() + 1].item()
            chunk = queries[start:end].unsqueeze(0)
            output[start:end] = _attend_rows(chunk, row, pages, layout, scale, sliding_window)[0]
        return output


def _write_one(tokens: torch.Tensor, pages: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor) -> None:
    """Store keys or values [T, num_kv_heads, head_dim]."""
    if scales is None:
        tokens = tokens.to(pages.dtype)
    else:
        tokens, token_scales = quantize(tokens, pages.dtype)
        scales.flatten(0, 1).index_copy_(0, slots, token_scales)
    pages.flatten(0, 1).index_copy_(0, slots, tokens)


def _read_some(pages: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
    """Keys or values at `slots` [N, S] -> float32 [N, num_kv_heads, S, head_dim]."""
    tokens = pages.flatten(0, 1)[slots]
    return dequantize(tokens, None if scales is None else scales.flatten(0, 1)[slots]).transpose(1, 2)


def _attend_rows(
    queries: torch.Tensor,
    rows: torch.Tensor,
    pages: LayerKV,
    layout: RaggedLayout,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Attention of `queries` [N, Q, H, D], the last Q positions of each of `rows` [N] -> [N, Q, H, D]."""
    num_rows, query_len, num_heads, head_dim = queries.shape
    block_size, num_kv_heads = pages.keys.shape[1:3]
    context_lens = layout.context_lens[rows].long().unsqueeze(1)
    # Each row's visible keys are taken from its first visible position on, so that a window is all that is gathered.
    first_query = context_lens - query_len
    first_key = first_query * 0 if sliding_window is None else (first_query - sliding_window + 1).clamp(min=0)
    width = int((context_lens - first_key).max())
    key_positions = first_key + torch.arange(width, device=rows.device)
    query_positions = first_query + torch.arange(query_len, device=rows.device)
    visible = key_positions.unsqueeze(1) <= query_positions.unsqueeze(2)
    if sliding_window is not None:
        visible &= key_positions.unsqueeze(1) > query_positions.unsqueeze(2) - sliding_window

    # Shorter rows repeat their last token: masked out, but real memory that this row owns.
    stored = torch.minimum(key_positions, context_lens - 1)
    page = layout.block_tables[rows].long().gather(1, stored // block_size)
    slots = page * block_size + stored % block_size
    keys = _read_some(pages.keys, pages.key_scales, slots)
    values = _read_some(pages.values, pages.value_scales, slots)

    # The query heads of one KV head become more queries of that head: [N, Hkv, group * Q, D].
    group = num_heads // num_kv_heads
    packed = queries.float().view(num_rows, query_len, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    mask = visible.unsqueeze(1).expand(-1, group, -1, -1).reshape(num_rows, 1, group * query_len, width)
    attended = F.scaled_dot_product_attention(packed.flatten(2, 3), keys, values, attn_mask=mask, scale=scale)
    attended = attended.view(num_rows, num_kv_heads, group, query_len, head_dim).permute(0, 3, 1, 2, 4)
    return attended.reshape(num_rows, query_len, num_heads, head_dim).to(queries.dtype)
