"""The definition of right: paged attention and the KV-cache write, one token and one head at a time, in float32.

Slow on purpose. Every other backend is tested against this one. Pages are [num_blocks, block_size, num_kv_heads,
head_dim], for keys and values alike.
"""

from __future__ import annotations

import torch

from ifb_kernels.backend import AttentionBackend
from ifb_kernels.kv_quantization import dequantize, quantize
from ifb_kernels.layout import LayerKV, RaggedLayout, zero_pages


class ReferenceBackend(AttentionBackend):
    """Attention written as its definition. For tests."""

    name = "reference"

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
        block_size = pages.keys.shape[1]
        for token, slot in enumerate(layout.slot_mapping.tolist()):
            page, offset = divmod(slot, block_size)
            if pages.key_scales is None or pages.value_scales is None:
                pages.keys[page, offset] = keys[token]
                pages.values[page, offset] = values[token]
                continue
            pages.keys[page, offset], pages.key_scales[page, offset] = quantize(keys[token], pages.keys.dtype)
            pages.values[page, offset], pages.value_scales[page, offset] = quantize(values[token], pages.values.dtype)

    def attend(
        self,
        queries: torch.Tensor,
        pages: LayerKV,
        layout: RaggedLayout,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        block_size, num_kv_heads = pages.keys.shape[1:3]
        queries_per_kv_head = queries.shape[1] // num_kv_heads
        starts = layout.query_starts.tolist()
        output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        for row, context_len in enumerate(layout.context_lens.tolist()):
            start, end = starts[row], starts[row + 1]
            table = layout.block_tables[row, : -(-context_len // block_size)].long()
            row_keys = _widened(pages.keys, pages.key_scales, table)
            row_values = _widened(pages.values, pages.value_scales, table)
            for token in range(start, end):
                position = context_len - (end - token)
                first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
                for head in range(queries.shape[1]):
                    kv_head = head // queries_per_kv_head
                    scores = row_keys[first : position + 1, kv_head] @ queries[token, head].float() * scale
                    weights = torch.softmax(scores, dim=0)
                    output[token, head] = (weights @ row_values[first : position + 1, kv_head]).to(output.dtype)
        return output


def _widened(pages: torch.Tensor, scales: torch.Tensor | None, table: torch.Tensor) -> torch.Tensor:
    """The tokens of the pages in `table`, one after another: float32 [tokens, num_kv_heads, head_dim]."""
    return dequantize(pages[table], None if scales is None else scales[table]).flatten(0, 1)
